"""Checkpoint files written by hand, opcode by opcode, and what they try to reach."""

import builtins
import io
import pickle
import types
import zipfile

import torch
from mmengine.logging import HistoryBuffer, history_buffer


class Global:
    def __init__(self, name):
        self.module, _, self.name = name.rpartition(':')


class Call:
    def __init__(self, function, *args):
        self.function, self.args = function, args


class New(Call):
    """``function.__new__(function, *args)``"""


class SetItems:
    def __init__(self, target, items):
        self.target, self.items = target, items


class Append:
    def __init__(self, target, *items):
        self.target, self.items = target, items


class Build:
    def __init__(self, target, state):
        self.target, self.state = target, state


class Storage:
    """A persistent id of float32 numbers; ``length`` is what the file claims."""

    def __init__(self, length, key='0', tag='storage', kind='torch:FloatStorage'):
        self.length, self.key, self.tag, self.kind = length, key, tag, kind


def opcodes(node):
    """The pickle, in protocol 2, that makes ``node``."""
    many = lambda nodes: b''.join(map(opcodes, nodes))  # noqa: E731
    if isinstance(node, Global):
        return b'c' + node.module.encode() + b'\n' + node.name.encode() + b'\n'
    if isinstance(node, Call):
        return opcodes(node.function) + opcodes(node.args) + (b'\x81' if isinstance(node, New) else b'R')
    if isinstance(node, SetItems):
        return opcodes(node.target) + b'(' + many(x for item in node.items.items() for x in item) + b'u'
    if isinstance(node, Append):
        return opcodes(node.target) + b'(' + many(node.items) + b'e'
    if isinstance(node, Build):
        return opcodes(node.target) + opcodes(node.state) + b'b'
    if isinstance(node, Storage):
        return opcodes((node.tag, Global(node.kind), node.key, 'cpu', node.length)) + b'Q'
    if isinstance(node, tuple):
        return b'(' + many(node) + b't'
    if isinstance(node, list):
        return b'](' + many(node) + b'e'
    if isinstance(node, dict):
        return b'}(' + many(x for item in node.items() for x in item) + b'u'
    return pickle.dumps(node, 2)[2:-1]  # a number or string


def write(path, node, records=None, compress=False):
    """A file in the format of torch 1.6 and later, as ``node`` says."""
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.writestr('x/data.pkl', b'\x80\x02' + opcodes(node) + b'.')
        archive.writestr('x/version', b'3\n')
        for key, data in (records or {}).items():
            archive.writestr(f'x/{key}', data)
    return path


def write_stream(path, node):
    """The same in the format before torch 1.6."""
    parts = [0x1950A86A20F9469CFC6C, 1001, dict(little_endian=True)]
    with io.BytesIO() as file:
        for part in parts:
            pickle.dump(part, file, protocol=2)
        file.write(b'\x80\x02' + opcodes(node) + b'.')
        pickle.dump([], file, protocol=2)
        path.write_bytes(file.getvalue())
    return path


def snapshot():
    """What a file might have changed: HistoryBuffer, its statistics and its module, builtins, torch."""
    spaces = (history_buffer, HistoryBuffer, builtins, torch, torch.serialization, torch.Tensor)
    found = {
        f'{s.__name__}.{k}': id(v) for s in spaces for k, v in vars(s).items() if not isinstance(v, types.ModuleType)
    }
    return {**found, 'statistics': dict(HistoryBuffer._statistics_methods), 'np': id(history_buffer.np)}


GETATTR = Global('__builtin__:getattr')
HISTORY = Global('mmengine.logging.history_buffer:HistoryBuffer')
BUILTINS = Call(GETATTR, GETATTR, '__self__')
GLOBALS = Call(GETATTR, Call(GETATTR, HISTORY, '__init__'), '__globals__')
ARRAY = Call(Global('numpy.core.multiarray:_reconstruct'), Global('numpy:ndarray'), (0,), 'b')
TENSOR = Global('torch._utils:_rebuild_tensor_v2')
PARAMETER = Global('torch.nn.parameter:Parameter')


def code(path):
    """A program in the file writes ``path``: HistoryBuffer's own ``len`` is exec by then."""
    return (
        SetItems(GLOBALS, dict(len=Call(GETATTR, BUILTINS, 'exec'))),
        Call(HISTORY, f'open({str(path)!r}, "w")', []),
    )


def attempts(path):
    """name -> what the file holds."""
    write_it = (str(path), 'w')
    tensor = Call(TENSOR, Storage(1), 0, (1,), (1,), False, {})
    return dict(
        system=Call(Global('posix:system'), f'touch {path}'),
        open=Call(Global('io:open'), *write_it),
        exec_through_globals=code(path),
        global_overwritten=SetItems(GLOBALS, dict(np=None)),
        statistics_overwritten=Build(New(HISTORY), dict(statistics_methods=dict(mean=Global('torch:Size')))),
        statistics_reached=SetItems(Call(GETATTR, HISTORY, '_statistics_methods'), dict(mean=1)),
        class_attribute=Build(HISTORY, dict(update=1)),
        class_items=SetItems(HISTORY, dict(update=1)),
        getattr_itself=GETATTR,
        getattr_class=Call(GETATTR, New(HISTORY), '__class__'),
        getattr_init=Call(GETATTR, HISTORY, '__init__'),
        getattr_reduce=Call(GETATTR, HISTORY, '__reduce__'),
        getattr_of_data=Call(GETATTR, {'a': 1}, 'clear'),
        getattr_of_a_string=Call(GETATTR, 'mmengine.logging.history_buffer.HistoryBuffer', 'mean'),
        statistic_as_value=dict(mean=Call(GETATTR, HISTORY, 'mean')),
        class_as_value=dict(cls=HISTORY),
        call_of_a_string=Call('torch.Size', (1,)),
        call_of_a_call=Call(Call(GETATTR, HISTORY, 'mean'), New(HISTORY)),
        call_of_a_dict=Call({}, 1),
        new_of_a_function=New(GETATTR, HISTORY, 'mean'),
        new_of_a_tensor=New(PARAMETER, tensor),
        items_of_a_buffer=SetItems(New(HISTORY), dict(max_length=1)),
        items_of_an_array=SetItems(ARRAY, {0: 1}),
        items_of_a_tensor=SetItems(tensor, {0: 1.0}),
        append_to_a_tuple=Append((1,), 2),
        append_to_a_buffer=Append(New(HISTORY), 2),
        state_of_a_dict=Build({}, dict(keys=1)),
        state_of_a_tensor=Build(tensor, dict(is_floating_point=1)),
        state_of_an_ordered_dict=Build(Call(Global('collections:OrderedDict')), dict(items=1)),
        metadata_that_is_none=Build(Call(Global('collections:OrderedDict')), dict(_metadata=dict(a=GETATTR))),
        parameter_with_a_class=Call(
            Global('torch._tensor:_rebuild_from_type_v2'), GETATTR, PARAMETER, (HISTORY, '__dict__'), {}
        ),
        type_of_a_tensor=Call(
            Global('torch._tensor:_rebuild_from_type_v2'), TENSOR, HISTORY, (Storage(1), 0, (1,), (1,), False, {}), {}
        ),
        wrapper_subclass=Call(Global('torch._utils:_rebuild_wrapper_subclass'), HISTORY),
        object_array=Build(ARRAY, (1, (1,), Call(Global('numpy:dtype'), 'O8', False, True), False, [GETATTR])),
        pointers_as_an_array=Build(
            ARRAY,
            (
                1,
                (1,),
                Build(Call(Global('numpy:dtype'), 'V8', False, True), (3, '|', None, ('f',), {}, 8, 1, 0)),
                False,
                'x' * 8,
            ),
        ),
        dtype_changed=Build(Call(Global('numpy:dtype'), 'f8', False, True), (3, '>', None, None, None, -1, -1, 0)),
        array_subclass=Call(Global('numpy.core.multiarray:_reconstruct'), HISTORY, (0,), 'b'),
        array_of_another_size=Build(ARRAY, (1, (9,), Call(Global('numpy:dtype'), 'f8', False, True), False, 'x' * 8)),
        array_made_at_once=Call(
            Global('numpy.core.multiarray:_reconstruct'), Global('numpy:ndarray'), (2**40,), 'b', 1
        ),
        buffer_of_lists=Build(New(HISTORY), dict(_log_history=[1], _count_history=[1], max_length=1)),
        buffer_with_more=Build(New(HISTORY), dict(_log_history=ARRAY, _count_history=ARRAY, max_length=1, update=1)),
        tensor_beyond_its_storage=Call(TENSOR, Storage(1), 0, (2**20,), (1,), False, {}),
        tensor_before_its_storage=Call(TENSOR, Storage(1), -1, (1,), (1,), False, {}),
        tensor_backwards=Call(TENSOR, Storage(1), 0, (2,), (-1,), False, {}),
        tensor_of_no_storage=Call(TENSOR, HISTORY, 0, (1,), (1,), False, {}),
        storage_beyond_its_record=Call(TENSOR, Storage(2**20), 0, (2**20,), (1,), False, {}),
        storage_of_a_module=Storage(1, tag='module'),
        storage_of_a_class=Storage(1, kind='mmengine.logging.history_buffer:HistoryBuffer'),
        storage_elsewhere=Call(TENSOR, Storage(1, key='../../../../etc/passwd'), 0, (1,), (1,), False, {}),
        key_that_is_a_tensor=Call(Global('builtins:set'), [tensor]),
        deep_key=Call(Global('builtins:set'), [((((1,),),),)]),
        attribute_by_dots=Global('torch:serialization.os.system'),
        module_by_dots=Global('mmengine.logging.history_buffer:HistoryBuffer.__init__.__globals__'),
    )

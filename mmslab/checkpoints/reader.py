"""What ``torch.save`` wrote, read as data.

A checkpoint is a pickle, and a pickle is a program: it names objects of this process, calls them and sets their items and
attributes. ``torch.load(weights_only=True)`` keeps it from most of that, but not from all: before torch 2.6 it can be got round
(CVE-2025-32434), and what mmengine writes needs ``getattr``, which reaches every module. Here a file reaches nothing:

* a name in it stays a name (:class:`_Name`), and those that no table below has end the reading;
* a call of a name makes data, by the function that the table has for it, from data;
* items go into lists, dicts and sets, and state into arrays and HistoryBuffers, that the file itself began;
* the sizes that it claims are checked against its own before memory is taken.

The formats are those of torch 1.6 and later (a zip of ``data.pkl`` and one record for each storage) and of torch 0.4 to 1.5 (one
stream, ``_use_new_zipfile_serialization=False``), in pickle protocols 2 to 5: see ``torch/serialization.py``.
"""

import io
import math
import os
import pickletools
import re
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import Tensor

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the stream format
_HISTORY = 'mmengine.logging.history_buffer.HistoryBuffer'
_ONE_CYCLE = 'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler'
_METHODS = (
    frozenset(  # what mmengine saves beside its data; what is built from a config has its own, so these are left out
        [f'{_HISTORY}.{name}' for name in ('min', 'max', 'mean', 'current')]
        + [f'{_ONE_CYCLE}.{name}' for name in ('_annealing_cos', '_annealing_linear')]
    )
)
_SCALARS = (str, bytes, int, float, bool, complex, type(None))


class NotPlainError(Exception):
    """The file names something that is no data: an object of Python code."""


class NotDenseError(Exception):
    """The file has a tensor that holds more than numbers in memory; the message names it and how to mend it."""


class NewerDtypeError(Exception):
    """The file has a tensor of a dtype that this torch lacks: its name, and the version that it came with."""

    def __init__(self, dtype: str, since: str) -> None:
        super().__init__(dtype, since)
        self.dtype, self.since = dtype, since


class _Name(str):
    """'module.name' in a file; inert."""


class _Storage(NamedTuple):
    """The bytes of tensors; ``length`` counts elements."""

    dtype: torch.dtype
    length: int
    data: Tensor


class _NotDense(NamedTuple):
    """Stands where a tensor was that is not read."""

    kind: str
    remedy: str


def read(path: str) -> Any:
    """Reads a checkpoint file into tensors on the CPU, NumPy arrays, HistoryBuffers, and plain containers of them.

    Parameters come as tensors; attributes that tensors were given, and whether they require gradients, are left out.

    Raises:
        NotPlainError: If it names anything else.
        NotDenseError: If it has sparse, quantized, nested or meta tensors.
        NewerDtypeError: If it has tensors of a dtype that this torch lacks.
        Exception: Of many types, if it is damaged or no checkpoint.
    """
    with open(path, 'rb') as file:
        is_zip = file.read(4) == b'PK\x03\x04'
        file.seek(0)
        content = _read_zip(file) if is_zip else _read_stream(file)
    _check_plain(content)
    return content


def _read_zip(file: BinaryIO) -> Any:
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if any(n.endswith('/constants.pkl') for n in names):
            raise ValueError('it is a TorchScript program')
        (pickled,) = [n for n in names if re.fullmatch(r'[^/]+/data\.pkl', n)] or [None]
        if pickled is None:
            raise ValueError('it is a zip archive without data.pkl')
        root = pickled[: -len('data.pkl')]
        storages: Dict[str, Tensor] = {}

        def record(name: str) -> zipfile.ZipInfo:  # torch.save does not compress, so nothing is larger than the file
            info = archive.getinfo(root + name)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
                raise ValueError(f'record {name!r} has not the size that it claims')
            return info

        order = archive.read(record('byteorder')).decode() if root + 'byteorder' in names else 'little'
        if order != sys.byteorder:
            raise ValueError(f'it was written on a {order}-endian machine')

        def storage(kind: torch.dtype, key: str, device: str, length: int) -> _Storage:
            nbytes = length * _itemsize(kind)
            if key not in storages:
                info = record(f'data/{key}')
                storages[key] = torch.empty(info.file_size, dtype=torch.uint8)
                with archive.open(info) as f:
                    _fill(f, storages[key])
            if storages[key].numel() != nbytes:
                raise ValueError(f'storage {key!r} has not the size that it claims')
            return _Storage(kind, length, storages[key])

        return _Unpickler(io.BytesIO(archive.read(record('data.pkl'))), storage).load()


def _read_stream(file: BinaryIO) -> Any:
    size = os.fstat(file.fileno()).st_size

    def plain() -> Any:
        return _Unpickler(file, None).load()

    if plain() != _MAGIC or plain() != _VERSION:
        raise ValueError('it does not begin as torch.save begins')
    if not plain().get('little_endian', True) or sys.byteorder != 'little':
        raise ValueError('it was written on a machine of another byte order')
    storages: Dict[str, _Storage] = {}

    def storage(kind: torch.dtype, key: str, device: str, length: int, view: None = None) -> _Storage:
        if key not in storages:
            claimed = length * _itemsize(kind) + sum(s.data.numel() for s in storages.values())
            if view is not None or not 0 <= claimed <= size:
                raise ValueError(f'storage {key!r} has not the size that it claims')
            storages[key] = _Storage(kind, length, torch.empty(length * _itemsize(kind), dtype=torch.uint8))
        if storages[key][:2] != (kind, length):
            raise ValueError(f'storage {key!r} has not the size that it claims')
        return storages[key]

    content = _Unpickler(file, storage).load()
    keys = plain()
    if sorted(keys) != sorted(storages):
        raise ValueError('its storages are not those of its tensors')
    for key in keys:
        if struct.unpack('<q', file.read(8)) != (storages[key].length,):
            raise ValueError(f'storage {key!r} has not the size that it claims')
        _fill(file, storages[key].data)
    return content


def _fill(file: BinaryIO, data: Tensor) -> None:
    view, done = memoryview(data.numpy()), 0
    while done < len(view):
        read = file.readinto(view[done : done + 2**24])
        if not read:
            raise EOFError('it ends within a tensor')
        done += read


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


class _Unpickler:
    """Runs the pickle that ``file`` goes on with, up to its end; ``storage`` gives the bytes that it refers to."""

    def __init__(self, file: BinaryIO, storage: Callable[..., _Storage]) -> None:
        self.file, self.storage = file, storage
        self.stack: List[Any] = []
        self.marks: List[int] = []
        self.memo: Dict[int, Any] = {}

    def load(self) -> Any:
        for opcode, arg, _ in pickletools.genops(self.file):
            name = opcode.name
            if name in _VALUES:
                self.stack.append(arg)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                self.stack.append(tuple(self.pop(_TUPLES[name])))
            elif name in ('BINPUT', 'LONG_BINPUT', 'MEMOIZE'):
                self.memo[len(self.memo) if arg is None else arg] = self.stack[-1]
            elif name in ('BINGET', 'LONG_BINGET'):
                self.stack.append(self.memo[arg])
            elif name == 'STOP':
                (content,) = self.stack
                return content
            elif hasattr(self, name):  # the others are the methods in capitals below
                getattr(self, name)(arg)
            elif name not in ('PROTO', 'FRAME'):
                raise ValueError(f'it has the pickle opcode {name}, which torch.save does not write')
        raise EOFError('its pickle has no end')

    def pop(self, number: int) -> List[Any]:
        if number > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise ValueError('its pickle takes more than it has put')
        taken = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return taken

    def pop_mark(self) -> List[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def MARK(self, arg: None) -> None:
        self.marks.append(len(self.stack))

    def TUPLE(self, arg: None) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def FROZENSET(self, arg: None) -> None:
        self.stack.append(frozenset(map(_key, self.pop_mark())))

    def APPEND(self, arg: None) -> None:
        self.append(self.pop(1))

    def APPENDS(self, arg: None) -> None:
        self.append(self.pop_mark())

    def append(self, items: List[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f'it appends to a {type(self.stack[-1]).__name__}')
        self.stack[-1].extend(items)

    def ADDITEMS(self, arg: None) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise ValueError(f'it adds to a {type(self.stack[-1]).__name__}')
        self.stack[-1].update(map(_key, items))

    def SETITEM(self, arg: None) -> None:
        self.set_items(self.pop(2))

    def SETITEMS(self, arg: None) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: List[Any]) -> None:
        if type(self.stack[-1]) not in (dict, OrderedDict):
            raise ValueError(f'it sets items of a {type(self.stack[-1]).__name__}')
        for key, value in zip(items[::2], items[1::2]):
            self.stack[-1][_key(key)] = value

    def GLOBAL(self, arg: str) -> None:
        self.stack.append(_find(*arg.split(' ', 1)))

    def STACK_GLOBAL(self, arg: None) -> None:
        self.stack.append(_find(*self.pop(2)))

    def NEWOBJ(self, arg: None) -> None:
        name, args = self.pop(2)
        if name != _HISTORY or type(name) is not _Name or args != ():
            raise NotPlainError(str(name))
        self.stack.append(HistoryBuffer())

    def REDUCE(self, arg: None) -> None:
        function, args = self.pop(2)
        self.stack.append(_call(function, args))

    def BUILD(self, arg: None) -> None:
        (state,) = self.pop(1)
        target = self.stack[-1]
        for kind, build in _STATES.items():
            if type(target) is kind or (kind is np.dtype and isinstance(target, np.dtype)):
                build(target, state)
                return
        raise ValueError(f'it sets the state of a {type(target).__name__}')

    def BINPERSID(self, arg: None) -> None:
        (tag, kind, *rest) = self.pop(1)[0]
        if tag != 'storage' or self.storage is None or kind not in _STORAGES or type(kind) is not _Name:
            raise ValueError('it refers to something that is no storage')
        key, device, length = rest[:3]
        if type(key) is not str or type(length) is not int or length < 0:
            raise ValueError('it refers to something that is no storage')
        self.stack.append(self.storage(_STORAGES[kind], *rest))


def _find(module: str, name: str) -> Any:
    module = 'builtins' if module == '__builtin__' else module  # as protocol 2 writes it
    found = _Name(f'{module}.{name}')
    if found in _DTYPES:
        return _DTYPES[found]
    if found in _SINCE:
        raise NewerDtypeError(found, _SINCE[found])
    if found not in _CALLS and found not in _STORAGES and found not in _ARGUMENTS:
        raise NotPlainError(found)
    return found


def _call(function: Any, args: Any) -> Any:
    if type(function) is not _Name or function not in _CALLS or type(args) is not tuple:
        raise NotPlainError(str(function))
    return _CALLS[function](*args)


def _key(key: Any) -> Any:
    """``key``, if it can be one without code being run or the stack running out."""
    if type(key) in _SCALARS or (type(key) is tuple and all(type(k) in _SCALARS for k in key)):
        return key
    raise ValueError(f'it has a {type(key).__name__} as a key')


def _check_plain(content: Any) -> None:
    """Raises unless all that is in ``content`` is data: a name may be read, as an argument, but not come out.

    The function that a OneCycleLR has in its state is taken out of it: mmengine resumes into one that has its own.
    """
    seen, rest = set(), [(content, None)]
    while rest:
        node, key = rest.pop()
        kind = type(node)
        if kind is _NotDense:
            raise NotDenseError(f'a {node.kind} tensor{"" if key is None else f" at {key!r}"}, {node.remedy}')
        if kind not in _CONTAINERS:
            if kind not in _LEAVES and not isinstance(node, np.generic):
                raise NotPlainError(str(node) if kind is _Name else kind.__name__)
        elif id(node) not in seen:
            seen.add(id(node))
            if (
                kind is dict
                and type(node.get('anneal_func')) is _Name
                and node['anneal_func'].startswith(_ONE_CYCLE + '._')
            ):
                del node['anneal_func']
            rest += [(v, k) for k, v in node.items()] if isinstance(node, dict) else [(v, key) for v in node]


# --- what names make when a file calls them ---


def _tensor(storage: _Storage, offset: int, size: Tuple[int, ...], stride: Tuple[int, ...], *rest: Any) -> Any:
    """``torch._utils._rebuild_tensor_v2(..., requires_grad, backward_hooks, metadata)``; of those three none matters."""
    if len(rest) > 2 and rest[2]:
        return _NotDense('conjugated or negated', 'which is lazy: save .resolve_conj().resolve_neg() of it')
    return _view(storage, storage.dtype, offset, size, stride)


def _tensor_v3(
    storage: _Storage, offset: int, size: tuple, stride: tuple, grad: Any, hooks: Any, dtype: torch.dtype, *rest: Any
) -> Tensor:
    """Of a dtype that has no storage class: the storage is one of bytes."""
    if type(dtype) is not torch.dtype:
        raise ValueError('it has a tensor without a dtype')
    return _view(storage, dtype, offset, size, stride)


def _view(storage: _Storage, dtype: torch.dtype, offset: int, size: tuple, stride: tuple) -> Tensor:
    if (
        type(storage) is not _Storage
        or len(size) != len(stride)
        or any(type(n) is not int for n in (offset, *size, *stride))
    ):
        raise ValueError('it has a tensor that is none')
    last = offset + sum((n - 1) * s for n, s in zip(size, stride)) if 0 not in size else -1
    length = storage.data.numel() // _itemsize(dtype)
    if min((offset, *size, *stride)) < 0 or last >= length or math.prod(max(n, 1) for n in size) >= 2**62:
        raise ValueError('it has a tensor that reaches out of its storage')
    return torch.empty(0, dtype=dtype).set_(storage.data.untyped_storage(), offset, tuple(size), tuple(stride))


def _parameter(data: Any, *rest: Any) -> Any:
    if type(data) not in (Tensor, _NotDense):
        raise ValueError('it has a parameter that is no tensor')
    return data


def _with_attributes(function: _Name, kind: _Name, args: tuple, state: Any) -> Tensor:
    if type(kind) is not _Name or kind not in ('torch.Tensor', 'torch.nn.parameter.Parameter'):
        raise NotPlainError(str(kind))
    return _parameter(_call(function, args))


def _not_dense(kind: str, remedy: str) -> Callable[..., _NotDense]:
    return lambda *args: _NotDense(kind, remedy)


def _ordered(items: Any = ()) -> OrderedDict:
    return OrderedDict((_key(k), v) for k, v in items)


def _counter(counts: Any = ()) -> Counter:
    return Counter(_ordered(counts.items() if type(counts) is dict else counts))


def _encode(text: str, encoding: str = 'utf-8') -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ('latin1', 'latin-1', 'utf-8', 'ascii'):
        raise ValueError('it has bytes that are none')
    return text.encode(encoding)


def _bytearray(*args: Any) -> bytearray:
    if not args or type(args[0]) is bytes:
        return bytearray(*args)
    return bytearray(_encode(*args))


def _method(owner: _Name, name: str) -> _Name:
    """``getattr`` of mmengine's own, as protocol 2 writes methods: a name, never the method."""
    found = _Name(f'{owner}.{name}')
    if type(owner) is not _Name or found not in _METHODS:
        raise NotPlainError(f'builtins.getattr({owner}, {name!r})')
    return found


def _history(buffer: HistoryBuffer, state: dict) -> None:
    """Values, counts and ``max_length``; the statistics are those that HistoryBuffer has here."""
    logs, counts, length = (state.pop(k) for k in ('_log_history', '_count_history', 'max_length'))
    methods = state.pop('statistics_methods', {})
    if any(type(m) is not _Name or m != f'{_HISTORY}.{name}' for name, m in methods.items()):
        raise NotPlainError(f"statistics of a HistoryBuffer that are not mmengine's: {', '.join(map(str, methods))}")
    arrays = all(type(a) is np.ndarray and a.ndim == 1 and len(a) == len(logs) for a in (logs, counts))
    if state or not arrays or type(length) is not int or length < 1:
        raise ValueError('it has a HistoryBuffer that is none')
    buffer._log_history, buffer._count_history, buffer.max_length = logs, counts, length


def _dtype(name: str, align: bool = False, copy: bool = True) -> np.dtype:
    if type(name) is not str or not re.fullmatch(r'[<|=]?[biufc]\d\d?', name):
        raise NotPlainError(f'numpy.dtype({name!r})')  # objects, records: they hold more than numbers
    return np.dtype(name)


def _dtype_state(dtype: np.dtype, state: tuple) -> None:
    """The byte order; a dtype of numbers has no other state."""
    if state[:5] not in ((3, '<', None, None, None), (3, '|', None, None, None), (3, '=', None, None, None)):
        raise ValueError('it has a NumPy array of another byte order')


def _array(kind: _Name, shape: tuple, code: bytes) -> np.ndarray:
    if type(kind) is not _Name or kind != 'numpy.ndarray':
        raise NotPlainError(str(kind))
    return np.empty(0, np.int8)


def _array_state(array: np.ndarray, state: tuple) -> None:
    version, shape, dtype, fortran, data = state
    numbers = isinstance(dtype, np.dtype) and dtype.kind in 'biufc' and type(data) is bytes
    if not numbers or type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError('it has a NumPy array that is none')
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError('it has a NumPy array of another size than it claims')
    # a copy: NumPy takes the memory of the bytes that it is given for its own, to write into
    array.__setstate__((1, shape, dtype, bool(fortran), bytes(bytearray(data))))


def _scalar(dtype: np.dtype, data: bytes) -> np.generic:
    if not isinstance(dtype, np.dtype) or type(data) is not bytes or len(data) != dtype.itemsize:
        raise ValueError('it has a NumPy scalar that is none')
    return np.frombuffer(data, dtype)[0]


def _ordered_state(items: OrderedDict, state: dict) -> None:
    """``_metadata``, the versions of modules that ``state_dict()`` gives it."""
    metadata = state.pop('_metadata')
    if state or not isinstance(metadata, dict) or any(type(m) is not dict for m in metadata.values()):
        raise ValueError('it has a dict with attributes')
    _check_plain(metadata)
    items._metadata = metadata


_VALUES = frozenset(
    'BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING '
    'BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8'.split()
)
_CONSTANTS = dict(NONE=None, NEWTRUE=True, NEWFALSE=False)
_EMPTY = dict(EMPTY_DICT=dict, EMPTY_LIST=list, EMPTY_TUPLE=tuple, EMPTY_SET=set)
_TUPLES = dict(TUPLE1=1, TUPLE2=2, TUPLE3=3)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set, frozenset)
_LEAVES = (*_SCALARS, bytearray, Tensor, torch.Size, torch.dtype, torch.device, np.ndarray, HistoryBuffer)

_DTYPES = {
    f'torch.{name}': getattr(torch, name)
    for name in (
        'float16 float32 float64 bfloat16 complex32 complex64 complex128 bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 '
        'float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz'.split()
    )
    if hasattr(torch, name)
}
_SINCE = {  # the torch that they came with, of those that torch 2.1 lacks
    **{f'torch.float8_{form}fnuz': '2.2' for form in ('e4m3', 'e5m2')},
    **{f'torch.uint{bits}': '2.3' for bits in (16, 32, 64)},
}
_KINDS = dict(
    Float=torch.float32,
    Double=torch.float64,
    Half=torch.float16,
    BFloat16=torch.bfloat16,
    Long=torch.int64,
    Int=torch.int32,
    Short=torch.int16,
    Char=torch.int8,
    Byte=torch.uint8,
    Bool=torch.bool,
    ComplexFloat=torch.complex64,
    ComplexDouble=torch.complex128,
    QInt8=torch.int8,  # of these tensors the storage alone is read
    QUInt8=torch.uint8,
    QInt32=torch.int32,
)
_STORAGES = {f'{module}.{kind}Storage': dtype for module in ('torch', 'torch.cuda') for kind, dtype in _KINDS.items()}
_STORAGES.update({f'{module}.UntypedStorage': torch.uint8 for module in ('torch', 'torch.storage')})

_SPARSE = _not_dense('sparse', 'where weights are dense: save .to_dense() of it')
_QUANTIZED = _not_dense('quantized', 'where weights are of floating point: save .dequantize() of it')
_CALLS: Dict[str, Callable[..., Any]] = {
    'torch._utils._rebuild_tensor': _tensor,
    'torch._utils._rebuild_tensor_v2': _tensor,
    'torch._utils._rebuild_tensor_v3': _tensor_v3,
    'torch._utils._rebuild_parameter': _parameter,
    'torch._utils._rebuild_parameter_with_state': _parameter,
    'torch._tensor._rebuild_from_type_v2': _with_attributes,
    'torch._utils._rebuild_sparse_tensor': _SPARSE,
    'torch._utils._rebuild_sparse_csr_tensor': _SPARSE,
    'torch._utils._rebuild_qtensor': _QUANTIZED,
    'torch._utils._rebuild_nested_tensor': _not_dense('nested', 'of many shapes: save its parts as tensors'),
    'torch._utils._rebuild_meta_tensor_no_storage': _not_dense('meta', 'which has no values: save it from a device'),
    'torch.serialization._get_layout': _Name,
    'torch.Size': lambda sizes: torch.Size(tuple(sizes)),
    'torch.device': lambda *args: torch.device(*args),
    'collections.OrderedDict': _ordered,
    'collections.Counter': _counter,
    'builtins.set': lambda items=(): {_key(i) for i in items},
    'builtins.frozenset': lambda items=(): frozenset(_key(i) for i in items),
    'builtins.complex': lambda real, imaginary: complex(float(real), float(imaginary)),
    'builtins.bytearray': _bytearray,
    'builtins.bytes': lambda: b'',  # how protocol 2 writes empty ones
    'builtins.getattr': _method,
    '_codecs.encode': _encode,
    'numpy.dtype': _dtype,
    **{f'numpy.{core}.multiarray._reconstruct': _array for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': _scalar for core in ('core', '_core')},
}
_ARGUMENTS = frozenset(  # names that calls take
    [
        'torch.Tensor',
        'torch.nn.parameter.Parameter',
        'numpy.ndarray',
        _HISTORY,
        _ONE_CYCLE,
        *_METHODS,
        *(f'torch.{kind}' for kind in ('per_tensor_affine', 'per_channel_affine', 'per_channel_affine_float_qparams')),
        *(f'torch.{kind}' for kind in ('per_tensor_symmetric', 'per_channel_symmetric')),
    ]
)
_STATES = {OrderedDict: _ordered_state, HistoryBuffer: _history, np.ndarray: _array_state, np.dtype: _dtype_state}

import warnings
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn as nn
from mmengine.logging import HistoryBuffer, MessageHub, history_buffer
from mmengine.optim import MultiStepLR, OneCycleLR, ReduceOnPlateauLR

from mmslab.checkpoints import load_file

from ..conftest import needs_torch
from . import programs

NAMES = sorted(programs.attempts(''))


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('form', [programs.write, programs.write_stream])
def test_a_program_reaches_nothing(tmp_path, monkeypatch, name, form):
    monkeypatch.setattr(history_buffer, 'len', len, raising=False)  # what some of them overwrite
    monkeypatch.setattr(history_buffer, 'np', np)
    monkeypatch.setattr(HistoryBuffer, '_statistics_methods', dict(HistoryBuffer._statistics_methods))
    HistoryBuffer()  # the first one fills in the statistics
    node = programs.attempts(tmp_path / 'ran')[name]
    file = form(tmp_path / 'w.pth', node)
    if form is programs.write:
        programs.write(file, node, {'data/0': b'\0\0\0\0', '../../etc/passwd': b'root'})
    before = programs.snapshot()
    with pytest.raises(ValueError, match='holds Python objects beside tensors|cannot be read'):
        load_file(file)
    assert not (tmp_path / 'ran').exists() and programs.snapshot() == before


@pytest.mark.parametrize('protocol', [2, 3, 4])
def test_every_opcode_but_torchs_own_is_refused(tmp_path, protocol):
    """What pickle has for other objects: instances, extensions, buffers, persistent ids by name."""
    for body in (
        b'(iio\nopen\n.',
        b'(cio\nopen\no.',
        b'Pname\n.',
        b'\x82\x01.',
        b'\x97.',
        b'\x98.',
        b"S'a'\n.",
        b'}0.',
    ):
        file = programs.write(tmp_path / 'w.pth', 1)
        data = b'\x80' + bytes([protocol]) + body
        with zipfile.ZipFile(file, 'w') as archive:
            archive.writestr('x/data.pkl', data)
        with pytest.raises(ValueError, match='cannot be read|Python objects'):
            load_file(file)


def test_compressed_records_and_programs_of_torchscript_are_refused(tmp_path):
    file = programs.write(tmp_path / 'bomb.pth', dict(a='0' * 10**6), compress=True)
    with pytest.raises(ValueError, match='bomb.pth.* cannot be read .*not the size that it claims'):
        load_file(file)
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / 'script.pth'))
    with pytest.raises(ValueError, match='script.pth.* cannot be read .*TorchScript program'):
        load_file(tmp_path / 'script.pth')


def test_a_name_that_is_no_data_is_named(tmp_path):
    torch.save(dict(a=torch.ones(1), where=tmp_path), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'Python objects beside tensors \(pathlib.*Path\).*--trust-checkpoint'):
        load_file(tmp_path / 'w.pth')
    assert load_file(tmp_path / 'w.pth', trust=True)['where'] == tmp_path


@pytest.mark.parametrize(
    'kind, make',
    [
        ('sparse', lambda: torch.eye(3).to_sparse()),
        ('sparse', lambda: torch.eye(3).to_sparse_csr()),
        ('quantized', lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        ('meta', lambda: torch.ones(3, device='meta')),
        ('conjugated', lambda: torch.ones(3, dtype=torch.complex64).conj()),
    ],
)
def test_tensors_that_are_not_dense_are_named(tmp_path, kind, make):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.save(dict(state_dict={'fc.weight': make()}), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=f"has a {kind}.* tensor at 'fc.weight', .*: save "):
        load_file(tmp_path / 'w.pth')


def test_nested_tensors_are_named(tmp_path):
    """torch 2.1 makes them but saves none; a file of a newer one is read there, too."""
    node = programs.Call(programs.Global('torch._utils:_rebuild_nested_tensor'), [5], [2, 3], [1, 1], [0, 2])
    programs.write(tmp_path / 'w.pth', dict(state_dict={'fc.weight': node}))
    with pytest.raises(ValueError, match="has a nested tensor at 'fc.weight', of many shapes: save its parts"):
        load_file(tmp_path / 'w.pth')


def everything():
    """All that a checkpoint of mmengine's may hold, and more."""
    x = torch.randn(4, 6)
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    arrays = [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.random.rand(500),
        np.zeros(0),
    ]
    plain = [None, True, -5, 2**70, 1.5, 'é\ud800', b'ab', bytearray(b'x'), 1j, {1, 2}, frozenset('ab'), (1, (2, ()))]
    views = [x, x.t(), x[1:3, 2:], torch.ones(1).expand(5), torch.zeros(0, 3), torch.tensor(2.0)]
    kinds = [torch.arange(3), torch.tensor([True]), x.half(), x.bfloat16(), x.double(), x.cfloat(), x.to(torch.int8)]
    names = [torch.float16, torch.device('cpu'), x.shape]
    scalars = [np.float64(3), np.float32(2), np.int64(2), np.bool_(True)]
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = 'an attribute'
    counts = Counter([1, 1, 2])
    return dict(
        state=state, arrays=arrays, plain=plain, views=views, kinds=kinds, names=names, scalars=scalars, counts=counts
    ) | dict(parameters=[nn.Parameter(torch.ones(1)), parameter], buffer=HistoryBuffer([1, 2.5], [1, 2], 7))


def assert_same(actual, expected):
    if isinstance(expected, HistoryBuffer):
        assert type(actual) is HistoryBuffer and actual.max_length == expected.max_length
        assert_same(actual.data, expected.data)
        for name in ('mean', 'min', 'max', 'current'):
            assert actual.statistics(name) == expected.statistics(name)
        return
    assert type(actual) is (torch.Tensor if isinstance(expected, nn.Parameter) else type(expected))
    if isinstance(expected, dict):
        assert list(actual) == list(expected) and getattr(actual, '_metadata', 0) == getattr(expected, '_metadata', 0)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected):
            assert_same(a, e)
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride()) and torch.equal(actual, expected)
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype and np.array_equal(actual, expected)
        assert actual.flags.writeable and actual.flags.f_contiguous == expected.flags.f_contiguous
    else:
        assert actual == expected


@pytest.mark.parametrize(
    'form', [{}, dict(_use_new_zipfile_serialization=False), *(dict(pickle_protocol=p) for p in (3, 4))]
)
def test_plain_content_is_what_torch_reads(tmp_path, form):
    content = everything()
    torch.save(content, tmp_path / 'w.pth', **form)
    read = load_file(tmp_path / 'w.pth')
    assert_same(read, torch.load(tmp_path / 'w.pth', weights_only=False))
    assert_same(read, content)
    whole, transposed, part = read['views'][:3]
    whole[1, 2] = 7  # views of one storage remain so
    assert transposed[2, 1] == 7 and part[0, 0] == 7


# what torch.save writes for dtypes that have no storage class, since torch 2.3; torch 2.1 cannot
BYTES = bytes([1, 0, 2, 0, 44, 1])


def without_storage_class(path, dtype, items):
    storage = programs.Storage(len(BYTES), kind='torch:UntypedStorage')
    function, name = programs.Global('torch._utils:_rebuild_tensor_v3'), programs.Global(f'torch:{dtype}')
    tensor = programs.Call(function, storage, 0, (items,), (1,), False, {}, name)
    return programs.write(path, dict(a=tensor), {'data/0': BYTES})


def assert_read(file, dtype):
    read = load_file(file)['a']
    assert read.dtype == getattr(torch, dtype) and bytes(read.view(torch.uint8).tolist()) == BYTES


def test_a_dtype_without_a_storage_class(tmp_path):
    assert_read(without_storage_class(tmp_path / 'w.pth', 'float8_e4m3fn', 6), 'float8_e4m3fn')


@needs_torch('2.3')
def test_dtypes_that_torch_2_1_lacks(tmp_path):
    assert_read(without_storage_class(tmp_path / 'w.pth', 'uint16', 3), 'uint16')
    for dtype, items in (('uint16', 3), ('float8_e4m3fn', 6)):  # as torch itself writes them
        value = torch.frombuffer(bytearray(BYTES), dtype=torch.uint8).view(getattr(torch, dtype))
        assert len(value) == items
        torch.save(dict(a=value), tmp_path / 'saved.pth')
        assert_read(tmp_path / 'saved.pth', dtype)


def test_a_message_hub_goes_on_where_it_was(tmp_path):
    hub = MessageHub('read')
    for step in range(40):
        hub.update_scalar('train/loss', 1 / (step + 1))
    hub.log_scalars['train/loss'].max_length = 33
    hub.update_info('note', 'kept')
    torch.save(dict(message_hub=hub.state_dict()), tmp_path / 'w.pth')
    resumed = MessageHub('resumed')
    resumed.load_state_dict(load_file(tmp_path / 'w.pth')['message_hub'])
    before, after = hub.get_scalar('train/loss'), resumed.get_scalar('train/loss')
    for window in (1, 7, 40):
        assert after.mean(window) == before.mean(window) and after.max(window) == before.max(window)
    for _ in range(3):
        after.update(2.0)
    assert len(after.data[0]) == 33 and after.current() == 2 and resumed.get_info('note') == 'kept'


def test_schedulers_and_optimizers_resume(tmp_path):
    """Each kind of mmengine's schedulers; a MultiStepLR has a Counter in its state, a OneCycleLR a function."""

    def training():
        p = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        kinds = (
            lambda: MultiStepLR(optimizer, [2, 4, 4]),
            lambda: OneCycleLR(optimizer, eta_max=0.3, total_steps=9, anneal_strategy='linear'),
            lambda: ReduceOnPlateauLR(optimizer, monitor='loss'),
        )
        return p, optimizer, [make() for make in kinds]

    def step(p, optimizer, schedulers):
        p.grad = p.detach() * 2
        optimizer.step()
        for scheduler in schedulers[:2]:
            scheduler.step()
        return p.detach().clone(), optimizer.param_groups[0]['lr']

    first = training()
    for _ in range(3):
        step(*first)
    content = dict(p=first[0], o=first[1].state_dict(), s=[s.state_dict() for s in first[2]])
    torch.save(content, tmp_path / 'w.pth')
    second, read = training(), load_file(tmp_path / 'w.pth')
    second[0].data.copy_(read['p'])
    second[1].load_state_dict(read['o'])
    for scheduler, state in zip(second[2], read['s']):
        scheduler.load_state_dict(state)
    for _ in range(4):
        (p, lr), (q, other) = step(*first), step(*second)
        assert torch.equal(p, q) and lr == other


def test_a_file_that_was_cut_or_changed_is_named(tmp_path):
    torch.save(everything(), tmp_path / 'whole.pth')
    whole = (tmp_path / 'whole.pth').read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(whole)
        for at in generator.integers(0, len(data), 4):
            data[at] = generator.integers(256)
        (tmp_path / 'w.pth').write_bytes(data[: generator.integers(1, len(data))] if generator.random() < 0.3 else data)
        try:
            load_file(tmp_path / 'w.pth')  # a change in the padding between records is none
        except ValueError as e:
            assert 'w.pth' in str(e)

"""Every way to a checkpoint, and what may be among its weights."""

import functools
import http.server
import random
import threading

import pytest
import torch
import torch.nn as nn
from mmengine.logging import HistoryBuffer, history_buffer
from mmengine.model import PretrainedInit
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

from mmslab.apis import build_tester, build_trainer, infer, load_config
from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.benchmark.models import Settings
from mmslab.benchmark.run import run as benchmark
from mmslab.checkpoints import check_fits, convert, load_file, load_pretrained, read_state_dict, use_safe_loading
from mmslab.data.shapes import make_shapes
from mmslab.deploy.convert import deploy
from mmslab.deploy.export import TORCH, export

from ..conftest import ROOT, LocalServer, needs_torch

CONFIG = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'


class Call:
    """Pickles as a call, after which items are set in what it returns."""

    def __init__(self, function, *args, items=()):
        self.reduced = function, args, None, None, iter(items)

    def __reduce__(self):
        return self.reduced


def code(path):
    """Writes ``path`` when it is loaded with ``getattr`` and HistoryBuffer alone allowed, as mmengine's checkpoints need them."""
    execute = Call(getattr, Call(getattr, getattr, '__self__'), 'exec')
    reached = Call(getattr, HistoryBuffer.__init__, '__globals__', items=[('len', execute)])
    return reached, Call(HistoryBuffer, f'open({str(path)!r}, "w")')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Shapes, and a checkpoint that fits the demo's model and holds a program."""
    root = tmp_path_factory.mktemp('paths')
    make_shapes(root / 'shapes', num_train=4, num_val=2, size=64, progress=False)
    init_default_scope('mmdet')
    state = MODELS.build(load_config(CONFIG).model).state_dict()
    content = dict(state_dict=state, meta=dict(epoch=1, iter=1), message_hub=dict(log_scalars={}, runtime_info={}))
    torch.save({**content, 'extra': code(root / 'ran')}, root / 'bad.pth')
    return root


@pytest.fixture
def served(folder):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *args: None
    server = LocalServer(handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/bad.pth'
    server.shutdown()
    server.server_close()


def train(**options):
    build_trainer(CONFIG, work_dir='out', options={k.replace('__', '.'): v for k, v in options.items()}).train()


def pretrained(checkpoint):
    return dict(_delete_=True, type='Pretrained', checkpoint=checkpoint)


def resume_automatically():
    with open('out/last_checkpoint', 'w') as f:
        f.write('bad.pth')
    build_trainer(CONFIG, work_dir='out', resume='auto').train()


PATHS = dict(
    resume=lambda url: build_trainer(CONFIG, work_dir='out', resume='bad.pth'),
    auto_resume=lambda url: resume_automatically(),
    load_from=lambda url: train(load_from='bad.pth'),
    load_from_http=lambda url: train(load_from=url),
    init_cfg=lambda url: train(model__backbone__init_cfg=pretrained('bad.pth')),
    init_cfg_http=lambda url: train(model__backbone__init_cfg=pretrained(url)),
    init_cfg_of_mmdet=lambda url: train(model__neck__init_cfg=dict(type='Pretrained', checkpoint='bad.pth')),
    test=lambda url: build_tester(CONFIG, 'bad.pth', work_dir='out').test(),
    infer=lambda url: infer('shapes/val', CONFIG, 'bad.pth', 'drawn'),
    infer_http=lambda url: infer('shapes/val', CONFIG, url, 'drawn'),
    deploy=lambda url: deploy(CONFIG, 'bad.pth', 'folded'),
    benchmark=lambda url: benchmark([CONFIG], Settings('flops'), ['bad.pth'], show_progress=False),
    convert=lambda url: convert('bad.pth', 'converted.pth'),
)


@pytest.fixture
def refused(folder, monkeypatch, tmp_path):
    """Checks that a call refuses bad.pth and has not run what it says."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv('SHAPES_ROOT', 'shapes')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr(history_buffer, 'len', len, raising=False)  # what the program overwrites
    (folder / 'ran').unlink(missing_ok=True)
    (folder / 'out').mkdir(exist_ok=True)

    def check(call, *args):
        with pytest.raises(ValueError, match='bad.pth.* holds Python objects beside tensors.*--trust-checkpoint'):
            call(*args)
        assert not (folder / 'ran').exists()
        assert CheckpointLoader.__dict__['load_checkpoint'].__func__.__module__.startswith('mmengine')

    return check


@pytest.mark.parametrize('path', PATHS)
def test_no_path_of_any_tool_runs_what_a_file_says(refused, served, path):
    refused(PATHS[path], served)


@needs_torch(TORCH)
def test_nor_does_an_export(refused):
    refused(export, CONFIG, 'bad.pth', 'graph.pt2')


def test_a_program_runs_where_it_is_trusted(folder, monkeypatch):
    """So the test above is one of a program that works."""
    monkeypatch.setattr(history_buffer, 'len', len, raising=False)
    with pytest.raises(ValueError, match='cannot be read'):  # exec gives HistoryBuffer no length
        load_file(folder / 'bad.pth', trust=True)
    assert (folder / 'ran').exists()


@pytest.mark.parametrize(
    'address',
    ['torchvision://it', 'modelzoo://it', 'open-mmlab://it', 'openmmlab://it', 'mmcls://it', 'open-mmlab://old'],
)
def test_names_of_mmengines_lists_are_read_safely(tmp_path, served, folder, monkeypatch, address):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    lists = {'get_torchvision_models': None, 'get_external_models': None, 'get_mmcls_models': None}
    for name in lists:
        monkeypatch.setattr(mmengine_checkpoint, name, lambda: dict(it=served))
    monkeypatch.setattr(mmengine_checkpoint, 'get_deprecated_model_names', lambda: dict(old='it'))
    with use_safe_loading(), pytest.raises(ValueError, match='Python objects beside tensors'):
        load_checkpoint(nn.Linear(1, 1), address)
    (tmp_path / 'hub' / 'checkpoints' / 'bad.pth').unlink()
    weights = {'backbone.weight': torch.full((1, 1), 5.0), 'backbone.bias': torch.ones(1)}
    torch.save(dict(state_dict=weights, meta={}), tmp_path / 'hub' / 'checkpoints' / 'bad.pth')  # as if downloaded
    model = nn.Linear(1, 1)
    with use_safe_loading():
        PretrainedInit(address, prefix=None if 'mmcls' in address else 'backbone')(model)
    assert float(model.weight) == 5


@pytest.mark.parametrize(
    'address', ['s3://a/b.pth', 'petrel://b.pth', 'pavi://b', 'file:///b.pth', 'mmcls://none', 'http://h/']
)
def test_other_addresses_are_refused(address):
    with use_safe_loading(), pytest.raises(ValueError, match=f'{address}.* is no .*Download the file yourself'):
        load_checkpoint(nn.Linear(1, 1), address)
    with pytest.raises(ValueError, match='Download the file yourself'):
        read_state_dict(address)


def test_what_cannot_be_downloaded_is_named(served, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    with pytest.raises(OSError, match='nowhere.pth.* cannot be downloaded .*404.* Download it and give its path'):
        load_file(served.replace('bad', 'nowhere'))
    assert not list((tmp_path / 'hub' / 'checkpoints').iterdir())


def test_safe_loading_ends_with_its_block(folder, monkeypatch):
    original = CheckpointLoader.__dict__['load_checkpoint']
    torch.save(dict(a=torch.ones(1), b=print), folder / 'function.pth')
    with use_safe_loading(trust=True):
        assert load_file(folder / 'function.pth')['b'] is print
        with use_safe_loading():
            with pytest.raises(ValueError, match='builtins.print'):
                CheckpointLoader.load_checkpoint(str(folder / 'function.pth'))
        assert CheckpointLoader.load_checkpoint(str(folder / 'function.pth'))['b'] is print
    with pytest.raises(ValueError, match='builtins.print'):
        load_file(folder / 'function.pth')
    assert CheckpointLoader.__dict__['load_checkpoint'] is original


ARCH = dict(embed_dims=12, depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 4))
PVT = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2))
FAMILIES = dict(
    swin=lambda: SLABSwin(arch=ARCH, window_sizes=(8, 8, 4, 4)),
    ln=lambda: SLABSwin(arch=ARCH, attn='softmax', window_sizes=7, norm_cfg=dict(type='LN')),
    pvt=lambda: SLABPVT(arch=PVT),
    deit=lambda: SLABDeiT(arch=dict(embed_dims=24, depth=2, num_heads=3)),
    cswin=lambda: SLABCSWin(arch=dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4))),
)
NO_WEIGHTS = dict(
    none=(lambda v: None, 'None in '),
    number=(lambda v: 3, 'a int in .*Leave it out'),
    text=(lambda v: 'x', 'a str in '),
    a_list=(lambda v: [v], 'a list in '),
    a_dict=(lambda v: dict(weight=v), 'a dict in '),
    array=(lambda v: v.numpy(), 'a ndarray in '),
    sparse=(lambda v: v.to_sparse(), r'a sparse tensor in .*\.to_dense\(\)'),
    rows=(lambda v: torch.eye(3).to_sparse_csr(), 'a sparse tensor in '),
    quantized=(lambda v: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.qint8), r'a quantized .*\.dequantize\(\)'),
    complex=(lambda v: v.to(torch.complex64), 'numbers of torch.complex64 in '),
    float8=(lambda v: v.to(torch.float8_e4m3fn), r'numbers of torch.float8_e4m3fn in .*\.float\(\)'),
    nested=(lambda v: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 'a nested tensor in '),
    meta=(lambda v: v.to('meta'), 'a meta tensor, without values, in '),
    infinite=(lambda v: v.float() / 0, 'NaN or infinite values in '),
)
SHAPES = dict(
    scalar=lambda v: torch.tensor(1.0),
    empty=lambda v: torch.zeros(0),
    more=lambda v: v[None],
    flat=lambda v: v.reshape(-1),
    two=lambda v: torch.zeros(2),
    large=lambda v: torch.zeros(4, 4, 4, 4),
    half=lambda v: v.half(),
    whole=lambda v: v.long(),
)
RENAMES = (
    *(
        '.{}',
        '{}.x',
        'attn.w_msa.{}',
        'block1.0.attn.{}',
        'blocks.0.attn.qkv.{}',
        'stage1_conv_embed.0.{}',
        'stages.1.{}',
    ),
    *(
        '{owner}.alpha',
        '{owner}.norm2.alpha',
        '{owner}.norm1.weight',
        '{owner}.iter',
        '{owner}.gamma',
        '{owner}.q.weight',
    ),
    *('{owner}.kv.weight', '{owner}.qkv.weight', '{owner}.downsample.weight', '{owner}.bn.weight', 'pos_embed', ''),
)


@pytest.mark.parametrize('what', NO_WEIGHTS)
def test_what_is_no_weight_is_named(what):
    make, message = NO_WEIGHTS[what]
    key, model = 'layers.0.blocks.0.mlp.fc1.weight', FAMILIES['deit']()
    state = model.state_dict()
    state[key] = make(state[key])
    for content in (state, dict(state_dict=state), dict(model=state, epoch=3)):
        with pytest.raises(ValueError, match=f'^checkpoint .*{message}'):
            load_pretrained(model, content)
        with pytest.raises(ValueError, match=f'^checkpoint .*{message}'):
            check_fits(model, content, 'w.pth')
        with pytest.raises(ValueError, match=key):
            read_state_dict(content)


@pytest.mark.parametrize('key', [3, b'bytes', ('a', 'b'), None, 1.5])
def test_a_key_that_is_no_string_is_named(key):
    with pytest.raises(ValueError, match='as the name of a weight, which must be a string'):
        read_state_dict({'a': torch.ones(1), key: torch.ones(1)})


def test_beside_weights_at_the_top_may_be_what_a_training_saves():
    weights = {'fc.weight': torch.ones(2)}
    extras = dict(epoch=3, optimizer=dict(state={}), state_dict=None, args=['x'], best=None)
    assert read_state_dict({**weights, **extras}).keys() == weights.keys()
    with pytest.raises(ValueError, match="None in 'fc.bias'"):
        read_state_dict({**weights, 'fc.bias': None})


@pytest.mark.parametrize('family', FAMILIES)
def test_changed_checkpoints_load_or_are_refused(family):
    """One or two changes at a time: another value, shape or name, or none. An error of another kind fails the test."""
    model, rng = FAMILIES[family](), random.Random(0)
    good = {k: v.clone() for k, v in model.state_dict().items()}
    refused = 0
    for _ in range(60):
        state = dict(good)
        for key in rng.sample(list(good), rng.choice([1, 1, 2])):
            value, kind = state.pop(key), rng.choice(['value', 'shape', 'shape', 'name', 'name', 'gone'])
            if kind == 'value':
                state[key] = rng.choice(list(NO_WEIGHTS.values()))[0](value)
            elif kind == 'shape':
                state[key] = rng.choice(list(SHAPES.values()))(value)
            elif kind == 'name':
                state[rng.choice(RENAMES).format(key, owner=key.rpartition('.')[0])] = value
        prefix = rng.choice(['', '', 'backbone.', 'module.'])
        state = {prefix + k: v for k, v in state.items()}
        content = rng.choice([state, dict(state_dict=state), dict(model=state), {**state, 'epoch': 3}])
        for use in (load_pretrained, lambda *args: check_fits(*args, 'w.pth')):
            try:
                use(model, content)
            except ValueError as e:
                assert 'checkpoint ' in str(e), e
                refused += 1
        model.load_state_dict(good)
    assert refused > 50


def test_shapes_that_a_name_does_not_expect_are_refused():
    """Projections that cannot be joined or parted, counters that are many, norms that are none, positions without a place."""
    block, cases = 'layers.0.blocks.0.', []
    for model in (SLABPVT(arch=PVT, norm_cfg=dict(type=norm)) for norm in ('PRepBN', 'RepBN')):
        state = model.state_dict()
        bare = {k: v for k, v in state.items() if not k.startswith((block + 'attn.q', block + 'attn.kv'))}
        no_norm = {k: v for k, v in state.items() if not k.startswith(block + 'norm1.')}
        for odd in map(torch.zeros, [(), (3,), (24, 8)]):
            for name in ('q', 'kv', 'qkv'):
                for end in ('weight', 'bias'):
                    cases += [(model, {**each, f'{block}attn.{name}.{end}': odd}) for each in (state, bare)]
                    pair = {f'{block}attn.q.{end}': odd, f'{block}attn.kv.{end}': torch.zeros(16, 8)}
                    cases.append((model, {**bare, **pair}))
            for name in ('gamma', 'alpha', 'repbn.eta', 'eta'):
                authors = {
                    f'{block}norm1.{k}': odd for k in ('norm2.alpha', 'norm1.weight', 'iter', 'total_step', name)
                }
                repbn = {f'{block}norm1.{k}': torch.ones(1) for k in ('repbn.eta', 'repbn.bn.weight')}
                cases += [(model, {**state, **authors}), (model, {**no_norm, **repbn, f'{block}norm1.{name}': odd})]
    sizes = [(), (1, 0, 24), (1, 2, 24), (2, 50, 24), (0, 9, 24), (0, 24)]
    for model in (FAMILIES['deit'](), SLABSwin(arch=ARCH, attn='softmax', window_sizes=7), FAMILIES['swin']()):
        state = model.state_dict()
        for key in [k for k in state if 'pos' in k][:1]:
            last = state[key].shape[-1]
            for odd in [torch.zeros([last if n == 24 else n for n in size]) for size in sizes]:
                cases += [(model, {**state, key: odd}), (model, {**state, 'pos_embed': odd, 'cls_token': odd})]
    for model, state in cases:
        for use in (load_pretrained, lambda *args: check_fits(*args, 'w.pth')):
            try:
                use(model, state, logger='silent') if use is load_pretrained else use(model, state)
            except ValueError as e:
                assert 'checkpoint ' in str(e), e

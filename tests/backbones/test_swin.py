import copy

import pytest
import torch
import torch._dynamo
import torch.nn as nn
from mmengine.registry import MODELS, init_default_scope

from mmslab.backbones import SLABSwin
from mmslab.checkpoints import load_pretrained
from mmslab.layers import PRepBN, SoftmaxWindowAttention, set_gamma, windows
from mmslab.layers.norm import repbn_modules

from ..conftest import assert_relative, golden, randomize

ARCH = dict(embed_dims=12, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4))
SOFTMAX = dict(attn='softmax', window_sizes=7)
CLASSIFIER = dict(pad_small_map=False, out_indices=(3,), out_norm_cfg=dict(type='PRepBN'))


def tiny(**kwargs) -> SLABSwin:
    return SLABSwin(**{**dict(arch=ARCH, window_sizes=(8, 8, 4, 4), drop_path_rate=0.0), **kwargs})


@pytest.mark.parametrize('name, kwargs', [('slab_swin_det', {}), ('prepbn_swin_det', SOFTMAX)])
def test_detection_backbones_match_the_authors(name, kwargs):
    arrays, state = golden(name)
    model = SLABSwin(arch=ARCH, **kwargs).eval()
    report = load_pretrained(model, dict(state_dict=state))
    assert not report.new and not report.resized
    with torch.no_grad():
        outs = model(arrays['x'])
    for i, out in enumerate(outs):
        assert_relative(out, arrays[f'out{i}'])


@pytest.mark.parametrize('name, kwargs', [('slab_swin_cls', {}), ('prepbn_swin_cls', SOFTMAX)])
def test_classification_backbones_match_the_authors(name, kwargs):
    arrays, state = golden(name)
    model = SLABSwin(arch=ARCH, **kwargs, **CLASSIFIER).eval()
    load_pretrained(model, dict(model=state))
    stages = {}
    for i, stage in enumerate(model.layers):
        stage.blocks[-1].register_forward_hook(lambda m, x, y, i=i: stages.update({i: y.flatten(1, 2)}))
    with torch.no_grad():
        (out,) = model(arrays['x'])
    for i in range(4):
        assert_relative(stages[i], arrays[f'stage{i}'])
    logits = out.mean((2, 3)) @ state['head.weight'].t() + state['head.bias']
    assert_relative(logits, arrays['logits'])


def test_layernorm_swin_equals_mmdets():
    """mmdet's SwinTransformer is a second implementation of everything but the paper's parts."""
    from mmdet.models.backbones import SwinTransformer

    theirs = randomize(SwinTransformer(embed_dims=12, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4), window_size=7))
    theirs.eval()
    ours = SLABSwin(arch=ARCH, **SOFTMAX, norm_cfg=dict(type='LN')).eval()
    report = load_pretrained(ours, theirs.state_dict())
    assert not report.new
    x = torch.randn(2, 3, 77, 130)
    with torch.no_grad():
        for a, b in zip(ours(x), theirs(x)):
            assert_relative(a, b, 1e-5)


@pytest.mark.parametrize('arch, params', [('tiny', 27.5e6), ('small', 48.8e6), ('base', 86.7e6)])
def test_archs_have_the_published_sizes(arch, params):
    model = SLABSwin(arch=arch, **SOFTMAX, norm_cfg=dict(type='LN'))  # 28M, 50M, 88M with a head of 1000 classes
    assert abs(sum(p.numel() for p in model.parameters()) / params - 1) < 0.01


@pytest.mark.parametrize('attn', ['softmax', 'sla', 'focused', ('sla', 'focused', 'softmax', 'sla')])
@pytest.mark.parametrize('hw', [(4, 4), (37, 53), (64, 96)])
def test_any_size_and_batch(attn, hw):
    model = randomize(tiny(attn=attn)).eval()
    x = torch.randn(3, 3, *hw)
    with torch.no_grad():
        outs = model(x)
        ones = [model(x[i : i + 1]) for i in range(3)]
    size = hw
    for i, out in enumerate(outs):
        size = [-(-s // (4 if i == 0 else 2)) for s in size]
        assert out.shape == (3, 12 * 2**i, *size) and out.is_contiguous()
        assert_relative(out, torch.cat([o[i] for o in ones]), 1e-4)


def test_small_maps():
    """Without pad_small_map a map inside one window is not padded or shifted; the windows may as well be its size."""
    model = randomize(tiny(attn='softmax', window_sizes=8, pad_small_map=False)).eval()
    cut = tiny(attn='softmax', window_sizes=((6, 8), (3, 4), (2, 2), (1, 1)), pad_small_map=False).eval()
    state = model.state_dict()
    for key in [k for k in state if k.endswith('relative_position_bias_table')]:
        h, w = cut.get_submodule(key.rpartition('.')[0]).window_size
        table = state[key].view(15, 15, -1)
        state[key] = table[8 - h : 7 + h, 8 - w : 7 + w].reshape(-1, table.shape[-1])
    cut.load_state_dict(state)
    for block in (b for s in cut.layers for b in s.blocks):
        block.shifted = False
    x = torch.randn(1, 3, 24, 32)
    with torch.no_grad():
        for a, b in zip(model(x), cut(x)):
            assert_relative(a, b, 1e-5)
        padded = randomize(tiny(attn='softmax', window_sizes=8)).eval()(x)
    assert (padded[0] - model(x)[0]).abs().max() > 1e-3


def test_no_mask_is_made_for_linear_attention(monkeypatch):
    made = []
    build = windows._build_mask
    monkeypatch.setattr(windows, '_cache', type(windows._cache)())
    monkeypatch.setattr(windows, '_build_mask', lambda *a: made.append(a) or build(*a))
    x = torch.randn(1, 3, 64, 64)
    tiny(attn=('sla', 'focused', 'sla', 'sla'))(x)
    assert not made
    softmax = tiny(attn='softmax')
    softmax(x)
    first = len(made)
    softmax(x)
    assert first == 3 and len(made) == 3  # one for each stage with a shifted block, once


def test_frozen_stages():
    model = tiny(frozen_stages=1).train()
    before = copy.deepcopy(model.state_dict())
    sum(o.square().mean() for o in model(torch.randn(2, 3, 32, 32))).backward()
    frozen = ('patch_embed.', 'layers.0.', 'norm0.')
    for name, p in model.named_parameters():
        assert p.requires_grad == (not name.startswith(frozen)) == (p.grad is not None), name
    for name, b in model.named_buffers():
        if name.endswith('running_mean'):
            assert torch.equal(b, before[name]) == name.startswith(frozen), name


def test_norm_eval_freezes_statistics_and_trains_the_rest():
    model = tiny(norm_eval=True, norm_cfg=dict(type='PRepBN', gamma=0.0)).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    sum(o.square().mean() for o in model(torch.randn(2, 3, 32, 32))).backward()
    assert model.layers[0].blocks[0].norm1.repbn.bn.weight.grad is not None
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize('gamma', [0.5, 0.0])
def test_gradient_checkpointing_changes_nothing(gamma):
    x = torch.randn(2, 3, 32, 32)
    results = []
    for with_cp in (False, True):
        model = randomize(tiny(with_cp=with_cp, drop_path_rate=0.3)).train()
        set_gamma(model, gamma)
        torch.manual_seed(3)
        sum(o.square().mean() for o in model(x)).backward()
        results.append((model, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())))
    (_, grads, buffers), (_, cp_grads, cp_buffers) = results
    for name, grad in grads.items():
        assert torch.allclose(grad, cp_grads[name], atol=1e-6), name
    for name, buffer in buffers.items():  # running statistics: each batch counts once
        assert torch.equal(buffer, cp_buffers[name]), name


def test_compiled_equals_eager():
    torch._dynamo.reset()
    arch = dict(embed_dims=12, depths=(2, 2), num_heads=(1, 2))
    model = randomize(tiny(arch=arch, attn=('sla', 'softmax'), window_sizes=(8, 4), out_indices=(0, 1))).eval()
    set_gamma(model, 0)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        for a, b in zip(compiled(x), model(x)):
            assert_relative(a, b, 1e-4)
    torch._dynamo.reset()


BACKBONE = dict(type='SLABSwin', arch=ARCH, window_sizes=(8, 8, 4, 4))
NECK = dict(in_channels=[12, 24, 48, 96], out_channels=16)


@pytest.mark.parametrize('base', ['retinanet_r50_fpn', 'cascade-mask-rcnn_r50_fpn'])
def test_in_mmdets_detectors(base):
    from mmdet.structures import DetDataSample
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    text = f"""
_base_ = 'mmdet::_base_/models/{base}.py'
custom_imports = dict(imports=['mmslab'])
model = dict(backbone=dict(_delete_=True, **{BACKBONE!r}), neck=dict(in_channels=[12, 24, 48, 96]))
"""
    cfg = Config.fromstring(text, '.py')
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    assert isinstance(model.backbone, SLABSwin)
    data = demo_mm_inputs(2, [[3, 64, 96], [3, 60, 90]], num_classes=80, with_mask='mask' in base)
    data = model.data_preprocessor(data, True)
    losses = model(**data, mode='loss')
    total, _ = model.parse_losses(losses)
    total.backward()
    assert torch.isfinite(total) and model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0
    model.eval()
    with torch.no_grad():
        results = model(**data, mode='predict')
    assert all(isinstance(r, DetDataSample) and 'pred_instances' in r for r in results)


def test_in_mmpretrains_classifier():
    import mmpretrain  # noqa: F401
    from mmpretrain.registry import MODELS as PRETRAIN
    from mmpretrain.structures import DataSample

    init_default_scope('mmpretrain')
    model = PRETRAIN.build(
        dict(
            type='ImageClassifier',
            backbone=dict(**BACKBONE, **CLASSIFIER),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=5, in_channels=96),
        )
    )
    samples = [DataSample().set_gt_label(i) for i in range(2)]
    loss = model(torch.randn(2, 3, 64, 64), samples, mode='loss')['loss']
    loss.backward()
    assert torch.isfinite(loss) and model.backbone.norm3.repbn.eta.grad is not None
    assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_a_new_attention_is_a_module_and_a_line_of_config():
    @MODELS.register_module(name='_TestMeanAttention', force=True)
    class MeanAttention(nn.Module):
        def __init__(self, embed_dims, num_heads, window_size, qkv_bias, proj_drop):
            super().__init__()
            self.embed_dims = embed_dims

        def forward(self, x, *, hw_shape, mask=None):
            assert mask is None
            return x.mean(1, keepdim=True).expand_as(x)

    model = tiny(attn=('_TestMeanAttention', 'sla', 'softmax', dict(type='softmax', attn_drop=0.5)))
    assert isinstance(model.layers[0].blocks[0].attn, MeanAttention)
    assert model.layers[3].blocks[0].attn.attn_drop.p == 0.5
    assert isinstance(model.layers[2].blocks[0].attn, SoftmaxWindowAttention)
    model.eval()(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize('type_, count', [('PRepBN', 18), ('RepBN', 18), ('LN', 0), ('BN', 0)])
def test_norms_by_config(type_, count):
    model = tiny(norm_cfg=dict(type=type_))
    assert len(list(repbn_modules(model))) == count
    assert any(isinstance(m, PRepBN) for m in model.modules()) == (type_ == 'PRepBN')
    assert not any(isinstance(m, nn.LayerNorm) for m in model.layers.modules()) or type_ in ('LN', 'PRepBN')
    assert isinstance(model.norm0, nn.LayerNorm)
    model.train()(torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(arch='huge'), "no arch 'huge'.*base.*small.*tiny"),
        (dict(arch=dict(embed_dims=12)), 'depths.*embed_dims.*num_heads'),
        (dict(attn=None), 'attn must be a name.*None'),
        (dict(attn=dict(kernel_size=3)), 'attn must be a name.*kernel_size'),
        (dict(attn='LN'), "attn='LN' cannot be built"),
        (dict(attn=dict(type='sla', kernel=3)), "attn=.*'kernel': 3.* cannot be built"),
        (dict(norm_cfg=dict(type='PRepBN', epsilon=1)), "norm_cfg=.*'epsilon': 1.* cannot be built"),
        (dict(norm_cfg=dict(type='BN', epsilon=1)), "norm_cfg=.*'epsilon': 1.* cannot be built"),
        (dict(window_sizes=7.5), 'window_sizes must be a positive integer.*7.5'),
        (dict(window_sizes=None), 'window_sizes must be a positive integer.*None'),
        (dict(out_indices=3), 'out_indices must be.*3'),
        (dict(patch_size=0), 'patch_size must be a positive integer.*0'),
        (dict(mlp_ratio=0), 'mlp_ratio must leave'),
        (dict(arch=dict(embed_dims=12, depths='2262', num_heads=1)), "arch\\['depths'\\] must be.*'2262'"),
        (dict(arch=dict(embed_dims=12, depths=(1, 0), num_heads=1)), "arch\\['depths'\\] must be.*0"),
        (dict(attn='sea'), "attn has the unknown type 'sea'.*focused.*sla.*softmax"),
        (dict(norm_cfg=dict(type='Norm7')), "norm_cfg has the unknown type 'Norm7'"),
        (dict(out_norm_cfg=dict(type='Norm7')), "out_norm_cfg has the unknown type 'Norm7'"),
        (dict(ffn_norm_cfg=dict(type='Norm7')), "ffn_norm_cfg has the unknown type 'Norm7'"),
        (
            dict(
                arch=dict(embed_dims=12, depths=(1, 1), num_heads=(5, 5)), attn='sla', window_sizes=7, out_indices=(0,)
            ),
            'num_heads=5, embed_dims=12',
        ),
        (dict(attn=('sla', 'sla')), 'attn must have one entry for each of the 4 stages, but got 2'),
        (dict(window_sizes=(7, 7, 7)), 'window_sizes must have one entry for each of the 4 stages, but got 3'),
        (dict(window_sizes=(7, 7, 7, -1)), 'window_sizes must be a positive integer.*-1'),
        (
            dict(arch=dict(embed_dims=12, depths=(1, 1, 1, 1), num_heads=(1, 1))),
            "arch\\['num_heads'\\] must have one entry",
        ),
        (dict(out_indices=(0, 4)), r'out_indices must be.*\(0, 4\)'),
        (dict(out_indices=()), 'out_indices must be'),
        (dict(frozen_stages=5), 'frozen_stages must lie in.*5'),
        (dict(drop_path_rate=1.5), 'drop_path_rate must be a number in.*1.5'),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny(**kwargs)


def test_an_image_smaller_than_a_patch_is_named():
    model = tiny()
    with pytest.raises(ValueError, match='3x40 pixels is smaller than one patch of 4x4'):
        model(torch.randn(1, 3, 3, 40))
    with pytest.raises(ValueError, match=r'images must be \(B, 3, H, W\).*\(1, 4, 40, 40\)'):
        model(torch.randn(1, 4, 40, 40))

import copy
import re

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from mmslab.backbones import SLABDeiT
from mmslab.checkpoints import load_pretrained
from mmslab.layers import set_gamma

from ..conftest import assert_relative, golden, randomize

ARCH = dict(embed_dims=24, depth=3, num_heads=3)
SMALL = dict(arch=ARCH, pretrain_img_size=64, drop_path_rate=0.0)
LN = dict(attn='softmax', norm_cfg=dict(type='LN', eps=1e-6), out_norm_cfg=dict(type='LN', eps=1e-6))


def tiny(**kwargs) -> SLABDeiT:
    return SLABDeiT(**{**SMALL, **kwargs})


@pytest.mark.parametrize(
    'name, kwargs, out_type',
    [('slab_deit', {}, 'avg_featmap'), ('prepbn_deit', dict(attn='softmax'), 'cls_token')],
)
def test_matches_the_authors(name, kwargs, out_type):
    arrays, state = golden(name)
    model = SLABDeiT(arch=ARCH, **kwargs, out_type=out_type).eval()
    report = load_pretrained(model, dict(model=state))
    assert not report.new and not report.resized
    unused = ['head.bias', 'head.weight'] + (['layers.0.pos_embed.cls_token'] if name == 'slab_deit' else [])
    assert sorted(report.unused) == unused  # SLAB-DeiT's class token is a left-over
    last = []
    model.layers[0].blocks[-1].register_forward_hook(lambda m, x, y: last.append(y.reshape(1, -1, 24)))
    with torch.no_grad():
        (out,) = model(arrays['x'])
    assert_relative(last[0], arrays['stage0'])
    assert_relative(out @ state['head.weight'].t() + state['head.bias'], arrays['logits'])


def to_published_names(state):
    """timm's and DeiT's own key names of a LayerNorm model."""
    out = {}
    for key, value in state.items():
        key = key.replace('layers.0.blocks.', 'blocks.').replace('norm0.', 'norm.')
        out[key.replace('layers.0.pos_embed.weight', 'pos_embed').replace('layers.0.pos_embed.', '')] = value
    return out


@pytest.mark.parametrize('out_type', ['cls_token', 'avg_featmap', 'featmap'])
@pytest.mark.parametrize('hw', [(64, 64), (96, 176)])
def test_layernorm_deit_equals_mmpretrains(out_type, hw):
    """mmpretrain's VisionTransformer is a second implementation of the baseline, at any size."""
    from mmpretrain.models import VisionTransformer

    arch = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=96)
    theirs = VisionTransformer(
        arch=arch, img_size=64, patch_size=16, out_type='raw', norm_cfg=dict(type='LN', eps=1e-6)
    )
    randomize(theirs).eval()
    state = {}
    for key, value in theirs.state_dict().items():
        key = re.sub(r'^layers\.', 'blocks.', key)
        key = re.sub(r'^ln1\.', 'norm.', key).replace('.ln1.', '.norm1.').replace('.ln2.', '.norm2.')
        key = key.replace('ffn.layers.0.0.', 'mlp.fc1.').replace('ffn.layers.1.', 'mlp.fc2.')
        state[key.replace('patch_embed.projection.', 'patch_embed.proj.')] = value
    ours = tiny(**LN, out_type=out_type).eval()
    report = load_pretrained(ours, state)
    assert not report.new and not report.unused and not report.resized
    x = torch.randn(2, 3, *hw)
    with torch.no_grad():
        (tokens,), (out,) = theirs(x), ours(x)
    grid = tokens[:, 1:].view(2, hw[0] // 16, hw[1] // 16, 24).permute(0, 3, 1, 2)
    want = dict(cls_token=tokens[:, 0], featmap=grid, avg_featmap=grid.mean((2, 3)))[out_type]
    assert_relative(out, want, 1e-5)


def test_published_layernorm_deit_into_prepbn_and_sla():
    plain = randomize(tiny(**LN, out_type='cls_token')).eval()
    state = dict(model=to_published_names(plain.state_dict()) | {'head.weight': torch.zeros(9, 24)})
    model = tiny(attn='softmax', out_type='cls_token').eval()
    report = load_pretrained(model, state)
    assert report.unused == ['head.weight'] and not report.resized
    assert all('repbn' in k or k.endswith('gamma') for k in report.new)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_relative(model(x)[0], plain(x)[0], 1e-5)
    sla = tiny()
    report = load_pretrained(sla, state)  # without a class token: its embedding is left out
    assert report.resized == ['layers.0.pos_embed.weight']
    assert torch.equal(sla.layers[0].pos_embed.weight, plain.layers[0].pos_embed.weight[:, 1:])
    assert sorted(report.unused) == ['head.weight', 'layers.0.pos_embed.cls_token']


@pytest.mark.parametrize('attn', ['softmax', 'sla'])
def test_embeddings_of_another_image_size(attn):
    small, large = randomize(tiny(attn=attn, pretrain_img_size=48)), tiny(attn=attn)
    report = load_pretrained(large, small.state_dict())
    assert [k.rpartition('.')[2] for k in report.resized] == ['weight'] + 3 * ['positional_encoding'] * (attn == 'sla')
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_relative(large.eval()(x)[0], small.eval()(x)[0], 1e-5)


@pytest.mark.parametrize('arch, params', [('tiny', 5.7e6), ('small', 22.1e6), ('base', 86.6e6)])
def test_archs_have_the_published_sizes(arch, params):
    with torch.device('meta'):
        model = SLABDeiT(arch=arch, **LN)
    count = sum(p.numel() for p in model.parameters()) + (model.num_features[0] + 1) * 1000
    assert abs(count / params - 1) < 0.01


@pytest.mark.parametrize('attn', ['softmax', 'sla', 'focused'])
@pytest.mark.parametrize('hw', [(16, 16), (37, 53), (448, 448), (400, 666)])
def test_any_size_and_batch(attn, hw):
    model = randomize(tiny(attn=attn, pretrain_img_size=224)).eval()
    x = torch.randn(3, 3, *hw)
    with torch.no_grad():
        (out,) = model(x)
        ones = [model(x[i : i + 1])[0] for i in range(3)]
    assert out.shape == (3, 24, -(-hw[0] // 16), -(-hw[1] // 16)) and out.is_contiguous()
    assert_relative(out, torch.cat(ones), 1e-4)


@pytest.mark.parametrize('attn', ['softmax', 'sla'])
def test_every_parameter_trains(attn):
    model = tiny(attn=attn).train()
    model(torch.randn(2, 3, 37, 53))[0].square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('frozen_stages', [0, 1])
def test_frozen_stages(frozen_stages):
    model = tiny(frozen_stages=frozen_stages).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    model(x)[0].square().mean().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == (not frozen_stages and not name.startswith('patch_embed.')), name
    for name, b in model.named_buffers():
        if name.endswith('running_mean'):
            assert torch.equal(b, before[name]) == bool(frozen_stages), name


def test_norm_eval():
    model = tiny(norm_eval=True).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(2, 3, 32, 32))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize('attn', ['softmax', 'sla'])
def test_gradient_checkpointing_changes_nothing(attn):
    x = torch.randn(2, 3, 64, 64)
    results = []
    for with_cp in (False, True):
        model = randomize(tiny(attn=attn, with_cp=with_cp, drop_path_rate=0.3)).train()
        set_gamma(model, 0.5)
        torch.manual_seed(3)
        model(x)[0].square().mean().backward()
        results.append((model, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())))
    (_, grads, buffers), (_, cp_grads, cp_buffers) = results
    for name, grad in grads.items():
        assert_relative(cp_grads[name], grad, 1e-4)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, cp_buffers[name]), name


BACKBONE = dict(type='SLABDeiT', **SMALL)


@pytest.mark.parametrize(
    'backbone, extra',
    [
        (dict(out_type='avg_featmap'), {}),
        (dict(out_type='featmap'), dict(neck=dict(type='GlobalAveragePooling'))),
        (dict(attn='softmax', out_type='cls_token'), {}),
    ],
)
def test_in_mmpretrains_classifier(backbone, extra):
    import mmpretrain  # noqa: F401
    from mmpretrain.registry import MODELS as PRETRAIN
    from mmpretrain.structures import DataSample

    init_default_scope('mmpretrain')
    head = dict(type='LinearClsHead', num_classes=5, in_channels=24)
    model = PRETRAIN.build(dict(type='ImageClassifier', backbone={**BACKBONE, **backbone}, head=head, **extra))
    samples = [DataSample().set_gt_label(i) for i in range(2)]
    loss = model(torch.randn(2, 3, 64, 64), samples, mode='loss')['loss']
    loss.backward()
    assert torch.isfinite(loss) and model.backbone.norm0.repbn.eta.grad is not None
    assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize('attn', ['softmax', 'sla'])
def test_in_mmdets_retinanet(attn):
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    neck = dict(type='SimpleFeaturePyramid', in_channels=24, out_channels=256, scale_factors=(2, 1, 0.5), num_outs=5)
    text = f"""
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'
custom_imports = dict(imports=['mmslab'])
model = dict(backbone=dict(_delete_=True, **{dict(BACKBONE, attn=attn)!r}), neck=dict(_delete_=True, **{neck!r}))
"""
    cfg = Config.fromstring(text, '.py')
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    assert isinstance(model.backbone, SLABDeiT)
    data = model.data_preprocessor(demo_mm_inputs(2, [[3, 64, 96], [3, 60, 90]], num_classes=80), True)
    total, _ = model.parse_losses(model(**data, mode='loss'))
    total.backward()
    assert torch.isfinite(total) and model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert len(model.eval()(**data, mode='predict')) == 2


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(arch='huge'), "SLABDeiT has no arch 'huge'.*base.*small.*tiny"),
        (dict(arch=dict(embed_dims=24)), 'depth.*embed_dims.*num_heads'),
        (dict(arch=dict(ARCH, num_heads=5)), 'num_heads=5, embed_dims=24'),
        (dict(attn='sea'), "attn has the unknown type 'sea'"),
        (dict(out_type='raw'), "out_type must be one of .*'featmap'.*'raw'"),
        (dict(out_type='cls_token'), "out_type='cls_token' needs .* attn='sla' has none.*avg_featmap"),
        (dict(pretrain_img_size=8), 'pretrain_img_size must be an integer, at least one patch of 16 pixels.*8'),
        (dict(norm_cfg=dict(type='Norm7')), "norm_cfg has the unknown type 'Norm7'"),
        (dict(out_norm_cfg=dict(type='Norm7')), "out_norm_cfg has the unknown type 'Norm7'"),
        (dict(ffn_norm_cfg=dict(type='Norm7')), "ffn_norm_cfg has the unknown type 'Norm7'"),
        (dict(frozen_stages=2), 'frozen_stages must lie in.*2'),
        (dict(drop_path_rate=-0.1), 'drop_path_rate must be a number in.*-0.1'),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny(**kwargs)


def test_an_image_smaller_than_a_patch_is_named():
    with pytest.raises(ValueError, match='15x40 pixels is smaller than one patch of 16x16'):
        tiny()(torch.randn(1, 3, 15, 40))


def test_another_arch_is_named():
    with pytest.raises(ValueError, match="another architecture.*lacks 'layers.0.blocks.3"):
        load_pretrained(tiny(arch=dict(ARCH, depth=4)), tiny().state_dict())
    with pytest.raises(ValueError, match=r'another architecture.*pos_embed.weight.* is \(1, 16, 24\)'):
        load_pretrained(tiny(attn='softmax'), tiny().state_dict())  # it has no embedding for the class token

import copy
import re

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS, init_default_scope

from mmslab.backbones import SLABPVT
from mmslab.checkpoints import load_pretrained
from mmslab.layers import PRepBN, SimplifiedLinearAttention, SoftmaxAttention, set_gamma

from ..conftest import assert_relative, golden, randomize

GOLDEN = dict(
    arch=dict(embed_dims=(16, 32, 40, 64), depths=(2, 1, 2, 1), num_heads=(1, 2, 5, 8), mlp_ratios=(4, 4, 4, 4)),
    pretrain_img_size=64,
)
ARCH = dict(embed_dims=(8, 16, 20, 32), depths=(2, 1, 1, 1), num_heads=(1, 2, 5, 4), mlp_ratios=(2, 2, 2, 2))
MIXED = dict(attn=('sla', 'focused', 'softmax', 'sla'), sla_sr_ratios=(8, 4, 2, 1))
LN = dict(attn='softmax', norm_cfg=dict(type='LN', eps=1e-6))


def tiny(**kwargs) -> SLABPVT:
    return SLABPVT(**{**dict(arch=ARCH, pretrain_img_size=64, drop_path_rate=0.0), **kwargs})


@pytest.mark.parametrize(
    'name, kwargs',
    [
        ('prepbn_pvt', dict(attn='softmax')),
        ('slab_pvt', dict(attn='sla')),
        ('slab_pvt_sr', dict(attn=('sla', 'sla', 'softmax', 'softmax'), sla_sr_ratios=(8, 4, 2, 1))),
    ],
)
def test_matches_the_authors(name, kwargs):
    arrays, state = golden(name)
    model = SLABPVT(**GOLDEN, **kwargs).eval()
    report = load_pretrained(model, dict(model=state))
    assert not report.new and not report.resized and report.unused == ['head.weight', 'head.bias']
    with torch.no_grad():
        outs = model(arrays['x'])
    for i, out in enumerate(outs):
        assert_relative(out.flatten(2).transpose(1, 2), arrays[f'stage{i}'])
    assert_relative(outs[3].mean((2, 3)) @ state['head.weight'].t() + state['head.bias'], arrays['logits'])


def mmdets(**kwargs):
    from mmdet.models.backbones import PyramidVisionTransformer

    settings = dict(embed_dims=8, num_layers=[2, 1, 1, 1], num_heads=[1, 2, 5, 8], mlp_ratios=[2, 2, 2, 2])
    return PyramidVisionTransformer(pretrain_img_size=64, **settings, **kwargs)


def to_our_names(state):
    """mmdet's PVT: each stage is [patch embedding, [position embedding, blocks...]], its attention torch's own."""
    out = {}
    for key, value in state.items():
        i, rest = re.fullmatch(r'layers\.(\d)\.(.*)', key).groups()
        embed = 'patch_embed' if i == '0' else f'layers.{int(i) - 1}.downsample'
        rest = rest.replace('0.projection.', f'{embed}.proj.') if rest.startswith('0.') else f'layers.{i}.{rest}'
        rest = re.sub(r'^0\.norm\.', f'{embed}.norm.', rest)
        rest = rest.replace('.1.0.pos_embed', '.pos_embed.weight')
        rest = re.sub(r'(layers\.\d)\.1\.(\d)', lambda m: f'{m[1]}.blocks.{int(m[2]) - 1}', rest)
        for theirs, ours in (
            ('attn.attn.out_proj.', 'attn.proj.'),
            ('ffn.layers.0.', 'mlp.fc1.'),
            ('ffn.layers.3.', 'mlp.fc2.'),
        ):
            rest = rest.replace(theirs, ours)
        if '.mlp.' in rest and value.dim() == 4:  # its linear layers are 1x1 convolutions
            value = value.flatten(1)
        if 'in_proj_' in rest:
            part = rest.rpartition('_')[2]
            q, kv = value.split([len(value) // 3, 2 * len(value) // 3])
            at = rest.partition('attn.in_proj')[0]
            out[f'{at}q.{part}'], out[f'{at}kv.{part}'] = q, kv
        else:
            out[rest] = value
    return out


@pytest.mark.parametrize('hw', [(64, 64), (96, 160)])
def test_layernorm_pvt_equals_mmdets(hw):
    theirs = randomize(mmdets()).eval()
    arch = dict(ARCH, embed_dims=(8, 16, 40, 64), num_heads=(1, 2, 5, 8))
    ours = tiny(arch=arch, **LN).eval()
    report = load_pretrained(ours, to_our_names(theirs.state_dict()))
    assert not report.new and not report.unused and not report.resized
    x = torch.randn(2, 3, *hw)
    with torch.no_grad():
        for a, b in zip(ours(x), theirs(x)):
            assert_relative(a, b, 1e-5)


def to_published_names(state):
    out = {}
    for key, value in state.items():
        key = key.replace('patch_embed.', 'patch_embed1.')
        key = re.sub(r'layers\.(\d)\.downsample\.', lambda m: f'patch_embed{int(m[1]) + 2}.', key)
        key = re.sub(r'layers\.(\d)\.pos_embed\.weight', lambda m: f'pos_embed{int(m[1]) + 1}', key)
        key = re.sub(r'layers\.(\d)\.blocks\.', lambda m: f'block{int(m[1]) + 1}.', key)
        if '.qkv.' in key:
            q, kv = value.split([len(value) // 3, 2 * len(value) // 3])
            out[key.replace('.qkv.', '.q.')], out[key.replace('.qkv.', '.kv.')] = q, kv
        else:
            out[key] = value
    return out


def test_published_layernorm_pvt_into_prepbn():
    """PVT's own files have a class token, placed first in the last stage's position embedding, and a last norm."""
    plain = randomize(tiny(**LN)).eval()
    state = to_published_names(plain.state_dict())
    state['pos_embed4'] = torch.cat([torch.randn(1, 1, 32), state['pos_embed4']], dim=1)
    state.update(
        {'cls_token': torch.zeros(1, 1, 32), 'norm.weight': torch.zeros(32), 'head.weight': torch.zeros(9, 32)}
    )
    model = tiny(attn='softmax').eval()
    report = load_pretrained(model, state)
    assert sorted(report.unused) == ['cls_token', 'head.weight', 'norm.weight']
    assert report.resized == ['layers.3.pos_embed.weight']
    assert all('repbn' in k or k.endswith('gamma') for k in report.new)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for a, b in zip(model(x), plain(x)):
            assert_relative(a, b, 1e-5)


def test_position_embeddings_of_another_image_size():
    small = randomize(tiny(attn='softmax', pretrain_img_size=32))
    model = tiny(attn='softmax')
    report = load_pretrained(model, small.state_dict())
    assert report.resized == [f'layers.{i}.pos_embed.weight' for i in range(4)]
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():  # at the size that the new grid is for, resizing at loading is resizing in the forward
        for a, b in zip(model.eval()(x), small.eval()(x)):
            assert_relative(a, b, 1e-5)


def test_softmax_weights_into_sla():
    plain = randomize(tiny(attn='softmax'))
    model = tiny(attn='sla')
    report = load_pretrained(model, plain.state_dict())
    assert {k.split('.attn.')[1].split('.')[0] for k in report.new} == {'dwc', 'positional_encoding'}
    assert {k.split('.attn.')[1].split('.')[0] for k in report.unused} == {'sr', 'norm'}
    block, source = model.layers[0].blocks[1].attn, plain.layers[0].blocks[1].attn
    assert torch.equal(block.qkv.weight, torch.cat([source.q.weight, source.kv.weight]))
    back = tiny(attn='softmax')
    load_pretrained(back, model.state_dict())
    assert torch.equal(back.layers[0].blocks[1].attn.kv.bias, source.kv.bias)


@pytest.mark.parametrize('arch, params', [('tiny', 13.2e6), ('small', 24.5e6), ('medium', 44.2e6), ('large', 61.4e6)])
def test_archs_have_the_published_sizes(arch, params):
    with torch.device('meta'):
        model = SLABPVT(arch=arch, **LN)
    count = sum(p.numel() for p in model.parameters()) + 512 * 1000 + 1000
    assert abs(count / params - 1) < 0.01


@pytest.mark.parametrize('kwargs', [dict(attn='softmax'), dict(attn='sla'), MIXED], ids=['softmax', 'sla', 'mixed'])
@pytest.mark.parametrize('hw', [(4, 4), (37, 53), (448, 448), (200, 334)])
def test_any_size_and_batch(kwargs, hw):
    # 448: the second stage has as many tokens as the first one at 224
    model = randomize(tiny(**kwargs, pretrain_img_size=224)).eval()
    x = torch.randn(3, 3, *hw)
    with torch.no_grad():
        outs = model(x)
        ones = [model(x[i : i + 1]) for i in range(3)]
    size = hw
    for i, out in enumerate(outs):
        size = [-(-s // (4 if i == 0 else 2)) for s in size]
        assert out.shape == (3, ARCH['embed_dims'][i], *size) and out.is_contiguous()
        assert_relative(out, torch.cat([o[i] for o in ones]), 1e-4)


@pytest.mark.parametrize('kwargs', [dict(attn='softmax'), MIXED], ids=['softmax', 'mixed'])
def test_any_size_trains(kwargs):
    model = tiny(**kwargs).train()
    sum(o.square().mean() for o in model(torch.randn(2, 3, 37, 53))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reductions_of_each_kind_of_stage():
    model = tiny(attn=('softmax', 'sla', 'softmax', dict(type='focused', kernel_size=3)), sla_sr_ratios=(1, 2, 1, 1))
    attns = [stage.blocks[0].attn for stage in model.layers]
    assert [a.sr_ratio for a in attns] == [8, 2, 2, 1]
    assert isinstance(attns[0], SoftmaxAttention) and isinstance(attns[1], SimplifiedLinearAttention)
    assert isinstance(attns[0].norm, PRepBN) and attns[3].dwc.kernel_size == (3, 3)
    assert attns[1].positional_encoding.shape == (1, 16, 16)  # 64 pixels: 8x8 tokens, reduced to 4x4


def test_frozen_stages():
    model = tiny(**MIXED, frozen_stages=1).train()
    before = copy.deepcopy(model.state_dict())
    sum(o.square().mean() for o in model(torch.randn(2, 3, 32, 32))).backward()
    frozen = ('patch_embed.', 'layers.0.')
    for name, p in model.named_parameters():
        assert p.requires_grad == (not name.startswith(frozen)) == (p.grad is not None), name
    for name, b in model.named_buffers():
        if name.endswith('running_mean'):
            assert torch.equal(b, before[name]) == name.startswith(frozen), name


def test_norm_eval():
    model = tiny(**MIXED, norm_eval=True).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(2, 3, 32, 32))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_gradient_checkpointing_changes_nothing():
    x = torch.randn(2, 3, 64, 64)
    results = []
    for with_cp in (False, True):
        model = randomize(tiny(**MIXED, with_cp=with_cp, drop_path_rate=0.3)).train()
        set_gamma(model, 0.5)
        torch.manual_seed(3)
        sum(o.square().mean() for o in model(x)).backward()
        results.append((model, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())))
    (_, grads, buffers), (_, cp_grads, cp_buffers) = results
    for name, grad in grads.items():
        assert_relative(cp_grads[name], grad, 1e-4)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, cp_buffers[name]), name


def test_norms_by_config():
    model = tiny(attn='softmax', norm_cfg=dict(type='BN'), ffn_norm_cfg=dict(type='BN'), out_norm_cfg=dict(type='LN'))
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.LayerNorm))]
    # 4 embeddings, 3 in each of 5 blocks, 4 reductions (stage 1 has 2 blocks); one on each output
    assert [sum(isinstance(m, c) for m in norms) for c in (nn.BatchNorm1d, nn.LayerNorm)] == [4 + 15 + 4, 4]
    model.train()(torch.randn(2, 3, 32, 32))


def test_in_mmdets_retinanet():
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    backbone = dict(type='SLABPVT', arch=ARCH, **MIXED)
    text = f"""
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'
custom_imports = dict(imports=['mmslab'])
model = dict(backbone=dict(_delete_=True, **{backbone!r}), neck=dict(in_channels={list(ARCH['embed_dims'])}))
"""
    cfg = Config.fromstring(text, '.py')
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    assert isinstance(model.backbone, SLABPVT)
    data = model.data_preprocessor(demo_mm_inputs(2, [[3, 64, 96], [3, 60, 90]], num_classes=80), True)
    total, _ = model.parse_losses(model(**data, mode='loss'))
    total.backward()
    assert torch.isfinite(total) and model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert len(model.eval()(**data, mode='predict')) == 2


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(arch='huge'), "SLABPVT has no arch 'huge'.*large.*medium.*small.*tiny"),
        (dict(arch=dict(ARCH, embed_dims=(8, 16))), r"arch\['embed_dims'\] must have one entry for each of the 4"),
        (dict(arch=dict(ARCH, mlp_ratios=(2,))), r"arch\['mlp_ratios'\] must have one entry for each of the 4"),
        (dict(arch=dict(ARCH, num_heads=3)), 'num_heads=3, embed_dims=8'),
        (dict(attn='sea'), "attn has the unknown type 'sea'"),
        (dict(attn=('sla', 'sla')), 'attn must have one entry for each of the 4 stages, but got 2'),
        (dict(attn='softmax', sr_ratios=(8, 4, 2)), 'sr_ratios must have one entry for each of the 4 stages'),
        (dict(attn='softmax', sr_ratios=(8, 4, 2, 0)), 'sr_ratios must be positive integers.*0'),
        (dict(sr_ratios=True), 'sr_ratios must be positive integers.*True'),
        (dict(attn=None), 'attn must be a name.*None'),
        (dict(patch_size='4'), "patch_size must be a positive integer.*'4'"),
        (dict(in_channels=0), 'in_channels must be a positive integer.*0'),
        (dict(frozen_stages='1'), "frozen_stages must lie in.*'1'"),
        (dict(drop_path_rate=None), 'drop_path_rate must be a number.*None'),
        (dict(sla_sr_ratios=(8, 4, 2)), 'sla_sr_ratios must have one entry for each of the 4 stages'),
        (dict(sla_sr_ratios=1.5), 'sla_sr_ratios must be positive integers.*1.5'),
        (dict(pretrain_img_size=3), 'pretrain_img_size must be an integer, at least one patch of 4 pixels.*3'),
        (dict(pretrain_img_size=(64, 64)), r'pretrain_img_size must be an integer.*\(64, 64\)'),
        (dict(norm_cfg=dict(type='Norm7')), "norm_cfg has the unknown type 'Norm7'"),
        (dict(out_indices=(0, 4)), r'out_indices must be.*\(0, 4\)'),
        (dict(frozen_stages=5), 'frozen_stages must lie in.*5'),
        (dict(drop_path_rate=1.5), 'drop_path_rate must be a number in.*1.5'),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny(**kwargs)


def test_an_image_smaller_than_a_patch_is_named():
    with pytest.raises(ValueError, match='3x40 pixels is smaller than one patch of 4x4'):
        tiny()(torch.randn(1, 3, 3, 40))


def test_another_arch_is_named():
    with pytest.raises(ValueError, match="another architecture.*lacks 'layers.2.blocks.1"):
        load_pretrained(tiny(arch=dict(ARCH, depths=(2, 1, 2, 1))), tiny().state_dict())
    with pytest.raises(ValueError, match=r'another architecture.*mlp.fc1.weight.* is \(16, 8\)'):
        load_pretrained(tiny(arch=dict(ARCH, mlp_ratios=(4, 2, 2, 2))), tiny().state_dict())

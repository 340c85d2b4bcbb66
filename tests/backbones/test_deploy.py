"""The inference form of the backbones: exact at any size, complete, careful."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS

from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.backbones.base import SLABBackbone
from mmslab.layers import PRepBN, RepBN, SimplifiedLinearAttention, inference, set_gamma
from mmslab.layers.fold import Affine
from mmslab.layers.norm import TokenBN

from ..conftest import assert_relative, randomize_gently

NORMS = (PRepBN, RepBN, TokenBN, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
PREPBN, REPBN, BN, LN = (dict(type=t) for t in ('PRepBN', 'RepBN', 'BN', 'LN'))
FFNBN = dict(norm_cfg=BN, ffn_norm_cfg=BN)
SWIN = dict(embed_dims=12, depths=(2, 2, 3, 1), num_heads=(1, 2, 2, 4))
PVT = dict(embed_dims=(8, 12, 16, 24), depths=(1, 2, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratios=(4, 4, 2, 2))
DEIT = dict(embed_dims=24, depth=3, num_heads=3)
CSWIN = dict(embed_dims=8, depths=(1, 2, 2, 1), num_heads=(2, 2, 4, 4))
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
UNPADDED, PADDED = (64, 96), (37, 53)


def swin(**kwargs):  # at 64x96 its windows need no padding
    return SLABSwin(**{**dict(arch=SWIN, window_sizes=(4, 4, 2, 1)), **kwargs})


def pvt(**kwargs):  # at 64x96 its reductions leave no remainder
    return SLABPVT(**{**dict(arch=PVT, pretrain_img_size=64, sr_ratios=(8, 4, 2, 1)), **kwargs})


def deit(**kwargs):
    return SLABDeiT(**{**dict(arch=DEIT, pretrain_img_size=64), **kwargs})


def cswin(**kwargs):  # at 64x96 its stripes need no padding, but for one side in stage 3
    return SLABCSWin(**{**dict(arch=CSWIN, pretrain_img_size=64, split_sizes=(1, 2, 4, 2)), **kwargs})


FAMILIES = dict(swin=swin, pvt=pvt, deit=deit, cswin=cswin)


def ready(model: SLABBackbone, **kwargs) -> SLABBackbone:
    return randomize_gently(model, **kwargs).eval()


def outputs(model, x):
    with torch.no_grad():
        return model(x)


def assert_folds(model: SLABBackbone, *sizes, batch: int = 2) -> SLABBackbone:
    """Folds a copy and compares at every size, in float32 and float64; returns the copy."""
    for dtype in TOLERANCES:
        model = model.to(dtype)
        deployed = folded_copy(model)
        for hw in sizes:
            assert_same(deployed, model, torch.randn(batch, 3, *hw, dtype=dtype))
    return deployed


def folded_copy(model: SLABBackbone) -> SLABBackbone:
    deployed = copy.deepcopy(model)
    deployed.switch_to_deploy()
    return deployed


def assert_same(deployed: SLABBackbone, model: SLABBackbone, x: torch.Tensor) -> None:
    """All maps are the same, whether computed in place or, where autograd records, functionally."""
    wants, given = outputs(model, x), x.clone()
    results = [outputs(deployed, x)]
    with torch.inference_mode():
        results.append(deployed(x))
    results.append(deployed(x.clone().requires_grad_()))
    for outs in results:
        assert len(outs) == len(wants)
        for out, want in zip(outs, wants):
            assert out.dtype == x.dtype and out.stride() == want.stride()
            assert_relative(out, want, TOLERANCES[x.dtype])
    assert torch.equal(x, given)


@pytest.mark.parametrize('norms', [dict(), dict(norm_cfg=REPBN, ffn_norm_cfg=REPBN), FFNBN])
@pytest.mark.parametrize('family', FAMILIES)
def test_exact_with_every_norm(family, norms):
    model = ready(FAMILIES[family](**norms))
    etas = {m.eta.item() for m in model.modules() if isinstance(m, RepBN)}
    assert norms is FFNBN or len(etas) == 3 and min(etas) < 0 and 0 in etas
    assert_folds(model, UNPADDED, PADDED)


@pytest.mark.parametrize('out_norm_cfg', [LN, PREPBN, BN, None])
@pytest.mark.parametrize('family', FAMILIES)
def test_no_norm_remains(family, out_norm_cfg):
    model = ready(FAMILIES[family](ffn_norm_cfg=PREPBN, out_norm_cfg=out_norm_cfg))
    assert sum(isinstance(m, NORMS) for m in model.modules()) > 20
    deployed = assert_folds(model, PADDED)
    outs = [f'norm{i}' for i in model.out_indices]
    norms = [n for n, m in deployed.named_modules() if isinstance(m, NORMS)]
    assert norms == (outs if out_norm_cfg is LN else [])
    affine = [n for n, m in deployed.named_modules() if isinstance(m, Affine)]
    assert affine == (outs if out_norm_cfg in (PREPBN, BN) else [])
    assert not any(p.requires_grad for p in deployed.parameters())
    assert not any(isinstance(m, nn.Dropout) and m.p for m in deployed.modules())


@pytest.mark.parametrize('family', FAMILIES)
def test_layernorms_stay(family):
    model = ready(FAMILIES[family](norm_cfg=LN, out_norm_cfg=LN))
    names = [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    deployed = assert_folds(model, UNPADDED, PADDED)
    assert [n for n, m in deployed.named_modules() if isinstance(m, nn.LayerNorm)] == names


@pytest.mark.parametrize('pad_small_map', [True, False])
@pytest.mark.parametrize('attn', ['sla', 'focused', 'softmax', ('softmax', 'sla', 'softmax', 'focused')])
def test_swin_windows(attn, pad_small_map):
    """Maps larger than a window, smaller, just as large, and of a single token."""
    model = ready(swin(attn=attn, window_sizes=((8, 6), 7, 4, 3), pad_small_map=pad_small_map, out_norm_cfg=None))
    assert_folds(model, PADDED, (130, 20), (32, 24), (4, 4))


@pytest.mark.parametrize('attn', ['sla', 'softmax'])
def test_projections_without_bias(attn):
    for family in FAMILIES.values():
        assert_folds(ready(family(attn=attn, qkv_bias=False)), PADDED)


@pytest.mark.parametrize('attn', ['sla', 'softmax'])
@pytest.mark.parametrize('scale', [0.0, 1e-12])
def test_swin_pads_where_a_scale_is_zero_or_tiny(attn, scale):
    """No input would be mapped to zero there, or only one of 1e12: padding must not go through the folded layer."""
    model = ready(swin(attn=attn, window_sizes=7), etas=[0.0])
    for module in model.modules():
        if isinstance(module, RepBN):
            with torch.no_grad():
                module.bn.weight[::2] = scale
    norm = model.layers[0].blocks[1].norm1.repbn
    assert (norm.affine()[0][::2].abs() <= 2 * scale).all() and (norm.bn.bias != 0).all()
    assert_folds(model, PADDED, UNPADDED)


def test_swin_pads_with_zeros_after_the_norm():
    """Written out for one window: queries, keys and values of padding are the bias of the unfolded projection."""
    arch = dict(embed_dims=8, depths=(1,), num_heads=(1,))
    model = SLABSwin(arch=arch, attn='softmax', window_sizes=2, out_indices=(0,))
    block = ready(model, std=0.3).double().layers[0].blocks[0]
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64)  # one row of two tokens in a window of 2x2
    norm, attn = block.norm1.repbn, block.attn
    normed = (x - norm.bn.running_mean) / (norm.bn.running_var + 1e-5).sqrt() * norm.bn.weight + norm.bn.bias
    tokens = torch.cat([(normed + norm.eta * x).view(2, 8), torch.zeros(2, 8)])
    q, k, v = (tokens @ attn.qkv.weight.t() + attn.qkv.bias).chunk(3, dim=1)
    bias = attn.position_bias((2, 2))[0]
    want = (q @ k.t() / 8**0.5 + bias).softmax(1) @ v @ attn.proj.weight.t() + attn.proj.bias
    want = want[:2].view(1, 1, 2, 8)
    with torch.no_grad():
        assert_relative(block.attention(block.norm1(x)), want, 1e-14)
        block.switch_to_deploy()
        assert_relative(block.attention(block.norm1(x)), want, 1e-14)
        added = x.clone()
        block.add_attention_(added)
        assert_relative(added, x + want, 1e-14)


@pytest.mark.parametrize('attn', ['softmax', 'sla', 'focused'])
def test_pvt_spatial_reductions(attn):
    """Also on maps smaller than the kernel, which are padded with zeros after the norm."""
    model = ready(pvt(attn=attn, sla_sr_ratios=(8, 4, 2, 1)))
    assert_folds(model, PADDED, (12, 20), (8, 70), (4, 4))


@pytest.mark.parametrize(
    'attn, out_type', [('softmax', 'cls_token'), ('softmax', 'featmap'), ('sla', 'featmap'), ('focused', 'avg_featmap')]
)
def test_deit_outputs(attn, out_type):
    for out_norm_cfg in (PREPBN, LN, None):
        assert_folds(ready(deit(attn=attn, out_type=out_type, out_norm_cfg=out_norm_cfg)), UNPADDED, PADDED, (16, 16))


@pytest.mark.parametrize('attn', ['softmax', 'sla', ('focused', 'softmax', 'sla', 'softmax')])
def test_cswin_stripes(attn):
    assert_folds(ready(cswin(attn=attn, sla_split_sizes=(3, 4, 4, 2))), PADDED, (64, 64), (5, 40), (4, 4))


NAMED = [
    *((SLABSwin, dict(arch=arch)) for arch in ('tiny', 'small', 'base')),
    *((SLABSwin, dict(arch=arch, attn='softmax', window_sizes=7)) for arch in ('tiny', 'small', 'base')),
    *((SLABPVT, dict(arch=arch, attn='sla')) for arch in ('tiny', 'small', 'medium', 'large')),
    *((SLABPVT, dict(arch=arch, attn='softmax')) for arch in ('tiny', 'small', 'medium', 'large')),
    *((SLABDeiT, dict(arch=arch, attn='sla')) for arch in ('tiny', 'small', 'base')),
    *((SLABDeiT, dict(arch=arch, attn='softmax')) for arch in ('tiny', 'small', 'base')),
    *((SLABCSWin, dict(arch=arch)) for arch in ('tiny', 'slab_tiny', 'small')),
]


@pytest.mark.parametrize('family, kwargs', NAMED, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_exact_at_every_size(family, kwargs, monkeypatch):
    for name in ('trunc_normal_', 'kaiming_uniform_', 'uniform_'):  # all weights are set below
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kw: tensor)
    model = ready(family(**kwargs), std=0.02)
    out_types = [None]
    if family is SLABDeiT:
        out_types = ['featmap', 'avg_featmap'] if kwargs['attn'] == 'sla' else ['featmap', 'cls_token']

    def run(model, x):
        return [out for model.out_type in out_types for out in outputs(model, x)]

    x = torch.randn(1, 3, 64, 96)
    deployed = folded_copy(model)
    for out, want in zip(run(deployed, x), run(model, x)):
        assert_relative(out, want, 1e-5)
    del deployed
    model, x = model.double(), x.double()
    wants = run(model, x)
    model.switch_to_deploy()
    for out, want in zip(run(model, x), wants):
        assert_relative(out, want, 1e-12)

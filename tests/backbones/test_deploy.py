"""The inference form of the backbones: exact at any size, complete, careful."""

import copy
import types

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS
from torch.nn.utils import parametrizations, parametrize

from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.backbones.base import SLABBackbone, TransformerBlock
from mmslab.backbones.cswin import CrossShapedAttention
from mmslab.backbones.swin import PatchMerging, SwinBlock
from mmslab.layers import (
    FocusedLinearAttention,
    PRepBN,
    RepBN,
    SimplifiedLinearAttention,
    SoftmaxAttention,
    SoftmaxWindowAttention,
    inference,
    set_gamma,
    windows,
)
from mmslab.layers.embed import MLP, ConvDownsample, PatchEmbed, PositionEmbedding
from mmslab.layers.fold import Affine, foldable
from mmslab.layers.norm import TokenBN

from ..conftest import assert_relative, randomize, randomize_gently

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
    deployed.switch_to_deploy(check=False)  # which would do what these tests do
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
        out_types = ['avg_featmap' if kwargs['attn'] == 'sla' else 'cls_token']
        out_types += ['featmap'] if kwargs['arch'] == 'tiny' else []  # another forward for another way out of it

    def run(model, x):
        return [out for model.out_type in out_types for out in outputs(model, x)]

    x = torch.randn(1, 3, 64, 96)
    deployed = folded_copy(model)
    for out, want in zip(run(deployed, x), run(model, x)):
        assert_relative(out, want, 1e-5)
    del deployed
    model, x = model.double(), x.double()
    wants = run(model, x)
    model.switch_to_deploy(check=False)
    for out, want in zip(run(model, x), wants):
        assert_relative(out, want, 1e-12)


@pytest.mark.parametrize('norms', [dict(ffn_norm_cfg=REPBN, out_norm_cfg=PREPBN), dict(norm_cfg=LN, out_norm_cfg=LN)])
@pytest.mark.parametrize('attn', ['sla', 'softmax'])
@pytest.mark.parametrize('family', FAMILIES)
def test_the_inference_form_by_config(family, attn, norms):
    """Built with deploy=True it has just the tensors that folding leaves, and computes the same from them."""
    folded = folded_copy(ready(FAMILIES[family](attn=attn, **norms)))
    built = FAMILIES[family](attn=attn, deploy=True, **norms).eval()
    assert built.deploy and not any(p.requires_grad for p in built.parameters())
    assert {k: v.shape for k, v in built.state_dict().items()} == {k: v.shape for k, v in folded.state_dict().items()}
    assert [type(m) for m in built.modules()] == [type(m) for m in folded.modules()]
    built.load_state_dict(folded.state_dict(), strict=True)
    x = torch.randn(2, 3, *PADDED)
    for out, want in zip(outputs(built, x), outputs(folded, x)):
        assert torch.equal(out, want)
    built.switch_to_deploy()  # is a no-op, as on what was folded


@pytest.mark.parametrize('family', FAMILIES)
def test_folding_twice_changes_nothing(family):
    once = folded_copy(ready(FAMILIES[family](out_norm_cfg=PREPBN, ffn_norm_cfg=BN)))
    twice = folded_copy(once)
    twice.train().switch_to_deploy()  # nothing is left that could train
    state, same = once.state_dict(), twice.state_dict()
    assert list(state) == list(same) and all(torch.equal(state[k], same[k]) for k in state)
    assert [type(m) for m in once.modules()] == [type(m) for m in twice.modules()]


@pytest.mark.parametrize('family', FAMILIES)
def test_training_mode_makes_no_difference_afterwards(family):
    rates = dict(drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)
    for attn in ('softmax', 'sla'):
        deployed = assert_folds(ready(FAMILIES[family](attn=attn, out_norm_cfg=PREPBN, **rates)), PADDED)
        x = torch.randn(1, 3, *PADDED, dtype=torch.float64)
        wants = outputs(deployed, x)
        for out, recorded, want in zip(outputs(deployed.train(), x), deployed(x.clone().requires_grad_()), wants):
            assert torch.equal(out, want)
            assert_relative(recorded, want, 1e-12)


def spoil(how, model):
    """Makes ``model`` unfit for folding in one deep layer; returns what the error must say."""
    at = [n for n, m in model.named_modules() if isinstance(m, PRepBN)][-3]
    norm = model.get_submodule(at)
    if how == 'gamma':
        norm.set_gamma(0.3)
        return f"^layer '{at}' has gamma=0.3"
    if how == 'buffer':
        norm.gamma.fill_(0.3)
        return f"^layer '{at}' has gamma=0.3"
    if how == 'submodule':
        norm.repbn.bn.train()
        return f"^layer '{at}.repbn.bn' is in training mode"
    model.train()
    return f'^{type(model).__name__} is in training mode'


@pytest.mark.parametrize('how', ['gamma', 'buffer', 'submodule', 'training'])
@pytest.mark.parametrize('family', FAMILIES)
def test_what_cannot_be_folded_stays_as_it_is(family, how):
    model = ready(FAMILIES[family]())
    message = spoil(how, model)
    state, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    twin, x = copy.deepcopy(model), torch.randn(2, 3, *PADDED)
    with pytest.raises(ValueError, match=message):
        model.switch_to_deploy()
    assert not model.deploy and [type(m) for m in model.modules()] == types
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and list(model.state_dict()) == list(
        state
    )
    assert all(p.requires_grad == q.requires_grad for p, q in zip(model.parameters(), twin.parameters()))
    torch.manual_seed(1)
    wants = outputs(twin, x)
    torch.manual_seed(1)
    for out, want in zip(outputs(model, x), wants):
        assert torch.equal(out, want)


@pytest.mark.parametrize('family', FAMILIES)
def test_gradients_for_the_image(family):
    """Through the functional form, as a detector's saliency or an adversary asks for them."""
    model = ready(FAMILIES[family]()).double()
    x, grads = torch.randn(1, 3, *PADDED, dtype=torch.float64), []
    for m in (model, folded_copy(model)):
        image = x.clone().requires_grad_()
        outs = m(image)
        weights = [torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape) for o in outs]
        sum((o.square() * w).sum() for o, w in zip(outs, weights)).backward()
        grads.append(image.grad)
    assert_relative(grads[1], grads[0], 1e-11)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_parameter_that_is_trained_again(family):
    """Folding freezes all; what is unfrozen afterwards gets its gradient, here against finite differences."""
    deployed, x = folded_copy(ready(FAMILIES[family]()).double()), torch.randn(1, 3, *PADDED, dtype=torch.float64)
    weight = deployed.layers[0].blocks[0].mlp.fc2.weight.requires_grad_()
    sum(o.square().sum() for o in deployed(x)).backward()
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight[3, 2] += step
            values.append(sum(o.square().sum() for o in deployed(x)))
            weight[3, 2] -= step
    want = (values[0] - values[1]) / 2e-6
    assert abs(weight.grad[3, 2] - want) <= 1e-6 * weight.grad.abs().max()


@pytest.mark.parametrize('attn', ['sla', 'softmax'])
@pytest.mark.parametrize('family', FAMILIES)
def test_mixed_precision(family, attn):
    """In bfloat16 the folded model is about as near to float32 as the unfolded one."""
    model = ready(FAMILIES[family](attn=attn))
    deployed, x = folded_copy(model), torch.randn(2, 3, *PADDED)
    wants = outputs(model, x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        results = [outputs(model, x), outputs(deployed, x), deployed(x.clone().requires_grad_())]
    plain, *folded = ([(o.float() - w).abs().max() / w.abs().max() for o, w in zip(r, wants)] for r in results)
    for errors in folded:
        assert 0 < max(errors) < max(3 * max(plain), torch.tensor(0.02))


@pytest.mark.parametrize('family', FAMILIES)
def test_pieces_give_the_same(family, monkeypatch):
    """Rows of a map are computed in pieces that stay in a CPU's cache; here in as many as there can be."""
    monkeypatch.setattr(inference, 'PIECE', 1)
    small = dict(patch_size=4) if family == 'deit' else {}
    model = ready(FAMILIES[family](attn='softmax', out_norm_cfg=None, **small))
    deployed, rows = folded_copy(model), []
    deployed.layers[0].blocks[-1].mlp.fc1.register_forward_pre_hook(lambda m, x: rows.append(x[0].shape[:-1].numel()))
    for hw in ((128, 96), (101, 123)):
        rows.clear()
        x = torch.randn(3, 3, *hw)
        for out, want in zip(outputs(deployed, x), outputs(model, x)):
            assert_relative(out, want, 1e-5)
        assert (
            len(rows) > 4
            and max(rows) <= 512
            and max(rows) - min(rows) <= 1
            and sum(rows) >= 3 * (hw[0] // 4) * (hw[1] // 4)
        )


@pytest.mark.parametrize('attn', ['sla', 'softmax'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_map_of_one_token_is_not_overwritten(family, attn):
    """There a returned map could share memory with the tokens that the next stage begins with."""
    side = 16 if family == 'deit' else 4
    model = ready(FAMILIES[family](attn=attn, out_norm_cfg=None))
    deployed = assert_folds(model, (side, side), batch=1)
    x = torch.randn(1, 3, side, side)
    firsts = outputs(deployed.float(), x)
    before = [o.clone() for o in firsts]
    outputs(deployed, torch.randn(1, 3, side, side))
    assert all(torch.equal(a, b) for a, b in zip(firsts, before))


def test_an_attention_that_takes_no_norm():
    """It keeps a scale and a shift in front of it, so padding still comes after the norm, with zeros."""

    @MODELS.register_module(name='_TestMaxAttention', force=True)
    class MaxAttention(nn.Module):
        uses_mask = True

        def __init__(self, embed_dims, num_heads, window_size, qkv_bias, proj_drop):
            super().__init__()
            self.v = nn.Linear(embed_dims, embed_dims)

        def forward(self, x, *, hw_shape, mask=None):
            assert x.shape[1] == hw_shape[0] * hw_shape[1]
            v = self.v(x).amax(1, keepdim=True) - x
            if mask is None:
                return v
            share = mask.to(x.dtype).mean(-1, keepdim=True)  # (num_windows, N, 1)
            return (v.unflatten(0, (-1, len(mask))) * share).flatten(0, 1)

    model = ready(swin(attn=('_TestMaxAttention', 'sla', '_TestMaxAttention', 'softmax'), window_sizes=5), std=0.2)
    deployed = assert_folds(model, PADDED, UNPADDED, (4, 4))
    affine = [n for n, m in deployed.named_modules() if isinstance(m, Affine)]
    assert affine == [f'layers.{i}.blocks.{j}.norm1' for i, j in ((0, 0), (0, 1), (2, 0), (2, 1), (2, 2))]


def test_an_attention_that_opts_out():
    class Doubled(SimplifiedLinearAttention):
        absorb = None

        def forward(self, x, **kwargs):
            return super().forward(2 * x, **kwargs) + x

    MODELS.register_module(name='_TestDoubled', module=Doubled, force=True)
    for family in ('swin', 'pvt', 'deit'):
        deployed = assert_folds(ready(FAMILIES[family](attn='_TestDoubled')), PADDED)
        assert isinstance(deployed.layers[0].blocks[0].norm1, Affine)


SLA, FOCUSED, WINDOW, SOFTMAX = (dict(attn=a) for a in ('sla', 'focused', 'softmax', 'softmax'))
OVERRIDES = [
    *(
        ('swin', SLA, SimplifiedLinearAttention, n)
        for n in ('forward', 'attend', 'project', 'mix', 'features', 'local')
    ),
    *(('pvt', dict(attn='sla', sla_sr_ratios=2), SimplifiedLinearAttention, n) for n in ('forward', 'project', 'mix')),
    *(('cswin', SLA, SimplifiedLinearAttention, n) for n in ('mix', 'features')),
    *(('deit', FOCUSED, FocusedLinearAttention, n) for n in ('forward', 'features', 'local')),
    *(('swin', WINDOW, SoftmaxWindowAttention, n) for n in ('forward', 'project', 'mix', 'position_bias')),
    *((family, SOFTMAX, SoftmaxAttention, n) for family in ('pvt', 'deit') for n in ('forward', 'project', 'mix')),
    ('cswin', SOFTMAX, SoftmaxAttention, 'mix'),
    *(('cswin', {}, CrossShapedAttention, n) for n in ('forward', 'stripe')),
    *((family, {}, MLP, 'forward') for family in FAMILIES),
    *((family, {}, PatchEmbed, n) for family in ('swin', 'cswin') for n in ('forward', 'embed')),
    *(('pvt', {}, ConvDownsample, n) for n in ('forward', 'pad', 'embed')),
    ('cswin', {}, ConvDownsample, 'embed'),
    ('swin', {}, PatchMerging, 'forward'),
    *((family, {}, TransformerBlock, n) for family in ('pvt', 'deit', 'cswin') for n in ('forward', 'attention')),
    *(('swin', attn, SwinBlock, n) for attn in (SLA, WINDOW) for n in ('forward', 'attention', 'window_of')),
    *((family, {}, PositionEmbedding, 'forward') for family in ('pvt', 'deit')),
    *((family, {}, norm, 'forward') for family in FAMILIES for norm in (PRepBN, RepBN)),
    *((family, dict(norm_cfg=REPBN), RepBN, 'forward') for family in FAMILIES),
    *((family, FFNBN, norm, 'forward') for family in FAMILIES for norm in (TokenBN, nn.BatchNorm1d)),
    *((family, {}, layer, 'forward') for family in FAMILIES for layer in (nn.Linear, nn.Conv2d, nn.Dropout, nn.GELU)),
    *((family, {}, type(FAMILIES[family]()), 'run_stage') for family in FAMILIES),
]


def short(family: str, **kwargs) -> SLABBackbone:
    """The first two stages, of those that have more."""
    stages = {} if family == 'deit' else dict(out_indices=(0, 1))
    return FAMILIES[family](**{**stages, **kwargs})


def override(model: nn.Module, cls: type, name: str) -> int:
    """Makes layers of ``cls`` such of a subclass with another method ``name``; returns how many there were."""
    plain = getattr(cls, name)

    def changed(self, *args, **kwargs):
        if name in ('stripe', 'window_of'):  # sizes: windows of another height
            out = plain(self, *args, **kwargs)
            return ((1, out[0][1]), (0, 0)) if name == 'window_of' else (min(3, out[0]), out[1])
        tensors = [1.5 * a + 0.1 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        outs = plain(self, *tensors, **kwargs)
        if isinstance(outs, tuple):
            return tuple(o + 0.2 * args[0] if o.shape == args[0].shape else 1.1 * o for o in outs)
        same = args and isinstance(args[0], torch.Tensor) and outs.shape == args[0].shape
        return outs + 0.2 * args[0] if same else 1.1 * outs

    own = type('Own', (cls,), {name: changed})
    layers = [m for m in model.modules() if type(m) is cls]
    for layer in layers:
        layer.__class__ = own
    return len(layers)


@pytest.mark.parametrize(
    'family, kwargs, cls, name', OVERRIDES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v)
)
def test_a_subclass_stays_what_it_is(family, kwargs, cls, name):
    """Whatever a subclass overrides, its form is the one that it was written in, and norms before it stay before it."""
    model = ready(short(family, drop_rate=0.1, **kwargs), std=0.1).double()
    x = torch.randn(2, 3, *PADDED, dtype=torch.float64)
    plain = outputs(model, x)
    assert override(model, cls, name)
    assert any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in zip(outputs(model, x), plain))
    assert_same(folded_copy(model), model, x)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_backbone_that_keeps_its_tokens(family):
    """Written over, they would be those after the blocks."""
    model = ready(short(family))
    plain = type(model).run_stage
    kept = dict(run_stage=lambda self, stage, x: (x, plain(self, stage, x))[1] + 0.1 * x.mean())
    model.__class__ = type('Own', (type(model),), kept)
    assert_folds(model, PADDED)


def scaled(module, args, out=None):
    return tuple(1.5 * a for a in args) if out is None else 1.5 * out


def own_forward(layer):
    layer.forward = types.MethodType(lambda self, x: 1.5 * type(self).forward(self, x + 0.1), layer)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight * weight.abs().sqrt()


TAMPERINGS = dict(
    pre_hook=lambda layer: layer.register_forward_pre_hook(scaled),
    hook=lambda layer: layer.register_forward_hook(scaled),
    method=own_forward,
    weight_norm=lambda layer: parametrizations.weight_norm(layer),
    weight_norm_by_hook=lambda layer: nn.utils.weight_norm(layer),
    spectral_norm=lambda layer: parametrizations.spectral_norm(layer),
    spectral_norm_by_hook=lambda layer: nn.utils.spectral_norm(layer),
    parametrization=lambda layer: parametrize.register_parametrization(layer, 'weight', Symmetric()),
)


@pytest.mark.filterwarnings('ignore:.*weight_norm')
@pytest.mark.parametrize('how', TAMPERINGS)
@pytest.mark.parametrize('family', FAMILIES)
def test_layers_with_hooks_and_parametrizations(family, how):
    model = ready(short(family), std=0.1).double()
    for _, layer in list(model.named_modules()):
        if type(layer) in (nn.Linear, nn.Conv2d):
            TAMPERINGS[how](layer)
    model.eval()
    x = torch.randn(2, 3, *PADDED, dtype=torch.float64)
    wants = outputs(model, x)
    model.switch_to_deploy()
    for out, want in zip(outputs(model, x), wants):
        assert_relative(out, want, 1e-12)
    assert model.deploy and not any(isinstance(m, (PRepBN, RepBN)) for m in model.modules())


@pytest.mark.parametrize('how', ['pre_hook', 'hook'])
@pytest.mark.parametrize('cls', [TransformerBlock, MLP, SoftmaxAttention, PRepBN, RepBN, nn.BatchNorm1d])
def test_hooks_on_our_layers(cls, how):
    window = dict(TransformerBlock=SwinBlock, SoftmaxAttention=SoftmaxWindowAttention)
    for family, kind in (('pvt', cls), ('swin', window.get(cls.__name__, cls))):
        model = ready(short(family, attn='softmax'), std=0.1).double()
        layers = [m for m in model.modules() if type(m) is kind]
        assert layers
        for layer in layers:
            TAMPERINGS[how](layer)
        assert_same(folded_copy(model), model, torch.randn(2, 3, *PADDED, dtype=torch.float64))


def test_hooks_placed_after_folding_are_called():
    """Those on a block: it must not be written over what it is given, nor over what others keep of it."""
    for family in FAMILIES:
        model = ready(short(family, out_norm_cfg=None))
        deployed, kept, wants = folded_copy(model), [], []
        for made, seen in ((deployed, kept), (model, wants)):
            made.patch_embed.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
            for stage in made.layers:
                for block in stage.blocks:
                    block.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
            outputs(made, torch.full((1, 3, *PADDED), 0.5))
        assert len(kept) == len(wants) > 3
        for out, want in zip(kept, wants):
            assert_relative(out, want, 1e-5)


def share(model, what):
    """The same layer in two places, behind norms that differ."""
    first, second = model.layers[-1].blocks[0], copy.deepcopy(model.layers[-1].blocks[0])
    randomize_gently(second.norm1, [0.9], std=0.3), randomize_gently(second.norm2, [0.2], std=0.3)
    with torch.no_grad():
        for norm in (second.norm1, second.norm2):
            norm.repbn.bn.bias.add_(0.5)
    if what == 'block':
        second = first
    elif what in ('attn', 'mlp', 'norm1'):
        setattr(second, what, getattr(first, what))
    else:
        setattr(second.mlp, what, getattr(first.mlp, what))
    model.layers[-1].blocks.append(second)


@pytest.mark.parametrize('what', ['block', 'attn', 'mlp', 'fc1', 'fc2', 'norm1'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_layer_in_several_places(family, what):
    for attn in ('sla', 'softmax'):
        model = ready(short(family, attn=attn)).double()
        share(model, what)
        deployed, x = folded_copy(model), torch.randn(2, 3, *PADDED, dtype=torch.float64)
        for out, want in zip(outputs(deployed, x), outputs(model, x)):
            assert_relative(out, want, 1e-12)
        assert not any(isinstance(m, NORMS) for m in deployed.layers.modules())


def test_an_mlp_and_a_norm_that_mix_tokens(monkeypatch):
    """They need all tokens of a map at once, not pieces of it."""

    class Mixing(MLP):
        def forward(self, x):
            return super().forward(x - x.mean(dim=(1, 2), keepdim=True))

    @MODELS.register_module(name='_TestMixingNorm', force=True)
    class MixingNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + x.flatten(0, -2).amax(0)

    monkeypatch.setattr(inference, 'PIECE', 1)
    norm_cfg = dict(type='_TestMixingNorm')
    models = [ready(short(family)) for family in ('pvt', 'swin')]
    for model in models:
        for block in (block for stage in model.layers for block in stage.blocks):
            block.mlp.__class__ = Mixing
    models += [ready(short('pvt', norm_cfg=norm_cfg)), ready(short('swin', attn='softmax', norm_cfg=norm_cfg))]
    for model in models:
        assert_folds(model, (128, 96))


def test_parts_that_stand_for_dropout():
    """A layer scale in the place of drop path, say: the inference form leaves out dropout alone."""

    class Scale(nn.Module):
        def forward(self, x):
            return 0.3 * x

    for family in FAMILIES:
        for attn in ('sla', 'softmax'):
            model = ready(short(family, attn=attn))
            for stage in model.layers:
                for block in stage.blocks:
                    block.drop_path = Scale()
                    block.attn.proj_drop = Scale()
                    block.mlp.drop = nn.Tanh()
            assert_folds(model.eval(), PADDED)


def test_a_subclass_that_declares_its_form():
    """It folds as the class does that it is a subclass of."""

    @foldable()
    class Named(SimplifiedLinearAttention):
        pass

    MODELS.register_module(name='_TestNamed', module=Named, force=True)
    deployed = assert_folds(ready(swin(attn='_TestNamed')), PADDED)
    assert not any(isinstance(m, Affine) for m in deployed.layers.modules())


@pytest.mark.parametrize('attn', ['sla', 'softmax'])
@pytest.mark.parametrize('family', FAMILIES)
def test_switching_each_module_as_openmmlab_tools_do(family, attn):
    model = ready(short(family, attn=attn))
    deployed, x = copy.deepcopy(model), torch.randn(1, 3, *PADDED)
    for module in deployed.modules():
        if hasattr(module, 'switch_to_deploy'):
            module.switch_to_deploy()
    for out, want in zip(outputs(deployed, x), outputs(model, x)):
        assert_relative(out, want, 1e-5)


@MODELS.register_module(name='_TestWrongAttention', force=True)
class WrongAttention(nn.Module):
    """Its ``absorb`` forgets the shift."""

    def __init__(self, embed_dims, num_heads, window_size, qkv_bias, proj_drop, **kwargs):
        super().__init__()
        self.v = nn.Linear(embed_dims, embed_dims)

    def absorb(self, scale, shift):
        with torch.no_grad():
            self.v.weight.mul_(scale)

    def forward(self, x, *, hw_shape=None, mask=None):
        return self.v(x)


def state(model):
    """All that folding could change: modules by identity, values, flags, and what autograd knows."""
    flags = ('training', 'deploy', 'p', 'drop_prob')
    modules = [(n, id(m), type(m), *(getattr(m, f, None) for f in flags)) for n, m in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return modules, [(n, id(t), t.data_ptr(), t.stride(), t.requires_grad, t.tolist()) for n, t in tensors]


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_computes_something_else_is_refused(dtype):
    model = ready(pvt(attn=('sla', '_TestWrongAttention', 'sla', 'softmax'), drop_rate=0.1, drop_path_rate=0.1)).to(
        dtype
    )
    before, random = state(model), torch.get_rng_state()
    message = "^folding would change what layer 'layers.1.blocks.0.attn' computes, by .* check=False folds regardless"
    with pytest.raises(ValueError, match=message):
        model.switch_to_deploy()
    assert state(model) == before and torch.equal(torch.get_rng_state(), random) and not model.deploy
    model.switch_to_deploy(check=False)
    assert model.deploy


@pytest.mark.parametrize(
    'spoil, name',
    [
        (lambda m: m.patch_embed.proj.weight, 'patch_embed'),
        (lambda m: m.layers[1].blocks[1].mlp.fc1.weight, 'layers.1.blocks.1.mlp'),
        (lambda m: m.layers[0].downsample.reduction.weight, 'layers.0.downsample'),
        (lambda m: m.norm1.scale, 'norm1'),
    ],
)
def test_the_layer_at_fault_is_named(spoil, name, monkeypatch):
    def fold_wrongly(self):
        fold(self)
        with torch.no_grad():
            spoil(self).mul_(1.001)

    model, fold = ready(short('swin', out_norm_cfg=PREPBN)), SLABSwin._fold
    monkeypatch.setattr(SLABSwin, '_fold', fold_wrongly)
    before = state(model)
    with pytest.raises(ValueError, match=f"^folding would change what layer '{name}' computes"):
        model.switch_to_deploy()
    assert state(model) == before


def test_a_model_whose_rounding_is_large_is_not_refused():
    """Its float32 outputs have no digit in common with those in float64, folded or not."""
    for family in FAMILIES:
        model = randomize(short(family, attn='softmax')).eval()
        set_gamma(model, 0.0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0)
        model.switch_to_deploy()
        assert model.deploy


def test_a_fold_that_loses_digits_is_refused():
    """A channel that is constant: its mean and its value cancel in the norm, but not in folded weights of float32."""
    model = ready(deit(), etas=[0.0])
    blocks, value = model.layers[0].blocks, 3000.7
    with torch.no_grad():
        for layer in (model.patch_embed.proj, *(layer for b in blocks for layer in (b.attn.proj, b.mlp.fc2))):
            layer.weight[0], layer.bias[0] = 0, 0
        model.layers[0].pos_embed.weight[..., 0] = value
        for norm in (m for m in model.modules() if isinstance(m, RepBN)):
            norm.bn.weight[0], norm.bn.running_mean[0] = 0, value
        bn = blocks[1].norm2.repbn.bn
        bn.weight[0], bn.running_var[0] = 1, 0
    before = state(model)
    with pytest.raises(ValueError, match=r"in layer 'layers\.0\.blocks\.1\.mlp' first.*BN variances near 0"):
        model.switch_to_deploy()
    assert state(model) == before
    model.double().switch_to_deploy()


def test_models_that_cannot_be_compared():
    class Pairs(SLABDeiT):
        def forward(self, x, y):
            return super().forward(x + y)

    model = ready(Pairs(arch=DEIT))
    with pytest.raises(ValueError, match='^Pairs cannot be copied and run on random input.*example_image.*check=False'):
        model.switch_to_deploy()
    assert not model.deploy
    model.switch_to_deploy(check=False)
    with torch.device('meta'):
        model = swin(norm_cfg=dict(type='PRepBN', gamma=0.0)).eval()
    model.switch_to_deploy()
    assert model.deploy and all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize('family', FAMILIES)
def test_the_callers_context_makes_no_difference(family):
    model = ready(short(family, attn='softmax'))
    plain = folded_copy(model).state_dict()
    for context in (torch.inference_mode(), torch.autocast('cpu', torch.bfloat16), torch.device('meta')):
        deployed = copy.deepcopy(model)
        with context:
            deployed.switch_to_deploy()
        assert all(torch.equal(v, plain[k]) for k, v in deployed.state_dict().items())


def test_a_spatial_reduction_in_windows():
    """Its convolution, too, sees padding that is zeros after the norm: the norm stays a scale and a shift there."""
    reduced = dict(type='sla', sr_ratio=2, norm_cfg=REPBN)
    model = ready(swin(attn=(reduced, 'sla', 'softmax', 'softmax'), window_sizes=5))
    deployed = assert_folds(model, PADDED, UNPADDED, (4, 4))
    assert not any(isinstance(m, NORMS) for m in deployed.layers.modules())


def test_norms_of_two_kinds():
    """LayerNorm in the spatial reduction alone stays there."""
    deployed = assert_folds(ready(pvt(attn=dict(type='softmax', norm_cfg=LN))), PADDED, (4, 4))
    assert [n for n, m in deployed.named_modules() if isinstance(m, NORMS)] == [
        f'layers.{i}.blocks.{j}.attn.norm' for i, j in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]


def test_gamma_set_to_zero_makes_a_model_foldable():
    model = ready(swin())
    set_gamma(model, 1.0)
    with pytest.raises(ValueError, match="^layer 'patch_embed.norm' has gamma=1.*set_gamma"):
        model.switch_to_deploy()
    set_gamma(model, 0)
    assert_folds(model, PADDED)


def test_no_mask_is_made_for_linear_attention(monkeypatch):
    """Nor would it be used: a mask of windows of 56x56 tokens has ten million entries."""
    made, make = [], windows._wrapped_mask
    monkeypatch.setattr(windows, '_cache', type(windows._cache)())
    monkeypatch.setattr(windows, '_wrapped_mask', lambda *a: made.append(a) or make(*a))
    for attn, masks in (('sla', False), ('focused', False), ('softmax', True)):
        outputs(folded_copy(ready(FAMILIES['swin'](attn=attn))), torch.randn(1, 3, *PADDED))
        assert bool(made) == masks

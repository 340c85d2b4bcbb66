import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mmslab.layers import FocusedLinearAttention, PRepBN, RepBN, SimplifiedLinearAttention, SoftmaxAttention
from mmslab.layers.attention import SoftmaxWindowAttention
from mmslab.layers.embed import MLP, ConvDownsample
from mmslab.layers.fold import (
    Affine,
    affine_of,
    check_foldable,
    fold_backward,
    fold_forward,
    foldable,
    folded,
    folded_back,
    takes_affine,
)
from mmslab.layers.norm import TokenBN, build_norm

from ..conftest import assert_relative, randomize_gently

ETAS = (-0.7, 0.0, 0.4)


def by_hand(norm, x):
    """What a BN, plus eta times its input, makes of ``x`` in float64, from the definition of BatchNorm (Eq. 2)."""
    norm = getattr(norm, 'repbn', norm)
    bn, x = norm.bn, x.double()
    eta = norm.eta.double() if isinstance(norm, RepBN) else 0.0
    deviation = torch.sqrt(bn.running_var.double() + bn.eps)
    return (x - bn.running_mean.double()) / deviation * bn.weight.double() + bn.bias.double() + eta * x


def norms(channels):
    """Every kind of norm that folds, with random statistics, and each eta."""
    for type_ in ('RepBN', 'PRepBN'):
        for eta in ETAS:
            yield randomize_gently(build_norm(dict(type=type_), channels), [eta]).eval()
    yield randomize_gently(TokenBN(channels)).eval()


def on_maps(norm, x):
    return by_hand(norm, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize('bias', [True, False])
def test_a_norm_before_or_after_a_linear_layer(bias, dtype, tolerance):
    x, ins = torch.randn(5, 12, dtype=dtype), list(norms(12))
    for norm, after in zip(ins, norms(7)):
        linear = randomize_gently(nn.Linear(12, 7, bias=bias), std=0.3).to(dtype)
        W, b = linear.weight.detach().double(), 0 if linear.bias is None else linear.bias.detach().double()
        fold_forward(*affine_of(norm), linear)
        want = by_hand(norm, x) @ W.t() + b
        assert_relative(linear(x).double(), want, tolerance)
        fold_backward(linear, *affine_of(after))  # and after it, into the same layer
        assert_relative(linear(x).double(), by_hand(after, want), tolerance)
        assert linear.weight.dtype == linear.bias.dtype == dtype
        assert not linear.weight.requires_grad and not linear.bias.requires_grad


@pytest.mark.parametrize('kernel, stride, padding', [(1, 1, 0), (3, 3, 0), (3, 2, 1)])
@pytest.mark.parametrize('bias', [True, False])
def test_a_norm_before_or_after_a_convolution(kernel, stride, padding, bias):
    """Lemma 4.1 with the bias of the convolution, which eta scales too: BN(Wx + b) + eta (Wx + b)."""
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    for norm, after in zip(norms(6), norms(4)):
        conv = randomize_gently(nn.Conv2d(6, 4, kernel, stride, padding, bias=bias)).double()
        W, b = conv.weight.detach().clone(), None if bias is False else conv.bias.detach().clone()
        want = x
        if not padding:  # the zeros of a padded one would have to become something else
            fold_forward(*affine_of(norm), conv)
            want = on_maps(norm, x)
        fold_backward(conv, *affine_of(after))
        assert_relative(conv(x), on_maps(after, F.conv2d(want, W, b, stride, padding)), 1e-14)


def test_eta_scales_the_bias_of_the_convolution():
    """The smallest case, in whole numbers: BN is the identity, W = 3, b = 5, eta = 2: (1 + 2)(3x + 5)."""
    conv, norm = nn.Conv2d(1, 1, 1), RepBN(1, eps=0.0).eval()
    with torch.no_grad():
        conv.weight.fill_(3), conv.bias.fill_(5), norm.eta.fill_(2)
    assert isinstance(folded_back(conv, norm), nn.Identity)
    assert conv.weight.item() == 9 and conv.bias.item() == 15


def test_what_stays_is_an_affine_map():
    x = torch.randn(3, 4, 12)
    for norm in norms(12):
        affine = folded(norm)
        assert isinstance(affine, Affine) and not any(p.requires_grad for p in affine.parameters())
        assert affine.scale.dtype == torch.float32
        assert_relative(affine(x).double(), by_hand(norm, x), 1e-6)
        assert folded(affine) is affine
        linear = randomize_gently(nn.Linear(12, 5))
        want = F.linear(by_hand(norm, x), linear.weight.double(), linear.bias.double())
        assert isinstance(folded(affine, linear), nn.Identity)
        assert_relative(linear(x).double(), want, 1e-6)


def test_a_layernorm_is_no_affine_map():
    norm, linear = nn.LayerNorm(12), nn.Linear(12, 12)
    before = linear.weight.clone()
    assert affine_of(norm) is None and folded(norm) is norm
    assert folded(norm, linear) is norm and folded_back(linear, norm) is norm
    assert torch.equal(linear.weight, before) and linear.weight.requires_grad


def test_a_norm_that_may_be_another_stays_itself():
    class Own(PRepBN):
        def forward(self, x):
            return super().forward(x).abs()

    hooked, inner, no_statistics, no_weight = (randomize_gently(PRepBN(6)).eval() for _ in range(4))
    hooked.register_forward_hook(lambda m, args, out: out + 1)
    inner.repbn.bn.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    no_statistics.repbn.bn = nn.BatchNorm1d(6, track_running_stats=False).eval()
    no_weight.repbn.bn = nn.BatchNorm1d(6, affine=False).eval()
    linear = nn.Linear(6, 6)
    before = linear.weight.clone()
    for norm in (randomize_gently(Own(6)).eval(), hooked, inner, no_statistics, no_weight):
        assert affine_of(norm) is None and folded(norm, linear) is norm and folded_back(linear, norm) is norm
    assert torch.equal(linear.weight, before)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(randomize_gently(RepBN(6)).eval())
    x = torch.randn(5, 6)
    assert_relative(folded(synced)(x).double(), by_hand(synced, x), 1e-6)


def test_a_norm_with_a_layernorm_in_use_is_refused():
    with pytest.raises(ValueError, match='^PRepBN has gamma=0.5: its LayerNorm is still in use'):
        affine_of(PRepBN(4, gamma=0.5).eval())


def test_layers_that_can_take_a_norm():
    class Own(nn.Linear):
        pass

    hooked, patched, own = nn.Linear(4, 4), nn.Linear(4, 4), Own(4, 4)
    hooked.register_forward_pre_hook(lambda m, args: args)
    patched.forward = lambda x: x
    twice = MLP(4, 4)
    twice.fc2 = twice.fc1
    taken = [nn.Linear(4, 4), nn.Conv2d(4, 4, 3), MLP(4, 8)]
    refused = [
        own,
        hooked,
        patched,
        twice,
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.GELU(),
        None,
    ]
    assert [takes_affine(layer) for layer in taken + refused] == [True] * len(taken) + [False] * len(refused)
    norm = randomize_gently(RepBN(4)).eval()
    assert all(isinstance(folded(norm, layer), Affine) for layer in refused)
    assert all(isinstance(folded_back(layer, norm), Affine) for layer in (own, hooked, patched))


def test_scales_of_zero_and_tiny_ones():
    """A channel of scale 0 adds its shift alone; one of 1e-12 is not lost, and nothing is divided by it."""
    norm = randomize_gently(RepBN(4), [0.0]).eval()
    with torch.no_grad():
        norm.bn.weight.copy_(torch.tensor([0.0, 1e-12, -1e-12, 1.0]))
    x = torch.randn(9, 4, dtype=torch.float64) * torch.tensor([1e9, 1e12, 1e12, 1.0])
    linear = randomize_gently(nn.Linear(4, 3)).double()
    want = F.linear(by_hand(norm, x), linear.weight, linear.bias)
    fold_forward(*affine_of(norm), linear)
    assert (linear.weight[:, 0] == 0).all()
    assert_relative(linear(x), want, 1e-14)


def test_what_cannot_be_folded_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(PRepBN(4, gamma=0.0), nn.Dropout()), PRepBN(4, gamma=0.0))
    with pytest.raises(ValueError, match=r'^Sequential is in training mode.*model\.eval\(\)'):
        check_foldable(model)
    model.eval()
    check_foldable(model)
    model[1][1].train()
    with pytest.raises(ValueError, match=r"^layer '1\.1' is in training mode"):
        check_foldable(model)
    model.eval()
    model[1][0].set_gamma(0.25)
    with pytest.raises(
        ValueError, match=r"^layer '1\.0' has gamma=0\.25: its LayerNorm is still in use.*GammaDecayHook"
    ):
        check_foldable(model)
    model[1][0].set_gamma(0)
    model[2].gamma.fill_(0.5)  # past set_gamma
    with pytest.raises(ValueError, match=r"^layer '2' has gamma=0\.5"):
        check_foldable(model)


@pytest.mark.parametrize('type_', ['BN', 'RepBN', 'PRepBN'])
def test_an_mlp_with_norms_before_and_inside(type_):
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for eta in ETAS:
        mlp = randomize_gently(MLP(8, 16, ffn_norm_cfg=dict(type=type_)), [eta], std=0.3).eval().double()
        before = randomize_gently(RepBN(8), [eta]).eval().double()
        hidden = F.linear(by_hand(before, x), mlp.fc1.weight, mlp.fc1.bias)
        want = F.linear(F.gelu(by_hand(mlp.norm, hidden)), mlp.fc2.weight, mlp.fc2.bias)
        mlp.switch_to_deploy()
        assert isinstance(folded(before, mlp), nn.Identity) and isinstance(mlp.norm, nn.Identity)
        assert_relative(mlp(x), want, 1e-14)


@pytest.mark.parametrize('kernel, padding', [(None, 0), (3, 1), (7, 2)])
def test_a_downsampling_convolution(kernel, padding):
    x = torch.randn(2, 7, 9, 4, dtype=torch.float64)  # no multiple of the stride
    layer = ConvDownsample(4, 6, 2, dict(type='RepBN'), kernel, padding)
    layer = randomize_gently(layer, [-0.7]).eval().double()
    grid = x.permute(0, 3, 1, 2)
    grid = F.pad(grid, (0, 1, 0, 1)) if kernel is None else grid
    want = F.conv2d(grid, layer.proj.weight, layer.proj.bias, 2, padding)
    want = by_hand(layer.norm, want.permute(0, 2, 3, 1))
    layer.switch_to_deploy()
    assert isinstance(layer.norm, nn.Identity)
    assert_relative(layer(x), want, 1e-14)


def attention(kind, **kwargs):
    made = dict(sla=SimplifiedLinearAttention, focused=FocusedLinearAttention, softmax=SoftmaxAttention)
    return made.get(kind, SoftmaxWindowAttention)(12, 2, window_size=8, **kwargs)


@pytest.mark.parametrize('qkv_bias', [True, False])
@pytest.mark.parametrize('kind', ['sla', 'focused', 'softmax', 'window'])
def test_attention_takes_over_the_norm_before_it(kind, qkv_bias):
    for norm, hw in zip(norms(12), [(8, 8), (3, 5), (8, 8), (1, 1), (2, 7), (8, 8), (8, 8)]):
        attn = randomize_gently(attention(kind, qkv_bias=qkv_bias), std=0.3).eval().double()
        x = torch.randn(2, hw[0] * hw[1], 12, dtype=torch.float64)
        with torch.no_grad():
            want = attn(by_hand(norm, x), hw_shape=hw)
            attn.switch_to_deploy()
            assert isinstance(folded(norm, attn), nn.Identity)
            assert_relative(attn(x, hw_shape=hw), want, 1e-13)


SIZES = [(3, 5), (2, 9), (9, 2), (1, 1), (3, 3), (4, 4), (8, 8), (9, 11), (7, 4)]


@pytest.mark.parametrize('norm_type', ['PRepBN', 'BN', 'LN'])
@pytest.mark.parametrize('qkv_bias', [True, False])
@pytest.mark.parametrize('kind', ['sla', 'focused', 'softmax'])
def test_spatial_reduction_on_maps_of_any_size(kind, qkv_bias, norm_type):
    """Maps smaller than the kernel are padded with zeros after the norm; larger ones lose their remainder."""
    attn = randomize_gently(
        attention(kind, qkv_bias=qkv_bias, sr_ratio=4, norm_cfg=dict(type=norm_type)), [-0.7], std=0.3
    )
    attn = attn.eval().double()
    maps = {hw: torch.randn(2, hw[0] * hw[1], 12, dtype=torch.float64) for hw in SIZES}
    norm = randomize_gently(PRepBN(12), [0.4]).eval()
    with torch.no_grad():
        wants = {hw: attn(by_hand(norm, x), hw_shape=hw) for hw, x in maps.items()}
    attn.switch_to_deploy()
    assert isinstance(attn.norm, nn.LayerNorm if norm_type == 'LN' else nn.Identity)
    assert isinstance(folded(norm, attn), nn.Identity)
    assert not any(b.requires_grad for b in attn.buffers())
    with torch.no_grad():
        for hw, x in maps.items():
            assert_relative(attn(x, hw_shape=hw), wants[hw], 1e-13)


@pytest.mark.parametrize('sr_ratio', [1, 2])
@pytest.mark.parametrize('kind', ['sla', 'focused', 'softmax', 'window'])
def test_a_subclass_of_an_attention_by_itself(kind, sr_ratio):
    """It stays in the form of the training, and takes over no norm, unless its class says that it may."""
    made = attention(kind, **({} if kind == 'window' else dict(sr_ratio=sr_ratio, norm_cfg=dict(type='RepBN'))))
    cls = type(made)
    own = type('Own', (cls,), dict(project=lambda self, x, hw: cls.project(self, x.sin(), hw)))
    made.__class__ = own
    attn = randomize_gently(made, std=0.3).eval().double()
    norm, x = randomize_gently(RepBN(12), [0.4]).eval(), torch.randn(2, 64, 12, dtype=torch.float64)
    with torch.no_grad():
        want = attn(x, hw_shape=(8, 8))
        attn.switch_to_deploy()
        assert_relative(attn(x, hw_shape=(8, 8)), want, 1e-13)
    assert isinstance(folded(norm, attn), Affine)
    if kind != 'window':
        foldable()(own)
        attn.switch_to_deploy()
        assert attn.deploy and isinstance(folded(norm, attn), nn.Identity)


def test_a_class_with_an_absorb_of_its_own():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def absorb(self, scale, shift):
            fold_forward(scale, shift, self.linear)

        def forward(self, x):
            return 2 * self.linear(x)

    class Halving(Doubling):
        def forward(self, x):
            return super().forward(x / 2)

    norm, x = randomize_gently(RepBN(4)).eval(), torch.randn(3, 4, dtype=torch.float64)
    for cls, kept in ((Doubling, nn.Identity), (Halving, Affine)):
        layer = cls()
        want = layer(by_hand(norm, x))
        before = folded(norm.double(), layer)
        assert type(before) is kept
        assert_relative(layer(before(x)), want, 1e-14)

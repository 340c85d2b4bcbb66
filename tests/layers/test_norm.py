import pytest
import torch
import torch._dynamo
from mmcv.cnn import build_norm_layer
from torch.utils._python_dispatch import TorchDispatchMode

from mmslab.checkpoints import canonical
from mmslab.layers import PRepBN, RepBN, set_gamma
from mmslab.layers.norm import build_norm

from ..conftest import assert_relative, golden, randomize


@pytest.mark.parametrize('percent', [100, 25, 0])
def test_prepbn_matches_the_authors_in_training(percent):
    arrays, state = golden('prepbn')
    want = {k.split('/', 1)[1]: v for k, v in arrays.items() if k.startswith(f'train_gamma_{percent}/')}
    norm = PRepBN(12, ln_eps=1e-6)
    norm.load_state_dict(canonical(state))
    norm.set_gamma(percent / 100)
    x = arrays['x'].clone().requires_grad_()
    y = norm(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert_relative(y, want['y'])
    assert_relative(x.grad, want['grad_x'])
    assert_relative(norm.repbn.bn.running_mean, want['running_mean'])
    assert_relative(norm.repbn.bn.running_var, want['running_var'])
    for ours, theirs in {
        'ln.weight': 'norm1.weight',
        'ln.bias': 'norm1.bias',
        'repbn.eta': 'norm2.alpha',
        'repbn.bn.weight': 'norm2.bn.weight',
        'repbn.bn.bias': 'norm2.bn.bias',
    }.items():
        assert_relative(norm.get_parameter(ours).grad, want[f'grad/{theirs}'])


def test_prepbn_matches_the_authors_in_evaluation():
    arrays, state = golden('prepbn')
    norm = PRepBN(12, ln_eps=1e-6).eval()
    norm.load_state_dict(canonical(state))
    norm.set_gamma(0)
    assert_relative(norm(arrays['x']), arrays['eval'])


@pytest.mark.parametrize('eta', [1.0, -0.7, 0.0])
def test_lemma_4_1(eta):
    norm = randomize(RepBN(12).double()).eval()
    norm.eta.data.fill_(eta)
    x = torch.randn(5, 7, 12, dtype=torch.float64)
    bn, (scale, shift) = norm.bn, norm.affine()
    sigma = (bn.running_var + bn.eps).sqrt()
    # Eq. 2 and the lemma, each written out
    eq2 = (x - bn.running_mean) / sigma * bn.weight + bn.bias + eta * x
    lemma = (x - bn.running_mean) / sigma * (bn.weight + eta * sigma) + bn.bias + eta * bn.running_mean
    for other in (norm(x), x * scale + shift, lemma):
        assert (other - eq2).abs().max() < 1e-12


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('gamma', [0.0, 0.3, 1.0])
def test_prepbn_is_eq_5(gamma, training):
    norm = randomize(PRepBN(6, gamma=gamma).double()).train(training)
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    mean = x.mean((0, 1)) if training else norm.repbn.bn.running_mean.clone()
    var = x.var((0, 1), unbiased=False) if training else norm.repbn.bn.running_var.clone()
    bn = (x - mean) / (var + 1e-5).sqrt() * norm.repbn.bn.weight + norm.repbn.bn.bias
    centred = x - x.mean(-1, keepdim=True)
    ln = centred / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * norm.ln.weight + norm.ln.bias
    # gamma is a float32 number: 0.3 is not exact in it
    g = torch.tensor(gamma).double()
    want = g * ln + (1 - g) * (bn + norm.repbn.eta * x)
    assert (norm(x) - want).abs().max() < 1e-12


@pytest.mark.parametrize('gamma', [0.0, 0.3, 1.0])
def test_prepbn_gradients_by_finite_differences(gamma):
    norm = randomize(PRepBN(4, gamma=gamma).double())
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    names, params = zip(*norm.named_parameters())

    def f(x, *values):
        return torch.func.functional_call(norm, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(f, (x, *params), eps=1e-6, atol=1e-7)


def test_statistics_follow_at_gamma_one_and_layernorm_rests_at_gamma_zero():
    norm = PRepBN(4)
    calls = []
    norm.ln.register_forward_hook(lambda *_: calls.append(1))
    norm(torch.randn(8, 4) + 3)
    assert norm.repbn.bn.running_mean.abs().sum() > 0.5 and calls == [1]
    norm.set_gamma(0)
    norm(torch.randn(8, 4))
    norm.eval()(torch.randn(8, 4))
    assert calls == [1]


def test_every_parameter_has_a_gradient_at_gamma_zero():
    norm = PRepBN(4, gamma=0)
    norm(torch.randn(8, 4)).square().sum().backward()
    assert all(p.grad is not None for p in norm.parameters())
    assert norm.ln.weight.grad.eq(0).all() and norm.repbn.eta.grad.ne(0).all()


def test_gamma_is_checkpointed_and_what_hangs_on_it_too():
    trained = PRepBN(4, gamma=0)
    fresh = PRepBN(4)
    fresh.load_state_dict(trained.state_dict())
    calls = []
    fresh.ln.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(8, 4)
    assert torch.equal(fresh.eval()(x), trained.eval()(x)) and not calls
    fresh.load_state_dict(PRepBN(4, gamma=0.5).state_dict())
    fresh(x)
    assert calls


@pytest.mark.parametrize('gamma', [1.0, 0.0])
def test_without_eta_it_is_a_plain_bn(gamma):
    norm = PRepBN(4, gamma=gamma, use_eta=False).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    bn, ln = torch.nn.BatchNorm1d(4).double(), torch.nn.LayerNorm(4).double()
    y = norm(x)
    assert torch.allclose(y, gamma * ln(x) + (1 - gamma) * bn(x), atol=1e-12)
    y.square().sum().backward()
    assert norm.ln.weight.grad is not None and norm.repbn.eta.grad is None and norm.repbn.eta == 0


class _NoSynchronization(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal), func
        return func(*args, **(kwargs or {}))


def test_the_guard_against_synchronization_sees_one():
    with pytest.raises(AssertionError), _NoSynchronization():
        torch.ones(()).item()


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('gamma', [0.0, 0.5, 1.0])
def test_no_forward_reads_a_value_back(gamma, training):
    norm = PRepBN(4, gamma=gamma).train(training)
    with _NoSynchronization():
        norm(torch.randn(8, 4))


def test_compiled_once_for_all_gammas_above_zero():
    torch._dynamo.reset()
    norm = PRepBN(4)
    compiled = torch.compile(norm, fullgraph=True, backend='eager')
    counter = torch._dynamo.utils.counters['stats']
    counter.clear()
    x = torch.randn(8, 4)
    for gamma in (1.0, 0.75, 0.5, 0.25):
        norm.set_gamma(gamma)
        compiled(x)
    assert counter['unique_graphs'] == 1
    for _ in range(2):
        norm.set_gamma(0)
        compiled(x)
    assert counter['unique_graphs'] == 2
    norm.set_gamma(0.5)
    assert torch.allclose(compiled(x), norm(x))
    state = norm.state_dict()
    state['gamma'] = torch.zeros(())
    norm.load_state_dict(state)
    assert torch.allclose(compiled(x), norm(x))
    torch._dynamo.reset()


@pytest.mark.parametrize('type_', ['PRepBN', 'RepBN'])
def test_any_norm_cfg_builds_it(type_):
    name, layer = build_norm_layer(dict(type=type_, eps=1e-3), 6, postfix=1)
    assert name == 'norm1' and type(layer).__name__ == type_
    assert layer(torch.randn(2, 5, 6)).shape == (2, 5, 6)


def test_prepbn_in_mmdets_own_swin():
    from mmdet.models.backbones import SwinTransformer

    model = SwinTransformer(
        embed_dims=12, depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 4), window_size=4, norm_cfg=dict(type='PRepBN')
    )
    set_gamma(model, 0.5)
    outs = model(torch.randn(2, 3, 64, 96))
    sum(o.sum() for o in outs).backward()
    assert [o.shape[1] for o in outs] == [12, 24, 48, 96]
    assert sum(isinstance(m, PRepBN) for m in model.modules()) == 18
    assert model.stages[0].blocks[0].norm1.repbn.eta.grad is not None


@pytest.mark.parametrize('gamma', [-0.1, 1.1, float('nan'), '1', True])
def test_a_gamma_out_of_range_is_named(gamma):
    with pytest.raises(ValueError, match='gamma must'):
        PRepBN(4, gamma=gamma)
    norm = PRepBN(4)
    with pytest.raises(ValueError, match='gamma must'):
        norm.set_gamma(gamma)
    assert norm.gamma == 1


def test_a_map_with_channels_first_is_named():
    for norm in (PRepBN(8), RepBN(8), build_norm(dict(type='BN'), 8)):
        with pytest.raises(ValueError, match=r'last dimension.*\(2, 8, 4, 4\).*permute'):
            norm(torch.randn(2, 8, 4, 4))


def test_set_gamma_needs_a_prepbn():
    with pytest.raises(ValueError, match='Linear has no PRepBN'):
        set_gamma(torch.nn.Linear(2, 2), 0.5)


@pytest.mark.parametrize('cfg', [dict(type='Norm7'), None, 'LN', {}])
def test_an_unknown_norm_is_named(cfg):
    with pytest.raises(ValueError, match='norm_cfg .*(PRepBN)'):
        build_norm(cfg, 8)

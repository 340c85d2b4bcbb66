"""Folding of any model: what folds, and each trap in which a norm must stay. All against the model before, in float64."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mmslab.folding import fold
from mmslab.layers import PRepBN, RepBN

C = 6


def norm(channels=C, channel_dim=-1, shift=True):
    """A RepBN with statistics of its own; without a shift its output is zero where its input is."""
    made = RepBN(channels, channel_dim=channel_dim)
    with torch.no_grad():
        made.eta.fill_(0.3)
        for t in (made.bn.running_mean, made.bn.bias):
            t.normal_() if shift else t.zero_()
        made.bn.running_var.uniform_(0.5, 2)
        made.bn.weight.uniform_(0.5, 1.5)
    return made


class Of(nn.Module):
    """A model of parts and of a function of them and the input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def check(model, *examples, folded=(), kept=None, names=None):
    """Folds ``model``; which norms folded, the reasons of the others; outputs in float64 are those of before."""
    model = model.eval()
    before = copied(model).double()
    report = fold(model, *examples)
    fates = {row.name: row for row in report.rows}
    assert {name for name, row in fates.items() if row.fate == 'folded'} == set(folded)
    for name, reason in (kept or {}).items():
        assert fates[name].fate == 'scale and shift' and reason in fates[name].detail, fates[name]
    assert len(fates) == len(set(folded)) + len(kept or {})
    assert not any(isinstance(m, RepBN) for m in model.modules())
    for x in examples:
        x = x if isinstance(x, tuple) else (x,)
        with torch.no_grad():
            expected = before(*(t.double() if t.is_floating_point() else t for t in x))
            actual = model(*x)
        for a, e in zip(flat(actual), flat(expected)):
            torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)
    assert report.difference <= 1e-10
    return report


def copied(model):
    """A copy; of old weight norm's computed weights too, which deepcopy refuses."""
    computed = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor) and not t.is_leaf]
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed})


def flat(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def tokens(*shape):
    return torch.randn(*(shape or (2, 5, C)))


def test_into_the_linear_layers_that_take_it_however_it_gets_there():
    def forward(m, x):
        x = m.norm(x)
        windows = F.pad(x.view(2, 2, 4, C).roll(1, 1), (0, 0, 0, 0, 1, 1), mode='circular')
        windows = torch.cat([windows[:, :1], windows[:, 1:]], 1).permute(0, 2, 1, 3).contiguous()
        q, k = m.a(windows), m.b(x.flip(1).unbind(0)[0]).unsqueeze(0)
        return q.flatten(1).sum(1), k * 2, m.c(x.mean(1)), m.d(F.dropout(x, 0.5, False).transpose(1, 2)[..., None])

    convolution = nn.Conv2d(C, 2 * C, (2, 1), groups=3, bias=False)
    linear = [nn.Linear(C, 4, bias=False), nn.Linear(C, 4), nn.Linear(C, 3)]
    model = Of(forward, norm=norm(), a=linear[0], b=linear[1], c=linear[2], d=convolution)
    report = check(model, tokens(2, 8, C), folded=['norm'])
    assert report.rows[0].detail == 'into a, b, c, d'
    assert model.a.bias is not None and model.d.bias is not None  # which took the shift


def test_two_norms_beside_each_other_in_one_layer():
    model = Of(
        lambda m, x: m.fc(torch.cat([m.n1(x), x, m.n2(x).flip(-1)], -1)), n1=norm(), n2=norm(), fc=nn.Linear(3 * C, 4)
    )
    check(model, tokens(), folded=['n1', 'n2'])


def test_back_into_the_layer_before():
    def forward(m, x):
        x = x + m.post(m.fc(x))
        q, k, v = m.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attention = (m.q_norm(q) @ m.k_norm(k).transpose(-1, -2)).softmax(-1)
        return (attention @ v).sum(), m.stem_norm(m.stem(x.transpose(1, 2)))

    model = Of(
        forward,
        **dict(post=norm(), fc=nn.Linear(C, C, bias=False), qkv=nn.Linear(C, 24), q_norm=norm(4), k_norm=norm(4)),
        **dict(stem=nn.Conv1d(C, 8, 3, padding=1), stem_norm=norm(8, channel_dim=1)),
    )
    check(model, tokens(), folded=['post', 'q_norm', 'k_norm', 'stem_norm'])


def test_multi_head_attention_and_addmm():
    def forward(m, x):
        n = m.norm(x)
        out, _ = m.attention(n, n, m.other(x), need_weights=False)
        y = m.second(out).reshape(-1, C)
        return torch.addmm(m.b, y, m.w)

    attention = nn.MultiheadAttention(C, 2, batch_first=True)
    model = Of(forward, norm=norm(), other=norm(), second=norm(), attention=attention)
    model.w, model.b = nn.Parameter(torch.randn(C, 3)), nn.Parameter(torch.randn(3))
    check(model, tokens(), folded=['norm', 'other', 'second'])


def linear(bias=True):
    return nn.Linear(C, C, bias)


KEPT = {
    'a sum': (lambda m, x: m.fc(m.norm(x)) + m.norm(x), 'add'),
    'returned and used': (lambda m, x: (m.fc(m.norm(x)), m.norm(x)), 'returned by the model'),
    'a view of it returned': (lambda m, x: (lambda n: (m.fc(n), n[:, :1]))(m.norm(x)), 'returned by the model'),
    'stored on a module': (lambda m, x: (setattr(m, 'last', m.norm(x)), m.fc(m.last))[1], 'kept after the run'),
    'a linear layer called on two things': (lambda m, x: m.fc(m.norm(x)) + m.fc(x), 'takes something else too'),
    'a second call that another sees': (lambda m, x: m.fc(m.norm(x)) + m.norm(2 * x).relu(), 'relu'),
    'a weight used elsewhere': (lambda m, x: m.fc(m.norm(x)) + m.fc.weight.sum(), 'fc.weight is used elsewhere (sum)'),
    'a weight used from its other side': (lambda m, x: m.fc(m.norm(x)) @ m.fc.weight, 'used by fc in another way'),
    'a part of a weight': (lambda m, x: F.linear(m.norm(x), m.fc.weight[:2]), 'weight that is computed'),
    'a bias of others': (lambda m, x: F.linear(m.norm(x), m.fc.weight, 2 * m.fc.bias), 'bias that is computed'),
    'no bias given': (lambda m, x: F.linear(m.norm(x), m.fc.weight), 'no bias'),
    'zero padding of tokens': (lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1))), 'zero padding'),
    'other padding': (lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1), value=1.0)), 'several channels'),
    'zero padding in a convolution': (lambda m, x: m.conv(m.norm(x).transpose(1, 2)), 'zero padding'),
    'shuffled channels': (
        lambda m, x: m.fc(torch.cat([m.norm(x), m.norm(x).flip(-1)], 1)),
        'several channels',
    ),
    'a mean over channels': (
        lambda m, x: m.fc(m.norm(x)) + m.norm(x).mean(-1, keepdim=True),
        'mean over several channels',
    ),
    'a mean with padding': (
        lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1)).mean(1)),
        'mean over several channels or padding',
    ),
    'in place': (lambda m, x: m.fc(m.norm(x).mul_(2)), 'mul'),
    'in place, through a view': (
        lambda m, x: (lambda n: (n[:, 0].zero_(), m.fc(n))[1])(m.norm(x)),
        'zero',
    ),
    'a module that works in place': (lambda m, x: m.fc(F.relu(m.norm(x), inplace=True)), 'relu'),
    'numbers that Python sees': (lambda m, x: (lambda n: m.fc(n) * float(n[0, 0, 0]))(m.norm(x)), 'float'),
    'another norm': (lambda m, x: m.fc(F.layer_norm(m.norm(x), (C,))), 'layer_norm'),
    'nothing': (lambda m, x: (m.norm(x), m.fc(x))[1], 'nothing takes it'),
}


@pytest.mark.parametrize('what', KEPT)
def test_what_keeps_a_norm(what):
    forward, reason = KEPT[what]
    model = Of(forward, norm=norm(), fc=linear(), conv=nn.Conv1d(C, 4, 3, padding=1))
    check(model, tokens(), kept=dict(norm=reason))


def test_a_shift_of_zero_passes_zero_padding():
    model = Of(
        lambda m, x: m.conv(m.norm(x)), norm=norm(channel_dim=1, shift=False), conv=nn.Conv1d(C, 4, 3, padding=1)
    )
    check(model, tokens(2, C, 9), folded=['norm'])


def test_tied_weights_weight_norm_and_parametrizations():
    tied = Of(lambda m, i: m.head(m.norm(m.embed(i))), norm=norm(), embed=nn.Embedding(9, C), head=nn.Linear(C, 9))
    tied.head.weight = tied.embed.weight
    check(tied, torch.arange(8).view(2, 4), kept=dict(norm='weight of 2 layers'))
    for make in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal):
        check(Of(lambda m, x: m.fc(m.norm(x)), norm=norm(), fc=make(linear())), tokens(), kept=dict(norm='computed'))


def test_a_tensor_that_a_hook_catches():
    caught = []
    model = Of(lambda m, x: m.fc(m.block(x)), block=nn.Sequential(norm()), fc=linear())
    model.block.register_forward_hook(lambda module, args, out: caught.append(out))
    check(model, tokens(), kept={'block.0': 'kept after the run'})


def test_a_norm_called_twice_for_the_same_layer_folds_once():
    model = Of(lambda m, x: m.fc(m.norm(x)) + m.fc(m.norm(x + 1)), norm=norm(), fc=linear())
    check(model, tokens(), folded=['norm'])


def padded_at_some_sizes(m, x):
    n = m.norm(x.permute(0, 2, 3, 1))
    h, w = n.shape[1:3]
    return m.fc(F.pad(n, (0, 0, 0, -w % 4, 0, -h % 4))).sum((1, 2))


def test_padding_that_appears_at_some_sizes_only():
    """The example itself needs none; the one made of it, whose size nothing divides, does."""
    model = Of(padded_at_some_sizes, norm=norm(), fc=linear())
    report = check(model, tokens(1, C, 8, 8), kept=dict(norm='zero padding'))
    assert report.examples == [f'1x{C}x8x8', f'2x{C}x8x8', f'1x{C}x21x35']


def test_a_back_fold_needs_the_layer_for_itself():
    both = Of(lambda m, x: (lambda y: m.norm(y) + y)(m.fc(x)), norm=norm(), fc=linear())
    check(both, tokens(), kept=dict(norm='add'))
    twice = Of(lambda m, x: m.norm(m.fc(x)) + m.fc(x + 1), norm=norm(), fc=linear())
    check(twice, tokens(), kept=dict(norm='add'))
    mixed = Of(lambda m, x: m.norm(torch.cat([m.fc(x), x], 1)).relu(), norm=norm(), fc=linear())
    check(mixed, tokens(), kept=dict(norm='relu'))


def test_what_the_run_does_not_show_is_found_by_comparing():
    """An operation that no mode sees takes the norm's output too."""

    class Unseen(nn.Module):
        def forward(self, n):  # as a kernel of C++ does
            with torch._C.DisableTorchFunction():
                return n.relu()

    model = Of(
        lambda m, x: m.fc(n := m.norm(x)) + m.unseen(n) + m.fc2(m.other(x)),
        **dict(norm=norm(), other=norm(), fc=linear(), fc2=linear(), unseen=Unseen()),
    )
    check(model, tokens(), folded=['other'], kept=dict(norm='outputs would differ by'))


def test_layer_norms_that_were_not_converted_stay():
    model = Of(
        lambda m, x: m.fc(m.ln(x)) + m.fc2(m.norm(x)), ln=nn.LayerNorm(C), norm=norm(), fc=linear(), fc2=linear()
    )
    check(model, tokens(), folded=['norm'])
    assert type(model.ln) is nn.LayerNorm


def test_half_precision():
    model = Of(lambda m, x: m.fc(m.norm(x)), norm=norm(), fc=linear()).bfloat16().eval()
    x = tokens().bfloat16()
    reference = copy.deepcopy(model).double()
    report = fold(model, x)
    assert report.difference <= 1e-10 and report.rows[0].fate == 'folded' and model.fc.weight.dtype == torch.bfloat16
    with torch.no_grad():
        expected, actual = reference(x.double()), model(x)
    assert ((actual - expected).abs().max() / expected.abs().max()) < 3e-2


def test_modules_that_do_not_run_are_kept_and_named():
    model = Of(lambda m, x: m.fc(m.norm(x)), norm=norm(), unused=norm(), fc=linear()).eval()
    rows = {row.name: row for row in fold(model, tokens()).rows}
    assert (rows['unused'].fate, rows['unused'].detail) == ('kept', 'not run') and isinstance(model.unused, RepBN)


def test_what_cannot_fold_yet_is_refused_and_nothing_changes():
    model = Of(lambda m, x: m.fc(m.norm(x)), norm=PRepBN(C), fc=linear()).eval()
    with pytest.raises(ValueError, match="'norm' has gamma=1: its LayerNorm is still in use"):
        fold(model, tokens())
    model.norm.set_gamma(0)
    with pytest.raises(ValueError, match='is in training mode.*model.eval'):
        fold(model.train(), tokens())
    model.eval()
    with pytest.raises(ValueError, match='needs an example to run the model on'):
        fold(model)
    with pytest.raises(ValueError, match=r'Of cannot be run on the example 2x5: '):
        fold(model, torch.randn(2, 5))
    with pytest.raises(ValueError, match='an example is a tensor, a tuple or dict'):
        fold(model, 7)
    assert isinstance(model.norm, PRepBN)


def test_the_report_is_a_table():
    model = Of(lambda m, x: m.fc(m.a(x)) + m.longer(x), a=norm(), longer=norm(), fc=linear()).eval()
    lines = str(fold(model, tokens())).splitlines()
    assert lines[0] == 'a       folded           into fc'
    assert lines[1] == 'longer  scale and shift  add'
    assert lines[2].startswith('2 norms: 1 folded, 1 scale and shift, 0 kept; outputs differ by ')

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS

from mmslab.necks import SimpleFeaturePyramid

from ..conftest import assert_relative, randomize


def norm(x, p, at):
    """LN over the channels, written out."""
    x = x - x.mean(1, keepdim=True)
    x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return x * p[f'{at}.norm.weight'][:, None, None] + p[f'{at}.norm.bias'][:, None, None]


def double(x, p, at):
    """A transposed convolution with kernel and stride 2 fills four pixels from each."""
    B, C, H, W = x.shape
    out = torch.einsum('bcij,coyx->boiyjx', x, p[f'{at}.weight']).reshape(B, -1, 2 * H, 2 * W)
    return out + p[f'{at}.bias'][:, None, None]


def test_levels_are_vitdets():
    neck = randomize(SimpleFeaturePyramid(16, 8)).double()
    x = torch.randn(2, 16, 4, 6, dtype=torch.float64)
    p = [{k[len(f'levels.{i}.') :]: v for k, v in neck.state_dict().items() if f'levels.{i}' in k} for i in range(4)]
    quadruple = double(F.gelu(norm(double(x, p[0], '0'), p[0], '1')), p[0], '3')
    half = x.view(2, 16, 2, 2, 3, 2).amax((3, 5))
    wants = []
    for scaled, q, at in zip((quadruple, double(x, p[1], '0'), x, half), p, (4, 1, 0, 1)):
        y = norm(torch.einsum('bchw,oc->bohw', scaled, q[f'{at}.weight'].flatten(1)), q, f'{at + 1}')
        wants.append(norm(F.conv2d(y, q[f'{at + 2}.weight'], padding=1), q, f'{at + 3}'))
    wants.append(wants[3][:, :, ::2, ::2])
    outs = neck((x,))
    assert [tuple(o.shape[2:]) for o in outs] == [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    for out, want in zip(outs, wants):
        assert_relative(out, want, 1e-9)
        assert out.is_contiguous()


def test_levels_by_config():
    neck = MODELS.build(
        dict(type='SimpleFeaturePyramid', in_channels=16, out_channels=8, scale_factors=(2, 1, 0.5), num_outs=5)
    )
    outs = neck([torch.randn(1, 16, 1, 3)])
    assert [tuple(o.shape) for o in outs] == [(1, 8, 2, 6), (1, 8, 1, 3), (1, 8, 1, 2), (1, 8, 1, 1), (1, 8, 1, 1)]


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(scale_factors=(3, 1)), r'scale_factors must be some of 4, 2, 1, 0.5, descending.*\(3, 1\)'),
        (dict(scale_factors=(1, 2)), r'scale_factors must be.*descending.*\(1, 2\)'),
        (dict(num_outs=3), 'num_outs must be at least the 4 levels.*3'),
        (dict(in_channels=0), 'in_channels must be a positive integer.*0'),
        (dict(in_channels=[24]), 'in_channels must be a positive integer'),
        (dict(out_channels='a'), "out_channels must be a positive integer.*'a'"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SimpleFeaturePyramid(**{'in_channels': 16, **kwargs})


def test_other_inputs_are_named():
    neck = SimpleFeaturePyramid(16, 8)
    with pytest.raises(ValueError, match=r'one map \(B, 16, H, W\), but got \[\(1, 8, 4, 4\)\]'):
        neck(torch.randn(1, 8, 4, 4))
    with pytest.raises(ValueError, match='one map'):
        neck([torch.randn(1, 16, 4, 4)] * 2)

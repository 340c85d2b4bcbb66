"""convert_norms: the same function to the bit, whatever the model; what is not converted is said."""

import copy

import pytest
import torch
import torch.nn as nn
from mmdet.models.backbones import SwinTransformer
from mmengine.registry import MODELS
from mmpretrain.models.utils.norm import LayerNorm2d

from mmslab.folding import fold
from mmslab.handover import convert_norms, register_norm
from mmslab.layers import PRepBN, RepBN, set_gamma
from mmslab.layers.norm import RMSNorm

from ..conftest import assert_relative


def learn(model):
    """Random statistics, weights and eta for every RepBN, gamma 0: as after a handover."""
    for m in model.modules():
        if isinstance(m, RepBN):
            with torch.no_grad():
                m.eta.fill_(0.4)
                m.bn.running_mean.normal_()
                m.bn.running_var.uniform_(0.5, 2)
                m.bn.weight.uniform_(0.5, 1.5)
                m.bn.bias.normal_()
    set_gamma(model, 0)
    model.eval()


class LlamaRMSNorm(nn.Module):
    """As Hugging Face's: the same formula, written anew."""

    def __init__(self, dims, wrong=False):
        super().__init__()
        self.weight, self.variance_epsilon, self.wrong = nn.Parameter(torch.rand(dims)), 1e-6, wrong

    def forward(self, x):
        mean = x.float().abs().mean(-1, keepdim=True) ** 2 if self.wrong else x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


class Subclass(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_what_is_converted_and_what_is_not():
    model = nn.ModuleDict(
        dict(
            ln=nn.LayerNorm(6),
            bare=nn.LayerNorm(6, elementwise_affine=False),
            map=LayerNorm2d(6),
            rms=LlamaRMSNorm(6),
            ours=RMSNorm(6),
            two=nn.LayerNorm((5, 6)),
            sub=Subclass(6),
            other_rms=LlamaRMSNorm(6, wrong=True),
            prepbn=PRepBN(6),
            fc=nn.Linear(6, 6),
        )
    )
    before, report = copy.deepcopy(model), convert_norms(model)
    rows = {row.name: row for row in report.rows}
    assert {n for n, row in rows.items() if row.fate == 'converted'} == {'ln', 'bare', 'map', 'rms', 'ours'}
    assert rows['two'].reason == 'over 2 dimensions, (5, 6)'
    assert 'Subclass is not known: mmslab.handover.register_norm' in rows['sub'].reason
    assert 'LlamaRMSNorm is not known' in rows['other_rms'].reason
    assert str(report).splitlines()[-1] == '8 norms: 5 converted, 3 kept'
    x = dict(map=torch.randn(2, 6, 3, 4))
    for name in before:
        given = x.get(name, torch.randn(2, 5, 6))
        assert torch.equal(model[name].eval()(given), before[name].eval()(given)), name
    last = torch.randn(2, 3, 4, 6)
    assert torch.equal(model['map'](last, data_format='channel_last'), before['map'](last, data_format='channel_last'))


def test_torchs_own_rmsnorm():
    model = nn.Sequential(getattr(nn, 'RMSNorm', RMSNorm)(6))  # torch has one since 2.4
    x = torch.randn(2, 6)
    expected = model(x)
    assert convert_norms(model).count('converted') == 1 and torch.equal(model.eval()(x), expected)


def test_weights_types_devices_and_training_are_kept():
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)).to(torch.bfloat16)
    nn.init.uniform_(model[0].weight)
    model[2].requires_grad_(False)
    model[2].eval()
    weight = model[0].weight
    convert_norms(model, eps=1e-3, momentum=0.2)
    norm, frozen = model[0], model[2]
    assert norm.ln.weight is weight and torch.equal(norm.repbn.bn.weight, weight)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (norm.repbn.bn.eps, norm.repbn.bn.momentum, norm.training, frozen.training) == (1e-3, 0.2, True, False)
    assert all(p.requires_grad for p in norm.parameters()) and not any(p.requires_grad for p in frozen.parameters())


def test_include_and_exclude():
    def model():
        return nn.ModuleDict({k: nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)) for k in ('backbone', 'head')})

    found = convert_norms(model(), include='backbone')
    assert [(r.name, r.fate, r.reason) for r in found.rows][1:3] == [
        ('backbone.1', 'converted', ''),
        ('head.0', 'kept', 'by include'),
    ]
    found = convert_norms(model(), exclude=['*.1'])
    assert [r.fate for r in found.rows] == ['converted', 'kept'] * 2
    with pytest.raises(ValueError, match=r"include: 'backbon' fits no module of ModuleDict. Use names as 'backbone'"):
        convert_norms(model(), include='backbon')
    with pytest.raises(ValueError, match='Linear has no norm to convert'):
        convert_norms(nn.Linear(3, 3))


def test_a_class_of_ones_own_is_registered():
    @register_norm(channel_dim=1)
    class Mine(nn.Module):
        num_features = 3

        def forward(self, x):
            return x / x.norm(dim=1, keepdim=True)

    model = nn.Sequential(Mine())
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    assert convert_norms(model).count('converted') == 1 and model[0].channel_dim == 1
    assert torch.equal(model.eval()(x), expected)


def test_a_norm_in_two_places_stays_one():
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    convert_norms(model)
    assert model[0] is model[2] and isinstance(model[0], PRepBN)


def swin(**kwargs):
    return dict(
        type='mmdet.SwinTransformer',
        embed_dims=8,
        depths=(2, 2),
        num_heads=(1, 2),
        strides=(4, 2),
        window_size=4,
        out_indices=(0, 1),
        **kwargs,
    )


def test_by_config_from_a_checkpoint_of_the_unconverted_to_the_folded(tmp_path, capsys):
    """mmdet's own Swin: to the bit at gamma 1, and folded but where its windows are padded or its maps leave it."""
    torch.manual_seed(1)
    plain = SwinTransformer(**{k: v for k, v in swin().items() if k != 'type'})
    plain.eval()  # which returns nothing
    file = tmp_path / 'plain.pth'
    torch.save({f'backbone.{k}': v for k, v in plain.state_dict().items()}, file)
    wrapped = nn.Module()
    wrapped.backbone = MODELS.build(dict(type='ConvertNorms', model=swin(), include='stages'))
    missing, unexpected = wrapped.load_state_dict(torch.load(file), strict=False)
    assert not unexpected and all('.repbn.' in k or k.endswith('.gamma') for k in missing)
    model = wrapped.backbone
    model.eval()
    assert type(model) is SwinTransformer and type(model.norm0) is nn.LayerNorm
    x = torch.randn(1, 3, 60, 72)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(x), plain(x)))
    again = MODELS.build(dict(type='ConvertNorms', model=swin(), include='stages'))
    again.load_state_dict(model.state_dict())  # its own keys, too

    learn(model)
    with torch.no_grad():
        expected = model(x)
    report = fold(model, x)
    assert (report.count('folded'), report.count('scale and shift')) == (5, 4) and report.difference < 1e-10
    assert all('zero padding before linear in stages' in row.detail for row in report.rows if row.fate != 'folded')
    with torch.no_grad():
        for a, e in zip(model(x), expected):
            assert_relative(a, e, 1e-5)


def test_a_transformer_encoder_layer_does_not_go_around_its_norms():
    """In eval mode torch's own computes with its norms' weights in one kernel."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = layer(x)
        convert_norms(layer)
        assert_relative(layer(x), expected, 1e-6)
        learn(layer)
        expected = layer(x)
        report = fold(layer, x)
        assert report.count('folded') == 2
        assert_relative(layer(x), expected, 1e-5)

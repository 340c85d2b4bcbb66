import copy
import logging

import pytest
import torch
import torch.nn as nn
from mmengine.logging import MMLogger
from mmengine.registry import MODELS

from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.checkpoints import LoadReport, check_fits, load_pretrained
from mmslab.layers import PRepBN
from mmslab.layers.norm import repbn_modules

from ..conftest import golden, randomize

LN, BN, REPBN, PREPBN = (dict(type=t) for t in ('LN', 'BN', 'RepBN', 'PRepBN'))
PREPBN_0 = dict(type='PRepBN', gamma=0.0)


def swin(**kwargs):
    arch = dict(embed_dims=4, depths=(2, 1), num_heads=(1, 2))
    return SLABSwin(**{**dict(arch=arch, attn='sla', window_sizes=2, out_indices=(0, 1)), **kwargs})


def pvt(**kwargs):
    arch = dict(embed_dims=(4, 8), depths=(2, 1), num_heads=(1, 2), mlp_ratios=(1, 1))
    return SLABPVT(**{**dict(arch=arch, sr_ratios=(2, 1), pretrain_img_size=16, out_indices=(0, 1)), **kwargs})


def deit(**kwargs):
    return SLABDeiT(**{**dict(arch=dict(embed_dims=4, depth=2, num_heads=1), pretrain_img_size=32), **kwargs})


def cswin(**kwargs):
    arch = dict(embed_dims=4, depths=(1, 1), num_heads=(2, 2))
    settings = dict(pretrain_img_size=16, split_sizes=1, sla_split_sizes=1, out_indices=(0, 1))
    return SLABCSWin(**{**dict(arch=arch, **settings), **kwargs})


@pytest.fixture
def log(tmp_path, request):
    """A logger, and what it has written."""
    logger = MMLogger(request.node.name, log_file=str(tmp_path / 'log'))
    for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:
        logger.removeHandler(handler)
    return logger, lambda: (tmp_path / 'log').read_text()


def unchanged(model, before):
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


MODELS_WITH_ALL_PARTS = {
    'swin': (swin, dict(attn=('sla', 'softmax'))),
    'swin-repbn': (swin, dict(attn=('focused', 'sla'), norm_cfg=REPBN, out_norm_cfg=REPBN)),
    'swin-ln': (swin, dict(attn='softmax', norm_cfg=LN, ffn_norm_cfg=BN)),
    'swin-bn': (swin, dict(attn=('softmax', 'sla'), norm_cfg=BN, out_norm_cfg=PREPBN)),
    'swin-folded': (swin, dict(attn=('sla', 'softmax'), deploy=True)),
    'pvt': (pvt, dict(attn='softmax', out_norm_cfg=LN)),
    'pvt-ln': (pvt, dict(attn=('softmax', 'sla'), norm_cfg=LN)),
    'pvt-folded': (pvt, dict(attn='softmax', deploy=True)),
    'deit': (deit, {}),
    'deit-repbn': (deit, dict(attn='softmax', norm_cfg=REPBN, out_norm_cfg=REPBN)),
    'cswin': (cswin, dict(attn=('sla', 'softmax'))),
    'cswin-ln': (cswin, dict(attn='focused', norm_cfg=LN)),
}


@pytest.mark.parametrize('make, kwargs', MODELS_WITH_ALL_PARTS.values(), ids=MODELS_WITH_ALL_PARTS)
def test_each_tensor_that_is_not_there_is_named(make, kwargs):
    model = make(**kwargs)
    state = randomize(make(**kwargs)).state_dict()
    before = copy.deepcopy(model.state_dict())
    for key in state:
        with pytest.raises(ValueError, match=f"'{key}'"):
            load_pretrained(model, {k: v for k, v in state.items() if k != key})
    assert unchanged(model, before)


def test_each_tensor_that_is_not_there_in_the_authors_files():
    """Under their names; what they leave in it unused may be lacking."""
    _, state = golden('slab_deit')
    model = SLABDeiT(arch=dict(embed_dims=24, depth=3, num_heads=3))
    unused = ('.warm', 'cls_token', 'head.weight', 'head.bias')
    used = {k: v for k, v in state.items() if not k.endswith(unused)}
    for key in used:
        with pytest.raises(ValueError, match='lacks'):
            load_pretrained(model, {k: v for k, v in state.items() if k != key})
    assert not load_pretrained(model, used).new


def test_counters_of_the_handover_are_there_of_all_norms_or_none():
    _, state = golden('prepbn_pvt')
    arch = dict(embed_dims=(16, 32, 40, 64), depths=(2, 1, 2, 1), num_heads=(1, 2, 5, 8), mlp_ratios=(4,) * 4)
    model = SLABPVT(arch=arch, attn='softmax', pretrain_img_size=64)
    key = 'block1.1.norm2.iter'
    with pytest.raises(ValueError, match="incomplete: it lacks 'layers.0.blocks.1.norm2.iter'.*Give a complete one"):
        load_pretrained(model, {k: v for k, v in state.items() if k != key})
    load_pretrained(model, {k: v for k, v in state.items() if not k.endswith('.iter')})
    assert {float(m.gamma) for m in model.modules() if isinstance(m, PRepBN)} == {0.0}


def test_counters_of_batches_may_all_be_new():
    """torch before 0.4.1 had none."""
    state = {k: v for k, v in swin().state_dict().items() if not k.endswith('num_batches_tracked')}
    report = load_pretrained(swin(), state)
    assert report.new and all(k.endswith('num_batches_tracked') for k in report.new)


def without(state, *parts):
    return {k: v for k, v in state.items() if not any(p in k for p in parts)}


@pytest.mark.parametrize(
    'kwargs, parts, lacking',
    [
        (dict(norm_cfg=PREPBN), ('layers.1.blocks.0.norm1.repbn', 'layers.1.blocks.0.norm1.gamma'), 'norm1.gamma'),
        (dict(norm_cfg=PREPBN), ('layers.0.blocks.1.norm2.ln',), 'norm2.ln.weight'),
        (dict(norm_cfg=PREPBN), ('layers.0.blocks.1.norm2',), 'norm2.gamma'),
        (dict(ffn_norm_cfg=BN), ('layers.0.blocks.1.mlp.norm',), 'mlp.norm.bn.weight'),
        (dict(), ('norm1.weight', 'norm1.bias'), 'norm1.weight'),
        (dict(attn='sla'), ('blocks.0.attn.dwc', 'blocks.0.attn.positional'), 'attn.positional_encoding'),
        (dict(attn='softmax'), ('layers.1.blocks.0.attn.relative',), 'layers.1.blocks.0.attn.relative'),
        (dict(attn='focused'), ('layers.1.blocks.0.attn.scale',), 'layers.1.blocks.0.attn.scale'),
        (dict(attn=('sla', 'softmax')), ('relative',), 'layers.1.blocks.0.attn.relative'),  # its only one
    ],
)
def test_a_part_that_is_there_elsewhere_is_no_new_part(kwargs, parts, lacking):
    state = swin(**kwargs).state_dict()
    with pytest.raises(ValueError, match=rf'incomplete or of another architecture: it lacks .*{lacking}'):
        load_pretrained(swin(**kwargs), without(state, *parts))


@pytest.mark.parametrize(
    'make, old, new, parts',
    [
        (swin, dict(norm_cfg=LN), dict(norm_cfg=PREPBN), {'RepBN and gamma, beside a LayerNorm'}),
        (swin, dict(norm_cfg=REPBN), dict(norm_cfg=PREPBN), {'LayerNorm, beside a RepBN'}),
        (swin, dict(), dict(ffn_norm_cfg=BN), {'norms in the MLPs'}),
        (swin, dict(out_norm_cfg=None), dict(), {'norms on the outputs'}),
        (swin, dict(out_indices=(1,)), dict(), {'norms on the outputs'}),
        (swin, dict(out_norm_cfg=LN), dict(out_norm_cfg=BN), {'norms on the outputs'}),
        (swin, dict(attn='softmax'), dict(attn='sla'), {'linear attention'}),
        (swin, dict(attn='sla'), dict(attn='softmax'), {'relative positions'}),
        (swin, dict(attn=('sla', 'softmax')), dict(attn='sla'), {'linear attention'}),  # in stage 2 alone
        (swin, dict(attn=('softmax', 'sla')), dict(attn='softmax'), {'relative positions'}),
        (swin, dict(attn='sla'), dict(attn='focused'), {'focusing'}),
        (swin, dict(attn='softmax'), dict(attn='focused'), {'linear attention', 'focusing'}),
        (swin, dict(attn='focused'), dict(attn='sla'), set()),
        (swin, dict(attn='SoftmaxAttention'), dict(attn='softmax'), {'relative positions'}),
        (pvt, dict(attn='sla'), dict(attn='softmax'), {'spatial reduction'}),
        (pvt, dict(attn='softmax'), dict(attn='sla'), {'linear attention'}),
        (
            pvt,
            dict(attn='softmax', norm_cfg=LN),
            dict(attn='sla', sla_sr_ratios=(2, 1)),
            {'linear attention', 'RepBN and gamma, beside a LayerNorm'},
        ),
        (cswin, dict(attn='softmax'), dict(attn=('sla', 'softmax')), {'linear attention'}),
        (cswin, dict(attn='sla'), dict(attn='softmax'), set()),
        (deit, dict(attn='softmax'), dict(attn='sla'), {'linear attention'}),
    ],
)
def test_parts_of_another_kind_may_be_new(make, old, new, parts):
    """And all that is not new is the checkpoint's."""
    source = randomize(make(**{**dict(attn='sla'), **old}))
    model = make(**{**dict(attn='sla'), **new})
    before = copy.deepcopy(model.state_dict())
    report = load_pretrained(model, source.state_dict())
    assert {report.reasons[k].replace(', not in its attention', '') for k in report.new} == parts
    for key, value in model.state_dict().items():
        if key in report.new:
            assert torch.equal(value, before[key]), key
        elif key in source.state_dict() and key not in report.resized and 'gamma' not in key:
            assert torch.equal(value, source.state_dict()[key]), key
    assert set(report.reasons) == set(report.new) | set(report.unused)


def test_an_output_norm_in_between_is_no_classifiers():
    state = swin().state_dict()
    load_pretrained(swin(), without(state, 'norm0.weight', 'norm0.bias'))  # a classifier returns its last map
    with pytest.raises(ValueError, match="lacks 'norm1.weight'"):
        load_pretrained(swin(), without(state, 'norm1.weight', 'norm1.bias'))


def test_plain_bn_is_not_repbn():
    with pytest.raises(ValueError, match="has a BN at 'norm0' without 'norm0.eta', but the model's out_norm_cfg"):
        load_pretrained(deit(out_norm_cfg=REPBN), deit(out_norm_cfg=BN).state_dict())
    with pytest.raises(ValueError, match='has a LN at .*mlp.norm.*ffn_norm_cfg makes a BN there.*ffn_norm_cfg=dict'):
        load_pretrained(swin(ffn_norm_cfg=BN), swin(ffn_norm_cfg=LN).state_dict())


class Gated(nn.Module):
    """Parameters of its own beside projections."""

    def __init__(self, embed_dims, num_heads, window_size, qkv_bias, proj_drop):
        super().__init__()
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.gate = nn.Parameter(torch.ones(embed_dims))

    def forward(self, x, *, hw_shape, mask=None):
        return self.proj(self.gate * self.qkv(x).chunk(3, dim=-1)[2])


class WithoutProjections(nn.Module):
    """``q``, ``k`` and ``v`` apart."""

    def __init__(self, embed_dims, num_heads, window_size, qkv_bias, proj_drop):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(embed_dims, embed_dims) for _ in range(3))

    def forward(self, x, *, hw_shape, mask=None):
        return self.v(x)


class Declared(Gated):
    own_parameters = {'gating': ('gate', 'temperature')}

    def __init__(self, embed_dims, **kwargs):
        super().__init__(embed_dims, **kwargs)
        self.temperature = nn.Parameter(torch.ones(1))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS._module_dict))
    for cls in (Gated, WithoutProjections, Declared):
        MODELS.register_module(name=f'_Test{cls.__name__}', module=cls)


@pytest.mark.parametrize('old', ['softmax', 'sla', ('sla', 'softmax')])
@pytest.mark.parametrize(
    'name, new, unused',
    [
        ('_TestGated', {'gate'}, {'dwc', 'positional_encoding', 'relative_position_bias_table'}),
        (
            '_TestWithoutProjections',
            {'q', 'k', 'v'},
            {'qkv', 'proj', 'dwc', 'positional_encoding', 'relative_position_bias_table'},
        ),
        ('_TestDeclared', {'gate', 'temperature'}, {'dwc', 'positional_encoding', 'relative_position_bias_table'}),
    ],
)
def test_a_registered_attention_takes_what_it_shares(registered, name, old, new, unused):
    """What it brings is new, what the checkpoint has beyond that unused; and its own checkpoint must be complete."""
    source = randomize(swin(attn=old))
    model = swin(attn=(name, 'softmax'))
    report = load_pretrained(model, source.state_dict())
    first = [k.split('.attn.')[1].split('.')[0] for k in report.new if k.startswith('layers.0')]
    assert set(first) == new
    assert {k.split('.attn.')[1].split('.')[0] for k in report.unused} <= unused
    if name != '_TestWithoutProjections':
        attn, theirs = model.layers[0].blocks[0].attn, source.layers[0].blocks[0].attn
        assert torch.equal(attn.qkv.weight, theirs.qkv.weight) and torch.equal(attn.proj.bias, theirs.proj.bias)
    own = model.state_dict()
    assert not load_pretrained(swin(attn=(name, 'softmax')), own).new
    for key in [k for k in own if '.blocks.1.attn.' in k]:
        with pytest.raises(ValueError, match=f"lacks '{key}'"):
            load_pretrained(model, {k: v for k, v in own.items() if k != key})
    if name == '_TestDeclared':
        report = load_pretrained(swin(attn='sla'), own)
        assert {k.rpartition('.')[2] for k in report.unused} == {'gate', 'temperature', 'relative_position_bias_table'}


def test_what_nobody_declares_is_not_left_out_of_a_built_in_attention(monkeypatch):
    """A logit scale, as Swin V2 has it, would change what the weights mean."""
    monkeypatch.setattr(MODELS, '_module_dict', {**MODELS._module_dict, '_TestGated': Gated})
    with pytest.raises(ValueError, match="the model has no 'layers.0.blocks.0.attn.gate'"):
        load_pretrained(swin(attn='softmax'), swin(attn=('_TestGated', 'softmax')).state_dict())


def test_a_malformed_declaration_is_named(monkeypatch):
    class Bad(Gated):
        own_parameters = ('gate',)

    monkeypatch.setattr(MODELS, '_module_dict', {**MODELS._module_dict, '_TestBad': Bad})
    with pytest.raises(ValueError, match=r"Bad.own_parameters must be a dict of parts.*but got \('gate',\)"):
        swin(attn='_TestBad')


@pytest.mark.parametrize(
    'kwargs, what, instead',
    [
        (dict(norm_eval=True), 'norm_eval=True', 'norm_eval=False, and'),
        (dict(frozen_stages=0), 'frozen_stages=0', 'norm_eval=False, frozen_stages=-1, and'),
        (dict(norm_eval=True, frozen_stages=1), 'norm_eval=True', 'norm_eval=False, frozen_stages=-1, and'),
    ],
)
def test_layernorms_for_prepbn_at_gamma_zero_with_frozen_statistics(kwargs, what, instead):
    """The README's way from PRepBN weights, with a file of LayerNorm weights."""
    model = swin(norm_cfg=PREPBN_0, **kwargs)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=f"has a LayerNorm at 'patch_embed.norm'.*gamma 0.*{what} keeps the BN statistics.*Give weights that were "
        f'trained with PRepBN.*gamma=1.0 in norm_cfg, {instead} GammaDecayHook and BNRecalibrationHook',
    ):
        load_pretrained(model, swin(norm_cfg=LN).state_dict())
    assert unchanged(model, before)
    for source in (dict(norm_cfg=REPBN), dict(norm_cfg=PREPBN_0)):
        load_pretrained(model, swin(**source).state_dict())


def test_layernorms_for_prepbn_at_gamma_zero_are_warned_of(log):
    logger, text = log
    load_pretrained(swin(norm_cfg=PREPBN_0), swin(norm_cfg=LN).state_dict(), logger=logger)
    assert 'WARNING' in text() and 'has LayerNorms, which 8 PRepBNs at gamma 0 do not compute' in text()


@pytest.mark.parametrize('kwargs, count', [(dict(norm_eval=True), 8), (dict(frozen_stages=1), 6)])
def test_statistics_that_will_never_be_learnt_are_warned_of(kwargs, count, log):
    """Six in the patch embedding and stage 1, with its downsampling; two in stage 2."""
    logger, text = log
    model = swin(**kwargs)
    load_pretrained(model, swin(norm_cfg=LN).state_dict(), logger=logger)
    assert f"has no BN statistics for {count} norms, 'patch_embed.norm.repbn' first" in text()
    assert 'keeps them as initialized. Unless gamma stays 1 there, set' in text()
    model.train()(torch.randn(2, 3, 16, 16))
    assert sum(m.bn.num_batches_tracked == 0 for m in repbn_modules(model)) == count


def test_nothing_is_warned_of_in_a_handover(log):
    logger, text = log
    load_pretrained(swin(), swin(norm_cfg=LN).state_dict(), logger=logger)
    load_pretrained(swin(norm_cfg=PREPBN_0, norm_eval=True), swin(norm_cfg=PREPBN_0).state_dict(), logger=logger)
    assert 'WARNING' not in text()


def test_the_report_is_short():
    source = {f'backbone.{k}': v for k, v in swin(norm_cfg=LN, attn='softmax').state_dict().items()}
    source.update({f'neck.{i}.weight': torch.zeros(1) for i in range(50)})
    report = load_pretrained(swin(attn='sla', ffn_norm_cfg=BN), source)
    text = str(report).splitlines()
    assert len(text) == 6 and max(map(len, text)) < 200
    assert text[0].endswith(f'{len(report.new)} newly initialized, {len(report.unused)} unused')
    first = 'patch_embed.norm.gamma, patch_embed.norm.repbn.eta'
    assert f'  {7 * 8} new: {first}, ... (RepBN and gamma, beside a LayerNorm)' in text
    assert any('linear attention, not in its attention)' in line for line in text)
    assert any(line.startswith('  15 new: ') and line.endswith('... (norms in the MLPs)') for line in text)
    assert '  50 unused: neck.0.weight, neck.1.weight, ... (not in backbone.*)' in text
    many = [f'part{i}' for i in range(9)]
    short = str(LoadReport(new=many, unused=many, reasons={k: f'reason {k}' for k in many}))
    assert len(short.splitlines()) == 11
    assert '  5 new: part4, part5, ... (reason part4; reason part5; reason part6; reason part7;' in short


def test_check_fits_lets_nothing_be_new():
    model = pvt(attn='softmax', out_norm_cfg=LN)
    state = model.state_dict()
    for key in state:
        with pytest.raises(ValueError, match=f"it lacks '{key}'"):
            check_fits(model, {k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match="it lacks 'patch_embed.norm.gamma'"):
        check_fits(swin(), swin(norm_cfg=LN).state_dict())


def test_check_fits_takes_no_other_attention():
    """Not even one that has all the model's tensors, and more."""
    with pytest.raises(
        ValueError, match="has, and the model has not, 'layers.0.blocks.0.attn.branches.0.positional_enc"
    ):
        check_fits(cswin(attn='softmax'), cswin(attn='sla').state_dict())
    with pytest.raises(ValueError, match="has, and the model has not, 'layers.0.blocks.0.attn.scale'"):
        check_fits(swin(attn='sla'), swin(attn='focused').state_dict())


def test_only_backbones_of_mmslab_are_loaded_into():
    with pytest.raises(ValueError, match='backbone must be one of mmslab, but got a Linear.*model.backbone'):
        load_pretrained(nn.Linear(2, 2), dict(weight=torch.zeros(2, 2)))

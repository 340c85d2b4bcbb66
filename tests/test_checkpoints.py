import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.runner import load_checkpoint

from mmslab import checkpoints
from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.checkpoints import canonical, convert, load_file, load_pretrained, read_state_dict

from .conftest import assert_relative, golden, randomize, randomize_gently

ARCH = dict(embed_dims=12, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4))
SOFTMAX = dict(attn='softmax', window_sizes=7)
LN = dict(norm_cfg=dict(type='LN'))
PVT_ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2))
DEIT_ARCH = dict(embed_dims=24, depth=2, num_heads=3)
CSWIN_ARCH = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4))


def swin(**kwargs):
    return SLABSwin(**{**dict(arch=ARCH, window_sizes=(8, 8, 4, 4)), **kwargs})


def outputs(model, hw=(64, 64)):
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 3 * hw[0] * hw[1]).view(1, 3, *hw))


def test_authors_training_checkpoint_keeps_gamma():
    _, state = golden('slab_swin_det')
    for key in [k for k in state if k.endswith('.iter')]:
        state[key] = torch.tensor(75000)
    model = SLABSwin(arch=ARCH)
    load_pretrained(model, dict(state_dict=state))
    assert model.layers[0].blocks[0].norm1.gamma == 0.25 and model.layers[0].blocks[0].norm1.ln_needed
    for key in [k for k in state if k.endswith('.iter')]:
        del state[key]
    load_pretrained(model, dict(state_dict=state))
    assert model.layers[0].blocks[0].norm1.gamma == 0 and not model.layers[0].blocks[0].norm1.ln_needed


@pytest.mark.parametrize('container', [None, 'model', 'state_dict'])
@pytest.mark.parametrize('prefix', ['', 'backbone.', 'module.', 'module.backbone.'])
def test_containers_and_prefixes(container, prefix, tmp_path):
    arrays, state = golden('prepbn_swin_det')
    state = {prefix + k: v for k, v in state.items()}
    if 'backbone' in prefix:
        state[prefix.replace('backbone', 'neck') + 'conv.weight'] = torch.zeros(3)
    torch.save(state if container is None else {container: state, 'epoch': 3}, tmp_path / 'w.pth')
    model = SLABSwin(arch=ARCH, **SOFTMAX, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'w.pth')))
    model.init_weights()
    with torch.no_grad():
        assert_relative(model.eval()(arrays['x'])[3], arrays['out3'])


def test_a_prefix_selects():
    _, state = golden('prepbn_swin_det')
    both = {f'student.{k}': v for k, v in state.items()} | {f'teacher.{k}': v + 1.0 for k, v in state.items()}
    model = SLABSwin(arch=ARCH, **SOFTMAX)
    load_pretrained(model, both, prefix='student')
    assert torch.equal(model.patch_embed.proj.weight, state['patch_embed.proj.weight'])


def test_a_gamma_above_the_configured_zero_is_warned_of(tmp_path):
    from mmengine.logging import MMLogger

    logger = MMLogger('gamma', log_file=str(tmp_path / 'log'))
    state = swin(norm_cfg=dict(type='PRepBN', gamma=0.5)).state_dict()
    load_pretrained(swin(norm_cfg=dict(type='PRepBN', gamma=0.0)), state, logger=logger)
    assert 'its gamma, 0.5, takes the place of the configured 0' in (tmp_path / 'log').read_text()


def test_repbn_only_weights_fit_repbn_and_prepbn():
    _, state = golden('prepbn_swin_cls')
    classifier = dict(pad_small_map=False, out_indices=(3,), **SOFTMAX, arch=ARCH)
    as_prepbn = SLABSwin(**classifier, out_norm_cfg=dict(type='PRepBN'))
    as_repbn = SLABSwin(**classifier, norm_cfg=dict(type='RepBN'), out_norm_cfg=dict(type='RepBN'))
    report = load_pretrained(as_prepbn, state)
    assert all('.ln.' in k for k in report.new) and report.new
    assert not load_pretrained(as_repbn, state).new
    assert all(float(b) == 0 for n, b in as_prepbn.named_buffers() if n.endswith('gamma'))
    assert_relative(outputs(as_prepbn)[0], outputs(as_repbn)[0], 1e-6)


def test_prepbn_at_gamma_zero_fits_repbn():
    _, state = golden('prepbn_swin_det')
    as_prepbn, as_repbn = SLABSwin(arch=ARCH, **SOFTMAX), SLABSwin(arch=ARCH, **SOFTMAX, norm_cfg=dict(type='RepBN'))
    load_pretrained(as_prepbn, state)
    load_pretrained(as_repbn, state)
    for a, b in zip(outputs(as_prepbn), outputs(as_repbn)):
        assert_relative(a, b, 1e-6)


def test_our_own_checkpoints_load():
    trained = randomize(swin())
    model = swin()
    report = load_pretrained(model, dict(state_dict={f'backbone.{k}': v for k, v in trained.state_dict().items()}))
    assert not report.new and not report.resized and not report.unused
    for a, b in zip(outputs(model), outputs(trained)):
        assert torch.equal(a, b)


def test_layernorm_weights_into_prepbn():
    """At gamma 1 the model computes what the LayerNorm model did; the RepBNs are fresh."""
    plain = randomize(SLABSwin(arch=ARCH, **SOFTMAX, **LN))
    state = plain.state_dict()
    state.update({'head.weight': torch.zeros(10, 96), 'norm.weight': torch.zeros(96)})
    model = SLABSwin(arch=ARCH, **SOFTMAX)
    report = load_pretrained(model, dict(model=state))
    for a, b in zip(outputs(model), outputs(plain)):
        assert_relative(a, b, 1e-5)
    assert sorted(report.unused) == ['head.weight', 'norm.weight']
    assert all('repbn' in k or k.endswith('gamma') for k in report.new)
    assert model.layers[0].blocks[0].norm1.repbn.eta == 1


def test_openmmlab_classification_checkpoint():
    """mmpretrain's Swin: weights through its key names and its order of merging give its outputs."""
    from mmpretrain.models import SwinTransformer

    theirs = SwinTransformer(arch=dict(embed_dims=12, depths=[2, 2, 2, 1], num_heads=[1, 2, 2, 4]), img_size=224)
    randomize(theirs).eval()
    state = {f'backbone.{k}': v for k, v in theirs.state_dict().items()} | {'head.fc.weight': torch.zeros(5, 96)}
    ours = SLABSwin(arch=ARCH, **SOFTMAX, **LN, pad_small_map=False, out_indices=(3,))
    report = load_pretrained(ours, dict(state_dict=state))
    assert not report.new
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert_relative(ours.eval()(x)[0], theirs(x)[0], 1e-5)


def test_softmax_weights_into_sla_stages():
    """The parts that only SLA has are new, those that only softmax has unused; nothing else."""
    plain = randomize(SLABSwin(arch=ARCH, **SOFTMAX))
    model = SLABSwin(arch=ARCH)
    report = load_pretrained(model, plain.state_dict())
    assert {k.split('.attn.')[1].split('.')[0] for k in report.new} == {'dwc', 'positional_encoding'}
    assert {k.split('.attn.')[1] for k in report.unused} == {'relative_position_bias_table'}
    assert len(report.new) == 4 * 3 and len(report.unused) == 4


def test_position_terms_of_other_windows_are_resized():
    small, large = randomize(swin()), swin(window_sizes=((12, 6), 8, 7, 4))
    report = load_pretrained(large, small.state_dict())
    assert [k.split('.')[1] for k in report.resized] == ['0', '0', '2', '2']
    old = small.layers[0].blocks[0].attn.positional_encoding.view(1, 8, 8, 12).permute(0, 3, 1, 2)
    want = F.interpolate(old, (12, 6), mode='bicubic', align_corners=False).permute(0, 2, 3, 1).reshape(1, 72, 12)
    assert torch.equal(large.layers[0].blocks[0].attn.positional_encoding, want)
    table = small.layers[2].blocks[0].attn.relative_position_bias_table.t().view(1, 2, 7, 7)
    want = F.interpolate(table, (13, 13), mode='bicubic', align_corners=False).view(2, 169).t()
    assert torch.equal(large.layers[2].blocks[0].attn.relative_position_bias_table, want)


def test_a_backbone_of_fewer_stages_takes_what_it_has():
    model = swin(out_indices=(0, 1))
    report = load_pretrained(model, randomize(swin()).state_dict())
    assert not report.new and all(
        k.startswith(('layers.2', 'layers.3', 'layers.1.downsample', 'norm2', 'norm3')) for k in report.unused
    )


def test_the_log_line_counts_and_names(caplog, tmp_path):
    from mmengine.logging import MMLogger

    logger = MMLogger('counts', log_file=str(tmp_path / 'log'))
    _, state = golden('slab_swin_det')
    load_pretrained(SLABSwin(arch=ARCH, window_sizes=(28, 28, 7, 7)), state, logger=logger)
    text = (tmp_path / 'log').read_text()
    assert '244 tensors taken, 2 resized, 0 newly initialized, 3 unused' in text
    assert 'resized: layers.0.blocks.0.attn.positional_encoding' in text
    assert 'unused: layers.2.blocks.0.attn.relative_position_index' in text


def test_convert(tmp_path):
    _, state = golden('slab_swin_cls')
    torch.save(dict(model=state), tmp_path / 'in.pth')
    convert(tmp_path / 'in.pth', tmp_path / 'out.pth')
    converted = torch.load(tmp_path / 'out.pth', weights_only=True)['state_dict']
    assert not any(k.endswith(('attn_mask', 'relative_position_index', 'alpha', 'total_step')) for k in converted)
    assert {'head.weight', 'norm.repbn.eta', 'layers.0.blocks.0.norm1.gamma'} <= set(converted)
    a, b = SLABSwin(arch=ARCH), SLABSwin(arch=ARCH)
    load_pretrained(a, tmp_path / 'in.pth')
    load_checkpoint(b, str(tmp_path / 'out.pth'))  # mmengine's own loader understands the result
    for name, value in a.named_parameters():
        if not name.startswith('norm'):
            assert torch.equal(value, b.get_parameter(name)), name
    with pytest.raises(FileExistsError, match='OUT .*exists.*--force'):
        convert(tmp_path / 'in.pth', tmp_path / 'out.pth')
    with pytest.raises(FileNotFoundError, match='folder of OUT'):
        convert(tmp_path / 'in.pth', tmp_path / 'no' / 'out.pth')
    assert not list(tmp_path.glob('*.part'))


PVT = dict(
    arch=dict(embed_dims=(16, 32, 40, 64), depths=(2, 1, 2, 1), num_heads=(1, 2, 5, 8), mlp_ratios=(4, 4, 4, 4)),
    pretrain_img_size=64,
)
CSWIN = dict(
    arch=dict(embed_dims=16, depths=(1, 2, 2, 1), num_heads=(2, 4, 4, 8)),
    pretrain_img_size=64,
    split_sizes=(1, 2, 2, 2),
    sla_split_sizes=(4, 4, 2, 2),
)
DEIT = dict(arch=dict(embed_dims=24, depth=3, num_heads=3))
FAMILIES = [
    ('prepbn_pvt', SLABPVT, dict(**PVT, attn='softmax')),
    ('slab_pvt', SLABPVT, PVT),
    ('slab_deit', SLABDeiT, DEIT),
    ('prepbn_deit', SLABDeiT, dict(**DEIT, attn='softmax')),
    ('slab_cswin_mixed', SLABCSWin, CSWIN),
]


@pytest.mark.parametrize('name, cls, kwargs', FAMILIES, ids=[f[0] for f in FAMILIES])
def test_every_family_in_a_detector_checkpoint_and_converted(name, cls, kwargs, tmp_path):
    _, state = golden(name)
    model, prefixed, converted = cls(**kwargs), cls(**kwargs), cls(**kwargs)
    load_pretrained(model, state)
    inside = {f'module.backbone.{k}': v for k, v in state.items() if not k.startswith('head.')}
    load_pretrained(prefixed, inside | {'module.neck.conv.weight': torch.zeros(3)})
    torch.save(dict(model=state), tmp_path / 'in.pth')
    convert(tmp_path / 'in.pth', tmp_path / 'out.pth')
    load_checkpoint(converted, str(tmp_path / 'out.pth'))
    for key, value in model.state_dict().items():
        assert torch.equal(value, prefixed.state_dict()[key]), key
        if not key.startswith('norm'):  # mmengine's loader does not know where a classifier's norm belongs
            assert torch.equal(value, converted.state_dict()[key]), key
    assert canonical(model.state_dict()).keys() == model.state_dict().keys()


@pytest.mark.parametrize('name, cls, kwargs', FAMILIES[1:3], ids=['pvt', 'deit'])
def test_a_checkpoint_of_another_family_is_named(name, cls, kwargs):
    _, state = golden(name)
    with pytest.raises(ValueError, match='another architecture'):
        load_pretrained(swin(), state)
    with pytest.raises(ValueError, match='another architecture'):
        load_pretrained(cls(**kwargs), swin().state_dict())


@pytest.mark.parametrize(
    'name, config',
    [
        ('prepbn_swin_cls', dict(type='SLABSwin', arch=ARCH, **SOFTMAX, pad_small_map=False, out_indices=(3,))),
        ('slab_deit', dict(type='SLABDeiT', arch=dict(embed_dims=24, depth=3, num_heads=3), out_type='avg_featmap')),
    ],
)
def test_a_whole_classifier_goes_into_mmpretrain(tmp_path, name, config):
    """The authors' logits from mmpretrain's ImageClassifier, by mmengine's own loader."""
    import mmpretrain  # noqa: F401
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    init_default_scope('mmpretrain')
    arrays, state = golden(name)
    torch.save(dict(model=state), tmp_path / 'in.pth')
    convert(tmp_path / 'in.pth', tmp_path / 'out.pth', head='mmpretrain')
    eps = dict(ln_eps=1e-6) if 'deit' in name else {}
    model = MODELS.build(
        dict(
            type='ImageClassifier',
            backbone=dict(
                **config,
                out_norm_cfg=dict(type='PRepBN', gamma=0.0, **eps),
                norm_cfg=dict(type='PRepBN', gamma=0.0, **eps),
            )
            if 'deit' in name
            else dict(**config, norm_cfg=dict(type='RepBN'), out_norm_cfg=dict(type='RepBN')),
            neck=None if 'deit' in name else dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=24 if 'deit' in name else 96),
        )
    )
    checkpoints.check_fits(model, tmp_path / 'out.pth')
    load_checkpoint(model, str(tmp_path / 'out.pth'), strict=name != 'slab_deit')  # that has an unused class token
    with torch.no_grad():
        assert_relative(model.eval()(arrays['x']), arrays['logits'])
    convert(tmp_path / 'in.pth', tmp_path / 'bare.pth', head='drop')
    assert not any('head' in k for k in read_state_dict(tmp_path / 'bare.pth'))
    with pytest.raises(ValueError, match="head must be one of .*'both'"):
        convert(tmp_path / 'in.pth', tmp_path / 'no.pth', head='both')


PREPBN = dict(norm_cfg=dict(type='PRepBN', gamma=0.0), out_norm_cfg=dict(type='PRepBN', gamma=0.0))
FOLDING = {
    'swin-sla': (swin, PREPBN),
    'swin-softmax': (swin, dict(**SOFTMAX, **PREPBN)),
    'swin-bn-ffn': (swin, dict(norm_cfg=dict(type='BN'), ffn_norm_cfg=dict(type='BN'))),
    'swin-ln': (swin, dict(**SOFTMAX, **LN)),  # its norms stay; only the windows' terms are prepared
    'swin-ln-sla': (swin, dict(attn='sla', **LN)),
    'pvt-sla': (SLABPVT, dict(arch=PVT_ARCH, **PREPBN)),
    'pvt-ln': (SLABPVT, dict(arch=PVT_ARCH, attn='softmax', **LN)),
    'deit': (SLABDeiT, dict(arch=DEIT_ARCH, **PREPBN)),
    'cswin': (SLABCSWin, dict(arch=CSWIN_ARCH, **PREPBN)),
}


def pretrained(tmp_path, make, kwargs, content, **more):
    """A backbone with ``content``, as a file, through ``init_cfg``."""
    path = saved(tmp_path, content)
    model = make(**kwargs, **more, init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model.init_weights()
    return model


@pytest.mark.parametrize('prefix', ['', 'backbone.'])
@pytest.mark.parametrize('make, kwargs', FOLDING.values(), ids=FOLDING)
def test_folded_checkpoints_and_unfolded_ones(tmp_path, make, kwargs, prefix):
    """Each loads into the form that it is of; into the other one nothing is loaded, and the error says what to do."""
    model = randomize_gently(make(**kwargs)).eval()
    plain = {prefix + k: v for k, v in model.state_dict().items()}
    want = outputs(model)
    model.switch_to_deploy()
    folded = {prefix + k: v for k, v in model.state_dict().items()}

    deployed = pretrained(tmp_path, make, kwargs, dict(state_dict=folded), deploy=True)
    for out, of_file, of_plain in zip(outputs(deployed), outputs(model), want):
        assert torch.equal(out, of_file)
        assert_relative(out, of_plain, 1e-5)
    wrap = (lambda m: nn.ModuleDict(dict(backbone=m))) if prefix else (lambda m: m)
    checkpoints.check_fits(wrap(deployed), folded)
    checkpoints.check_fits(wrap(make(**kwargs)), plain)
    report = load_pretrained(deployed, folded)
    assert not report.new and not report.unused and not report.resized

    for state, deploy, message in (
        (
            plain,
            True,
            r"w\.pth' is not folded, but the SLAB.* deploy=True. Run mmslab deploy on it, or set deploy=False",
        ),
        (folded, False, r"w\.pth' is folded.* Set deploy=True in the config"),
    ):
        other = make(**kwargs, deploy=deploy)
        before = copy.deepcopy(other.state_dict())
        path = saved(tmp_path, state)
        for load in (load_pretrained, lambda m, path: checkpoints.check_fits(wrap(m), path)):
            with pytest.raises(ValueError, match=message):
                load(other, path)
        with pytest.raises(ValueError, match=message):
            pretrained(tmp_path, make, kwargs, state, deploy=deploy)
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_a_backbone_that_folding_leaves_alone_loads_either_way():
    kwargs = dict(arch=DEIT_ARCH, attn='softmax', out_norm_cfg=dict(type='LN'), **LN)
    plain, deployed = randomize(SLABDeiT(**kwargs)), SLABDeiT(**kwargs, deploy=True)
    load_pretrained(deployed, plain.state_dict())
    assert_relative(outputs(deployed)[0], outputs(plain)[0], 1e-6)
    load_pretrained(SLABDeiT(**kwargs), deployed.state_dict())


def test_shared_kernels_tell_a_folded_checkpoint_with_layernorms():
    kwargs = dict(arch=DEIT_ARCH, attn='sla', out_norm_cfg=dict(type='LN'), **LN)
    plain, deployed = SLABDeiT(**kwargs), SLABDeiT(**kwargs, deploy=True)
    with pytest.raises(ValueError, match='is not folded, but the SLABDeiT is built with deploy=True'):
        load_pretrained(deployed, plain.state_dict())
    with pytest.raises(ValueError, match='is folded.*deploy=True'):
        load_pretrained(plain, deployed.state_dict())


def test_output_norms_that_went_into_the_neck_are_named():
    state = {k: v for k, v in swin(deploy=True, **PREPBN).state_dict().items() if not re.match(r'norm\d\.', k)}
    for deployed in (swin(deploy=True, **PREPBN), swin(deploy=True, out_norm_cfg=dict(type='BN'))):
        for load in (load_pretrained, checkpoints.check_fits):
            with pytest.raises(
                ValueError, match="folded, its output norms into.*lacks 'norm0.scale'.*out_norm_cfg=None"
            ):
                load(deployed, state)
    load_pretrained(swin(deploy=True, out_norm_cfg=None), state)


def test_other_models_are_told_nothing_of_folding():
    """A detector without our backbones, and a checkpoint without blocks."""
    with pytest.raises(ValueError, match="not of this config: it lacks 'weight'"):
        checkpoints.check_fits(nn.Linear(2, 2), swin(deploy=True).state_dict())
    with pytest.raises(ValueError, match='no tensor of SLABSwin'):
        load_pretrained(swin(deploy=True), dict(a=torch.zeros(2)))


def saved(tmp_path: Path, content) -> Path:
    torch.save(content, tmp_path / 'w.pth')
    return tmp_path / 'w.pth'


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='no.pth.*does not exist'):
        load_pretrained(swin(), tmp_path / 'no.pth')


@pytest.mark.parametrize('damage', ['truncated', 'corrupted', 'text', 'empty'])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = saved(tmp_path, swin().state_dict())
    content = path.read_bytes()
    damaged = {
        'truncated': content[: len(content) // 2],
        'corrupted': b'PK' + b'\0' * 5000,
        'text': b'version https://example',
        'empty': b'',
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match='w.pth.* cannot be read.*truncated, corrupted, or no PyTorch checkpoint'):
        load_pretrained(swin(), path)


class Harmful:
    def __reduce__(self):
        return (print, ('code in a checkpoint ran',))


def test_a_checkpoint_with_code_needs_trust(tmp_path, capsys):
    path = saved(tmp_path, dict(state_dict=swin().state_dict(), meta=Harmful()))
    with pytest.raises(ValueError, match='Python objects beside tensors.*--trust-checkpoint'):
        load_pretrained(swin(), path)
    assert 'ran' not in capsys.readouterr().out
    load_pretrained(swin(), path, trust=True)
    assert 'code in a checkpoint ran' in capsys.readouterr().out


def test_mmengine_reads_safely_once_told(tmp_path, monkeypatch):
    from mmengine.runner.checkpoint import CheckpointLoader

    monkeypatch.setattr(CheckpointLoader, 'load_checkpoint', CheckpointLoader.__dict__['load_checkpoint'])  # put back
    path = saved(tmp_path, dict(state_dict=swin().state_dict(), meta=Harmful()))
    checkpoints.use_safe_loading()
    with pytest.raises(ValueError, match='--trust-checkpoint'):
        load_checkpoint(swin(), str(path))


@pytest.mark.parametrize('content', [dict(epoch=3), [1, 2], dict(state_dict={})])
def test_a_file_without_tensors_is_named(tmp_path, content):
    with pytest.raises(ValueError, match='holds no tensors'):
        load_pretrained(swin(), saved(tmp_path, content))


def test_a_foreign_checkpoint_is_named(tmp_path):
    from torchvision.models import resnet18

    model = swin()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match='no tensor of SLABSwin'):
        load_pretrained(model, saved(tmp_path, resnet18().state_dict()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    'arch, message',
    [
        (dict(embed_dims=16, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4)), r'patch_embed.proj.weight.*\(16, 3, 4, 4\)'),
        (dict(embed_dims=12, depths=(2, 2, 3, 1), num_heads=(1, 2, 2, 4)), r"no 'layers.2.blocks.2"),
        (dict(embed_dims=12, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4)), r"lacks 'layers.2.blocks.1"),
    ],
)
def test_another_arch_is_named(arch, message):
    model = swin()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f'another architecture.*{message}'):
        load_pretrained(model, swin(arch=arch).state_dict())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_nan_weights_are_named(bad):
    state = swin().state_dict()
    state['layers.1.blocks.0.mlp.fc1.weight'][3, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite values in 'layers.1.blocks.0.mlp.fc1.weight'"):
        load_pretrained(swin(), state)


def test_another_norm_is_named():
    with pytest.raises(ValueError, match="has a PRepBN at gamma 1 .*makes a LN there. Build it with .*'PRepBN'"):
        load_pretrained(swin(**LN), swin().state_dict())
    with pytest.raises(ValueError, match='has a PRepBN at gamma 1 .*makes a RepBN there'):
        load_pretrained(swin(norm_cfg=dict(type='RepBN')), swin().state_dict())
    with pytest.raises(ValueError, match='has a LN .*makes a RepBN there'):
        load_pretrained(swin(norm_cfg=dict(type='RepBN')), swin(**LN).state_dict())


def test_canonical_names_are_left_alone():
    state = swin().state_dict()
    assert canonical(state).keys() == state.keys()
    assert read_state_dict(state).keys() == state.keys()


def test_old_pickle_files_still_load(tmp_path):
    state = {'a': torch.ones(2)}
    torch.save(state, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    assert torch.equal(load_file(tmp_path / 'old.pth')['a'], state['a'])

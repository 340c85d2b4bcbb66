import copy

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS, init_default_scope

from mmslab.backbones import SLABCSWin
from mmslab.backbones.cswin import CrossShapedAttention
from mmslab.checkpoints import load_pretrained
from mmslab.layers import set_gamma

from ..conftest import assert_relative, golden, randomize

GOLDEN = dict(
    arch=dict(embed_dims=16, depths=(1, 2, 2, 1), num_heads=(2, 4, 4, 8)),
    pretrain_img_size=64,
    split_sizes=(1, 2, 2, 2),
    sla_split_sizes=(4, 4, 2, 2),
)
ARCH = dict(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 4))
MIXED = ('sla', 'focused', 'softmax', 'softmax')
LN = dict(attn='softmax', norm_cfg=dict(type='LN'))


def tiny(**kwargs) -> SLABCSWin:
    return SLABCSWin(**{**GOLDEN, 'arch': ARCH, 'drop_path_rate': 0.0, **kwargs})


@pytest.mark.parametrize(
    'name, attn',
    [
        ('prepbn_cswin', 'softmax'),
        ('slab_cswin', 'sla'),
        ('slab_cswin_mixed', ('sla', 'sla', 'softmax', 'softmax')),
    ],
)
def test_matches_the_authors(name, attn):
    arrays, state = golden(name)
    model = SLABCSWin(**GOLDEN, attn=attn, out_indices=(3,), out_norm_cfg=dict(type='PRepBN')).eval()
    report = load_pretrained(model, dict(model=state))
    assert not report.new and not report.resized
    # beside the head, the focusing scales that the authors have left in their SLA
    assert {k.rpartition('.')[2] for k in report.unused if not k.startswith('head.')} <= {'scale'}
    stages = {}
    for i, stage in enumerate(model.layers):
        stage.blocks[-1].register_forward_hook(lambda m, x, y, i=i: stages.update({i: y.flatten(1, 2)}))
    with torch.no_grad():
        (out,) = model(arrays['x'])
    for i in range(4):
        assert_relative(stages[i], arrays[f'stage{i}'])
    assert_relative(out.mean((2, 3)) @ state['head.weight'].t() + state['head.bias'], arrays['logits'])


def stripes_by_hand(attn, x, hw, kind):
    """CSWin's attention in float64, stripe by stripe and head by head, on maps padded with zeros."""
    p = {k: v.double() for k, v in attn.state_dict().items()}
    H, W = hw
    B, _, C = x.shape
    half, heads, s = C // 2, attn.branches[0].num_heads, attn.split_size
    d = half // heads
    q, k, v = (x.double() @ p['qkv.weight'].t() + p['qkv.bias']).view(B, H, W, 3, C).unbind(3)
    out = torch.zeros(B, H, W, C, dtype=torch.float64)
    for branch in range(2):
        q_, k_, v_ = (t[..., branch * half : branch * half + half] for t in (q, k, v))
        if branch == 1:  # horizontal stripes are the vertical ones of the transposed map
            q_, k_, v_ = (t.transpose(1, 2) for t in (q_, k_, v_))
        length, across = q_.shape[1:3]
        lepe = p[f'lepe.{branch}.weight'] if branch == 0 else p[f'lepe.{branch}.weight'].transpose(2, 3)
        result = torch.zeros(B, length, across, half, dtype=torch.float64)
        before, after = (-across % s) // 2, -across % s - (-across % s) // 2
        q_, k_, v_ = (F.pad(t, (0, 0, before, after)) for t in (q_, k_, v_))
        result = F.pad(result, (0, 0, before, after))
        for start in range(0, before + across, s):
            qs, ks, vs = (t[:, :, start : start + s] for t in (q_, k_, v_))
            y = F.conv2d(vs.permute(0, 3, 1, 2), lepe, p[f'lepe.{branch}.bias'], padding=1, groups=half)
            if kind == 'sla':
                encoding = p[f'branches.{branch}.positional_encoding']
                size = attn.branches[branch].encoding_size
                encoding = encoding.float().view(1, *size, half).permute(0, 3, 1, 2)
                encoding = F.interpolate(encoding, attn.stripe(branch, hw), mode='bicubic').double()
                encoding = encoding if branch == 0 else encoding.transpose(2, 3)
                ks = (ks + encoding.permute(0, 2, 3, 1)).relu()
                qs = qs.relu()
                dwc = p[f'branches.{branch}.dwc.weight'].repeat(heads, 1, 1, 1)
                dwc = dwc if branch == 0 else dwc.transpose(2, 3)
                bias = p[f'branches.{branch}.dwc.bias'].repeat(heads)
                y = y + F.conv2d(vs.permute(0, 3, 1, 2), dwc, bias, padding=2, groups=half)
            for head in range(heads):
                c = slice(head * d, head * d + d)
                qh, kh, vh = (t[..., c].flatten(1, 2) for t in (qs, ks, vs))
                weights = qh @ kh.transpose(1, 2)
                if kind == 'sla':
                    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
                else:
                    weights = (weights / d**0.5).softmax(-1)
                y[:, c] += (weights @ vh).view(B, length, s, d).permute(0, 3, 1, 2)
            result[:, :, start : start + s] = y.permute(0, 2, 3, 1)
        result = result[:, :, before : before + across]
        out[..., branch * half : branch * half + half] = result if branch == 0 else result.transpose(1, 2)
    return out.flatten(1, 2) @ p['proj.weight'].t() + p['proj.bias']


@pytest.mark.parametrize('kind', ['softmax', 'sla'])
@pytest.mark.parametrize('hw', [(6, 6), (5, 7), (2, 9), (1, 1)])
def test_stripes_on_maps_of_any_size(kind, hw):
    attn = randomize(CrossShapedAttention(kind, 16, 4, resolution=6, split_size=3, one_branch=False)).double()
    x = torch.randn(2, hw[0] * hw[1], 16, dtype=torch.float64)
    assert_relative(attn(x, hw_shape=hw), stripes_by_hand(attn, x, hw, kind), 1e-6)


def test_branches():
    """One branch in the last stage, and where a split is as large as the map of the pre-training."""
    model = tiny(attn=('sla', 'sla', 'softmax', 'softmax'), sla_split_sizes=(4, 8, 2, 2))
    assert [stage.blocks[0].attn.num_branches for stage in model.layers] == [2, 1, 2, 1]
    with torch.device('meta'):
        default = SLABCSWin()  # the authors' configuration at 224: SLA on the whole map, softmax in stripes of 7
    assert [stage.blocks[0].attn.num_branches for stage in default.layers] == [1, 1, 2, 1]
    encodings = [stage.blocks[0].attn.branches[0].positional_encoding.shape[1] for stage in default.layers[:2]]
    assert encodings == [56 * 56, 28 * 28] and default.layers[2].blocks[0].attn.stripe(1, (20, 30)) == (7, 30)


def test_position_encodings_of_another_image_size():
    settings = dict(attn=('sla', 'sla', 'softmax', 'softmax'), split_sizes=(1, 2, 1, 2))
    small = randomize(tiny(**settings, pretrain_img_size=32, sla_split_sizes=(8, 4, 2, 1)))
    large = tiny(**settings, sla_split_sizes=(16, 8, 4, 2))
    report = load_pretrained(large, small.state_dict())
    assert [k.rpartition('.')[2] for k in report.resized] == ['positional_encoding'] * 2
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for a, b in zip(large.eval()(x), small.eval()(x)):
            assert_relative(a, b, 1e-5)
    # of stripes the old shape is not known: 8x2 or 4x4
    with pytest.raises(ValueError, match=r'positional_encoding.* is \(1, 64, 4\) there and \(1, 32, 4\)'):
        load_pretrained(tiny(attn='sla', sla_split_sizes=2), tiny(attn='sla', sla_split_sizes=4).state_dict())


def test_archs_have_the_published_sizes():
    def count(arch: str) -> int:
        with torch.device('meta'):
            return sum(p.numel() for p in SLABCSWin(arch=arch, **LN, out_indices=(3,)).parameters())

    def block(c: int) -> int:  # qkv, proj, MLP with their biases, two norms, LePE
        return 12 * c * c + 9 * c + 4 * c + 10 * c

    head = 513 * 1000
    assert round((count('tiny') + head) / 1e6) in (22, 23) and round((count('small') + head) / 1e6) == 35
    assert count('slab_tiny') - count('tiny') == block(64) + 2 * block(128) - 3 * block(256)


@pytest.mark.parametrize('attn', ['softmax', 'sla', MIXED], ids=['softmax', 'sla', 'mixed'])
@pytest.mark.parametrize('hw', [(4, 4), (37, 53), (448, 448), (200, 334)])
def test_any_size_and_batch(attn, hw):
    model = randomize(tiny(attn=attn, split_sizes=(1, 2, 7, 7))).eval()
    x = torch.randn(3, 3, *hw)
    with torch.no_grad():
        outs = model(x)
        ones = [model(x[i : i + 1]) for i in range(3)]
    size = [(s + 1) // 4 for s in hw]
    for i, out in enumerate(outs):
        assert out.shape == (3, 8 * 2**i, *size) and out.is_contiguous()
        assert_relative(out, torch.cat([o[i] for o in ones]), 1e-4)
        size = [-(-s // 2) for s in size]


@pytest.mark.parametrize('attn', ['softmax', MIXED], ids=['softmax', 'mixed'])
def test_every_parameter_trains(attn):
    model = tiny(attn=attn).train()
    sum(o.square().mean() for o in model(torch.randn(2, 3, 37, 53))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_stages():
    model = tiny(attn=MIXED, frozen_stages=1).train()
    before = copy.deepcopy(model.state_dict())
    sum(o.square().mean() for o in model(torch.randn(2, 3, 64, 64))).backward()
    frozen = ('patch_embed.', 'layers.0.', 'norm0.')
    for name, p in model.named_parameters():
        assert p.requires_grad == (not name.startswith(frozen)) == (p.grad is not None), name
    for name, b in model.named_buffers():
        if name.endswith('running_mean'):
            assert torch.equal(b, before[name]) == name.startswith(frozen), name


def test_norm_eval():
    model = tiny(attn=MIXED, norm_eval=True).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(2, 3, 32, 32))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_gradient_checkpointing_changes_nothing():
    x = torch.randn(2, 3, 64, 64)
    results = []
    for with_cp in (False, True):
        model = randomize(tiny(attn=MIXED, with_cp=with_cp, drop_path_rate=0.3)).train()
        set_gamma(model, 0.5)
        torch.manual_seed(3)
        sum(o.square().mean() for o in model(x)).backward()
        results.append((model, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())))
    (_, grads, buffers), (_, cp_grads, cp_buffers) = results
    for name, grad in grads.items():
        assert_relative(cp_grads[name], grad, 1e-4)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, cp_buffers[name]), name


def test_layernorm_weights_into_prepbn():
    plain = randomize(tiny(**LN)).eval()
    model = tiny(attn='softmax').eval()
    report = load_pretrained(model, plain.state_dict())
    assert all('repbn' in k or k.endswith('gamma') for k in report.new) and not report.unused
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for a, b in zip(model(x), plain(x)):
            assert_relative(a, b, 1e-5)


def test_in_mmdets_retinanet():
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    backbone = dict(type='SLABCSWin', **{**GOLDEN, 'arch': ARCH}, attn=MIXED)
    text = f"""
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'
custom_imports = dict(imports=['mmslab'])
model = dict(backbone=dict(_delete_=True, **{backbone!r}), neck=dict(in_channels=[8, 16, 32, 64]))
"""
    cfg = Config.fromstring(text, '.py')
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    assert isinstance(model.backbone, SLABCSWin)
    data = model.data_preprocessor(demo_mm_inputs(2, [[3, 64, 96], [3, 60, 90]], num_classes=80), True)
    total, _ = model.parse_losses(model(**data, mode='loss'))
    total.backward()
    assert torch.isfinite(total) and model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert len(model.eval()(**data, mode='predict')) == 2


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(arch='huge'), "SLABCSWin has no arch 'huge'.*slab_tiny.*small.*tiny"),
        (dict(arch=dict(ARCH, num_heads=(2, 2))), r"arch\['num_heads'\] must have one entry for each of the 4"),
        (dict(arch=dict(ARCH, num_heads=3)), 'num_heads=3, embed_dims=8'),
        (dict(arch=dict(ARCH, num_heads=1)), 'num_heads must be even where attention is in two kinds of stripes.*1'),
        (dict(attn='sea'), "attn has the unknown type 'sea'"),
        (dict(attn=('sla', 'sla')), 'attn must have one entry for each of the 4 stages, but got 2'),
        (dict(split_sizes=(1, 2, 7)), 'split_sizes must have one entry for each of the 4 stages, but got 3'),
        (dict(split_sizes=0), r'split_sizes must be positive integers.*\(0, 0, 0, 0\)'),
        (dict(sla_split_sizes=(1, 2, 7)), 'sla_split_sizes must have one entry for each of the 4 stages, but got 3'),
        (dict(sla_split_sizes=(4, 4, 2, -2)), r'sla_split_sizes must be positive integers.*\(4, 4, 2, -2\)'),
        (dict(pretrain_img_size=3), 'pretrain_img_size must be an integer, at least one patch of 4 pixels.*3'),
        (dict(norm_cfg=dict(type='Norm7')), "norm_cfg has the unknown type 'Norm7'"),
        (dict(out_norm_cfg=dict(type='Norm7')), "out_norm_cfg has the unknown type 'Norm7'"),
        (dict(out_indices=(1, 1)), r'out_indices must be.*\(1, 1\)'),
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
    with pytest.raises(ValueError, match="another architecture.*lacks 'layers.1.blocks.1"):
        load_pretrained(tiny(arch=dict(ARCH, depths=(1, 2, 2, 1))), tiny().state_dict())
    with pytest.raises(ValueError, match=r'another architecture.*lepe.0.weight'):  # one branch, not two
        load_pretrained(tiny(attn='softmax', split_sizes=(16, 8, 4, 2)), tiny(attn='softmax').state_dict())

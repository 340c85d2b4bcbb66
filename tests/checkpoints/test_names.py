"""Weights under the names of others: their outputs from our backbones."""

import re

import pytest
import torch

from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.checkpoints import canonical, convert, load_pretrained, read_state_dict

from ..conftest import assert_relative, golden, randomize

LN = dict(norm_cfg=dict(type='LN'), drop_path_rate=0.0)
LN_6 = dict(norm_cfg=dict(type='LN', eps=1e-6), drop_path_rate=0.0)
SWIN = dict(arch=dict(embed_dims=12, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4)), attn='softmax', window_sizes=2, **LN)
CLASSIFIER = dict(pad_small_map=False, out_indices=(3,))
DEIT = dict(arch=dict(embed_dims=24, depth=3, num_heads=3), pretrain_img_size=64, attn='softmax', **LN_6)
DEIT['out_norm_cfg'] = DEIT['norm_cfg']


@torch.no_grad()
def outputs(model, x):
    model.eval()  # mmpretrain's returns nothing
    return model(x)


def logits(features, state, head):
    return features @ state[f'{head}.weight'].t() + state[f'{head}.bias']


@pytest.mark.parametrize(
    'name, head, unused', [('timm_swin', 'head.fc', {'head'}), ('hf_swin', 'classifier', {'head', 'layers'})]
)
def test_swin_of_timm_and_of_hugging_face(name, head, unused):
    arrays, state = golden(name)
    model = SLABSwin(**SWIN, **CLASSIFIER)
    report = load_pretrained(model, state)
    assert not report.new and not report.resized
    assert {k.partition('.')[0] for k in report.unused} <= unused
    (out,) = outputs(model, arrays['x'])
    assert_relative(logits(out.mean((2, 3)), state, head), arrays['logits'], 1e-5)
    # a detector has norms on all outputs
    prefixed = {k if k.startswith(head) else f'backbone.{k}': v for k, v in state.items()}
    report = load_pretrained(SLABSwin(**SWIN), prefixed)
    assert set(report.reasons[k] for k in report.new) == {'norms on the outputs'}


def test_backbone_of_hugging_face():
    """SwinBackbone has its own norms on the outputs, and pads small maps; the image is none that windows divide."""
    arrays, state = golden('hf_swin')
    norms = {k[len('backbone/') :]: v for k, v in arrays.items() if k.startswith('backbone/')}
    backbone = {k[len('swin.') :]: v for k, v in state.items() if k.startswith('swin.') and 'layernorm.' not in k}
    model = SLABSwin(**SWIN)
    assert not load_pretrained(model, {**backbone, **norms}).new
    for i, out in enumerate(outputs(model, arrays['odd'])):
        assert_relative(out, arrays[f'out{i}'], 1e-5)


def test_masked_pre_training_of_hugging_face():
    _, state = golden('hf_swin')
    state = {k: v for k, v in state.items() if not k.startswith('classifier.')}
    state |= {'swin.embeddings.mask_token': torch.zeros(1, 1, 12), 'decoder.0.weight': torch.zeros(3, 3, 1, 1)}
    report = load_pretrained(SLABSwin(**SWIN, **CLASSIFIER), state)
    masked = {k for k in report.unused if report.reasons[k] == 'of masked pre-training'}
    assert masked == {'patch_embed.mask_token', 'decoder.0.weight'}


@pytest.mark.parametrize('part', ['query', 'key', 'value'])
def test_a_third_of_a_projection_that_is_not_there_is_named(part):
    _, state = golden('hf_swin')
    key = f'swin.encoder.layers.1.blocks.0.attention.self.{part}.weight'
    with pytest.raises(ValueError, match="lacks 'layers.1.blocks.0.attn.qkv.weight'"):
        load_pretrained(SLABSwin(**SWIN, **CLASSIFIER), {k: v for k, v in state.items() if k != key})


def test_distilled_deit_of_timm():
    arrays, state = golden('timm_deit_distilled')
    model = SLABDeiT(**DEIT, distilled=True, out_type='cls_token')
    report = load_pretrained(model, state)
    assert (
        not report.new and not report.resized and {k.partition('.')[0] for k in report.unused} == {'head', 'head_dist'}
    )
    ((cls_token, dist_token),) = outputs(model, arrays['x'])
    assert_relative(torch.stack([cls_token, dist_token], dim=1), arrays['tokens'][:, :2], 1e-5)
    both = logits(cls_token, state, 'head') + logits(dist_token, state, 'head_dist')
    assert_relative(both / 2, arrays['logits'], 1e-5)
    featmap = SLABDeiT(**DEIT, distilled=True)
    load_pretrained(featmap, state)
    assert_relative(outputs(featmap, arrays['x'])[0].flatten(2).transpose(1, 2), arrays['tokens'][:, 2:], 1e-5)


def test_distilled_weights_for_a_model_without_the_token():
    """It takes part in softmax attention; a model of SLA has neither it nor a class token."""
    _, state = golden('timm_deit_distilled')
    with pytest.raises(ValueError, match='has a distillation token.*Build it with distilled=True'):
        load_pretrained(SLABDeiT(**DEIT), state)
    model = SLABDeiT(**{**DEIT, 'attn': 'sla'})
    report = load_pretrained(model, state)
    assert {report.reasons[k] for k in report.unused} >= {'class token', 'distillation token'}
    assert torch.equal(model.layers[0].pos_embed.weight, state['pos_embed'][:, 2:])
    with pytest.raises(ValueError, match=r"pos_embed.weight' is \(1, 17, 24\) there and \(1, 18, 24\) in the model"):
        load_pretrained(SLABDeiT(**DEIT, distilled=True), SLABDeiT(**DEIT).state_dict())
    with pytest.raises(ValueError, match="distilled=True needs attention with a class token, but attn='sla' has none"):
        SLABDeiT(**{**DEIT, 'attn': 'sla'}, distilled=True)


@pytest.mark.parametrize('distilled', [False, True])
@pytest.mark.parametrize('hw', [(64, 64), (96, 176)])
def test_vision_transformer_of_mmpretrain(distilled, hw):
    from mmpretrain.models import DistilledVisionTransformer, VisionTransformer

    arch = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=96)
    cls = DistilledVisionTransformer if distilled else VisionTransformer
    theirs = randomize(cls(arch=arch, img_size=64, patch_size=16, out_type='raw'))
    state = {f'backbone.{k}': v for k, v in theirs.state_dict().items()} | {
        'head.layers.head.weight': torch.zeros(5, 24)
    }
    ours = SLABDeiT(**DEIT, distilled=distilled)
    report = load_pretrained(ours, dict(state_dict=state))
    assert not report.new and not report.resized and report.unused == ['head.layers.head.weight']
    x = torch.randn(2, 3, *hw)
    tokens = outputs(theirs, x)[0]
    tokens = tokens[:, 1 + distilled :].transpose(1, 2)
    assert_relative(outputs(ours, x)[0].flatten(2), tokens, 1e-5)


def test_distilled_deit_trains_folds_and_classifies_in_mmpretrain():
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    init_default_scope('mmpretrain')
    backbone = dict(type='SLABDeiT', **{**DEIT, 'norm_cfg': dict(type='PRepBN', gamma=0.0)}, distilled=True)
    head = dict(type='DeiTClsHead', num_classes=5, in_channels=24)
    model = MODELS.build(dict(type='ImageClassifier', backbone=dict(backbone, out_type='cls_token'), head=head))
    randomize(model)
    x = torch.randn(2, 3, 64, 64)
    model.train().backbone(x)[0][1].square().mean().backward()
    assert model.backbone.layers[0].pos_embed.dist_token.grad.abs().sum() > 0
    before = outputs(model, x)
    model.backbone.switch_to_deploy()
    assert_relative(outputs(model, x), before, 1e-4)


@pytest.mark.parametrize('hw', [(64, 64), (96, 160)])
def test_pvt_of_mmdet(hw):
    from mmdet.models.backbones import PyramidVisionTransformer

    depths, heads = (2, 1, 2, 1), (1, 2, 5, 8)
    theirs = PyramidVisionTransformer(
        pretrain_img_size=64, embed_dims=8, num_layers=depths, num_heads=heads, mlp_ratios=(4, 4, 4, 4)
    )
    randomize(theirs).eval()
    arch = dict(embed_dims=(8, 16, 40, 64), depths=depths, num_heads=heads, mlp_ratios=(4, 4, 4, 4))
    ours = SLABPVT(arch=arch, pretrain_img_size=64, attn='softmax', **LN_6)
    state = {f'backbone.{k}': v for k, v in theirs.state_dict().items()} | {'neck.weight': torch.zeros(1)}
    report = load_pretrained(ours, dict(state_dict=state))
    assert not report.new and not report.resized and report.unused == ['neck.weight']
    x = torch.randn(2, 3, *hw)
    for a, b in zip(outputs(ours, x), outputs(theirs, x)):
        assert_relative(a, b, 1e-5)


def test_cswin_for_segmentation():
    """norm1 to norm4 are on the outputs; of a classifier, there is only norm."""
    arrays, state = golden('cswin_seg')
    arch = dict(embed_dims=16, depths=(1, 2, 2, 1), num_heads=(2, 4, 8, 16))
    for prefix in ('', 'backbone.'):
        model = SLABCSWin(arch=arch, attn='softmax', **LN)
        report = load_pretrained(model, {prefix + k: v for k, v in state.items()})
        assert not report.new and not report.unused and not report.resized
    for image in range(2):
        for i, out in enumerate(outputs(model, arrays[f'x{image}'])):
            assert_relative(out, arrays[f'y{image}_{i}'], 3e-6)  # 1e-6, and what rounding differs by between CPUs


@pytest.mark.parametrize('name', ['timm_swin', 'hf_swin', 'timm_deit_distilled', 'cswin_seg'])
def test_converted_once_they_stay(name, tmp_path):
    _, state = golden(name)
    ours = canonical(state)
    assert canonical(ours).keys() == ours.keys() and not any('#' in k for k in ours)
    torch.save(dict(model=state), tmp_path / 'in.pth')
    convert(tmp_path / 'in.pth', tmp_path / 'out.pth')
    written = read_state_dict(tmp_path / 'out.pth')
    assert all(torch.equal(written[k], ours[k]) for k in written)
    assert set(ours) - set(written) == {k for k in ours if re.search(r'relative_position_index$', k)}


def test_two_keys_that_mean_the_same_are_named():
    _, state = golden('timm_deit_distilled')
    state['layers.0.blocks.0.norm1.weight'] = state['blocks.0.norm1.weight']
    with pytest.raises(
        ValueError, match="two tensors for 'layers.0.blocks.0.norm1.weight': 'blocks.0.norm1.weight' and"
    ):
        load_pretrained(SLABDeiT(**DEIT, distilled=True), state)

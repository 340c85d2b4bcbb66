"""Depths of parameters, and learning rates by them."""

import pytest
import torch.nn as nn
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope

RATE, LR = 0.7, 0.01
SMALL = {
    'SLABSwin': dict(arch=dict(embed_dims=8, depths=(1, 2, 1, 1), num_heads=(1, 1, 1, 1))),
    'SLABPVT': dict(arch=dict(embed_dims=(8,) * 4, depths=(1, 2, 1, 1), num_heads=(1,) * 4, mlp_ratios=(2,) * 4)),
    'SLABCSWin': dict(arch=dict(embed_dims=8, depths=(1, 2, 1, 1), num_heads=(2, 2, 2, 2))),
    'SLABDeiT': dict(arch=dict(embed_dims=8, depth=5, num_heads=1), attn='softmax'),
}
# by what a name begins with, read off the networks: five blocks, of which the second stage has two
STAGED = {
    'patch_embed.': 0,
    'layers.0.pos_embed.': 0,
    'layers.0.blocks.0.': 1,
    'layers.0.downsample.': 1,
    'layers.1.pos_embed.': 1,
    'layers.1.blocks.0.': 2,
    'layers.1.blocks.1.': 3,
    'layers.1.downsample.': 3,
    'layers.2.pos_embed.': 3,
    'layers.2.blocks.0.': 4,
    'layers.2.downsample.': 4,
    'layers.3.pos_embed.': 4,
    'layers.3.blocks.0.': 5,
    'norm': 6,
}
PLAIN = {'patch_embed.': 0, 'layers.0.pos_embed.': 0, **{f'layers.0.blocks.{i}.': i + 1 for i in range(5)}, 'norm': 6}


def expected(kind, name):
    """The depth of a parameter of a model with the backbone ``kind``."""
    if not name.startswith('backbone.'):
        return 6
    table = PLAIN if kind == 'SLABDeiT' else STAGED
    (depth,) = {d for start, d in table.items() if name[len('backbone.') :].startswith(start)}
    return depth


def classifier(kind):
    import mmpretrain.models  # noqa: F401

    settings = dict(out_type='cls_token') if kind == 'SLABDeiT' else dict(out_indices=(3,))
    backbone = dict(type=kind, **SMALL[kind], **settings)
    neck = None if kind == 'SLABDeiT' else dict(type='GlobalAveragePooling')
    dims = 8 if kind in ('SLABDeiT', 'SLABPVT') else 64
    head = dict(type='LinearClsHead', num_classes=5, in_channels=dims)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, neck=neck, head=head))


def detector(kind):
    import mmdet.models  # noqa: F401

    dims = [8] * 4 if kind == 'SLABPVT' else [8, 16, 32, 64]
    neck = dict(type='FPN', in_channels=dims, out_channels=8, num_outs=5)
    if kind == 'SLABDeiT':
        neck = dict(type='SimpleFeaturePyramid', in_channels=8, out_channels=8)
    anchors = dict(type='AnchorGenerator', ratios=[1.0], scales=[4], strides=[4, 8, 16, 32, 64])
    head = dict(type='RetinaHead', num_classes=5, in_channels=8, feat_channels=8, anchor_generator=anchors)
    backbone = dict(type=kind, **SMALL[kind])
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(ConfigDict(type='mmdet.RetinaNet', backbone=backbone, neck=neck, bbox_head=head))


def groups(model, constructor='LayerDecayOptimWrapperConstructor', **paramwise):
    cfg = dict(
        optimizer=dict(type='AdamW', lr=LR, weight_decay=0.05),
        constructor=constructor,
        paramwise_cfg=dict(layer_decay_rate=RATE, **paramwise),
    )
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: g for g in build_optim_wrapper(model, cfg).optimizer.param_groups for p in g['params']}


@pytest.mark.parametrize('build', [classifier, detector])
@pytest.mark.parametrize('kind', list(SMALL))
def test_every_parameter_learns_at_the_rate_of_its_depth(kind, build):
    model = build(kind)
    found = groups(model, custom_keys={'norm': dict(decay_mult=0.0), 'fc.': dict(lr_mult=10)})
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, group in found.items():
        times = 10 if 'fc.' in name and 'norm' not in name else 1
        assert group['lr'] == pytest.approx(times * LR * RATE ** (6 - expected(kind, name))), name
        assert group['weight_decay'] == (0 if 'norm' in name else 0.05), name


@pytest.mark.parametrize('kind', list(SMALL))
def test_mmpretrains_constructor_agrees(kind):
    model = classifier(kind)
    theirs = groups(model, 'mmpretrain.LearningRateDecayOptimWrapperConstructor')
    ours = groups(model)
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert theirs[name]['lr'] == pytest.approx(ours[name]['lr']), name


@pytest.mark.parametrize('kind', list(SMALL))
def test_depth_grows_from_input_to_output(kind):
    backbone = MODELS.build(dict(type=kind, **SMALL[kind]))
    depths = [backbone.get_layer_depth(name) for name, _ in backbone.named_parameters()]
    order = [expected(kind, f'backbone.{name}') for name, _ in backbone.named_parameters()]
    assert [d for d, _ in depths] == order == sorted(order) and {n for _, n in depths} == {7}
    assert set(order) == set(range(6 if kind == 'SLABPVT' else 7))  # which has no norms on its outputs
    assert backbone.get_layer_depth('neck.conv.weight', 'backbone.') == (6, 7)


def test_frozen_parameters_have_no_rate():
    model = detector('SLABSwin')
    model.backbone.patch_embed.requires_grad_(False)
    assert groups(model).keys() == {n for n, p in model.named_parameters() if p.requires_grad}


def test_bad_settings_are_named():
    model = nn.Sequential(nn.Linear(2, 2))
    for rate in (None, 0, 1.5, True):
        with pytest.raises(ValueError, match='layer_decay_rate=.*a number in .0, 1'):
            build_optim_wrapper(
                model,
                dict(
                    optimizer=dict(type='SGD', lr=1),
                    constructor='LayerDecayOptimWrapperConstructor',
                    paramwise_cfg=dict(layer_decay_rate=rate),
                ),
            )
    with pytest.raises(ValueError, match='Sequential has no backbone with get_layer_depth'):
        groups(model)

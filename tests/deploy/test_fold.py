"""Whole models: detectors by mmdet and classifiers by mmpretrain, before and after folding."""

import copy
import sys

import pytest
import torch
import torch.nn as nn
import torchvision
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmslab.backbones import SLABDeiT, SLABSwin
from mmslab.checkpoints import check_fits, load_pretrained
from mmslab.deploy import fold, is_folded
from mmslab.layers import PRepBN, RepBN
from mmslab.layers.embed import MLP
from mmslab.layers.fold import Affine
from mmslab.layers.norm import TokenBN

from ..conftest import assert_relative, randomize_gently

PREPBN, BN, LN = (dict(type=t) for t in ('PRepBN', 'BN', 'LN'))
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
SIZE = (64, 96)  # of the images: some maps fill their windows, others are padded
SWIN = dict(
    type='SLABSwin',
    arch=dict(embed_dims=12, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4)),
    attn=('sla', 'softmax', 'sla', 'softmax'),
    window_sizes=(8, 5, 7, 2),
    out_norm_cfg=PREPBN,
)
PVT = dict(
    type='SLABPVT',
    arch=dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2)),
    attn='softmax',
    pretrain_img_size=64,
    out_norm_cfg=BN,
)
CSWIN = dict(
    type='SLABCSWin',
    arch=dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4)),
    pretrain_img_size=64,
    out_norm_cfg=PREPBN,
)
DEIT = dict(type='SLABDeiT', arch=dict(embed_dims=24, depth=2, num_heads=3), pretrain_img_size=64)
CHANNELS = dict(SLABSwin=[12, 24, 48, 96], SLABPVT=[8, 16, 24, 32], SLABCSWin=[8, 16, 32, 64])


def detector(base: str, backbone: dict, neck: dict, classes: int = 3) -> nn.Module:
    """A narrow one of mmdet's, whose scores spread and whose results are cut off nowhere."""
    init_default_scope('mmdet')
    cfg = Config.fromstring(f"_base_ = 'mmdet::_base_/models/{base}.py'", '.py').model
    cfg.backbone = backbone
    cfg.neck = {**neck, 'out_channels': 16, 'num_outs': 5}
    if cfg.neck['type'] == 'FPN':
        cfg.neck['in_channels'] = CHANNELS.get(backbone['type'], [12, 24, 48, 96])
    post = dict(score_thr=0.0, max_per_img=1000)
    if 'roi_head' in cfg:
        cfg.rpn_head.update(in_channels=16, feat_channels=16)
        cfg.roi_head.bbox_roi_extractor.out_channels = cfg.roi_head.mask_roi_extractor.out_channels = 16
        cfg.roi_head.bbox_head.update(in_channels=16, fc_out_channels=32, num_classes=classes)
        cfg.roi_head.mask_head.update(in_channels=16, conv_out_channels=8, num_convs=1, num_classes=classes)
        cfg.test_cfg.rpn.update(nms_pre=10000, nms=dict(type='nms', iou_threshold=0.3))
        cfg.test_cfg.rcnn.update(post)
    else:
        cfg.bbox_head.update(in_channels=16, feat_channels=16, stacked_convs=1, num_classes=classes)
        cfg.test_cfg.update(post, nms_pre=10000)
    model = randomize_gently(MODELS.build(cfg), std=0.1).eval()
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith(('fc_cls', 'rpn_cls', 'retina_cls', 'conv_logits')):
                layer.weight.mul_(8)
                layer.bias.zero_()
    return model


class DoubleNMS:
    """Stands for mmcv's operator, which knows float32 only: torchvision's, a second implementation."""

    @staticmethod
    def apply(boxes, scores, iou_threshold, offset, score_threshold, max_num):
        assert boxes.dtype == scores.dtype == torch.float64 and offset == 0 and score_threshold <= 0
        keep = torchvision.ops.nms(boxes, scores, iou_threshold)
        return keep[:max_num] if max_num > 0 else keep


def predict(model: nn.Module, dtype: torch.dtype) -> list:
    from mmdet.structures import DetDataSample

    generator = torch.Generator().manual_seed(5)
    images = torch.randn(2, 3, *SIZE, generator=generator, dtype=torch.float64).to(dtype)
    meta = dict(img_shape=SIZE, ori_shape=SIZE, pad_shape=SIZE, batch_input_shape=SIZE, scale_factor=(1.0, 1.0))
    with torch.no_grad():
        results = model(images, [DetDataSample(metainfo=meta) for _ in images], mode='predict')
    return [r.pred_instances for r in results]


def assert_same_detections(got: list, want: list, tolerance: float) -> None:
    """One detection for each, of the same class, place and score; the order of equal scores is anyone's."""
    for g, w in zip(got, want):
        assert len(g) == len(w) > 50 and w.scores.max() - w.scores.min() > 0.2 and len(w.labels.unique()) > 1
        assert g.bboxes.dtype == w.bboxes.dtype == w.scores.dtype
        apart = (g.bboxes[:, None] - w.bboxes).abs().amax(-1) / max(SIZE)
        apart = torch.maximum(apart, (g.scores[:, None] - w.scores).abs())
        apart[g.labels[:, None] != w.labels] = 1.0
        error, partner = apart.min(dim=1)
        assert error.max() <= tolerance, f'{error.max():.1e}'
        assert len(partner.unique()) == len(w)
        assert (g.scores - w.scores).abs().max() <= tolerance
        if 'masks' in w:
            assert w.masks.any() and (g.masks != w.masks[partner]).float().mean() < 1e-4


def assert_folds(model: nn.Module, monkeypatch) -> nn.Module:
    """The detections of a folded copy, in float32 and float64; returns the copy."""
    for dtype, tolerance in TOLERANCES.items():
        model = model.to(dtype)
        if dtype == torch.float64:
            monkeypatch.setattr(sys.modules['mmcv.ops.nms'], 'NMSop', DoubleNMS)
            if getattr(model, 'roi_head', None) is not None:
                model.roi_head.mask_head = None  # mmdet pastes masks in float32
        folded = copy.deepcopy(model)
        assert not is_folded(folded) and fold(folded) is folded and is_folded(folded)
        assert_same_detections(predict(folded, dtype), predict(model, dtype), tolerance)
    return folded


def kinds(model: nn.Module, *types) -> list:
    return [n for n, m in model.named_modules() if isinstance(m, types)]


OUT_NORMS = [f'backbone.norm{i}' for i in range(4)]
FPN = dict(type='FPN')


@pytest.mark.parametrize('backbone', [SWIN, PVT, CSWIN], ids=lambda b: b['type'])
def test_mask_rcnn(backbone, monkeypatch):
    """Output norms go into FPN's lateral convolutions: no norm is left in the detector."""
    folded = assert_folds(detector('mask-rcnn_r50_fpn', backbone, FPN), monkeypatch)
    assert not kinds(folded, PRepBN, RepBN, TokenBN, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, Affine)
    assert all(isinstance(folded.get_submodule(n), nn.Identity) for n in OUT_NORMS)


def test_layernorms_on_the_outputs_stay(monkeypatch):
    folded = assert_folds(detector('mask-rcnn_r50_fpn', {**SWIN, 'out_norm_cfg': LN}, FPN), monkeypatch)
    assert kinds(folded, PRepBN, RepBN, TokenBN, nn.LayerNorm, Affine) == OUT_NORMS


@pytest.mark.parametrize('extra, kept', [('on_input', OUT_NORMS), ('on_output', []), ('on_lateral', [])])
def test_retinanet(extra, kept, monkeypatch):
    """Extra levels from the backbone's last map need that map itself: then output norms stay, as scales and shifts."""
    neck = dict(type='FPN', start_level=1, add_extra_convs=extra)
    folded = assert_folds(detector('retinanet_r50_fpn', SWIN, neck), monkeypatch)
    assert kinds(folded, Affine) == kept and not kinds(folded, PRepBN, RepBN)


def test_laterals_with_norms_of_their_own(monkeypatch):
    """They have no bias that could take the shift."""
    neck = dict(type='FPN', norm_cfg=dict(type='BN'))
    folded = assert_folds(detector('retinanet_r50_fpn', PVT, {**neck, 'start_level': 1}), monkeypatch)
    assert kinds(folded, Affine) == OUT_NORMS


def test_simple_feature_pyramid(monkeypatch):
    """Norms behind transposed convolutions, and inside a neck, stay as scales and shifts."""
    neck = dict(type='SimpleFeaturePyramid', in_channels=24, norm_cfg=PREPBN)
    model = detector('mask-rcnn_r50_fpn', DEIT, neck)
    of_neck = kinds(model.neck, PRepBN)
    folded = assert_folds(model, monkeypatch)
    assert kinds(folded, Affine) == ['backbone.norm0', *(f'neck.{n}' for n in of_neck)] and len(of_neck) == 9
    assert not kinds(folded, PRepBN, RepBN)


def test_mmdets_own_swin(monkeypatch):
    backbone = dict(type='SwinTransformer', embed_dims=12, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4))
    model = detector('mask-rcnn_r50_fpn', {**backbone, 'norm_cfg': PREPBN}, FPN)
    norms = kinds(model, PRepBN)
    folded = assert_folds(model, monkeypatch)
    assert kinds(folded, Affine) == norms and len(norms) == 20 and not kinds(folded, PRepBN, RepBN)
    for dtype, tolerance in TOLERANCES.items():
        backbone, x = model.backbone.to(dtype), torch.randn(2, 3, 37, 53, dtype=dtype)
        alone = fold(copy.deepcopy(backbone))
        with torch.no_grad():
            for out, want in zip(alone(x), backbone(x)):
                assert_relative(out, want, tolerance)


@pytest.mark.parametrize('out_norm_cfg', [PREPBN, LN])
def test_a_folded_checkpoint_by_config(out_norm_cfg, tmp_path):
    """deploy=True, and no output norms where the neck has them: it fits, and computes the same."""
    backbone = {**SWIN, 'out_norm_cfg': out_norm_cfg}
    folded = fold(detector('mask-rcnn_r50_fpn', backbone, FPN))
    torch.save(dict(state_dict=folded.state_dict()), tmp_path / 'folded.pth')
    config = dict(deploy=True, out_norm_cfg=None if out_norm_cfg is PREPBN else LN)
    model = detector('mask-rcnn_r50_fpn', {**backbone, **config}, FPN)
    check_fits(model, tmp_path / 'folded.pth')
    state = torch.load(tmp_path / 'folded.pth', weights_only=True)['state_dict']
    model.load_state_dict(state, strict=True)
    for g, w in zip(predict(model, torch.float32), predict(folded, torch.float32)):
        assert torch.equal(g.bboxes, w.bboxes) and torch.equal(g.scores, w.scores) and torch.equal(g.masks, w.masks)
    alone = MODELS.build({**backbone, **config}).eval()  # the backbone by itself, from the detector's checkpoint
    assert not load_pretrained(alone, tmp_path / 'folded.pth').new
    x = torch.randn(1, 3, 37, 53)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(alone(x), folded.backbone(x)))
    if out_norm_cfg is PREPBN:
        with pytest.raises(ValueError, match='Set out_norm_cfg=None'):
            check_fits(detector('mask-rcnn_r50_fpn', {**backbone, 'deploy': True}, FPN), tmp_path / 'folded.pth')
    with pytest.raises(ValueError, match='is folded.* Set deploy=True'):
        check_fits(detector('mask-rcnn_r50_fpn', backbone, FPN), tmp_path / 'folded.pth')


def test_a_folded_backbones_output_norms_go_on_into_the_neck():
    model = detector('mask-rcnn_r50_fpn', SWIN, FPN)
    folded = copy.deepcopy(model)
    folded.backbone.switch_to_deploy()
    assert kinds(folded, Affine) == OUT_NORMS
    assert not kinds(fold(folded), Affine)
    assert_same_detections(predict(folded, torch.float32), predict(model, torch.float32), 1e-5)


def test_folding_twice_changes_nothing():
    once = fold(detector('mask-rcnn_r50_fpn', SWIN, FPN))
    twice = fold(copy.deepcopy(once))
    assert [type(m) for m in twice.modules()] == [type(m) for m in once.modules()]
    assert list(twice.state_dict()) == list(once.state_dict())
    assert all(torch.equal(v, once.state_dict()[k]) for k, v in twice.state_dict().items())


@pytest.mark.parametrize(
    'spoil, message',
    [
        (lambda m: m.neck.levels[1][4].norm.set_gamma(0.3), "^layer 'neck.levels.1.4.norm' has gamma=0.3"),
        (lambda m: m.backbone.norm0.gamma.fill_(0.3), "^layer 'backbone.norm0' has gamma=0.3"),
        (lambda m: m.roi_head.bbox_head.train(), "^layer 'roi_head.bbox_head' is in training mode"),
        (lambda m: m.train(), '^MaskRCNN is in training mode'),
    ],
)
def test_what_cannot_be_folded_stays_as_it_is(spoil, message):
    """Also where the layer at fault lies behind the backbone, which is folded first."""
    model = detector('mask-rcnn_r50_fpn', DEIT, dict(type='SimpleFeaturePyramid', in_channels=24, norm_cfg=PREPBN))
    spoil(model)
    state, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        fold(model)
    assert [type(m) for m in model.modules()] == types and not is_folded(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def classifier(backbone: dict, channels: int, neck: bool) -> nn.Module:
    import mmpretrain  # noqa: F401
    from mmpretrain.registry import MODELS

    init_default_scope('mmpretrain')
    head = dict(type='LinearClsHead', num_classes=7, in_channels=channels)
    neck = dict(type='GlobalAveragePooling') if neck else None
    model = MODELS.build(dict(type='ImageClassifier', backbone=backbone, neck=neck, head=head))
    return randomize_gently(model, std=0.1).eval()


@pytest.mark.parametrize(
    'backbone, channels, neck',
    [
        ({**SWIN, 'out_indices': (3,), 'pad_small_map': False}, 96, True),
        (SWIN, 96, True),  # returns maps that the classifier does not use
        (PVT, 32, True),
        (CSWIN, 64, True),
        ({**DEIT, 'out_type': 'avg_featmap'}, 24, False),
        ({**DEIT, 'out_type': 'cls_token', 'attn': 'softmax'}, 24, False),
    ],
)
def test_classifiers(backbone, channels, neck):
    """The last norm goes into the linear layer, past the mean over the map."""
    model = classifier(backbone, channels, neck)
    for dtype, tolerance in TOLERANCES.items():
        folded = fold(copy.deepcopy(model.to(dtype)))
        for hw in (SIZE, (37, 53)):
            x = torch.randn(2, 3, *hw, dtype=dtype)
            with torch.no_grad():
                assert_relative(folded(x), model(x), tolerance)
        assert not kinds(folded, PRepBN, RepBN, TokenBN, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, Affine)


def test_a_classifier_with_another_head():
    """Only what is known to be linear takes the norm over."""
    model = classifier({**DEIT, 'out_type': 'cls_token', 'attn': 'softmax'}, 24, neck=False)
    import mmpretrain

    head = mmpretrain.registry.MODELS.build(
        dict(type='VisionTransformerClsHead', num_classes=7, in_channels=24, hidden_dim=8)
    )
    model.head = randomize_gently(head).eval()
    model.double()
    folded, x = fold(copy.deepcopy(model)), torch.randn(1, 3, *SIZE, dtype=torch.float64)
    assert kinds(folded, Affine) == ['backbone.norm0']
    with torch.no_grad():
        feats = model.backbone(x), folded.backbone(x)
        want, out = (m.head(([None, f[0]],)) for m, f in zip((model, folded), feats))
    assert_relative(out, want, 1e-12)


def test_a_backbone_alone_and_other_models():
    backbone = MODELS.build({**SWIN}).eval()
    randomize_gently(backbone)
    twin = copy.deepcopy(backbone)
    twin.switch_to_deploy()
    assert isinstance(fold(backbone), SLABSwin) and [type(m) for m in backbone.modules()] == [
        type(m) for m in twin.modules()
    ]
    pair = nn.Sequential(SLABDeiT(arch=DEIT['arch'], out_type='avg_featmap'), nn.Linear(3, 3)).eval()
    assert is_folded(nn.Linear(3, 3)) and not is_folded(pair)
    with pytest.raises(ValueError, match="^layer '0.layers.0.blocks.0.norm1' has gamma=1"):
        fold(pair)


def test_a_norm_in_several_places():
    norm = PRepBN(4, gamma=0.0)
    model = nn.Sequential(nn.Linear(4, 4), norm, norm, nn.Sequential(nn.Linear(4, 4), norm))
    model = randomize_gently(model, std=0.5).eval().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = model(x)
    fold(model)
    assert kinds(model, Affine) == ['1', '2', '3.1'] and not kinds(model, PRepBN, RepBN)
    assert_relative(model(x), want, 1e-14)


def neck_maps(model, x):
    with torch.no_grad():
        return model.neck(model.backbone(x))


def spoil_lateral(model):
    model.neck.lateral_convs[1].conv.register_forward_pre_hook(lambda m, args: (args[0].abs(),))


def spoil_neck(model):
    model.neck.__class__ = type('OwnFPN', (type(model.neck),), {})


def spoil_detector(model):
    model.__class__ = type('OwnDetector', (type(model),), dict(__module__='mine'))


def spoil_backbone(model):
    model.teacher = nn.Sequential(model.backbone)


def spoil_sharing(model):
    model.auxiliary = nn.Sequential(model.neck.lateral_convs[1])


@pytest.mark.parametrize('spoil', [spoil_lateral, spoil_neck, spoil_detector, spoil_backbone, spoil_sharing])
def test_output_norms_go_into_known_layers_alone(spoil):
    """Behind what may compute something else, and where others take the maps too, they stay."""
    model = detector('retinanet_r50_fpn', SWIN, FPN).double()
    spoil(model)
    folded, x = fold(copy.deepcopy(model.eval())), torch.randn(1, 3, 37, 53, dtype=torch.float64)
    assert kinds(folded, Affine) and is_folded(folded)
    for out, want in zip(neck_maps(folded, x), neck_maps(model, x)):
        assert_relative(out, want, 1e-12)


def test_norms_that_are_not_known_stay():
    class Own(PRepBN):
        def forward(self, x):
            return super().forward(x).abs()

    model = nn.Sequential(nn.Linear(4, 4), Own(4), PRepBN(4), nn.Linear(4, 4))
    model = randomize_gently(model, std=0.5).eval().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = model(x)
    assert fold(model) is model and is_folded(model)
    assert type(model[1]) is Own and isinstance(model[1].repbn, RepBN) and isinstance(model[2], Affine)
    assert_relative(model(x), want, 1e-14)


def test_a_layer_that_the_backbone_shares_with_others():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = SLABDeiT(arch=DEIT['arch'])
            self.mlp = self.backbone.layers[0].blocks[1].mlp
            self.head = nn.Sequential(self.backbone.patch_embed)

        def forward(self, x):
            return self.mlp(self.backbone(x)[0].permute(0, 2, 3, 1)) + self.head(x)

    model = randomize_gently(Both()).eval().double()
    x = torch.randn(1, 3, 37, 53, dtype=torch.float64)
    with torch.no_grad():
        want = model(x)
        assert_relative(fold(model)(x), want, 1e-12)
    assert kinds(model, Affine) == ['backbone.layers.0.blocks.1.norm2', 'backbone.norm0']


@pytest.mark.parametrize('check', [True, False])
def test_what_computes_something_else_is_refused(check, monkeypatch):
    """A wrong absorb in the backbone, a wrong map of a norm elsewhere: named by its path, and nothing has changed."""
    model = classifier({**DEIT, 'out_type': 'avg_featmap'}, 24, False)
    pair = nn.Sequential(nn.Linear(4, 4), nn.Sequential(PRepBN(4, gamma=0.0))).eval()
    absorb, affine = MLP.absorb, RepBN.affine
    monkeypatch.setattr(MLP, 'absorb', lambda self, scale, shift: absorb(self, 1.01 * scale, shift))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    types = [type(m) for m in model.modules()]
    if not check:
        assert is_folded(fold(model, check=False))
        return
    with pytest.raises(ValueError, match="^folding would change what layer 'backbone.layers.0.blocks.0.mlp' computes"):
        fold(model)
    monkeypatch.setattr(RepBN, 'affine', lambda self: tuple(2 * t for t in affine(self)))
    with pytest.raises(ValueError, match="^folding would change what layer '1.0' computes"):
        fold(pair)
    assert isinstance(pair[1][0], PRepBN)
    assert [type(m) for m in model.modules()] == types and torch.equal(torch.get_rng_state(), random)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

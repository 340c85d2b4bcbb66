import copy
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

from mmslab.data.classes import check_classes
from mmslab.data.shapes import CLASSES, make_shapes

from .conftest import ROOT

CONFIGS = sorted(p for p in (ROOT / 'configs').rglob('*.py') if '_base_' not in p.parts)
DETECTORS = [p for p in CONFIGS if p.parent.name != 'imagenet' and not p.stem.endswith('classes')]
# fewer proposals and detections than a config asks for: the forward is the same, and ten times as fast on a CPU
FEWER = {
    'train_cfg.rpn_proposal': dict(nms_pre=50, max_per_img=20),
    'test_cfg.rpn': dict(nms_pre=50, max_per_img=10),
    'test_cfg.rcnn': dict(max_per_img=2),
    'test_cfg': dict(max_per_img=2),
}


def load(path: Path) -> Config:
    cfg = Config.fromfile(str(path))
    cfg.model.backbone.init_cfg = None
    return cfg


def finite_gradients(model, losses) -> None:
    total, _ = model.parse_losses(losses)
    total.backward()
    assert torch.isfinite(total)
    assert model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_config_trains_and_evaluates(path, quick_weights):
    """One training step and one evaluation of the model of each config, on tiny images; its classes are its data's."""
    cfg = load(path)
    check_classes(cfg, ('train', 'val'))
    check_classes(cfg, ('test',))
    init_default_scope(cfg.default_scope)
    if cfg.default_scope == 'mmpretrain':
        check_classifier(cfg)
    else:
        check_detector(cfg)


def check_classifier(cfg: Config) -> None:
    from mmpretrain.registry import MODELS as PRETRAIN
    from mmpretrain.structures import DataSample

    model = PRETRAIN.build({**cfg.model, 'train_cfg': None})
    samples = [DataSample().set_gt_label(i) for i in range(2)]
    images = torch.randn(2, 3, 32, 32)
    finite_gradients(model.train(), model(images, samples, mode='loss'))
    with torch.no_grad():
        scores = [r.pred_score for r in model.eval()(images, samples, mode='predict')]
    assert all(len(s) == cfg.model.head.num_classes and abs(float(s.sum()) - 1) < 1e-4 for s in scores)


def check_detector(cfg: Config) -> None:
    from mmdet.testing import demo_mm_inputs

    for key, values in FEWER.items():
        first, _, second = key.partition('.')
        node = cfg.model.get(first, {})
        node = node.get(second) if second else node
        for each in node if isinstance(node, list) else [node]:
            if isinstance(each, dict) and 'rcnn' not in each:
                each.update(values)
    model = MODELS.build(cfg.model)
    masks = getattr(model, 'with_roi_head', False)
    heads = model.roi_head.bbox_head if masks else model.bbox_head
    classes = heads[0].num_classes if isinstance(heads, torch.nn.ModuleList) else heads.num_classes
    data = demo_mm_inputs(2, [[3, 64, 64], [3, 60, 80]], num_classes=classes, with_mask=masks)
    data = model.data_preprocessor(data, True)
    finite_gradients(model, model.train()(**data, mode='loss'))
    with torch.no_grad():
        results = model.eval()(**data, mode='predict')
    assert all(('masks' in r.pred_instances) == masks for r in results)


@pytest.fixture(scope='module')
def retinanet():
    return Config.fromstring("_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'", '.py').model


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_backbone_builds_in_retinanet(path, retinanet, undrawn_weights):
    backbone = load(path).model.backbone
    if backbone.type == 'SLABDeiT':
        backbone.out_type = 'featmap'
        neck = dict(type='SimpleFeaturePyramid')
    else:
        backbone.out_indices = (0, 1, 2, 3)
        neck = dict(type='FPN', num_outs=5)
    init_default_scope('mmdet')
    cfg = copy.deepcopy(retinanet)
    built = MODELS.build(backbone)
    channels = [built.num_features[i] for i in built.out_indices]
    cfg['backbone'] = backbone
    cfg['neck'] = dict(in_channels=channels[0] if len(channels) == 1 else channels, out_channels=256, **neck)
    if len(channels) == 1:
        cfg.bbox_head.anchor_generator.strides = [4, 8, 16, 32, 64]
    with torch.no_grad():
        maps = MODELS.build(cfg).eval().extract_feat(torch.zeros(1, 3, 64, 64))
    assert all(m.shape[1] == 256 for m in maps) and len(maps) >= 4


@pytest.mark.parametrize('path', DETECTORS, ids=lambda p: p.stem)
def test_every_detector_decays_no_norms_and_positions(path, undrawn_weights):
    """Weight decay is none on norms and position terms, the config's on all else; hooks build."""
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import HOOKS

    cfg = load(path)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model.backbone)
    # AmpOptimWrapper needs a GPU; the parameter groups do not depend on it
    wrapper = build_optim_wrapper(model, {**cfg.optim_wrapper, 'type': 'OptimWrapper'})
    names = {id(p): n for n, p in model.named_parameters()}
    free = ('norm', 'relative_position_bias_table', 'positional_encoding', 'pos_embed', 'cls_token')
    decay = cfg.optim_wrapper.optimizer.weight_decay
    seen = 0
    for group in wrapper.optimizer.param_groups:
        for p in group['params']:
            assert group['weight_decay'] == (0.0 if any(f in names[id(p)] for f in free) else decay), names[id(p)]
            seen += 1
    assert seen == len(names)
    for hook in cfg.get('custom_hooks', []):
        HOOKS.build(hook)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_training_resumes_exactly(path):
    assert load(path).default_hooks.exact_resume == dict(type='ExactResumeHook')


@pytest.mark.parametrize('path', [p for p in CONFIGS if p.parent.name == 'imagenet'], ids=lambda p: p.stem)
def test_classifiers_follow_table_a1(path):
    cfg = load(path)
    assert cfg.train_cfg.max_epochs == 300 and cfg.train_dataloader.batch_size * 8 == 1024
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-3, 0.05)
    warm_up, cosine = cfg.param_scheduler
    assert (warm_up.type, warm_up.end, cosine.type) == ('LinearLR', 20, 'CosineAnnealingLR')
    if cfg.model.backbone.norm_cfg.type == 'PRepBN':
        gamma, recalibration = cfg.custom_hooks
        assert recalibration == dict(type='BNRecalibrationHook', num_epochs=10)
        assert (gamma.type, gamma.unit) == ('GammaDecayHook', 'iter')
    # Table A1: drop path rate and linear decay steps
    table = {
        'deit_t_prepbn': (0.0, 0),
        'deit_s_prepbn': (0.0, 300000),
        'pvt_t_prepbn': (0.0, 0),
        'pvt_s_prepbn': (0.1, 300000),
        'pvt_m_prepbn': (0.3, 300000),
        'swin_t_prepbn': (0.1, 0),
        'swin_s_prepbn': (0.3, 300000),
        'swin_b_prepbn': (0.3, 300000),
    }
    if path.stem in table:
        assert (cfg.model.backbone.drop_path_rate, cfg.custom_hooks[0].T) == table[path.stem]


def test_the_authors_recipe():
    cfg = load(ROOT / 'configs' / 'maskrcnn_slab_swin_t_1x.py')
    assert cfg.train_cfg.max_epochs == 12 and cfg.train_dataloader.batch_size == 2
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'
    assert (cfg.optim_wrapper.optimizer.type, cfg.optim_wrapper.optimizer.lr) == ('AdamW', 1e-4)
    assert cfg.param_scheduler[1].milestones == [8, 11]
    assert cfg.auto_scale_lr.base_batch_size == 16
    backbone = cfg.model.backbone
    assert backbone.attn == ('sla', 'sla', 'softmax', 'softmax') and backbone.window_sizes == (56, 28, 7, 7)
    assert backbone.drop_path_rate == 0.1 and backbone.norm_eval and backbone.norm_cfg.gamma == 0
    policies = cfg.train_dataloader.dataset.pipeline[3].transforms
    assert [s[0] for s in policies[0][0].scales] == list(range(480, 801, 32))
    assert [t.type for t in policies[1]] == ['RandomChoiceResize', 'RandomCrop', 'RandomChoiceResize']


def test_from_layernorm_weights():
    cfg = load(ROOT / 'configs' / 'maskrcnn_slab_swin_t_from_ln_1x.py')
    assert cfg.model.backbone.norm_cfg.gamma == 1 and not cfg.model.backbone.norm_eval
    assert [h.type for h in cfg.custom_hooks] == ['GammaDecayHook', 'BNRecalibrationHook']


def test_pvts_recipe():
    cfg = load(ROOT / 'configs' / 'maskrcnn_pvt_t_prepbn_1x.py')
    assert (cfg.optim_wrapper.optimizer.lr, cfg.optim_wrapper.optimizer.weight_decay) == (2e-4, 1e-4)
    resize = [t for t in cfg.train_dataloader.dataset.pipeline if 'Resize' in t.type or 'Choice' in t.type]
    assert [(t.type, t.scale) for t in resize] == [('Resize', (1333, 800))]


def test_imagenet_is_read_as_mmpretrain_reads_it(tmp_path, monkeypatch):
    """1000 class folders, as ImageNet has them, of one image each."""
    image = np.zeros((8, 8, 3), np.uint8)
    for split in ('train', 'val'):
        for i in range(1000):
            folder = tmp_path / split / f'n{i:08d}'
            folder.mkdir(parents=True)
            cv2.imwrite(str(folder / 'a.png'), image)
    monkeypatch.setenv('IMAGENET_ROOT', str(tmp_path))
    cfg = load(ROOT / 'configs' / 'imagenet' / 'slab_swin_t.py')
    init_default_scope('mmpretrain')
    for split in ('train', 'val'):
        loader = cfg[f'{split}_dataloader']
        loader.update(num_workers=0, persistent_workers=False, batch_size=4)
        batch = next(iter(Runner.build_dataloader(loader)))
        assert len(batch['inputs']) == 4 and batch['inputs'][0].shape == (3, 224, 224)
        if split == 'val':
            assert [int(s.gt_label) for s in batch['data_samples']] == [0, 1, 2, 3]


def test_coco_is_read_from_where_the_environment_says(tmp_path, monkeypatch):
    """The loading code of the COCO configs, on a folder laid out as COCO's."""
    make_shapes(tmp_path, num_train=4, num_val=2, size=96, progress=False)
    names = ('person', 'bicycle', 'car', 'motorcycle', 'airplane')
    for split in ('train', 'val'):
        (tmp_path / split).rename(tmp_path / f'{split}2017')
        old = tmp_path / 'annotations' / f'instances_{split}.json'
        content = json.loads(old.read_text())
        for category, name in zip(content['categories'], names):
            category['name'] = name
        old.with_name(f'instances_{split}2017.json').write_text(json.dumps(content))
    monkeypatch.setenv('COCO_ROOT', str(tmp_path))
    cfg = load(ROOT / 'configs' / 'maskrcnn_slab_swin_t_1x.py')
    assert len(names) == len(CLASSES)
    init_default_scope('mmdet')
    for split in ('train', 'val'):
        loader = cfg[f'{split}_dataloader']
        loader.update(num_workers=0, persistent_workers=False)
        batch = next(iter(Runner.build_dataloader(loader)))
        assert len(batch['inputs']) == (2 if split == 'train' else 1)
        assert max(batch['inputs'][0].shape) >= 384
        assert len(batch['data_samples'][0].gt_instances if split == 'train' else [1]) >= 1
    assert cfg.val_evaluator.ann_file == f'{tmp_path}/annotations/instances_val2017.json'
    monkeypatch.delenv('COCO_ROOT')
    assert load(ROOT / 'configs' / 'maskrcnn_swin_t_1x.py').data_root == 'data/coco'

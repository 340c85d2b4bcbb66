import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

from mmslab.data.shapes import CLASSES, make_shapes

from .conftest import ROOT

CONFIGS = sorted(p for p in (ROOT / 'configs').rglob('*.py') if '_base_' not in p.parts)


def load(path: Path) -> Config:
    cfg = Config.fromfile(str(path))
    cfg.model.backbone.init_cfg = None
    return cfg


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_config_trains_and_evaluates(path):
    """One training step and one evaluation of the model of each config, on tiny images."""
    from mmdet.testing import demo_mm_inputs

    cfg = load(path)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    classes = model.roi_head.bbox_head.num_classes
    data = demo_mm_inputs(2, [[3, 64, 64], [3, 60, 80]], num_classes=classes, with_mask=True)
    data = model.data_preprocessor(data, True)
    total, _ = model.parse_losses(model.train()(**data, mode='loss'))
    total.backward()
    assert torch.isfinite(total)
    with torch.no_grad():
        results = model.eval()(**data, mode='predict')
    assert all('masks' in r.pred_instances for r in results)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_config_makes_an_optimizer_and_hooks(path):
    """Weight decay is none on norms and position terms, 0.05 on all else; the schedule is 1x."""
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import HOOKS

    cfg = load(path)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model).backbone
    # AmpOptimWrapper needs a GPU; the parameter groups do not depend on it
    wrapper = build_optim_wrapper(model, {**cfg.optim_wrapper, 'type': 'OptimWrapper'})
    names = {id(p): n for n, p in model.named_parameters()}
    free = ('norm', 'relative_position_bias_table', 'positional_encoding')
    seen = 0
    for group in wrapper.optimizer.param_groups:
        for p in group['params']:
            assert group['weight_decay'] == (0.0 if any(f in names[id(p)] for f in free) else 0.05), names[id(p)]
            seen += 1
    assert seen == len(names)
    for hook in cfg.get('custom_hooks', []):
        HOOKS.build(hook)


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

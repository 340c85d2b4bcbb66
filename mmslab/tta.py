"""Test-time augmentation: predictions for an image and its mirror image, merged."""

import copy
from typing import Any, List, Optional

from mmengine.config import Config

from .data.classes import datasets, type_name

_FLIPS = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
_DEFAULTS = {
    'mmdet': dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
    'mmpretrain': dict(type='mmpretrain.AverageClsScoreTTA'),
}
MASK_HEAD = 'roi_head.mask_head.'  # parameters that a test without masks leaves out


def use_tta(cfg: Config) -> Optional[str]:
    """Changes a config, in place, so that its test merges predictions for several forms of each image.

    As mmdet's and mmpretrain's test.py do it: by ``tta_model`` and ``tta_pipeline`` of the config; where it has none, the image
    and its mirror image, boxes merged by non-maximum suppression at IoU 0.5 (``DetTTAModel``), class scores by their mean
    (``AverageClsScoreTTA``). ``DetTTAModel`` merges boxes alone: a two-stage detector is tested without its mask head.

    Returns:
        str | None: What to tell of it, if masks were left out.

    Raises:
        ValueError: If the config has no ``tta_model`` and is neither mmdet's nor mmpretrain's, its pipeline is none that can be
            augmented, or its masks cannot be left out.
    """
    scope = cfg.get('default_scope')
    model = cfg.get('tta_model') or _DEFAULTS.get(scope)
    if not isinstance(model, dict) or 'type' not in model:
        raise ValueError(
            f"--tta knows how to merge the predictions of mmdet's and mmpretrain's models, and default_scope is {scope!r}. Set "
            'tta_model and tta_pipeline in the config.'
        )
    found = [dataset for _, dataset in datasets(cfg.test_dataloader.dataset, 'test_dataloader.dataset')]
    pipeline = cfg.get('tta_pipeline')
    if pipeline is not None and not any(type_name(step) == 'TestTimeAug' for step in pipeline):
        raise ValueError(
            '--tta: tta_pipeline in the config has no TestTimeAug. Add one, or remove tta_pipeline for flips.'
        )
    pipelines = [_with_flips(each.get('pipeline')) if pipeline is None else pipeline for each in found]
    notice = _without_masks(cfg) if type_name(model) == 'DetTTAModel' else None
    for dataset, each in zip(found, pipelines):
        dataset.pipeline = copy.deepcopy(each)
    cfg.model = dict(copy.deepcopy(model), module=cfg.model)
    return notice


def _with_flips(pipeline: Any) -> List[dict]:
    steps = copy.deepcopy(list(pipeline or []))
    if not steps or not type_name(steps[-1]).startswith('Pack') or any(type_name(s) == 'TestTimeAug' for s in steps):
        raise ValueError(
            '--tta puts its flips before the last step of the test pipeline, which must pack (PackDetInputs...), but got '
            f'{[type_name(step) for step in steps]}. Set tta_pipeline in the config.'
        )
    pack = steps[-1]
    if 'meta_keys' in pack:
        pack['meta_keys'] = tuple(dict.fromkeys((*pack['meta_keys'], 'flip', 'flip_direction')))
    return [*steps[:-1], dict(type='TestTimeAug', transforms=[copy.deepcopy(_FLIPS), [pack]])]


def _without_masks(cfg: Config) -> Optional[str]:
    evaluators = cfg.get('test_evaluator')
    evaluators = evaluators if isinstance(evaluators, (list, tuple)) else [evaluators]
    wanted = [e for e in evaluators if isinstance(e, dict) and 'segm' in _metrics(e)]
    roi_head = cfg.model.get('roi_head') or {}
    panoptic = any(isinstance(e, dict) and 'Panoptic' in type_name(e) for e in evaluators)
    removable = roi_head.get('mask_head') is not None
    if panoptic or (wanted and not removable) or any(_metrics(e) == ['segm'] for e in wanted):
        raise ValueError(
            "--tta: mmdet's DetTTAModel merges boxes alone, and test_evaluator asks for masks, which this model cannot be "
            'tested without. Test it without --tta, set a tta_model of your own that merges masks, or, for a model that '
            'finds boxes too, test_evaluator.metric=bbox.'
        )
    if not removable:
        return None
    roi_head.mask_head = None
    for evaluator in wanted:
        evaluator.metric = [metric for metric in _metrics(evaluator) if metric != 'segm']
    return "--tta: mmdet's DetTTAModel merges boxes alone, so the mask head is left out and masks are not evaluated"


def _metrics(evaluator: dict) -> List[str]:
    metric = evaluator.get('metric') or []
    return [metric] if isinstance(metric, str) else list(metric)

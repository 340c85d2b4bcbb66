"""Configs for data of one's own: short, inheriting ours, every figure with what it was measured from."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmengine.config import Config

from .apis import load_config
from .data.checks import check_datasets, check_writable
from .data.classes import check_classes, shown
from .data.own import SPLITS, Figures, Split, find_split, hold_out, measure

PathLike = Union[str, os.PathLike]
_PACKAGE = Path(__file__).resolve().parent
CONFIGS = (_PACKAGE / '.mim' if (_PACKAGE / '.mim').is_dir() else _PACKAGE.parent) / 'configs'

COCO_SCALE, COCO_RATIOS, COCO_BATCH = (1333, 800), (0.5, 1.0, 2.0), 2
STRIDES = (4, 8, 16, 32, 64)
_SCALES = (8, 6, 4, 3, 2, 12, 16)  # of anchors, in strides; COCO's first, which stays where none is better
_IMAGES = 120_000  # to train on in all: one epoch of COCO
_MAX_BOXES = 20_000  # of which the anchors are found


class Anchors(NamedTuple):
    """Anchors for boxes, and the mean IoU of a box with its best anchor, both put at the same place: theirs and COCO's."""

    scale: int
    ratios: Tuple[float, ...]
    strides: Tuple[int, ...]
    iou: float
    iou_of_coco: float


class Plan(NamedTuple):
    """What :func:`new_config` measured and chose; the boxes in pixels of the resized images."""

    arch: str
    config: Path
    data: Path
    base: Config
    splits: Dict[str, Split]
    figures: Dict[str, Figures]
    classes: Tuple[str, ...]
    masks: bool
    from_scratch: bool
    image_scale: Tuple[int, int]
    boxes: np.ndarray
    anchors: Anchors
    batch: int
    epochs: int

    @property
    def learnable(self) -> int:
        """Training images with an instance; mmdet trains on no others."""
        return int((self.figures['train'].per_image > 0).sum())


def archs() -> Dict[str, Path]:
    """The configs of Mask R-CNN that a config can inherit, by the name of the backbone and how it is trained."""
    return {p.stem[len('maskrcnn_') : -len('_1x')]: p for p in sorted(CONFIGS.glob('maskrcnn_*_1x.py'))}


def new_config(
    data: PathLike,
    arch: str,
    out: PathLike,
    train_ann: Optional[PathLike] = None,
    val_ann: Optional[PathLike] = None,
    train_images: Optional[PathLike] = None,
    val_images: Optional[PathLike] = None,
    hold_out_fraction: Optional[float] = None,
    from_scratch: bool = False,
    force: bool = False,
) -> Plan:
    """Writes a config that trains ``arch`` on a data set in COCO's format, as Mask R-CNN, or Faster R-CNN if masks are missing.

    Args:
        data (str | Path): Its folder.
        arch (str): One of :func:`archs`, as 'slab_swin_t'.
        out (str | Path): The config to write, a .py file.
        train_ann, val_ann, train_images, val_images (str | Path, optional): Annotation files and image folders, if they are
            not where COCO and usual exports have them.
        hold_out_fraction (float, optional): The part of the training images to validate on, chosen at random, for a set that
            has no others. The two annotation files are written beside ``out``.
        from_scratch (bool): Without pre-trained weights: gamma goes from 1 to 0 during the training.
        force (bool): Whether to replace ``out``.

    Raises:
        FileNotFoundError, FileExistsError, OSError: For a folder or file that is missing, exists, or cannot be written.
        ValueError: For an unknown ``arch``, another suffix, or a data set that is no COCO data set, has different classes in
            training and validation, or nothing to learn. Nothing is written then.
    """
    out, data = Path(out), Path(data)
    if arch not in archs():
        raise ValueError(f'--arch must be one of {", ".join(archs())}, but got {arch!r}.')
    if out.suffix != '.py':
        raise ValueError(f'--out must name a .py file, but got {str(out)!r}.')
    if not data.is_dir():
        raise FileNotFoundError(f'--data {str(data)!r} is no folder. Give that of the data set.')
    if hold_out_fraction is not None and (val_ann or val_images):
        raise ValueError(
            '--hold-out takes the validation set from the training set: leave --val-ann and --val-images out.'
        )
    own = [] if hold_out_fraction is None else [out.with_name(f'{out.stem}_{split}.json') for split in SPLITS]
    existing = [p for p in (out, *own) if p.exists()]
    if existing and not force:
        raise FileExistsError(
            f'--out: {str(existing[0])!r} exists. Choose another name, or pass --force to replace it.'
        )
    paths = [None if p is None else Path(p) for p in (train_ann, train_images, val_ann, val_images)]
    train = find_split(data, 'train', *paths[:2])
    if own:
        parts = hold_out(train.content, hold_out_fraction)
        train, val = (Split(p, train.images, content) for p, content in zip(own, parts))
    else:
        val = find_split(data, 'val', *paths[2:], classes=measure(train).learnable)
    plan = _plan(arch, out, data, dict(train=train, val=val), from_scratch)
    check_writable(out.parent, 'the folder of --out')
    targets = [*own, out]
    partial = [
        p.with_name(f'.{os.getpid()}-{p.name}') for p in targets
    ]  # beside them: a config names its base from there
    draft = plan
    if own:
        draft = plan._replace(splits={n: plan.splits[n]._replace(ann_file=p) for n, p in zip(SPLITS, partial)})
    try:
        for path, part in zip(partial, parts if own else ()):
            path.write_text(json.dumps(part), encoding='utf-8')
        partial[-1].write_text(_text(draft), encoding='utf-8')
        cfg = load_config(partial[-1])
        check_datasets(cfg, ('train', 'val'))
        check_classes(cfg, ('train', 'val'))
        partial[-1].write_text(_text(plan), encoding='utf-8')
        for source, target in zip(partial, targets):
            os.replace(source, target)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return plan


def _plan(arch: str, out: Path, data: Path, splits: Dict[str, Split], from_scratch: bool) -> Plan:
    figures = {name: measure(split) for name, split in splits.items()}
    train = figures['train']
    scale = image_scale(train.sizes)
    factors = np.minimum(max(scale) / train.sizes.max(1), min(scale) / train.sizes.min(1))
    boxes = train.boxes * factors[train.of][:, None]
    number = int((train.per_image > 0).sum())
    room = COCO_BATCH * COCO_SCALE[0] * COCO_SCALE[1] / (scale[0] * scale[1])
    return Plan(
        arch=arch,
        config=out,
        data=data.resolve(),
        base=load_config(archs()[arch]),
        splits=splits,
        figures=figures,
        classes=train.learnable,
        masks=all(each.masks == len(each.boxes) for each in figures.values()),
        from_scratch=from_scratch,
        image_scale=scale,
        boxes=boxes,
        anchors=fit_anchors(boxes),
        batch=2 ** int(np.log2(max(1, min(8, room, number / 10)))),
        epochs=int(min(100, max(12, -(-_IMAGES // number)))),
    )


def _base(plan: Plan) -> str:
    """How the config refers to ours: by a relative path in the same checkout, else by name where mmengine finds it."""
    path, folder = archs()[plan.arch].resolve(), plan.config.resolve().parent
    if CONFIGS.resolve().parent in (folder, *folder.parents):
        return Path(os.path.relpath(path, folder)).as_posix()
    try:
        found, _ = Config._get_cfg_path(f'mmslab::{path.name}', '')
        if os.path.samefile(found, path):
            return f'mmslab::{path.name}'
    except (AssertionError, ImportError, OSError, ValueError):
        pass  # this package is neither installed with its configs nor known to mmengine
    return path.as_posix()


def _text(plan: Plan) -> str:
    train, val = plan.figures['train'], plan.figures['val']
    kind = 'Mask R-CNN' if plan.masks else 'Faster R-CNN'
    lines = [
        *_comment(
            f'{kind} with {plan.base.model.backbone.type} ({plan.arch}) for {plan.data.name}: {len(train.sizes)} images to train '
            f'on, {len(val.sizes)} to validate on. Written by `mmslab new-config`; `mmslab train {plan.config.name}` '
            'trains it.'
        ),
        f'_base_ = {_base(plan)!r}',
        '',
        *_data_text(plan),
        '',
        *_model_text(plan),
        '',
        *_schedule_text(plan),
    ]
    return '\n'.join(lines) + '\n'


def _data_text(plan: Plan) -> List[str]:
    train, scale = plan.figures['train'], plan.image_scale
    counts = [train.classes[name] for name in plan.classes]
    unused = [name for name in train.classes if name not in plan.classes]
    empty = len(train.sizes) - plan.learnable
    longer = train.sizes.max(1)
    own_size = scale == tuple(round(v) for v in _middle(train.sizes))
    load = f"dict(type='LoadAnnotations', with_bbox=True, with_mask={plan.masks})"
    lines = _comment(
        f'data: {len(counts)} classes with {_range(counts)} instances each, {len(train.boxes) / len(train.sizes):.1f} in an image'
        + (f'; without an instance, so left out: {shown(unused)}' if unused else '')
        + (f'; {empty} images without one are not trained on' if empty else '')
    )
    lines += [f'data_root = {str(plan.data)!r}', *_metainfo(plan.classes)]
    lines += _comment(
        f'images have {_range(longer)} pixels on the longer side, the one in the middle {_number(np.median(longer))}: '
        + ('they keep that size' if own_size else "reduced to COCO's 1333x800")
        + '; the longer and the shorter side, in training and in testing'
    )
    lines += [
        f'image_scale = {scale!r}',
        'train_pipeline = [',
        "    dict(type='LoadImageFromFile'),",
        f'    {load},',
        "    dict(type='RandomResize', scale=image_scale, "
        f'ratio_range={(0.6, 1.0) if min(scale) >= 480 else (0.8, 1.25)!r}, keep_ratio=True),',
        "    dict(type='RandomFlip', prob=0.5),",
        "    dict(type='PackDetInputs'),",
        ']',
        'test_pipeline = [',
        "    dict(type='LoadImageFromFile'),",
        "    dict(type='Resize', scale=image_scale, keep_ratio=True),",
        f'    {load},',
        "    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),",
        ']',
        *_comment(f'batch: {plan.batch} images; at most eight, a tenth of all, and as many pixels as two of COCO have'),
        'train_dataloader = dict(',
        f'    batch_size={plan.batch},',
        *_dataset(plan, 'train'),
        ')',
        'val_dataloader = dict(',
        *_dataset(plan, 'val'),
        ')',
        'test_dataloader = val_dataloader',
    ]
    ann_file = _within(plan.splits['val'].ann_file, plan.data)
    ann_file = repr(ann_file) if os.path.isabs(ann_file) else f"f'{{data_root}}/{ann_file}'"
    metric = ['bbox', 'segm'] if plan.masks else 'bbox'
    return [*lines, f'val_evaluator = dict(ann_file={ann_file}, metric={metric!r})', 'test_evaluator = val_evaluator']


def _dataset(plan: Plan, name: str) -> List[str]:
    split = plan.splits[name]
    prefix = _within(split.images, plan.data)
    lines = [
        '    dataset=dict(',
        '        data_root=data_root,',
        '        metainfo=metainfo,',
        f'        ann_file={_within(split.ann_file, plan.data)!r},',
        f'        data_prefix=dict(img={"" if prefix == "." else f"{prefix}/"!r}),',
        f'        pipeline={"train" if name == "train" else "test"}_pipeline,',
    ]
    least = int(plan.figures[name].sizes.min())
    if name == 'train' and least < 32:
        lines.append(
            f'        filter_cfg=dict(filter_empty_gt=True, min_size={least}),  # the base leaves out images below 32'
        )
    return [*lines, '    ),']


def _model_text(plan: Plan) -> List[str]:
    anchors, heads = plan.anchors, f'num_classes={len(plan.classes)}'
    small, large = (_number(v) for v in np.quantile(np.sqrt(plan.boxes.prod(1)), (0.05, 0.95)))
    low, high = np.quantile(plan.boxes[:, 1] / plan.boxes[:, 0], (0.05, 0.95))
    most = int(max(each.per_image.max() for each in plan.figures.values()))
    lines = []
    if not plan.masks:
        missing = sum(len(each.boxes) - each.masks for each in plan.figures.values())
        lines += _comment(f'model: boxes alone, since {missing} instances have no mask')
    lines += _comment(
        f'anchors: at that size nine in ten boxes have sides of {small} to {large} pixels, and are {low:.2f} to {high:.2f} times '
        f'as high as wide. The mean IoU of a box with its best anchor is {anchors.iou:.2f}; with those for COCO it would be '
        f'{anchors.iou_of_coco:.2f}'
    )
    lines.append('model = dict(')
    if not plan.masks:
        lines.append("    type='FasterRCNN',")
    if plan.from_scratch and _has_prepbn(plan):
        lines += [
            '    # from scratch: LayerNorm hands over to BN while the model trains',
            '    backbone=dict(norm_cfg=dict(gamma=1.0), norm_eval=False, init_cfg=None),',
        ]
    elif plan.from_scratch:
        lines.append('    backbone=dict(init_cfg=None),  # from scratch')
    if len(anchors.strides) < len(STRIDES):
        lines.append(f'    neck=dict(num_outs={len(anchors.strides)}),  # a fifth level would have no boxes')
    values = f'scales=[{anchors.scale}], ratios={list(anchors.ratios)!r}, strides={list(anchors.strides)!r}'
    lines.append(f'    rpn_head=dict(anchor_generator=dict({values})),')
    if plan.masks:
        lines.append(f'    roi_head=dict(bbox_head=dict({heads}), mask_head=dict({heads})),')
    else:
        lines.append(f'    roi_head=dict(bbox_head=dict({heads}), mask_roi_extractor=None, mask_head=None),')
    if most > 70:
        room = min(1000, -(-most * 3 // 200) * 100)
        lines.append(f'    test_cfg=dict(rcnn=dict(max_per_img={room})),  # one image has {most} instances')
    return [*lines, ')']


def _schedule_text(plan: Plan) -> List[str]:
    epochs, number = plan.epochs, plan.learnable
    recipe, base_batch = plan.base.optim_wrapper.optimizer.lr, plan.base.auto_scale_lr.base_batch_size
    lr = float(f'{recipe * plan.batch / base_batch:.3g}')
    warmup = max(1, min(500, epochs * -(-number // plan.batch) // 10))
    lines = _comment(
        f'schedule: {epochs} epochs of {number} images'
        + (', in all as many as COCO has' if 12 < epochs < 100 else ', which are 12 at least and 100 at most')
        + '; the learning rate falls where it does for COCO'
    )
    lines += [
        f'max_epochs = {epochs}',
        f'train_cfg = dict(max_epochs=max_epochs, val_interval={max(1, epochs // 12)})',
        'param_scheduler = [',
        f"    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end={warmup}),",
        "    dict(type='MultiStepLR', begin=0, end=max_epochs, by_epoch=True, "
        'milestones=[max_epochs * 2 // 3, max_epochs * 11 // 12], gamma=0.1),',
        ']',
    ]
    lines += _comment(
        f'learning rate: the {recipe:g} of the recipe is for {base_batch} images at once, in proportion for {plan.batch}; with '
        'several GPUs add --auto-scale-lr'
    )
    if torch.cuda.is_available():
        lines.append(f'optim_wrapper = dict(optimizer=dict(lr={lr!r}))')
    else:
        lines.append("# there was no GPU; where there is one, type='AmpOptimWrapper' trains in mixed precision")
        lines.append(f"optim_wrapper = dict(type='OptimWrapper', optimizer=dict(lr={lr!r}))")
    lines.append(f'auto_scale_lr = dict(base_batch_size={plan.batch})')
    handover = None
    if plan.from_scratch and _has_prepbn(plan):
        handover = 'T=0.5, hold=0.1'
    elif any(hook['type'] == 'GammaDecayHook' for hook in plan.base.get('custom_hooks') or []):
        handover = 'T=0.67'
    if handover:
        lines += [
            'custom_hooks = [',
            f"    dict(type='GammaDecayHook', {handover}),  # parts of the training",
            "    dict(type='BNRecalibrationHook', num_epochs=1),",
            ']',
        ]
    return lines


def _has_prepbn(plan: Plan) -> bool:
    return plan.base.model.backbone.norm_cfg.type == 'PRepBN'


def image_scale(sizes: np.ndarray) -> Tuple[int, int]:
    """Longer and shorter side to train on images of ``sizes``, ``(N, 2)``: those in the middle, or COCO's if they are larger."""
    middle = _middle(sizes)
    factor = min(1.0, COCO_SCALE[0] / middle[0], COCO_SCALE[1] / middle[1])
    return round(middle[0] * factor), round(middle[1] * factor)


def _middle(sizes: np.ndarray) -> Tuple[float, float]:
    return float(np.median(sizes.max(1))), float(np.median(sizes.min(1)))


def fit_anchors(boxes: np.ndarray) -> Anchors:
    """Anchors for ``boxes``, widths and heights in pixels of the resized images, ``(M, 2)``.

    One scale for all levels, as Mask R-CNN has, three ratios, those of the boxes where they fit better than COCO's, and
    the strides of a feature pyramid's levels, without the last if no box is closer to its anchors than to others.
    """
    boxes = boxes[:: -(-len(boxes) // _MAX_BOXES)]
    own = np.exp(np.quantile(np.log(boxes[:, 1] / boxes[:, 0]), (0.1, 0.5, 0.9)))
    own = tuple(sorted({float(f'{ratio:.2g}') for ratio in own}))

    def iou(scale: int, ratios: Sequence[float]) -> np.ndarray:
        """Of the boxes with each anchor, ``(M, strides * ratios)``."""
        sides = np.repeat(np.array(STRIDES) * scale, len(ratios))
        roots = np.tile(np.sqrt(ratios), len(STRIDES))
        shapes = np.stack([sides / roots, sides * roots], 1)
        common = np.minimum(boxes[:, None], shapes).prod(2)
        return common / (boxes.prod(1)[:, None] + shapes.prod(1) - common)

    means = {(s, r): iou(s, r).max(1).mean() for r in (COCO_RATIOS, own) for s in _SCALES}
    best = max(means, key=lambda key: round(means[key] - 0.01 * (key[1] != COCO_RATIOS), 3))  # the first of equals
    levels = iou(*best).argmax(1) // len(best[1])
    strides = STRIDES if (levels == len(STRIDES) - 1).mean() > 0.001 else STRIDES[:-1]
    return Anchors(best[0], best[1], strides, float(means[best]), float(means[_SCALES[0], COCO_RATIOS]))


def _within(path: Path, root: Path) -> str:
    """``path`` from ``root`` if it is in there."""
    path = path.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _comment(text: str) -> List[str]:
    return textwrap.wrap(text, 120, initial_indent='# ', subsequent_indent='# ', break_on_hyphens=False)


def _metainfo(classes: Sequence[str]) -> List[str]:
    one = f'metainfo = dict(classes={tuple(classes)!r})'
    if len(one) <= 118:
        return [one]
    names = textwrap.wrap(', '.join(map(repr, classes)) + ',', 112, break_long_words=False, break_on_hyphens=False)
    return ['metainfo = dict(', '    classes=(', *(' ' * 8 + line for line in names), '    )', ')']


def _number(value: Any) -> str:
    return f'{value:.0f}' if value >= 10 else f'{value:.2g}'


def _range(values: Sequence) -> str:
    low, high = (_number(v) for v in (min(values), max(values)))
    return low if low == high else f'{low} to {high}'

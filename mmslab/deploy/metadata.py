"""What a graph's user must know of the model, to give it an image without this package: written into the file itself."""

import json
import math
from typing import Any, Dict, List, Optional, Sequence

import torch.nn as nn
from mmengine.config import Config
from torch import Tensor

from ..backbones.base import SLABBackbone
from ..data.classes import class_names, datasets, trained_classes, type_name
from ..version import __version__
from .compare import Size

FILE = 'mmslab.json'  # among the extra files of a .pt2
_RESIZING = ('Resize', 'ResizeEdge', 'CenterCrop', 'FixScaleResize', 'FixShapeResize')


def describe(
    cfg: Config,
    model: nn.Module,
    checkpoint: Any,
    part: str,
    output_names: Sequence[str],
    size: Optional[Size] = None,
    divisor: int = 1,
) -> Dict[str, Any]:
    """How to make a graph's input of an image, and what its outputs are, as values that JSON has.

    An image, ``(H, W, 3)`` in 0 to 255 with its channels in ``channel_order``, becomes ``(image - mean) / std``, is padded at
    the bottom and right with ``pad_value`` to ``size``, or, where that is None, to multiples of ``pad_size_divisor``, and then
    is ``(1, 3, H, W)``, float32.

    Args:
        cfg (Config): The config of the model.
        model (nn.Module): The model that is exported, folded, with its data preprocessor.
        checkpoint (Any): What the file of its weights holds; mmengine's say which classes it was trained on.
        part (str): What of the model the graph is.
        output_names (Sequence[str]): In the order of the graph's outputs.
        size (tuple[int, int], optional): Height and width, if the graph takes no other.
        divisor (int): What the graph needs heights and widths to be multiples of.

    Returns:
        dict: ``resize`` (the steps of the test pipeline that change an image's size), ``mean``, ``std``
        (three numbers each), ``channel_order`` ('RGB' or 'BGR'), ``pad_size_divisor``, ``pad_value``,
        ``size`` (two numbers or None), ``class_names`` (or None, if nothing says them), ``input_name``, ``output_names``,
        ``part``, ``model``, ``backbone``, ``folded`` and ``mmslab_version``.
    """
    preprocessor = getattr(model, 'data_preprocessor', None)
    preprocessor = getattr(
        preprocessor, 'data_preprocessor', preprocessor
    )  # semi-supervised detectors have one for each branch
    settings = (cfg.model.get('data_preprocessor') or {}) or cfg.get('data_preprocessor') or {}
    normalized = getattr(preprocessor, '_enable_normalize', False)
    return dict(
        resize=_resizing(cfg),
        mean=_three(preprocessor.mean) if normalized else [0.0] * 3,
        std=_three(preprocessor.std) if normalized else [1.0] * 3,
        # mmcv reads images as BGR
        channel_order='RGB' if settings.get('bgr_to_rgb') or settings.get('to_rgb') else 'BGR',
        pad_size_divisor=math.lcm(int(getattr(preprocessor, 'pad_size_divisor', None) or 1), divisor),
        pad_value=float(getattr(preprocessor, 'pad_value', 0)),
        size=list(size) if size else None,
        class_names=_names(cfg, checkpoint),
        input_name='image',
        output_names=list(output_names),
        part=part,
        model=type(model).__name__,
        backbone=type(model.backbone).__name__,
        folded=isinstance(model.backbone, SLABBackbone) and model.backbone.deploy,
        mmslab_version=__version__,
    )


def _resizing(cfg: Config) -> List[Dict[str, Any]]:
    loader = cfg.get('test_dataloader') or {}
    for _, dataset in datasets(loader.get('dataset'), 'test_dataloader.dataset'):
        steps = dataset.get('pipeline') or []
        return [json.loads(json.dumps(dict(step), default=str)) for step in steps if type_name(step) in _RESIZING]
    return []


def as_strings(metadata: Dict[str, Any]) -> Dict[str, str]:
    """Each value as JSON, since ONNX has room for strings alone."""
    return {key: json.dumps(value) for key, value in metadata.items()}


def _three(values: Tensor) -> List[float]:
    found = [float(str(v)) for v in values.flatten().numpy()]  # as float32 is written, without what float64 adds
    return found * 3 if len(found) == 1 else found


def _names(cfg: Config, checkpoint: Any) -> Optional[List[str]]:
    names = trained_classes(checkpoint)
    loader = cfg.get('test_dataloader') or {}
    for path, dataset in datasets(loader.get('dataset'), 'test_dataloader.dataset'):
        names = names or class_names(dataset, cfg.get('default_scope'), path)
    return list(names) if names else None

"""Folding the norms of a whole model: a detector, a classifier, or a backbone alone."""

from typing import List, Optional

import torch.nn as nn

from ..backbones.base import SLABBackbone
from ..layers.fold import Affine, check_foldable, folded
from ..layers.norm import PRepBN, RepBN


def fold(model: nn.Module) -> nn.Module:
    """Folds every PRepBN, RepBN and BN of the backbones here into its neighbours, in place: the same outputs, faster.

    Backbones take their inference form (``switch_to_deploy``). An output norm that is an affine map goes on into
    what follows the backbone: FPN's 1x1 lateral convolutions, or a classifier's linear layer, behind a mean over the
    map or not; behind anything else it stays a scale and a shift. So does each PRepBN and RepBN that stands
    elsewhere, as in mmdet's own Swin. Other norms are left alone. A second call does nothing.

    Args:
        model (nn.Module): In eval mode; every PRepBN at gamma 0.

    Returns:
        nn.Module: ``model`` itself.

    Raises:
        ValueError: If a layer is in training mode or has gamma above 0; it names the layer, and nothing has changed.
    """
    if not is_folded(model):
        check_foldable(model)
    for module in list(model.modules()):
        if isinstance(module, SLABBackbone):
            module.switch_to_deploy()
    _fold_outputs(model)
    for parent in [m for m in model.modules() if not isinstance(m, PRepBN)]:
        for name, child in list(parent._modules.items()):  # named_children() gives a shared norm only once
            if isinstance(child, (PRepBN, RepBN)):
                setattr(parent, name, folded(child))
    return model


def is_folded(model: nn.Module) -> bool:
    """Whether there is nothing left to fold in ``model``."""
    return not any(
        isinstance(m, (PRepBN, RepBN)) or (isinstance(m, SLABBackbone) and not m.deploy) for m in model.modules()
    )


def _fold_outputs(model: nn.Module) -> None:
    """Moves the backbone's output norms into the layers that take its outputs, if these can take all of them."""
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, SLABBackbone):
        return
    names = [f'norm{i}' for i in backbone.out_indices]
    takers = _takers(model, len(names))
    if takers is None or not all(isinstance(getattr(backbone, name), Affine) for name in names):
        return
    for name, taker in zip(names, takers):
        if taker is not None:
            folded(getattr(backbone, name), taker)
        setattr(backbone, name, nn.Identity())


def _takers(model: nn.Module, num_outputs: int) -> Optional[List[Optional[nn.Module]]]:
    """For each output of the backbone the linear layer that takes it, None where nothing does; None if not known.

    They must have a bias already, which the config of the folded model could not ask for otherwise.
    """
    neck, head = getattr(model, 'neck', None), getattr(model, 'head', None)
    takers: Optional[List[Optional[nn.Module]]] = None
    if _is(model, 'mmdet', 'SingleStageDetector', 'TwoStageDetector') and _is_exactly(neck, 'mmdet', 'FPN'):
        if neck.add_extra_convs != 'on_input':
            laterals = [m.conv for m in neck.lateral_convs]
            after = num_outputs - neck.start_level - len(laterals)
            takers = [None] * neck.start_level + laterals + [None] * after
    elif _is(model, 'mmpretrain', 'ImageClassifier') and _is_exactly(head, 'mmpretrain', 'LinearClsHead'):
        if neck is None or (_is_exactly(neck, 'mmpretrain', 'GlobalAveragePooling')):
            takers = [None] * (num_outputs - 1) + [head.fc]
    if takers is None or any(t is not None and not _takes_affine(t) for t in takers):
        return None
    return takers


def _takes_affine(layer: nn.Module) -> bool:
    if layer.bias is None:
        return False
    if isinstance(layer, nn.Linear):
        return True
    return (
        isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.padding == (0, 0) and layer.groups == 1
    )


def _is(module: Optional[nn.Module], package: str, *names: str) -> bool:
    """Whether ``module`` is of a class of these names, or of a subclass, of a package that need not be installed."""
    return any(c.__name__ in names and c.__module__.split('.')[0] == package for c in type(module).__mro__)


def _is_exactly(module: Optional[nn.Module], package: str, name: str) -> bool:
    return type(module).__name__ == name and type(module).__module__.split('.')[0] == package

"""Folding the norms of a whole model: a detector, a classifier, or a backbone alone."""

import copy
from functools import partial
from typing import List, Optional

import torch.nn as nn
from mmcv.cnn import ConvModule

from ..backbones.base import SLABBackbone
from ..layers.compare import Part, check_unchanged, random_like
from ..layers.fold import (
    CONV,
    LINEAR,
    Affine,
    check_foldable,
    folded,
    in_one_place,
    is_affine,
    is_exactly,
    is_known,
    is_untouched,
    keep_affine,
    one_place_each,
    takes_affine,
)
from ..layers.norm import PRepBN, RepBN


def fold(model: nn.Module, check: bool = True) -> nn.Module:
    """Folds every PRepBN, RepBN and BN of the backbones here into its neighbours, in place: the same outputs, faster.

    Backbones take their inference form (``switch_to_deploy``). An output norm that is an affine map goes on into
    what follows the backbone: FPN's 1x1 lateral convolutions, or a classifier's linear layer, behind a mean over the
    map or not; behind anything else it stays a scale and a shift. So does each PRepBN and RepBN that stands
    elsewhere, as in mmdet's own Swin. Other norms are left alone, subclasses of these among them. A second call does
    nothing.

    Args:
        model (nn.Module): In eval mode; every PRepBN at gamma 0.
        check (bool): Whether to fold copies first, and compare: of each backbone, with the neck or head that takes its
            output norms, the outputs for a small random image; of each norm elsewhere those for random tokens.
            Defaults to True.

    Returns:
        nn.Module: ``model`` itself.

    Raises:
        ValueError: If a layer is in training mode or has gamma above 0, or the check finds other outputs; it names
            the layer, and nothing has changed.
    """
    if not is_folded(model):
        check_foldable(model)
    with one_place_each(model):
        if check:
            _check(model)
        _fold(model)
    return model


def is_folded(model: nn.Module) -> bool:
    """Whether there is nothing left to fold in ``model``."""
    return not any(isinstance(m, SLABBackbone) and not m.deploy for m in model.modules()) and not _norms(model)


def _norms(model: nn.Module) -> List[str]:
    """Names of the PRepBN and RepBN to be folded, the latter not inside of a PRepBN."""
    parents = [(name, m) for name, m in model.named_modules() if not isinstance(m, (PRepBN, RepBN))]
    names = [(prefix, name, m) for prefix, parent in parents for name, m in parent._modules.items()]
    return [
        f'{prefix}.{name}'.lstrip('.') for prefix, name, m in names if isinstance(m, (PRepBN, RepBN)) and is_affine(m)
    ]


def _fold(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, SLABBackbone):
            _switch(module)
    _fold_outputs(model)
    _keep_affine(model)


def _keep_affine(model: nn.Module) -> None:
    keep_affine(model, (PRepBN, RepBN))


def _switch(backbone: SLABBackbone) -> None:
    if type(backbone).switch_to_deploy is SLABBackbone.switch_to_deploy:
        backbone.switch_to_deploy(check=False)
    else:  # one that a subclass has written need not take an argument
        backbone.switch_to_deploy()


def _check(model: nn.Module) -> None:
    """Raises ValueError if folding would change outputs of ``model``, which it leaves alone."""
    front, checked = _front(model), set()
    for name, backbone in model.named_modules():
        if isinstance(backbone, SLABBackbone) and id(backbone) not in checked:
            checked.update(id(m) for m in backbone.modules())
            if front is not None and backbone is front.backbone:
                check_unchanged(front, _fold, _run_front, partial(_parts, name, name))
            elif not backbone.deploy:
                check_unchanged(backbone, _switch, lambda m: m(m.example_image()), partial(_parts, name, ''))
    for name in _norms(model):
        if id(model.get_submodule(name)) not in checked:
            _check_norm(model.get_submodule(name), name)


def _check_norm(norm: nn.Module, name: str) -> None:
    tokens = (64, norm.num_features)
    alone = nn.Sequential(norm)  # whose place a scale and a shift can take
    check_unchanged(alone, _keep_affine, lambda m: m(random_like(m, tokens)), lambda m: [Part(name, '0')])


def _parts(name: str, prefix: str, module: nn.Module) -> List[Part]:
    """The parts of a backbone called ``name``, which in ``module`` is ``prefix``, but for its output norms."""
    parts = [p for p in module.get_submodule(prefix).parts() if not p.name.startswith('norm')]
    return [p._replace(name=f'{name}.{p.name}'.lstrip('.'), of=f'{prefix}.{p.of}'.lstrip('.')) for p in parts]


def _front(model: nn.Module) -> Optional[nn.Module]:
    """``model`` up to what takes the output norms of its backbone, sharing its modules; None if they stay there."""
    takers = _takers(model)
    if takers is None or not all(is_affine(norm) for norm in _output_norms(model.backbone)):
        return None
    front = copy.copy(model)
    names = ('backbone', 'neck') if _in_package(model, 'mmdet') else ('backbone', 'neck', 'head')
    front._modules = {name: model._modules[name] for name in names if model._modules.get(name) is not None}
    return front


def _run_front(front: nn.Module) -> object:
    maps = front.backbone(front.backbone.example_image())
    for name in ('neck', 'head'):
        maps = front._modules[name](maps) if name in front._modules else maps
    return maps


def _output_norms(backbone: SLABBackbone) -> List[nn.Module]:
    return [getattr(backbone, f'norm{i}') for i in backbone.out_indices]


def _fold_outputs(model: nn.Module) -> None:
    """Moves the backbone's output norms into the layers that take its outputs, if these can take all of them."""
    takers = _takers(model)
    if takers is None or not all(isinstance(norm, Affine) for norm in _output_norms(model.backbone)):
        return
    for i, taker in zip(model.backbone.out_indices, takers):
        if taker is not None:
            folded(getattr(model.backbone, f'norm{i}'), taker)
        setattr(model.backbone, f'norm{i}', nn.Identity())


def _takers(model: nn.Module) -> Optional[List[Optional[nn.Module]]]:
    """For each output of the backbone the linear layer that takes it, None where nothing does; None if not known.

    Known are mmdet's own detectors that extract features as its detectors of one and two stages do, and mmpretrain's
    ImageClassifier. The layers must have a bias already, which the config of the folded model could not ask for
    otherwise.
    """
    backbone, neck, head = (getattr(model, name, None) for name in ('backbone', 'neck', 'head'))
    used = [m for m in (backbone, neck, head) if isinstance(m, nn.Module)]
    if not isinstance(backbone, SLABBackbone) or not is_known(backbone) or not is_untouched(model):
        return None
    takers: Optional[List[Optional[nn.Module]]] = None
    if _is_detector(model) and _is_exactly(neck, 'mmdet', 'FPN'):
        used += neck.lateral_convs
        if neck.add_extra_convs != 'on_input' and all(_begins_with_conv(m) for m in neck.lateral_convs):
            laterals = [m.conv for m in neck.lateral_convs]
            after = len(backbone.out_indices) - neck.start_level - len(laterals)
            takers = [None] * neck.start_level + laterals + [None] * after
    elif _is_exactly(model, 'mmpretrain', 'ImageClassifier') and _is_exactly(head, 'mmpretrain', 'LinearClsHead'):
        if neck is None or (_is_exactly(neck, 'mmpretrain', 'GlobalAveragePooling')):
            takers = [None] * (len(backbone.out_indices) - 1) + [head.fc]
    if takers is None or not all(in_one_place(m) and is_untouched(m) for m in used):
        return None
    return takers if all(t is None or _takes_output_norm(t) for t in takers) else None


def _takes_output_norm(layer: nn.Module) -> bool:
    pointwise = is_exactly(layer, *LINEAR) or (is_exactly(layer, *CONV) and layer.kernel_size == (1, 1))
    return pointwise and layer.bias is not None and takes_affine(layer)


def _begins_with_conv(module: nn.Module) -> bool:
    return type(module) is ConvModule and module.order[0] == 'conv' and not module.with_explicit_padding


def _is_detector(model: nn.Module) -> bool:
    """Whether ``model`` is one of mmdet's own that gives the neck all outputs of its backbone, and to nothing else."""
    extracts = next((c for c in type(model).__mro__ if 'extract_feat' in vars(c)), None)
    return (
        _in_package(model, 'mmdet')
        and extracts is not None
        and extracts.__module__.split('.')[0] == 'mmdet'
        and extracts.__name__ in ('SingleStageDetector', 'TwoStageDetector')
    )


def _in_package(module: Optional[nn.Module], package: str) -> bool:
    """Whether the class of ``module``, not a base of it, is of a package, which need not be installed."""
    return type(module).__module__.split('.')[0] == package


def _is_exactly(module: Optional[nn.Module], package: str, name: str) -> bool:
    return type(module).__name__ == name and _in_package(module, package)

"""Folding: a norm that is one affine map per channel becomes part of the layer after it, or before it.

At inference RepBN is ``scale * x + shift`` (SLAB paper, Lemma 4.1), as is BatchNorm. A linear layer that follows
takes both over, ``W (scale * x + shift) + b = (W scale) x + (W shift + b)``, and so does a layer before it,
``scale * (W x + b) + shift = (scale W) x + (scale b + shift)``. The sums are taken in float64, so that what is left
is the rounding of the weights.

All this knows what a layer computes from its class, so it holds for that class alone: a subclass may compute
something else, and so may a layer with hooks, with a parametrization (which makes a subclass), with a method of its own,
or one that stands in several places. These stay as they are, and a norm before them becomes a scale and a shift.
"""

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Callable, Dict, FrozenSet, Iterator, Optional, Tuple, Type, Union

import torch
import torch.nn as nn
from mmcv.cnn import Conv2d, Linear
from mmengine.model.utils import _BatchNormXd
from torch import Tensor

from .norm import PRepBN, RepBN, TokenBN, channel_dim_of

Projection = Union[nn.Linear, nn.Conv2d]
LINEAR = (nn.Linear, Linear)  # mmcv's differs on empty batches of old PyTorch alone
CONV = (nn.Conv2d, Conv2d)
NORMS = (PRepBN, RepBN, TokenBN)
_BN = (nn.BatchNorm1d, nn.SyncBatchNorm, _BatchNormXd)  # the last is what mmengine makes of the second


class Affine(nn.Module):
    """``scale * x + shift`` per channel, in a dimension of ``x``: what is left of a norm that no linear layer follows."""

    def __init__(self, scale: Tensor, shift: Tensor, channel_dim: int = -1) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)
        self.channel_dim = channel_dim

    def forward(self, x: Tensor, data_format: Optional[str] = None) -> Tensor:
        dim = channel_dim_of(self, data_format)
        if dim == -1:
            return torch.addcmul(self.shift, x, self.scale)
        shape = [1] * x.dim()
        shape[dim] = -1
        return torch.addcmul(self.shift.view(shape), x, self.scale.view(shape))


# the classes that folding knows, and of which classes it takes some of their parts to be
_known: Dict[type, Dict[str, Tuple[type, ...]]] = {
    cls: {}
    for cls in (
        *(*LINEAR, *CONV, *NORMS, *_BN, Affine),
        *(nn.LayerNorm, nn.Identity, nn.Dropout, nn.GELU, nn.ModuleList, nn.Sequential),
    )
}
_shared: ContextVar[FrozenSet[int]] = ContextVar('_shared', default=frozenset())


def foldable(**parts: Union[type, Tuple[type, ...]]) -> Callable[[Type[nn.Module]], Type[nn.Module]]:
    """Class decorator: the inference form is right for modules of this class, all parts of which are foldable too.

    It does not pass to a subclass, which may compute something else; one that does not may take the decorator again.

    Args:
        **parts (type | tuple[type]): The only classes that these parts, where there are any, may be of. What the
            inference form leaves out (dropout), or looks into (a linear layer's weight), must be named here.
    """

    def register(cls: Type[nn.Module]) -> Type[nn.Module]:
        _known[cls] = {name: types if isinstance(types, tuple) else (types,) for name, types in parts.items()}
        return cls

    return register


def has_hooks(module: nn.Module) -> bool:
    """Whether something may look into a call of ``module``, or change what it gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_untouched(module: nn.Module) -> bool:
    """Whether ``module`` computes what its class says: it has no forward hooks, and no method of its own."""
    return not has_hooks(module) and not any(callable(getattr(type(module), name, None)) for name in vars(module))


def is_exactly(module: Optional[nn.Module], *classes: type) -> bool:
    """Whether ``module`` is of one of ``classes``, not of a subclass, and computes what that says."""
    return type(module) in classes and is_untouched(module)


def is_foldable(module: nn.Module) -> bool:
    """Whether ``module`` and all its parts are of classes that are declared :func:`foldable`, untouched, and in one place."""
    return in_one_place(module) and all(is_known(m) and _has_its_parts(m) for m in module.modules())


def is_known(module: nn.Module) -> bool:
    """Whether ``module`` itself, whatever its parts are, is of a class that is declared :func:`foldable`, and untouched."""
    return is_exactly(module, *_known)


def _has_its_parts(module: nn.Module) -> bool:
    parts = ((module._modules.get(name), types) for name, types in _known[type(module)].items())
    return all(part is None or type(part) in types for part, types in parts)


def in_one_place(module: nn.Module) -> bool:
    """Whether no layer in ``module`` is known to stand in another place too, see :func:`one_place_each`."""
    return not _repeated(module) and not any(id(m) in _shared.get() for m in module.modules())


@contextmanager
def one_place_each(model: nn.Module) -> Iterator[None]:
    """Within it, parts of ``model`` that stand in several places of it are not foldable: each place has another norm."""
    token = _shared.set(_shared.get() | _repeated(model))
    try:
        yield
    finally:
        _shared.reset(token)


def _repeated(model: nn.Module) -> FrozenSet[int]:
    """Ids of the layers with weights that stand in several places of ``model``. Norms, which are only read, may."""
    counts = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    if max(counts.values(), default=0) < 2:
        return frozenset()
    twice = [m for m in model.modules() if counts[id(m)] > 1 and not isinstance(m, NORMS)]
    return frozenset(id(m) for m in twice if next(m.parameters(), None) is not None)


def check_foldable(model: nn.Module) -> None:
    """Raises ValueError, naming the layer, if ``model`` or a part of it trains, or a PRepBN has gamma above 0."""
    for name, module in model.named_modules():
        if module.training:
            where = f'layer {name!r}' if name else type(model).__name__
            raise ValueError(
                f'{where} is in training mode, where norms take the statistics of the batch. Call model.eval(), then fold.'
            )
    for name, module in model.named_modules():
        if is_exactly(module, PRepBN):
            _check_gamma(module, f'layer {name!r}')


def _check_gamma(norm: PRepBN, name: str) -> None:
    if norm.ln_needed or (not norm.gamma.is_meta and norm.gamma > 0):
        value = '' if norm.gamma.is_meta else f'={norm.gamma.item():g}'
        raise ValueError(
            f'{name} has gamma{value}: its LayerNorm is still in use and cannot be folded. Train '
            'until gamma is 0 (GammaDecayHook), or call mmslab.layers.set_gamma(model, 0) and accept other outputs. With '
            "norm_cfg=dict(type='PRepBN', gamma=0.0) an out_norm_cfg has a gamma of its own."
        )


def is_affine(norm: Optional[nn.Module]) -> bool:
    """Whether ``norm`` is known to be an affine map in eval mode, a PRepBN once its gamma is 0."""
    if is_exactly(norm, PRepBN):
        norm = norm.repbn
    if is_exactly(norm, RepBN, TokenBN):
        bn = norm.bn
        return is_exactly(bn, *_BN) and bn.weight is not None and bn.bias is not None and bn.running_var is not None
    return is_exactly(norm, Affine)


def affine_of(norm: nn.Module) -> Optional[Tuple[Tensor, Tensor]]:
    """The scale and the shift that ``norm`` amounts to in eval mode, in float64; None for one that is no affine map.

    Raises:
        ValueError: If it is a PRepBN with gamma above 0.
    """
    if not is_affine(norm):
        return None
    if isinstance(norm, Affine):
        return norm.scale.detach().double(), norm.shift.detach().double()
    if isinstance(norm, PRepBN):
        _check_gamma(norm, 'PRepBN')
        norm = norm.repbn
    with torch.no_grad():
        return norm.affine()


@torch.no_grad()
def fold_forward(scale: Tensor, shift: Tensor, layer: Projection) -> None:
    """Makes ``layer(x)`` what ``layer(scale * x + shift)`` was.

    Args:
        scale (Tensor): float64, ``(in_channels,)``.
        shift (Tensor): float64, ``(in_channels,)``.
        layer (nn.Linear | nn.Conv2d): A convolution must not be padded: its zeros would become ``shift`` too.
    """
    weight = layer.weight.double()
    per_input = (1, -1) + (1,) * (weight.dim() - 2)
    added = (weight * shift.view(per_input)).flatten(1).sum(1)
    _set(layer, weight * scale.view(per_input), added if layer.bias is None else layer.bias.double() + added)


@torch.no_grad()
def fold_backward(layer: Projection, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``scale * layer(x) + shift`` was; scale and shift are float64, ``(out_channels,)``."""
    weight = layer.weight.double()
    bias = shift if layer.bias is None else layer.bias.double() * scale + shift
    _set(layer, weight * scale.view((-1,) + (1,) * (weight.dim() - 1)), bias)


def _set(layer: Projection, weight: Tensor, bias: Tensor) -> None:
    old = layer.weight
    layer.weight = nn.Parameter(weight.to(old.dtype), requires_grad=False)
    layer.bias = nn.Parameter(bias.to(old.dtype), requires_grad=False)


def takes_affine(layer: Optional[nn.Module]) -> bool:
    """Whether an affine map before ``layer`` can become part of it.

    So it can with a linear layer, an unpadded convolution without groups, a module that :func:`is_foldable`, in its
    inference form, and has a method ``absorb(scale, shift)``, and any other whose class itself, not a base of it,
    defines one.
    """
    if is_exactly(layer, *LINEAR, *CONV):
        plain = isinstance(layer, nn.Linear) or (layer.padding == (0,) * len(layer.kernel_size) and layer.groups == 1)
        return plain and is_foldable(layer)
    if getattr(layer, 'absorb', None) is None:
        return False
    if type(layer) in _known:
        return is_foldable(layer) and getattr(layer, 'deploy', True)
    return 'absorb' in vars(type(layer)) and is_untouched(layer) and in_one_place(layer)


def folded(norm: nn.Module, into: Optional[nn.Module] = None) -> nn.Module:
    """What stands in the place of ``norm`` after folding, which puts it into the layer ``into`` if that can take it.

    Returns:
        nn.Module: Identity where the norm went into ``into``, see :func:`takes_affine`; an :class:`Affine` where nothing
        could take it; ``norm`` itself, if it is not known to be an affine map (LayerNorm, a subclass of PRepBN).
    """
    affine = affine_of(norm)
    if affine is None:
        return norm
    if takes_affine(into):
        if isinstance(into, (nn.Linear, nn.Conv2d)):
            fold_forward(*affine, into)
        else:
            into.absorb(*affine)
        return nn.Identity()
    if isinstance(norm, Affine):
        return norm
    like = next(norm.parameters())
    return Affine(*(t.to(like.dtype) for t in affine))


def folded_back(layer: Projection, norm: nn.Module) -> nn.Module:
    """As :func:`folded`, into the layer whose output ``norm`` takes, if that is linear."""
    if not is_exactly(layer, *LINEAR, *CONV) or not is_foldable(layer):
        return folded(norm)
    affine = affine_of(norm)
    if affine is None:
        return norm
    fold_backward(layer, *affine)
    return nn.Identity()


def switch_to_deploy(module: nn.Module) -> None:
    """Gives ``module`` its inference form if it has one; of what has none the norms become scales and shifts."""
    if hasattr(module, 'switch_to_deploy'):
        module.switch_to_deploy()
    else:
        keep_affine(module)


def keep_affine(module: nn.Module, norms: Tuple[type, ...] = NORMS) -> None:
    """Makes each of the ``norms`` in ``module`` a scale and a shift where it stands, which is right in any module."""
    for parent in [m for m in module.modules() if not isinstance(m, NORMS)]:
        for name, child in list(parent._modules.items()):  # named_children() gives a shared norm only once
            if isinstance(child, norms):
                setattr(parent, name, folded(child))

"""Folding: a norm that is one affine map per channel becomes part of the layer after it, or before it.

At inference RepBN is ``scale * x + shift`` (SLAB paper, Lemma 4.1), as is BatchNorm. A linear layer that follows
takes both over, ``W (scale * x + shift) + b = (W scale) x + (W shift + b)``, and so does a layer before it,
``scale * (W x + b) + shift = (scale W) x + (scale b + shift)``. The sums are taken in float64, so that what is left
is the rounding of the weights.
"""

from typing import Optional, Tuple, Union

import torch
import torch.nn as nn
from torch import Tensor

from .norm import PRepBN, RepBN, TokenBN

Projection = Union[nn.Linear, nn.Conv2d]


class Affine(nn.Module):
    """``scale * x + shift`` over the last dimension: what is left of a folded norm that no linear layer follows."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


def check_foldable(model: nn.Module) -> None:
    """Raises ValueError, naming the layer, if ``model`` or a part of it trains, or a PRepBN has gamma above 0."""
    for name, module in model.named_modules():
        if module.training:
            where = f'layer {name!r}' if name else type(model).__name__
            raise ValueError(
                f'{where} is in training mode, where norms take the statistics of the batch. Call model.eval(), then fold.'
            )
    for name, module in model.named_modules():
        if isinstance(module, PRepBN) and (module.ln_needed or module.gamma > 0):
            raise ValueError(
                f'layer {name!r} has gamma={module.gamma.item():g}: its LayerNorm is still in use and cannot be folded. Train '
                'until gamma is 0 (GammaDecayHook), or call mmslab.layers.set_gamma(model, 0) and accept other outputs. With '
                "norm_cfg=dict(type='PRepBN', gamma=0.0) an out_norm_cfg has a gamma of its own."
            )


def affine_of(norm: nn.Module) -> Optional[Tuple[Tensor, Tensor]]:
    """The scale and the shift that ``norm`` amounts to in eval mode, in float64; None for one that is no affine map."""
    if isinstance(norm, Affine):
        return norm.scale.detach().double(), norm.shift.detach().double()
    if isinstance(norm, PRepBN):
        norm = norm.repbn
    if isinstance(norm, (RepBN, TokenBN)):
        with torch.no_grad():
            return norm.affine()
    return None


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


def folded(norm: nn.Module, into: Optional[nn.Module] = None) -> nn.Module:
    """What stands in the place of ``norm`` after folding, which puts it into the layer ``into`` if there is one.

    ``into`` is a linear layer or an unpadded convolution that takes the norm's output, or a module with a method
    ``absorb(scale, shift)``.

    Returns:
        nn.Module: Identity where the norm went into ``into``; an :class:`Affine` where nothing could take it;
        ``norm`` itself, if it is no affine map (LayerNorm).
    """
    affine = affine_of(norm)
    if affine is None:
        return norm
    if isinstance(into, (nn.Linear, nn.Conv2d)):
        fold_forward(*affine, into)
        return nn.Identity()
    if getattr(into, 'absorb', None) is not None:
        into.absorb(*affine)
        return nn.Identity()
    if isinstance(norm, Affine):
        return norm
    like = next(norm.parameters())
    return Affine(*(t.to(like.dtype) for t in affine))


def folded_back(layer: Projection, norm: nn.Module) -> nn.Module:
    """As :func:`folded`, into the layer whose output ``norm`` takes."""
    affine = affine_of(norm)
    if affine is None:
        return norm
    fold_backward(layer, *affine)
    return nn.Identity()

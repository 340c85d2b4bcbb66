"""How a folded model computes: in place, and in pieces that stay in a CPU's cache.

At detection sizes a transformer block on a CPU spends more time on moving tokens through memory than on matrix
products: each intermediate result is larger than any cache, and fresh memory is mapped page by page. A folded block
adds to the residual stream in place, piece by piece, so that intermediate results are small. It takes the plain,
functional form wherever something records what it does: under autograd, tracing, export and compilation.
"""

from typing import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

PIECE = 2**20  # elements of the widest intermediate result, 4 MB in float32
# whether torch.compile is tracing; before torch 2.3 the same function had no public name
is_compiling: Callable[[], bool] = getattr(torch.compiler, 'is_compiling', None) or torch._utils.is_compiling


def is_traced(x: Tensor) -> bool:
    """Whether operations on ``x`` make a graph for later, of a compiler, a tracer or an export."""
    return is_compiling() or torch.jit.is_tracing() or x.is_meta


def may_overwrite(x: Tensor, module: nn.Module) -> bool:
    """Whether nothing records the operations of ``module`` on ``x``, so that a result may be written over it."""
    if is_traced(x):
        return False
    return not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def rows_in_piece(x: Tensor, width: int, least: int = 512) -> int:
    """Rows to compute at once when each needs ``width`` elements: all at once but on a CPU, and at least ``least``."""
    return max(PIECE // width, least) if x.device.type == 'cpu' else max(x.numel(), 1)


def add_(x: Tensor, f: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """``x += f(x)`` for an ``f`` that takes each row, ``(N, C)`` to ``(N, C)``, by itself.

    Args:
        x (Tensor): Contiguous, ``(..., C)``; overwritten.
        f (Callable): Its widest intermediate result has ``width`` elements a row.
    """
    rows = x.view(-1, x.shape[-1])
    for piece in rows.tensor_split(-(-len(rows) // rows_in_piece(x, width))):
        piece.add_(f(piece))
    return x


def use_channels_last(conv: nn.Conv2d) -> None:
    """Keeps the weights in channels-last order, so that ``conv`` gives maps that are ``(B, H, W, C)`` in memory."""
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)


def cuts_patches(conv: nn.Conv2d) -> bool:
    """Whether ``conv`` is a linear layer on patches, see :func:`conv_of_patches`."""
    return conv.stride == conv.kernel_size and conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1


def conv_of_patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``conv`` of a map ``(B, H, W, C)`` to ``(B, H', W', out_channels)``, its stride being its kernel size, unpadded.

    It is a linear layer on patches: one matrix product, and the weights, which a folded convolution keeps in the
    order (out_channels, height, width, C), are taken as they lie in memory.
    """
    (B, H, W, C), (h, w) = x.shape, conv.kernel_size
    x = x[:, : H // h * h, : W // w * w].reshape(B, H // h, h, W // w, w, C)
    return F.linear(x.transpose(2, 3).flatten(3), conv.weight.permute(0, 2, 3, 1).flatten(1), conv.bias)

"""How a folded model computes: in place, and in pieces that stay in a CPU's cache.

At detection sizes a transformer block on a CPU spends more time on moving tokens through memory than on matrix
products: each intermediate result is larger than any cache, and fresh memory is mapped page by page. A folded block
adds to the residual stream in place, piece by piece, so that intermediate results are small. It takes the plain,
functional form wherever something records what it does: under autograd, tracing, export and compilation.
"""

from typing import Callable

import torch
import torch.nn as nn
from torch import Tensor

PIECE = 2**20  # elements of the widest intermediate result, 4 MB in float32


def may_overwrite(x: Tensor, module: nn.Module) -> bool:
    """Whether nothing records the operations of ``module`` on ``x``, so that a result may be written over it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta:
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
    for piece in rows.split(rows_in_piece(x, width)):
        piece.add_(f(piece))
    return x

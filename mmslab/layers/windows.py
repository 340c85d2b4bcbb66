"""Windows over a token map: padding, cyclic shift, partition and masks, all in this one place.

A map here is ``(B, H, W, C)``; windows of it are ``(B * num_windows, h * w, C)``, row by row.
"""

from collections import OrderedDict
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .inference import is_compiling

Size = Tuple[int, int]

_MAX_CACHED = 64
_MAX_STACKED = 2**17  # elements of the masks of some windows that are applied at once
_cache: 'OrderedDict[tuple, object]' = OrderedDict()


def _cached(key: tuple, make: Callable[[], object]) -> object:
    """``make()``, or what it gave for ``key`` before: a detector meets the same few sizes again and again."""
    if key not in _cache:
        with torch.inference_mode(False):  # a tensor made while inferring must serve training too
            _cache[key] = make()
        if len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def symbolic(*sizes: int) -> bool:
    """Whether one of ``sizes`` is left open in a graph that is being exported, so that no branch may depend on it."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def num_windows(hw: Size, window: Size) -> Size:
    """How many windows, down and across, cover a map of size ``hw``."""
    # a side of a window that is open is the map's own
    return tuple(1 if symbolic(side) else (length + side - 1) // side for length, side in zip(hw, window))


def padded_size(hw: Size, window: Size) -> Size:
    """The smallest multiple of ``window`` that holds a map of size ``hw``."""
    n, m = num_windows(hw, window)
    return n * window[0], m * window[1]


def centering(hw: Size, window: Size) -> Size:
    """Rows and columns of padding to put at the top and left; as many, or one more, go to the bottom and right."""
    padded = padded_size(hw, window)
    return (padded[0] - hw[0]) // 2, (padded[1] - hw[1]) // 2


def window_partition(x: Tensor, window: Size, shift: Size = (0, 0), value: Optional[Tensor] = None) -> Tensor:
    """Pads at the bottom and right, shifts cyclically up and left, and cuts into windows.

    Args:
        x (Tensor): A map, ``(B, H, W, C)``.
        window (tuple[int, int]): Height and width of a window.
        shift (tuple[int, int]): Rows and columns of the cyclic shift.
        value (Tensor, optional): What to pad with, ``(C,)``. Defaults to zeros.

    Returns:
        Tensor: ``(B * num_windows, window[0] * window[1], C)``.
    """
    B, H, W, C = x.shape
    (h, w), (Hp, Wp) = window, padded_size((H, W), window)
    if symbolic(H, W) or (Hp, Wp) != (H, W):
        x = F.pad(x if value is None else x - value, (0, 0, 0, Wp - W, 0, Hp - H))
        x = x if value is None else x + value
    if any(shift):
        x = torch.roll(x, (-shift[0], -shift[1]), dims=(1, 2))
    n, m = num_windows((H, W), window)
    if not symbolic(n, m) and n * m == 1:
        return x.reshape(B, h * w, C)
    x = x.reshape(B, n, h, m, w, C)
    return x.transpose(2, 3).reshape(-1, h * w, C)


def window_reverse(windows: Tensor, hw: Size, window: Size, shift: Size = (0, 0)) -> Tensor:
    """Undoes :func:`window_partition`: windows back to a map of size ``hw``.

    Args:
        windows (Tensor): ``(B * num_windows, window[0] * window[1], C)``.
        hw (tuple[int, int]): Height and width of the map before padding.
        window (tuple[int, int]): Height and width of a window.
        shift (tuple[int, int]): The shift given to :func:`window_partition`.

    Returns:
        Tensor: ``(B, H, W, C)``.
    """
    (H, W), (h, w), (Hp, Wp) = hw, window, padded_size(hw, window)
    C = windows.shape[-1]
    x = windows
    n, m = num_windows(hw, window)
    if symbolic(n, m) or n * m > 1:
        x = x.reshape(-1, n, m, h, w, C).transpose(2, 3)
    x = x.reshape(-1, Hp, Wp, C)
    if any(shift):
        x = torch.roll(x, shift, dims=(1, 2))
    if symbolic(H, W):  # a copy, so that no later reshape asks how the map lies in memory
        return x[:, :H, :W].clone(memory_format=torch.contiguous_format)
    return x[:, :H, :W] if (Hp, Wp) != (H, W) else x


def shifted_window_mask(hw: Size, window: Size, shift: Size, device: torch.device) -> Tensor:
    """Which pairs of tokens of a shifted window may attend to each other (Swin's masked attention).

    After the cyclic shift a window at the border holds tokens from opposite sides of the map, which must not
    mix. Kept per size and device, since a detector meets the same few sizes again and again.

    Args:
        hw (tuple[int, int]): Height and width of the map before padding.
        window (tuple[int, int]): Height and width of a window.
        shift (tuple[int, int]): The cyclic shift.
        device (torch.device): Where the mask shall be.

    Returns:
        Tensor: bool, ``(num_windows, h * w, h * w)``, True where attention is allowed.
    """
    size = padded_size(hw, window)
    if is_compiling():  # a traced tensor must not outlive its trace
        return _build_mask(size, window, shift, device)
    return _cached(('mask', size, window, shift, str(device)), lambda: _build_mask(size, window, shift, device))


def _build_mask(size: Size, window: Size, shift: Size, device: torch.device) -> Tensor:
    (Hp, Wp), (h, w) = size, window

    def regions(length: int, step: int, moved: int) -> Tensor:
        # 0 up to the last window, 1 for what stays in it, 2 for what the shift has wrapped around into it
        i = torch.arange(length, device=device)
        return (i >= length - step).long() + ((i >= length - moved).long() if moved else 0)

    labels = regions(Hp, h, shift[0])[:, None] * 3 + regions(Wp, w, shift[1])
    labels = window_partition(labels[None, :, :, None], window).squeeze(-1)
    return labels[:, :, None] == labels[:, None, :]


class Windows(NamedTuple):
    """Some windows of a batch of maps, as indices: how folded blocks read tokens from a map and write them back.

    ``tokens``: rows of ``(B * H * W, C)``, window after window, ``(n * h * w,)``; 0 at places of padding.
    ``padding``: which of ``tokens`` are padding, or None if none is. ``kept``: the others, then. ``target``: the
    rows of ``kept``. ``runs``: how many windows in succession have which mask, bool ``(h * w, h * w)`` or None; a few
    windows with different ones are one run, with ``(n, h * w, h * w)``.
    """

    tokens: Tensor
    padding: Optional[Tensor]
    kept: Optional[Tensor]
    target: Tensor
    runs: List[Tuple[int, Optional[Tensor]]]


def window_indices(
    batch: int, hw: Size, window: Size, shift: Size, masked: bool, max_windows: int, device: torch.device
) -> List[Windows]:
    """The windows that :func:`window_partition` cuts, as indices, in pieces of at most ``max_windows``.

    Windows with the same mask stand together, so that it is there once for all of them: none in the interior of a
    map, and one each at its right, its bottom and its corner.

    Args:
        batch (int): Maps.
        hw, window, shift (tuple[int, int]): As for :func:`shifted_window_mask`.
        masked (bool): Whether shifted windows have masks.
        max_windows (int): Windows in a piece.
        device (torch.device): Where the indices shall be.
    """
    key = ('indices', batch, hw, window, shift, masked, max_windows, str(device))
    return _cached(key, lambda: _build_indices(batch, hw, window, shift, masked, max_windows, device))


def _build_indices(
    batch: int, hw: Size, window: Size, shift: Size, masked: bool, max_windows: int, device: torch.device
) -> List[Windows]:
    (H, W), (h, w), (Hp, Wp) = hw, window, padded_size(hw, window)
    places = torch.arange(1, batch * H * W + 1).view(batch, H, W, 1)  # from 1: what padding adds is 0
    places = window_partition(places, window, shift).view(-1, h * w)
    # what the shift has wrapped around lies in the last windows: 1 at the right, 2 at the bottom, 3 in the corner
    kinds = torch.zeros(batch, Hp // h, Wp // w, dtype=torch.long)
    if masked:
        kinds[:, -1] += 2 * (shift[0] > 0)
        kinds[:, :, -1] += shift[1] > 0
    kinds, order = kinds.flatten().sort(stable=True)
    masks = {kind: _wrapped_mask(kind, window, shift).to(device) for kind in kinds.unique().tolist()} if masked else {}
    pieces = []
    count = -(-len(order) // max_windows)
    for members, of_kind in zip(order.tensor_split(count), kinds.tensor_split(count)):
        index = places[members].flatten()
        kept = index.nonzero().flatten()
        target = (index[kept] - 1).to(device)
        whole = len(kept) == len(index)
        pieces.append(
            Windows(
                tokens=target if whole else (index - 1).clamp_(min=0).to(device),
                padding=None if whole else (index == 0).nonzero().flatten().to(device),
                kept=None if whole else kept.to(device),
                target=target,
                runs=_runs(of_kind, masks),
            )
        )
    return pieces


def _wrapped_mask(kind: int, window: Size, shift: Size) -> Tensor:
    """The mask of a window that the shift has wrapped around, 1: across, 2: down, 3: both; of 0 it allows all."""
    h, w = window
    below = (torch.arange(h) >= h - shift[0])[:, None].expand(h, w).flatten() & (kind >= 2)
    right = (torch.arange(w) >= w - shift[1]).expand(h, w).flatten() & (kind % 2 == 1)
    labels = below.long() * 2 + right
    return labels[:, None] == labels


def _runs(kinds: Tensor, masks: Dict[int, Tensor]) -> List[Tuple[int, Optional[Tensor]]]:
    runs = [(n, masks[kind] if kind else None) for kind, n in enumerate(kinds.bincount().tolist()) if n]
    if len(runs) > 1 and sum(masks[kind].numel() for kind in kinds.tolist()) <= _MAX_STACKED:
        return [(len(kinds), torch.stack([masks[kind] for kind in kinds.tolist()]))]
    return runs

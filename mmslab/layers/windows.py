"""Windows over a token map: padding, cyclic shift, partition and masks, all in this one place.

A map here is ``(B, H, W, C)``; windows of it are ``(B * num_windows, h * w, C)``, row by row.
"""

from collections import OrderedDict
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

Size = Tuple[int, int]

_MAX_CACHED_MASKS = 64
_masks: 'OrderedDict[tuple, Tensor]' = OrderedDict()


def padded_size(hw: Size, window: Size) -> Size:
    """The smallest multiple of ``window`` that holds a map of size ``hw``."""
    return -(-hw[0] // window[0]) * window[0], -(-hw[1] // window[1]) * window[1]


def centering(hw: Size, window: Size) -> Size:
    """Rows and columns of zeros to put at the top and left, so that padding to windows surrounds the map evenly.

    What is missing at the bottom and right, the same or one more, :func:`window_partition` adds.
    """
    padded = padded_size(hw, window)
    return (padded[0] - hw[0]) // 2, (padded[1] - hw[1]) // 2


def window_partition(x: Tensor, window: Size, shift: Size = (0, 0)) -> Tensor:
    """Pads with zeros at the bottom and right, shifts cyclically up and left, and cuts into windows.

    Args:
        x (Tensor): A map, ``(B, H, W, C)``.
        window (tuple[int, int]): Height and width of a window.
        shift (tuple[int, int]): Rows and columns of the cyclic shift.

    Returns:
        Tensor: ``(B * num_windows, window[0] * window[1], C)``.
    """
    B, H, W, C = x.shape
    (h, w), (Hp, Wp) = window, padded_size((H, W), window)
    if (Hp, Wp) != (H, W):
        x = F.pad(x, (0, 0, 0, Wp - W, 0, Hp - H))
    if any(shift):
        x = torch.roll(x, (-shift[0], -shift[1]), dims=(1, 2))
    if (Hp, Wp) == (h, w):
        return x.reshape(B, h * w, C)
    x = x.reshape(B, Hp // h, h, Wp // w, w, C)
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
    if (Hp, Wp) != (h, w):
        x = x.reshape(-1, Hp // h, Wp // w, h, w, C).transpose(2, 3)
    x = x.reshape(-1, Hp, Wp, C)
    if any(shift):
        x = torch.roll(x, shift, dims=(1, 2))
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
    if torch.compiler.is_compiling():  # a traced tensor must not outlive its trace
        return _build_mask(size, window, shift, device)
    key = (size, window, shift, str(device))
    if key not in _masks:
        with torch.inference_mode(False):  # a mask made while inferring must serve training too
            _masks[key] = _build_mask(size, window, shift, device)
        if len(_masks) > _MAX_CACHED_MASKS:
            _masks.popitem(last=False)
    _masks.move_to_end(key)
    return _masks[key]


def _build_mask(size: Size, window: Size, shift: Size, device: torch.device) -> Tensor:
    (Hp, Wp), (h, w) = size, window

    def regions(length: int, step: int, moved: int) -> Tensor:
        # 0 up to the last window, 1 for what stays in it, 2 for what the shift has wrapped around into it
        i = torch.arange(length, device=device)
        return (i >= length - step).long() + ((i >= length - moved).long() if moved else 0)

    labels = regions(Hp, h, shift[0])[:, None] * 3 + regions(Wp, w, shift[1])
    labels = window_partition(labels[None, :, :, None], window).squeeze(-1)
    return labels[:, :, None] == labels[:, None, :]

import pytest
import torch

from mmslab.layers import windows
from mmslab.layers.windows import shifted_window_mask, window_partition, window_reverse


@pytest.mark.parametrize(
    'hw, window, shift', [((8, 12), (4, 4), (0, 0)), ((7, 9), (4, 3), (2, 1)), ((5, 5), (8, 8), (4, 4))]
)
def test_partition_and_reverse(hw, window, shift):
    x = torch.randn(2, *hw, 3)
    cut = window_partition(x, window, shift)
    assert torch.equal(window_reverse(cut, hw, window, shift), x)
    # token by token: where each one of the padded, shifted map has gone
    Hp, Wp = windows.padded_size(hw, window)
    per_row = Wp // window[1]
    for y in range(Hp):
        for z in range(Wp):
            source = ((y + shift[0]) % Hp, (z + shift[1]) % Wp)
            want = x[1, source[0], source[1]] if source[0] < hw[0] and source[1] < hw[1] else torch.zeros(3)
            index = Hp * Wp // (window[0] * window[1]) + (y // window[0]) * per_row + z // window[1]
            assert torch.equal(cut[index, (y % window[0]) * window[1] + z % window[1]], want)


@pytest.mark.parametrize(
    'hw, window, shift', [((8, 12), (4, 4), (2, 2)), ((6, 6), (6, 6), (3, 3)), ((8, 6), (4, 3), (2, 0))]
)
def test_mask_keeps_apart_what_was_not_adjacent(hw, window, shift):
    """Two tokens of a shifted window may meet unless the shift has brought them together around the border."""
    mask = shifted_window_mask(hw, window, shift, torch.device('cpu'))
    H, W = hw
    coords = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing='ij'), -1)[None]
    cut = window_partition(coords, window, shift)
    for n in range(cut.shape[0]):
        for i in range(cut.shape[1]):
            for j in range(cut.shape[1]):
                near = (cut[n, i] - cut[n, j]).abs()
                # without a wrap two tokens of a window are less than a window apart on each axis, and on the same side
                wrapped = [
                    shift[a] > 0 and ((cut[n, i, a] < shift[a]) != (cut[n, j, a] < shift[a])) and _at_end(cut[n], a, hw)
                    for a in (0, 1)
                ]
                assert bool(mask[n, i, j]) == (not any(wrapped)), (n, i, j, near)


def _at_end(tokens, axis, hw):
    """Whether the window reaches over the border: it holds the last and the first row (or column)."""
    return bool((tokens[:, axis] == hw[axis] - 1).any() and (tokens[:, axis] == 0).any())


def test_masks_are_kept_and_bounded():
    device = torch.device('cpu')
    with torch.inference_mode():
        first = shifted_window_mask((14, 14), (7, 7), (3, 3), device)
    assert shifted_window_mask((14, 14), (7, 7), (3, 3), device) is first
    assert shifted_window_mask((9, 13), (7, 7), (3, 3), device) is first  # padded to the same
    assert not first.is_inference()
    for i in range(1, windows._MAX_CACHED + 10):
        shifted_window_mask((14, 14 + 7 * i), (7, 7), (3, 3), device)
    assert len(windows._cache) == windows._MAX_CACHED

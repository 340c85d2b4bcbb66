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


def test_padding_with_a_value():
    x, value = torch.randn(2, 5, 7, 3), torch.tensor([1.0, -2.0, 1e3])
    cut = window_partition(x.double(), (4, 4), (2, 1), value.double())
    inside = window_partition(torch.ones(2, 5, 7, 1), (4, 4), (2, 1)).squeeze(-1).bool()
    plain = window_partition(x, (4, 4), (2, 1))
    assert 0 < (~inside).sum() == cut.shape[0] * 16 - 2 * 35
    assert torch.equal(cut[~inside].float(), value.expand(int((~inside).sum()), 3))
    assert torch.allclose(cut[inside], plain[inside].double(), rtol=0, atol=1e-12)
    whole = torch.randn(1, 8, 4, 3)  # nothing to pad
    assert torch.equal(window_partition(whole, (4, 4), (2, 2), value), window_partition(whole, (4, 4), (2, 2)))


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('max_windows', [1, 3, 1000])
@pytest.mark.parametrize('batch', [1, 2])
@pytest.mark.parametrize(
    'hw, window, shift',
    [
        ((8, 12), (4, 4), (0, 0)),
        ((8, 12), (4, 4), (2, 2)),
        ((7, 9), (4, 3), (2, 1)),
        ((13, 10), (7, 7), (3, 3)),
        ((5, 5), (8, 8), (4, 4)),
        ((6, 6), (6, 6), (3, 3)),
        ((8, 6), (4, 3), (2, 0)),
        ((9, 5), (2, 4), (0, 2)),
        ((1, 17), (7, 7), (3, 3)),
        ((1, 1), (1, 1), (0, 0)),
    ],
)
def test_indices_are_those_of_the_partition(hw, window, shift, batch, max_windows, masked):
    """The same windows, tokens and masks as by moving the tokens themselves, each window in one piece."""
    H, W = hw
    places = torch.arange(batch * H * W).view(batch, H, W, 1)
    cut = window_partition(places + 1, window, shift).squeeze(-1) - 1  # -1 at padding
    masks = shifted_window_mask(hw, window, shift, torch.device('cpu')).repeat(batch, 1, 1)
    has_mask = masked and any(shift)
    by_tokens = {tuple(tokens): i for i, tokens in enumerate(cut.tolist())}
    pieces = windows.window_indices(batch, hw, window, shift, masked, max_windows, torch.device('cpu'))
    found, targets, N = [], [], window[0] * window[1]
    for piece in pieces:
        tokens = piece.tokens.clone()
        assert 0 < len(tokens) <= max_windows * N and len(tokens) % N == 0
        assert tokens.min() >= 0 and tokens.max() < batch * H * W  # can be gathered as it is
        if piece.padding is None:
            assert piece.kept is None and torch.equal(piece.target, tokens)
        else:
            assert torch.equal(piece.target, tokens[piece.kept])
            tokens[piece.padding] = -1
            assert sorted(piece.padding.tolist() + piece.kept.tolist()) == list(range(len(tokens)))
            assert (tokens[piece.kept] >= 0).all()
        targets.append(piece.target)
        of_windows = [
            m for n, mask in piece.runs for m in (mask if mask is not None and mask.dim() == 3 else [mask] * n)
        ]
        assert len(of_windows) == len(tokens) // N
        for window_tokens, mask in zip(tokens.view(-1, N), of_windows):
            found.append(by_tokens[tuple(window_tokens.tolist())])
            want = masks[found[-1]] if has_mask else torch.ones(N, N, dtype=torch.bool)
            assert want.all() if mask is None else torch.equal(want, mask)
    assert sorted(found) == list(range(len(cut)))
    assert torch.equal(torch.cat(targets).sort().values, torch.arange(batch * H * W))


def test_windows_of_one_mask_stand_together():
    """Only windows that the shift has wrapped around have one: at the right, at the bottom and in the corner."""
    pieces = windows.window_indices(4, (28, 35), (7, 7), (3, 3), True, 1000, torch.device('cpu'))
    (piece,) = pieces
    assert [(n, mask is not None) for n, mask in piece.runs] == [
        (4 * 3 * 4, False),
        (4 * 3, True),
        (4 * 4, True),
        (4 * 1, True),
    ]
    assert windows.window_indices(4, (28, 35), (7, 7), (3, 3), True, 1000, torch.device('cpu')) is pieces
    (few,) = windows.window_indices(1, (28, 35), (7, 7), (3, 3), True, 1000, torch.device('cpu'))
    ((n, masks),) = few.runs
    assert n == 20 and masks.shape == (20, 49, 49) and (~masks.flatten(1).all(1)).sum() == 3 + 4 + 1

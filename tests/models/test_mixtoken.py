"""MixToken against plain slicing and the published rule for boxes."""

import numpy as np
import pytest
import torch

from tlt.mixtoken import mix_tokens, mixed_share, sample_box, unmix_tokens

BOXES = [(3, 2, 9, 10), (0, 0, 0, 0), (0, 1, 4, 2), (2, 0, 12, 3), (0, 0, 12, 10)]


def mixed_by_slices(x, box, scale):
    row0, col0, row1, col1 = (edge * scale for edge in box)
    out = x.clone()
    out[:, row0:row1, col0:col1] = x.flip(0)[:, row0:row1, col0:col1]
    return out


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize(("batch", "scale"), [(4, 1), (5, 2), (1, 2)])
def test_mix_equals_slicing_and_unmix_brings_every_token_back(box, batch, scale):
    x = torch.randn(batch, 12 * scale, 10 * scale, 3)
    expected = mixed_by_slices(x, box, scale)
    torch.testing.assert_close(mix_tokens(x, box, scale), expected, rtol=0, atol=0)
    torch.testing.assert_close(mix_tokens(x, torch.tensor(box), scale), expected, rtol=0, atol=0)
    if scale == 1:
        tokens = unmix_tokens(expected.flatten(1, 2), box, (12, 10))
        torch.testing.assert_close(tokens, x.flatten(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize("box", BOXES[:3])
def test_share_is_the_part_of_tokens_that_changed(box):
    x = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 12, 10, 1)
    changed = (mix_tokens(x, box) != x).float().mean().item()
    assert mixed_share(box, (12, 10)) == pytest.approx(changed)
    assert float(mixed_share(torch.tensor(box), (12, 10))) == pytest.approx(changed)


def published_box(state, rows, cols):
    """The published rule with clips, on the draws that a generator in `state` gives."""
    cut = np.sqrt(1.0 - state.beta(1.0, 1.0))
    half_rows, half_cols = int(rows * cut) // 2, int(cols * cut) // 2
    row, col = state.integers(rows), state.integers(cols)
    edges = (row - half_rows, rows), (col - half_cols, cols), (row + half_rows, rows), (col + half_cols, cols)
    return tuple(int(np.clip(edge, 0, side)) for edge, side in edges)


def test_boxes_follow_the_published_rule():
    ours, theirs = np.random.default_rng(3), np.random.default_rng(3)
    boxes = [sample_box(ours, (16, 12)) for _ in range(4000)]
    assert boxes == [published_box(theirs, 16, 12) for _ in range(4000)]
    assert all(type(edge) is int for edge in boxes[0])


def test_a_box_has_four_edges():
    with pytest.raises(ValueError, match="row0, col0, row1, col1"):
        mix_tokens(torch.zeros(2, 4, 4, 1), (0, 0, 2))

"""MixToken: each sample shows, inside one box of tokens, the tokens of its partner (Token Labeling, section 3.3).

A box is `(row0, col0, row1, col1)`, half-open, in tokens of the final grid: four ints, or an integer tensor of shape
(4,) on any device. The partner of sample i is sample B - 1 - i. Nothing here holds random state; the caller owns the
generator. Every operation is a comparison against `arange`, so a new box is new data: no new graph under
`torch.compile`, and no synchronisation with the device that holds the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Box: TypeAlias = Sequence[int] | Tensor


def sample_box(generator: np.random.Generator, grid: tuple[int, int], alpha: float = 1.0) -> tuple[int, int, int, int]:
    """Draw a box by the published rule: lam ~ Beta(alpha, alpha), sides `int(side * sqrt(1 - lam))`, uniform centre.

    Half a side (rounded down) goes to either side of the centre and the box is clipped to the grid, as published, so
    that an unclipped box has even sides. Boxes may be empty.

    Args:
        generator: The caller's; three draws are taken from it.
        grid: Rows and columns of the final token grid.
        alpha: Both parameters of the Beta distribution.
    """
    share = np.sqrt(1.0 - generator.beta(alpha, alpha))
    spans = []
    for side in grid:
        half = int(side * share) // 2
        centre = int(generator.integers(side))
        spans.append((max(centre - half, 0), min(centre + half, side)))
    (row0, row1), (col0, col1) = spans
    return row0, col0, row1, col1


def mix_tokens(x: Tensor, box: Box, scale: int = 1) -> Tensor:
    """Replace what lies inside the box by the partner's tokens, in a new tensor.

    Args:
        x: (B, H, W, C).
        scale: Cells of `x` to one token of the final grid, in which the box is counted, along each axis.
    """
    rows = torch.arange(x.shape[1], device=x.device)
    cols = torch.arange(x.shape[2], device=x.device)
    return mix_cells(x, box, rows // scale, cols // scale)


def mix_cells(x: Tensor, box: Box, rows: Tensor, cols: Tensor) -> Tensor:
    """As `mix_tokens`, for cells that say which token they belong to.

    Args:
        x: (B, H, W, C).
        rows, cols: (H,) token row of each row of cells, and (W,) token column.
    """
    row0, col0, row1, col1 = _edges(box)
    inside_rows = (rows >= row0) & (rows < row1)  # (H,)
    inside_cols = (cols >= col0) & (cols < col1)  # (W,)
    inside = inside_rows[:, None, None] & inside_cols[None, :, None]  # (H, W, 1)
    return torch.where(inside, x.flip(0), x)


def unmix_tokens(tokens: Tensor, box: Box, grid: tuple[int, int]) -> Tensor:
    """Send every token, (B, N, C) row by row of `grid`, back to the sample whose image it shows: mixing twice with one
    box changes nothing."""
    return mix_tokens(tokens.unflatten(1, grid), box).flatten(1, 2)


def mixed_share(box: Box, grid: tuple[int, int]) -> float | Tensor:
    """Share of the tokens that show the partner, in [0, 1]; lam of the published code is one minus it. A float for a
    box of ints, a 0-d float32 tensor on the box's device for a tensor."""
    row0, col0, row1, col1 = _edges(box)
    return (row1 - row0) * (col1 - col0) / (grid[0] * grid[1])


def _edges(box: Box) -> tuple:
    edges = box.unbind(0) if isinstance(box, Tensor) else tuple(box)
    if len(edges) != 4:
        raise ValueError(f"a MixToken box is (row0, col0, row1, col1), not {len(edges)} numbers")
    return tuple(edges)

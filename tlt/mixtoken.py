"""MixToken: inside one box of tokens, each sample shows the tokens of its partner (Token Labeling, section 3.3).

A box is `(row0, col0, row1, col1)`, half-open, in tokens of the final grid: four ints, or an integer tensor of shape
(4,) on any device. The partner of sample i is sample B - 1 - i. The caller owns the random generator. All operations
compare the box with `arange`, so a new box is only new data: it causes no new graph under `torch.compile` and no
synchronisation with the device that holds the box.

Token targets stay as they are: `TokenLabelModel.apply_heads` puts every token back to its own sample before the dense
head. The class target is mixed by the share of the box (`tlt.loss.TokenLabelLoss`).
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.label_map import on_host

Box: TypeAlias = Sequence[int] | Tensor


def sample_box(generator: np.random.Generator, grid: tuple[int, int], alpha: float = 1.0) -> tuple[int, int, int, int]:
    """Draw a box by the published rule: lam ~ Beta(alpha, alpha), sides `int(side * sqrt(1 - lam))`, uniform centre;
    `grid` has the rows and columns of the final tokens. This draws three numbers from the generator. As published, the
    box reaches half a side, rounded down, from the centre in both directions, so that an unclipped box has even sides.
    Then it is clipped to the grid. It may be empty."""
    share = np.sqrt(1.0 - generator.beta(alpha, alpha))
    spans = []
    for side in grid:
        half = int(side * share) // 2
        centre = int(generator.integers(side))
        spans.append((max(centre - half, 0), min(centre + half, side)))
    (row0, row1), (col0, col1) = spans
    return row0, col0, row1, col1


def mix_tokens(x: Tensor, box: Box, scale: int = 1) -> Tensor:
    """Return a new tensor like x (B, H, W, C) in which the cells inside the box are those of the partner. One token of
    the final grid spans `scale` cells along each axis."""
    rows = torch.arange(x.shape[1], device=x.device)
    cols = torch.arange(x.shape[2], device=x.device)
    return mix_cells(x, box, rows // scale, cols // scale)


def mix_cells(x: Tensor, box: Box, rows: Tensor, cols: Tensor) -> Tensor:
    """Do what `mix_tokens` does for cells of x (B, H, W, C) whose token row (H,) and token column (W,) are given."""
    row0, col0, row1, col1 = _edges(box)
    inside_rows = (rows >= row0) & (rows < row1)  # (H,)
    inside_cols = (cols >= col0) & (cols < col1)  # (W,)
    inside = inside_rows[:, None, None] & inside_cols[None, :, None]  # (H, W, 1)
    return torch.where(inside, x.flip(0), x)


def unmix_tokens(tokens: Tensor, box: Box, grid: tuple[int, int]) -> Tensor:
    """Return every token (B, N, C), in row-major order of `grid`, to the sample whose image it shows. Mixing twice with
    the same box restores the batch."""
    return mix_tokens(tokens.unflatten(1, grid), box).flatten(1, 2)


def mixed_share(box: Box, grid: tuple[int, int]) -> float | Tensor:
    """Return the share of tokens that show the partner, in [0, 1]; the published code calls one minus it lam. It is a
    float for a box of ints, and a 0-d float32 tensor on the box's device for a tensor. Raise UserError if the box is in
    host memory and not within the grid."""
    row0, col0, row1, col1 = _edges(box)
    if on_host(box) and not (0 <= row0 <= row1 <= grid[0] and 0 <= col0 <= col1 <= grid[1]):
        raise UserError(
            f"MixToken's box {[*map(int, (row0, col0, row1, col1))]} is not within {grid[0]} x {grid[1]} tokens: draw "
            "it by tlt.draw_box(step, criterion.place(batch.images)[0])"
        )
    return (row1 - row0) * (col1 - col0) / (grid[0] * grid[1])


def _edges(box: Box) -> tuple:
    edges = box.unbind(0) if isinstance(box, Tensor) else tuple(box)
    if len(edges) != 4:
        raise ValueError(f"a MixToken box is (row0, col0, row1, col1), not {len(edges)} numbers")
    return tuple(edges)

"""Position embeddings of another grid: at run time, in `set_input_size`, and where weights are loaded."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.errors import UserError

Grid = tuple[int, int]


def resize_pos_embed(pos: Tensor, grid: Grid) -> Tensor:
    """Resize position embeddings (1, H, W, C) to (1, rows, columns, C) as published: bicubic, pixel centres at +0.5, no
    antialiasing. They are computed in float32 or better, and returned in the dtype of `pos`."""
    if tuple(pos.shape[1:3]) == tuple(grid):
        return pos
    wide = pos if pos.dtype == torch.float64 else pos.float()
    resized = F.interpolate(wide.permute(0, 3, 1, 2), size=tuple(grid), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).to(pos.dtype)


def resize_token_pos_embed(pos: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Like `resize_pos_embed` for (1, 1 + N, C), N = rows * columns of `grid`; the class token's entry is unchanged."""
    if tuple(grid) == tuple(target):
        return pos
    resized = resize_pos_embed(pos[:, 1:].unflatten(1, grid), target)
    return torch.cat((pos[:, :1], resized.flatten(1, 2)), dim=1)


def guess_grid(tokens: int, target: Grid) -> Grid:
    """The grid of a checkpoint's tokens: a square, else one of the aspect ratio of `target`.

    Raises:
        UserError: Neither has so many tokens.
    """
    side = math.isqrt(tokens)
    if side * side == tokens:
        return side, side
    rows = round(math.sqrt(tokens * target[0] / target[1]))
    if rows > 0 and tokens % rows == 0 and rows * target[1] * rows == tokens * target[0]:
        return rows, tokens // rows
    raise UserError(
        f"pos_embed of the checkpoint has {tokens} tokens, which is not a square grid: load it into a model built with "
        "the image size it was trained at, then change the size with set_input_size"
    )

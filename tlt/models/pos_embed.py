"""Resizes position embeddings: at run time, in `set_input_size` and when weights are loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]


def resize_pos_embed(pos: Tensor, grid: Grid) -> Tensor:
    """Resize a grid of position embeddings as published: bicubic, pixel centres at +0.5, no antialiasing.

    Args:
        pos: (1, H, W, C)
        grid: Rows and columns wanted.

    Returns:
        (1, rows, columns, C) in the dtype of `pos`; computed in float32 or better.
    """
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

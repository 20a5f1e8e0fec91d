"""The one place where a position embedding changes its size: at run time, in `set_input_size` and when weights load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.errors import UserError

if TYPE_CHECKING:
    from tlt.models.token_labeling import TokenLabelModel

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
    """The same for (1, 1 + N, C), N = rows * columns of `grid`; the class token's entry stays as it is."""
    if tuple(grid) == tuple(target):
        return pos
    resized = resize_pos_embed(pos[:, 1:].unflatten(1, grid), target)
    return torch.cat((pos[:, :1], resized.flatten(1, 2)), dim=1)


def adapt_state_dict(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], source_grid: Grid | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert the position embedding of weights that were trained at another image size.

    Args:
        model: The model that is to load them.
        state_dict: Weights under the published names; left unchanged.
        source_grid: Token grid that the weights were trained on. Only (1, 1 + N, C) embeddings need it, and only where
            it is not square: without it a square grid is assumed, as all published weights have it, even where the
            model has as many tokens in another grid; then one of the model's own aspect ratio.

    Returns:
        The converted copy and the names of the entries that were resized.

    Raises:
        UserError: N fits no grid that could be guessed.
    """
    adapted = dict(state_dict)
    pos, own = adapted.get("pos_embed"), model.pos_embed
    if pos is None or own is None or pos.ndim != own.ndim or pos.shape[-1] != own.shape[-1]:
        return adapted, []
    if pos.ndim == 4:
        adapted["pos_embed"] = resize_pos_embed(pos, model.pos_grid)
    else:
        grid = source_grid or _guess_grid(pos.shape[1] - 1, model.pos_grid)
        adapted["pos_embed"] = resize_token_pos_embed(pos, grid, model.pos_grid)
    return adapted, ["pos_embed"] if adapted["pos_embed"] is not pos else []


def source_grid(
    model: TokenLabelModel, state_dict: Mapping[str, Tensor], img_size: tuple[int, int] | None
) -> Grid | None:
    """The grid of weights that were trained at (H, W) pixels, None where that is unknown, not needed or no fit."""
    pos = state_dict.get("pos_embed")
    if img_size is None or pos is None or pos.ndim != 3:
        return None
    rows, cols = model.token_grid(img_size)
    return (rows, cols) if rows * cols == pos.shape[1] - 1 else None


def _guess_grid(tokens: int, target: Grid) -> Grid:
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

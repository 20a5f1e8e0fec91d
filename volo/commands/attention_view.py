"""What `volo attention` shows of one image: maps by layer, and what both heads say. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.layers import SelfAttention
from tlt.tools.drawing import Cells
from volo.commands import attention_maps
from volo.commands.attention_maps import attention_layers, forward_with_inputs
from volo.models.blocks import ClassAttention, OutlookAttention

TOP = 5
_SHOWN = 3  # layers of a kind, where nobody names them

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Heat:
    """One map over the image.

    Attributes:
        title: Says what it is.
        values: (rows, columns), 1 where attention is even.
        cell: Pixels to a cell.
        query: Row and column of the cell that looks; None where the class token or all cells do.
        note: Follows the range of values below the title.
    """

    title: str
    values: Floats
    cell: int
    query: tuple[int, int] | None = None
    note: str = ""


@dataclass(frozen=True)
class HeadWindows:
    """Outlook weights of every head around one cell, the centre of a window.

    Attributes:
        title: Says which layer it is.
        values: (heads, rows, columns), 1 where all places of the window have one weight, 0 beyond the window.
        cell: Pixels to a cell.
        query: Row and column of the centre.
    """

    title: str
    values: Floats
    cell: int
    query: tuple[int, int]


@dataclass(frozen=True)
class View:
    """All there is to draw about one image.

    Attributes:
        top: (class id, probability) of the most probable classes.
        tokens: First class of each token by the dense head, None where there is none.
        token_cell: Pixels to a token.
        sections: Maps by kind of attention, under a heading each.
    """

    top: list[tuple[int, float]]
    tokens: Cells | None
    token_cell: int
    sections: list[tuple[str, list[Heat | HeadWindows]]]


def choose_layers(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """The attention layers of the blocks that `--layers` names; without names the first, a middle and the last one of
    each kind.

    Raises:
        UserError: The model has no such block, or no such layers at all.
    """
    layers = attention_layers(model)
    if list(wanted) == ["all"]:
        return layers
    for name in wanted:
        if name not in layers:
            raise UserError(f"--layers {name}: the blocks with attention are {', '.join(layers)} (or all)")
    if wanted:
        return {name: layer for name, layer in layers.items() if name in wanted}
    chosen: set[str] = set()
    for kind in attention_maps.LAYERS:
        names = [name for name, layer in layers.items() if isinstance(layer, kind)]
        chosen |= {names[i] for i in np.linspace(0, len(names) - 1, _SHOWN).astype(int)} if names else set()
    return {name: layer for name, layer in layers.items() if name in chosen}


@torch.no_grad()
def view(
    model: Any, image: Tensor, layers: dict[str, nn.Module], query: tuple[float, float], per_head: bool = False
) -> View:
    """Run the model on one normalised image (1, 3, H, W) and look at its layers.

    Args:
        layers: Of `choose_layers`.
        query: The place that looks, (x, y) shares of the image.
        per_head: Show self- and class attention of every head after their mean.
    """
    features, inputs = forward_with_inputs(model, image, layers.values())
    grid = model.token_grid(tuple(image.shape[-2:]))
    token_cell = model.patch_size * model.mix_scale
    look = _Look(grid, token_cell, _cell_at(query, image, token_cell, grid), per_head)
    outlook: list[Heat | HeadWindows] = []
    tokens: list[Heat | HeadWindows] = []
    classes: list[Heat | HeadWindows] = []
    for (name, layer), x in zip(layers.items(), inputs, strict=True):
        if isinstance(layer, OutlookAttention):
            outlook += _outlook(name, layer, x, query, image, model.patch_size)
        elif isinstance(layer, ClassAttention):
            classes += look.from_class(name, attention_maps.class_attention(layer, x)[0])
        else:
            assert isinstance(layer, SelfAttention)
            weights = attention_maps.self_attention(layer, x)[0]  # (heads, N or 1 + N, the same)
            has_class = weights.shape[-1] == grid[0] * grid[1] + 1
            tokens += look.from_query(name, weights[:, has_class:, has_class:])
            classes += look.from_class(name, weights[:, 0]) if has_class else []
    sections = [
        (
            "outlook attention: how much a cell is looked at by its neighbours, and each head's window at the query",
            outlook,
        ),
        ("self-attention: what the query looks at", tokens),
        ("class attention: what the class token looks at", classes),
    ]
    probabilities = model.forward_head(features)[0].float().softmax(-1)
    best = probabilities.topk(min(TOP, len(probabilities)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return View(top, _dense(model, features, grid), token_cell, [section for section in sections if section[1]])


@dataclass(frozen=True)
class _Look:
    """Maps over the tokens of the final grid."""

    grid: tuple[int, int]
    cell: int
    query: tuple[int, int]
    per_head: bool

    def from_query(self, name: str, weights: Tensor) -> list[Heat]:
        """Of weights (heads, N, N), the row of the query."""
        row = self.query[0] * self.grid[1] + self.query[1]
        return self._heats(name, weights[:, row], self.query)

    def from_class(self, name: str, weights: Tensor) -> list[Heat]:
        """Of the class token's weights (heads, 1 + N)."""
        itself = weights[:, 0].mean()
        return self._heats(name, weights[:, 1:], None, f", itself {itself:.2f}")

    def _heats(self, name: str, weights: Tensor, query: tuple[int, int] | None, note: str = "") -> list[Heat]:
        maps = weights.unflatten(-1, self.grid).double().cpu().numpy() * (self.grid[0] * self.grid[1])
        heads = list(enumerate(maps)) if self.per_head else []
        mean = Heat(f"{name}, mean", maps.mean(axis=0), self.cell, query, note)
        return [mean, *(Heat(f"{name}, head {number}", values, self.cell, query) for number, values in heads)]


def _outlook(
    name: str, layer: OutlookAttention, x: Tensor, query: tuple[float, float], image: Tensor, cell: int
) -> list[Heat | HeadWindows]:
    size = (x.shape[1], x.shape[2])
    weights = attention_maps.outlook_attention(layer, x)
    row, col = _cell_at(query, image, cell, size)
    centre = row // layer.stride * layer.stride, col // layer.stride * layer.stride
    looked_at = attention_maps.outlook_looked_at(layer, weights, size)[0].mean(dim=0)
    windows = attention_maps.outlook_row(layer, weights, size, centre)[0]
    places = layer.kernel_size**2
    return [
        Heat(f"{name}, mean", looked_at.double().cpu().numpy(), cell),
        HeadWindows(f"{name}, {layer.num_heads} heads", windows.double().cpu().numpy() * places, cell, centre),
    ]


def _cell_at(query: tuple[float, float], image: Tensor, cell: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Row and column of the cell at a place (x, y) of the image."""
    height, width = image.shape[-2:]
    return min(int(query[1] * height / cell), grid[0] - 1), min(int(query[0] * width / cell), grid[1] - 1)


def _dense(model: Any, features: Tensor, grid: tuple[int, int]) -> Cells | None:
    if not model.dense_head or not model.num_classes:
        return None
    probability, ids = model.aux_head(features[0, 1:]).double().softmax(-1).max(-1)
    return Cells(ids.view(grid).cpu().numpy(), probability.view(grid).cpu().numpy(), np.ones(grid))

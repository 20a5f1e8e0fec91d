"""What the attention layers of VOLO and LV-ViT look at, recomputed from the layers' own inputs.

The models never hold their attention weights (`scaled_dot_product_attention`), so a forward hook keeps what goes into a
layer, and the weights are computed again with the layer's own projections. Nothing is drawn here.

Shapes: B images, H x W cells of the outlooker stage, h x w windows, K the kernel's side, N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.layers import SelfAttention
from tlt.tools.drawing import Cells
from volo.models.blocks import ClassAttention, OutlookAttention

LAYERS = (OutlookAttention, SelfAttention, ClassAttention)
TOP = 5
_SHOWN = 3  # layers of each kind where `--layers` names none


@dataclass(frozen=True)
class Heat:
    """One map over the image.

    Attributes:
        title: Names the layer, and the head or the mean over the heads.
        values: (rows, columns), 1 where attention is even; or (heads, rows, columns): the outlook weights of each head
            in the window around `query`, 1 where all places of the window have the same weight, 0 outside the window.
        cell: Side of a cell in pixels.
        query: Row and column of the cell that looks; None for the class token or all cells together.
        note: Is shown after the range of the values.
    """

    title: str
    values: npt.NDArray[np.float64]
    cell: int
    query: tuple[int, int] | None = None
    note: str = ""


@dataclass(frozen=True)
class View:
    """All there is to draw about one image.

    Attributes:
        top: (class id, probability) of the most probable classes.
        tokens: First class of each token by the dense head; None where there is no dense head.
        token_box: x0, y0, x1, y1 in pixels of what the tokens show together.
        sections: A heading and its maps for each kind of attention.
    """

    top: list[tuple[int, float]]
    tokens: Cells | None
    token_box: tuple[float, float, float, float]
    sections: list[tuple[str, list[Heat]]]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers in the order of the model, by the name of their block.

    Raises:
        UserError: There is none whose weights can be computed here.
    """
    found: dict[str, nn.Module] = {
        name.removesuffix(".attn"): module for name, module in model.named_modules() if isinstance(module, LAYERS)
    }
    if not found:
        raise UserError(
            f"--model: {type(model).__name__} has none of the attention layers of VOLO and LV-ViT, whose maps are shown"
        )
    return found


@torch.no_grad()
def forward_with_inputs(model: Any, images: Tensor, layers: Iterable[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """`model.forward_features(images)`, and what went into each of the layers."""
    inputs: dict[nn.Module, Tensor] = {}
    layers = list(layers)
    hooks = [layer.register_forward_hook(lambda layer, x, _: inputs.update({layer: x[0]})) for layer in layers]
    try:
        return model.forward_features(images), [inputs[layer] for layer in layers]
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def self_attention(layer: SelfAttention, x: Tensor) -> Tensor:
    """Input (B, ..., C) -> weights (B, heads, N, N), rows sum to 1."""
    qkv = layer.qkv(x.flatten(1, -2)).unflatten(-1, (3, layer.num_heads, -1))  # (B, N, 3, heads, C / heads)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)


@torch.no_grad()
def class_attention(layer: ClassAttention, x: Tensor) -> Tensor:
    """Input (B, 1 + N, C) -> weights of the class token (B, heads, 1 + N), itself first; they sum to 1."""
    q = layer.q(x[:, :1]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)  # (B, heads, 1, C / heads)
    k = layer.kv(x).unflatten(-1, (2, layer.num_heads, -1))[:, :, 0].transpose(1, 2)  # (B, heads, 1 + N, C / heads)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)[:, :, 0]


@torch.no_grad()
def outlook_attention(layer: OutlookAttention, x: Tensor) -> Tensor:
    """Input (B, H, W, C) -> weights (B, heads, h, w, K * K written, K * K read); the last axis sums to 1."""
    pooled = F.avg_pool2d(x.permute(0, 3, 1, 2), layer.stride, ceil_mode=True).permute(0, 2, 3, 1)
    logits = layer.attn(pooled) * layer.scale  # (B, h, w, heads * K^4)
    places = layer.kernel_size**2
    return logits.unflatten(-1, (layer.num_heads, places, places)).softmax(dim=-1).permute(0, 3, 1, 2, 4, 5)


def outlook_row(layer: OutlookAttention, weights: Tensor, size: tuple[int, int], cell: tuple[int, int]) -> Tensor:
    """The weight with which each cell goes into the output at one cell: what that cell looks at.

    Args:
        weights: Of `outlook_attention`.
        size: H, W.
        cell: Row and column.

    Returns:
        (B, heads, H, W). It sums to the number of windows that the cell lies in (1, 2 or 4), less what falls on the
        padding.
    """
    batch, heads, rows, cols, places, _ = weights.shape
    marked = weights.new_zeros(1, 1, *size)
    marked[0, 0, cell[0], cell[1]] = 1
    written = _unfold(layer, marked).view(1, 1, places, rows * cols)  # which place of which window is the cell
    read = torch.einsum("bhlpq,bhpl->bhql", weights.flatten(2, 3), written.expand(batch, heads, -1, -1))
    return _fold(layer, read, size)


def outlook_looked_at(layer: OutlookAttention, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, heads, H, W): how much a cell is looked at by all the places of its windows; 1 where all look evenly."""
    read = weights.sum(dim=-2).flatten(2, 3).transpose(2, 3)  # (B, heads, places read, windows)
    return _fold(layer, read, size) / _fold(layer, torch.ones_like(read), size)


def _unfold(layer: OutlookAttention, x: Tensor) -> Tensor:
    return F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)


def _fold(layer: OutlookAttention, values: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, heads, places, windows) -> (B, heads, H, W), overlapping places added up."""
    out = F.fold(values.flatten(1, 2), size, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    return out.view(*values.shape[:2], *size)


def choose_layers(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """The attention layers of the blocks that `--layers` names; without names the first, a middle and the last layer of
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
    chosen = set(wanted)
    for kind in () if wanted else LAYERS:
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
    grid, cell = model.token_grid(tuple(image.shape[-2:])), model.patch_size * model.mix_scale
    at = _cell_at(query, image, cell, grid)

    def heats(name: str, weights: Tensor, query: tuple[int, int] | None, note: str = "") -> list[Heat]:
        """Maps of weights (heads, N)."""
        maps = _array(weights.unflatten(-1, grid)) * (grid[0] * grid[1])
        mean = Heat(f"{name}, mean", maps.mean(axis=0), cell, query, note)
        heads = enumerate(maps) if per_head else ()
        return [mean, *(Heat(f"{name}, head {number}", values, cell, query) for number, values in heads)]

    outlook: list[Heat] = []
    tokens: list[Heat] = []
    classes: list[Heat] = []
    for (name, layer), x in zip(layers.items(), inputs, strict=True):
        of_class = None  # (heads, 1 + N)
        if isinstance(layer, OutlookAttention):
            outlook += _outlook(name, layer, x, query, image, model.patch_size)
        elif isinstance(layer, ClassAttention):
            of_class = class_attention(layer, x)[0]
        else:
            assert isinstance(layer, SelfAttention)
            weights = self_attention(layer, x)[0]  # (heads, N or 1 + N, the same)
            first = weights.shape[-1] - grid[0] * grid[1]
            tokens += heats(name, weights[:, first + at[0] * grid[1] + at[1], first:], at)
            of_class = weights[:, 0] if first else None
        if of_class is not None:
            classes += heats(name, of_class[:, 1:], None, f", itself {of_class[:, 0].mean():.2f}")
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
    box = (0.0, 0.0, float(grid[1] * cell), float(grid[0] * cell))
    return View(top, _dense(model, features, grid), box, [section for section in sections if section[1]])


def _outlook(
    name: str, layer: OutlookAttention, x: Tensor, query: tuple[float, float], image: Tensor, cell: int
) -> list[Heat]:
    size = (x.shape[1], x.shape[2])
    weights = outlook_attention(layer, x)
    row, col = _cell_at(query, image, cell, size)
    centre = row // layer.stride * layer.stride, col // layer.stride * layer.stride
    windows = _array(outlook_row(layer, weights, size, centre)[0]) * layer.kernel_size**2
    return [
        Heat(f"{name}, mean", _array(outlook_looked_at(layer, weights, size)[0].mean(dim=0)), cell),
        Heat(f"{name}, {layer.num_heads} heads", windows, cell, centre),
    ]


def _array(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.double().cpu().numpy()


def _cell_at(query: tuple[float, float], image: Tensor, cell: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Row and column of the cell at a place (x, y) of the image."""
    height, width = image.shape[-2:]
    return min(int(query[1] * height / cell), grid[0] - 1), min(int(query[0] * width / cell), grid[1] - 1)


def _dense(model: Any, features: Tensor, grid: tuple[int, int]) -> Cells | None:
    if not model.dense_head or not model.num_classes:
        return None
    probability, ids = model.aux_head(features[0, 1:]).double().softmax(-1).max(-1)
    return Cells(ids.view(grid).cpu().numpy(), probability.view(grid).cpu().numpy(), np.ones(grid))

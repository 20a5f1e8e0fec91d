"""Where in a timm model MixToken mixes: behind the last layer that sees the whole image before the blocks.

Shapes: B images, a final map of `h x w` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.mixtoken import Box, mix_cells, mix_tokens
from tlt.models.token_positions import Shrinking, Size, TokenGrid, positions_of, shrinking_layers

# Names that timm gives to that layer, in the order in which they are looked for.
_EMBEDDINGS = ("patch_embed", "stem", "maxpool", "bn1")
_TOLERANCE = 1e-3  # of the largest feature

Features = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> map (B, h, w, C)


class Tokens(NamedTuple):
    """The last map of a model for images of one size.

    Attributes:
        grid: Rows and columns.
        channels: Of the map.
        cells: Where the cells lie that MixToken mixes; None where they are the tokens.
    """

    grid: Size
    positions: TokenGrid
    channels: int
    cells: TokenGrid | None = None

    def of_cells(self, axis: int, count: int, device: torch.device) -> Tensor:
        """(count,) the token of each cell along an axis; cells beyond the outer tokens belong to these."""
        assert self.cells is not None
        centres = torch.arange(count, device=device) * self.cells.pitch[axis] + self.cells.first[axis]
        steps = (centres - self.positions.first[axis]) / self.positions.pitch[axis]
        return (steps + 0.5).floor().clamp(0, self.grid[axis] - 1)


class MixPoint:
    """Mixes the output of one layer by `box` while that is set; a forward hook of the layer.

    Args:
        layer: Name of the layer.
        layout: "NLC" (patches row by row), "NHWC" or "NCHW".

    Attributes:
        tokens: For images of the present size; the caller sets it with `box`.
    """

    def __init__(self, layer: str, layout: str) -> None:
        self.layer, self.layout = layer, layout
        self.box: Box | None = None
        self.tokens: Tokens | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.box is None or self.tokens is None:
            return None
        if self.layout == "NLC":
            return mix_tokens(output.unflatten(1, self.tokens.grid), self.box).flatten(1, 2)
        x = output if self.layout == "NHWC" else output.permute(0, 2, 3, 1)
        rows, cols = (self.tokens.of_cells(axis, x.shape[axis + 1], x.device) for axis in (0, 1))
        mixed = mix_cells(x, self.box, rows, cols)
        return mixed if self.layout == "NHWC" else mixed.permute(0, 3, 1, 2)

    def cells_of(self, output: Tensor, layers: list[Shrinking], img_size: Size) -> TokenGrid | None:
        """Where the cells of this `output` lie in a network with these layers; None where they are the tokens."""
        if self.layout == "NLC":
            return None
        rows = self.layout.index("H")
        return positions_of(layers, (output.shape[rows], output.shape[rows + 1]), img_size)


def add_mix_point(model: nn.Module, features: Features, images: Tensor) -> MixPoint:
    """Hook a `MixPoint` to the embedding of a model and test it: a box of all tokens must show the partner's image.

    Args:
        features: Of `model`, in evaluation mode.
        images: (2, 3, H, W), any two.

    Raises:
        UserError: There is no such layer, its output is no map, or images reach the features on another way too. No
            hook is left behind.
    """
    name = next((n for n in _EMBEDDINGS if type(getattr(model, n, None)) not in _NO_LAYERS), None)
    if name is None:
        raise UserError(f"none of its layers is one that MixToken knows ({', '.join(_EMBEDDINGS)})")
    layer: nn.Module = getattr(model, name)
    with shrinking_layers(model) as layers:
        partner, output = layer_output(layer, features, images.flip(0))
    grid, size = (partner.shape[1], partner.shape[2]), (images.shape[2], images.shape[3])
    lower = images.flip(0)
    lower[:, :, images.shape[2] // 2 :] *= -1
    point = MixPoint(name, _layout(name, layer, grid, output, layer_output(layer, features, lower)[1]))
    handle = layer.register_forward_hook(point)
    cells = point.cells_of(output, layers, size)
    point.box, point.tokens = (0, 0, *grid), Tokens(grid, positions_of(layers, grid, size), partner.shape[3], cells)
    mixed = features(images)
    point.box = None
    if not (mixed - partner).abs().max() <= _TOLERANCE * partner.abs().max():
        handle.remove()
        raise UserError(f"images reach its features past its {name}, where MixToken would mix")
    return point


_NO_LAYERS = (type(None), nn.Identity, nn.ModuleList)


def layer_output(layer: nn.Module, features: Features, images: Tensor) -> tuple[Tensor, Any]:
    """The features of images, and the output of `layer`; None unless `layer` ran exactly once."""
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        result = features(images)
    finally:
        handle.remove()
    return result, outputs[0] if len(outputs) == 1 else None


def _layout(name: str, layer: nn.Module, grid: Size, output: Any, lower: Any) -> str:
    """The layout of the `output` of `layer`, of which `lower` is that for images with another lower half.

    Raises:
        UserError: It can't be read as a map.
    """
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        raise UserError(f"its {name} does not give one map of the image, for MixToken to mix")
    if output.ndim == 3:
        if not hasattr(layer, "dynamic_feat_size") or output.shape[1] != grid[0] * grid[1]:
            raise UserError(
                f"its {name} gives {output.shape[1]} tokens, not the {grid[0]} x {grid[1]} that MixToken mixes"
            )
        return "NLC"
    change = (output - lower).abs()

    def above(layout: str) -> float:
        rows = layout.index("H")
        return float(change.narrow(rows, 0, change.shape[rows] // 2).sum())

    return min("NCHW", "NHWC", key=above)  # what stays in the upper half of its rows

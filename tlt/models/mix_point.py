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
from tlt.models.token_positions import Shrinking, Size, positions_of, shrinking_layers

# Names that timm gives to that layer, in the order in which they are looked for.
_EMBEDDINGS = ("patch_embed", "stem", "maxpool", "bn1")
_TOLERANCE = 1e-3  # of the largest feature

Features = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> map (B, h, w, C)


class EmbeddingCells(NamedTuple):
    """Which token the cells of an embedding belong to, along (rows, columns).

    Attributes:
        grid: Tokens.
        pitch: Cells from one token to the next.
        start: Where the first token begins, in cells from the first one's edge; negative where it looks at padding.
    """

    grid: Size
    pitch: tuple[float, float]
    start: tuple[float, float]

    def tokens(self, axis: int, count: int, device: torch.device) -> Tensor:
        """(count,) the token of each cell along an axis; cells beyond the outer tokens belong to these."""
        centres = torch.arange(count, device=device) + (0.5 - self.start[axis])
        return (centres / self.pitch[axis]).floor().clamp(0, self.grid[axis] - 1)


class MixPoint:
    """Mixes the output of one layer by `box` while that is set; a forward hook of the layer.

    Args:
        layer: Name of the layer.
        layout: "NLC" (patches row by row), "NHWC" or "NCHW".

    Attributes:
        cells: For images of the present size; the caller sets it with `box`.
    """

    def __init__(self, layer: str, layout: str) -> None:
        self.layer, self.layout = layer, layout
        self.box: Box | None = None
        self.cells: EmbeddingCells | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.box is None:
            return None
        if self.layout == "NLC":
            image = inputs[0]  # (B, 3, H, W)
            grid = module.dynamic_feat_size((image.shape[-2], image.shape[-1]))  # type: ignore[operator]
            return mix_tokens(output.unflatten(1, grid), self.box).flatten(1, 2)
        if self.layout == "NHWC":
            return self._mixed(output)
        return self._mixed(output.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def cells_of(self, output: Tensor, layers: list[Shrinking], grid: Size, img_size: Size) -> EmbeddingCells | None:
        """The cells of this `output` in a network with these layers; None where they are the tokens."""
        if self.layout == "NLC":
            return None
        rows = self.layout.index("H")
        tokens = positions_of(layers, grid, img_size)
        cells = positions_of(layers, (output.shape[rows], output.shape[rows + 1]), img_size)
        pitch_y, pitch_x = (far / near for far, near in zip(tokens.pitch, cells.pitch, strict=True))
        start_y, start_x = (
            (token - cell) / near + 0.5 - pitch / 2
            for token, cell, near, pitch in zip(tokens.first, cells.first, cells.pitch, (pitch_y, pitch_x), strict=True)
        )
        return EmbeddingCells(grid, (pitch_y, pitch_x), (start_y, start_x))

    def _mixed(self, x: Tensor) -> Tensor:
        assert self.box is not None and self.cells is not None
        rows, cols = (self.cells.tokens(axis, x.shape[axis + 1], x.device) for axis in (0, 1))
        return mix_cells(x, self.box, rows, cols)


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
    point.box, point.cells = (0, 0, *grid), point.cells_of(output, layers, grid, size)
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

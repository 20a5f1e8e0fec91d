"""Where in a timm model MixToken mixes: behind the last layer that sees the whole image before the blocks.

Shapes: B images, a final map of `h x w` places, `scale` cells of the embedding to each place along each axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tlt.errors import UserError
from tlt.mixtoken import Box, mix_tokens

# Names that timm gives to that layer, in the order in which they are looked for.
_EMBEDDINGS = ("patch_embed", "stem", "maxpool", "bn1")
_TOLERANCE = 1e-3  # of the largest feature

Features = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> map (B, h, w, C)


class MixPoint:
    """Mixes the output of one layer by `box` while that is set; a forward hook of the layer.

    Args:
        layer: Name of the layer.
        scale: Cells of its output to one place of the final map.
        layout: "NLC" (patches row by row), "NHWC" or "NCHW".
    """

    def __init__(self, layer: str, scale: int, layout: str) -> None:
        self.layer, self.scale, self.layout = layer, scale, layout
        self.box: Box | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.box is None:
            return None
        if self.layout == "NLC":
            image = inputs[0]  # (B, 3, H, W)
            grid = module.dynamic_feat_size((image.shape[-2], image.shape[-1]))  # type: ignore[operator]
            return mix_tokens(output.unflatten(1, grid), self.box, self.scale).flatten(1, 2)
        if self.layout == "NHWC":
            return mix_tokens(output, self.box, self.scale)
        return mix_tokens(output.permute(0, 2, 3, 1), self.box, self.scale).permute(0, 3, 1, 2)


def add_mix_point(model: nn.Module, features: Features, images: Tensor) -> MixPoint:
    """Find the layer, hook a `MixPoint` to it and prove it: a box of all places must show the partner's image.

    Args:
        features: Of `model`, in evaluation mode.
        images: (2, 3, H, W), any two.

    Raises:
        UserError: There is no such layer, its output is no whole multiple of the final map, or images reach the
            features on another way too. No hook is left behind.
    """
    name = next((n for n in _EMBEDDINGS if type(getattr(model, n, None)) not in _NO_LAYERS), None)
    if name is None:
        raise UserError(f"none of its layers is one that MixToken knows ({', '.join(_EMBEDDINGS)})")
    layer: nn.Module = getattr(model, name)
    partner, output = _seen(layer, features, images.flip(0))
    grid = partner.shape[1], partner.shape[2]
    fitting = _fitting(name, layer, output, grid)
    if len(fitting) > 1:  # as many channels as rows and columns
        lower = images.flip(0)
        lower[:, :, images.shape[2] // 2 :] *= -1
        fitting = _by_reach(fitting, output, _seen(layer, features, lower)[1])
    point = MixPoint(name, *fitting[0])
    handle = layer.register_forward_hook(point)
    point.box = (0, 0, *grid)
    mixed = features(images)
    point.box = None
    if not (mixed - partner).abs().max() <= _TOLERANCE * partner.abs().max():
        handle.remove()
        raise UserError(f"images reach its features past its {name}, where MixToken would mix")
    return point


_NO_LAYERS = (type(None), nn.Identity, nn.ModuleList)


def _seen(layer: nn.Module, features: Features, images: Tensor) -> tuple[Tensor, Any]:
    """The features of images, and what `layer` put out on the way; None unless that was one thing."""
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        result = features(images)
    finally:
        handle.remove()
    return result, outputs[0] if len(outputs) == 1 else None


def _fitting(name: str, layer: nn.Module, output: Any, grid: tuple[int, int]) -> list[tuple[int, str]]:
    """(scale, layout) as which the output of `layer` can be read: one, or two where nothing tells channels from rows.

    Raises:
        UserError: It can't be read as a map at all.
    """
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        raise UserError(f"its {name} does not give one map of the image, for MixToken to mix")
    if output.ndim == 3:
        if not hasattr(layer, "dynamic_feat_size") or output.shape[1] != grid[0] * grid[1]:
            raise UserError(
                f"its {name} gives {output.shape[1]} tokens, not the {grid[0]} x {grid[1]} that MixToken mixes"
            )
        return [(1, "NLC")]
    stated = str(getattr(layer, "output_fmt", "")).rpartition(".")[2].upper()
    fitting = []
    for layout, (rows, cols) in (("NCHW", output.shape[2:]), ("NHWC", output.shape[1:3])):
        scale = rows // grid[0]
        if stated in ("", layout) and scale and (rows, cols) == (scale * grid[0], scale * grid[1]):
            fitting.append((scale, layout))
    if not fitting:
        shape = tuple(output.shape[1:])
        raise UserError(f"its {name} gives {shape}, no whole multiple of {grid[0]} x {grid[1]} tokens")
    return fitting


def _by_reach(fitting: list[tuple[int, str]], output: Tensor, lower: Tensor) -> list[tuple[int, str]]:
    """Sort by how little the upper half of the rows changes from images to those with another lower half."""
    change = (output - lower).abs()

    def above(place: tuple[int, str]) -> float:
        axis = place[1].index("H")
        return float(change.narrow(axis, 0, change.shape[axis] // 2).sum())

    return sorted(fitting, key=above)

"""Finds the map of a network's last features, and where the tokens of that map lie in the image, in pixels.

A convolution or pooling of stride s, kernel k and padding p puts the centre of its output i at s * i + k / 2 - p of its
input (cell i covers [i, i + 1]). Layers that don't change the size don't change positions. So we follow the layers that
do, from the last back to the image. This includes what is dropped at an edge (6 of 230 pixels at stride 16) and shifts
by padding (16 pixels up and left in a ResNet). docs/alignment.md compares the positions with gradients.

Shapes: B images of (H, W) pixels, maps of `h x w` tokens, C channels, P prefix tokens (class token, registers).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from timm.layers import BlurPool2d, Conv2dSame, RmsNorm, RmsNorm2d, to_2tuple
from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame
from timm.models import swin_transformer, swin_transformer_v2, swin_transformer_v2_cr
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlt.errors import UserError
from tlt.label_map import Area

Size = tuple[int, int]

# Names of attention classes: a parallel shortcut carries the map. Not ResNeSt's SplitAttn, which carries it itself.
_ATTENTION = re.compile("atten|BottleneckAttn|HaloAttn|LambdaLayer", re.IGNORECASE)
_POOLS = (nn.AvgPool2d, nn.MaxPool2d)
_SAME = (Conv2dSame, AvgPool2dSame, MaxPool2dSame)
# They merge 2 x 2 cells of a map (B, h, w, C), after appending a row or column if their number is odd.
_MERGINGS = (swin_transformer.PatchMerging, swin_transformer_v2.PatchMerging, swin_transformer_v2_cr.PatchMerging)
_PADDED = 4  # a network appends fewer cells than this to a map before it shrinks the map
_RMS_NORMS = (nn.RMSNorm, RmsNorm, RmsNorm2d)


def feature_map(model: nn.Module, features: Any, img_size: tuple[int, int]) -> Tensor:
    """Return the output of `model.forward_features` for images of (H, W) as a map (B, h, w, C), without prefix tokens.
    The features are (B, C, h, w); (B, h, w, C) if the model's `output_fmt` says so; or (B, P + h * w, C). Raise
    UserError if the features are none of these, or the tokens are not the patches of the image."""
    kind = type(model).__name__
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"{kind} has no spatial features: they are {shape}, neither a map nor tokens")
    if features.ndim == 4:
        return features if is_channels_last(model) else features.permute(0, 2, 3, 1)
    layers: list[Any] = [getattr(model, name, None) for name in ("patch_embed", "stem")]
    measured_grid = getattr(model, "token_grid", None)  # VOLO and LV-ViT have this method
    measure = next((layer.dynamic_feat_size for layer in layers if hasattr(layer, "dynamic_feat_size")), measured_grid)
    grid = None if measure is None else tuple(measure(img_size))
    prefix = prefix_tokens(model)
    if grid is None or features.shape[1] != prefix + grid[0] * grid[1]:
        where = "it doesn't say which patch each shows" if grid is None else f"not {grid[0]} x {grid[1]} patches"
        raise UserError(f"{kind} has no spatial features: {features.shape[1] - prefix} tokens, {where}")
    return features[:, prefix:].unflatten(1, grid)


def prefix_tokens(model: nn.Module) -> int:
    """Return P, the number of tokens before those of the image."""
    return int(getattr(model, "num_prefix_tokens", 0) or getattr(model, "class_tokens", 0))


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the model's feature map is (B, h, w, C)."""
    return str(getattr(model, "output_fmt", "NCHW")).upper().endswith("NHWC")


def norm_after_pooling(model: nn.Module) -> nn.Module | None:
    """Return the layer norm or RMS norm that the model applies to its pooled features (ConvNeXt's `head.norm`, a vision
    transformer's `fc_norm`), or None if there is none or it is of another kind."""
    norms = (getattr(model, "fc_norm", None), getattr(getattr(model, "head", None), "norm", None))
    return next((norm for norm in norms if isinstance(norm, (nn.LayerNorm, *_RMS_NORMS))), None)


def norm_with_scale_of(norm: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
    """Normalise x (B, h, w, C) with `norm` of `norm_after_pooling`, but divide by the deviation of `reference` (B, C);
    return (B, h, w, C), in at least float32. If `reference` is the mean of `x` over its tokens, this is an affine
    function of each token, and its mean over the tokens is `norm(reference)`: centring is linear, and the divisor is
    one number per image."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    reference = reference.to(dtype)
    if not isinstance(norm, _RMS_NORMS):
        x = x - x.mean(-1, keepdim=True)
        reference = reference - reference.mean(-1, keepdim=True)
    eps = torch.finfo(dtype).eps if norm.eps is None else norm.eps  # None means this in torch's RMSNorm
    x = x * (reference.square().mean(-1) + cast(float, eps)).rsqrt()[:, None, None, None]
    weight = getattr(norm, "weight", None)
    bias = getattr(norm, "bias", None)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


class TokenPositions(NamedTuple):
    """The positions of tokens in an image."""

    pitch: tuple[float, float]  # pixels from one token to the next, (down, across)
    # Centre of the first token in pixels from the upper left corner of the image, (down, across). It may lie outside
    # the image, in padding.
    first: tuple[float, float]

    def window(self, grid: Size, img_size: Size) -> Area:
        """Return the area that the tokens cover, one pitch each: `(x0, y0, x1, y1)` in shares of the image."""
        (y0, y1), (x0, x1) = (
            ((first - pitch / 2) / side, (first + (count - 0.5) * pitch) / side)
            for first, pitch, count, side in zip(self.first, self.pitch, grid, img_size, strict=True)
        )
        return x0, y0, x1, y1


@dataclass(frozen=True)
class DownsamplingLayer:
    """A layer that turns maps of `source` cells into maps of `size` cells. All pairs are (down, across); `stride` and
    `first`, the centre of the first output, are in cells of the input."""

    source: Size
    size: Size
    stride: tuple[float, float]
    first: tuple[float, float]
    averages: bool = False
    attends: bool = False
    resizes: bool = False  # by interpolation


@contextmanager
def downsampling_layers(model: nn.Module) -> Iterator[list[DownsamplingLayer]]:
    """Yield a list that collects the layers that change the size of maps while the block runs the model."""
    layers: list[DownsamplingLayer] = []
    padded: list[tuple[Tensor, Tensor, Any]] = []  # (output, input, layer) of each explicit padding
    attention = tuple(name for name, module in model.named_modules() if _ATTENTION.search(type(module).__name__))
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, *_POOLS, BlurPool2d, *_MERGINGS)):
            inside = name.startswith(attention)

            def note(module: nn.Module, inputs: tuple[Any, ...], output: Any, attends: bool = inside) -> None:
                if not isinstance(output, Tensor) or output.ndim != 4:
                    return
                sides = slice(1, 3) if isinstance(module, _MERGINGS) else slice(2, 4)
                before, pad = next(((x, pad) for y, x, pad in padded if y is inputs[0]), (inputs[0], None))
                source, size = before.shape[sides], output.shape[sides]
                if source != size:
                    layers.append(_downsampling(module, source, size, attends, pad))

            handles.append(module.register_forward_hook(note))
        elif isinstance(module, nn.ZeroPad2d) and (module.padding[0] or module.padding[2]):
            handles.append(module.register_forward_hook(lambda pad, x, y: padded.append((y, x[0], pad))))
    try:
        with _Resizings(layers):
            yield layers
    finally:
        for handle in handles:
            handle.remove()


def positions_of(layers: list[DownsamplingLayer], grid: Size, img_size: Size) -> TokenPositions:
    """Return the positions of a map of `grid` cells in images of (H, W) pixels, in a network with these layers. If no
    layer makes a map (the first of TResNet), its cells divide the image into equal parts. Of parallel layers we follow
    those that average, such as the shortcuts of ResNet-D: they carry the image, and the other branch is small. Raise
    UserError if no layer tells where the cells lie."""
    (pitch_y, first_y), (pitch_x, first_x) = (_along(layers, axis, grid[axis], img_size[axis]) for axis in (0, 1))
    return TokenPositions((pitch_y, pitch_x), (first_y, first_x))


def _along(layers: list[DownsamplingLayer], axis: int, size: int, image: int) -> tuple[float, float]:
    """Return (pitch, centre of the first token) along an axis, in pixels."""
    layers = [layer for layer in layers if layer.resizes or layer.source[axis] > layer.size[axis]]
    pitch, first = 1.0, 0.5  # in cells of the map of `size`
    while size < image:
        if makers := _makers(layers, axis, size):
            stride, source = makers[0].stride[axis], makers[0].source[axis]
            start = sum(layer.first[axis] for layer in makers) / len(makers)
            # Use each layer once. Otherwise a map that is padded and then shrunk to its old size would loop for ever.
            layers = [layer for layer in layers if (layer.size[axis], layer.source[axis]) != (size, source)]
        elif padded := {layer.size[axis] for layer in layers}.intersection(range(size - _PADDED + 1, size)):
            size = max(padded)  # the network appended cells to this map
            continue
        elif image % size:
            raise UserError(f"none of its layers tells where the {size} cells of a map lie in {image} px")
        else:  # equal parts
            stride = image / size
            start = stride / 2
            source = image
        pitch = pitch * stride
        first = start + (first - 0.5) * stride
        size = source
    return pitch, first


def _makers(layers: list[DownsamplingLayer], axis: int, size: int) -> list[DownsamplingLayer]:
    """Return the parallel layers whose output of `size` cells carries the image: all but attention, from the smallest
    source, and if some of these average, only they. An interpolation counts only if no other layer makes this map."""
    makers = [layer for layer in layers if layer.size[axis] == size]
    makers = [layer for layer in makers if not layer.resizes] or makers[-1:]
    makers = [layer for layer in makers if not layer.attends] or makers
    source = min((layer.source[axis] for layer in makers), default=0)
    makers = [layer for layer in makers if layer.source[axis] == source]
    return [layer for layer in makers if layer.averages] or makers


class _Resizings(TorchFunctionMode):
    """Appends every interpolation that resizes a map to a list of layers."""

    def __init__(self, layers: list[DownsamplingLayer]) -> None:
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.interpolate and output.ndim == 4:
            source, size = args[0].shape[2:], output.shape[2:]
            stride = source[0] / size[0], source[1] / size[1]
            self.layers.append(DownsamplingLayer(source, size, stride, (stride[0] / 2, stride[1] / 2), resizes=True))
        return output


def _downsampling(layer: Any, source: Any, size: Any, attends: bool, pad: nn.ZeroPad2d | None) -> DownsamplingLayer:
    if isinstance(layer, _MERGINGS):
        return DownsamplingLayer(tuple(source), tuple(size), (2, 2), (1.0, 1.0))
    kernel = to_2tuple(layer.filt_size if isinstance(layer, BlurPool2d) else layer.kernel_size)
    stride = to_2tuple(layer.stride)
    dilation = to_2tuple(getattr(layer, "dilation", 1))
    reach = tuple(step * (cells - 1) + 1 for step, cells in zip(dilation, kernel, strict=True))
    if getattr(layer, "same_pad", isinstance(layer, _SAME)):  # TensorFlow's padding; an odd cell goes to the end
        steps = zip(source, size, stride, reach, strict=True)
        before = tuple(max((count - 1) * step + wide - side, 0) // 2 for side, count, step, wide in steps)
    else:
        before = (0, 0) if isinstance(layer.padding, str) else to_2tuple(layer.padding)[:2]
    if pad is not None:  # its padding is (left, right, top, bottom)
        before = before[0] + pad.padding[2], before[1] + pad.padding[0]
    first = tuple(wide / 2 - cells for wide, cells in zip(reach, before, strict=True))
    return DownsamplingLayer(tuple(source), tuple(size), stride, first, isinstance(layer, nn.AvgPool2d), attends)

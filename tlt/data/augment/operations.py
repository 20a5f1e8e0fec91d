"""Colour operations and affine warps of batches of uint8 images, on any device, as PIL does them on one image.

A colour operation takes images (B, 3, H, W) uint8 and an argument per sample (B,) float32 and returns new images; rows
don't touch each other. The results are within one grey level of Pillow's (ImageOps, ImageEnhance, Image.transform) as
timm calls them. Nothing here synchronises with the host.

Legend: B images of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.augment.rand_augment import Kernel

_FRAME = 2  # pixels around an image that bicubic sampling can reach


def precise_dtype(device: torch.device) -> torch.dtype:
    """The floats that repeat PIL's doubles on this device; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it; doubles where it has them."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        tensor = tensor.to(precise_dtype(device))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _per_sample(argument: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, 1)."""
    return argument.view(-1, 1, 1, 1)


def _truncated(values: Tensor) -> Tensor:
    """Floats, which are overwritten, to grey levels: clipped and truncated as PIL's blend does."""
    return values.clamp_(0, 255).short().to(torch.uint8)  # CPUs convert in two quick steps or in one slow one


def _blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """`PIL.Image.blend(degenerate, image, factor)`: 0 gives the degenerate image, 1 the image, more exaggerates."""
    return _truncated((images - degenerate).mul_(_per_sample(factor)).add_(degenerate))


def luma(images: Tensor) -> Tensor:
    """PIL's conversion to "L" in its fixed-point arithmetic -> (B, 1, H, W) int32."""
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each value by its entry in its channel's table (B, 3, 256) int."""
    table = tables.clamp(0, 255).to(torch.uint8)
    return table.gather(2, images.flatten(2).long()).view_as(images)


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.int32, device=images.device)


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """`ImageOps.autocontrast`: each channel's range is stretched to 0..255."""
    low, high = (levels[..., None].int() for levels in (images.amin((2, 3)), images.amax((2, 3))))
    span = (high - low).clamp(min=1).to(precise_dtype(images.device))
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would multiply by a rounded reciprocal
    # Whole numbers can come out one lower, as in PIL, which rounds the two products apart.
    stretched = (_levels(images) * scale - low * scale).int()
    return _look_up(images, torch.where(high > low, stretched, _levels(images)))


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """`ImageOps.equalize`: each channel's histogram is flattened; channels too uniform for it stay."""
    values = images.flatten(2).long()
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand_as(values)
    counts = ones.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, ones)  # (B, 3, 256)
    last = 255 - (counts.flip(2) > 0).int().argmax(2, keepdim=True)  # the largest value that occurs
    step = (counts.sum(2, keepdim=True) - counts.gather(2, last)) // 255
    below = counts.cumsum(2) - counts
    flat = (step // 2 + below) // step.clamp(min=1)
    return _look_up(images, torch.where(step > 0, flat, _levels(images)))


def invert(images: Tensor, _: Tensor) -> Tensor:
    """`ImageOps.invert`."""
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """`ImageOps.posterize`: keep the upper `bits` bits. 8 and more keep the image, 0 and less give black."""
    mask = 256 - (1 << (8 - bits.int()).clamp(0, 8))
    return images & _per_sample(mask).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """`ImageOps.solarize`: invert the values from `threshold` on (256: none)."""
    # All bits where an image is below: on a CPU a comparison takes ten times as long as the sign of a difference.
    below = (images.short() - _per_sample(threshold.ceil().short())) >> 15
    return ~(images ^ below.to(torch.uint8))


def solarize_add(images: Tensor, add: Tensor) -> Tensor:
    """timm's SolarizeAdd: add `add`, 0 to 128, to the values below 128."""
    return images + (~images >> 7) * _per_sample(add.to(torch.uint8))  # the highest bit says which are below


def color(images: Tensor, factor: Tensor) -> Tensor:
    """`ImageEnhance.Color`: blend with the grey image."""
    return _blend(luma(images).float(), images.float(), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """`ImageEnhance.Contrast`: blend with the mean of the grey image, rounded."""
    grey = luma(images)
    pixels = grey[0].numel()
    mean = (2 * grey.sum((1, 2, 3), dtype=torch.int64) + pixels) // (2 * pixels)
    return _blend(_per_sample(mean).float(), images.float(), factor)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """`ImageEnhance.Brightness`: blend with black."""
    return _truncated(images.float() * _per_sample(factor))


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """`ImageEnhance.Sharpness`: blend with `ImageFilter.SMOOTH`, which leaves the border pixels as they are."""
    values, levels = images.float(), images.short()
    smooth = values.clone()
    rows = levels[:, :, :-2] + levels[:, :, 1:-1] + levels[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    weighted = box + 4 * levels[:, :, 1:-1, 1:-1]  # 1 1 1 / 1 5 1 / 1 1 1
    smooth[:, :, 1:-1, 1:-1] = (weighted.float() / 13 + 0.5).floor()
    return _blend(smooth, values, factor)


OPERATIONS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    Kernel.AUTO_CONTRAST: auto_contrast,
    Kernel.EQUALIZE: equalize,
    Kernel.INVERT: invert,
    Kernel.POSTERIZE: posterize,
    Kernel.SOLARIZE: solarize,
    Kernel.SOLARIZE_ADD: solarize_add,
    Kernel.COLOR: color,
    Kernel.CONTRAST: contrast,
    Kernel.BRIGHTNESS: brightness,
    Kernel.SHARPNESS: sharpness,
}


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, along: int = -1) -> Tensor:
    """`PIL.Image.transform(size, AFFINE, map, resample, fillcolor)` for images (B, 3, H, W) uint8, size kept.

    Args:
        maps: (B, 2, 3), output px -> input px, float64 where the device has it.
        fill: Red, green, blue, shown where the mapped centre of a pixel lies outside the image.
        cubic: Bicubic (PIL's, 4 x 4 pixels), else bilinear.
        along: 0 (x) or 1 (y) where every map moves lines of pixels along this axis, and by whole pixels along the other
            one: nothing is interpolated there, in half the time or a quarter, with the same result.
    """
    height, width = images.shape[2:]
    m = maps[..., None, None]
    columns, rows = (torch.arange(side, dtype=maps.dtype, device=maps.device) + 0.5 for side in (width, height))
    x, y = (m[:, axis, 0] * columns + m[:, axis, 1] * rows[:, None] + m[:, axis, 2] for axis in (0, 1))  # (B, H, W)
    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    # With a frame of repeated edges only the first of the 4 x 4 pixels around has to be clamped.
    row_length = width + 2 * _FRAME
    first = (top.int().clamp_(-1, height - 1) + 1) * row_length + (left.int().clamp_(-1, width - 1) + 1)
    index = first.long().flatten(1)[:, None].expand(-1, 3, -1)  # the same pixel of every channel
    table = F.pad(images.float(), (_FRAME,) * 4, mode="replicate").flatten(2)
    reach = range(4) if cubic else range(1, 3)
    reach_x, reach_y = (range(1, 2) if along == other else reach for other in (1, 0))
    weights_x, weights_y = _weights(x - left, cubic), _weights(y - top, cubic)

    def row(number: int) -> Tensor:
        start = number * row_length
        return _between([table[:, :, start + i :].gather(2, index).view(images.shape) for i in reach_x], weights_x)

    levels = _truncated(_between([row(number) for number in reach_y], weights_y))
    for channel, level in zip(levels.unbind(1), fill, strict=True):
        channel.masked_fill_(outside, level)
    return levels


def _weights(fraction: Tensor, cubic: bool) -> tuple[Tensor, ...]:
    """By what `_between` multiplies differences of pixels, at points (B, H, W) in 0..1 between them."""
    t = fraction[:, None]
    if not cubic:
        # The result is often a whole number, where a float32 just below would lose a level: keep the doubles.
        return (t,)
    t = t.float()
    rest = 1 - t
    far = t * rest
    return -far * rest, t + t * far, -far * t


def _between(pixels: Sequence[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    """One pixel as it is, or a value between two, or between the middle two of four: cubic convolution with a = -1,
    which is PIL's for transforms.

    By differences of pixels: where all are the same, so is the result, to the last bit.
    """
    if len(pixels) == 1:
        return pixels[0]
    if len(pixels) == 2:
        first, second = pixels
        return (second - first).to(weights[0].dtype).mul_(weights[0]).add_(first)
    before, first, second, after = pixels
    total = (before - first).mul_(weights[0]).addcmul_(second - first, weights[1])
    return total.addcmul_(after - first, weights[2]).add_(first)

"""Colour operations on batches of uint8 images, on any device, as PIL does them on one image.

Every function takes images (B, 3, H, W) uint8 and an argument per sample (B,) float32 and returns new images; rows
don't touch each other. The results are within one grey level of Pillow's (ImageOps, ImageEnhance) as timm
calls them. Nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tlt.data.augment.on_device import precise_dtype
from tlt.data.augment.rand_augment import Kernel


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


def _histograms(images: Tensor) -> Tensor:
    """Counts per channel (B, 3, 256) int32."""
    values = images.flatten(2).long()
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand_as(values)
    return torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=images.device).scatter_add_(2, values, ones)


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each value by its entry in its channel's table (B, 3, 256) int."""
    table = tables.clamp(0, 255).to(torch.uint8)
    return table.gather(2, images.flatten(2).long()).view_as(images)


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.int32, device=images.device)


def _last_level(counts: Tensor) -> Tensor:
    """The largest value that occurs (B, 3, 1)."""
    return 255 - (counts.flip(2) > 0).int().argmax(2, keepdim=True).int()


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
    counts = _histograms(images)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, _last_level(counts).long())) // 255
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

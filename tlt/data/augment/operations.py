"""Changes colours and warps batches of uint8 images on any device, as PIL does it with one image.

The results are within one grey level of Pillow's (ImageOps, ImageEnhance, Image.transform) as timm calls them, and do
not depend on the other images of the batch. A GPU computes an operation of torch faster than the host starts it. So
images with different operations share the steps that these have in common. Nothing here synchronises with the host.

Legend: b images of H x W pixels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.augment.counter import Floats, Ints
from tlt.data.augment.plan import BICUBIC
from tlt.data.augment.rand_augment import Kernel

PerKernel = Mapping[Kernel, Callable[[Tensor, Tensor], Tensor]]

_FRAME = 2  # pixels around an image that bicubic sampling can reach


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return the type that stands for PIL's doubles on a device: float64, but not on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for it. Floats become `precise_dtype`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        tensor = tensor.to(precise_dtype(device))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _truncated(values: Tensor) -> Tensor:
    """Clip and truncate floats, which are overwritten, to grey levels, as PIL's blend does."""
    return values.clamp_(0, 255).short().to(torch.uint8)  # CPUs convert in two quick steps or in one slow one


def luma(images: Tensor) -> Tensor:
    """Convert to grey levels (b, 1, H, W) int32 in the fixed-point arithmetic of PIL's mode "L"."""
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000) >> 16


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.int32, device=images.device)


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Return tables that stretch each channel's range to 0..255, as `ImageOps.autocontrast`."""
    low, high = (levels[..., None].int() for levels in (images.amin((2, 3)), images.amax((2, 3))))
    span = (high - low).clamp(min=1).to(precise_dtype(images.device))
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would multiply by a rounded reciprocal
    # Whole numbers can come out one lower, as in PIL, which rounds the two products separately.
    stretched = (_levels(images) * scale - low * scale).int()
    return torch.where(high > low, stretched, _levels(images))


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    """Return tables that flatten each channel's histogram, as `ImageOps.equalize`, unless it has too few levels."""
    values = images.flatten(2).long()
    one = torch.ones((), dtype=torch.int32, device=images.device)
    counts = one.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, one.expand_as(values))  # (b, 3, 256)
    highest = images.amax((2, 3))[..., None].long()
    step = (values.shape[2] - counts.gather(2, highest)) // 255
    below = counts.cumsum(2, dtype=torch.int32) - counts
    flat = (step // 2 + below) // step.clamp(min=1)
    return torch.where(step > 0, flat, _levels(images))


# Tables that do not depend on the image: (grey levels (256,), arguments (b, 1)) -> new levels (b, 256)
_FIXED_TABLES: dict[Kernel, Callable[[Ints, Floats], npt.NDArray[np.generic]]] = {
    Kernel.INVERT: lambda levels, _: 255 - levels,
    # `ImageOps.posterize`: keep the upper bits. 8 and more keep the image, 0 and less give black.
    Kernel.POSTERIZE: lambda levels, bits: levels & (256 - (1 << (8 - bits.astype(np.int64)).clip(0, 8))),
    # `ImageOps.solarize`: invert the values from the threshold on (256: none).
    Kernel.SOLARIZE: lambda levels, threshold: np.where(levels < threshold, levels, 255 - levels),
    # timm's SolarizeAdd: add 0 to 128 to the values below 128.
    Kernel.SOLARIZE_ADD: lambda levels, add: np.where(levels < 128, levels + np.trunc(add), levels),
}


def fixed_tables(kernels: Ints, arguments: Floats) -> Floats:
    """Return the tables (b, 256) of operations that do not depend on the image; zeros for others."""
    tables = np.zeros((len(kernels), 256))
    for kernel, table in _FIXED_TABLES.items():
        rows = np.flatnonzero(kernels == kernel)
        tables[rows] = table(np.arange(256), arguments[rows, None])
    return tables


# Operations that replace grey levels: (images, fixed tables (b, 1, 256)) -> new levels (b, 3 or 1, 256) int32
TABLES: PerKernel = {
    Kernel.AUTO_CONTRAST: _auto_contrast,
    Kernel.EQUALIZE: _equalize,
    **dict.fromkeys(_FIXED_TABLES, lambda _, tables: tables),
}


def _mean_luma(images: Tensor, _: Tensor) -> Tensor:
    """Return the rounded mean of the grey image, for `ImageEnhance.Contrast`."""
    grey = luma(images)
    pixels = grey[0].numel()
    return (grey.sum((1, 2, 3), keepdim=True) + pixels // 2).div_(pixels, rounding_mode="floor").float()


def _smooth(images: Tensor, _: Tensor) -> Tensor:
    """Smooth by `ImageFilter.SMOOTH`, which does not change the border pixels, for `ImageEnhance.Sharpness`."""
    smooth = images.float()
    levels = images.short()
    rows = (levels[:, :, :-2] + levels[:, :, 1:-1]).add_(levels[:, :, 2:])
    box = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    weighted = box.add_(levels[:, :, 1:-1, 1:-1], alpha=4)  # 1 1 1 / 1 5 1 / 1 1 1
    smooth[:, :, 1:-1, 1:-1] = weighted.float().div_(13).add_(0.5).floor_()
    return smooth


# ImageEnhance's degenerate images: (images, arguments) -> (b, 3 or 1, H or 1, W or 1) float32
DEGENERATES: PerKernel = {
    Kernel.COLOR: lambda images, _: luma(images).float(),
    Kernel.CONTRAST: _mean_luma,
    Kernel.BRIGHTNESS: lambda images, _: torch.zeros(len(images), 1, 1, 1, device=images.device),
    Kernel.SHARPNESS: _smooth,
}


def remap(images: Tensor, kernels: Ints, fixed: Tensor) -> Tensor:
    """Apply operations of `TABLES` to images (b, 3, H, W) uint8. `kernels` (b,) on the host ascend; `fixed` (b, 256)
    are their `fixed_tables`."""
    tables = _joined(TABLES, images, kernels, fixed[:, None].int()).clamp(0, 255).to(torch.uint8)
    return tables.expand(-1, 3, -1).gather(2, images.flatten(2).long()).view_as(images)


def blend(images: Tensor, kernels: Ints, factors: Tensor) -> Tensor:
    """Apply operations of `DEGENERATES`, as `remap` does, by `PIL.Image.blend(degenerate, image, factor)`. Factor 0
    gives the degenerate image, 1 the image, and a larger one exaggerates."""
    degenerate = _joined(DEGENERATES, images, kernels, factors)
    return _truncated(images.float().sub_(degenerate).mul_(factors.float().view(-1, 1, 1, 1)).add_(degenerate))


def _joined(makers: PerKernel, images: Tensor, kernels: Ints, arguments: Tensor) -> Tensor:
    """Return in one tensor what each maker makes of the images of its kernel. Makers and kernels ascend."""
    runs = np.searchsorted(kernels, [(kernel, kernel + 1) for kernel in makers]).tolist()  # of rows: first, end
    made = [make(images[i:j], arguments[i:j]) for make, (i, j) in zip(makers.values(), runs, strict=True) if i < j]
    if len(made) == 1:  # always so on CPUs, which take large images one by one
        return made[0]
    shape = torch.broadcast_shapes(*(part.shape[1:] for part in made))
    return torch.cat([part.expand(-1, *shape) for part in made])


def warp(images: Tensor, filters: Ints, maps: Tensor, fill: Sequence[int], along: int = -1) -> Tensor:
    """Warp images (b, 3, H, W) uint8 as `PIL.Image.transform(size, AFFINE, map, resample, fillcolor)`, size kept.

    Args:
        filters: (b,) on the host, ascending: BILINEAR, or BICUBIC, which is PIL's and samples 4 x 4 pixels.
        maps: (b, 2, 3), output px -> input px, float64 where the device has it.
        fill: Red, green and blue of pixels whose centre is mapped to a place outside the image.
        along: 0 (x) or 1 (y) if every map moves lines of pixels along this axis, and by whole pixels along the other
            one. To interpolate along one axis only has the same result and takes half the time or a quarter.
    """
    first, fraction, outside = _places(maps, *images.shape[2:])
    # Both types hold differences of grey levels exactly. float32 is faster on a CPU, float16 smaller elsewhere.
    pixels = images.float() if images.device.type == "cpu" else images.half()
    framed = F.pad(pixels, (_FRAME,) * 4, mode="replicate")
    bilinear = int(np.searchsorted(filters, BICUBIC))
    levels = [
        _interpolated(framed[part], first[part], fraction[part], cubic, along)
        for part, cubic in ((slice(0, bilinear), False), (slice(bilinear, len(images)), True))
        if part.start < part.stop
    ]
    warped = (levels[0] if len(levels) == 1 else torch.cat(levels)).view(images.shape)
    for channel, level in zip(warped.unbind(1), fill, strict=True):
        channel.masked_fill_(outside, level)
    return warped


def _places(maps: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute to which places of the input the maps take the centres of the output's pixels. Return (b, 3, H * W)
    int64, the first of the 4 x 4 pixels around each place, as a position in an image with a frame; (b, 2, H * W) x and
    y of the place, 0..1, from the nearest pixel to the upper left towards the next one; (b, H, W) bool, whether it is
    outside the image."""
    m = maps[..., None, None]
    columns, rows = (torch.arange(0.5, side, dtype=maps.dtype, device=maps.device) for side in (width, height))
    points = (m[:, :, 0] * columns + m[:, :, 1] * rows[:, None]).add_(m[:, :, 2])  # (b, 2, H, W) x, y
    inside = points.clone()
    for axis, side in enumerate((width, height)):
        inside[:, axis].clamp_(0, side * (1 - torch.finfo(maps.dtype).eps / 2))  # the largest number below the side
    outside_x, outside_y = (inside != points).unbind(1)
    centred = inside.sub_(0.5)  # in places of pixels
    corner = centred.floor()  # the nearest pixel to the upper left; -1 is in the frame
    left, top = corner.int().unbind(1)
    line = width + 2 * _FRAME
    first = top.mul_(line).add_(left).add_((_FRAME - 1) * (line + 1))
    return first.long().flatten(1)[:, None].expand(-1, 3, -1), centred.sub_(corner).flatten(2), outside_x | outside_y


def _interpolated(framed: Tensor, first: Tensor, fraction: Tensor, cubic: bool, along: int) -> Tensor:
    """Interpolate the framed images at `_places`. Return grey levels (b, 3, H * W)."""
    reach = range(4) if cubic else range(1, 3)
    weights = _weights(fraction, cubic)
    weights_x, weights_y = ([weight[:, axis : axis + 1] for weight in weights] for axis in (0, 1))
    pixels = framed.flatten(2)
    line = framed.shape[3]
    if framed.device.type == "cpu":  # one plane at a time, which fits into its caches
        reach_x, reach_y = (range(1, 2) if along == other else reach for other in (1, 0))
        lines: Sequence[Tensor] = [
            _between([pixels[..., line * i + j :].gather(2, first) for j in reach_x], weights_x) for i in reach_y
        ]
    else:  # all at once: (b, 3, rows, columns, positions)
        windows = pixels.unfold(2, 3 * line + 4, 1).unfold(3, 4, line).permute(0, 1, 3, 4, 2)
        windows = windows[:, :, reach[0] : reach[-1] + 1, reach[0] : reach[-1] + 1]
        around = windows.gather(4, first[:, :, None, None].expand(*windows.shape[:4], -1))
        lines = _between(around.unbind(3), [weight[:, None] for weight in weights_x]).unbind(2)
    return _truncated(_between(lines, weights_y))


def _weights(fraction: Tensor, cubic: bool) -> Sequence[Tensor]:
    """Return the weights of `_between` for differences of pixels, at fractions 0..1 of the way between them."""
    if not cubic:
        # The result is often a whole number, and a float32 just below it would lose a level. So keep the doubles.
        return [fraction]
    t = fraction.float()
    rest = 1 - t
    far = t * rest
    return -far * rest, t + t * far, -far * t


def _between(pixels: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Interpolate between two pixels, or between the middle two of four by PIL's cubic convolution (a = -1). Return a
    single pixel as it is.

    The sums are of differences of pixels, so that equal pixels give exactly their value.
    """
    if len(pixels) == 1:
        return pixels[0]
    if len(pixels) == 2:
        first, second = pixels
        return (second - first).to(weights[0].dtype).mul_(weights[0]).add_(first)
    before, first, second, after = pixels
    total = (before - first).to(weights[0].dtype).mul_(weights[0]).addcmul_(second - first, weights[1])
    return total.addcmul_(after - first, weights[2]).add_(first)

"""Affine warps of batches of uint8 images, on any device, as `PIL.Image.transform` computes them.

Legend: B images of H x W pixels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.errors import UserError

CHOICE = "TLT_WARP"  # variable: "torch", the default, or "triton" (CUDA devices)
_FRAME = 2  # pixels around an image that bicubic sampling can reach


class Along(IntEnum):
    """Along which axis a map moves lines of pixels, each by a distance of its own and none stretched. The other axis
    it shifts by whole pixels; both may be mirrored."""

    BOTH = 0  # any other map
    X = 1
    Y = 2


class Warp(Protocol):
    """`warp`, or what computes the same."""

    def __call__(
        self, images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, along: Along = Along.BOTH
    ) -> Tensor: ...


def chosen_warp() -> Warp:
    """By torch's operations, or by the Triton program if the variable says so. Raises UserError."""
    choice = os.environ.get(CHOICE, "torch")
    if choice not in ("torch", "triton"):
        raise UserError(f"{CHOICE}={choice}: choose torch or triton")
    if choice == "torch":
        return warp
    try:
        from tlt.data.augment import warp_triton
    except ImportError:
        raise UserError(f"{CHOICE}=triton: Triton is not installed; leave the variable out") from None
    return warp_triton.warp


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, along: Along = Along.BOTH) -> Tensor:
    """`PIL.Image.transform(size, AFFINE, map, resample, fillcolor)` for a batch, size kept.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, 2, 3), output px -> input px, float64 where the device has it.
        fill: Red, green, blue, shown where the mapped centre of a pixel lies outside the image.
        cubic: Bicubic (PIL's, 4 x 4 pixels), else bilinear.
        along: Not BOTH: each of the maps is such a one. Takes a third of the time; mirrored images are what
            `PIL.ImageOps.mirror` or `flip` and the unmirrored map make of them.

    Returns:
        (B, 3, H, W) uint8.
    """
    if along == Along.BOTH:
        values, outside = _sample(images, maps, cubic)
    else:
        values, outside = _move_lines(images, maps, cubic, 0 if along == Along.X else 1)
    levels = values.clamp_(0, 255).short().to(torch.uint8)  # truncated, as PIL
    outside = outside.to(torch.uint8)
    for channel, colour in zip(levels.unbind(1), fill, strict=True):
        # The colour where outside, in three quick passes on a CPU: there `torch.where` takes longer.
        channel.bitwise_xor_((channel ^ colour).bitwise_and_(outside))
    return levels


def _sample(images: Tensor, maps: Tensor, cubic: bool) -> tuple[Tensor, Tensor]:
    """Values (B, 3, H, W), and where they lie outside of the image, (B, H, W): see `_outside`."""
    height, width = images.shape[2:]
    m = maps[..., None, None]
    columns, rows = _centres(width, maps), _centres(height, maps)[:, None]
    x, y = (m[:, axis, 0] * columns + m[:, axis, 1] * rows + m[:, axis, 2] for axis in (0, 1))
    outside = _outside(x.floor().int(), width) | _outside(y.floor().int(), height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    # With a frame of repeated edges only the first of the 4 x 4 pixels around has to be clamped.
    row_length = width + 2 * _FRAME
    first = (top.int().clamp_(-1, height - 1) + 1) * row_length + (left.int().clamp_(-1, width - 1) + 1)
    index = _of_channels(first)
    table = F.pad(images.float(), (_FRAME,) * 4, mode="replicate").flatten(2)
    reach = range(4) if cubic else range(1, 3)

    weights_x, weights_y = _weights(x - left, cubic), _weights(y - top, cubic)

    def row(number: int) -> Tensor:
        start = number * row_length
        return _blend([table[:, :, start + i :].gather(2, index).view(images.shape) for i in reach], weights_x)

    return _blend([row(number) for number in reach], weights_y), outside


def _move_lines(images: Tensor, maps: Tensor, cubic: bool, axis: int) -> tuple[Tensor, Tensor]:
    """As `_sample`, for maps that move lines along an axis (0 is x). Every pixel of a line is read once: neighbours in
    the output are blended of neighbours in the input."""
    height, width = images.shape[2:]
    length, number = (width, height) if axis == 0 else (height, width)  # of the lines

    def along(values: Tensor) -> Tensor:  # (length,) -> (1, W) or (H, 1)
        return values if axis == 0 else values[:, None]

    def across(values: Tensor) -> Tensor:  # (B, number) -> (B, H, 1) or (B, 1, W)
        return values.unsqueeze(2 - axis)

    sign, shear, shift = maps[:, axis, axis, None], maps[:, axis, 1 - axis, None], maps[:, axis, 2, None]
    # Of an image that is mirrored first, as PIL's is: then all maps go forwards.
    shear, shift = shear * sign, torch.where(sign > 0, shift, length - shift)
    lines = _centres(number, maps)
    distance = shear * lines + shift  # (B, number)
    first = distance.floor()
    fraction = across(distance - first)
    if not cubic:  # rounded pixel by pixel, as `_sample` does it
        x = along(_centres(length, maps)) + across(shear * lines) + across(shift)
        fraction = x - 0.5 - (across(first) + along(_count(length, maps)))
    line = (maps[:, 1 - axis, 1 - axis, None] * lines + maps[:, 1 - axis, 2, None]).floor().int()
    ints = _count(length + 3, line)
    outside = _outside(along(ints[:length]) + across((distance + 0.5).floor().int()), length)
    outside = outside | across(_outside(line, number))
    reach = range(-1, 3) if cubic else range(2)
    position = across(first.int() + reach[0]) + along(ints[: length + len(reach) - 1])
    position = position.clamp_(0, length - 1) * across(sign.int()) + across((sign < 0).int() * (length - 1))
    line = across(line.clamp_(0, number - 1))
    index = position + line * width if axis == 0 else position * width + line
    read = images.float().flatten(2).gather(2, _of_channels(index)).view(-1, 3, *index.shape[1:])
    return _blend([read.narrow(3 - axis, i, length) for i in range(len(reach))], _weights(fraction, cubic)), outside


def _count(number: int, like: Tensor) -> Tensor:
    return torch.arange(number, dtype=like.dtype, device=like.device)


def _centres(number: int, maps: Tensor) -> Tensor:
    """Output coordinates of the pixels of a side (number,)."""
    return _count(number, maps) + 0.5


def _outside(pixels: Tensor, side: int) -> Tensor:
    """-1 (all bits) where int32 pixels are not in 0..side - 1, else 0: on a CPU a comparison takes longer."""
    return (pixels | (side - 1 - pixels)) >> 31


def _of_channels(index: Tensor) -> Tensor:
    """The same place in every channel: (B, h, w) int32 -> (B, 3, h * w) int64."""
    return index.long().flatten(1)[:, None].expand(-1, 3, -1)


def _weights(fraction: Tensor, cubic: bool) -> tuple[Tensor, ...]:
    """By what `_blend` multiplies differences of neighbours at a point between them; `fraction` (B, h, w) in 0..1."""
    t = fraction[:, None]
    if not cubic:
        # The result is often a whole number, where a float32 just below would lose a level: keep the doubles.
        return (t,)
    t = t.float()
    rest = 1 - t
    far = t * rest
    return -far * rest, t + t * far, -far * t


def _blend(pixels: Sequence[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    """Between two neighbours, or the middle two of four: cubic convolution with a = -1, which is PIL's for transforms.

    By differences of pixels: where all are the same, so is the result, to the last bit.
    """
    if len(pixels) == 2:
        first, second = pixels
        return (second - first).to(weights[0].dtype).mul_(weights[0]).add_(first)
    before, first, second, after = pixels
    total = (before - first).mul_(weights[0]).addcmul_(second - first, weights[1])
    return total.addcmul_(after - first, weights[2]).add_(first)

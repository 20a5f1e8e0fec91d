"""Affine warps of batches of uint8 images, on any device, as `PIL.Image.transform` computes them.

Legend: B images of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

_FRAME = 2  # pixels around an image that bicubic sampling can reach


class LineAxis(IntEnum):
    """The axis along which a map moves lines of pixels. Along the other axis it shifts by whole pixels or mirrors, so
    that nothing is interpolated there: a shear or a translation needs half the work of a rotation, or a quarter."""

    BOTH = 0  # any other map
    X = 1
    Y = 2


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, axis: LineAxis = LineAxis.BOTH) -> Tensor:
    """`PIL.Image.transform(size, AFFINE, map, resample, fillcolor)` for a batch, size kept.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, 2, 3), output px -> input px, float64 where the device has it.
        fill: Red, green, blue, shown where the mapped centre of a pixel lies outside the image.
        cubic: Bicubic (PIL's, 4 x 4 pixels), else bilinear.
        axis: X or Y if every map moves lines along that axis: this saves time and changes no result.

    Returns:
        (B, 3, H, W) uint8.
    """
    height, width = images.shape[2:]
    m = maps[..., None, None]
    columns, rows = (torch.arange(side, dtype=maps.dtype, device=maps.device) + 0.5 for side in (width, height))
    rows = rows[:, None]
    x = m[:, 0, 0] * columns + (0 if axis == LineAxis.Y else m[:, 0, 1] * rows) + m[:, 0, 2]
    y = (0 if axis == LineAxis.X else m[:, 1, 0] * columns) + m[:, 1, 1] * rows + m[:, 1, 2]
    outside = _outside(x.floor().int(), width) | _outside(y.floor().int(), height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    # With a frame of repeated edges only the first of the 4 x 4 pixels around has to be clamped.
    row_length = width + 2 * _FRAME
    first = (top.int().clamp_(-1, height - 1) + 1) * row_length + (left.int().clamp_(-1, width - 1) + 1)
    index = first.long().flatten(1)[:, None].expand(-1, 3, -1)  # the same pixel of every channel
    table = F.pad(images.float(), (_FRAME,) * 4, mode="replicate").flatten(2)
    reach, middle = range(4) if cubic else range(1, 3), range(1, 2)
    reach_x, reach_y = middle if axis == LineAxis.Y else reach, middle if axis == LineAxis.X else reach
    weights_x, weights_y = _weights(x - left, len(reach_x)), _weights(y - top, len(reach_y))

    def row(number: int) -> Tensor:
        start = number * row_length
        return _blend([table[:, :, start + i :].gather(2, index).view(images.shape) for i in reach_x], weights_x)

    levels = _blend([row(number) for number in reach_y], weights_y).clamp_(0, 255).short().to(torch.uint8)  # truncated
    outside = outside.to(torch.uint8)
    for channel, colour in zip(levels.unbind(1), fill, strict=True):
        # The colour where outside, in three quick passes on a CPU: there `torch.where` takes longer.
        channel.bitwise_xor_((channel ^ colour).bitwise_and_(outside))
    return levels


def _outside(pixels: Tensor, side: int) -> Tensor:
    """-1 (all bits) where int32 pixels are not in 0..side - 1, else 0: on a CPU a comparison takes longer."""
    return (pixels | (side - 1 - pixels)) >> 31


def _weights(fraction: Tensor, pixels: int) -> tuple[Tensor, ...]:
    """By what `_blend` multiplies differences of `pixels` neighbours at a point between them; `fraction` in 0..1 is
    (B, H, W), or has sides of 1."""
    t = fraction[:, None]
    if pixels < 4:
        # The result is often a whole number, where a float32 just below would lose a level: keep the doubles.
        return (t,)
    t = t.float()
    rest = 1 - t
    far = t * rest
    return -far * rest, t + t * far, -far * t


def _blend(pixels: Sequence[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
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

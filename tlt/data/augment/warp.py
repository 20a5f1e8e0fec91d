"""Affine warps of batches of uint8 images, on any device, as `PIL.Image.transform` computes them.

Legend: B images of H x W pixels, S = W + 4 the width of an image with its frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.augment import on_device

Blend: TypeAlias = Callable[[Sequence[Tensor], Tensor], Tensor]

_FRAME = 2  # pixels around an image that bicubic sampling can reach


class Along(IntEnum):
    """Which axes a map interpolates along; the other one it shifts or mirrors by whole pixels."""

    BOTH = 0
    X = 1
    Y = 2


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, along: Along = Along.BOTH) -> Tensor:
    """`PIL.Image.transform(size, AFFINE, map, resample, fillcolor)` for a batch, size kept.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, 2, 3), output px -> input px, float64 where the device has it.
        fill: Red, green, blue, shown where the mapped centre of a pixel lies outside the image.
        cubic: Bicubic (PIL's, 4 x 4 pixels), else bilinear.
        along: Not BOTH: `maps` takes whole pixels to whole pixels along the other axis, and that axis alone decides
            where. Gives what BOTH gives, for a fraction of the work.
    """
    height, width = images.shape[2:]
    x, y = _mapped_centres(maps, (height, width), along)
    inside = ((x >= 0) & (x < width)) & ((y >= 0) & (y < height))
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    # Sums of two pixels are often whole numbers, where a float32 just below would lose a level: keep the doubles.
    precision = torch.float32 if cubic else x.dtype
    reach = range(-1, 3) if cubic else range(2)
    columns, rows = (reach if along != Along.Y else range(1)), (reach if along != Along.X else range(1))
    row_length = width + 2 * _FRAME
    index = ((top + 1) * row_length + (left + 1)).long()  # of the first of the 4 x 4 pixels around
    index = torch.where(inside, index, (height + 2 * _FRAME) * row_length).flatten(1)
    table = _framed(images, fill)
    dx, dy = ((point - corner).to(precision)[:, None] for point, corner in ((x, left), (y, top)))
    blend = _cubic if cubic else _linear
    lines = []
    for row in rows:
        taps = (table[:, (row + 1) * row_length + column + 1 :].gather(1, index) for column in columns)
        pixels = [[part.to(precision) for part in _unpacked(tap.view(inside.shape))] for tap in taps]
        lines.append([blend(values, dx) for values in zip(*pixels, strict=True)])
    levels = torch.cat([blend(values, dy) for values in zip(*lines, strict=True)], dim=1)
    return levels.clamp_(0, 255).short().to(torch.uint8)  # truncated, as PIL


def _mapped_centres(maps: Tensor, size: tuple[int, int], along: Along) -> tuple[Tensor, Tensor]:
    """Input coordinates x, y of the output pixels' centres (B, H, W), or less where one of its axes decides."""
    height, width = size
    columns = torch.arange(width, dtype=maps.dtype, device=maps.device) + 0.5
    rows = torch.arange(height, dtype=maps.dtype, device=maps.device)[:, None] + 0.5
    m = maps[..., None, None]
    x = m[:, 0, 0] * columns + m[:, 0, 1] * rows if along != Along.Y else m[:, 0, 0] * columns
    y = m[:, 1, 0] * columns + m[:, 1, 1] * rows if along != Along.X else m[:, 1, 1] * rows
    return x + m[:, 0, 2], y + m[:, 1, 2]


def _framed(images: Tensor, fill: Sequence[int]) -> Tensor:
    """Pixels packed into one int32 each, with their edges repeated and four rows of `fill` below: (B, (H + 8) * S).

    With the frame no coordinate needs to be clamped, and what lies outside reads the last rows.
    """
    red, green, blue = images.int().unbind(1)
    packed = (red | green << 8 | blue << 16).float()  # 24 bits: exact, and floats are what can be padded
    framed = F.pad(packed, (_FRAME,) * 4, mode="replicate")
    colour = fill[0] | fill[1] << 8 | fill[2] << 16
    return F.pad(framed, (0, 0, 0, 2 * _FRAME), value=float(colour)).int().flatten(1)


def _unpacked(pixels: Tensor) -> tuple[Tensor, ...]:
    """Red, green and blue of packed pixels (B, H, W), int32: in one (B, 3, H, W) or three (B, 1, H, W)."""
    pixels = pixels[:, None]
    if on_device.in_small_pieces(pixels.device):
        return pixels & 255, (pixels >> 8) & 255, pixels >> 16
    return ((pixels >> torch.arange(0, 24, 8, dtype=torch.int32, device=pixels.device).view(3, 1, 1)) & 255,)


# Both work in place, on as little memory as they can.
def _linear(values: Sequence[Tensor], t: Tensor) -> Tensor:
    """Between two neighbours; of a single value, that."""
    if len(values) == 1:
        return values[0]
    first, second = values
    return (second - first).mul_(t).add_(first)


def _cubic(values: Sequence[Tensor], t: Tensor) -> Tensor:
    """Between the middle two of four neighbours: cubic convolution with a = -1, which is PIL's for transforms."""
    if len(values) == 1:
        return values[0]
    p, q, r, s = values
    square, cube = (p - q).mul_(2).add_(r).sub_(s), (q - p).sub_(r).add_(s)
    return cube.mul_(t).add_(square).mul_(t).add_(r - p).mul_(t).add_(q)

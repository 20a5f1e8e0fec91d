"""The warp of `tlt.data.augment.warp` as one Triton program, for CUDA devices. Imports Triton.

    images, out   (B, 3, H, W) uint8, contiguous
    maps          (B, 2, 3) float64, output px -> input px

A program makes BLOCK pixels of an image: where they lie is computed once for the three channels. The results are those
of torch's operations: doubles where these have doubles, differences of pixels in the same order, no fused products.
"""
# mypy: ignore-errors

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.errors import UserError

BLOCK, WARPS = 256, 4  # pixels and warps of a program
SIZES = ("height", "width", "red", "green", "blue")  # one compiled program serves all of them


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, along: int = 0) -> Tensor:
    """As `tlt.data.augment.warp.warp`; lines move as all else. Raises UserError: no CUDA device."""
    if images.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"TLT_WARP=triton needs a CUDA device, not {images.device}: leave the variable out")
    images, maps = images.contiguous(), maps.contiguous()
    out = torch.empty_like(images)
    height, width = images.shape[2:]
    grid = (-(-height * width // BLOCK), len(images))
    if out.numel():
        with torch.cuda.device_of(images):
            warp_pixels[grid](
                images, maps, out, height, width, *fill,
                CUBIC=cubic, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


@triton.jit
def between_two(first, second, t):
    """In doubles: the result is often a whole number."""
    return (second - first).to(tl.float64) * t + first


@triton.jit
def between_four(before, first, second, after, w0, w1, w2):
    """PIL's cubic convolution by differences of neighbours, in float32."""
    return (before - first) * w0 + (second - first) * w1 + (after - first) * w2 + first


@triton.jit
def cubic_weights(t):
    """Of the three differences, for a point t after the second of four neighbours."""
    t = t.to(tl.float32)
    far = t * (1 - t)
    return -far * (1 - t), t + t * far, -far * t


@triton.jit
def level(plane, row, column, height, width):
    """Grey levels of pixels (BLOCK,) float32, of the nearest one where there is none."""
    row = tl.minimum(tl.maximum(row, 0), height - 1)
    column = tl.minimum(tl.maximum(column, 0), width - 1)
    return tl.load(plane + row * width + column).to(tl.float32)


@triton.jit
def cubic_row(plane, row, left, height, width, w0, w1, w2):
    """Blends along a row of pixels."""
    return between_four(
        level(plane, row, left - 1, height, width),
        level(plane, row, left, height, width),
        level(plane, row, left + 1, height, width),
        level(plane, row, left + 2, height, width),
        w0,
        w1,
        w2,
    )


@triton.jit(do_not_specialize=SIZES)
def warp_pixels(images, maps, out, height, width, red, green, blue, CUBIC: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK pixels of image `program_id(1)`."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pixel < height * width
    row = pixel // width
    column = (pixel - row * width).to(tl.float64) + 0.5
    m = maps + image * 6
    x = tl.load(m) * column + tl.load(m + 1) * (row.to(tl.float64) + 0.5) + tl.load(m + 2)
    y = tl.load(m + 3) * column + tl.load(m + 4) * (row.to(tl.float64) + 0.5) + tl.load(m + 5)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x = tl.where(inside, x - 0.5, 0.0)
    y = tl.where(inside, y - 0.5, 0.0)
    left = tl.floor(x)
    top = tl.floor(y)
    dx = x - left
    dy = y - top
    left = left.to(tl.int32)
    top = top.to(tl.int32)
    start = image.to(tl.int64) * 3 * height * width
    for channel in tl.static_range(3):
        plane = images + start + channel * height * width
        if CUBIC:
            a0, a1, a2 = cubic_weights(dx)
            d0, d1, d2 = cubic_weights(dy)
            value = between_four(
                cubic_row(plane, top - 1, left, height, width, a0, a1, a2),
                cubic_row(plane, top, left, height, width, a0, a1, a2),
                cubic_row(plane, top + 1, left, height, width, a0, a1, a2),
                cubic_row(plane, top + 2, left, height, width, a0, a1, a2),
                d0,
                d1,
                d2,
            )
        else:
            upper = between_two(level(plane, top, left, height, width), level(plane, top, left + 1, height, width), dx)
            lower = between_two(
                level(plane, top + 1, left, height, width), level(plane, top + 1, left + 1, height, width), dx
            )
            value = between_two(upper, lower, dy)
        whole = tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)  # truncated, as PIL
        colour = red if channel == 0 else (green if channel == 1 else blue)
        whole = tl.where(inside, whole, colour)
        tl.store(out + start + channel * height * width + pixel, whole.to(tl.uint8), mask=mask)

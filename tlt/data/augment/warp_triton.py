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


def warp(images: Tensor, maps: Tensor, fill: Sequence[int], *, cubic: bool, axis: int = 0) -> Tensor:
    """As `tlt.data.augment.warp.warp`; every axis is interpolated. Raises UserError: no CUDA device."""
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
def blend(before, first, second, after, t, CUBIC: tl.constexpr):
    """A value t after the second of four neighbours: PIL's cubic convolution in float32, or linear in doubles, because
    the result is often a whole number."""
    if CUBIC:
        t = t.to(tl.float32)
        far = t * (1 - t)
        value = (before - first) * (-far * (1 - t)) + (second - first) * (t + t * far)
        value = value + (after - first) * (-far * t) + first
    else:
        value = (second - first).to(tl.float64) * t + first
    return value


@triton.jit
def level(plane, row, column, height, width):
    """Grey levels of pixels (BLOCK,) float32, of the nearest one where there is none."""
    row = tl.minimum(tl.maximum(row, 0), height - 1)
    column = tl.minimum(tl.maximum(column, 0), width - 1)
    return tl.load(plane + row * width + column).to(tl.float32)


@triton.jit
def blend_row(plane, row, left, t, height, width, CUBIC: tl.constexpr):
    """The value t after column `left` of a row."""
    first, second = level(plane, row, left, height, width), level(plane, row, left + 1, height, width)
    before, after = first, second
    if CUBIC:
        before, after = level(plane, row, left - 1, height, width), level(plane, row, left + 2, height, width)
    return blend(before, first, second, after, t, CUBIC)


@triton.jit(do_not_specialize=SIZES)
def warp_pixels(images, maps, out, height, width, red, green, blue, CUBIC: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK pixels of image `program_id(1)`."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pixel < height * width
    row = (pixel // width).to(tl.float64) + 0.5
    column = (pixel % width).to(tl.float64) + 0.5
    m = maps + image * 6
    x = tl.load(m) * column + tl.load(m + 1) * row + tl.load(m + 2)
    y = tl.load(m + 3) * column + tl.load(m + 4) * row + tl.load(m + 5)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x = tl.where(inside, x - 0.5, 0.0)
    y = tl.where(inside, y - 0.5, 0.0)
    left, top = tl.floor(x).to(tl.int32), tl.floor(y).to(tl.int32)
    across, down = x - tl.floor(x), y - tl.floor(y)
    start = image.to(tl.int64) * 3 * height * width
    for channel in tl.static_range(3):
        plane = images + start + channel * height * width
        first = blend_row(plane, top, left, across, height, width, CUBIC)
        second = blend_row(plane, top + 1, left, across, height, width, CUBIC)
        before, after = first, second
        if CUBIC:
            before = blend_row(plane, top - 1, left, across, height, width, CUBIC)
            after = blend_row(plane, top + 2, left, across, height, width, CUBIC)
        value = blend(before, first, second, after, down, CUBIC)
        whole = tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)  # truncated, as PIL
        colour = red if channel == 0 else (green if channel == 1 else blue)
        whole = tl.where(inside, whole, colour)
        tl.store(out + start + channel * height * width + pixel, whole.to(tl.uint8), mask=mask)

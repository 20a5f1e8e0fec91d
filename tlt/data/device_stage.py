"""The part of the augmentation that runs on the training device: colour layers, one warp, normalisation, erasing.

The plan stays on the host, so which rows need what is known without asking the device: row numbers and arguments go
over, and nothing comes back. A sample's result does not depend on the other rows of its batch.

Legend: B images of H x W pixels, b rows of them, P erased pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tlt.data.photometric import OPERATIONS, precise_dtype
from tlt.data.plan import BICUBIC, AugmentConfig, Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Blend: TypeAlias = Callable[[Sequence[Tensor], Tensor], Tensor]


class Step(IntEnum):
    """Geometric steps; their codes continue those of `rand_augment.Kernel`."""

    FLIP_X = 100
    FLIP_Y = 101
    FLIP_XY = 102
    WARP_BILINEAR = 103
    WARP_BICUBIC = 104


_FLIPS: dict[int, tuple[int, ...]] = {int(Step.FLIP_X): (3,), int(Step.FLIP_Y): (2,), int(Step.FLIP_XY): (2, 3)}
_WARPS = (int(Step.WARP_BILINEAR), int(Step.WARP_BICUBIC))


class Work(NamedTuple):
    """One step on some rows of the batch."""

    code: int
    rows: Ints  # (b,)
    arguments: Floats  # (b, 1) of a colour layer, (b, 6) of a warp, (b, 0) of a flip


def schedule(plan: Plan) -> list[Work]:
    """The steps of a plan in the order that gives each sample its layers and its warp in the plan's order."""
    position = np.arange(plan.op.shape[1])
    early = position < plan.warp_at[:, None]
    return [*_colour_work(plan, early), *_warp_work(plan), *_colour_work(plan, ~early)]


def _colour_work(plan: Plan, when: npt.NDArray[np.bool_]) -> list[Work]:
    """Layer by layer, one step per kernel, of the layers that `when` (B, L) marks."""
    work = []
    for layer in range(plan.op.shape[1]):
        codes = np.where(when[:, layer], plan.op[:, layer], 0)
        for code in np.unique(codes[codes > 0]):
            rows = np.flatnonzero(codes == code)
            work.append(Work(int(code), rows, plan.argument[rows, layer, None]))
    return work


def _warp_work(plan: Plan) -> list[Work]:
    """Flips alone are exact and cheap; every other map that isn't the identity is a warp."""
    height, width = plan.size
    kind = np.where(plan.warp_interpolation == BICUBIC, Step.WARP_BICUBIC, Step.WARP_BILINEAR)
    for flip, (x, y) in {0: (1, 1), Step.FLIP_X: (-1, 1), Step.FLIP_Y: (1, -1), Step.FLIP_XY: (-1, -1)}.items():
        exact = np.array([[x, 0, width * (x < 0)], [0, y, height * (y < 0)]])
        # Operations that cancel out leave rounding behind, in pixels.
        kind[np.all(np.abs(plan.warp - exact) < 1e-9, axis=(1, 2))] = flip
    work = []
    for code in np.unique(kind[kind > 0]):
        rows = np.flatnonzero(kind == code)
        arguments = plan.warp[rows].reshape(-1, 6) if code in _WARPS else np.zeros((len(rows), 0))
        work.append(Work(int(code), rows, arguments))
    return work


def _send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it; doubles where it has them."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        tensor = tensor.to(precise_dtype(device))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _run_schedule(images: Tensor, work: list[Work], fill: Tensor) -> Tensor:
    """Apply the steps to a copy of the images (B, 3, H, W) uint8."""
    if not work:
        return images
    images = images.clone()
    all_rows = _send(np.concatenate([step.rows for step in work]), images.device)
    all_arguments = _send(np.concatenate([step.arguments.ravel() for step in work]), images.device)
    rows_of = all_rows.split([len(step.rows) for step in work])
    arguments_of = all_arguments.split([step.arguments.size for step in work])
    for step, rows, arguments in zip(work, rows_of, arguments_of, strict=True):
        images.index_copy_(0, rows, _run_step(step.code, images.index_select(0, rows), arguments, fill))
    return images


def _run_step(code: int, images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    if code in _FLIPS:
        return images.flip(_FLIPS[code])
    if code in _WARPS:
        return warp(images, arguments.view(-1, 2, 3), fill, cubic=code == Step.WARP_BICUBIC)
    return OPERATIONS[code](images, arguments.float())


def _linear(values: Sequence[Tensor], t: Tensor) -> Tensor:
    """Between two neighbours."""
    first, second = values
    return first + t * (second - first)


def _cubic(values: Sequence[Tensor], t: Tensor) -> Tensor:
    """Between the middle two of four neighbours: cubic convolution with a = -1, which is PIL's for transforms."""
    p, q, r, s = values
    return q + t * (r - p + t * (2 * (p - q) + r - s + t * (q - p - r + s)))


def warp(images: Tensor, maps: Tensor, fill: Tensor, *, cubic: bool) -> Tensor:
    """`PIL.Image.transform(size, AFFINE, map, resample, fillcolor)` for a batch, size kept.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, 2, 3), output px -> input px, float64 where the device has it.
        fill: (3,) uint8, shown where the mapped centre of a pixel lies outside the image.
        cubic: Bicubic (PIL's, 4 x 4 pixels), else bilinear.
    """
    height, width = images.shape[2:]
    columns = torch.arange(width, dtype=maps.dtype, device=maps.device) + 0.5
    rows = torch.arange(height, dtype=maps.dtype, device=maps.device)[:, None] + 0.5
    m = maps[..., None, None]
    x, y = (m[:, k, 0] * columns + m[:, k, 1] * rows + m[:, k, 2] for k in (0, 1))  # (B, H, W)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    sampled = _sample_cubic(images, x - 0.5, y - 0.5) if cubic else _sample_linear(images, x - 0.5, y - 0.5)
    levels = sampled.clamp(0, 255).to(torch.uint8)  # truncated, as PIL
    return torch.where(inside[:, None], levels, fill.view(1, 3, 1, 1))


def _sample_linear(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    # Sums of two pixels are often whole numbers, where a float32 just below would lose a level: keep the doubles.
    return _sample(images, x, y, _linear, range(2), x.dtype)


def _sample_cubic(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _sample(images, x, y, _cubic, range(-1, 3), torch.float32)


def _sample(images: Tensor, x: Tensor, y: Tensor, blend: Blend, offsets: range, precision: torch.dtype) -> Tensor:
    """Blend the pixels at `offsets` around the pixel indices x, y (B, H, W) -> (B, 3, H, W); edges repeat."""
    height, width = images.shape[2:]
    left, top = x.floor(), y.floor()
    dx, dy = (x - left).to(precision), (y - top).to(precision)
    columns = [(left + k).clamp(0, width - 1).long() for k in offsets]
    rows = [(top + k).clamp(0, height - 1).long() * width for k in offsets]
    # One gather of packed pixels costs a tenth of three gathers of planes.
    red, green, blue = images.int().unbind(1)
    packed = (red | green << 8 | blue << 16).flatten(1)
    taps = [[packed.gather(1, (row + column).flatten(1)).view_as(row) for column in columns] for row in rows]
    channels = []
    for shift in (0, 8, 16):
        lines = [blend([((tap >> shift) & 255).to(precision) for tap in line], dx) for line in taps]
        channels.append(blend(lines, dy))
    return torch.stack(channels, dim=1)


def _signed(word: int) -> int:
    """A 64-bit word as torch's signed integer."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def hash_words(keys: Tensor, words: Tensor) -> Tensor:
    """`tlt.data.counter`'s hash of one more word, same bits: int64 keys and words (broadcast) -> int64."""
    z = keys + (words + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def normal_noise(keys: Tensor, words: Tensor) -> Tensor:
    """Standard normal float32, a function of (key, word) alone (Box-Muller on the two ends of the hash)."""
    bits = hash_words(keys, words)
    radius = torch.sqrt(-2 * torch.log((_shifted(bits, 40).float() + 0.5) * 2.0**-24))
    return radius * torch.cos((bits & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24))


def _erase(images: Tensor, plan: Plan, mode: str) -> Tensor:
    """Fill the boxes of the plan in normalised images (B, 3, H, W) float32, in place; later boxes win."""
    for box in range(plan.erase.shape[1]):
        area = plan.erase[:, box, 2] * plan.erase[:, box, 3]
        rows = np.flatnonzero(area)
        if len(rows):
            _erase_boxes(images, plan.erase[rows, box], rows, plan.erase_key[rows], mode, box)
    return images


def _erase_boxes(images: Tensor, boxes: Ints, rows: Ints, keys: npt.NDArray[np.uint64], mode: str, number: int) -> None:
    """Fill one box in each of some images; `boxes` (b, 4) top, left, h, w."""
    height, width = images.shape[2:]
    area = boxes[:, 2] * boxes[:, 3]
    start = np.cumsum(area) - area
    table = np.column_stack([boxes[:, 0], boxes[:, 1], boxes[:, 3], start, rows, keys.view(np.int64), area])
    table_on_device = _send(table, images.device)
    total = int(area.sum())
    entries = table_on_device[:, :6].repeat_interleave(table_on_device[:, 6], dim=0, output_size=total)  # (P, 6)
    top, left, box_width, first, row, key = entries.unbind(1)
    local = torch.arange(total, device=images.device) - first
    pixel = (top + local // box_width) * width + left + local % box_width  # (P,) y * W + x
    channel = torch.arange(3, device=images.device)[:, None]  # (3, 1)
    if mode == "pixel":
        values = normal_noise(key, channel * (height * width) + pixel)
    elif mode == "rand":
        values = normal_noise(key, (channel + 3 * number).expand(3, total))
    else:
        values = images.new_zeros(3, total)
    images[row, channel, pixel // width, pixel % width] = values


class EvalStage(nn.Module):
    """uint8 images (B, 3, H, W) -> float32, (x / 255 - mean) / std."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(tuple(mean)).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(tuple(std)).view(1, -1, 1, 1), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return images.float().div_(255).sub_(self.mean).div_(self.std)


class DeviceStage(EvalStage):
    """The training images of a batch, from what the backend resized to what the model sees.

    Colour layers and the warp work on uint8, as PIL; erasing follows normalisation, as in timm.
    """

    fill: Tensor

    def __init__(self, config: AugmentConfig, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean, std)
        self.remode = config.remode
        self.register_buffer("fill", torch.tensor(config.fill, dtype=torch.uint8), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, plan: Plan) -> Tensor:  # type: ignore[override]
        """Images (B, 3, H, W) uint8, resized crops on the device, and their plan on the host -> (B, 3, H, W) float32.

        Raises:
            ValueError: The images aren't those of the plan.
        """
        if images.shape != (len(plan), 3, *plan.size) or images.dtype != torch.uint8:
            raise ValueError(f"{len(plan)} planned images of 3 x {plan.size} uint8, got {images.shape} {images.dtype}")
        images = _run_schedule(images, schedule(plan), self.fill)
        return _erase(super().forward(images), plan, self.remode)

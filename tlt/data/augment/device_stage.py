"""The part of the augmentation that runs on the training device: colour layers, one warp, normalisation, erasing.

The plan stays on the host, so which rows need what is known without asking the device: row numbers and arguments go
over, and nothing comes back. A sample's result does not depend on the other rows of its batch.

Legend: B images of H x W pixels, b rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlt import geometry
from tlt.data.augment.counter import normal_noise
from tlt.data.augment.operations import OPERATIONS, luma, to_device, warp
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Plan
from tlt.errors import in_range
from tlt.io.chunks import image_chunks
from tlt.models.layers import Constants

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Work(NamedTuple):
    """One operation on some rows of the batch."""

    run: Callable[[Tensor, Tensor], Tensor]  # images (b, 3, H, W) uint8, arguments (b, 2, 3) -> new images
    rows: Ints  # (b,)
    arguments: Floats  # (b, 2, 3) the map of a warp; of a colour operation the first is used, of a flip none


def _colour_work(plan: Plan, when: Bools) -> Iterator[Work]:
    """The layers that `when` (B, L) marks, one after the other."""
    for layer, code in product(range(plan.op.shape[1]), OPERATIONS):
        rows = np.flatnonzero(when[:, layer] & (plan.op[:, layer] == code))
        arguments = np.broadcast_to(plan.argument[rows, layer, None, None], (len(rows), 2, 3))
        yield Work(partial(_colour, code=code), rows, arguments)


def _warp_work(plan: Plan, fill: Sequence[int]) -> Iterator[Work]:
    """Flips alone are exact and cheap; every other map that isn't the identity is a warp.

    Where lines are moved, a mirrored image is flipped first, as PIL's is, and moved as if it had not been mirrored.
    """
    height, width = plan.size
    mirrored = plan.warp[:, [0, 1], [0, 1]] < 0  # (B, 2) left and right, top and bottom
    flips = geometry.compose(geometry.vflip(mirrored[:, 1], height), geometry.hflip(mirrored[:, 0], width))
    # Operations that cancel out leave rounding behind, in pixels.
    only_flipped = np.all(np.abs(plan.warp - flips) < 1e-9, axis=(1, 2))
    along = moved_along(plan.warp)
    flipped = mirrored & (only_flipped | (along >= 0))[:, None]
    maps = np.where(flipped.any(1)[:, None, None], geometry.compose(plan.warp, flips), plan.warp)
    for side, dimension in enumerate((3, 2)):
        rows = np.flatnonzero(flipped[:, side])
        yield Work(partial(_flip, dimension=dimension), rows, maps[rows])
    for filter_, axis in product((BILINEAR, BICUBIC), (0, 1, -1)):
        rows = np.flatnonzero(~only_flipped & (plan.warp_interpolation == filter_) & (along == axis))
        yield Work(partial(warp, fill=fill, cubic=filter_ == BICUBIC, along=axis), rows, maps[rows])


def _colour(images: Tensor, arguments: Tensor, code: int) -> Tensor:
    return OPERATIONS[code](images, arguments[:, 0, 0].float())


def _flip(images: Tensor, _: Tensor, dimension: int) -> Tensor:
    return images.flip(dimension)


def moved_along(maps: Floats) -> Ints:
    """The axis, 0 (x) or 1 (y), along which each map (B, 2, 3) moves whole lines of pixels, as a shear or a translation
    does: along the other one it shifts by whole pixels or mirrors. -1 for other maps."""
    not_stretched = np.all(np.abs(maps[:, [0, 1], [0, 1]]) == 1, axis=1, keepdims=True)
    stays = not_stretched & (maps[:, [0, 1], [1, 0]] == 0) & (maps[:, :, 2] == np.round(maps[:, :, 2]))  # (B, 2) x, y
    return np.where(stays[:, 1], 0, np.where(stays[:, 0], 1, -1))


def _augmented(images: Tensor, plan: Plan, fill: Sequence[int]) -> Tensor:
    """A copy of the images (B, 3, H, W) uint8, each with its layers and its warp in the plan's order."""
    work = [*_colour_work(plan, plan.before_warp), *_warp_work(plan, fill), *_colour_work(plan, ~plan.before_warp)]
    work = [step for step in work if len(step.rows)]
    if not work:
        return images
    images, lengths = images.clone(), [len(step.rows) for step in work]
    # Two arrays go to the device, whatever the number of operations.
    all_rows = to_device(np.concatenate([step.rows for step in work]), images.device).split(lengths)
    arguments = to_device(np.concatenate([step.arguments for step in work]), images.device).split(lengths)
    for step, rows, values in zip(work, all_rows, arguments, strict=True):
        for part in image_chunks(len(rows), images[0].numel(), images.device):
            first, *others = step.rows[part].tolist()
            where = rows[part] if others else slice(first, first + 1)  # one image alone needs no copy
            images[where] = step.run(images[where], values[part])
    return images


def _erase(images: Tensor, plan: Plan, mode: str) -> Tensor:
    """Random erasing (arXiv:1708.04896) in timm's three modes: fill the boxes of the plan in normalised images
    (B, C, H, W) float32, in place; later boxes win. The noise is a function of (key, pixel) alone."""
    (channels, height, width), device = images.shape[1:], images.device
    channel = torch.arange(channels, device=device)[:, None, None]
    for number in range(plan.erase.shape[1]):  # a box of each image at a time, some images in one pass
        rows = np.flatnonzero(plan.erase[:, number, 2:].all(1))
        boxes, keys = plan.erase[rows, number], plan.erase_key[rows].view(np.int64)
        last = boxes[:, :2] + boxes[:, 2:] - 1
        for part in image_chunks(len(rows), images[0].numel(), device):
            tall, wide = boxes[part, 2:].max(0).tolist()
            box_table = np.stack([rows[part], *boxes[part, :2].T, *last[part].T, keys[part]])
            columns = to_device(box_table, device)[..., None, None, None]  # (b, 1, 1, 1) each
            row, top, left, bottom, right, key = columns
            # Smaller boxes fill their last row and column several times, with the same.
            y = torch.minimum(top + torch.arange(tall, device=device)[:, None], bottom)
            x = torch.minimum(left + torch.arange(wide, device=device), right)
            area: tuple[Tensor | slice, ...] = (row, channel, y, x)
            if len(rows[part]) == 1:  # cheaper on CPUs
                (i, y0, x0), every = box_table[:3, 0].tolist(), slice(None)
                area = (slice(i, i + 1), every, slice(y0, y0 + tall), slice(x0, x0 + wide))
            if mode == "pixel":
                images[area] = normal_noise(key, (channel * height + y) * width + x)
            elif mode == "rand":  # one colour a box
                images[area] = normal_noise(key, channel + channels * number)
            else:
                images[area] = 0.0
    return images


def check_normalisation(mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise UserError: they are not one or three means of pixels in [0, 1], and as many deviations."""
    in_range("--mean", mean, 0, 1, counts=(1, 3))
    in_range("--std", std, 1e-6, 1, counts=(len(mean),))


class EvalStage(Constants):
    """uint8 images (B, 3, H, W) -> float32, (x / 255 - mean) / std.

    With one mean in place of three the images become grey, (B, 1, H, W), by Pillow's weights (its mode L).
    """

    mean: Tensor  # grey levels
    scale: Tensor  # of a grey level

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        check_normalisation(mean, std)
        levels, deviations = (255 * torch.tensor(tuple(part), device="cpu").view(1, -1, 1, 1) for part in (mean, std))
        self.hold(mean=levels, scale=1 / deviations)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        levels = images if self.mean.shape[1] == 3 else luma(images)
        return levels.float().sub_(self.mean).mul_(self.scale)


class DeviceStage(EvalStage):
    """The training images of a batch, from what the backend resized to what the model sees.

    Colour layers and the warp work on uint8, as PIL; erasing follows normalisation, as in timm.
    """

    def __init__(self, config: AugmentConfig, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean, std)
        self.remode = config.remode
        self.fill = config.fill

    @torch.no_grad()
    def forward(self, images: Tensor, plan: Plan) -> Tensor:  # type: ignore[override]
        """Images (B, 3, H, W) uint8, resized crops on the device, and their plan on the host -> (B, C, H, W) float32.

        Raises:
            ValueError: The images aren't those of the plan.
        """
        if images.shape != (len(plan), 3, *plan.size) or images.dtype != torch.uint8:
            raise ValueError(f"{len(plan)} planned images of 3 x {plan.size} uint8, got {images.shape} {images.dtype}")
        return _erase(super().forward(_augmented(images, plan, self.fill)), plan, self.remode)

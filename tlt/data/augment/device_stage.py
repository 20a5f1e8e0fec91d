"""Runs the part of the augmentation that the training device does: colour layers, one warp, normalisation, erasing.

The plan stays on the host, which therefore knows without asking the device which images need which step. It sends image
numbers and arguments, and nothing comes back. An image's result does not depend on the others of its batch.

Legend: B images of H x W pixels, b rows of them.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tlt import geometry
from tlt.data.augment.counter import Bools, Floats, Ints, normal_noise
from tlt.data.augment.operations import DEGENERATES, TABLES, blend, fixed_tables, luma, remap, to_device, warp
from tlt.data.augment.plan import AugmentConfig, Plan
from tlt.data.augment.rand_augment import Kernel
from tlt.errors import in_range
from tlt.io.chunks import image_chunks
from tlt.models.layers import Constants

_GPU_NUMBERS = 2**24  # of scratch: a batch of 256 images of 224 px then takes few launches


class Work(NamedTuple):
    """Describes one step of the augmentation for some images of the batch (`rows`)."""

    run: Callable[[Tensor, Ints, Tensor], Tensor]  # images (b, 3, H, W) uint8, kinds, arguments -> new images
    rows: Ints  # (b,)
    kinds: Ints  # (b,) operations, filters or dimensions to flip, ascending; they stay on the host
    arguments: Floats  # (b, ...), sent to the device
    scratch: int = 1  # temporary numbers for each value of an image


def _geometric_work(plan: Plan, fill: Sequence[int], on_cpu: bool) -> tuple[list[Work], Bools]:
    """Divide the plan's maps into flips, which are exact and cheap, and warps, which interpolate; return both for all
    images, and (B,) which images are warped. A mirrored image whose lines are moved is flipped first, as PIL does it,
    and then moved by the rest of its map."""
    height, width = plan.size
    mirrored = plan.warp[:, [0, 1], [0, 1]] < 0  # (B, 2) left and right, top and bottom
    flips = geometry.compose(geometry.vflip(mirrored[:, 1], height), geometry.hflip(mirrored[:, 0], width))
    # Operations that cancel each other leave rounding errors, in pixels.
    warped = np.any(np.abs(plan.warp - flips) >= 1e-9, axis=(1, 2))
    along = _moved_along(plan.warp)
    flipped = mirrored & (~warped | (along >= 0))[:, None]
    maps = np.where(flipped.any(1)[:, None, None], geometry.compose(plan.warp, flips), plan.warp)
    works = []
    for dimension, rows in ((3, np.flatnonzero(flipped[:, 0])), (2, np.flatnonzero(flipped[:, 1]))):
        works.append(Work(_flip, rows, np.full(len(rows), dimension), np.empty((len(rows), 0))))
    if not on_cpu:  # to move whole lines saves time on a CPU; on a GPU the additional launches would cost more
        along = np.full(len(plan), -1)
    for axis in (0, 1, -1):
        rows = np.flatnonzero(warped & (along == axis))
        rows = rows[np.argsort(plan.warp_interpolation[rows], kind="stable")]
        works.append(Work(partial(warp, fill=fill, along=axis), rows, plan.warp_interpolation[rows], maps[rows], 2))
    return works, warped


def _moved_along(maps: Floats) -> Ints:
    """Return for each map (B, 2, 3) the axis, 0 (x) or 1 (y), along which it moves whole lines of pixels, as shears
    and translations do: along the other axis it shifts by whole pixels or mirrors. Return -1 for other maps.

    No operation stretches an image, so that x' depends on x alone only if it is x or -x, shifted; likewise y'.
    """
    stays = (maps[:, [0, 1], [1, 0]] == 0) & (maps[:, :, 2] == np.round(maps[:, :, 2]))  # (B, 2) x, y
    return np.where(stays[:, 1], 0, np.where(stays[:, 0], 1, -1))


def _colour_work(plan: Plan, warped: Bools) -> tuple[list[Work], list[Work]]:
    """Return the colour layers before the warp and those after it, in waves of at most one layer of each image.

    An image starts with the first wave; if it is warped, its later layers wait for the waves after the warp.
    """
    used = plan.op != Kernel.NONE
    layers_before = (used & plan.before_warp & warped[:, None]).sum(1, keepdims=True)  # (B, 1)
    waves_before = int(layers_before.max(initial=0))
    waits = np.where(warped[:, None] & ~plan.before_warp, waves_before - layers_before, 0)
    wave = used.cumsum(1) - 1 + waits  # (B, L)
    waves = [list(_wave(plan, used & (wave == number))) for number in range(wave.max(initial=-1) + 1)]
    return sum(waves[:waves_before], []), sum(waves[waves_before:], [])


def _wave(plan: Plan, chosen: Bools) -> Iterator[Work]:
    """Yield the colour layers that `chosen` (B, L) marks, at most one of each image."""
    for run, makers in ((remap, TABLES), (blend, DEGENERATES)):
        rows, layers = np.nonzero(chosen & np.isin(plan.op, list(makers)))
        ascending = np.argsort(plan.op[rows, layers], kind="stable")
        rows = rows[ascending]
        layers = layers[ascending]
        kernels = plan.op[rows, layers]
        arguments = plan.argument[rows, layers]
        yield Work(run, rows, kernels, fixed_tables(kernels, arguments) if run is remap else arguments)


def _flip(images: Tensor, dimensions: Ints, _: Tensor) -> Tensor:
    return images.flip(int(dimensions[0]))


def _augmented(images: Tensor, plan: Plan, fill: Sequence[int]) -> Tensor:
    """Return images (B, 3, H, W) uint8 after their layers and their warp, in the plan's order."""
    device = images.device
    geometric, warped = _geometric_work(plan, fill, device.type == "cpu")
    before, after = _colour_work(plan, warped)
    works = [work for work in (*before, *geometric, *after) if len(work.rows)]
    if not works:
        return images
    images = images.clone()
    all_rows = _sent([work.rows for work in works], device)
    all_arguments = _sent([work.arguments for work in works], device)
    for work, rows, arguments in zip(works, all_rows, all_arguments, strict=True):
        for part in image_chunks(len(rows), work.scratch * images[0].numel(), device, _GPU_NUMBERS):
            first, *others = work.rows[part].tolist()
            where = rows[part] if others else slice(first, first + 1)  # copies take a CPU 25 % more time
            images[where] = work.run(images[where], work.kinds[part], arguments[part])
    return images


def _sent(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Copy arrays of one type to the device, all at once."""
    parts = to_device(np.concatenate([array.ravel() for array in arrays]), device).split([a.size for a in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _erase(images: Tensor, plan: Plan, mode: str) -> Tensor:
    """Fill the boxes of the plan in normalised images (B, C, H, W) float32, in place, as random erasing does
    (arXiv:1708.04896), in timm's three modes. Later boxes cover earlier ones. Noise depends on (key, pixel) alone."""
    for number, boxes in enumerate(plan.erase.swapaxes(0, 1)):  # one of each image: (B, 4) top, left, height, width
        rows = np.flatnonzero(boxes[:, 2:].all(1))
        for part in image_chunks(len(rows), images[0].numel(), images.device, _GPU_NUMBERS):
            chosen = rows[part]
            _fill(images, chosen, boxes[chosen], plan.erase_key[chosen].view(np.int64), number, mode)
    return images


def _fill(images: Tensor, rows: Ints, boxes: Ints, keys: Ints, number: int, mode: str) -> None:
    """Fill in place box `number` (top, left, height, width) of each of the images `rows`; `keys` determine the noise.
    All arrays are (b, ...)."""
    channels, height, width = images.shape[1:]
    device = images.device
    columns = to_device(np.column_stack([rows, boxes, keys]).T, device)[..., None, None, None]  # (b, 1, 1, 1) each
    row, top, left, box_height, box_width, key = columns
    tallest, widest = boxes[:, 2:].max(0).tolist()
    channel = torch.arange(channels, device=device)[:, None, None]
    # Smaller boxes fill their last row and column several times, with the same.
    y = top + torch.minimum(torch.arange(tallest, device=device)[:, None], box_height - 1)
    x = left + torch.minimum(torch.arange(widest, device=device), box_width - 1)
    area: tuple[Tensor | slice, ...] = (row, channel, y, x)
    if len(rows) == 1:  # cheaper on CPUs
        starts = (rows[0], 0, *boxes[0, :2])
        sizes = (1, channels, tallest, widest)
        area = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    if mode == "pixel":
        images[area] = normal_noise(key, (channel * height + y) * width + x)
    elif mode == "rand":  # one colour a box
        images[area] = normal_noise(key, channel + channels * number)
    else:
        images[area] = 0.0


def check_normalisation(mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise UserError if these are not one or three means of pixels in [0, 1], and as many deviations."""
    in_range("--mean", mean, 0, 1, counts=(1, 3))
    in_range("--std", std, 1e-6, 1, counts=(len(mean),))


class EvalStage(Constants):
    """Normalises images (B, 3, H, W) uint8 to float32: (x / 255 - mean) / std.

    With one mean instead of three it makes grey images (B, 1, H, W), with Pillow's weights of the colours (mode L).
    """

    mean: Tensor  # grey levels
    scale: Tensor  # of a grey level

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        check_normalisation(mean, std)
        parts = (torch.tensor(tuple(part), dtype=torch.float32, device="cpu") for part in (mean, std))
        levels, deviations = (255 * part.view(1, -1, 1, 1) for part in parts)
        self.hold(mean=levels, scale=1 / deviations)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        levels = images if self.mean.shape[1] == 3 else luma(images)
        return levels.float().sub_(self.mean).mul_(self.scale)


class DeviceStage(EvalStage):
    """Turns the resized crops of a backend into the images that the model gets.

    Colour layers and the warp work on uint8, as in PIL; erasing follows normalisation, as in timm.
    """

    def __init__(self, config: AugmentConfig, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean, std)
        self.remode = config.remode
        self.fill = config.fill

    @torch.no_grad()
    def forward(self, images: Tensor, plan: Plan) -> Tensor:  # type: ignore[override]
        """Augment resized crops (B, 3, H, W) uint8 on the device by their plan. Return images (B, C, H, W) float32.
        Raise ValueError if the images aren't those of the plan."""
        if images.shape != (len(plan), 3, *plan.size) or images.dtype != torch.uint8:
            raise ValueError(f"{len(plan)} planned images of 3 x {plan.size} uint8, got {images.shape} {images.dtype}")
        return _erase(super().forward(_augmented(images, plan, self.fill)), plan, self.remode)


def check_first_batch(stage: DeviceStage) -> None:
    """Have a stage on a GPU compute its first batch on the CPU as well, and warn if the results differ.

    Not every GPU is known to agree with the CPU. This waits once for the device.
    """
    on_cpu = copy.deepcopy(stage)

    def compare(_: nn.Module, arguments: tuple[Tensor, Plan], images: Tensor) -> None:
        hook.remove()
        crops, plan = arguments
        levels = (images.cpu() - on_cpu(crops.cpu(), plan)).abs_() / on_cpu.scale
        different = (levels > 1.01).float().mean().item()
        if different > 0.002:  # a place on the exact edge of a pixel may be rounded to its other side
            warnings.warn(
                f"{different:.1%} of the values of the first batch differ by more than a grey level from what the CPU "
                "makes of it: this GPU augments wrongly; report it with its name and torch's version",
                stacklevel=2,
            )

    hook = stage.register_forward_hook(compare)

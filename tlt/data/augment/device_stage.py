"""The part of the augmentation that runs on the training device: colour layers, one warp, normalisation, erasing.

The plan stays on the host, so which rows need what is known without asking the device: row numbers and arguments go
over, and nothing comes back. A sample's result does not depend on the other rows of its batch.

Legend: B images of H x W pixels, b rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tlt import geometry
from tlt.data.augment import on_device
from tlt.data.augment.erase import erase
from tlt.data.augment.photometric import OPERATIONS, luma
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Plan
from tlt.data.augment.warp import LineAxis, warp

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Operation = Callable[[Tensor, Tensor], Tensor]  # images (b, 3, H, W) uint8, arguments (b, 6) -> new images

# (mirrored left and right, mirrored top and bottom) -> dimensions to flip
_FLIPS: dict[tuple[bool, bool], list[int]] = {(True, False): [3], (False, True): [2], (True, True): [2, 3]}


class Work(NamedTuple):
    """One operation on some rows of the batch."""

    run: Operation
    rows: Ints  # (b,)
    arguments: Floats  # (b, 6) the map of a warp; of a colour operation the first is used, of a flip none


def schedule(plan: Plan, fill: Sequence[int]) -> list[Work]:
    """The operations of a plan in the order that gives each sample its layers and its warp in the plan's order."""
    work = [*_colour_work(plan, plan.early), *_warp_work(plan, fill), *_colour_work(plan, ~plan.early)]
    return [each for each in work if len(each.rows)]


def _colour_work(plan: Plan, when: npt.NDArray[np.bool_]) -> list[Work]:
    """The layers that `when` (B, L) marks, one after the other."""
    work = []
    for layer, code in product(range(plan.op.shape[1]), OPERATIONS):
        rows = np.flatnonzero(when[:, layer] & (plan.op[:, layer] == code))
        work.append(Work(_colour(code), rows, plan.argument[rows, layer, None].repeat(6, axis=1)))
    return work


def _warp_work(plan: Plan, fill: Sequence[int]) -> list[Work]:
    """Flips alone are exact and cheap; every other map that isn't the identity is a warp.

    Where lines are moved, a mirrored image is flipped first, as PIL's is, and moved as if it had not been mirrored.
    """
    height, width = plan.size
    axes, mirrored = line_axes(plan.warp), plan.warp[:, [0, 1], [0, 1]] < 0  # (B,), (B, 2) x, y
    flips = geometry.compose(geometry.vflip(mirrored[:, 1], height), geometry.hflip(mirrored[:, 0], width))
    # Operations that cancel out leave rounding behind, in pixels.
    only_flipped = np.all(np.abs(plan.warp - flips) < 1e-9, axis=(1, 2))
    flipped = mirrored & (only_flipped | (axes != LineAxis.BOTH))[:, None]
    maps = np.where(flipped.any(1)[:, None, None], geometry.compose(plan.warp, flips), plan.warp).reshape(-1, 6)
    work = []
    for sides, dimensions in _FLIPS.items():
        rows = np.flatnonzero((flipped == sides).all(1))
        work.append(Work(_flip(dimensions), rows, maps[rows]))
    for interpolation, axis in product((BILINEAR, BICUBIC), LineAxis):
        rows = np.flatnonzero(~only_flipped & (plan.warp_interpolation == interpolation) & (axes == axis))
        work.append(Work(_warp(fill, interpolation == BICUBIC, axis), rows, maps[rows]))
    return work


def _colour(code: int) -> Operation:
    return lambda images, arguments: OPERATIONS[code](images, arguments[:, 0].float())


def _flip(dimensions: list[int]) -> Operation:
    return lambda images, arguments: images.flip(dimensions)


def _warp(fill: Sequence[int], cubic: bool, axis: LineAxis) -> Operation:
    return lambda images, arguments: warp(images, arguments.view(-1, 2, 3), fill, cubic=cubic, axis=axis)


def line_axes(maps: Floats) -> Ints:
    """`LineAxis` of each map (B, 2, 3)."""
    plain = np.all(np.abs(maps[:, [0, 1], [0, 1]]) == 1, axis=1, keepdims=True)  # neither axis is stretched
    x_stays, y_stays = (plain & (maps[:, [0, 1], [1, 0]] == 0) & (maps[:, :, 2] == np.round(maps[:, :, 2]))).T
    return np.where(y_stays, LineAxis.X, np.where(x_stays, LineAxis.Y, LineAxis.BOTH))


def _run_schedule(images: Tensor, work: list[Work]) -> Tensor:
    """Apply the work to a copy of the images (B, 3, H, W) uint8."""
    if not work:
        return images
    images, size, lengths = images.clone(), on_device.portion(images), [len(each.rows) for each in work]
    # Two arrays go to the device, whatever the number of operations.
    all_rows = on_device.send(np.concatenate([each.rows for each in work]), images.device).split(lengths)
    arguments = on_device.send(np.concatenate([each.arguments for each in work]), images.device).split(lengths)
    for each, rows, values in zip(work, all_rows, arguments, strict=True):
        for some, own in zip(rows.split(size), values.split(size), strict=True):
            _put_back(images, some, each.run(_taken(images, some), own))
    return images


def _taken(images: Tensor, rows: Tensor) -> Tensor:
    """`images[rows]`."""
    # On a CPU index_select takes five times as long as copies, index_copy_ twenty times.
    if on_device.in_small_pieces(images.device):
        return torch.stack([images[row] for row in rows.tolist()])
    return images.index_select(0, rows)


def _put_back(images: Tensor, rows: Tensor, changed: Tensor) -> None:
    """`images[rows] = changed`."""
    if on_device.in_small_pieces(images.device):
        for row, image in zip(rows.tolist(), changed, strict=True):
            images[row] = image
    else:
        images.index_copy_(0, rows, changed)


class EvalStage(nn.Module):
    """uint8 images (B, 3, H, W) -> float32, (x / 255 - mean) / std.

    With one mean in place of three the images become grey, (B, 1, H, W), by Pillow's weights (its mode L).
    """

    mean: Tensor  # grey levels
    scale: Tensor  # of a grey level

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        levels, deviations = (255 * torch.tensor(tuple(part)).view(1, -1, 1, 1) for part in (mean, std))
        self.register_buffer("mean", levels, persistent=False)
        self.register_buffer("scale", 1 / deviations, persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        shape = (len(images), self.mean.shape[1], *images.shape[2:])
        result = torch.empty(shape, dtype=torch.float32, device=images.device)
        step = on_device.portion(images)
        for some, levels in zip(result.split(step), images.split(step), strict=True):
            some.copy_(levels if shape[1] == 3 else luma(levels)).sub_(self.mean).mul_(self.scale)
        return result


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
        images = _run_schedule(images, schedule(plan, self.fill))
        return erase(super().forward(images), plan, self.remode)

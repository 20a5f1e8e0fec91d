"""The part of the augmentation that runs on the training device: colour layers, one warp, normalisation, erasing.

The plan stays on the host, so which rows need what is known without asking the device: row numbers and arguments go
over, and nothing comes back. A sample's result does not depend on the other rows of its batch.

Legend: B images of H x W pixels, b rows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tlt.data.augment import on_device
from tlt.data.augment.erase import erase
from tlt.data.augment.photometric import OPERATIONS, luma
from tlt.data.augment.plan import BICUBIC, AugmentConfig, Plan
from tlt.data.augment.warp import Along, Warp, chosen_warp

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Step(IntEnum):
    """Geometric steps; their codes continue those of `rand_augment.Kernel`. To a warp's, its `Along` is added."""

    FLIP_X = 100
    FLIP_Y = 101
    FLIP_XY = 102
    WARP_BILINEAR = 110
    WARP_BICUBIC = 120


_FLIPS: dict[int, tuple[int, ...]] = {int(Step.FLIP_X): (3,), int(Step.FLIP_Y): (2,), int(Step.FLIP_XY): (2, 3)}
_WARPS = {
    int(kind) + along: (kind == Step.WARP_BICUBIC, along)
    for kind in (Step.WARP_BILINEAR, Step.WARP_BICUBIC)
    for along in Along
}


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
    kind = np.where(plan.warp_interpolation == BICUBIC, Step.WARP_BICUBIC, Step.WARP_BILINEAR) + _axes(plan.warp)
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


def _axes(maps: Floats) -> Ints:
    """`Along` of each map (B, 2, 3)."""
    plain = np.all(np.abs(maps[:, [0, 1], [0, 1]]) == 1, axis=1, keepdims=True)  # neither axis is stretched
    x_stays, y_stays = (plain & (maps[:, [0, 1], [1, 0]] == 0) & (maps[:, :, 2] == np.round(maps[:, :, 2]))).T
    return np.where(y_stays, Along.X, np.where(x_stays, Along.Y, Along.BOTH))


def _run_schedule(images: Tensor, work: list[Work], fill: Sequence[int], warp: Warp) -> Tensor:
    """Apply the steps to a copy of the images (B, 3, H, W) uint8."""
    if not work:
        return images
    images = images.clone()
    all_rows = on_device.send(np.concatenate([step.rows for step in work]), images.device)
    all_arguments = on_device.send(np.concatenate([step.arguments.ravel() for step in work]), images.device)
    rows_of = all_rows.split([len(step.rows) for step in work])
    arguments_of = all_arguments.split([step.arguments.size for step in work])
    size = on_device.portion(images)
    for step, rows, arguments in zip(work, rows_of, arguments_of, strict=True):
        by_row = arguments.view(step.arguments.shape)
        for some, values in zip(rows.split(size), by_row.split(size), strict=True):
            _put_back(images, some, _run_step(step.code, _taken(images, some), values, fill, warp))
    return images


def _taken(images: Tensor, rows: Tensor) -> Tensor:
    """`images[rows]`, not to be written to."""
    # There index_select takes five times as long as copies, index_copy_ twenty times.
    if on_device.in_small_pieces(images.device):
        taken = [images[row] for row in rows.tolist()]
        return taken[0][None] if len(taken) == 1 else torch.stack(taken)
    return images.index_select(0, rows)


def _put_back(images: Tensor, rows: Tensor, changed: Tensor) -> None:
    """`images[rows] = changed`."""
    if on_device.in_small_pieces(images.device):
        for row, image in zip(rows.tolist(), changed, strict=True):
            images[row] = image
    else:
        images.index_copy_(0, rows, changed)


def _run_step(code: int, images: Tensor, arguments: Tensor, fill: Sequence[int], warp: Warp) -> Tensor:
    if code in _FLIPS:
        return images.flip(_FLIPS[code])
    if code in _WARPS:
        cubic, along = _WARPS[code]
        return warp(images, arguments.view(-1, 2, 3), fill, cubic=cubic, along=along)
    return OPERATIONS[code](images, arguments[:, 0].float())


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

    def __init__(
        self, config: AugmentConfig, mean: Sequence[float], std: Sequence[float], warp: Warp | None = None
    ) -> None:
        super().__init__(mean, std)
        self.warp = warp or chosen_warp()
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
        images = _run_schedule(images, schedule(plan), self.fill, self.warp)
        return erase(super().forward(images), plan, self.remode)

"""The augmentation plan: everything random about a batch of training images, drawn before a pixel is read.

`make_plan` is a pure function of (config, seed, epoch, index, image size), row by row: a sample's plan does not depend
on the batch it is in. The backend executes `crop` and `interpolation` (decode, cut, resize to uint8), the device stage
`warp`, the colour layers and `erase`; labels follow `affine`. Numbers mean what they mean in timm 1.0
(`create_transform(is_training=True)`, `RandomErasing`).

Legend: B samples, L colour layers, R erased boxes, (H, W) output size. Rows of affines: see `tlt.geometry`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tlt import geometry
from tlt.data import rand_augment
from tlt.data.counter import keys, uniform
from tlt.data.rand_augment import Kernel, RandAugmentPolicy
from tlt.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BILINEAR, BICUBIC = 2, 3  # PIL.Image.Resampling's numbers
INTERPOLATIONS = {"random": (BILINEAR, BICUBIC), "bilinear": (BILINEAR,), "bicubic": (BICUBIC,)}
ERASE_MODES = ("const", "rand", "pixel")
CROP_TRIES = ERASE_TRIES = 10
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
TRANSLATE_SHARE = 0.45  # of the shorter side: timm's translate_const


class Stream(IntEnum):
    """What the numbers of `counter.uniform` are used for."""

    CROP = 0
    FLIP = 1
    RAND_AUGMENT = 2
    COLOR_JITTER = 3
    ERASE = 4
    ERASE_NOISE = 5


@dataclass(frozen=True)
class AugmentConfig:
    """Training augmentation, in the words of timm's flags.

    Raises:
        UserError: A value that this loader can't honour, naming its flag.
    """

    size: tuple[int, int]  # (H, W) of the output in pixels
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area that a crop keeps
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of a crop
    hflip: float = 0.5
    vflip: float = 0.0
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float | tuple[float, ...] | None = 0.4  # brightness, contrast, saturation; off with auto_augment
    interpolation: str = "random"
    reprob: float = 0.25
    remode: str = "pixel"
    recount: int = 1
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # in [0, 1]; what a warp shows outside the image
    no_aug: bool = False  # squash the whole image to `size` and do nothing else, as timm's --no-aug

    def __post_init__(self) -> None:
        checks = {
            f"--img-size {self.size}: sizes are positive": min(self.size) > 0,
            f"--scale {self.scale}: give 0 < smallest <= largest": 0 < self.scale[0] <= self.scale[1],
            f"--ratio {self.ratio}: give 0 < smallest <= largest": 0 < self.ratio[0] <= self.ratio[1],
            f"--hflip {self.hflip}: a probability lies in [0, 1]": 0 <= self.hflip <= 1,
            f"--vflip {self.vflip}: a probability lies in [0, 1]": 0 <= self.vflip <= 1,
            f"--reprob {self.reprob}: a probability lies in [0, 1]": 0 <= self.reprob <= 1,
            f"--recount {self.recount}: erase at least one box, or set --reprob 0": self.recount >= 1,
            f"--remode {self.remode}: choose from {', '.join(ERASE_MODES)}": self.remode in ERASE_MODES,
            f"--train-interpolation {self.interpolation}: choose from {', '.join(INTERPOLATIONS)}": self.interpolation
            in INTERPOLATIONS,
            f"--color-jitter {self.color_jitter}: give one factor or three, none negative": self._jitter_fits(),
            f"--mean {self.mean}: give three values in [0, 1]": len(self.mean) == 3
            and all(0 <= value <= 1 for value in self.mean),
        }
        for message, holds in checks.items():
            if not holds:
                raise UserError(message)
        if self.auto_augment:
            rand_augment.parse(self.auto_augment)

    def _jitter_fits(self) -> bool:
        jitter = self.color_jitter
        values = jitter if isinstance(jitter, tuple) else (jitter or 0.0,) * 3
        return len(values) == 3 and min(values) >= 0

    @property
    def policy(self) -> RandAugmentPolicy | None:
        """The parsed RandAugment policy, None where none applies."""
        return rand_augment.parse(self.auto_augment) if self.auto_augment and not self.no_aug else None

    @property
    def jitter(self) -> tuple[float, ...] | None:
        """Strengths of (brightness, contrast, saturation) where colour jitter applies: timm switches it off with
        RandAugment, but not with the 3a operation sets."""
        applies = not self.auto_augment or "3a" in self.auto_augment
        if self.no_aug or not applies or not self.color_jitter:
            return None
        return self.color_jitter if isinstance(self.color_jitter, tuple) else (float(self.color_jitter),) * 3

    @property
    def fill(self) -> tuple[int, ...]:
        """The colour (0..255) outside the image: the mean, rounded as in timm."""
        return tuple(min(255, round(255 * value)) for value in self.mean)


@dataclass
class Plan:
    """What happens to each of B images. Host arrays; made where the image sizes are known, sent to the device stage."""

    size: tuple[int, int]  # (H, W) of the output
    source: Ints  # (B, 2) width, height of the images in pixels
    crop: Ints  # (B, 4) x, y, w, h in image pixels
    interpolation: Ints  # (B,) BILINEAR or BICUBIC: the antialiased resize of the crop to `size`
    warp: Floats  # (B, 2, 3) output px -> resized crop px
    affine: Floats  # (B, 2, 3) output px -> image px: `warp`, then the crop
    warp_interpolation: Ints  # (B,) BILINEAR or BICUBIC
    op: Ints  # (B, L) rand_augment.Kernel of each colour layer, NONE after the last
    argument: Floats  # (B, L)
    warp_at: Ints  # (B,) how many colour layers run before the warp
    erase: Ints  # (B, R, 4) top, left, h, w in output pixels; h = 0: no box
    erase_key: npt.NDArray[np.uint64]  # (B,) key of the noise in the boxes

    def __len__(self) -> int:
        return len(self.crop)

    def select(self, rows: Sequence[int] | Ints | Bools | slice) -> Plan:
        """The plan of some rows, in that order."""
        picked = rows if isinstance(rows, slice) else np.asarray(rows)
        if isinstance(picked, np.ndarray) and picked.size == 0:
            picked = picked.astype(np.int64)
        return Plan(self.size, *(getattr(self, name)[picked] for name in _ARRAYS))

    @staticmethod
    def concatenate(plans: Sequence[Plan]) -> Plan:
        """One plan of the rows of several, which must come from one config."""
        return Plan(plans[0].size, *(np.concatenate([getattr(plan, name) for plan in plans]) for name in _ARRAYS))

    def normalised_affine(self) -> Floats:
        """(B, 2, 3): `affine` from the unit square of the output to the unit square of the image."""
        return geometry.normalise(self.affine, (self.source[:, 1], self.source[:, 0]), self.size)

    def visible(self) -> Floats:
        """(B, 4) x0, y0, x1, y1: the crop as shares of the image. Output points mapped outside of it show the fill."""
        x, y, w, h = self.crop.T
        width, height = self.source.T
        return np.stack([x / width, y / height, (x + w) / width, (y + h) / height], axis=1)


_ARRAYS = tuple(field.name for field in fields(Plan) if field.name != "size")


def make_plan(
    config: AugmentConfig, seed: int, epoch: int, indices: npt.ArrayLike, widths: npt.ArrayLike, heights: npt.ArrayLike
) -> Plan:
    """Draw the plan of the images `indices` (B,); `widths` and `heights` are their sizes in pixels, numbers or (B,)."""
    indices = np.atleast_1d(np.asarray(indices, np.int64))
    count = len(indices)
    source = np.stack([np.broadcast_to(np.asarray(side, np.int64), count) for side in (widths, heights)], axis=1)
    draw = _Draws(seed, epoch, indices)
    window = _whole(source) if config.no_aug else _crop_windows(config, draw(Stream.CROP, 2 * CROP_TRIES + 2), source)
    flip_draws = draw(Stream.FLIP, 4)
    kernels, values = _layers(config, draw, count)
    warp = _warp(config, flip_draws, kernels, values)
    op, argument, warp_at = _colour_layers(kernels, values)
    return Plan(
        size=config.size,
        source=source,
        crop=window,
        interpolation=_interpolations(config, flip_draws[:, 2]),
        warp=warp,
        affine=geometry.compose(warp, _crop_map(window, config.size)),
        warp_interpolation=_interpolations(config, flip_draws[:, 3]),
        op=op,
        argument=argument,
        warp_at=warp_at,
        erase=_erased_boxes(config, draw, count),
        erase_key=keys(seed, epoch, indices, int(Stream.ERASE_NOISE)),
    )


@dataclass(frozen=True)
class _Draws:
    """Uniform numbers (B, k) of a stream."""

    seed: int
    epoch: int
    indices: Ints

    def __call__(self, stream: Stream, k: int) -> Floats:
        return uniform(self.seed, self.epoch, self.indices, int(stream), k)


def _interpolations(config: AugmentConfig, draws: Floats) -> Ints:
    """(B,) of BILINEAR or BICUBIC; --no-aug knows no random choice and takes bilinear, as timm."""
    choices = INTERPOLATIONS["bilinear" if config.no_aug and config.interpolation == "random" else config.interpolation]
    return np.array(choices, np.int64)[(draws * len(choices)).astype(np.int64)]


def _whole(source: Ints) -> Ints:
    return np.concatenate([np.zeros_like(source), source], axis=1)


def _integers(draws: Floats, largest: Floats) -> Floats:
    """Uniform integers 0..largest, as floats."""
    return np.minimum(np.floor(draws * (largest + 1)), largest)


def _crop_windows(config: AugmentConfig, draws: Floats, source: Ints) -> Ints:
    """Random resized crop (B, 4): of ten (area, log aspect) proposals the first that fits, else the central crop."""
    size = source.astype(np.float64)[:, :, None]  # (B, 2, 1) width, height
    (small, large), (low, high) = config.scale, config.ratio
    area = (small + (large - small) * draws[:, :CROP_TRIES]) * (size[:, 0] * size[:, 1])
    aspect = np.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[:, CROP_TRIES : 2 * CROP_TRIES])
    proposals = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=1)))  # (B, 2, tries)
    fits: Bools = np.all((proposals <= size) & (proposals > 0), axis=1)
    first = np.take_along_axis(proposals, fits.argmax(1)[:, None, None], axis=2)[:, :, 0]
    free = size[:, :, 0] - first
    corner = _integers(draws[:, 2 * CROP_TRIES :], free)
    windows = np.concatenate([corner, first], axis=1).astype(np.int64)
    none_fits = ~np.any(fits, axis=1)
    if none_fits.any():
        windows[none_fits] = _central_crops(config, source[none_fits])
    return windows


def _crop_map(windows: Ints, size: tuple[int, int]) -> geometry.Affine:
    x, y, w, h = (windows[:, k] for k in range(4))
    return geometry.crop(x, y, w, h, size[1], size[0])


def _central_crops(config: AugmentConfig, source: Ints) -> Ints:
    """The largest central window (B, 4) whose aspect ratio is allowed."""
    width, height = source.astype(np.float64).T
    low, high = config.ratio
    w = np.where(width / height > high, np.rint(height * high), width)
    h = np.where(width / height < low, np.rint(width / low), height)
    return np.stack([(width - w) // 2, (height - h) // 2, w, h], axis=1).astype(np.int64)


def _layers(config: AugmentConfig, draw: _Draws, count: int) -> tuple[Ints, Floats]:
    """All operations in timm's order, colours and geometry: kernels and arguments (B, layers)."""
    kernels, values = np.zeros((count, 0), np.int64), np.zeros((count, 0))
    policy = config.policy
    if policy is not None:
        kernels, values = rand_augment.sample_layers(policy, draw(Stream.RAND_AUGMENT, policy.uniforms))
    if config.jitter is not None:
        more_kernels, more_values = _jitter_layers(config.jitter, draw(Stream.COLOR_JITTER, 6))
        kernels = np.concatenate([kernels, more_kernels], axis=1)
        values = np.concatenate([values, more_values], axis=1)
    return kernels, values


def _jitter_layers(strengths: tuple[float, ...], draws: Floats) -> tuple[Ints, Floats]:
    """torchvision's ColorJitter without hue: three factors from U[max(0, 1 - v), 1 + v], in random order."""
    strength = np.array(strengths)
    low, high = np.maximum(0.0, 1.0 - strength), 1.0 + strength
    factors = low + (high - low) * draws[:, :3]
    kernels = np.where(strength > 0, [Kernel.BRIGHTNESS, Kernel.CONTRAST, Kernel.COLOR], Kernel.NONE)
    order = np.argsort(draws[:, 3:], axis=1)
    return kernels[order], np.take_along_axis(factors, order, axis=1)


# (arguments, width, height) -> maps, per geometric kernel
_MAPS: dict[int, Callable[[Floats, int, int], geometry.Affine]] = {
    int(Kernel.ROTATE): geometry.rotate,
    int(Kernel.SHEAR_X): lambda factor, width, height: geometry.shear_x(factor),
    int(Kernel.SHEAR_Y): lambda factor, width, height: geometry.shear_y(factor),
    int(Kernel.TRANSLATE_X): lambda share, width, height: geometry.translate(share * width, 0.0),
    int(Kernel.TRANSLATE_Y): lambda share, width, height: geometry.translate(0.0, share * height),
    int(Kernel.TRANSLATE_X_CONST): lambda share, width, height: geometry.translate(share * _const(width, height), 0.0),
    int(Kernel.TRANSLATE_Y_CONST): lambda share, width, height: geometry.translate(0.0, share * _const(width, height)),
}


def _const(width: int, height: int) -> int:
    """timm's translate_const in pixels."""
    return int(min(width, height) * TRANSLATE_SHARE)


def _operation_maps(kernels: Ints, values: Floats, size: tuple[int, int]) -> Floats:
    """The map of each layer (B, layers, 2, 3), identity where it changes colours or nothing."""
    flat, amounts = kernels.ravel(), values.ravel()
    maps = geometry.identity(flat.size)
    for kernel, make in _MAPS.items():
        rows = np.flatnonzero(flat == kernel)
        if rows.size:
            maps[rows] = make(amounts[rows], size[1], size[0])
    return maps.reshape(*kernels.shape, 2, 3)


def _warp(config: AugmentConfig, draws: Floats, kernels: Ints, values: Floats) -> Floats:
    """(B, 2, 3) output px -> resized crop px. The image is flipped first, the layers follow: maps compose backwards."""
    if config.no_aug:
        return geometry.identity(len(draws))
    height, width = config.size
    warp = geometry.hflip(draws[:, 0] < config.hflip, width)
    warp = geometry.compose(geometry.vflip(draws[:, 1] < config.vflip, height), warp)
    maps = _operation_maps(kernels, values, config.size)
    for layer in range(kernels.shape[1]):
        warp = geometry.compose(maps[:, layer], warp)
    return warp


def _colour_layers(kernels: Ints, values: Floats) -> tuple[Ints, Floats, Ints]:
    """Colour layers packed to the left (B, L), their arguments (B, L), how many precede the first geometric one (B,).

    timm fills with the mean colour at each geometric operation; colour layers before it spare the fill, others don't.
    """
    colour = (kernels != Kernel.NONE) & (kernels < Kernel.ROTATE)
    geometric = kernels >= Kernel.ROTATE
    before = np.cumsum(geometric, axis=1) == 0
    order = np.argsort(~colour, axis=1, kind="stable")
    op = np.take_along_axis(np.where(colour, kernels, Kernel.NONE), order, axis=1)
    argument = np.take_along_axis(np.where(colour, values, 0.0), order, axis=1)
    warp_at = np.where(geometric.any(axis=1), (colour & before).sum(axis=1), 0)
    return op.astype(np.int64), argument, warp_at.astype(np.int64)


def _erased_boxes(config: AugmentConfig, draw: _Draws, count: int) -> Ints:
    """timm's RandomErasing: boxes (B, recount, 4) of top, left, h, w, each the first of ten proposals that fits."""
    boxes = np.zeros((count, config.recount, 4), np.int64)
    if config.no_aug or config.reprob == 0:
        return boxes
    per_box = 2 * ERASE_TRIES + 2
    draws = draw(Stream.ERASE, 2 + config.recount * per_box)
    erased = np.flatnonzero(draws[:, 0] < config.reprob)
    number = _integers(draws[erased, 1], np.full(len(erased), config.recount - 1.0)) + 1  # boxes of this image
    proposals = draws[erased, 2:].reshape(len(erased), config.recount, per_box)
    drawn = _box_proposals(config.size, proposals, number)
    drawn[np.arange(config.recount) >= number[:, None]] = 0
    boxes[erased] = drawn
    return boxes


def _box_proposals(size: tuple[int, int], draws: Floats, number: Floats) -> Ints:
    """Draws (b, R, 2 * tries + 2), count (b,) that shares the area -> boxes (b, R, 4), zeros where nothing fits."""
    (small, large), (low, high) = ERASE_AREA, ERASE_ASPECT
    area = (small + (large - small) * draws[..., :ERASE_TRIES]) * (size[0] * size[1]) / number[:, None, None]
    aspect = np.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[..., ERASE_TRIES : 2 * ERASE_TRIES])
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2)))  # (b, R, 2, tries) h, w
    limits = np.array(size, np.float64)
    fits: Bools = np.all(sides < limits[:, None], axis=2)
    first = np.take_along_axis(sides, fits.argmax(2)[:, :, None, None], axis=3)[..., 0]
    corner = _integers(draws[..., 2 * ERASE_TRIES :], limits - first)
    boxes = np.concatenate([corner, first], axis=2)
    return np.where(np.any(fits, axis=2)[..., None], boxes, 0.0).astype(np.int64)

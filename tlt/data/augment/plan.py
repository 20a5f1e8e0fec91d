"""Draws the augmentation plan, everything random about a batch of training images, before a pixel is decoded.

`make_plan` is a pure function of (config, seed, epoch, index, image size), row by row: a sample's plan does not depend
on the batch it is in. The backend executes `crop` and `interpolation` (decode, cut, resize to uint8), the device stage
`warp`, the colour layers and `erase`. Labels follow `pixel_affine`. The numbers mean what they mean in timm 1.0
(`create_transform(is_training=True)`, `RandomErasing`).

The order is timm's: crop, flip, RandAugment on the resized crop, whose geometric operations are the warp.

Legend: B samples, L colour layers, R erased boxes, (H, W) output size. `tlt.geometry` explains maps (B, 2, 3).
Draws are uniform numbers in [0, 1).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import numpy as np
import numpy.typing as npt

from tlt import geometry
from tlt.data.augment import rand_augment
from tlt.data.augment.counter import Bools, Floats, Ints, keys, uniform
from tlt.data.augment.rand_augment import Kernel, RandAugmentPolicy
from tlt.errors import UserError, in_range, one_of, size_of

Range = tuple[float, float]
Draw = Callable[[int, int], Floats]  # (stream, k) -> uniform numbers (B, k)

BILINEAR, BICUBIC = 2, 3  # PIL.Image.Resampling's numbers
INTERPOLATIONS = {"random": (BILINEAR, BICUBIC), "bilinear": (BILINEAR,), "bicubic": (BICUBIC,)}
ERASE_MODES = ("const", "rand", "pixel")
ERASE_AREA = (0.02, 1 / 3)
ERASE_ASPECT = (0.3, 1 / 0.3)
TRIES = 10  # boxes that are proposed for one crop or one erased box
BOX_DRAWS = 2 * TRIES + 2  # areas, aspect ratios, two coordinates


class Stream(IntEnum):
    """Numbers the uses of `counter.uniform`."""

    CROP = 0
    FLIP = 1
    RAND_AUGMENT = 2
    COLOR_JITTER = 3
    ERASE = 4
    ERASE_NOISE = 5
    REPLACEMENT = 64  # an image in place of one that can't be read


@dataclass(frozen=True)
class AugmentConfig:
    """Holds the settings of training augmentation, with the names of timm's flags. Raises UserError if this loader
    can't do what a value says; the message names the flag."""

    size: tuple[int, int]  # (H, W) of the output in pixels
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area that a crop keeps
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of a crop
    hflip: float = 0.5
    vflip: float = 0.0
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float | Sequence[float] | None = 0.4  # brightness, contrast, saturation; off with auto_augment
    interpolation: str = "random"
    reprob: float = 0.25
    remode: str = "pixel"
    recount: int = 1
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # in [0, 1]; what a warp shows outside the image
    no_aug: bool = False  # squash the whole image to `size` and do nothing else, as timm's --no-aug

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", size_of("--img-size", self.size))
        for name in ("scale", "ratio"):
            in_range(f"--{name}", pair := getattr(self, name), 0, counts=(2,))
            if not 0 < pair[0] <= pair[1]:
                raise UserError(f"--{name} {pair}: give 0 < smallest <= largest")
        for name in ("hflip", "vflip", "reprob"):
            in_range(f"--{name}", getattr(self, name), 0, 1)
        in_range("--recount", self.recount, 1, whole=True)
        one_of("--remode", self.remode, ERASE_MODES)
        one_of("--train-interpolation", self.interpolation, tuple(INTERPOLATIONS))
        in_range("--color-jitter", self._strengths, 0, counts=(3,))
        in_range("--mean", self.mean, 0, 1, counts=(3,))
        if self.auto_augment:
            rand_augment.parse(self.auto_augment)

    @property
    def _strengths(self) -> tuple[float, ...]:
        jitter = self.color_jitter
        return tuple(jitter) if isinstance(jitter, Sequence) else (jitter or 0.0,) * 3

    @property
    def policy(self) -> RandAugmentPolicy | None:
        """Return the parsed RandAugment policy, or None."""
        return rand_augment.parse(self.auto_augment) if self.auto_augment else None

    @property
    def jitter(self) -> tuple[float, ...] | None:
        """Return the strengths of (brightness, contrast, saturation), or None: RandAugment replaces colour jitter."""
        return self._strengths if any(self._strengths) and not self.auto_augment else None

    @property
    def fill(self) -> tuple[int, ...]:
        """Return the colour (0..255) outside the image: the mean, rounded as in timm."""
        return tuple(min(255, round(255 * value)) for value in self.mean)


@dataclass
class Plan:
    """Says what is done to each of B images, in arrays on the host, for the backend and the device stage."""

    size: tuple[int, int]  # (H, W) of the output
    image_sizes: Ints  # (B, 2) width, height of the encoded images in pixels
    crop: Ints  # (B, 4) x, y, w, h of the window to cut out, in image pixels
    interpolation: Ints  # (B,) BILINEAR or BICUBIC: the antialiased resize of the crop to `size`
    warp: Floats  # (B, 2, 3) output px -> resized crop px
    pixel_affine: Floats  # (B, 2, 3) output px -> image px: `warp`, then the crop
    warp_interpolation: Ints  # (B,) BILINEAR or BICUBIC
    op: Ints  # (B, L) rand_augment.Kernel of each colour layer, NONE where there is none
    argument: Floats  # (B, L)
    before_warp: Bools  # (B, L) whether the layer precedes the warp, whose fill then keeps its colour
    erase: Ints  # (B, R, 4) top, left, h, w in output pixels; h = 0: no box
    erase_key: npt.NDArray[np.uint64]  # (B,) key of the noise in the boxes

    def __len__(self) -> int:
        return len(self.crop)

    def normalised_affine(self) -> Floats:
        """Return `pixel_affine` as maps (B, 2, 3) from the unit square of the output to that of the image."""
        return geometry.normalise(self.pixel_affine, (self.image_sizes[:, 1], self.image_sizes[:, 0]), self.size)

    def visible(self) -> Floats:
        """Return the crop as shares of the image, (B, 4) x0, y0, x1, y1. Outside of it the output shows the fill."""
        x, y, w, h = self.crop.T
        width, height = self.image_sizes.T
        return np.stack([x / width, y / height, (x + w) / width, (y + h) / height], axis=1)


def make_plan(
    config: AugmentConfig, seed: int, epoch: int, indices: npt.ArrayLike, widths: npt.ArrayLike, heights: npt.ArrayLike
) -> Plan:
    """Draw the plan of the images `indices` (B,); `widths` and `heights` are their sizes in pixels, numbers or (B,)."""
    indices = np.atleast_1d(np.asarray(indices, np.int64))
    image_sizes = np.stack(np.broadcast_arrays(widths, heights, indices)[:2], axis=1).astype(np.int64)
    draw = partial(uniform, seed, epoch, indices)
    if config.no_aug:
        kind = "bilinear" if config.interpolation == "random" else config.interpolation  # as timm
        config = replace(config, hflip=0.0, vflip=0.0, auto_augment=None, color_jitter=None, reprob=0.0)
        config = replace(config, interpolation=kind)
        crop = np.concatenate([np.zeros_like(image_sizes), image_sizes], axis=1)
    else:
        crop = crop_windows(config.scale, config.ratio, draw(Stream.CROP, BOX_DRAWS), image_sizes)
    x, y, w, h = crop.T
    flip_draws = draw(Stream.FLIP, 4)  # left and right, top and bottom, filter of the resize, filter of the warp
    filters = np.array(INTERPOLATIONS[config.interpolation], np.int64)
    interpolation, warp_interpolation = filters[(flip_draws[:, 2:] * len(filters)).astype(np.int64)].T
    kernels, values = _layers(config, draw, len(indices))
    warp = _warps(config, flip_draws[:, :2], kernels, values)
    colour = kernels < Kernel.ROTATE
    geometric = kernels >= Kernel.ROTATE
    erase_draws = draw(Stream.ERASE, 2 + config.recount * BOX_DRAWS)
    return Plan(
        size=config.size,
        image_sizes=image_sizes,
        crop=crop,
        interpolation=interpolation,
        warp=warp,
        pixel_affine=geometry.compose(warp, geometry.crop(x, y, w, h, config.size[1], config.size[0])),
        warp_interpolation=warp_interpolation,
        op=np.where(colour, kernels, Kernel.NONE),
        argument=np.where(colour, values, 0.0),
        before_warp=np.cumsum(geometric, axis=1) == 0,
        erase=erased_boxes(config.size, config.reprob, config.recount, erase_draws),
        erase_key=keys(seed, epoch, indices, int(Stream.ERASE_NOISE)),
    )


def _layers(config: AugmentConfig, draw: Draw, count: int) -> tuple[Ints, Floats]:
    """Draw all operations in timm's order, colours and geometry. Return kernels and arguments (B, layers)."""
    if (policy := config.policy) is not None:
        return rand_augment.sample_layers(policy, draw(Stream.RAND_AUGMENT, policy.uniforms))
    if config.jitter is None:
        return np.zeros((count, 0), np.int64), np.zeros((count, 0))
    # As torchvision's ColorJitter without hue: three factors from U[max(0, 1 - v), 1 + v], in random order.
    strength = np.array(config.jitter)
    draws = draw(Stream.COLOR_JITTER, 6)
    low, high = np.maximum(0.0, 1.0 - strength), 1.0 + strength
    factors = low + (high - low) * draws[:, :3]
    kernels = np.where(strength > 0, [Kernel.BRIGHTNESS, Kernel.CONTRAST, Kernel.COLOR], Kernel.NONE)
    order = np.argsort(draws[:, 3:], axis=1)
    return kernels[order], np.take_along_axis(factors, order, axis=1)


# (arguments, width, height) -> maps, per geometric kernel
_MAPS: dict[int, Callable[[Floats, int, int], geometry.Affine]] = {
    Kernel.ROTATE: geometry.rotate,
    Kernel.SHEAR_X: lambda factor, width, height: geometry.shear_x(factor),
    Kernel.SHEAR_Y: lambda factor, width, height: geometry.shear_y(factor),
    Kernel.TRANSLATE_X: lambda share, width, height: geometry.translate(share * width, 0.0),
    Kernel.TRANSLATE_Y: lambda share, width, height: geometry.translate(0.0, share * height),
}


def _warps(config: AugmentConfig, flip_draws: Floats, kernels: Ints, values: Floats) -> Floats:
    """Return maps (B, 2, 3) from output px to resized crop px, of the flips and then the geometric layers.

    A later operation on the image is an earlier step of the map, because the map goes from output to input.
    """
    height, width = config.size
    flips = flip_draws < np.array([config.hflip, config.vflip])
    result = geometry.compose(geometry.vflip(flips[:, 1], height), geometry.hflip(flips[:, 0], width))
    for layer in range(kernels.shape[1]):
        maps = geometry.identity(len(flips))
        for kernel, make in _MAPS.items():
            rows = np.flatnonzero(kernels[:, layer] == kernel)
            if rows.size:
                maps[rows] = make(values[rows, layer], width, height)
        result = geometry.compose(maps, result)
    return result


def crop_windows(scale: Range, ratio: Range, draws: Floats, image_sizes: Ints) -> Ints:
    """Choose random resized crops (B, 4) of x, y, w, h: the first that fits of ten (area, log aspect) proposals, else
    the largest central window of an allowed ratio. `draws` (B, BOX_DRAWS); `image_sizes` (B, 2) width, height."""
    size = image_sizes.astype(np.float64)
    proposals = _proposals(scale, ratio, draws, size[:, :1] * size[:, 1:])
    fits: Bools = np.all((proposals <= size[:, :, None]) & (proposals > 0), axis=1)
    width, height = size.T
    low, high = ratio
    w = np.where(width / height > high, np.rint(height * high), width)
    h = np.where(width / height < low, np.rint(width / low), height)
    central = np.stack([(width - w) // 2, (height - h) // 2, w, h], axis=1).astype(np.int64)
    return np.where(np.any(fits, axis=1)[:, None], _first_that_fits(proposals, fits, draws, size), central)


def erased_boxes(size: tuple[int, int], probability: float, recount: int, draws: Floats) -> Ints:
    """Choose the boxes of timm's RandomErasing, (B, recount, 4) of top, left, h, w: each is the first that fits of ten
    proposals, or zeros. `draws` (B, 2 + recount * BOX_DRAWS); `size` (H, W)."""
    number = _integers(draws[:, 1], np.full(len(draws), recount - 1.0)) + 1  # boxes that share the area
    of_boxes = draws[:, 2:].reshape(len(draws), recount, BOX_DRAWS)
    limits = np.array(size, np.float64)
    proposals = _proposals(ERASE_AREA, ERASE_ASPECT, of_boxes, (size[0] * size[1]) / number[:, None, None])
    fits: Bools = np.all(proposals < limits[:, None], axis=2)
    boxes = _first_that_fits(proposals, fits, of_boxes, limits)
    erased = (draws[:, :1] < probability) & (np.arange(recount) < number[:, None]) & np.any(fits, axis=2)
    return np.where(erased[..., None], boxes, 0)


def _proposals(share: Range, ratio: Range, draws: Floats, area: Floats) -> Floats:
    """Return sides (..., 2, tries) of boxes with random shares of an area, and ratios of first to second side."""
    small, large = share
    low, high = ratio
    areas = (small + (large - small) * draws[..., :TRIES]) * area
    aspects = np.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[..., TRIES : 2 * TRIES])
    return np.rint(np.sqrt(np.stack([areas * aspects, areas / aspects], axis=-2)))


def _first_that_fits(proposals: Floats, fits: Bools, draws: Floats, limits: Floats) -> Ints:
    """Return corner and sides (..., 4) of the first proposal that fits into the limits (..., 2), else of any."""
    sides = np.take_along_axis(proposals, fits.argmax(-1)[..., None, None], axis=-1)[..., 0]
    corner = _integers(draws[..., 2 * TRIES :], limits - sides)
    return np.concatenate([corner, sides], axis=-1).astype(np.int64)


def _integers(draws: Floats, largest: Floats) -> Floats:
    """Turn uniform draws into uniform integers 0..largest, as floats."""
    return np.minimum(np.floor(draws * (largest + 1)), largest)

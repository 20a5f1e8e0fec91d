"""Boxes in images: random resized crops and erased areas, by timm's rules.

Legend: B samples, R erased boxes, (H, W) output size. Draws are uniform numbers in [0, 1).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Range = tuple[float, float]

TRIES = 10
BOX_DRAWS = 2 * TRIES + 2  # areas, aspect ratios, two coordinates
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)


def crop_windows(scale: Range, ratio: Range, draws: Floats, source: Ints) -> Ints:
    """Random resized crop: of ten (area, log aspect) proposals the first that fits, else the central crop.

    Args:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width / height.
        draws: (B, BOX_DRAWS).
        source: (B, 2) width and height of the image.

    Returns:
        (B, 4) x, y, w, h.
    """
    size = source.astype(np.float64)
    proposals = _proposals(scale, ratio, draws, size[:, :1] * size[:, 1:])
    fits: Bools = np.all((proposals <= size[:, :, None]) & (proposals > 0), axis=1)
    windows = _first_that_fits(proposals, fits, draws, size)
    none_fits = ~np.any(fits, axis=1)
    windows[none_fits] = _central_crops(ratio, source[none_fits])
    return windows


def _central_crops(ratio: Range, source: Ints) -> Ints:
    """The largest central window (B, 4) whose aspect ratio is allowed."""
    width, height = source.astype(np.float64).T
    low, high = ratio
    w = np.where(width / height > high, np.rint(height * high), width)
    h = np.where(width / height < low, np.rint(width / low), height)
    return np.stack([(width - w) // 2, (height - h) // 2, w, h], axis=1).astype(np.int64)


def erased_boxes(size: tuple[int, int], probability: float, recount: int, draws: Floats) -> Ints:
    """timm's RandomErasing: boxes (B, recount, 4) of top, left, h, w, each the first of ten proposals that fits; zeros
    where there is none. `draws` (B, erase_draws(recount)); `size` (H, W)."""
    number = _integers(draws[:, 1], np.full(len(draws), recount - 1.0)) + 1  # boxes that share the area
    of_boxes = draws[:, 2:].reshape(len(draws), recount, BOX_DRAWS)
    limits = np.array(size, np.float64)
    proposals = _proposals(ERASE_AREA, ERASE_ASPECT, of_boxes, (size[0] * size[1]) / number[:, None, None])
    fits: Bools = np.all(proposals < limits[:, None], axis=2)
    boxes = _first_that_fits(proposals, fits, of_boxes, limits)
    erased = (draws[:, :1] < probability) & (np.arange(recount) < number[:, None]) & np.any(fits, axis=2)
    return np.where(erased[..., None], boxes, 0)


def erase_draws(recount: int) -> int:
    """How many draws `erased_boxes` takes per image."""
    return 2 + recount * BOX_DRAWS


def _proposals(share: Range, ratio: Range, draws: Floats, area: Floats) -> Floats:
    """Sides (..., 2, tries) of boxes: a share of the area, and a ratio of the first side to the second."""
    (small, large), (low, high) = share, ratio
    areas = (small + (large - small) * draws[..., :TRIES]) * area
    aspects = np.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[..., TRIES : 2 * TRIES])
    return np.rint(np.sqrt(np.stack([areas * aspects, areas / aspects], axis=-2)))


def _first_that_fits(proposals: Floats, fits: Bools, draws: Floats, limits: Floats) -> Ints:
    """The corner and the sides (..., 4) of the first of the proposals that fits into the limits (..., 2); anything
    where none does."""
    sides = np.take_along_axis(proposals, fits.argmax(-1)[..., None, None], axis=-1)[..., 0]
    corner = _integers(draws[..., 2 * TRIES :], limits - sides)
    return np.concatenate([corner, sides], axis=-1).astype(np.int64)


def _integers(draws: Floats, largest: Floats) -> Floats:
    """Uniform integers 0..largest, as floats."""
    return np.minimum(np.floor(draws * (largest + 1)), largest)

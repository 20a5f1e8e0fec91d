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

CROP_TRIES = ERASE_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2
_DRAWS_PER_BOX = 2 * ERASE_TRIES + 2
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)


def whole(source: Ints) -> Ints:
    """(B, 2) width, height -> (B, 4) x, y, w, h of all of it."""
    return np.concatenate([np.zeros_like(source), source], axis=1)


def crop_windows(scale: Range, ratio: Range, draws: Floats, source: Ints) -> Ints:
    """Random resized crop: of ten (area, log aspect) proposals the first that fits, else the central crop.

    Args:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width / height.
        draws: (B, CROP_DRAWS).
        source: (B, 2) width and height of the image.

    Returns:
        (B, 4) x, y, w, h.
    """
    size = source.astype(np.float64)[:, :, None]  # (B, 2, 1) width, height
    (small, large), (low, high) = scale, ratio
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
    boxes = np.zeros((len(draws), recount, 4), np.int64)
    erased = np.flatnonzero(draws[:, 0] < probability)
    number = _integers(draws[erased, 1], np.full(len(erased), recount - 1.0)) + 1  # boxes of this image
    proposals = draws[erased, 2:].reshape(len(erased), recount, _DRAWS_PER_BOX)
    drawn = _box_proposals(size, proposals, number)
    drawn[np.arange(recount) >= number[:, None]] = 0
    boxes[erased] = drawn
    return boxes


def erase_draws(recount: int) -> int:
    """How many draws `erased_boxes` takes per image."""
    return 2 + recount * _DRAWS_PER_BOX


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


def _integers(draws: Floats, largest: Floats) -> Floats:
    """Uniform integers 0..largest, as floats."""
    return np.minimum(np.floor(draws * (largest + 1)), largest)

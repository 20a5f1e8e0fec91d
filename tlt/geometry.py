"""Affine maps of image coordinates, one 2x3 matrix per sample. All this arithmetic is here.

Legend: B samples; a map is a float64 array (B, 2, 3) that takes a point (x, y, 1) to (x', y').
Coordinates are continuous pixels: pixel (row i, column j) covers [j, j+1] x [i, i+1], its centre is (j + .5, i + .5).
Every map goes from OUTPUT coordinates to SOURCE coordinates: it says from which source point an output point comes, as
warping images and sampling label maps require. Rotation, shear and translation have PIL's signs and centre.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Affine: TypeAlias = npt.NDArray[np.float64]  # (B, 2, 3)
Numbers: TypeAlias = npt.ArrayLike  # a number for all samples, or (B,)


def identity(count: int) -> Affine:
    """Return `count` identity maps, (count, 2, 3)."""
    return np.tile(np.eye(2, 3), (count, 1, 1))


def compose(first: Affine, second: Affine) -> Affine:
    """Return the map that applies `first` to a point and `second` to the result.

    For output-to-source maps, `compose(output_to_middle, middle_to_source)` is output-to-source, so the image operation
    that runs LAST comes first.
    """
    first = np.asarray(first, np.float64)
    second = np.asarray(second, np.float64)
    linear = second[:, :, :2]
    composed = linear[:, :, :1] * first[:, :1, :] + linear[:, :, 1:] * first[:, 1:, :]
    composed[:, :, 2] += second[:, :, 2]
    return composed


def apply(affine: Affine, points: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Map points (x, y), (B, P, 2) or (P, 2), and return them as (B, P, 2)."""
    points = np.asarray(points, np.float64)
    return points @ affine[:, :, :2].transpose(0, 2, 1) + affine[:, None, :, 2]


def _matrix(a: Numbers, b: Numbers, c: Numbers, d: Numbers, e: Numbers, f: Numbers) -> Affine:
    """Return x' = a x + b y + c, y' = d x + e y + f as a map; each coefficient is a number or (B,)."""
    coefficients = (a, b, c, d, e, f)
    maps = np.empty((max(np.size(value) for value in coefficients), 6))
    for column, value in enumerate(coefficients):
        maps[:, column] = value
    return maps.reshape(-1, 2, 3)


def crop(x: Numbers, y: Numbers, w: Numbers, h: Numbers, out_w: Numbers, out_h: Numbers) -> Affine:
    """Return the map of cutting w x h pixels with top left corner (x, y) and resizing them to out_w x out_h."""
    scale_x = np.asarray(w, np.float64) / np.asarray(out_w, np.float64)
    scale_y = np.asarray(h, np.float64) / np.asarray(out_h, np.float64)
    return _matrix(scale_x, 0.0, x, 0.0, scale_y, y)


def hflip(flags: npt.ArrayLike, width: Numbers) -> Affine:
    """Return the map of swapping left and right where `flags` (bool, (B,)) is set; `width` in pixels."""
    flags = np.asarray(flags, bool)
    return _matrix(np.where(flags, -1.0, 1.0), 0.0, np.where(flags, width, 0.0), 0.0, 1.0, 0.0)


def vflip(flags: npt.ArrayLike, height: Numbers) -> Affine:
    """Return the map of swapping top and bottom where `flags` (bool, (B,)) is set; `height` in pixels."""
    flags = np.asarray(flags, bool)
    return _matrix(1.0, 0.0, 0.0, 0.0, np.where(flags, -1.0, 1.0), np.where(flags, height, 0.0))


def rotate(degrees: Numbers, width: Numbers, height: Numbers) -> Affine:
    """Return the map of `PIL.Image.rotate`: counter-clockwise about the image's centre, without changing its size."""
    angle = -np.radians(np.asarray(degrees, np.float64))
    cos, sin = np.cos(angle), np.sin(angle)
    centre_x, centre_y = np.asarray(width, np.float64) / 2, np.asarray(height, np.float64) / 2
    offset_x = centre_x - cos * centre_x - sin * centre_y
    offset_y = centre_y + sin * centre_x - cos * centre_y
    return _matrix(cos, sin, offset_x, -sin, cos, offset_y)


def shear_x(factor: Numbers) -> Affine:
    """Return x' = x + factor * y, as `Image.transform(size, AFFINE, (1, factor, 0, 0, 1, 0))` does."""
    return _matrix(1.0, factor, 0.0, 0.0, 1.0, 0.0)


def shear_y(factor: Numbers) -> Affine:
    """Return y' = y + factor * x, as `Image.transform(size, AFFINE, (1, 0, 0, factor, 1, 0))` does."""
    return _matrix(1.0, 0.0, 0.0, factor, 1.0, 0.0)


def translate(dx: Numbers, dy: Numbers) -> Affine:
    """Return x' = x + dx, y' = y + dy in pixels: positive values move the content left and up, as in PIL."""
    return _matrix(1.0, 0.0, dx, 0.0, 1.0, dy)


def normalise(affine: Affine, source_size: tuple[Numbers, Numbers], output_size: tuple[Numbers, Numbers]) -> Affine:
    """Turn maps (B, 2, 3) from output pixels to source pixels into maps from the unit square of the output to that of
    the source. Both sizes are (height, width) in pixels, each a number or (B,)."""
    source_h, source_w = (np.asarray(size, np.float64) for size in source_size)
    output_h, output_w = (np.asarray(size, np.float64) for size in output_size)
    rows, columns = affine[:, 0], affine[:, 1]
    x_row = _matrix(output_w / source_w, output_h / source_w, 1 / source_w, 0, 0, 0)[:, 0] * rows
    y_row = _matrix(output_w / source_h, output_h / source_h, 1 / source_h, 0, 0, 0)[:, 0] * columns
    return np.stack([x_row, y_row], axis=1)

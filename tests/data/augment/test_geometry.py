"""Affine maps against PIL: ramp images in floats show where PIL took each output pixel from."""

import numpy as np
import pytest
from PIL import Image, ImageOps
from timm.data import auto_augment

from tlt import geometry

WIDTH, HEIGHT = 40, 28


def ramps(width: int, height: int) -> tuple[Image.Image, Image.Image]:
    """Images whose values are the x and y coordinates of the pixel centres."""
    y, x = np.mgrid[:height, :width] + 0.5
    return Image.fromarray(x.astype(np.float32)), Image.fromarray(y.astype(np.float32))


def centres(width: int, height: int) -> np.ndarray:
    """Pixel centres (H * W, 2)."""
    y, x = np.mgrid[:height, :width] + 0.5
    return np.stack([x.ravel(), y.ravel()], axis=1)


def where_pil_looked(operation, width=WIDTH, height=HEIGHT) -> np.ndarray:
    """(H' * W', 2) source coordinates of an image operation; edges of the ramp are flat."""
    return np.stack([np.asarray(operation(ramp)).ravel() for ramp in ramps(width, height)], axis=1)


def check(affine: np.ndarray, operation, size=(WIDTH, HEIGHT), source=(WIDTH, HEIGHT)) -> None:
    """The map says what PIL did, for the output pixels whose neighbourhood lies inside the source."""
    mine = geometry.apply(affine, centres(*size))[0]
    inner = ((mine > 1) & (mine < np.array(source) - 1)).all(axis=1)
    assert inner.mean() > 0.3
    assert abs(mine - where_pil_looked(operation, *source))[inner].max() < 1e-4


BILINEAR = {"resample": Image.Resampling.BILINEAR, "fillcolor": 0}


@pytest.mark.parametrize("value", [-27.0, 4.5, 30.0])
def test_rotate(value):
    check(geometry.rotate(value, WIDTH, HEIGHT), lambda image: auto_augment.rotate(image, value, **BILINEAR))


@pytest.mark.parametrize("value", [-0.3, 0.12])
def test_shears(value):
    check(geometry.shear_x(value), lambda image: auto_augment.shear_x(image, value, **BILINEAR))
    check(geometry.shear_y(value), lambda image: auto_augment.shear_y(image, value, **BILINEAR))


@pytest.mark.parametrize("value", [-0.4, 0.13])
def test_translations(value):
    across, down = geometry.translate(value * WIDTH, 0), geometry.translate(0, value * HEIGHT)
    check(across, lambda image: auto_augment.translate_x_rel(image, value, **BILINEAR))
    check(down, lambda image: auto_augment.translate_y_rel(image, value, **BILINEAR))


def test_flips():
    check(geometry.hflip([True], WIDTH), ImageOps.mirror)
    check(geometry.vflip([True], HEIGHT), ImageOps.flip)
    check(geometry.hflip([False], WIDTH), lambda image: image)


def test_crop_and_resize():
    window = (3, 5, 26, 18)
    box = (3, 5, 29, 23)
    check(
        geometry.crop(*window, 33, 24),
        lambda image: image.resize((33, 24), Image.Resampling.BILINEAR, box=box),
        size=(33, 24),
    )


def test_compose_runs_the_last_image_operation_first():
    def operation(image):
        image = ImageOps.mirror(image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, box=(10, 4, 40, 28)))
        image = auto_augment.shear_x(image, 0.2, **BILINEAR)
        return auto_augment.rotate(image, 20.0, **BILINEAR)

    resized = geometry.crop(10, 4, 30, 24, WIDTH, HEIGHT)
    sheared = geometry.compose(geometry.shear_x(0.2), geometry.hflip([True], WIDTH))
    total = geometry.compose(geometry.compose(geometry.rotate(20.0, WIDTH, HEIGHT), sheared), resized)
    mine = geometry.apply(total, centres(WIDTH, HEIGHT))[0]
    theirs = where_pil_looked(operation, 60, 50)
    # A second interpolation is exact on ramps but for the edges that the first one flattened or filled.
    radius = abs(centres(WIDTH, HEIGHT) - np.array([WIDTH, HEIGHT]) / 2).max(axis=1)
    assert abs(mine - theirs)[radius < 8].max() < 1e-4


def test_invert_undoes():
    rng = np.random.default_rng(0)
    maps = geometry.identity(5) + rng.normal(size=(5, 2, 3)) * 0.2
    points = rng.normal(size=(5, 7, 2)) * 30
    assert np.allclose(geometry.apply(geometry.invert(maps), geometry.apply(maps, points)), points)
    assert np.allclose(geometry.compose(maps, geometry.invert(maps)), geometry.identity(5))


def test_normalise_scales_both_ends_per_sample():
    rng = np.random.default_rng(1)
    maps, points = rng.normal(size=(2, 2, 3)), rng.random((2, 6, 2))
    widths, heights = np.array([500, 30]), np.array([375, 60])
    unit = geometry.normalise(maps, (heights, widths), (14, 28))
    expected = geometry.apply(maps, points * [28, 14]) / np.stack([widths, heights], axis=1)[:, None]
    assert np.allclose(geometry.apply(unit, points), expected)

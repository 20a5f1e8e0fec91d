"""Affine maps against PIL: ramp images in floats show where PIL took each output pixel from."""

from functools import partial

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.augment.timm_layers import run_timm
from tlt import geometry
from tlt.data.augment.rand_augment import Kernel

WIDTH, HEIGHT = 40, 28
Y, X = np.mgrid[:HEIGHT, :WIDTH] + 0.5
CENTRES = np.stack([X.ravel(), Y.ravel()], axis=1)  # of the pixels
# name -> map of the output's pixels to the image's, and the operation
OPERATIONS = {
    "rotate": (geometry.rotate(-27.0, WIDTH, HEIGHT), partial(run_timm, Kernel.ROTATE, -27.0)),
    "rotate a little": (geometry.rotate(4.5, WIDTH, HEIGHT), partial(run_timm, Kernel.ROTATE, 4.5)),
    "shear x": (geometry.shear_x(-0.3), partial(run_timm, Kernel.SHEAR_X, -0.3)),
    "shear y": (geometry.shear_y(0.12), partial(run_timm, Kernel.SHEAR_Y, 0.12)),
    "to the side": (geometry.translate(-0.4 * WIDTH, 0), partial(run_timm, Kernel.TRANSLATE_X, -0.4)),
    "down": (geometry.translate(0, 0.13 * HEIGHT), partial(run_timm, Kernel.TRANSLATE_Y, 0.13)),
    "mirror": (geometry.hflip([True], WIDTH), ImageOps.mirror),
    "flip": (geometry.vflip([True], HEIGHT), ImageOps.flip),
    "crop": (
        geometry.crop(3, 5, 26, 18, WIDTH, HEIGHT),
        lambda image: image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, box=(3, 5, 29, 23)),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_maps_say_where_pil_looks(name):
    affine, operation = OPERATIONS[name]
    ramps = [Image.fromarray(coordinate.astype(np.float32)) for coordinate in (X, Y)]
    theirs = np.stack([np.asarray(operation(ramp)).ravel() for ramp in ramps], axis=1)
    mine = geometry.apply(affine, CENTRES)[0]
    inner = ((mine > 1) & (mine < np.array([WIDTH, HEIGHT]) - 1)).all(axis=1)  # the edges of a ramp are flat
    assert inner.mean() > 0.3
    assert abs(mine - theirs)[inner].max() < 1e-4


def test_maps_compose_invert_and_normalise_as_the_points_do():
    rng = np.random.default_rng(0)
    first, second = (geometry.identity(2) + rng.normal(size=(2, 2, 3)) * 0.2 for _ in range(2))
    points = rng.random((2, 7, 2))
    both = geometry.apply(second, geometry.apply(first, points))  # the last operation of the image comes first
    assert np.allclose(geometry.apply(geometry.compose(first, second), points), both)
    assert np.allclose(geometry.compose(first, geometry.invert(first)), geometry.identity(2))
    widths, heights = np.array([500, 30]), np.array([375, 60])
    unit = geometry.normalise(first, (heights, widths), (14, 28))
    expected = geometry.apply(first, points * [28, 14]) / np.stack([widths, heights], axis=1)[:, None]
    assert np.allclose(geometry.apply(unit, points), expected)

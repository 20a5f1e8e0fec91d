"""Colour operations and warps against timm's on PIL images."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.data.augment.timm_layers import COLOURS, as_batch, picture, run_timm
from tlt import geometry
from tlt.data.augment.operations import OPERATIONS, warp
from tlt.data.augment.plan import BICUBIC, BILINEAR
from tlt.data.augment.rand_augment import Kernel

FACTORS = [0.0, 0.1, 0.19, 0.35, 0.5, 0.77, 1.0, 1.1, 1.37, 1.81, 1.9, 2.6]
ARGUMENTS = {
    Kernel.AUTO_CONTRAST: [0.0],
    Kernel.EQUALIZE: [0.0],
    Kernel.INVERT: [0.0],
    Kernel.POSTERIZE: [*range(-1, 10)],
    Kernel.SOLARIZE: [0, 1, 25, 100, 128, 200, 255, 256],
    Kernel.SOLARIZE_ADD: [0, 5, 55, 99, 110, 128],
}
FILL = (124, 116, 104)


def pictures(height: int, width: int) -> np.ndarray:
    """Noise, ramps, low contrast, one colour, blobs and two colours: (6, H, W, 3) uint8."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (height + width)], axis=-1)
    of_two = np.where((x + y)[..., None] % 3 == 0, [10, 20, 30], [200, 90, 255])
    noise, low, one = rng.integers(0, 256, ramps.shape), rng.integers(60, 180, ramps.shape), np.full(ramps.shape, 77)
    return np.stack([noise, ramps, low, one, picture(height, width), of_two]).astype(np.uint8)


@pytest.mark.parametrize("kernel", list(COLOURS))
@pytest.mark.parametrize("size", [(31, 45), (5, 9), (2, 1)])
def test_colours_are_within_one_grey_level_of_timms(kernel, size):
    images = pictures(*size)
    for argument in ARGUMENTS.get(kernel, FACTORS):
        mine = OPERATIONS[kernel](as_batch(images), torch.full((6,), float(argument)))
        theirs = np.stack([np.asarray(run_timm(kernel, argument, Image.fromarray(image))) for image in images])
        difference = abs(mine.permute(0, 2, 3, 1).numpy().astype(int) - theirs.astype(int))
        assert difference.max() <= 1, argument
        assert (difference > 0).mean() < 1e-3, argument
    assert set(OPERATIONS) == {k for k in Kernel if Kernel.NONE < k < Kernel.ROTATE} == set(COLOURS)


def maps_of(width: int, height: int) -> list[tuple[Kernel, float, geometry.Affine]]:
    """Geometric layers, with their arguments and their maps."""
    return [
        *[(Kernel.ROTATE, by, geometry.rotate(by, width, height)) for by in (-30.0, -7.0, 0.4, 27.0)],
        *[(Kernel.SHEAR_X, by, geometry.shear_x(by)) for by in (-0.3, 0.11)],
        *[(Kernel.SHEAR_Y, by, geometry.shear_y(by)) for by in (-0.3, 0.11)],
        *[(Kernel.TRANSLATE_X, by, geometry.translate(by * width, 0.0)) for by in (-0.45, 0.405, 0.25)],
        *[(Kernel.TRANSLATE_Y, by, geometry.translate(0.0, by * height)) for by in (-0.45, 0.405, 0.25)],
    ]


@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize("size", [(24, 24), (31, 45), (5, 9)])
@pytest.mark.parametrize("how", ["plain", "mirrored", "without doubles"])
def test_warp_is_within_one_grey_level_of_pil(resample, size, how):
    (height, width), source = size, picture(*size)
    image = ImageOps.mirror(Image.fromarray(source)) if how == "mirrored" else Image.fromarray(source)
    for kernel, value, moves in maps_of(width, height):
        theirs = np.asarray(run_timm(kernel, value, image, resample, FILL)).astype(int)
        affine = torch.from_numpy(geometry.compose(moves, geometry.hflip([how == "mirrored"], width)))
        affine = affine.float() if how == "without doubles" else affine  # as on Apple's GPUs
        mine = warp(as_batch(source[None]), affine, FILL, cubic=resample == BICUBIC)[0].permute(1, 2, 0).numpy()
        # Elsewhere a sampling point on a pixel's exact edge may fall on its other side.
        allowed = {"plain": 1e-9, "mirrored": 1e-3, "without doubles": 0.02}[how]
        assert (abs(mine.astype(int) - theirs) > 1).mean() < allowed, (kernel, value)

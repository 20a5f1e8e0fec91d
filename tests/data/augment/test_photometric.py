"""Colour operations against timm's on PIL images, at every kind of level."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.augment.timm_layers import COLOURS, as_batch, run_timm
from tlt.data.augment import photometric
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


def pictures(height: int, width: int) -> np.ndarray:
    """Noise, ramps, low contrast, one colour, blobs and two colours: (6, H, W, 3) uint8."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return np.stack(
        [
            rng.integers(0, 256, (height, width, 3)),
            np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (height + width)], axis=-1),
            rng.integers(60, 180, (height, width, 3)),
            np.full((height, width, 3), 77),
            np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)),
            np.where((x + y)[..., None] % 3 == 0, [10, 20, 30], [200, 90, 255]),
        ]
    ).astype(np.uint8)


@pytest.mark.parametrize("kernel", list(COLOURS))
@pytest.mark.parametrize("size", [(24, 24), (31, 45), (5, 9), (2, 1)])
def test_operations_are_within_one_grey_level_of_timms(kernel, size):
    images = pictures(*size)
    for argument in ARGUMENTS.get(kernel, FACTORS):
        mine = photometric.OPERATIONS[kernel](as_batch(images), torch.full((6,), float(argument)))
        theirs = np.stack([np.asarray(run_timm(kernel, argument, Image.fromarray(image))) for image in images])
        difference = abs(mine.permute(0, 2, 3, 1).numpy().astype(int) - theirs.astype(int))
        assert difference.max() <= 1, argument
        assert (difference > 0).mean() < 1e-3, argument


def test_every_colour_kernel_has_its_operation():
    assert set(photometric.OPERATIONS) == {k for k in Kernel if Kernel.NONE < k < Kernel.ROTATE} == set(COLOURS)

"""Colour operations against timm's on PIL images, at every kind of level."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from tlt.data.augment import photometric
from tlt.data.augment.rand_augment import Kernel

FACTORS = [0.0, 0.1, 0.19, 0.35, 0.5, 0.77, 1.0, 1.1, 1.37, 1.81, 1.9, 2.6]
ARGUMENTS = {
    Kernel.AUTO_CONTRAST: [0.0],
    Kernel.EQUALIZE: [0.0],
    Kernel.INVERT: [0.0],
    Kernel.POSTERIZE: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    Kernel.SOLARIZE: [0.0, 1.0, 25.0, 100.0, 128.0, 200.0, 255.0, 256.0],
    Kernel.SOLARIZE_ADD: [0.0, 5.0, 55.0, 99.0, 110.0, 128.0],
    Kernel.COLOR: FACTORS,
    Kernel.CONTRAST: FACTORS,
    Kernel.BRIGHTNESS: FACTORS,
    Kernel.SHARPNESS: FACTORS,
}
TIMM = {
    Kernel.AUTO_CONTRAST: lambda image, _: auto_augment.auto_contrast(image),
    Kernel.EQUALIZE: lambda image, _: auto_augment.equalize(image),
    Kernel.INVERT: lambda image, _: auto_augment.invert(image),
    Kernel.POSTERIZE: lambda image, bits: auto_augment.posterize(image, int(bits)),
    Kernel.SOLARIZE: lambda image, threshold: auto_augment.solarize(image, int(threshold)),
    Kernel.SOLARIZE_ADD: lambda image, add: auto_augment.solarize_add(image, int(add)),
    Kernel.COLOR: auto_augment.color,
    Kernel.CONTRAST: auto_augment.contrast,
    Kernel.BRIGHTNESS: auto_augment.brightness,
    Kernel.SHARPNESS: auto_augment.sharpness,
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


def as_batch(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def as_arrays(batch: torch.Tensor) -> np.ndarray:
    return batch.permute(0, 2, 3, 1).numpy().astype(int)


@pytest.mark.parametrize("kernel", list(ARGUMENTS))
@pytest.mark.parametrize("size", [(24, 24), (40, 28), (31, 45), (5, 9)])
def test_operations_are_within_one_grey_level_of_timms(kernel, size):
    images = pictures(*size)
    for argument in ARGUMENTS[kernel]:
        mine = photometric.OPERATIONS[kernel](as_batch(images), torch.full((6,), argument))
        theirs = np.stack([np.asarray(TIMM[kernel](Image.fromarray(image), argument)) for image in images])
        difference = abs(as_arrays(mine) - theirs.astype(int))
        assert difference.max() <= 1, argument
        assert (difference > 0).mean() < 1e-3, argument


def test_every_colour_kernel_has_its_operation():
    assert set(photometric.OPERATIONS) == {k for k in Kernel if Kernel.NONE < k < Kernel.ROTATE} == set(ARGUMENTS)


@pytest.mark.parametrize("bits", [0.0, -1.0])
def test_posterize_without_bits_is_black(bits):
    """timm 1.0.31 crashes here with Pillow 13."""
    assert not photometric.posterize(as_batch(pictures(8, 8)), torch.full((6,), bits)).any()


@pytest.mark.parametrize("kernel", list(ARGUMENTS))
def test_samples_do_not_touch_each_other(kernel):
    batch = as_batch(pictures(20, 30))
    arguments = torch.tensor((ARGUMENTS[kernel] * 6)[1:7])
    together = photometric.OPERATIONS[kernel](batch, arguments)
    for row in range(6):
        alone = photometric.OPERATIONS[kernel](batch[row : row + 1], arguments[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)

"""The operations of RandAugment as timm runs them on a PIL image, and images to run them on."""

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment

from tlt.data.augment.plan import BILINEAR
from tlt.data.augment.rand_augment import Kernel

GEOMETRIC = {
    Kernel.ROTATE: auto_augment.rotate,
    Kernel.SHEAR_X: auto_augment.shear_x,
    Kernel.SHEAR_Y: auto_augment.shear_y,
    Kernel.TRANSLATE_X: auto_augment.translate_x_rel,
    Kernel.TRANSLATE_Y: auto_augment.translate_y_rel,
}
COLOURS = {
    Kernel.AUTO_CONTRAST: lambda image, _: auto_augment.auto_contrast(image),
    Kernel.EQUALIZE: lambda image, _: auto_augment.equalize(image),
    Kernel.INVERT: lambda image, _: auto_augment.invert(image),
    # timm 1.0.31 crashes at 0 bits with Pillow 13: what is left is black
    Kernel.POSTERIZE: lambda image, bits: (
        auto_augment.posterize(image, int(bits)) if bits > 0 else image.point(lambda _: 0)
    ),
    Kernel.SOLARIZE: lambda image, threshold: auto_augment.solarize(image, int(threshold)),
    Kernel.SOLARIZE_ADD: lambda image, add: auto_augment.solarize_add(image, int(add)),
    Kernel.COLOR: auto_augment.color,
    Kernel.CONTRAST: auto_augment.contrast,
    Kernel.BRIGHTNESS: auto_augment.brightness,
    Kernel.SHARPNESS: auto_augment.sharpness,
}


def run_timm(kernel: int, value: float, image: Image.Image, resample: int = BILINEAR, fill=0) -> Image.Image:
    """One layer."""
    if kernel in GEOMETRIC:
        return GEOMETRIC[kernel](image, value, resample=Image.Resampling(resample), fillcolor=fill)
    return COLOURS[kernel](image, value)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Blobs with some noise on them (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    blobs = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (blobs + rng.integers(-20, 20, blobs.shape)).clip(0, 255).astype(np.uint8)


def as_batch(images: np.ndarray) -> torch.Tensor:
    """(B, H, W, 3) -> (B, 3, H, W)."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()

"""Where another backend's pixels are not Pillow's, and why: DALI's filter repeats the pixels at the border.

Pillow leaves out what a filter would read beyond the border, and gives its weight to the rest. On white noise, the
worst that there can be, this is many levels in the outermost pixels; in the middle of the image all backends agree.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tlt.data.decode import Request, Size, create_backend

CROP = (7, 9, 210, 150)
SIZE = (64, 72)
PAD = 20  # px, more than a filter reaches


@pytest.fixture(scope="module")
def noise() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (180, 250, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def resized(name: str, data: bytes, size: Size, interpolation: str) -> np.ndarray:
    """(h, w, 3): the crop by a backend."""
    backend = create_backend(name)
    request = Request(backend.open("x.jpg", bytearray(data)), CROP, size, interpolation)
    return backend.decode_batch([request], size).images[0].permute(1, 2, 0).numpy().astype(int)


def with_repeated_border(data: bytes, size: Size, interpolation: str) -> np.ndarray:
    """(h, w, 3): the crop by Pillow, which finds the border's pixels repeated around it."""
    x, y, w, h = CROP
    cut = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))[y : y + h, x : x + w]
    padded = Image.fromarray(np.pad(cut, [(PAD, PAD), (PAD, PAD), (0, 0)], mode="edge"))
    filter_ = Image.Resampling[interpolation.upper()]
    return np.asarray(padded.resize(size[::-1], filter_, box=(PAD, PAD, PAD + w, PAD + h))).astype(int)


@pytest.mark.parametrize(("interpolation", "most"), [("bilinear", 1), ("bicubic", 2)])
def test_dali_differs_by_the_border(noise: bytes, interpolation: str, most: int) -> None:
    pytest.importorskip("nvidia.dali")
    dali, pillow = (resized(name, noise, SIZE, interpolation) for name in ("dali-cpu", "pil"))
    off = abs(dali - with_repeated_border(noise, SIZE, interpolation))
    assert off.max() <= most and (off > 1).mean() < 1e-3
    border = np.ones(SIZE, bool)
    border[2:-2, 2:-2] = False
    off = abs(dali - pillow).max(axis=2)
    assert off[~border].max() <= most and off[border].max() > 5


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_torchvision_does_not_differ(noise: bytes, interpolation: str) -> None:
    assert (
        abs(resized("torchvision", noise, SIZE, interpolation) - resized("pil", noise, SIZE, interpolation)).max() <= 1
    )

"""JPEGs decoded at 1/2, 1/4 or 1/8: the same window as Pillow's of the whole image, and close to its grey levels."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from tlt.data.backends import decode
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import Crop, Encoded, PilBackend, Request, Size, TorchvisionBackend
from volo.cluster.distributed import World
from volo.config.args import TRAIN
from volo.train.data import open_folders, train_loader, validation_loader

SCALING = TorchvisionBackend(dct_scaling=True)
CROPS: list[tuple[Crop | None, Size, int]] = [  # crop, output, divisor
    (None, (50, 80), 4),
    ((21, 13, 599, 401), (50, 74), 4),
    ((21, 13, 599, 401), (100, 100), 2),
    ((7, 1, 633, 426), (26, 39), 8),
    ((339, 226, 301, 201), (50, 75), 2),
]


@pytest.fixture(autouse=True)
def small_images_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DCT_SCALING_PIXELS", 0)


def photograph(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg")).convert(mode)  # 640 x 427


def saved(image: Image.Image, path: Path, subsampling: int = 2) -> str:
    image.save(path, quality=90, subsampling=subsampling)
    return str(path)


def pixels(backend: PilBackend, path: str, crop: Crop | None, size: Size, interpolation: str) -> np.ndarray:
    """Rows, columns, channels."""
    return backend.decode(backend.open(path), crop, size, interpolation).permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize(
    ("mode", "subsampling", "interpolation"),
    [("RGB", 0, "bilinear"), ("RGB", 2, "bicubic"), ("L", 0, "bicubic"), ("CMYK", 0, "bilinear")],
)
def test_grey_levels_are_close_to_pillows(tmp_path: Path, mode: str, subsampling: int, interpolation: str) -> None:
    path = saved(photograph(mode), tmp_path / "x.jpg", subsampling)
    for crop, size, divisor in CROPS:
        assert SCALING.divisor(Request(SCALING.open(path), crop, size, interpolation)) == divisor
        difference = abs(
            pixels(SCALING, path, crop, size, interpolation) - pixels(PilBackend(), path, crop, size, interpolation)
        )
        assert difference.any(), "it was not scaled"
        assert difference.mean() < 1.1 and np.percentile(difference, 99.9) <= 10 and difference.max() <= 16


def test_windows_are_exact_to_a_tenth_of_a_pixel(tmp_path: Path) -> None:
    y, x = np.mgrid[:480, :641]
    waves = [128 + 100 * np.sin(2 * np.pi * at / 80) for at in (x, y, x + y)]
    path = saved(Image.fromarray(np.stack(waves, axis=2).astype(np.uint8)), tmp_path / "x.jpg", 0)
    for start, size in itertools.product((0, 1, 2, 3, 5, 7), ((29, 39), (30, 41), (58, 78))):
        crop = (start, start + 1, 640 - 2 * start, 470 - 2 * start)
        exact = pixels(PilBackend(), path, crop, size, "bilinear")
        difference = pixels(SCALING, path, crop, size, "bilinear") - exact
        for channel, axis in ((0, 1), (1, 0)):
            slope = np.gradient(exact[..., channel].astype(float), axis=axis)  # grey levels per pixel of the output
            shift = (difference[..., channel] * slope).sum() / (slope**2).sum()
            assert abs(shift) * crop[2 + (axis == 0)] / size[axis] < 0.1, "pixels of the file"


def test_twice_the_output_is_left_and_small_images_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def divisor(size: Size, crop: Crop | None, side: int) -> int:
        image = Encoded("x", bytearray(decode.JPEG_MAGIC), *size)
        return SCALING.divisor(Request(image, crop, (side, side), "bilinear"))

    expected = {(None, 224): 4, (None, 187): 8, (None, 188): 4, ((0, 0, 4000, 895), 224): 1, ((9, 9, 896, 896), 224): 2}
    assert {key: divisor((4000, 3000), *key) for key in expected} == expected
    monkeypatch.undo()
    sizes = {(4000, 2000): 1, (4001, 2000): 4}
    assert {size: divisor(size, None, 224) for size in sizes} == sizes


def test_dali_scales_as_torchvision_does(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    path = saved(photograph(), tmp_path / "x.jpg")
    for scaling in (True, False):
        backends = [create_backend(name, dct_scaling=scaling) for name in ("torchvision", "dali-cpu")]
        for crop, size, _ in CROPS:
            request = Request(SCALING.open(path), crop, size, "bicubic")
            one, other = (backend.decode_batch([request], size).images for backend in backends)
            assert torch.equal(one, other)


@pytest.mark.parametrize("flag", ["", "--full-decode"])
def test_training_scales_but_for_full_decode_and_validation_never(tmp_path: Path, flag: str) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "c").mkdir(parents=True)
        for i in range(4):
            saved(photograph(), tmp_path / split / "c" / f"{i}.jpg")
    args = TRAIN.parse(f"{tmp_path} --model volo_test --img-size 32 -b 4 -j 0 --aa none --num-classes 1 {flag}".split())
    settings = dict(
        input_size=(3, 32, 32), mean=[0, 0, 0], std=[1, 1, 1], crop_pct=1.0, crop_mode="center", interpolation="bicubic"
    )
    world = World(0, 0, 1, torch.device("cpu"))
    folders = open_folders(args, 1)
    training = train_loader(args, folders.train, None, settings, world).dataset.backend
    validation = validation_loader(args, folders.validation, 4, settings, world).dataset.backend
    for backend, scales in ((training, not flag), (validation, False)):
        path = folders.train.path(0)
        assert isinstance(backend, TorchvisionBackend)
        shown = pixels(backend, path, None, (50, 80), "bicubic")
        assert (shown == pixels(SCALING, path, None, (50, 80), "bicubic")).all() == scales

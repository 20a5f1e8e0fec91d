"""Decoding against Pillow: at most one grey level apart, and damaged files named as such by both backends."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.conftest import encoded, picture
from tlt.data.backends import decode
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import BACKENDS, INTERPOLATIONS, Encoded, TorchvisionBackend
from tlt.data.sources.image_file import BadImage, image_extensions, read_size
from tlt.errors import UserError

CROPS = [(0, 0, 96, 72), (30, 20, 50, 41), (5, 3, 7, 60), (40, 30, 1, 1), (0, 0, 96, 1)]


def saved(image: Image.Image, path: Path, **options: Any) -> str:
    image.save(path, **options)
    return str(path)


@pytest.mark.parametrize("filter_name", INTERPOLATIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_crop_and_resize_within_a_grey_level_of_pillow(name: str, filter_name: str) -> None:
    backend, data = create_backend(name), bytearray(encoded(picture(), quality=90))
    image, off = Image.open(io.BytesIO(data)), list[np.ndarray]()
    for (x, y, w, h), size in itertools.product(CROPS, ((32, 32), (50, 41), (17, 90))):
        ours = backend.decode(Encoded("x", data, 96, 72), (x, y, w, h), size, filter_name)
        assert ours.dtype == torch.uint8 and ours.shape == (3, *size)
        theirs = image.crop((x, y, x + w, y + h)).resize(size[::-1], Image.Resampling[filter_name.upper()])
        off.append(abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)).ravel())
    # Both round and clip between the two axes, and Pillow 13 picks the order of the axes by cost.
    together = np.concatenate(off)
    assert together.max() <= (0 if name == "pil" else 5 if filter_name == "bicubic" else 1)
    assert (together > 1).mean() < 1e-3


JPEG = encoded(picture())
JPEGS = {
    **{f"subsampling {kind}": encoded(picture(), subsampling=kind, quality=93) for kind in range(3)},
    "progressive": encoded(picture(), progressive=True),
    "restarts": encoded(picture(), restart_marker_blocks=2),
    "RGB": encoded(picture(), keep_rgb=True),
    "L": encoded(picture().convert("L")),
    "CMYK": encoded(picture().convert("CMYK")),
    "turned": encoded(picture(), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
    "trailing": JPEG + bytes(9),
    "damaged": JPEG[:1500] + b"\xff\xd3" + JPEG[1502:],  # a marker out of place: libjpeg warns and goes on
    "damaged scan": JPEG[:2500] + b"\x12\x34\x56\x78" + JPEG[2504:],
}


@pytest.mark.parametrize("without", [False, True], ids=["", "without simplejpeg"])
@pytest.mark.parametrize("kind", JPEGS)
def test_every_pixel_of_a_jpeg_is_pillows(kind: str, without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.setattr(decode, "simplejpeg", None)
    found = TorchvisionBackend().decode(Encoded("x", bytearray(JPEGS[kind]), 96, 72), None, (72, 96), "bilinear")
    with Image.open(io.BytesIO(JPEGS[kind])) as image:
        assert np.array_equal(found.permute(1, 2, 0), image.convert("RGB"))


@pytest.mark.parametrize("name", BACKENDS)
def test_fault_24_truncated_jpeg_is_bad_wherever_it_is_cut(tmp_path: Path, name: str) -> None:
    data = encoded(picture(), quality=90)
    cuts = [*range(1, len(data), len(data) // 25), len(data) - 3]
    backend = create_backend(name)
    for cut in cuts:
        path = tmp_path / "cut.jpg"
        path.write_bytes(data[:cut])
        with pytest.raises(BadImage) as caught:
            backend.decode(backend.open(str(path)), None, (16, 16), "bilinear")
        assert "\n" not in str(caught.value) and "0x" not in str(caught.value)


def test_fault_40_pixel_bomb_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pillow alone: an error, a warning, nothing.
    sizes = {15000: 225_000_000, 12000: 144_000_000, 8000: 64_000_000}
    for side, pixels in sizes.items():
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 89478485)  # Pillow's own, which a higher limit of ours raises
        path = saved(Image.new("1", (side, side)), tmp_path / "bomb.png")
        assert os.path.getsize(path) < 40_000
        for name in BACKENDS:
            with pytest.raises(BadImage, match="--max-pixels 50000000.*tlt pack-images --max-side") as caught:
                create_backend(name).open(path)
            assert "100000000" not in str(caught.value)  # twice the limit, which Pillow speaks of
            assert create_backend(name, max_pixels=pixels).open(path).width == side
        monkeypatch.undo()


def test_postscript_is_never_run_and_unknown_backends_are_named() -> None:
    with pytest.raises(BadImage, match="no image format"):
        read_size(encoded(picture(), "EPS"))
    with pytest.raises(UserError, match="--data-backend dali.*torchvision, pil"):
        create_backend("dali")
    assert ".eps" not in image_extensions() and {".jpg", ".webp", ".png", ".mpo", ".tif"} <= image_extensions()

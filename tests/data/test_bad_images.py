"""Images as people have them: every CPU backend shows the same of them, or says the same of why it can't."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform

from tests.data.conftest import encoded, picture
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import BACKENDS, Backend
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import EvalDataset, TrainDataset
from tlt.data.sources.folder import ImageFolder, scan_folder

NAMES = [*BACKENDS, "dali-cpu"]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="the extra dali")
    return create_backend(request.param)


def jpeg(image: Image.Image | None = None, **options: Any) -> bytes:
    return encoded(image or picture(), "JPEG", quality=90, **options)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6  # a quarter turn
    return exif


def animated(kind: str, **options: Any) -> bytes:
    frames = [picture(), picture().transpose(Image.Transpose.ROTATE_180)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def sixteen_bits() -> Image.Image:
    return Image.fromarray(np.linspace(0, 65535, 96 * 72).reshape(72, 96).astype(np.uint16))


def without(data: bytes, marker: int) -> bytes:
    """A JPEG without a segment."""
    start = data.index(bytes([0xFF, marker]))
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def transparent() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((96, 72)))
    return image


CMYK = jpeg(picture().convert("CMYK"))

# What Pillow's convert("RGB") shows, and so do all.
SHOWN = {
    "plain.jpg": jpeg(),
    "cmyk.jpg": CMYK,
    "cmyk_without_adobe.jpg": without(CMYK, 0xEE),
    "gray.jpg": jpeg(picture().convert("L")),
    "progressive.jpg": jpeg(progressive=True),
    "turned.jpg": jpeg(exif=turned()),
    "1x1.jpg": jpeg(picture(1, 1)),
    "1x20000.jpg": jpeg(picture(1, 20000)),
    "16_bits_gray.png": encoded(sixteen_bits(), "PNG"),
    "alpha.png": encoded(transparent(), "PNG"),
    "palette.png": encoded(picture().quantize(32), "PNG", transparency=1),
    "animated.gif": animated("GIF"),
    "animated.webp": animated("WEBP", lossless=True),
    "16_bits_gray.tiff": encoded(sixteen_bits(), "TIFF"),
    "a_png.jpg": encoded(picture(), "PNG"),
    "a_jpeg.png": jpeg(),
    "dots.a.b.png.jpg": jpeg(),
    "Bär 熊 🐻.jpg": jpeg(),
    os.fsdecode(b"latin1 \xe4.jpg"): jpeg(),
    "line\nbreak.jpg": jpeg(),
    "%s[1]{0}.jpg": jpeg(),
}
# And why these can't be shown.
BAD = {
    "empty.jpg": (b"", "empty file"),
    "text.jpg": (b"<html>404 not found</html>" * 9, "no image format"),
    "truncated.jpg": (jpeg()[: len(jpeg()) // 2], "truncated|can't be decoded"),
    "truncated.png": (encoded(picture(), "PNG")[:-5000], "truncated"),
    "only_a_start.jpg": (b"\xff\xd8\xff", "no image format|broken|could not"),
    "30000x30000.png": (encoded(Image.new("1", (30000, 30000)), "PNG"), "--max-pixels.*pack-images.*900000000 pixels"),
    "float.tiff": (encoded(picture().convert("F"), "TIFF"), "floating-point numbers.*convert it to 8 or 16 bits"),
    "32_bits.tiff": (encoded(picture().convert("I"), "TIFF"), "32 bits wide.*convert it to 8 or 16 bits"),
    "1x60000000.ppm": (b"P6 1 60000000 255 abc", "1 x 60000000 .*--max-pixels.*tlt pack-images"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    root = tmp_path_factory.mktemp("data")
    (root / "class").mkdir()
    for name, data in {**SHOWN, **{name: data for name, (data, _) in BAD.items()}}.items():
        (root / "class" / name).write_bytes(data)
    return scan_folder(root)


def loaded(dataset: EvalDataset | TrainDataset, count: int) -> Batch:
    batch = dataset[BatchKey(0, tuple(range(count)))]
    assert isinstance(batch, Batch), batch
    return batch


def test_fault_38_39_validation_shows_what_pillow_does_and_names_others(folder: ImageFolder, backend: Backend) -> None:
    batch = loaded(EvalDataset(folder, (32, 32), interpolation="bilinear", backend=backend), len(folder))
    names = [os.path.basename(folder.paths[index]) for index in batch.indices.tolist()]
    shown = dict(zip(names, batch.images, strict=True))
    assert set(shown) == set(SHOWN)
    transform = create_transform((3, 32, 32), interpolation="bilinear", crop_pct=0.875, normalize=False)
    for name, image in shown.items():
        if "20000" in name:
            continue  # timm resizes it as a whole: 4 GB at 224 pixels
        with Image.open(io.BytesIO(SHOWN[name])) as opened:
            # Of 16 bits of gray Pillow shows the lowest 255 levels, and white for all others.
            eight_bits = Image.fromarray((np.asarray(sixteen_bits()) // 256).astype(np.uint8))
            theirs = transform((eight_bits if "16_bits" in name else opened).convert("RGB"))
        assert (image.int() - theirs.int()).abs().max() <= 1, name
    skipped = {os.path.basename(skip.path): skip.reason for skip in batch.skipped}
    assert set(skipped) == set(BAD)
    for name, reason in skipped.items():
        assert "\n" not in reason and re.search(BAD[name][1], reason), (name, reason)


def test_fault_24_25_40_training_replaces_the_same_images_by_the_same(folder: ImageFolder, backend: Backend) -> None:
    config = AugmentConfig(size=(32, 32))
    ours = loaded(TrainDataset(folder, config, seed=3, backend=backend), len(folder))
    pillow = loaded(TrainDataset(folder, config, seed=3, backend=create_backend("pil")), len(folder))
    assert ours.indices.tolist() == pillow.indices.tolist()
    replaced = {os.path.basename(skip.path) for skip in ours.skipped}
    assert replaced == set(BAD) == {os.path.basename(skip.path) for skip in pillow.skipped}
    assert ((ours.images.int() - pillow.images.int()).abs() > 1).float().mean() < 2e-3


def test_an_image_that_would_be_vast_when_resized_is_left_out(backend: Backend, tmp_path: Path) -> None:
    """1 x 20000 pixels are made 256 x 5,120,000 for the centre of 224, which takes gigabytes."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class/huge.jpg").write_bytes(SHOWN["1x20000.jpg"])
    (tmp_path / "class/whole.jpg").write_bytes(jpeg(picture(90, 30)))
    batch = loaded(EvalDataset(scan_folder(tmp_path), (224, 224), backend=backend), 2)
    assert batch.indices.tolist() == [1]
    assert "256 x 5120000 pixels are more than --max-pixels 50000000" in batch.skipped[0].reason

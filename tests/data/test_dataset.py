"""Batches by key: timm's evaluation pixels; images as people have them, of which every CPU backend shows the same or
says the same of why it can't; broken images replaced or left out; synthetic images."""

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from tests.data.conftest import JPEG, JPEGS, encoded, picture, without
from tlt import geometry
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends import create_backend
from tlt.data.backends.decode import Backend, TorchvisionBackend
from tlt.data.backends.synthetic import SyntheticBackend, SyntheticLabels, synthetic_folder
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import MAX_ATTEMPTS, EvalDataset, TrainDataset
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.errors import UserError
from tlt.label_map import LabelMap

CONFIG = AugmentConfig(size=(32, 40), interpolation="bicubic")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("images")
    sizes = [(100, 75), (75, 100), (64, 64), (30, 40), (10, 150), (200, 33), (101, 76), (41, 41), (50, 40)]
    for i, size in enumerate(sizes):
        path = root / f"c{i % 3}" / f"{i:03d}.{'png' if i % 4 == 1 else 'jpg'}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, 2).save(path)
    return scan_folder(root)


@pytest.fixture
def broken(folder: ImageFolder, tmp_path: Path) -> ImageFolder:
    """The same images, number 2 truncated and number 4 empty."""
    shutil.copytree(folder.root, tmp_path / "broken")
    copied = scan_folder(tmp_path / "broken")
    whole = Path(copied.path(2)).read_bytes()
    Path(copied.path(2)).write_bytes(whole[: len(whole) // 2])
    Path(copied.path(4)).write_bytes(b"")
    return copied


def loaded(dataset: TrainDataset | EvalDataset, *indices: int, epoch: int = 0) -> Batch:
    batch = dataset[BatchKey(epoch, indices)]
    assert isinstance(batch, Batch), batch
    return batch


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("size", "crop_pct"), [((32, 32), 0.875), ((32, 48), 1.15)])
def test_eval_pixels_are_timms(folder, size, crop_pct, crop_mode):
    mean = (0.1, 0.5, 0.9)
    how = {"interpolation": "bicubic", "crop_pct": crop_pct, "crop_mode": crop_mode, "mean": mean, "normalize": False}
    transform = create_transform((3, *size), **how)
    fill = tuple(round(255 * value) for value in mean)
    dataset = EvalDataset(folder, size, crop_pct, crop_mode, "bicubic", fill)
    fast = EvalDataset(folder, size, crop_pct, crop_mode, "bicubic", fill, TorchvisionBackend())
    rows = range(len(folder))
    images, quick = loaded(dataset, *rows).images, loaded(fast, *rows).images
    for i in rows:
        theirs = transform(Image.open(folder.path(i)).convert("RGB"))
        assert torch.equal(images[i], theirs), folder.paths[i]
        off = (quick[i].int() - theirs.int()).abs()
        assert (off > 1).float().mean() < 2e-3 and off.max() <= 5, folder.paths[i]


def test_a_repetition_is_the_same_image_augmented_in_its_own_way(broken):
    count = len(broken)
    dataset = TrainDataset(broken, CONFIG, seed=7, labels=Labels())
    batch = loaded(dataset, 0, count, 2 * count, 2 + count)
    stand_in = int(batch.indices[3])
    assert batch.indices.tolist() == [0, 0, 0, stand_in] and len(set(batch.classes[:3].tolist())) == 1
    assert batch.labels is not None and batch.labels.values.flatten(1)[:, 0].tolist() == [0, 0, 0, stand_in]
    assert batch.skipped[0].path == broken.path(2)
    assert batch.plan is not None and len({tuple(crop) for crop in batch.plan.crop[:3].tolist()}) == 3
    assert torch.equal(batch.images[0], loaded(TrainDataset(broken, CONFIG, seed=7), 0).images[0])
    assert len({int(loaded(dataset, 2, epoch=epoch).indices) for epoch in range(12)}) > 2  # an epoch, a stand-in


def test_fault_27_all_images_bad_ends_with_one_line(broken):
    for index in range(len(broken)):
        Path(broken.path(index)).write_bytes(b"")
    fault = TrainDataset(broken, CONFIG, seed=7)[BatchKey(0, (0, 1))]
    assert isinstance(fault, UserError) and "\n" not in str(fault)
    assert f"{MAX_ATTEMPTS + 1} images in a row can't be read" in str(fault) and "(empty file)" in str(fault)


class Labels:
    """Labels that say which image they were read for."""

    def read(self, index: int, width: int, height: int) -> LabelMap:
        return LabelMap(np.full((1, 1, 1), index, np.float16), np.zeros((1, 1, 1), np.int32))

    def take_faults(self) -> list[tuple[str, str]]:
        return []


def test_synthetic_images_show_their_place_and_class():
    folder = synthetic_folder(20, 4)
    assert folder.classes.tolist() == [0, 1, 2, 3] * 5 and folder.class_names[3] == "class_00003"
    config = AugmentConfig(size=(24, 24), auto_augment=None, color_jitter=None, hflip=0, reprob=0)
    dataset = TrainDataset(folder, config, 0, SyntheticLabels(folder, (3, 4, 4)), SyntheticBackend((75, 100)))
    batch = loaded(dataset, *range(20))
    grid = (np.stack(np.meshgrid(np.arange(24), np.arange(24)), -1).reshape(-1, 2) + 0.5) / 24
    points = geometry.apply(batch.affine.double().numpy(), grid)
    positions = batch.images[:, :2].flatten(2).transpose(1, 2).numpy() / 255
    assert abs(points - positions).max() < 0.01
    assert len(set(batch.images[:, 2, 0, 0].tolist())) > 8
    assert batch.labels is not None and (batch.labels.ids[:, 0].flatten(1) == batch.classes[:, None]).all()
    assert all((torch.sort(ids, 0)[0].diff(dim=0) != 0).all() for ids in batch.labels.ids)  # no class twice


NAMES = ["torchvision", "pil", "dali-cpu"]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="the extra dali")
    return create_backend(request.param)


def animated(kind: str, **options: Any) -> bytes:
    frames = [picture(), picture().transpose(Image.Transpose.ROTATE_180)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def transparent() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((96, 72)))
    return image


# What Pillow's convert("RGB") shows, and so do all.
SHOWN = {
    **{f"{name}.jpg": content for name, content in JPEGS.items()},
    "1x1.jpg": encoded(picture(1, 1)),
    "1x20000.jpg": encoded(picture(1, 20000)),
    "alpha.png": encoded(transparent(), "PNG"),
    "palette.png": encoded(picture().quantize(32), "PNG", transparency=1),
    "animated.gif": animated("GIF"),
    "animated.webp": animated("WEBP", lossless=True),
    "a_png.jpg": encoded(picture(), "PNG"),
    "a_jpeg.png": JPEG,
    "dots.a.b.png.jpg": JPEG,
    "Bär 熊 🐻.jpg": JPEG,
    os.fsdecode(b"latin1 \xe4.jpg"): JPEG,
    "line\nbreak.jpg": JPEG,
    "%s[1]{0}.jpg": JPEG,
}
# And why these can't be shown.
BAD = {
    "empty.jpg": (b"", "empty file"),
    "text.jpg": (b"<html>404 not found</html>" * 9, "no image format"),
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "truncated|can't be decoded"),
    "without_its_end.jpg": (JPEG[:-2], "truncated"),
    "without_a_scan.jpg": (without(JPEG, 0xDA), "cannot load|broken|can't be decoded"),
    "truncated.png": (encoded(picture(), "PNG")[:-5000], "truncated"),
    "only_a_start.jpg": (b"\xff\xd8\xff", "no image format|broken|could not"),
    "float.tiff": (encoded(picture().convert("F"), "TIFF"), "floating-point numbers.*convert it to 8 or 16 bits"),
    "32_bits.tiff": (encoded(picture().convert("I"), "TIFF"), "32 bits wide.*convert it to 8 or 16 bits"),
    "1x60000000.ppm": (b"P6 1 60000000 255 abc", "1 x 60000000 .*--max-pixels.*tlt pack-images"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    root = tmp_path_factory.mktemp("data")
    (root / "class").mkdir()
    for name, data in {**SHOWN, **{name: data for name, (data, _) in BAD.items()}}.items():
        (root / "class" / name).write_bytes(data)
    return scan_folder(root)


def test_fault_24_25_38_39_40_validation_shows_what_pillow_does(odd, backend):
    batch = loaded(EvalDataset(odd, (32, 32), interpolation="bilinear", backend=backend), *range(len(odd)))
    names = [os.path.basename(odd.paths[index]) for index in batch.indices.tolist()]
    image_of = dict(zip(names, batch.images, strict=True))
    assert set(image_of) == set(SHOWN)
    transform = create_transform((3, 32, 32), interpolation="bilinear", crop_pct=0.875, normalize=False)
    for name, image in image_of.items():
        if "20000" in name:
            continue  # timm resizes it as a whole: 4 GB at 224 pixels
        with Image.open(io.BytesIO(SHOWN[name])) as opened:
            theirs = transform(opened.convert("RGB"))
        assert (image.int() - theirs.int()).abs().max() <= 1, name
    skipped = {os.path.basename(skip.path): skip.reason for skip in batch.skipped}
    assert set(skipped) == set(BAD)
    for name, reason in skipped.items():
        assert "\n" not in reason and re.search(BAD[name][1], reason), (name, reason)


def test_an_image_that_would_be_vast_when_resized_is_left_out(backend, tmp_path):
    """1 x 20000 pixels are made 256 x 5,120,000 for the centre of 224, which takes gigabytes."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class/huge.jpg").write_bytes(SHOWN["1x20000.jpg"])
    (tmp_path / "class/whole.jpg").write_bytes(encoded(picture(90, 30)))
    batch = loaded(EvalDataset(scan_folder(tmp_path), (224, 224), backend=backend), 0, 1)
    assert batch.indices.tolist() == [1]
    assert "256 x 5120000 pixels are more than --max-pixels 50000000" in batch.skipped[0].reason

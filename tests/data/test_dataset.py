"""Batches by key: timm's evaluation pixels, broken images replaced or left out, synthetic images."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from packaging.version import Version
from PIL import Image
from timm.data import create_transform

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.decode import TorchvisionBackend
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


@pytest.mark.skipif(Version(timm.__version__) < Version("1.0.31"), reason="older timm resizes rectangles otherwise")
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("size", "crop_pct"), [((32, 32), 0.875), ((32, 48), 1.15)])
def test_eval_pixels_are_timms(folder: ImageFolder, size: tuple[int, int], crop_pct: float, crop_mode: str) -> None:
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


def test_a_repetition_is_the_same_image_augmented_in_its_own_way(broken: ImageFolder) -> None:
    count = len(broken)
    batch = loaded(TrainDataset(broken, CONFIG, seed=7, labels=Labels()), 0, count, 2 * count, 2 + count)
    stand_in = int(batch.indices[3])
    assert batch.indices.tolist() == [0, 0, 0, stand_in] and len(set(batch.classes[:3].tolist())) == 1
    assert batch.labels is not None and batch.labels.values.flatten(1)[:, 0].tolist() == [0, 0, 0, stand_in]
    assert batch.skipped[0].path == broken.path(2)
    assert batch.plan is not None and len({tuple(crop) for crop in batch.plan.crop[:3].tolist()}) == 3
    assert torch.equal(batch.images[0], loaded(TrainDataset(broken, CONFIG, seed=7), 0).images[0])


def test_fault_24_truncated_image_is_replaced_the_same_way_each_time(broken: ImageFolder) -> None:
    dataset = TrainDataset(broken, CONFIG, seed=7)
    batch = loaded(dataset, 0, 2, 3)
    assert batch.skipped[0].path == broken.path(2) and "truncated" in batch.skipped[0].reason
    stand_in = int(batch.indices[1])
    assert batch.indices.tolist() == [0, stand_in, 3] and stand_in not in (2, 4)
    assert batch.classes[1] == broken.classes[stand_in]
    # Exactly what the stand-in looks like when it is asked for itself, pixels, plan and geometry.
    asked = loaded(dataset, stand_in)
    assert batch.plan is not None and asked.plan is not None
    assert torch.equal(batch.images[1], asked.images[0]) and torch.equal(batch.affine[1], asked.affine[0])
    assert np.array_equal(batch.plan.erase[1], asked.plan.erase[0])
    assert batch.plan.op[1].tolist() == asked.plan.op[0].tolist()
    assert torch.equal(batch.images[[0, 2]], loaded(dataset, 0, 3).images)
    again = loaded(dataset, 2)
    assert again.indices.tolist() == [stand_in]
    assert len({int(loaded(dataset, 2, epoch=epoch).indices) for epoch in range(12)}) > 2


def test_fault_27_all_images_bad_ends_with_one_line(broken: ImageFolder) -> None:
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


def test_synthetic_images_show_their_place_and_class() -> None:
    folder = synthetic_folder(20, 4)
    assert folder.classes.tolist() == [0, 1, 2, 3] * 5 and folder.class_names[3] == "class_00003"
    config = AugmentConfig(size=(24, 24), auto_augment=None, color_jitter=None, hflip=0, reprob=0)
    dataset = TrainDataset(folder, config, 0, SyntheticLabels(folder, (3, 4, 4)), SyntheticBackend((75, 100)))
    batch = loaded(dataset, *range(20))
    grid = (np.stack(np.meshgrid(np.arange(24), np.arange(24)), -1).reshape(-1, 2) + 0.5) / 24
    points = geometry.apply(batch.affine.double().numpy(), grid)
    shown = batch.images[:, :2].flatten(2).transpose(1, 2).numpy() / 255
    assert abs(points - shown).max() < 0.01
    assert len(set(batch.images[:, 2, 0, 0].tolist())) > 8
    assert batch.labels is not None and (batch.labels.ids[:, 0].flatten(1) == batch.classes[:, None]).all()
    assert all((torch.sort(ids, 0)[0].diff(dim=0) != 0).all() for ids in batch.labels.ids)  # no class twice

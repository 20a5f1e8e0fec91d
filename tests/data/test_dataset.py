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
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.data.backends.decode import PilBackend, TorchvisionBackend
from tlt.data.backends.synthetic import SyntheticBackend, SyntheticLabels, synthetic_folder
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import MAX_ATTEMPTS, EvalDataset, TrainDataset
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.errors import UserError
from tlt.label_map import LabelMap

CONFIG = AugmentConfig(size=(32, 40), interpolation="bicubic")


def write_images(root: Path, sizes: list[tuple[int, int]]) -> ImageFolder:
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(sizes):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((width, height), 2)
        path = root / f"c{i % 3}" / f"{i:03d}.{'png' if i % 4 == 1 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.save(path)
    return scan_folder(root)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    sizes = [(100, 75), (75, 100), (64, 64), (30, 40), (10, 150), (200, 33), (101, 76), (41, 41), (50, 40)]
    return write_images(tmp_path_factory.mktemp("images"), sizes)


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


# Evaluation


@pytest.mark.skipif(
    Version(timm.__version__) < Version("1.0.31"), reason="older timm resizes for rectangular crops otherwise"
)
@pytest.mark.parametrize(
    ("size", "crop_pct", "crop_mode"),
    [
        ((32, 32), 0.875, "center"),
        ((32, 32), 1.15, "center"),
        ((32, 48), 0.96, "center"),
        ((32, 48), 0.875, "squash"),
        ((32, 32), 1.0, "border"),
        ((32, 48), 1.15, "border"),
    ],
)
def test_eval_pixels_are_timms(folder: ImageFolder, size: tuple[int, int], crop_pct: float, crop_mode: str) -> None:
    mean = (0.1, 0.5, 0.9)
    transform = create_transform(
        (3, *size), interpolation="bicubic", crop_pct=crop_pct, crop_mode=crop_mode, mean=mean, normalize=False
    )
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


# Training


def test_train_batch_follows_its_plan(folder: ImageFolder) -> None:
    dataset = TrainDataset(folder, CONFIG, seed=7, backend=PilBackend())
    batch = loaded(dataset, 4, 0, 8, epoch=3)
    sizes = [Image.open(folder.path(i)).size for i in (4, 0, 8)]
    plan = make_plan(CONFIG, 7, 3, [4, 0, 8], *zip(*sizes, strict=True))
    assert batch.plan is not None and np.array_equal(batch.plan.crop, plan.crop)
    assert batch.indices.tolist() == [4, 0, 8] and batch.classes.tolist() == folder.classes[[4, 0, 8]].tolist()
    for row, index in enumerate((4, 0, 8)):
        x, y, w, h = plan.crop[row]
        image = Image.open(folder.path(index)).convert("RGB").crop((x, y, x + w, y + h)).resize((40, 32), 3)
        assert np.array_equal(batch.images[row].permute(1, 2, 0).numpy(), np.asarray(image))
    torch.testing.assert_close(batch.affine, torch.from_numpy(plan.normalised_affine()).float())
    torch.testing.assert_close(batch.visible, torch.from_numpy(plan.visible()).float())


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
    assert (
        np.array_equal(batch.plan.erase[1], asked.plan.erase[0])
        and batch.plan.op[1].tolist() == asked.plan.op[0].tolist()
    )
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
    """Labels that say which image and size they were read for; number 3 is faulty."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, str]] = []

    def read(self, index: int, width: int, height: int) -> LabelMap:
        if index == 3:
            self.faults.append(("three", "damaged"))
        values = np.array([index, width, height], np.float16).reshape(3, 1, 1)
        return LabelMap(values, np.zeros((3, 1, 1), np.int32))

    def take_faults(self) -> list[tuple[str, str]]:
        faults, self.faults = self.faults, []
        return faults


def test_labels_belong_to_the_image_shown(broken: ImageFolder) -> None:
    batch = loaded(TrainDataset(broken, CONFIG, seed=7, labels=Labels()), 0, 2, 3)
    assert batch.labels is not None
    sizes = [Image.open(broken.path(int(i))).size for i in batch.indices]
    expected = [[int(i), *size] for i, size in zip(batch.indices, sizes, strict=True)]
    assert batch.labels.values.flatten(1).tolist() == expected
    assert {tuple(item) for item in batch.bad_labels} == {("three", "damaged")}


# Synthetic data


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

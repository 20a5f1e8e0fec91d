"""The feature archive: what it stores and refuses, and that a token reads in it what lies at its place in the image."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import tlt
import volo  # noqa: F401
from tests.data.conftest import refuses
from tests.labels.packed import NAMES, same_files
from tlt.data.backends.synthetic import SyntheticBackend, synthetic_folder
from tlt.distill import DistillLoss, with_projector
from tlt.errors import UserError
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.features import FeatureInfo, FeatureWriter, principal_directions, quantised, read_basis
from tlt.labels.label_info import LabelInfo
from tlt.teacher import TeacherScale

GRID, CHANNELS = (3, 4), 6
INFO = FeatureInfo(GRID, CHANNELS, teacher={"model": "x"})


def features(mark: int) -> Tensor:
    return torch.randn(*GRID, CHANNELS, generator=torch.Generator().manual_seed(mark)) * (1 + mark)


def write(root: Path, info: FeatureInfo = INFO, names: Sequence[str] = NAMES, rows: Sequence[int] = ()) -> Path:
    writer = FeatureWriter(root, info, names)
    if info.teacher_channels and not (root / "basis.npy").exists():
        samples = torch.randn(99, info.teacher_channels, generator=torch.Generator().manual_seed(0))
        writer.write_basis(principal_directions(samples.mT @ samples, info.channels))
    for row in rows or writer.pending():
        writer.write(row, features(row))
    if not rows:
        writer.finish()
    writer.close()
    return root


@pytest.mark.parametrize(("dtype", "off"), [("float16", 2**-11), ("int8", 0.5 / 127)])
def test_it_gives_back_what_was_written_in_any_order(tmp_path: Path, dtype: str, off: float) -> None:
    root = write(tmp_path / "f", replace(INFO, dtype=dtype))
    order = [4, 0, 6, 8]
    store = tlt.open_features(root, [NAMES[row] for row in order])
    batch = store.batch(range(4))
    assert (
        batch.values.dtype == getattr(torch, dtype)
        and batch.present.all()
        and store.extra() == NAMES[1:4] + [*(NAMES[5], NAMES[7])]
    )
    for position, row in enumerate(order):
        truth = features(row)
        largest = truth.abs().amax(-1, keepdim=True)
        for found in (torch.from_numpy(store.read(position)), batch.tokens()[position].unflatten(0, GRID)):
            assert ((found - truth).abs() <= off * 1.01 * largest).all()
    size = sum(np.load(root / f"{name}.npy", mmap_mode="r").nbytes for name in ("features", "crc32", "done"))
    scale = np.load(root / "scale.npy").nbytes if dtype == "int8" else 0
    assert size + scale == store.info.row_bytes * len(NAMES)


def test_killed_at_any_row_it_becomes_the_same_archive(tmp_path: Path) -> None:
    info = replace(INFO, teacher_channels=9)
    whole = write(tmp_path / "whole", info)
    for end in range(1, len(NAMES)):
        part = write(tmp_path / str(end), info, rows=range(end))
        with pytest.raises(UserError, match="features archive|feature archive .* is not complete: run the command"):
            tlt.open_features(part, NAMES)
        assert same_files(whole, write(part, info))


def test_principal_directions_are_those_of_numpy() -> None:
    samples = np.random.default_rng(0).normal(size=(500, 7)) * np.arange(7, 0, -1) + 2
    basis = principal_directions(torch.from_numpy(samples.T @ samples), 3)
    _, sizes, directions = np.linalg.svd(samples, full_matrices=False)
    np.testing.assert_allclose(basis.directions.T @ basis.directions, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(np.abs(basis.directions.numpy().T @ directions[:3].T), np.eye(3), atol=1e-5)
    np.testing.assert_allclose(basis.kept, (sizes**2 / (sizes**2).sum())[:3], rtol=1e-5)
    with refuses("--channels 8"):
        principal_directions(torch.eye(7), 8)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("float16", np.nan), ("int8", np.inf)])
def test_features_that_no_archive_can_hold_are_refused(dtype: str, value: float) -> None:
    with refuses("a feature is NaN or infinite, or beyond half precision"):
        quantised(torch.full((2, 2, 3), value), dtype)


def flip_a_bit(path: Path, where: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def test_what_is_wrong_with_an_archive_is_told(tmp_path: Path) -> None:
    root = write(tmp_path / "f", replace(INFO, teacher_channels=9))
    with refuses("1 of 10 images have no features in .*, the first is d/0.jpg .*; make features with volo features"):
        tlt.open_features(root, [*NAMES, "d/0.jpg"])
    with refuses("these features are of another data set"):
        tlt.open_features(root, ["other/0.jpg"])
    with refuses("is not a feature archive .*: make one with `volo features`"):
        tlt.open_features(tmp_path, NAMES)
    ArchiveWriter(tmp_path / "labels", LabelInfo(1, (1, 1), 5), NAMES).close()
    with refuses("does not describe a volo-tlt feature archive"):
        tlt.open_features(tmp_path / "labels", NAMES)
    for name in ("basis.npy", "kept.npy", "names.npy", "meta.json"):
        whole = (root / name).read_bytes()
        flip_a_bit(root / name)
        with refuses("is damaged|as JSON"):
            tlt.open_features(root, NAMES)
        (root / name).write_bytes(whole)
        (root / name).rename(root / "away")
        with refuses("is missing|is not a feature archive"):
            tlt.open_features(root, NAMES)
        (root / "away").rename(root / name)
    meta = json.loads((root / "meta.json").read_text())
    (root / "meta.json").write_text(json.dumps(meta | {"format": "volo-tlt feature archive, version 2"}))
    with refuses("does not describe a volo-tlt feature archive, version 1"):
        tlt.open_features(root, NAMES)
    assert read_basis(root, replace(INFO, teacher_channels=9)).directions.shape == (9, CHANNELS)


@pytest.mark.parametrize("bad_label", ["stop", "skip"])
def test_a_damaged_or_missing_map_is_as_bad_label_says(tmp_path: Path, bad_label: str) -> None:
    folder = synthetic_folder(4, 2)
    root = write(tmp_path / "f", names=folder.paths[:3])
    flip_a_bit(root / "scale.npy")  # of the last row
    if bad_label == "stop":
        with refuses("row 2, is damaged"):
            tlt.open_features(root, folder.paths[:3]).batch([0, 1, 2])
        return
    store = tlt.open_features(root, folder.paths, bad_label)
    assert "1 of 4 images have no features" in store.warnings[0]
    loader = tlt.Loader(folder, None, tlt.AugmentConfig((64, 64)), 4, backend=SyntheticBackend(), features=[store])
    batch = next(iter(loader))
    assert batch.features[store.key].present[batch.indices.argsort()].tolist() == [True, True, False, False]
    assert [fault.reason.endswith("make it again") for fault in batch.bad_labels] == [True]
    student = with_projector(timm.create_model("volo_test"), teacher := tlt.StoredTeacher(store), (64, 64))
    loss = DistillLoss.of(student, (64, 64), teacher, scale=TeacherScale(CHANNELS))
    target, weight = loss.lesson(batch)
    assert weight is not None and weight[batch.indices.argsort()].sum(1).bool().tolist() == [True, True, False, False]
    stored = torch.stack([torch.from_numpy(store.read(row)).flatten(0, 1) for row in (0, 1)]).flatten(0, 1)
    assert loss.scale is not None
    torch.testing.assert_close(loss.scale.mean, stored.mean(0))
    torch.testing.assert_close(loss.scale.variance, (stored - stored.mean(0)).square().mean())
    for arguments, told in (
        ({"seen": batch}, "features of whole images: no other view"),
        ({"images": batch.images + 1}, "none mixed"),
    ):
        with refuses(told):
            loss.lesson(batch, **arguments)
    with refuses("kind 'feature' needs the teacher itself"):
        DistillLoss(teacher, "feature").lesson(batch)
    with refuses("the batch has no features of"):
        loss.lesson(replace(batch, features={}))


STUDENTS: dict[str, tuple[float, float, dict[str, Any]]] = {  # where tokens look: the first, and the distance, in px
    "volo_test": (7.5, 16, {}),
    "vit_tiny_patch16_224": (8, 16, {"dynamic_img_size": True}),
    "resnet18": (0.5, 32, {}),
}


@pytest.mark.parametrize(("grid", "dtype"), [((16, 16), "float16"), ((7, 10), "int8"), ((24, 18), "float16")])
@pytest.mark.parametrize("name", STUDENTS)
def test_a_token_reads_what_lies_at_its_place(tmp_path: Path, name: str, grid: tuple[int, int], dtype: str) -> None:
    """Through archive and loader, at two sizes: each cell stores where its centre lies, relative to the middle."""
    first, pitch, kwargs = STUDENTS[name]
    file_height, file_width = 300, 400
    folder, places = synthetic_folder(8, 2), np.stack(np.meshgrid(*((np.arange(n) + 0.5) / n for n in grid[::-1])), -1)
    writer = FeatureWriter(tmp_path / "f", FeatureInfo(grid, 2, dtype), folder.paths)
    for row in range(8):
        writer.write(row, torch.from_numpy(places - 0.5))
    writer.finish()
    store = tlt.open_features(tmp_path / "f", folder.paths)
    sizes = [(128, 128), (96, 96)]
    augment = tlt.AugmentConfig(sizes[0], auto_augment="rand-m9-n3-mstd0.5-inc1")
    schedule = tlt.SizeSchedule(sizes, [4, 4])
    backend = SyntheticBackend((file_height, file_width))
    loader = tlt.Loader(folder, None, augment, 4, workers=0, backend=backend, features=[store], sizes=schedule)
    student = timm.create_model(name, num_classes=2, **kwargs)
    loss = DistillLoss.of(student, sizes[0], tlt.StoredTeacher(store), sizes[1:])
    seen = set()
    for batch in (batch for epoch in range(6) for batch in loader.epoch(epoch)):
        target, weight = loss.lesson(batch)
        plan, (rows, cols) = batch.plan, loss.place(batch.images)[0]
        assert plan is not None and weight is not None
        y, x = (np.arange(count) * pitch + first for count in (rows, cols))
        tokens = np.stack([*np.meshgrid(x, y), np.ones((rows, cols))])
        where = np.einsum("bij,jhw->bhwi", plan.pixel_affine, tokens).reshape(len(plan), -1, 2)
        found = (target.numpy() + 0.5) * (file_width, file_height)
        counted = (weight == 1).numpy()
        # int8: half a step of 1/127 of half the image, in a cell whose places lie at the edge.
        limit = 0.5 if dtype == "float16" else 0.5 + file_width / 2 / 127 / 2
        assert np.abs(found - where)[counted].max(initial=0) <= limit
        seen |= {tuple(batch.images.shape[2:])} if counted.any() else set()
    assert seen == set(sizes)

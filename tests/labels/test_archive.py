"""The label archive: NumPy files that anybody can open, what is refused, writers that are killed; and `--label-tail
exact` against a float64 softmax of all the annotator's logits."""

import json
import os
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.conftest import refuses
from tests.labels.packed import NAMES, SHAPE, label_map, same_files, share_map
from tlt.errors import UserError
from tlt.label_map import LabelMap
from tlt.labels.annotate import _annotation
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import LabelStore, open_labels, relative_to_tail

INFO = LabelInfo(SHAPE[0], SHAPE[1:], 5, annotator={"model": "x"}, log_sum_exp=True)
COLUMNS = ["crc32.npy", "done.npy", "ids.npy", "lse.npy", "name_ends.npy", "names.npy", "values.npy"]


UNROWED = ("names.npy", "name_ends.npy", "meta.json")  # have no row an image, and are checked at the start


def with_sum(mark: int) -> LabelMap:
    return replace(label_map(mark), log_sum_exp=np.full(SHAPE[1:], 9 + mark, np.float32))


def write(root: Path, rows: Sequence[int] | None = None) -> ArchiveWriter:
    """Write some rows of an archive: those that are missing."""
    writer = ArchiveWriter(root, INFO, NAMES)
    for row in writer.pending() if rows is None else rows:
        writer.write(row, with_sum(row))
    return writer


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    write(tmp_path / "a.tlt").finish()
    return tmp_path / "a.tlt"


def check_maps(store: LabelStore, marks: Sequence[int]) -> None:
    for index, mark in enumerate(marks):
        stored = store.read(index)
        np.testing.assert_array_equal(stored.values, label_map(mark).values)
        np.testing.assert_array_equal(stored.ids, label_map(mark).ids)


def test_numpy_alone_reads_it(archive):
    assert sorted(path.name for path in archive.glob("[!.]*")) == sorted([*COLUMNS, "meta.json"])
    columns = ("values", "ids", "lse", "crc32", "done", "name_ends")
    values, ids, sums, crc32, done, ends = (np.load(archive / f"{name}.npy", mmap_mode="r") for name in columns)
    assert (values.dtype, ids.dtype, sums.dtype, done.tolist()) == (np.float16, np.uint16, np.float32, [1] * len(NAMES))
    block = np.load(archive / "names.npy").tobytes()
    assert [os.fsdecode(block[a:b]) for a, b in zip([0, *ends], ends, strict=False)] == NAMES
    for row in range(len(NAMES)):
        np.testing.assert_array_equal(values[row], label_map(row).values)
        np.testing.assert_array_equal(ids[row], label_map(row).ids)
        assert (sums[row] == 9 + row).all()
        assert crc32[row] == zlib.crc32(ids[row].tobytes() + values[row].tobytes() + sums[row].tobytes())
    meta = json.loads((archive / "meta.json").read_text())
    assert (meta["complete"], meta["num_classes"], meta["max_id"], meta["records"]) == (True, 5, 4, len(NAMES))


def test_images_find_their_rows_in_any_order(archive):
    order = [4, 0, 6, 2, 8, 5, 1, 3, 7]
    store = open_labels(archive, [NAMES[row] for row in order], num_classes=5)
    assert store.shape == SHAPE and store.info.annotator == {"model": "x"} and store.warnings == []
    check_maps(store, order)
    check_maps(pickle.loads(pickle.dumps(open_labels(archive, NAMES))), range(len(NAMES)))  # as a worker has it
    assert open_labels(archive, NAMES[2:]).reader.extra() == NAMES[:2]
    with pytest.raises(UserError, match=r"1 of 10 images have no label in .*first is d/0\.jpg"):
        open_labels(archive, [*NAMES, "d/0.jpg"])
    with pytest.raises(UserError, match=r"class ids up to 4, which are not in 0\.\.3|labels of 5 classes"):
        open_labels(archive, NAMES, num_classes=4)


@pytest.mark.parametrize("name", [*COLUMNS, "meta.json"])
def test_damaged_and_missing_files_are_refused_at_the_start(archive, name):
    path = archive / name
    whole = path.read_bytes()
    middle = len(whole) // 2 if name == "meta.json" else len(whole) - 16  # a flipped bit
    flipped = [whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]] if name in UNROWED else []
    for spoilt in (
        *flipped,
        *(whole[:-9], whole[:3], b"", b"\x93NUMPY\x01\x00\xff\xff" + whole[10:], whole.replace(b"<", b">")),
        *(whole.replace(b"(9,", b"(99999999999999999999,"), b"PK\x03\x04" + whole, b"\x80\x04}."),
    ):
        path.write_bytes(spoilt)
        if spoilt != whole:
            with refuses(str(archive)):
                open_labels(archive, NAMES)
    path.unlink()
    for make in (lambda path: None, os.mkfifo):
        make(path)
        with refuses("is missing|is not a label archive|does not exist"):
            open_labels(archive, NAMES)


def test_cut_while_in_use_is_one_line_and_deleted_goes_on(archive):
    store = open_labels(archive, NAMES)
    os.truncate(archive / "ids.npy", 200)
    with pytest.raises(UserError, match=r"ids\.npy has been cut: row 8 is missing"):
        store.read(8)
    (archive / "values.npy").unlink()
    check_maps(store, [0])  # what is open stays


def test_large_ids_absent_rows_and_maps_that_are_refused(tmp_path):
    ids = np.full(SHAPE, 70_000, np.int32)
    info = replace(INFO, num_classes=100_000, log_sum_exp=False)
    writer = ArchiveWriter(tmp_path / "out", info, NAMES[:2])
    values = label_map(0).values
    for bad, message in (
        (LabelMap(values + np.float16("nan"), ids), "NaN or infinite"),
        (LabelMap(values, ids + 30_000), "class id 100000"),
        (LabelMap(values[:, :2], ids[:, :2]), r"shape \(k, h, w\) = \(2, 2, 4\), but the archive's is"),
    ):
        with pytest.raises(UserError, match=message):
            writer.write(1, bad)
    writer.write(1, LabelMap(values, ids))
    assert writer.pending() == [0]
    with pytest.raises(UserError, match="row 0 reads other than it was written"):
        writer.finish()
    writer.write_absent(0)
    writer.finish(NAMES[:1])
    store = open_labels(tmp_path / "out", NAMES[:2])
    assert store.reader.missing == {0} and store.warnings == []
    np.testing.assert_array_equal(store.read(1).ids, ids)
    small = ArchiveWriter(tmp_path / "small", replace(info, num_classes=None), NAMES[:2])
    with pytest.raises(UserError, match="class id 70000, but nothing says that there are more than 65,536 classes"):
        small.write(0, LabelMap(values, ids))


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_file_of_the_users_is_replaced(archive, tmp_path, overwrite):
    mine = tmp_path / "mine" / "values.npy"
    mine.parent.mkdir()
    mine.write_bytes(b"of the user")
    with pytest.raises(UserError, match="holds other things"):
        ArchiveWriter(mine.parent, INFO, NAMES, overwrite)
    mine.with_name("meta.json").write_text('{"format": "other"}')
    with pytest.raises(UserError, match="does not describe a volo-tlt label archive"):
        ArchiveWriter(mine.parent, INFO, NAMES, overwrite)
    assert mine.read_bytes() == b"of the user"
    (archive / "notes.txt").write_text("kept")
    if not overwrite:
        for info, names, difference in ((replace(INFO, k=3), NAMES, "k 2, this"), (INFO, NAMES[:8], "records 9, this")):
            with pytest.raises(UserError, match=f"was made with {difference}.*choose another OUT, or --overwrite"):
                ArchiveWriter(archive, info, names)
    writer = ArchiveWriter(archive, INFO, NAMES, overwrite)
    with pytest.raises(UserError, match="another command is writing into it; wait until it ends"):
        ArchiveWriter(archive, INFO, NAMES)
    assert (archive / "notes.txt").exists() and writer.complete != overwrite
    assert len(writer.pending()) == (len(NAMES) if overwrite else 0)


def test_after_a_full_disk_writing_goes_on(archive, tmp_path, monkeypatch):
    real, room = os.pwrite, [300]

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= len(data)
        return real(descriptor, data if room[0] >= 0 else data[:1], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"\.npy can't be written \(No space left on device\); make room and run"):
        write(tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UserError, match="is not complete: run the command that was making it again"):
        open_labels(tmp_path / "out", NAMES)
    writer = ArchiveWriter(tmp_path / "out", INFO, NAMES)
    assert 0 < len(writer.pending()) < len(NAMES)
    writer.close()
    write(tmp_path / "out").finish()
    assert same_files(archive, tmp_path / "out")


def annotator_says(classes: int, spread: float, shape: tuple[int, ...] = (2, 4, 5)) -> Tensor:
    """(B, h, w, C) dense logits."""
    return spread * torch.randn(*shape, classes, generator=torch.Generator().manual_seed(classes)) + 0.4


def written_out(values: Tensor, ids: Tensor, classes: int) -> Tensor:
    """(B, k, h, w) -> float64 (B, C, h, w), 0 where nothing is listed."""
    return torch.zeros(len(ids), classes, *ids.shape[2:], dtype=torch.float64).scatter_(1, ids.long(), values.double())


@pytest.mark.parametrize("classes,k,spread", [(6, 1, 0.1), (40, 5, 4.0), (1000, 5, 8.0)])
def test_listed_classes_have_the_annotators_probabilities(classes, k, spread):
    dense = annotator_says(classes, spread)
    annotation = _annotation(dense.clone(), k)
    # The listed logits are stored in half precision: the truth is a softmax of these and the exact others.
    exact = dense.double().permute(0, 3, 1, 2).scatter(1, annotation.ids.long(), annotation.values.double())
    truth = exact.softmax(1)
    shifted = relative_to_tail(annotation.values, annotation.log_sum_exp, classes)
    assert shifted.dtype == torch.float32 and annotation.log_sum_exp.dtype == torch.float32
    probabilities = written_out(shifted, annotation.ids, classes).softmax(1)
    listed = annotation.ids.long()
    digit = 2**-23 * max(1.0, float(annotation.log_sum_exp.abs().max()))
    torch.testing.assert_close(probabilities.gather(1, listed), truth.gather(1, listed), rtol=0, atol=digit)
    tails = [1 - p.gather(1, listed).sum(1) for p in (probabilities, truth)]
    torch.testing.assert_close(*tails, rtol=0, atol=digit)
    unlisted = probabilities.scatter(1, listed, torch.nan)
    assert (unlisted.nan_to_num(2).amin(1) * (classes - k) - tails[0]).abs().max() < 1e-9  # shared out evenly
    # The published definition says something else.
    published = written_out(annotation.values, annotation.ids, classes).softmax(1)
    assert (published.gather(1, listed) - truth.gather(1, listed)).abs().max() > 1e-2


def test_tails_that_rounding_has_taken_are_as_good_as_nothing():
    values = torch.tensor([30.0, -5.0]).half()[:, None, None]
    for total in (30.0, 29.99999, 30.000002):  # nothing left, less than nothing, next to nothing
        shifted = relative_to_tail(values, torch.full((1, 1), total), 1000)
        assert torch.isfinite(shifted).all()
        probabilities = written_out(shifted[None], torch.tensor([0, 1])[None, :, None, None], 1000).softmax(1)
        assert abs(float(probabilities[0, 0]) - 1) < 3e-6
        torch.testing.assert_close(shifted[0] - shifted[1], torch.full((1, 1), 35.0))
    everything = annotator_says(3, 2.0)
    annotation = _annotation(everything.clone(), 3)
    assert torch.equal(relative_to_tail(annotation.values, annotation.log_sum_exp, 3), annotation.values.float())


def test_a_store_shifts_what_the_targets_read(tmp_path):
    annotation = _annotation(annotator_says(30, 2.0, (1, 2, 2)), 3)
    values, ids, total = (part[0].numpy() for part in annotation)
    for known in (30, None):
        writer = ArchiveWriter(tmp_path / f"{known}", LabelInfo(3, (2, 2), known, log_sum_exp=True), ["a/0.jpg"])
        writer.write(0, LabelMap(values, ids, log_sum_exp=total))
        writer.finish()
    with pytest.raises(UserError, match="does not say how many classes"):
        open_labels(tmp_path / "None", ["a/0.jpg"], label_tail="exact")
    read = open_labels(tmp_path / "30", ["a/0.jpg"], label_tail="exact").read(0).values
    assert torch.equal(torch.from_numpy(read), relative_to_tail(annotation.values, annotation.log_sum_exp, 30)[0])


def test_shares_are_read_as_written_with_their_rest_or_not(tmp_path):
    writer = ArchiveWriter(tmp_path / "a", LabelInfo(SHAPE[0], SHAPE[1:], 5, shares=True), NAMES[:2])
    stored = share_map(0)
    for bad, message in (
        (replace(stored, values=stored.values * 3), "the shares of a cell's classes are not in 0..1"),
        (replace(stored, void=stored.void - 1), "the shares of a cell's classes are not in 0..1"),
        (replace(stored, void=stored.void[1:]), r"void \(2, 4\) is not of \(3, 4\) cells"),
        (label_map(0), "the archive has ids, values, void, this map others"),
    ):
        with pytest.raises(UserError, match=message):
            writer.write(0, bad)
    writer.write(0, stored)
    writer.write_absent(1)
    assert writer.finish(classes=np.array([4, -1]))["cells"] == stored.void.size - 1  # one is void alone
    exact, listed = (
        open_labels(tmp_path / "a", NAMES[:2], bad_label="uniform", label_tail=tail) for tail in ("exact", "zero")
    )
    for name in ("values", "ids", "void"):
        np.testing.assert_array_equal(getattr(exact.read(0), name), getattr(stored, name))
    sums = listed.read(0).values.sum(0)
    assert sums[0, 0] == 0 and np.allclose(np.delete(sums.ravel(), 0), 1)
    np.testing.assert_allclose(listed.read(0).values * stored.values.sum(0), stored.values, atol=1e-7)
    unknown = exact.read(1)
    assert unknown.void is not None and not unknown.void.any() and not unknown.values.any()

"""Shards hold what the folder and its labels hold: same order, same bytes, same maps, same batches; killed or not."""

import io
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets as torch_datasets

from tests.commands.conftest import Running, children, ended, storage
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import LIMIT, wait_until
from tests.data.sources.test_dataset_kinds import cifar
from tests.labels.packed import (
    SHAPE,
    label_map,
    make_archive,
    make_shares,
    make_tree,
    same_files,
    save_image,
    write_images,
)
from tlt.data.sources import open_images
from tlt.data.sources.folder import PACKING, ImageFolder, scan_folder
from tlt.data.sources.image_file import read_size
from tlt.data.sources.records import FileRecords, RecordImages
from tlt.errors import UserError, WorkerDied
from tlt.io import jobs
from tlt.io.output_folder import marker_crc
from tlt.labels.label_info import LabelInfo
from tlt.labels.shards import ShardReader
from tlt.labels.store import open_labels
from tlt.labels.tree import label_names
from tlt.tools import pack_images as packer
from tlt.tools.check import check
from tlt.tools.cli import main
from tlt.tools.pack_images import Packing, member_names, pack_images
from volo.checkpoint.resume import fingerprint


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data")


def test_warnings_about_images_are_told_whole(data, tmp_path):
    (data / "train" / "Cat").mkdir()
    (data / "train" / "cat").mkdir()
    printed = "\n".join(pack_images(str(data), str(tmp_path / "out"), ["train"]))
    assert "warning: " in printed and all(line.removeprefix("warning:").strip() for line in printed.splitlines())
    assert "classes that differ in case alone" in printed


STORES: dict[str, Callable[[Path, ImageFolder], Path]] = {
    "tree, part": lambda root, images: make_tree(root, images, LabelInfo(2, (3, 4), 5, (0.1, 0.2, 0.9, 1.0))),
    "archive, centre": lambda root, images: make_archive(root, images, "center"),
    "archive": make_archive,
    "archive of shares": make_shares,
}


@pytest.mark.parametrize("kind", STORES)
def test_shards_hold_what_folder_and_labels_hold(data, tmp_path, kind):
    folder = scan_folder(data / "train")
    root = STORES[kind](tmp_path / "labels", folder)
    pack_images(str(data), str(tmp_path / "out"), labels=str(root), workers=2)
    validation, shards = (open_images(str(tmp_path / "out"), split) for split in ("val", "train"))
    assert validation.class_names == shards.class_names and list(validation.folder_names) == ["a.1", "b", "deep"]
    assert isinstance(shards, RecordImages) and list(shards.paths) == list(folder.paths)
    assert shards.classes.tolist() == folder.classes.tolist() and shards.class_names == folder.class_names
    assert set(shards.folder_names) == set(folder.folder_names) and "empty" in shards.folder_names
    assert [shards.read(i) for i in range(len(shards))] == [folder.read(i) for i in range(len(folder))]
    sizes = [read_size(folder.read(i)) for i in range(len(folder))]
    theirs = open_labels(root, folder.paths, num_classes=5)
    for path in ("out", "out/train"):
        ours = open_labels(tmp_path / path, shards.paths, num_classes=5)
        assert isinstance(ours.reader, ShardReader) and fingerprint(shards, ours) == fingerprint(folder, theirs)
        for row in range(len(folder)):
            one, other = (store.read(row, *sizes[row]) for store in (ours, theirs))
            np.testing.assert_array_equal(one.values, other.values)
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.void, other.void)
            np.testing.assert_allclose(one.area, other.area, atol=1e-7)
    if "archive" in kind:
        exact = [open_labels(path, folder.paths, None, 5, label_tail="exact") for path in (tmp_path / "out", root)]
        for row in range(len(folder)):
            one, other = (store.read(row, *sizes[row]).values for store in exact)
            np.testing.assert_array_equal(one, other)


def test_members_are_samples_of_their_own_to_webdataset(data, tmp_path):
    wds = pytest.importorskip("webdataset")
    pack_images(str(data), str(tmp_path / "out"))
    folder = scan_folder(data / "train")
    actual = list(wds.WebDataset(str(tmp_path / "out" / "train" / "00000.tar"), shardshuffle=False))
    theirs = [(int(each["cls"]), *(each[kind] for kind in ("jpg", "png", "webp") if kind in each)) for each in actual]
    assert theirs == [(int(folder.classes[i]), bytes(folder.read(i))) for i in range(len(folder))]
    assert actual[0]["__key__"] == "a.1/9"


def test_no_two_images_share_a_key():
    names = ["a/x.jpg", "a/x.png", "a/x.jpg.png", "a/x%_jpg.jpg", "a/x%2Ejpg.png", "a/.x.jpg", "a/y", "a/y.gif"]
    keys = [name.rpartition(".")[0] for name in member_names(names)]
    assert len(set(keys)) == len(names) and not any("." in os.path.basename(key) for key in keys)
    assert member_names(["a.b/IMG_1.JPEG", "a/1.tif"]) == ["a.b/IMG_1.jpg", "a/1.tif"]


def test_a_killed_command_goes_on_to_the_same_bytes(tmp_path):
    for number in range(60):
        save_image(tmp_path / "data" / "train" / f"c{number % 3}" / f"{number}.png", number, side=140)
    flags = ["pack-images", str(tmp_path / "data"), "--shard-size", "1", "--workers", "2"]
    out = tmp_path / "out" / "train"
    # One each of the second and the third shard, which the two workers wait for for ever.
    hangs = 'while os.getpid() != os.getsid(0) and str(path).endswith(("c0/57.png", "c1/58.png")): time.sleep(0.05)'
    process = Running([sys.executable, "-m", "tlt", *flags, str(tmp_path / "out")], **storage(tmp_path, hangs)).process
    wait_until((out / "00000.tar").exists)
    wait_until(lambda: len([*out.glob(".*.tmp")]) == 2)
    workers = children(process.pid)
    process.kill()  # of its workers none goes on writing
    process.wait()
    assert len(workers) == 2
    wait_until(lambda: all(map(ended, workers)))
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert made and not (out / "shards.json").exists() and (out / PACKING).exists()
    with pytest.raises(UserError, match="not complete: run `tlt pack-images` again"):
        open_images(str(tmp_path / "out"), "train")
    (out / ".00003.tar.tmp").write_bytes(b"half")  # what a killed writer may leave
    for folder in ("out", "undisturbed"):
        assert main([*flags, str(tmp_path / folder)]) == 0
    assert same_files(out, tmp_path / "undisturbed" / "train") and len(list(out.glob("*.tar"))) > 3
    assert made.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}.items()


def test_hanging_process_ends_the_command(data, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "begin_process", lambda: time.sleep(LIMIT))
    monkeypatch.setattr(jobs, "_START_SECONDS", 0.2)
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerDied, match="packing: a process did not start in 0.2 s: run the same command again"):
        pack_images(str(data), str(tmp_path / "out"), shard_mb=1, workers=2)
    assert set(multiprocessing.active_children()) <= before


def test_what_reads_otherwise_is_reported(data, tmp_path, monkeypatch):
    scan = packer.scan_packed

    def damaging(path: str) -> tuple[FileRecords, FileRecords]:
        content = bytearray(Path(path).read_bytes())
        content[700] ^= 1  # in the first image
        Path(path).write_bytes(content)
        return scan(path)

    monkeypatch.setattr(packer, "scan_packed", damaging)
    with pytest.raises(UserError, match="00000.tar reads other than it was written"):
        pack_images(str(data), str(tmp_path / "out"))
    assert not [*(tmp_path / "out" / "train").glob("[!.]*.tar")]


def test_what_is_there_is_never_mixed_with_something_else(data, tmp_path):
    out = str(tmp_path / "out")
    pack_images(str(data), out)
    (tmp_path / "out" / "train" / "notes.txt").write_text("mine")
    assert "9 images are packed in" in "".join(pack_images(str(data), out))
    labels = str(make_tree(tmp_path / "labels", scan_folder(data / "train")))
    rows: list[tuple[dict[str, Any], str]] = [
        ({"shard_mb": 1}, "--shard-size 512, this command says 1"),
        ({"max_side": 8}, "--max-side None, this command says 8"),
        ({"labels": labels}, r"labels \(sha256\) None, this command says .*"),
    ]
    for settings, difference in rows:
        with pytest.raises(UserError, match=f"was made with {difference}: choose another OUT, or --overwrite"):
            pack_images(str(data), out, **settings)
    save_image(data / "train" / "b" / "new.png", 99)
    with pytest.raises(UserError, match="was made with images .*choose another OUT, or --overwrite"):
        pack_images(str(data), out)
    pack_images(str(data), out, overwrite=True)
    assert list(open_images(out, "train").paths) == list(scan_folder(data / "train").paths)
    assert (tmp_path / "out" / "train" / "notes.txt").read_text() == "mine"
    # A killed command has left a shard of other images, one that lacks an image, or one of images as they were before.
    shard, image = tmp_path / "out" / "train" / "00000.tar", Path(scan_folder(data / "train").path(0))
    with tarfile.open(shard) as whole, tarfile.open(fileobj=(cut := io.BytesIO()), mode="w") as part:
        for member in whole.getmembers()[:-2]:
            part.addfile(member, whole.extractfile(member))
    changes = [(shard, (tmp_path / "out" / "validation" / "00000.tar").read_bytes()), (shard, cut.getvalue())]
    changes += [(image, image.read_bytes()[:-1] + b"?")]
    marker = tmp_path / "out" / "train" / PACKING
    content = json.loads(marker.read_text()) | {"complete": False}
    del content["crc32"]
    marker.write_text(json.dumps(content | {"crc32": marker_crc(content)}))
    for path, changed in changes:
        before = path.read_bytes()
        path.write_bytes(changed)
        with pytest.raises(UserError, match="00000.tar holds other images or labels: remove it"):
            pack_images(str(data), out)
        path.write_bytes(before)
    pack_images(str(data), out)


def test_large_images_are_made_smaller(data, tmp_path):
    pixels = np.linspace(0, 255, 300 * 160 * 3).reshape(160, 300, 3).astype(np.uint8)
    Image.fromarray(pixels).save(data / "train" / "b" / "x.jpg", quality=95)
    folder = scan_folder(data / "train")
    root = make_archive(tmp_path / "labels", folder)
    arguments = ["pack-images", str(data), str(tmp_path / "out"), "--labels", str(root), "--max-side", "200"]
    assert main(arguments) == 0
    shards = open_images(str(tmp_path / "out"), "train")
    row = list(folder.paths).index("b/x.jpg")
    assert read_size(shards.read(row)) == (200, 107) and read_size(folder.read(row)) == (300, 160)
    assert [i for i in range(len(folder)) if shards.read(i) != folder.read(i)] == [row]
    ours, theirs = open_labels(tmp_path / "out", shards.paths), open_labels(root, folder.paths)
    one, other = ours.read(row, 200, 107), theirs.read(row, 300, 160)
    np.testing.assert_array_equal(one.values, other.values)
    assert one.area == other.area


def test_names_that_lead_out_are_refused_before_writing(data, tmp_path):
    folder = scan_folder(data / "train")
    hostile = replace(folder, paths=["b/../../x.jpg", *folder.paths[1:]])  # as of an index that somebody else made
    with pytest.raises(UserError, match=r"b/\.\./\.\./x.jpg, an image of .*, is named outside of it: rename it"):
        Packing(str(tmp_path / "out"), hostile, None, None)
    assert not (tmp_path / "out").exists()


def test_other_kinds_of_data_set_are_packed_in_their_order(tmp_path, monkeypatch):
    cifar(tmp_path, monkeypatch, torch_datasets.CIFAR10)
    kind = ["--dataset", "torch/cifar10", "--split", "train", "validation"]
    assert main(["pack-images", str(tmp_path), str(tmp_path / "out"), *kind]) == 0
    for split in ("train", "validation"):
        ours, theirs = open_images(str(tmp_path / "out"), split), open_images(str(tmp_path), split, kind[1])
        assert list(ours.paths) == list(theirs.paths) and ours.classes.tolist() == theirs.classes.tolist()
        assert ours.class_names == theirs.class_names
        assert [ours.read(i) for i in range(6)] == [theirs.read(i) for i in range(6)]


def test_images_without_label(data, tmp_path):
    folder = scan_folder(data / "train")
    root = make_tree(tmp_path / "labels", folder)
    (root / label_names(folder.paths)[2]).unlink()
    said = pack_images(str(data), str(tmp_path / "out"), labels=str(root))
    assert [line for line in said if "1 of 9 images have no label" in line and "b/1%2E.v2.png" in line]
    with pytest.raises(UserError, match=r"1 of 9 images have no label .* first is b/1%2E.v2.png"):
        open_labels(tmp_path / "out", folder.paths)
    store = open_labels(tmp_path / "out", folder.paths, bad_label="skip")
    assert store.reader.missing == {2} and store.read(2).area == (0, 0, 0, 0)
    # in another order, and of some of the images
    some = open_labels(tmp_path / "out", [folder.paths[row] for row in (5, 0)])
    np.testing.assert_array_equal(some.read(0).ids, label_map(5).ids)
    np.testing.assert_array_equal(some.read(1).ids, label_map(0).ids)
    pack_images(str(data), str(tmp_path / "without"))
    with pytest.raises(UserError, match="shards without labels: pack them with `tlt pack-images --labels"):
        open_labels(tmp_path / "without", folder.paths)


def test_a_label_that_cannot_be_trained_on_stops_the_packing(data, tmp_path):
    root = make_tree(tmp_path / "labels", folder := scan_folder(data / "train"))
    path = root / label_names(folder.paths)[3]
    for content, message in (
        (torch.full((2, *SHAPE), torch.nan), "1.v2.pt"),
        (torch.zeros(2, 2, 5, 4), "the others' is"),
    ):
        torch.save(content.half(), path)
        with pytest.raises(UserError, match=message):
            pack_images(str(data), str(tmp_path / "out"), labels=str(root), overwrite=True)


def test_a_flipped_bit_in_a_label_is_noticed(data, tmp_path, capsys):
    folder = scan_folder(data / "train")
    pack_images(str(data), str(tmp_path / "out"), labels=str(make_tree(tmp_path / "labels", folder)))
    store = open_labels(tmp_path / "out", folder.paths)
    assert isinstance(store.reader, ShardReader) and check(str(tmp_path / "out"), str(tmp_path / "out"))[0]
    path = tmp_path / "out" / "train" / "00000.tar"
    content = bytearray(path.read_bytes())
    content[int(store.reader.table.rows["offset"][4]) + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="label of b/x.jpg in .*crc32 is wrong"):
        open_labels(tmp_path / "out", folder.paths).read(4)
    assert main(["check", str(tmp_path / "out"), str(tmp_path / "out")]) == 2
    assert f"files with a wrong checksum: 1\n  {path}" in capsys.readouterr().out


def test_all_splits_are_found_before_one_is_packed(data, tmp_path):
    with pytest.raises(UserError, match="no 'nowhere' folder"):
        pack_images(str(data), str(tmp_path / "out"), ["train", "nowhere"])
    assert not (tmp_path / "out").exists()

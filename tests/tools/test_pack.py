"""Packing trees and archives of version 1, and unpacking: the same maps, whatever they come from."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from tlt.errors import UserError
from tlt.label_map import LabelMap, centre_square
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import write_map
from tlt.tools.pack import pack, unpack

K, H, W = SHAPE = (2, 3, 4)
# dotted, nested, not ASCII, not even UTF-8, two of one stem
NAMES = ["a/0.jpg", "a/1.v2.jpg", "a/1.png", "b/deep/ü 2.jpg", "b/deep/\udcff.jpg", "c/x.jpg", "c/x.png"]


def entry(mark: int, shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[2, k, H, W] as the published program writes it; the first logit is `mark`."""
    generator = np.random.default_rng(mark)
    values, ids = generator.normal(size=shape), generator.integers(0, 5, shape)
    values[0, 0, 0] = mark
    return torch.stack([torch.from_numpy(values).half(), torch.from_numpy(ids).half()]).to(dtype)


def label_of(name: str) -> str:
    return name + ".pt" if name.startswith("c/") else os.path.splitext(name)[0] + ".pt"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One label per name of NAMES, marked 0, 1, ...; saved in the ways that labels are saved."""
    root = tmp_path / "tree"
    for mark, name in enumerate(NAMES):
        path = root / label_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if mark == 1:
            write_map(path, LabelMap(entry(1)[0].numpy(), entry(1)[1].int().numpy()), 5)
        elif mark == 2:
            torch.save(entry(2)[None], path)
        elif mark == 3:
            torch.save(entry(3, dtype=torch.float32), path)
        else:
            torch.save(entry(mark), path, _use_new_zipfile_serialization=mark != 4)
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An image of 8 x 4 pixels for every name."""
    for name in NAMES:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 4)).save(path)
    return tmp_path / "images"


def mark_of(store: LabelStore, index: int) -> float:
    return float(store.read(index, 8, 4).values[0, 0, 0])


def check_same(one: LabelStore, other: LabelStore) -> None:
    """Maps, bit for bit."""
    assert one.shape == other.shape
    for index in range(len(one)):
        first, second = (store.read(index, 8, 4) for store in (one, other))
        np.testing.assert_array_equal(first.values, second.values)
        np.testing.assert_array_equal(first.ids, second.ids)
        assert (first.values.dtype, first.ids.dtype, first.area) == (np.float16, np.int32, second.area)


@pytest.mark.parametrize(("known", "area"), [(True, "full"), (False, "center")], ids=["images", "labels"])
def test_an_archive_has_the_maps_of_its_tree(tree: Path, images: Path, tmp_path: Path, known: bool, area: str) -> None:
    said = pack(str(tree), str(tmp_path / "out.tlt"), str(images) if known else None, area=area)
    assert "7 labels packed" in said[0] and ("% by chance" in said[-1]) == known
    for names in (NAMES, [NAMES[row] for row in (4, 0, 6, 2, 5, 1, 3)]):
        check_same(open_labels(tmp_path / "out.tlt", names), open_labels(tree, names, area=area))
    assert open_labels(tmp_path / "out.tlt", NAMES).read(0, 80, 40).area == (
        (0, 0, 1, 1) if area == "full" else centre_square(80, 40)
    )


def test_unpacking_gives_files_with_the_same_maps(tree: Path, images: Path, tmp_path: Path) -> None:
    info = LabelInfo(K, (H, W), 5, (0.0, 0.1, 1.0, 0.9), {"model": "r"})
    info.write(tree / "labels.json")
    for out, folder in (("known", str(images)), ("unknown", None)):
        pack(str(tree), str(tmp_path / f"{out}.tlt"), folder)
        assert unpack(str(tmp_path / f"{out}.tlt"), str(tmp_path / out))[0].startswith("7 label files in")
        files = sorted(path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
        assert files == sorted(p.relative_to(tmp_path / out) for p in (tmp_path / out).rglob("*") if p.is_file())
        check_same(open_labels(tmp_path / out, NAMES), open_labels(tree, NAMES))
        found = LabelInfo.read(tmp_path / out / "labels.json")
        assert found is not None and (found.area, found.annotator, found.num_classes) == (info.area, {"model": "r"}, 5)
    loaded = torch.load(tmp_path / "known" / "a" / "0.pt", weights_only=True)
    assert torch.equal(loaded, entry(0))  # as published: half precision, [2, k, H, W]
    (tmp_path / "known" / "notes.txt").write_text("kept")
    archive, before = str(tmp_path / "known.tlt"), {path: path.read_bytes() for path in tree.rglob("*.pt")}
    with pytest.raises(UserError, match="is not empty: choose another folder, or --overwrite"):
        unpack(archive, str(tmp_path / "known"))
    unpack(archive, str(tmp_path / "known"), overwrite=True)
    (tree / "labels.json").unlink()
    with pytest.raises(UserError, match="holds other things than a label tree"):
        unpack(archive, str(tree), overwrite=True)
    assert (tmp_path / "known" / "notes.txt").exists()
    assert before == {path: path.read_bytes() for path in tree.rglob("*.pt")}


def test_names_that_lead_out_are_not_unpacked(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a.tlt", LabelInfo(K, (H, W), 5), ["../x.jpg"])
    writer.write(0, LabelMap(entry(0)[0].numpy(), entry(0)[1].int().numpy()))
    writer.finish()
    with pytest.raises(UserError, match=r"\.\./x\.pt, outside of its tree: it is not unpacked"):
        unpack(str(tmp_path / "a.tlt"), str(tmp_path / "deep" / "back"))
    assert not (tmp_path / "deep").exists()


def test_labels_without_image_and_images_without_label(tree: Path, images: Path, tmp_path: Path) -> None:
    (tree / "z").mkdir()
    torch.save(entry(9), tree / "z" / "9.pt")
    (images / "c" / "new.jpg").write_bytes((images / "c" / "x.jpg").read_bytes())
    said = pack(str(tree), str(tmp_path / "out.tlt"), images=str(images))
    assert "1 of 8 images have no label, such as c/new.jpg" in said[0]
    assert "1 labels belong to no image, such as z/9.pt" in said[1]
    store = open_labels(tmp_path / "out.tlt", NAMES)
    assert [mark_of(store, index) for index in range(7)] == list(range(7)) and store.reader.extra() == ["z/9.pt"]


def test_transposed_trees_are_turned(tree: Path, tmp_path: Path) -> None:
    pack(str(tree), str(tmp_path / "out.tlt"), transposed=True)
    store = open_labels(tmp_path / "out.tlt", NAMES)
    np.testing.assert_array_equal(store.read(0).values, entry(0)[0].numpy().transpose(0, 2, 1))


def test_labels_that_cannot_be_trained_on_are_not_packed_and_packing_goes_on(tree: Path, tmp_path: Path) -> None:
    bad, out = entry(3), str(tmp_path / "out.tlt")
    bad[0, 1, 2, 3] = float("inf")
    for content, message in (
        (bad, r"ü 2\.pt: a label value is NaN or infinite"),
        (entry(3, (2, 4, 4)), r"ü 2\.pt: shape \(k, h, w\) = \(2, 4, 4\), but the archive's is"),
    ):
        torch.save(content, tree / "b" / "deep" / "ü 2.pt")
        with pytest.raises(UserError, match=message):
            pack(str(tree), out)
    torch.save(entry(3), tree / "b" / "deep" / "ü 2.pt")
    pack(str(tree), out)  # the same command goes on
    assert mark_of(open_labels(out, NAMES), 3) == 3
    with pytest.raises(UserError, match="complete label archive: choose another folder, or --overwrite"):
        pack(str(tree), out)
    with pytest.raises(UserError, match="holds other things"):
        pack(str(tree), str(tree))


def write_old(root: Path, known: bool, transposed: bool = False) -> None:
    """An archive of version 1 as its writer made it: three rows a shard, the last row without a label."""
    root.mkdir()
    images, labels = [name if known else "" for name in NAMES], [label_of(name) for name in NAMES]
    names: dict[str, np.ndarray] = {}
    for kind, listed in (("image", images), ("label", labels)):
        encoded = [os.fsencode(name) for name in listed]
        names[f"{kind}s"] = np.frombuffer(b"".join(encoded), np.uint8)
        names[f"{kind}_ends"] = np.cumsum([len(each) for each in encoded]).astype(np.int64)
    save_file(names, root / "names.safetensors")
    for shard, start in enumerate(range(0, 7, 3)):
        rows = range(start, min(start + 3, 7))
        both = np.stack([entry(row).numpy() for row in rows])
        both = np.ascontiguousarray(both.swapaxes(-1, -2)) if transposed else both
        tensors = {
            "ids": np.ascontiguousarray(both[:, 1].astype(np.uint16)),
            "values": np.ascontiguousarray(both[:, 0]),
            "log_sum_exp": np.stack([np.full(both.shape[3:], row, np.float32) for row in rows]),
            "size": np.zeros((len(rows), 2), np.int32),
            "area": np.zeros((len(rows), 4), np.float32),
            "form": np.array([0xFF if row == 6 else 0 for row in rows], np.uint8),
        }
        crcs = [
            zlib.crc32(os.fsencode(labels[row]) + b"".join(each[place].tobytes() for each in tensors.values()))
            for place, row in enumerate(rows)
        ]
        save_file({**tensors, "crc32": np.array(crcs, np.uint32)}, root / f"{shard:05d}.safetensors")
    info = {"format": "volo-tlt label tree, version 1", "k": K, "grid": [H, W], "num_classes": 5, "annotator": {"m": 1}}
    header = {"k": K, "grid": [W, H] if transposed else [H, W], "ids": "U16", "log_sum_exp": True, "records": 7}
    header |= {"shard_records": 3, "area": "center", "transposed": transposed, "labels_json": json.dumps(info)}
    header |= {"names_sha256": hashlib.sha256((root / "names.safetensors").read_bytes()).hexdigest()}
    content: dict[str, Any] = {"format": "volo-tlt label archive, version 1", "header": header, "files": {}}
    content |= {"max_id": 4, "absent": 1, "accuracy": {}}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("known", "transposed"), [(True, False), (False, True)], ids=["images", "labels"])
def test_archives_of_version_1_are_converted(tree: Path, tmp_path: Path, known: bool, transposed: bool) -> None:
    write_old(tmp_path / "old", known, transposed)
    with pytest.raises(UserError, match=rf"{tmp_path}/old is a label archive of an earlier .*`tlt pack \S+old NEW`"):
        open_labels(tmp_path / "old", NAMES)
    assert "6 labels of" in pack(str(tmp_path / "old"), str(tmp_path / "new"))[0]
    store = open_labels(tmp_path / "new", NAMES, bad_label="skip", num_classes=5)
    assert store.missing() == [6] and (store.area, store.info.annotator) == ("center", {"m": 1})
    check_same(open_labels(tmp_path / "new", NAMES[:6]), open_labels(tree, NAMES[:6], area="center"))
    assert store.reader.read(4).log_sum_exp[1, 2] == 4
    for name in ("manifest.json", "names.safetensors", "00001.safetensors"):
        whole = (path := tmp_path / "old" / name).read_bytes()
        for spoilt in (whole[:-4], whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:], b""):
            path.write_bytes(spoilt)
            with pytest.raises(UserError, match="copy the archive again"):
                pack(str(tmp_path / "old"), str(tmp_path / "new"), overwrite=True)
        path.write_bytes(whole)

"""Packing a published tree, reading the archive, and going back, against loaders and checksums that are not ours."""

from __future__ import annotations

import filecmp
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import zlib
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.label_map import FULL_AREA, NO_AREA, LabelMap, centre_square
from tlt.labels.archive import ArchiveReader
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.metadata import TreeMetadata
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import TreeReader, write_map
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
    """One label per name of NAMES, marked 0, 1, ...; each saved in another of the ways that labels are saved."""
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
        elif mark == 4:
            torch.save(entry(4), buffer := io.BytesIO())
            path.write_bytes(buffer.getvalue())
        else:
            torch.save(entry(mark), path)
    return root


@pytest.fixture
def archive(tree: Path, tmp_path: Path) -> Path:
    """The tree in shards of three rows."""
    pack(str(tree), str(tmp_path / "out.tlt"), shard_records=3)
    return tmp_path / "out.tlt"


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


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_names_find_their_labels_in_any_order(archive: Path, tree: Path) -> None:
    order = [4, 0, 6, 2, 5, 1, 3]
    names = [NAMES[place] for place in order]
    store = open_labels(archive, names, num_classes=5)
    assert isinstance(store.reader, ArchiveReader) and store.shape == SHAPE and store.warnings == []
    assert [mark_of(store, index) for index in range(7)] == order
    for index, name in enumerate(names):
        expected = torch.load(tree / label_of(name)).squeeze(0).float().numpy()
        found = store.read(index)
        assert (found.values.dtype, found.ids.dtype, found.area) == (np.float16, np.int32, FULL_AREA)
        np.testing.assert_array_equal(np.stack([found.values, found.ids]), expected)
    assert isinstance(open_labels(tree, names).reader, TreeReader)


@pytest.mark.parametrize("known", [True, False], ids=["images", "labels"])
def test_rows_in_the_order_of_the_images_are_not_searched(
    tree: Path, images: Path, tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = NAMES
    if not known:  # only stems that are one image's
        shutil.rmtree(tree / "c")
        names = NAMES[:5]
    pack(str(tree), str(tmp_path / "ordered"), str(images) if known else None)
    ordered = sorted(names, key=lambda name: (natural_key(name), name))
    monkeypatch.setattr("tlt.labels.archive.find_labels", MagicMock(side_effect=AssertionError("searched")))
    store = open_labels(tmp_path / "ordered", ordered)
    assert [mark_of(store, row) for row in range(len(names))] == [NAMES.index(name) for name in ordered]
    with pytest.raises(AssertionError, match="searched"):
        open_labels(tmp_path / "ordered", [*ordered[1:], "d/new.jpg"])


def test_unpacking_gives_the_same_files_byte_for_byte(archive: Path, tree: Path, tmp_path: Path) -> None:
    assert unpack(str(archive), str(tmp_path / "back")) == [f"7 label files in {tmp_path / 'back'}"]
    files = sorted(path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path / "back") for p in (tmp_path / "back").rglob("*") if p.is_file())
    assert len(files) == 7 and all(filecmp.cmp(tree / name, tmp_path / "back" / name, False) for name in files)
    with pytest.raises(UserError, match="is not empty"):
        unpack(str(archive), str(tmp_path / "back"))


def test_safetensors_reads_the_files(archive: Path) -> None:
    store = open_labels(archive, NAMES)
    shard = load_file(archive / "00000.safetensors")
    assert {name: (str(t.dtype), t.shape) for name, t in shard.items()} == {
        "values": ("float16", (3, *SHAPE)),
        "ids": ("uint16", (3, *SHAPE)),
        "size": ("int32", (3, 2)),
        "area": ("float32", (3, 4)),
        "form": ("uint8", (3,)),
        "crc32": ("uint32", (3,)),
    }
    np.testing.assert_array_equal(shard["values"][0], store.read(0).values)
    with safe_open(archive / "00002.safetensors", "pt") as file:
        assert file.get_slice("values").get_shape() == [1, *SHAPE]
    names = load_file(archive / "names.safetensors")
    assert names["labels"].tobytes()[: names["label_ends"][0]] == b"a/0.pt"


def test_checksums_are_those_of_zlib_and_hashlib(archive: Path) -> None:
    manifest = json.loads((archive / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in archive.glob("*.safetensors")}
    assert manifest["files"] == {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    shard = load_file(archive / "00000.safetensors")
    parts = [shard[name][0].tobytes() for name in ("ids", "values", "size", "area", "form")]
    assert shard["crc32"][0] == zlib.crc32(b"a/0.pt" + b"".join(parts))


@pytest.mark.parametrize("name", ["values", "ids", "area", "form", "size", "crc32"])
def test_a_flipped_bit_is_noticed(archive: Path, name: str) -> None:
    path = archive / "00000.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    flip(path, 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0])
    store = open_labels(archive, NAMES)
    with pytest.raises(UserError, match=r"a/0\.pt in .*00000\.safetensors, row 0, is damaged \(crc32 is wrong\)"):
        store.read(0)
    assert mark_of(store, 1) == 1
    assert store.reader.damaged_files() == ["00000.safetensors"]
    skipping = open_labels(archive, NAMES, bad_label="skip")
    assert skipping.read(0).area == NO_AREA and "crc32" in skipping.take_faults()[0][1]


def test_a_hole_of_zeros_is_noticed(archive: Path) -> None:
    path = archive / "00001.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes(len(data) - start))
    assert load_file(path)["values"].shape == (3, *SHAPE)  # safetensors takes it
    store = open_labels(archive, NAMES)
    assert mark_of(store, 0) == 0
    with pytest.raises(UserError, match=r"00001\.safetensors, row 0, is damaged"):
        store.read(3)


@pytest.mark.parametrize(
    "file,text",
    [
        ("manifest.json", "manifest.json can't be read as JSON|its checksum is wrong"),
        ("names.safetensors", r"names\.safetensors has \d+ bytes instead of"),
        ("00002.safetensors", r"00002\.safetensors has \d+ bytes instead of"),
    ],
)
def test_cut_files_are_told_at_the_start(archive: Path, file: str, text: str) -> None:
    os.truncate(archive / file, (archive / file).stat().st_size - 9)
    with pytest.raises(UserError, match=text):
        open_labels(archive, NAMES)
    (archive / file).unlink()
    with pytest.raises(UserError, match="can't be read|not a label archive"):
        ArchiveReader(str(archive), Names(NAMES))


def test_other_damage_at_the_start(archive: Path) -> None:
    manifest = (archive / "manifest.json").read_text()
    (archive / "manifest.json").write_text(manifest.replace('"max_id": 4', '"max_id": 0'))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(its checksum is wrong\)"):
        open_labels(archive, NAMES)
    (archive / "manifest.json").write_text(manifest)
    flip(archive / "names.safetensors", (archive / "names.safetensors").stat().st_size - 1)
    with pytest.raises(UserError, match=r"names\.safetensors is damaged"):
        open_labels(archive, NAMES)
    flip(archive / "names.safetensors", (archive / "names.safetensors").stat().st_size - 1)
    flip(archive / "00001.safetensors", 20)
    with pytest.raises(UserError, match="its header is wrong"):
        open_labels(archive, NAMES)


def test_shards_that_the_manifest_does_not_name_do_not_exist(archive: Path) -> None:
    (archive / "00003.safetensors").write_bytes(b"rest of a killed run")
    assert mark_of(open_labels(archive, NAMES), 6) == 6
    os.replace(archive / "manifest.json", archive / "manifest.partial.json")
    with pytest.raises(UserError, match="is not complete"):
        open_labels(archive, NAMES)


def test_deleted_or_cut_while_in_use(archive: Path) -> None:
    store = open_labels(archive, NAMES)
    os.truncate(archive / "00001.safetensors", 100)
    with pytest.raises(UserError, match=r"00001\.safetensors has been cut to 100 of \d+ bytes"):
        store.read(3)
    for path in archive.iterdir():
        path.unlink()
    assert mark_of(store, 0) == 0  # the mapping keeps the file
    with pytest.raises(UserError, match="can't be read"):
        pickle.loads(pickle.dumps(store))


def test_images_and_archives_that_do_not_belong_together(archive: Path) -> None:
    with pytest.raises(UserError, match=r"2 of 2 images have no label in .*first is d/0\.jpg"):
        open_labels(archive, ["d/0.jpg", "d/1.jpg"], bad_label="skip")
    with pytest.raises(UserError, match=r"1 of 8 images have no label in .*first is d/0\.jpg"):
        open_labels(archive, [*NAMES, "d/0.jpg"])
    store = open_labels(archive, ["d/0.jpg", "a/0.jpg"], bad_label="uniform")
    assert store.read(0).area == FULL_AREA and mark_of(store, 1) == 0 and store.missing() == [0]
    assert len(store.reader.extra()) == 6 and "1 of 2" in store.warnings[0]


def test_class_ids_out_of_range_are_told_at_the_start(archive: Path) -> None:
    with pytest.raises(UserError, match=r"class ids up to 4, which are not in 0\.\.3 \(--num-classes 4\)"):
        open_labels(archive, NAMES, num_classes=4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_labels_are_not_packed(tree: Path, tmp_path: Path, value: float) -> None:
    bad = entry(0)
    bad[0, 1, 2, 3] = value
    torch.save(bad, tree / "a" / "0.pt")
    with pytest.raises(UserError, match=r"a/0\.pt: a label value is NaN or infinite"):
        pack(str(tree), str(tmp_path / "out.tlt"))


def test_large_class_ids_may_come_late(tree: Path, tmp_path: Path) -> None:
    for path in tree.rglob("*.pt"):
        torch.save(torch.load(path).float(), path)
    large = entry(3).float()
    large[1] += 70_000
    torch.save(large, tree / "b" / "deep" / "ü 2.pt")
    pack(str(tree), str(tmp_path / "out.tlt"))
    assert open_labels(tmp_path / "out.tlt", NAMES).read(3).ids.max() >= 70_000
    torch.save(entry(0), tree / "a" / "0.pt")  # half precision: of few classes, says the first file
    with pytest.raises(UserError, match=r"ü 2\.pt: class id 7\d+, .* one format"):
        pack(str(tree), str(tmp_path / "other.tlt"))


def test_values_that_another_program_made_infinite_are_noticed(archive: Path) -> None:
    store = open_labels(archive, NAMES)
    rows = store.reader.rows
    writer_view = bytearray((archive / "00000.safetensors").read_bytes())
    header = int.from_bytes(writer_view[:8], "little")
    places = json.loads(writer_view[8 : 8 + header])
    start = 8 + header + places["values"]["data_offsets"][0]
    writer_view[start : start + 2] = np.float16(np.nan).tobytes()
    (archive / "00000.safetensors").write_bytes(writer_view)
    tensors = load_file(archive / "00000.safetensors")
    parts = [tensors[name][0].tobytes() for name in ("ids", "values", "size", "area", "form")]
    crc = zlib.crc32(rows.label(0) + b"".join(parts)).to_bytes(4, "little")
    start = 8 + header + places["crc32"]["data_offsets"][0]
    writer_view[start : start + 4] = crc
    (archive / "00000.safetensors").write_bytes(writer_view)
    with pytest.raises(UserError, match="NaN or infinite"):
        open_labels(archive, NAMES).read(0)


def test_labels_that_would_change_are_not_packed(tree: Path, tmp_path: Path) -> None:
    torch.save(entry(0, dtype=torch.float32) + 1e-4 * torch.tensor([1.0, 0.0])[:, None, None, None], tree / "a/0.pt")
    with pytest.raises(UserError, match=r"a/0\.pt holds numbers that half precision"):
        pack(str(tree), str(tmp_path / "out.tlt"))


def test_other_shapes_and_damaged_files_are_not_packed(tree: Path, tmp_path: Path) -> None:
    torch.save(entry(0, (2, 4, 4)), tree / "b" / "deep" / "ü 2.pt")
    with pytest.raises(UserError, match=r"b/deep/ü 2\.pt: shape \(k, h, w\) = \(2, 4, 4\), but the archive's is"):
        pack(str(tree), str(tmp_path / "out.tlt"))
    (tree / "b" / "deep" / "ü 2.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match="ü 2.pt is damaged"):
        pack(str(tree), str(tmp_path / "out.tlt"))
    torch.save(entry(3), tree / "b" / "deep" / "ü 2.pt")
    pack(str(tree), str(tmp_path / "out.tlt"))  # the same command goes on
    assert mark_of(open_labels(tmp_path / "out.tlt", NAMES), 3) == 3


def test_images_give_names_sizes_and_areas(tree: Path, images: Path, tmp_path: Path) -> None:
    (tree / "z").mkdir()
    torch.save(entry(9), tree / "z" / "9.pt")
    (images / "c" / "new.jpg").write_bytes((images / "c" / "x.jpg").read_bytes())
    said = pack(str(tree), str(tmp_path / "out.tlt"), images=str(images), area="center")
    assert "1 of 8 images have no label, such as c/new.jpg" in said[0]
    assert "1 labels belong to no image, such as z/9.pt" in said[1] and "% by chance" in said[-1]
    store = open_labels(tmp_path / "out.tlt", NAMES)
    assert [mark_of(store, index) for index in range(7)] == list(range(7))
    assert store.read(0).area == centre_square(8, 4) == (0.25, 0, 0.75, 1) and store.reader.extra() == ["z/9.pt"]
    with pytest.raises(UserError, match="made of an image of 8 x 4 pixels, which now has 4 x 8"):
        store.read(0, 4, 8)
    assert store.read(0, 80, 40).area == (0.25, 0, 0.75, 1)
    unpack(str(tmp_path / "out.tlt"), str(tmp_path / "back"))
    assert filecmp.cmp(tree / "z" / "9.pt", tmp_path / "back" / "z" / "9.pt", False)


def test_centre_squares_without_images_are_placed_when_read(tree: Path, tmp_path: Path) -> None:
    pack(str(tree), str(tmp_path / "out.tlt"), area="center")
    store = open_labels(tmp_path / "out.tlt", NAMES)
    assert store.read(0, 500, 375).area == centre_square(500, 375)
    with pytest.raises(ValueError, match="size of the source image"):
        store.read(0)


def test_transposed_trees_are_turned_when_read_and_not_when_unpacked(tree: Path, tmp_path: Path) -> None:
    pack(str(tree), str(tmp_path / "out.tlt"), transposed=True)
    store = open_labels(tmp_path / "out.tlt", NAMES)
    assert store.shape == (K, W, H)
    np.testing.assert_array_equal(store.read(0).values, entry(0)[0].numpy().transpose(0, 2, 1))
    unpack(str(tmp_path / "out.tlt"), str(tmp_path / "back"))
    assert filecmp.cmp(tree / "a" / "0.pt", tmp_path / "back" / "a" / "0.pt", False)


def test_what_labels_json_says_travels(tree: Path, tmp_path: Path) -> None:
    TreeMetadata(K, (H, W), 5, (0.0, 0.1, 1.0, 0.9), {"model": "r"}, ["a", "deep", "c"]).write(tree / "labels.json")
    pack(str(tree), str(tmp_path / "out.tlt"))
    store = open_labels(tmp_path / "out.tlt", NAMES, num_classes=5)
    assert store.metadata == TreeMetadata.read(tree / "labels.json")
    assert store.read(0).area == pytest.approx((0.0, 0.1, 1.0, 0.9))
    with pytest.raises(UserError, match="labels of 5 classes, but the model has 6"):
        open_labels(tmp_path / "out.tlt", NAMES, num_classes=6)
    with pytest.raises(UserError, match="class 0 is a there, b here"):
        open_labels(tmp_path / "out.tlt", NAMES, class_names=["b", "a", "c"])
    unpack(str(tmp_path / "out.tlt"), str(tmp_path / "back"))
    assert filecmp.cmp(tree / "labels.json", tmp_path / "back" / "labels.json", False)


def test_many_classes_and_log_sum_exp(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float16).reshape(SHAPE)
    ids = np.full(SHAPE, 70_000, np.int32)
    names = ["a/0.jpg", "a/1.jpg"], ["a/0.pt", "a/1.pt"]
    header = make_header(SHAPE, 100_000, *names, log_sum_exp=True)
    writer = ArchiveWriter(tmp_path / "out", header, *names)
    sums = np.arange(12, dtype=np.float16).reshape(H, W)
    writer.write(1, LabelMap(values, ids), log_sum_exp=sums)
    assert writer.pending() == [0]
    with pytest.raises(UserError, match=r"a/0\.pt in .* is damaged"):
        writer.finish()
    writer.write_absent(0)
    writer.finish()
    store = open_labels(tmp_path / "out", names[0], bad_label="skip")
    np.testing.assert_array_equal(store.read(1).ids, ids)
    np.testing.assert_array_equal(store.reader.record(1).log_sum_exp, sums)
    assert store.missing() == [0] and load_file(tmp_path / "out" / "00000.safetensors")["ids"].dtype == np.int32


def _kill_at(tree: str, out: str, writes: int) -> None:
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal writes
        writes -= 1
        if writes < 0:
            real(descriptor, data[: len(data) // 2], offset)
            os._exit(9)
        return real(descriptor, data, offset)

    os.pwrite = pwrite
    pack(tree, out, shard_records=3)


def test_killed_packing_goes_on_to_the_same_archive(archive: Path, tree: Path, tmp_path: Path) -> None:
    out, context = tmp_path / "killed", multiprocessing.get_context("fork")
    for writes in (0, 4, 11, 17):
        process = context.Process(target=_kill_at, args=(str(tree), str(out), writes))
        process.start()
        process.join()
        assert process.exitcode == 9 and not (out / "manifest.json").exists()
    pack(str(tree), str(out), shard_records=3)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in archive.iterdir())
    assert all(filecmp.cmp(path, out / path.name, False) for path in archive.iterdir())


def test_what_is_there_is_not_overwritten(archive: Path, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="complete label archive: choose another folder, or --overwrite"):
        pack(str(tree), str(archive))
    with pytest.raises(UserError, match="holds other things"):
        pack(str(tree), str(tree))
    os.replace(archive / "manifest.json", archive / "manifest.partial.json")
    with pytest.raises(UserError, match="beginning of another archive"):
        pack(str(tree), str(archive), transposed=True, shard_records=3)
    pack(str(tree), str(archive), transposed=True, overwrite=True)
    assert open_labels(archive, NAMES).shape == (K, W, H)


def others(folder: Path, *names: str) -> dict[Path, bytes]:
    """Files of the user's, none of which may be lost."""
    files = {folder / name: b"of the user: " + name.encode() for name in names}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


@pytest.mark.parametrize("complete", [True, False])
def test_overwriting_removes_the_files_of_the_archive_alone(archive: Path, tree: Path, complete: bool) -> None:
    if not complete:
        os.replace(archive / "manifest.json", archive / "manifest.partial.json")
    kept = others(archive, "model.safetensors", "00003.safetensors", "0.safetensors", ".hidden.safetensors")
    pack(str(tree), str(archive), overwrite=True)
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert sorted({path.name for path in archive.iterdir()} - {path.name for path in kept}) == [
        "00000.safetensors",
        "manifest.json",
        "names.safetensors",
    ]
    assert mark_of(open_labels(archive, NAMES), 6) == 6


@pytest.mark.parametrize("name", ["names.safetensors", "00000.safetensors", "manifest.json", "manifest.partial.json"])
def test_overwriting_replaces_no_file_of_the_users(tree: Path, tmp_path: Path, name: str) -> None:
    kept = others(tmp_path / "out", name, "model.safetensors")
    with pytest.raises(UserError, match=f"OUT .*holds {name}, of no archive|{name} can't be read as JSON"):
        pack(str(tree), str(tmp_path / "out"), overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == kept


def test_a_killed_overwriting_leaves_a_manifest_that_names_what_is_left(archive: Path, tree: Path) -> None:
    def kill(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        os.unlink(path)
        if len(removed) == 2:
            raise KeyboardInterrupt

    removed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            pack(str(tree), str(archive), overwrite=True)
    pack(str(tree), str(archive), overwrite=True)
    assert mark_of(open_labels(archive, NAMES), 6) == 6


def test_unpacking_replaces_label_files_alone(archive: Path, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "back"
    unpack(str(archive), str(out))
    torch.save(entry(77), out / "a" / "0.pt")
    kept = others(out, "notes.txt", "a/mine.pt", ".saving/0.pt")
    unpack(str(archive), str(out), overwrite=True)
    assert filecmp.cmp(tree / "a/0.pt", out / "a/0.pt", False)
    assert all(path.read_bytes() == content for path, content in kept.items())
    for name in ("c/x.png.pt", "labels.json"):
        shutil.rmtree(out)
        kept = others(out, "a/mine.pt", name)
        with pytest.raises(UserError, match=f"{name}"):
            unpack(str(archive), str(out), overwrite=True)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept


def test_unpacking_mends_a_tree_that_says_what_it_is(tree: Path, tmp_path: Path) -> None:
    TreeMetadata(K, (H, W), 5).write(tree / "labels.json")
    pack(str(tree), str(tmp_path / "archive"))
    unpack(str(tmp_path / "archive"), str(tmp_path / "back"))
    os.truncate(tmp_path / "back" / "a" / "0.pt", 50)
    unpack(str(tmp_path / "archive"), str(tmp_path / "back"), overwrite=True)
    assert filecmp.cmp(tree / "a/0.pt", tmp_path / "back" / "a/0.pt", False)


def test_workers_share_the_mapping(archive: Path) -> None:
    store = open_labels(archive, NAMES)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def look() -> None:
        store.read(0)
        mine = f"{archive}/00000.safetensors"  # whole: archives of earlier tests may still be mapped
        maps = Path("/proc/self/smaps").read_text().split(mine)[1].split("VmFlags")[0]
        queue.put({line.split(":")[0]: line.split()[1] for line in maps.splitlines() if ":" in line})

    store.read(0)
    process = context.Process(target=look)
    process.start()
    process.join()
    found = queue.get()
    assert found["Private_Dirty"] == found["Private_Clean"] == "0" and int(found["Rss"]) > 0
    assert [mark_of(pickle.loads(pickle.dumps(store)), index) for index in range(7)] == list(range(7))

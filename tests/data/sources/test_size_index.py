"""The index of image sizes against Pillow; batches are the same with it and without; one that does not fit is told."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import BatchKey
from tlt.data.dataset import EvalDataset, TrainDataset
from tlt.data.sources import folder as tlt_folder
from tlt.data.sources import folder_listing, image_file, size_index
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.data.sources.folder_listing import FolderListing
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.open_images import open_images
from tlt.data.sources.size_index import SizeIndex, index_file, write_index
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.tensor_file import write_tensors
from tlt.tools import cli, index

CONFIG = AugmentConfig(size=(16, 16))
ALL = BatchKey(1, tuple(range(14)))


def save(path: Path, width: int, height: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """14 images of formats and sizes of their own; one has no header, one is cut."""
    train = tmp_path / "data" / "train"
    for i in range(12):
        save(train / f"c{i % 3}" / f"{i}.{('jpg', 'png', 'tiff', 'webp')[i % 4]}", 40 + i, 70 - 2 * i)
    (train / "c0" / "empty.jpg").write_bytes(b"")
    whole = (train / "c0" / "0.jpg").read_bytes()
    (train / "c1" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    save(tmp_path / "data" / "val" / "c0" / "x.jpg", 30, 20)
    return tmp_path / "data"


def test_sizes_are_pillows_whatever_the_workers(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BLOCK", 3)
    settle(data)
    index.index(str(data), workers=2)
    written = (data / "train.index").read_bytes()
    index.index(str(data), "train", workers=1)
    assert (data / "train.index").read_bytes() == written
    for split, images in (("train", 14), ("validation", 1)):
        folder = open_images(str(data), split)
        assert folder.sizes is not None and folder.sizes.dtype == np.uint16 and folder.warnings == []
        assert len(folder) == images
        for i in range(images):
            if not folder.paths[i].endswith("empty.jpg"):
                with Image.open(folder.path(i)) as image:
                    assert folder.known_size(i) == image.size


@pytest.mark.parametrize("decoded", [False, True])
def test_unreadable_images_are_listed(data: Path, decoded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["index", str(data), "--split", "train", "-j", "1", *(["--decode"] if decoded else [])]) == 0
    out = capsys.readouterr().out
    broken = open_images(str(data), "train").unreadable()
    empty, cut = (str(data / "train" / name) for name in ("c0/empty.jpg", "c1/cut.jpg"))
    assert set(broken) == ({empty, cut} if decoded else {empty}) and broken[empty] == "empty file (tlt index)"
    assert all(f"{path}: {reason.removesuffix(' (tlt index)')}" in out for path, reason in broken.items())
    assert f"{len(broken)} can't be {'decoded' if decoded else 'read'}" in out


@pytest.mark.parametrize("decoded", [False, True])
def test_batches_are_the_same_with_an_index(data: Path, decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_images(str(data), "train")
    index.index(str(data), "train", 1, decode=decoded)
    indexed = open_images(str(data), "train")
    before, after = (TrainDataset(folder, CONFIG, 3).load(ALL) for folder in (plain, indexed))
    evaluated = [EvalDataset(folder, (16, 16)).load(ALL) for folder in (plain, indexed)]
    assert len(before.skipped) >= 2  # also where a replacement can't be read
    for one, other in ((before, after), evaluated):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "indices", "affine"))
        assert [image.path for image in one.skipped] == [image.path for image in other.skipped]

    def refuse(*_: object) -> None:
        raise AssertionError("a header was read")

    monkeypatch.setattr(image_file, "_header_size", refuse)
    TrainDataset(indexed, CONFIG, 3).load(ALL)


def test_selected_images_keep_their_sizes_and_faults(data: Path) -> None:
    index.index(str(data), "train", 1)
    folder = open_images(str(data), "train")
    rows = [9, folder.paths.index("c0/empty.jpg"), 2]
    part = folder.select(rows)
    assert [part.known_size(i) for i in range(3)] == [folder.known_size(row) for row in rows]
    assert part.unreadable() == folder.unreadable() and set(part.faults) == {1}


def add(data: Path) -> None:
    save(data / "train" / "c2" / "new.jpg", 9, 9)


def rename(data: Path) -> None:
    os.rename(data / "train" / "c1" / "1.png", data / "train" / "c1" / "one.png")


def flip_a_bit(data: Path) -> None:
    content = bytearray((data / "train.index").read_bytes())
    content[-1] ^= 1
    (data / "train.index").write_bytes(content)


def write_text(data: Path) -> None:
    (data / "train.index").write_text("not an index")


def cut(data: Path) -> None:
    os.truncate(data / "train.index", 100)


def cut_behind_the_header(data: Path) -> None:
    os.truncate(data / "train.index", os.path.getsize(data / "train.index") - 9)


def resize(data: Path) -> None:
    for path in sorted((data / "train").rglob("*.jpg")):
        save(path, 10, 10)


def other_format(data: Path) -> None:
    write_tensors(str(data / "train.index"), "another format", {"size": np.ones((14, 2), np.uint16)}, {})


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (add, "made of other files (14 images then, 15 now)"),
    (rename, "made of other files (14 images then, 14 now)"),
    (flip_a_bit, "damaged"),
    (write_text, "damaged or something else"),
    (cut, "damaged or something else"),
    (resize, "has 40 x 70 pixels, and it has 10 x 10"),
    (other_format, "is not of the format volo-tlt image sizes"),
]


@pytest.mark.parametrize(("change", "reason"), FAULTS, ids=[change.__name__ for change, _ in FAULTS])
def test_an_index_that_does_not_fit_is_told_and_not_used(
    data: Path, change: Callable[[Path], None], reason: str
) -> None:
    index.index(str(data), "train", 1)
    change(data)
    folder = open_images(str(data), "train")
    (warning,) = folder.warnings
    assert folder.sizes is None and reason in warning and "run `tlt index` again" in warning and "\n" not in warning


def test_one_that_is_not_there_is_no_fault(data: Path) -> None:
    folder = open_images(str(data), "train")
    assert folder.sizes is None and folder.warnings == [] and folder.unreadable() == {}


def test_huge_images_are_indexed_and_refused_by_their_size(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "c"
    folder.mkdir(parents=True)
    for name, size in (("huge", (30_000, 10_000)), ("long", (65_536, 1)), ("small", (3, 2))):
        Image.new("1", size).save(folder / f"{name}.png")
    lines = index.index(str(tmp_path), "train", 1, decode=True)
    assert any("65536 x 1 pixels: no side may" in line for line in lines)
    assert lines[-1] == "1 images of more than 50000000 pixels were not decoded"
    images = open_images(str(tmp_path), "train")
    assert images.known_size(0) == (30_000, 10_000) and images.known_size(2) == (3, 2)
    reasons = [images.unreadable()[images.path(i)] for i in (0, 1)]
    assert "--max-pixels" in reasons[0] and "tlt index" in reasons[1]
    assert set(images.unreadable(max_pixels=10**9)) == {images.path(1)}


def test_the_index_leads_to_tlt_shrink(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "c"
    folder.mkdir(parents=True)
    for name, rows in (("a.png", 3000), ("b.webp", 2501), ("c.JPG", 3000), ("d.png", 2500)):
        Image.new("L", (4000, rows)).save(folder / name, "JPEG" if name.endswith("JPG") else None)
    (line,) = [line for line in index.index(str(tmp_path), "train", 1) if "tlt pack-images" in line]
    assert line.startswith("2 images that are no JPEGs have more than 10000000 pixels, up to 12000000: ")
    assert "about 160 MiB" in line


def test_an_index_that_can_not_be_written_or_named_is_one_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "train.index").mkdir()
    assert cli.main(["index", str(data), "--split", "train", "-j", "1"]) == 2
    assert "train.index can't be written" in capsys.readouterr().err
    assert not list(data.glob(".*"))
    assert cli.main(["index", str(data), "-o", str(data / "x")]) == 2
    assert "--split" in capsys.readouterr().err
    assert cli.main(["index", str(data / "none")]) == 2
    assert cli.main(["index", str(data / "train"), "-j", "1", "-o", str(data / "x")]) == 0
    assert (data / "x").is_file()


@pytest.mark.parametrize("kind", ["folder", "tar", "tfrecord"])
@pytest.mark.parametrize("content", [b"", b"of the user", b"safetensors"])
def test_no_file_of_the_users_is_replaced_by_an_index(
    data: Path, tmp_path: Path, kind: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, name = tmp_path / "more" / "train", {"tar": "shards.safetensors", "tfrecord": "records.safetensors"}
    folder.mkdir(parents=True)
    (folder / "0.tar").write_bytes(b"")
    (folder / "0.tfrecord").write_bytes(b"")
    mine = data / "train.index" if kind == "folder" else folder / name[kind]
    mine.write_bytes(content)
    if content == b"safetensors":
        save_file({"size": np.ones((14, 2), np.uint16)}, mine, {"format": "pt"})
    before = mine.read_bytes()
    flags = ["--dataset", "tfrecord"] if kind == "tfrecord" else []
    root = str(data if kind == "folder" else folder.parent)
    assert cli.main(["index", root, "--split", "train", "-j", "1", *flags]) == 2
    assert f"{mine.name} is there and is no volo-tlt" in capsys.readouterr().err
    assert mine.read_bytes() == before


@pytest.mark.parametrize("change", [flip_a_bit, cut_behind_the_header])
def test_a_damaged_index_is_made_anew(data: Path, change: Callable[[Path], None]) -> None:
    index.index(str(data), "train", 1)
    whole = (data / "train.index").read_bytes()
    change(data)
    index.index(str(data), "train", 1)
    assert (data / "train.index").read_bytes() == whole


@pytest.mark.parametrize("number", ["0", "-3", "two", "1.5"])
def test_a_number_of_workers_that_is_none_is_one_line(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["index", "DATA", f"-j{number}"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"tlt index: error: argument -j/--workers: '{number}' is not a whole number of 1 or more"


def test_the_index_of_a_million_images_is_a_mapped_file_of_their_names_and_16_bytes_each(tmp_path: Path) -> None:
    count, root = 1_280_000, str(tmp_path / "train")
    names = Names(f"c{i % 1000}/{i}.jpg" for i in range(count))
    leaf = np.arange(count, dtype=np.uint32) % 1000
    listing = FolderListing(root, names, leaf, [f"c{i}" for i in range(1000)], [], [""], np.zeros(1, np.int64))
    sizes, faults = np.full((count, 2), 500, np.uint16), {i: "broken" for i in range(5000)}
    write_index(index_file(root), SizeIndex(sizes, faults, listing))
    least = 16 * count + len(names.block)
    assert least < os.path.getsize(index_file(root)) < least + 60_000  # with the first reasons
    index = size_index.read_index(index_file(root), root)
    assert len(index.faults) == size_index.MAX_FAULTS and index.listing.names == names


def settle(data: Path) -> None:
    """The folders as if they had been made an hour ago."""
    for folder in (data / "train", *(data / "train").iterdir()):
        os.utime(folder, (folder.stat().st_atime, folder.stat().st_mtime - 3600))


def test_folders_that_have_not_changed_are_not_listed_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "train" / "c0" / "notes.txt").touch()
    (data / "train" / "c9").mkdir()
    settle(data)
    index.index(str(data), "train", 1)
    walked = scan_folder(str(data / "train"))
    with monkeypatch.context() as patch:
        patch.setattr(folder_listing, "list_folder", None)
        patch.setattr(tlt_folder, "list_folder", None)
        known = open_images(str(data), "train", class_names=walked.class_names)
    assert known.paths == walked.paths and np.array_equal(known.classes, walked.classes)
    assert known.class_names == walked.class_names and known.folder_names == walked.folder_names
    assert known.warnings == walked.warnings and len(known.warnings) == 2
    assert known.sizes is not None
    with pytest.raises(UserError, match="not in the class list"):
        open_images(str(data), "train", class_names=["c0", "c1"])


@pytest.mark.parametrize("change", [add, rename, lambda data: (data / "train" / "c2" / "5.png").unlink()])
def test_folders_that_have_changed_are_listed_again(data: Path, change: Callable[[Path], None]) -> None:
    settle(data)
    index.index(str(data), "train", 1)
    change(data)
    folder = open_images(str(data), "train")
    assert folder.paths == scan_folder(str(data / "train")).paths and "made of other files" in folder.warnings[0]


def test_a_folder_that_may_be_changing_is_listed_again(data: Path) -> None:
    """A file system counts time in steps: what comes within one of them after the listing leaves no trace."""
    index.index(str(data), "train", 1)
    times = {folder: folder.stat() for folder in (data / "train").iterdir()}
    add(data)
    for folder, then in times.items():
        os.utime(folder, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert "c2/new.jpg" in open_images(str(data), "train").paths


def test_folders_are_listed_again_where_other_suffixes_are_images(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(data)
    index.index(str(data), "train", 1)
    for module in (size_index, folder_listing):
        monkeypatch.setattr(module, "image_extensions", lambda: {".png", ".tiff", ".webp"})
    folder = open_images(str(data), "train")
    assert not any(path.endswith(".jpg") for path in folder.paths) and "made of other files" in folder.warnings[-1]


def test_tar_files_get_the_index_of_shards(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tars" / "train"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name in ("0.jpg", "3.webp", "empty.jpg"):
            key = name.partition(".")[0]
            tar.add(data / "train" / "c0" / name, name)
            (tmp_path / "cls").write_text("7")
            tar.add(tmp_path / "cls", f"{key}.cls")
    for flags in ([], ["--decode"]):
        assert cli.main(["index", str(tmp_path / "tars"), "-j", "1", *flags]) == 2 * bool(flags)
    assert "--decode" in capsys.readouterr().err
    images = open_images(str(tmp_path / "tars"), "train")
    with Image.open(io.BytesIO(images.read(1))) as image:
        assert len(images) == 3 and images.known_size(1) == image.size
    assert list(images.unreadable().values()) == ["empty file (tlt index)"]


class Deadly(ImageFolder):
    """Ends the process that reads it."""

    def read_size(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
        os._exit(9)


def test_a_killed_process_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BLOCK", 3)
    folder = scan_folder(data / "train")
    with pytest.raises(UserError, match="lower --workers"):
        index.read_sizes(Deadly(folder.root, folder.paths, folder.classes, folder.class_names), workers=2)

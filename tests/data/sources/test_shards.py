"""Tar shards that others wrote: the bytes that other readers find in them, and one line for whatever is wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tlt.data.sources.image_file import BadImage
from tlt.data.sources.open_images import open_images
from tlt.data.sources.records import ROW, RecordImages, RecordTable
from tlt.data.sources.records import _crc as checksum
from tlt.data.sources.tar_shards import folder_shards, scan_tar
from tlt.errors import UserError


def jpeg(mark: int, size: tuple[int, int] = (30, 20)) -> bytes:
    pixels = np.random.default_rng(mark).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def tar(path: Path, files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change:
                change(info)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(start: int, count: int, classes: int = 3) -> dict[str, bytes]:
    """Images of `classes` folders in turn, with their classes."""
    files = {}
    for number in range(start, start + count):
        key = f"c{number % classes}/image{number}"
        files |= {f"{key}.jpg": jpeg(number, (20 + number, 30)), f"{key}.cls": str(number % classes).encode()}
    return files


def open_shards(folder: Path, class_names: list[str] | None = None) -> RecordImages:
    return folder_shards(str(folder)).open(class_names)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two splits of shards with their tables."""
    root = tmp_path / "data"
    for split in ("train", "val"):
        tar(root / split / "a-00.tar", samples(0, 7))
        tar(root / split / "a-01.tar", samples(7, 5))
        open_shards(root / split)
    return root


def test_images_are_those_that_webdataset_reads(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    for shard in range(2):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(5):
                mark = shard * 5 + number
                key = f"c{mark % 2}/" + "long name " * 15 + f"ü{mark}"
                writer.write({"__key__": key, "jpg": jpeg(mark), "cls": mark % 2, "json": {"label": 1 - mark % 2}})
    ours = open_images(str(tmp_path / "data"), "train")
    theirs = wds.WebDataset([str(folder / f"{shard}.tar") for shard in range(2)], shardshuffle=False)
    expected = {f"{each['__key__']}.jpg": (each["jpg"], int(each["cls"])) for each in theirs}
    found = {ours.paths[i]: (bytes(ours.read(i)), int(ours.classes[i])) for i in range(len(ours))}
    assert found == expected and len(found) == 10
    assert ours.class_names == ["c0", "c1"] and ours.size(3) == (30, 20)


def test_rows_are_in_the_natural_order_of_names_as_in_a_folder(data: Path) -> None:
    source = open_images(str(data), "validation")
    assert list(source.paths) == [f"c{c}/image{n}.jpg" for c in range(3) for n in range(12) if n % 3 == c]
    assert [source.size(i)[0] for i in range(4)] == [20, 23, 26, 29]


def test_the_table_agrees_with_dalis(data: Path) -> None:
    """DALI's program lists extension, offset and size of each file."""
    wds2idx = pytest.importorskip("wds2idx")
    source = open_shards(data / "train")
    for number, path in enumerate(source.table.files):
        wds2idx.IndexCreator(path, str(data / "idx"), verbose=False).create_index()
        theirs = [line.split() for line in (data / "idx").read_text().splitlines()[1:]]
        rows = np.flatnonzero(source.table.rows["file"] == number)
        ours = {source.paths[row]: source.table.rows[row][["offset", "length"]].item() for row in rows.tolist()}
        assert ours == {line[3]: (int(line[1]), int(line[2])) for line in theirs}


def test_the_table_is_read_by_numpy_alone(data: Path) -> None:
    rows = np.load(data / "train" / "shards.npy", mmap_mode="r")
    about = json.loads((data / "train" / "shards.json").read_text())["description"]
    names = (data / "train" / "shards.names").read_bytes()
    assert rows.dtype == ROW and names[rows["name_end"][0] : rows["name_end"][1]] == b"c0/image3.jpg"
    with open(data / "train" / about["files"][rows["file"][1]][0], "rb") as file:
        file.seek(rows["offset"][1])
        assert file.read(rows["length"][1]) == jpeg(3, (23, 30))


def test_other_processes_get_the_path_and_not_the_index(data: Path) -> None:
    source = open_images(str(data), "train")
    part = source.select([5, 2, 1]).select([2, 0])
    sent = pickle.dumps(part)
    there = pickle.loads(sent)
    assert [there.read(i) for i in range(2)] == [source.read(1), source.read(5)]
    assert list(there.paths) == [source.paths[1], source.paths[5]] and there.classes.tolist() == [0, 1]
    assert pickle.loads(pickle.dumps(source.paths)) == source.paths == list(source.paths)
    assert b"image7" not in sent and there.size(1) == source.size(5)


def test_class_list_of_the_training_set_numbers_the_shards(data: Path) -> None:
    source = open_shards(data / "val", ["c2", "none", "c0", "c1"])
    assert [source.class_names[i] for i in source.classes] == [path[:2] for path in source.paths]
    with pytest.raises(UserError, match="1 classes that are not in the class list .* such as c2"):
        open_shards(data / "val", ["c0", "c1"])


def test_classes_without_folders_are_numbers_and_take_an_imposed_list(tmp_path: Path) -> None:
    files = {"7.jpg": jpeg(1), "7.json": b'{"label": 2}', "8.jpg": jpeg(2), "8.json": b'{"label": 0}'}
    tar(tmp_path / "x.tar", files)
    source = open_shards(tmp_path)
    assert list(source.paths) == ["0/8.jpg", "2/7.jpg"] and source.class_names == ["0", "1", "2"]
    named = open_shards(tmp_path, ["cat", "dog", "owl"])
    assert named.folder_names == ["cat", "owl"] and named.classes.tolist() == [0, 2]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_a_shard_is_refused_by_name(tmp_path: Path, kind: bytes) -> None:
    def link(info: tarfile.TarInfo) -> None:
        if info.name == "s.jpg":
            info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    tar(tmp_path / "x.tar", {**samples(0, 2), "s.jpg": b""}, link)
    with pytest.raises(UserError, match=r"x.tar holds a link, s.jpg: make it of files"):
        open_shards(tmp_path)


def test_what_is_no_sample_is_left_out_and_told(tmp_path: Path) -> None:
    def link(info: tarfile.TarInfo) -> None:
        if info.name == "d.jpg":
            info.type, info.size = tarfile.CHRTYPE, 0

    files = {**samples(0, 2), "d.jpg": b"", "._x.jpg": b"x", "README": b"x", "y.txt": b"x"}
    tar(tmp_path / "x.tar", files, link)
    lines = open_shards(tmp_path).warnings
    assert any("left out 1 devices or sparse files, such as d.jpg" in line for line in lines)
    assert any("left out 2 hidden files or files without an extension, such as ._x.jpg" in line for line in lines)
    assert any("left out 1 samples without an image, such as y" in line for line in lines)
    source = open_shards(tmp_path)
    assert len(source) == 2 and len(source.warnings) == 3


BAD_MEMBERS = {
    "leads out": ({"../../x.jpg": jpeg(0)}, r"names \.\./\.\./x\.jpg, which is absolute or leads out of it"),
    "inside": ({"a/../x.jpg": jpeg(0)}, r"names a/\.\./x\.jpg, which is absolute or leads out of it"),
    "absolute": ({"/etc/x.jpg": jpeg(0)}, "names /etc/x.jpg, which is absolute or leads out of it"),
    "two images": ({"a/x.jpg": jpeg(0), "a/x.png": jpeg(0), "a/x.cls": b"0"}, r"sample a/x has several images \(jpg"),
    "case": ({"a/x.jpg": jpeg(0), "a/x.JPG": jpeg(0)}, "holds two files named a/x.JPG"),
    "no class": ({"a/x.jpg": jpeg(0)}, "sample a/x has no class"),
    "word": ({"a/x.jpg": jpeg(0), "a/x.cls": b"cat"}, r"sample a/x: \.cls is not a class number"),
    "too large": ({"a/x.jpg": jpeg(0), "a/x.cls": b"1000000"}, r"\.cls is not a class number"),
    "digits": ({"a/x.jpg": jpeg(0), "a/x.cls": b"1" * 5000}, r"\.cls is not a class number"),
    "negative": ({"a/x.jpg": jpeg(0), "a/x.json": b'{"label": -1}'}, "'label' in .json is not a class number"),
    "other key": ({"a/x.jpg": jpeg(0), "a/x.json": b'{"class": 1}'}, ".json has no 'label'"),
    "no image": ({"a/x.cls": b"0"}, "no image in 1 files"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_bad_members_are_one_line(tmp_path: Path, case: str) -> None:
    files, message = BAD_MEMBERS[case]
    tar(tmp_path / "x.tar", files)
    with pytest.raises(UserError, match=message) as error:
        open_shards(tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "shards.json").exists()


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    for name in "xy":
        tar(tmp_path / f"{name}.tar", samples(0, 1))
    with pytest.raises(UserError, match="1 images are there more than once, such as c0/image0.jpg"):
        open_shards(tmp_path)


def test_a_tar_cut_anywhere_is_told(tmp_path: Path) -> None:
    """At a member's border too, where Python's tarfile says nothing."""
    whole = tar(tmp_path / "whole.tar", samples(0, 2)).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as archive:
        members = archive.getmembers()
    (tmp_path / "whole.tar").unlink()
    cut = tmp_path / "cut.tar"
    silent = 0
    for length in [members[2].offset, members[2].offset + 100, members[2].offset_data, members[2].offset_data + 50, 10]:
        cut.write_bytes(whole[:length])
        try:
            with tarfile.open(cut) as archive:
                silent += len(archive.getmembers()) > 0
        except tarfile.ReadError:
            pass
        with pytest.raises(UserError, match="cut.tar is cut, damaged"):
            open_shards(tmp_path)
    assert silent > 0
    damaged = bytearray(whole)
    damaged[members[2].offset] ^= 1  # a flipped bit in a header
    cut.write_bytes(damaged)
    with pytest.raises(UserError, match=f"no end marker at byte {members[2].offset}"):
        open_shards(tmp_path)


def test_damaged_headers_are_told_whatever_they_lead_to(tmp_path: Path) -> None:
    """With right checksums, so that they are believed: a size beyond 64 bits, one below zero, extensions of them."""
    whole = tar(tmp_path / "x.tar", samples(0, 2)).read_bytes()
    told = 0
    for kind in b"0xgLKS5":
        for size in (b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" * 11 + b"\x80", b"77777777777\0", b"no number \0"):
            damaged = bytearray(whole)
            damaged[124:136], damaged[156], damaged[148:156] = size, kind, b" " * 8
            damaged[148:156] = b"%06o\0 " % sum(damaged[:512])
            (tmp_path / "x.tar").write_bytes(damaged)
            try:
                scan_tar(str(tmp_path / "x.tar"))
            except UserError as error:
                told += "\n" not in str(error)
    assert told == 35


def test_headers_of_any_length_take_no_memory(tmp_path: Path) -> None:
    """A name of 3 GB, of which the file has but holes."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 3 * 10**9
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(tmp_path / "x.tar", 4 * 10**9)
    with pytest.raises(UserError, match="a member's headers have more than 1048576 bytes"):
        open_shards(tmp_path)


def changed_description(folder: Path, **changes: object) -> None:
    """A table with other words, whose checksum is right."""
    path = folder / "shards.json"
    content = json.loads(path.read_text())
    content["description"] |= changes
    table = RecordTable(str(folder / "shards"))
    content["crc32"] = checksum(table.rows, (folder / "shards.names").read_bytes(), content["description"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": [["../a.tar", 1], ["a-01.tar", 1]]}, r"shards.json names \.\./a.tar, outside of its folder"),
        ({"files": [["a-00.tar", 1]]}, "shards.json is of other files or names"),
        ({"class_names": ["c0"]}, "shards.json is of other files or names"),
        ({"files": None}, "can't be read"),
    ],
)
def test_a_table_that_somebody_else_made_is_not_believed(data: Path, changes: dict[str, object], message: str) -> None:
    changed_description(data / "train", **changes)
    with pytest.raises(UserError, match=message):
        open_images(str(data), "train")


def test_a_compressed_tar_and_an_address_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match="no uncompressed tar"):
        open_shards(tmp_path)


def cut_tail(split: Path) -> None:
    path = split / "a-01.tar"
    path.write_bytes(path.read_bytes()[:-512])


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut_tail, "a-01.tar has [0-9]+ bytes instead of [0-9]+: copy it again, or remove .*shards.json"),
    "missing": (lambda split: (split / "a-01.tar").unlink(), "a-01.tar is missing or no regular file"),
    "more": (lambda split: tar(split / "b.tar", samples(20, 1)), "is of 2 files, not of the 3 that are there .b.tar."),
    "packing": (lambda split: (split / "shards.json").rename(split / "packing.json"), "run `tlt pack-images` again"),
    "cut table": (lambda split: os.truncate(split / "shards.npy", 200), "can't be read"),
    "empty table": (lambda split: os.truncate(split / "shards.npy", 0), "can't be read"),
    "other table": (lambda split: np.save(split / "shards.npy", np.zeros(3)), "are damaged or something else"),
    "no names": (lambda split: (split / "shards.names").unlink(), "can't be read"),
    "cut description": (lambda split: os.truncate(split / "shards.json", 100), "can't be read"),
    "pipe": (lambda split: ((split / "a-01.tar").unlink(), os.mkfifo(split / "a-01.tar")), "no regular file"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_shards_that_do_not_fit_their_table(data: Path, case: str) -> None:
    damage, message = BAD_FOLDERS[case]
    damage(data / "train")
    with pytest.raises(UserError, match=message) as error:
        open_images(str(data), "train")
    assert "\n" not in str(error.value)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_fault_26_a_flipped_bit_is_noticed(data: Path) -> None:
    source = open_shards(data / "train")
    flip(Path(source.table.files[0]), int(source.table.rows["offset"][1]) + 300)
    with pytest.raises(BadImage, match="a-00.tar .crc32 is wrong."):
        open_shards(data / "train").read(1)
    assert source.table.damaged_files() == source.table.files[:1]
    for ending in ("npy", "names", "json"):
        path = data / "val" / f"shards.{ending}"
        flip(path, at := path.stat().st_size // 2)
        with pytest.raises(UserError, match="shards.json and what belongs to it"):
            open_shards(data / "val")
        flip(path, at)
    assert len(open_shards(data / "val")) == 12


def test_a_table_is_made_once_by_whoever_comes_first(data: Path, tmp_path: Path) -> None:
    """Four processes open shards without a table at once; one that was killed before left a part of it."""
    for path in (data / "train").glob("shards.*"):
        path.unlink()
    (data / "train" / "shards.npy").write_bytes(b"part")
    program = (
        "import sys; from tlt.data.sources import records, open_images\n"
        "write = records.write_table\n"
        "records.write_table = lambda *arguments: (print('WRITTEN', flush=True), write(*arguments))\n"
        "print(*open_images.open_images(sys.argv[1], 'train').paths)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(data)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum(text.count("WRITTEN") for text in said) == 1 and len({text.split("\n")[-2] for text in said}) == 1


def test_a_read_only_data_set_needs_a_folder_of_links(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "train" / "shards.json").unlink()

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tlt.data.sources.records.write_table", refused)
    with pytest.raises(UserError, match="shards.json can't be written .*make a folder with links"):
        open_images(str(data), "train")


def test_more_shards_than_files_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.data.sources.records._OPEN_FILES", 2)
    for number in range(5):
        tar(tmp_path / f"{number}.tar", samples(number, 1))
    source = open_shards(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert sorted(zip(source.paths, map(bytes, map(source.read, range(5))), strict=True)) == sorted(
            (f"c{number % 3}/image{number}.jpg", jpeg(number, (20 + number, 30))) for number in range(5)
        )
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_names_may_be_anything(tmp_path: Path) -> None:
    name = os.fsdecode(b"cl\xffss/\xfe\n.jpg")
    tar(tmp_path / "x.tar", {name: jpeg(0), name[:-3] + "cls": b"0"})
    open_shards(tmp_path)
    assert list(open_shards(tmp_path).paths) == [name]
    assert json.dumps(open_shards(tmp_path).class_names) == '["cl\\udcffss"]'


def test_a_table_moves_with_its_shards(data: Path, tmp_path: Path) -> None:
    shutil.move(str(data), tmp_path / "moved")
    assert open_images(str(tmp_path / "moved"), "train").read(0) == jpeg(0, (20, 30))

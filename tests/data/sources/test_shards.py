"""Tar shards that others wrote: the bytes that other readers find in them, and one line for whatever is wrong. Then
those that timm's `_info.json` or a pattern names (`--dataset wds/NAME`)."""

import errno
import gzip
import io
import json
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import LIMIT
from tests.data.conftest import flip, jpeg, refuses
from tests.data.sources.test_dataset_kinds import pixels
from tlt.data.sources import open_images, records
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.records import RecordImages
from tlt.data.sources.records import _crc as checksum
from tlt.data.sources.tar_shards import expand_braces, open_shards, scan_tar
from tlt.errors import UserError


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
        files |= {f"{key}.jpg": jpeg(number), f"{key}.cls": str(number % classes).encode()}
    return files


def opened(folder: Path) -> RecordImages:
    return open_shards(str(folder))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two equal splits of shards with their tables."""
    for split in ("train", "val"):
        tar(tmp_path / "data" / split / "a-00.tar", samples(0, 7))
        tar(tmp_path / "data" / split / "a-01.tar", samples(7, 5))
        opened(tmp_path / "data" / split)
    return tmp_path / "data"


def test_classes_without_names_are_numbers(tmp_path):
    files = {"7.jpg": jpeg(1), "7.json": b'{"label": 2}', "8.JPG": jpeg(2), "8.json": b'{"label": 0}'}
    source = opened(tar(tmp_path / "x.tar", files).parent)
    assert list(source.paths) == ["0/8.jpg", "2/7.jpg"] and source.class_names == ["0", "1", "2"]


def test_non_samples_are_reported_and_names_may_be_anything(tmp_path):
    def device(info: tarfile.TarInfo) -> None:
        if info.name == "d.jpg":
            info.type, info.size = tarfile.CHRTYPE, 0

    name = os.fsdecode(b"cl\xffss/\xfe\n.jpg")
    files = {name: jpeg(0), name[:-3] + "cls": b"0", "d.jpg": b"", "._x.jpg": b"x", "README": b"x", "y.txt": b"x"}
    tar(tmp_path / "x.tar", files, device)
    for _ in range(2):
        source = opened(tmp_path)
        assert list(source.paths) == [name] and json.dumps(source.class_names) == '["cl\\udcffss"]'
        assert [line.partition("shards: ")[2] for line in source.warnings] == [
            "left out 1 devices or sparse files: d.jpg",
            "left out 2 hidden files or files without an extension: ._x.jpg, README",
            "left out 1 samples without an image: y",
        ]


def link(info: tarfile.TarInfo) -> None:
    if info.name == "s.jpg":
        info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0


BAD_MEMBERS = {
    "link": ({"s.jpg": b""}, r"x.tar holds a link, s.jpg: make it of files"),
    "leads out": ({"../../x.jpg": jpeg(0)}, r"names \.\./\.\./x\.jpg, which is absolute or leads out of it"),
    "absolute": ({"/etc/x.jpg": jpeg(0)}, "names /etc/x.jpg, which is absolute or leads out of it"),
    "two images": ({"a/x.jpg": jpeg(0), "a/x.png": jpeg(0), "a/x.cls": b"0"}, r"sample a/x has several images \(jpg"),
    "case": ({"a/x.jpg": jpeg(0), "a/x.JPG": jpeg(0)}, "holds two files named a/x.JPG"),
    "no class": ({"a/x.jpg": jpeg(0)}, "sample a/x has no class: no .json is there, nor .cls$"),
    "dots": (
        {"a 2.0 (b).jpg": jpeg(0), "a 2.0 (b).cls": b"0"},
        r"sample a 2 has no class: .*; a key ends at the first dot of a file's name: rename a 2.0 \(b\).jpg$",
    ),
    "negative": ({"a/x.jpg": jpeg(0), "a/x.json": b'{"label": -1}'}, "'label' in .json is not a class number"),
    "other key": ({"a/x.jpg": jpeg(0), "a/x.json": b'{"class": 1}'}, "'label' in .json is not a class number"),
    "no image": ({"a/x.cls": b"0"}, "no image in 1 files"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_fault_42_bad_members_are_one_line(tmp_path, case):
    files, message = BAD_MEMBERS[case]
    tar(tmp_path / "x.tar", files, link)
    with refuses(message):
        opened(tmp_path)
    assert not (tmp_path / "shards.json").exists()


@pytest.mark.parametrize("name", ["1.jpg", "1.png"])
@pytest.mark.parametrize("number", [b"0", b"1"])
def test_a_key_is_in_one_shard_whatever_its_class(tmp_path, name, number):
    tar(tmp_path / "a.tar", {"1.jpg": jpeg(0), "1.cls": b"0"})
    tar(tmp_path / "b.tar", {name: jpeg(1), "1.cls": number})
    with refuses("1 keys are in several shards of .*shards, such as 1: a key names one image"):
        opened(tmp_path)


def test_a_tar_cut_anywhere_is_refused(tmp_path):
    """At a member's border too, where Python's tarfile says nothing."""
    whole = tar(tmp_path / "whole.tar", samples(0, 2)).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as archive:
        at = archive.getmembers()[2]
    cut = tmp_path / "cut.tar"
    for length in [at.offset, at.offset + 100, at.offset_data, at.offset_data + 50, 10]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match="cut.tar is cut, damaged"):
            scan_tar(str(cut))
    for after in (whole, bytes(2**22) + b"x", b"x"):
        cut.write_bytes(whole + after)
        with pytest.raises(UserError, match="cut.tar goes on after its end marker at byte"):
            scan_tar(str(cut))
    cut.write_bytes(whole + bytes(30001))
    assert len(scan_tar(str(cut)).names) == 2
    cut.write_bytes(gzip.compress(whole))
    with pytest.raises(UserError, match="no uncompressed tar"):
        scan_tar(str(cut))
    cut.write_bytes(whole)
    flip(cut, at.offset)  # in a header
    with pytest.raises(UserError, match=f"no end marker at byte {at.offset}"):
        scan_tar(str(cut))


def test_damaged_headers_are_refused_whatever_they_lead_to(tmp_path):
    """With right checksums, so that they are believed: a size beyond 64 bits, one below zero, extensions of them."""
    whole = tar(tmp_path / "x.tar", samples(0, 2)).read_bytes()
    for kind in b"0xgLKS5":
        for size in (b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" * 11 + b"\x80", b"77777777777\0", b"no number \0"):
            damaged = bytearray(whole)
            damaged[124:136], damaged[156], damaged[148:156] = size, kind, b" " * 8
            damaged[148:156] = b"%06o\0 " % sum(damaged[:512])
            (tmp_path / "x.tar").write_bytes(damaged)
            with refuses("x.tar"):
                scan_tar(str(tmp_path / "x.tar"))


def test_headers_of_any_length_take_no_memory(tmp_path):
    """A name of 3 GB, of which the file has but holes."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 3 * 10**9
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(tmp_path / "x.tar", 4 * 10**9)
    with pytest.raises(UserError, match="a member's headers have more than 1048576 bytes"):
        scan_tar(str(tmp_path / "x.tar"))


def described(**changes: object) -> Callable[[Path], None]:
    """Gives a table other words, with a right checksum."""

    def change(split: Path) -> None:
        content = json.loads((split / "shards.json").read_text())
        content["description"] |= changes
        table = RecordImages(str(split / "shards"))
        content["crc32"] = checksum(table.rows, (split / "shards.names").read_bytes(), content["description"])
        (split / "shards.json").write_text(json.dumps(content))

    return change


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda split: os.truncate(split / "a-01.tar", 512), "has 512 bytes instead of .*: copy it again, or"),
    "missing": (lambda split: (split / "a-01.tar").unlink(), "a-01.tar is missing or no regular file"),
    "more": (lambda split: tar(split / "b.tar", samples(20, 1)), "is of 2 files, not of the 3 that are there .b.tar."),
    "other classes": (
        lambda split: tar(split / "a-01.tar", samples(7, 5) | {"c1/image7.cls": b"2"}),
        "a-01.tar has other images or classes than when .*shards.json was made: copy it again, or remove that",
    ),
    "packing": (lambda split: (split / "shards.json").rename(split / "packing.json"), "run `tlt pack-images` again"),
    "cut description": (lambda split: os.truncate(split / "shards.json", 100), "can't be read"),
    "pipe": (lambda split: ((split / "a-01.tar").unlink(), os.mkfifo(split / "a-01.tar")), "no regular file"),
    "hostile: file outside": (described(files=[["../a.tar", 1], ["b.tar", 1]]), r"names \.\./a.tar, outside of its fo"),
    "hostile: no such file": (described(files=[["a-00.tar", 1]]), "are damaged or something else"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_fault_43_shards_that_do_not_fit_their_table(data, case):
    damage, message = BAD_FOLDERS[case]
    damage(data / "train")
    with refuses(message):
        open_images(str(data), "train")


def test_a_copy_with_other_times_is_compared_once(data, monkeypatch):
    for name in ("a-00.tar", "a-01.tar"):
        os.utime(data / "train" / name, (1, 1))
    assert [*opened(data / "train").paths] == [*opened(data / "val").paths]
    monkeypatch.setattr(records, "_scan", None)
    assert len(opened(data / "train")) == 12


def test_fault_26_a_flipped_bit_is_noticed(data):
    source = opened(data / "train")
    flip(Path(source.files[0]), int(source.rows["offset"][1]) + 300)
    with pytest.raises(BadImage, match="a-00.tar .crc32 is wrong."):
        opened(data / "train").read(1)
    assert source.damaged_files() == source.files[:1]
    for ending in ("npy", "names", "json"):
        path = data / "val" / f"shards.{ending}"
        flip(path, at := path.stat().st_size // 2)
        with pytest.raises(UserError, match="shards.json and what belongs to it"):
            opened(data / "val")
        flip(path, at)
    assert len(opened(data / "val")) == 12


def test_a_table_is_made_once_by_whoever_comes_first(data, monkeypatch):
    """Three processes open shards without a table at once; one that was killed before left a part of it."""
    for path in (data / "train").glob("shards.*"):
        path.unlink()
    (data / "train" / "shards.npy").write_bytes(b"part")
    write = records.write_table

    def counted(*arguments: Any) -> None:
        with open(data / "written", "a") as file:
            file.write("x")
        write(*arguments)

    def open_there() -> None:
        (data / f"{os.getpid()}.paths").write_text("\n".join(opened(data / "train").paths))

    monkeypatch.setattr(records, "write_table", counted)
    running = [multiprocessing.get_context("fork").Process(target=open_there) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(LIMIT)
        process.kill()
    listings = {path.read_text() for path in data.glob("*.paths")}
    assert (data / "written").read_text() == "x" and listings == {"\n".join(opened(data / "val").paths)}
    assert [process.exitcode for process in running] == [0, 0, 0]


def test_a_table_that_cannot_be_written(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tlt.data.sources.records.write_whole", refused)
    for name in "xy":
        tar(tmp_path / name / f"{name}.tar", samples(0, 1))
    with pytest.raises(UserError, match="shards.json can't be written .*make a folder with links"):
        opened(tmp_path / "x")
    shutil.move(tmp_path / "x" / "x.tar", tmp_path / "y")
    with pytest.raises(UserError, match="1 keys are in several shards of .*, such as c0/image0:"):
        opened(tmp_path / "y")


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Three shards that `_info.json` lists, the last one for validation; `cls` and `json` disagree."""
    wds = pytest.importorskip("webdataset")
    for shard in range(3):
        with wds.TarWriter(str(tmp_path / f"set-{shard:02d}.tar")) as writer:
            for mark in range(shard * 4, shard * 4 + 4):
                key = f"c{mark % 3}/" + "long name " * 15 + f"ü{mark}"
                writer.write({"__key__": key, "jpg": jpeg(mark), "cls": mark % 3, "json": {"label_12k": mark}})
    shards = {"train": [0, 1], "validation": [2], "alternative": [0, 1]}
    splits = dict[str, dict[str, object]]()
    for name, of in shards.items():
        lengths = {f"set-{each:02d}.tar": 4 for each in of}
        splits[name] = {"name": name, "filenames": [*lengths], "shard_lengths": [*lengths.values()]}
        splits[name]["num_samples"] = sum(lengths.values())
    splits["alternative"]["alt_label"] = "label_12k"
    (tmp_path / "_info.json").write_text(json.dumps({"name": "set", "splits": splits}))
    return tmp_path


@pytest.mark.parametrize("name", ["train", "validation", "alternative", "set-{00..01}.tar|8", "set-0{0,2}.tar|8"])
def test_images_and_classes_are_timms(name, named):
    create_reader = pytest.importorskip("timm.data.readers.reader_factory").create_reader
    theirs = [(np.array(image), number) for image, number in create_reader("wds/set", str(named), name)]
    ours = open_images(str(named), name, "wds/set")
    assert len(ours) == len(theirs) == (4 if name == "validation" else 8)
    for index in range(len(ours)):
        (number,) = (number for image, number in theirs if np.array_equal(image, pixels(ours, index)))
        assert ours.classes[index] == number


def test_a_table_is_of_the_classes_that_were_asked_for(named):
    for key, classes in (("label_12k", [0, 1, 2, 3, 4, 5, 6, 7]), ("", [0, 0, 0, 1, 1, 1, 2, 2])):
        edit(named, alt_label=key)
        assert sorted(open_images(str(named), "train", "wds/set").classes.tolist()) == classes


@pytest.mark.parametrize("pattern", ["a-{000..011}.tar", "{b,c}-{8..11}.tar", "x.tar", "{00..02}/{9..9}.tar"])
def test_patterns_are_webdatasets(pattern):
    wds = pytest.importorskip("webdataset")
    assert expand_braces(pattern) == wds.shardlists.expand_urls(pattern)


def edit(data: Path, **changes: object) -> None:
    info = json.loads((data / "_info.json").read_text())
    info["splits"]["train"] |= changes
    (data / "_info.json").write_text(json.dumps(info))


BAD_LISTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no such split": ("test", lambda _: None, "has no split test; it has train, validation, alternative"),
    "no list": ("train", lambda d: (d / "_info.json").unlink(), "no _info.json or info.json in .*give a pattern"),
    "not a list": ("train", lambda d: (d / "_info.json").write_text("[]"), "lists no shards as timm does"),
    "no names": ("train", lambda d: edit(d, filenames=[]), "0 of 0 shards are missing"),
    "a command": ("train", lambda d: edit(d, filenames=["pipe:cat x.tar"]), "pipe:cat x.tar: tar files below"),
    "a path outside": ("train", lambda d: edit(d, filenames=["../../x.tar"]), "tar files below"),
    "missing shard": ("train", lambda d: (d / "set-01.tar").unlink(), "1 of 2 shards are missing: .*set-01.tar"),
    "pattern without files": ("no-{0..3}.tar", lambda _: None, "4 of 4 shards are missing"),
    "pattern downwards": ("set-{3..1}.tar", lambda _: None, "give patterns like"),
    "pattern of too many": ("{0..99999}{0..99999}.tar", lambda _: None, "a million"),
    "no braces' content": ("set-{1}.tar", lambda _: None, "give patterns like"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_fault_44_bad_list_is_one_line(case, named):
    name, damage, text = BAD_LISTS[case]
    damage(named)
    with refuses(text):
        open_images(str(named), name, "wds/x")

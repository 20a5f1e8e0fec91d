"""Tar shards that others wrote: the bytes that other readers find in them, and one line for whatever is wrong."""

from __future__ import annotations

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
from tlt.data.sources.shard_index import index_shards
from tlt.data.sources.shard_scan import scan_shard
from tlt.data.sources.shards import FORMAT, INDEX_NAME, ShardIndex, open_shards
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.tensor_file import write_tensors
from tlt.tools.cli import main


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


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two splits of shards, indexed."""
    root = tmp_path / "data"
    for split in ("train", "val"):
        tar(root / split / "a-00.tar", samples(0, 7))
        tar(root / split / "a-01.tar", samples(7, 5))
        index_shards(str(root / split))
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
    index_shards(str(folder), workers=2)
    ours = open_images(str(tmp_path / "data"), "train")
    theirs = wds.WebDataset([str(folder / f"{shard}.tar") for shard in range(2)], shardshuffle=False)
    expected = {f"{each['__key__']}.jpg": (each["jpg"], int(each["cls"])) for each in theirs}
    found = {ours.paths[i]: (bytes(ours.read(i)), int(ours.classes[i])) for i in range(len(ours))}
    assert found == expected and len(found) == 10
    assert ours.class_names == ["c0", "c1"] and ours.known_size(3) == (30, 20)


def test_tlt_index_indexes_shards(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        (data / split / INDEX_NAME).unlink()
    assert main(["index", str(data), "-j", "2"]) == 0
    assert capsys.readouterr().out.count("12 images of 3 classes in 2 shards, 0 can't be read") == 2
    assert len(open_images(str(data), "train")) == 12
    assert main(["index", str(data), "--decode"]) == 2


def test_rows_are_in_the_natural_order_of_names_as_in_a_folder(data: Path) -> None:
    source = open_images(str(data), "validation")
    assert list(source.paths) == [f"c{c}/image{n}.jpg" for c in range(3) for n in range(12) if n % 3 == c]
    assert [source.size(i)[0] for i in range(4)] == [20, 23, 26, 29]


def test_index_agrees_with_dalis(data: Path) -> None:
    """DALI's program lists extension, offset and size of each file."""
    wds2idx = pytest.importorskip("wds2idx")
    source = open_shards(str(data / "train"))
    for shard, path in enumerate(source.index.shards.paths):
        wds2idx.IndexCreator(path, str(data / "idx"), verbose=False).create_index()
        theirs = [line.split() for line in (data / "idx").read_text().splitlines()[1:]]
        rows = np.flatnonzero(source.index.shard == shard)
        ours = {source.paths[row]: (source.index.offset[row], source.index.length[row]) for row in rows.tolist()}
        assert ours == {line[3]: (int(line[1]), int(line[2])) for line in theirs}


def test_other_processes_get_the_path_and_not_the_index(data: Path) -> None:
    source = open_images(str(data), "train")
    part = source.select([5, 2, 1]).select([2, 0])
    sent = pickle.dumps(part)
    there = pickle.loads(sent)
    assert [there.read(i) for i in range(2)] == [source.read(1), source.read(5)]
    assert list(there.paths) == [source.paths[1], source.paths[5]] and there.classes.tolist() == [0, 1]
    assert pickle.loads(pickle.dumps(source.paths)) == source.paths == list(source.paths)
    assert b"image7" not in sent and there.known_size(1) == source.known_size(5)


def test_class_list_of_the_training_set_numbers_the_shards(data: Path) -> None:
    source = open_shards(str(data / "val"), ["c2", "none", "c0", "c1"])
    assert [source.class_names[i] for i in source.classes] == [path[:2] for path in source.paths]
    with pytest.raises(UserError, match="1 classes that are not in the class list .* such as c2"):
        open_shards(str(data / "val"), ["c0", "c1"])


def test_classes_without_folders_are_numbers_and_take_an_imposed_list(tmp_path: Path) -> None:
    files = {"7.jpg": jpeg(1), "7.json": b'{"label": 2}', "8.jpg": jpeg(2), "8.json": b'{"label": 0}'}
    tar(tmp_path / "x.tar", files)
    index_shards(str(tmp_path))
    source = open_shards(str(tmp_path))
    assert list(source.paths) == ["0/8.jpg", "2/7.jpg"] and source.class_names == ["0", "1", "2"]
    named = open_shards(str(tmp_path), ["cat", "dog", "owl"])
    assert named.folder_names == ["cat", "owl"] and named.classes.tolist() == [0, 2]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_a_shard_is_refused_by_name(tmp_path: Path, kind: bytes) -> None:
    def link(info: tarfile.TarInfo) -> None:
        if info.name == "s.jpg":
            info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    tar(tmp_path / "x.tar", {**samples(0, 2), "s.jpg": b""}, link)
    with pytest.raises(UserError, match=r"x.tar holds a link, s.jpg: make it of files"):
        index_shards(str(tmp_path))


def test_what_is_no_sample_is_left_out_and_told(tmp_path: Path) -> None:
    def link(info: tarfile.TarInfo) -> None:
        if info.name == "d.jpg":
            info.type, info.size = tarfile.CHRTYPE, 0

    files = {**samples(0, 2), "d.jpg": b"", "._x.jpg": b"x", "README": b"x", "y.txt": b"x"}
    tar(tmp_path / "x.tar", files, link)
    lines = index_shards(str(tmp_path))
    assert any("left out 1 devices or sparse files, such as d.jpg" in line for line in lines)
    assert any("left out 2 hidden files or files without an extension, such as ._x.jpg" in line for line in lines)
    assert any("left out 1 samples without an image, such as y" in line for line in lines)
    source = open_shards(str(tmp_path))
    assert len(source) == 2 and len(source.warnings) == 3


def test_broken_images_keep_their_place(tmp_path: Path) -> None:
    files = {**samples(0, 3), "c1/image1.jpg": b"no image", "c2/image2.jpg": b""}
    tar(tmp_path / "x.tar", files)
    lines = index_shards(str(tmp_path))
    assert lines[:2] == ["c1/image1.jpg: no image format that Pillow can decode", "c2/image2.jpg: empty file"]
    assert lines[2].endswith("shards.safetensors: 3 images of 3 classes in 1 shards, 2 can't be read")
    source = open_shards(str(tmp_path))
    assert source.sizes is not None and source.sizes.tolist() == [[20, 30], [0, 0], [0, 0]]
    assert source.read(1) == b"no image"
    assert [*source.unreadable().values()] == [f"{line.split(': ')[1]} (tlt index)" for line in lines[:2]]
    with pytest.raises(BadImage, match="empty"):
        source.read(2)


def test_images_of_any_size_are_indexed(tmp_path: Path) -> None:
    Image.new("L", (9000, 9000)).save(file := io.BytesIO(), "PNG")  # more than --max-pixels: told when it is read
    tar(tmp_path / "x.tar", {"a/x.png": file.getvalue(), "a/x.cls": b"0"})
    index_shards(str(tmp_path))
    assert open_shards(str(tmp_path)).known_size(0) == (9000, 9000)


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
    "no image": ({"a/x.cls": b"0"}, "no image in 1 tar files"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_bad_members_are_one_line(tmp_path: Path, case: str) -> None:
    files, message = BAD_MEMBERS[case]
    tar(tmp_path / "x.tar", files)
    with pytest.raises(UserError, match=message) as error:
        index_shards(str(tmp_path))
    assert "\n" not in str(error.value) and not (tmp_path / INDEX_NAME).exists()


def test_a_mask_is_no_second_image(tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", {"a/x.mask.png": b"mask", "a/x.jpg": jpeg(0), "a/x.cls": b"0"})
    index_shards(str(tmp_path))
    assert list(open_shards(str(tmp_path)).paths) == ["a/x.jpg"]


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    for name in "xy":
        tar(tmp_path / f"{name}.tar", samples(0, 1))
    with pytest.raises(UserError, match="1 images are there more than once, such as c0/image0.jpg"):
        index_shards(str(tmp_path))


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
            index_shards(str(tmp_path))
    assert silent > 0
    damaged = bytearray(whole)
    damaged[members[2].offset] ^= 1  # a flipped bit in a header
    cut.write_bytes(damaged)
    with pytest.raises(UserError, match=f"no end marker at byte {members[2].offset}"):
        index_shards(str(tmp_path))


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
                scan_shard(str(tmp_path / "x.tar"))
            except UserError as error:
                told += "\n" not in str(error)
    assert told == 35


def test_an_index_that_leads_out_of_its_folder(data: Path) -> None:
    path = data / "train" / INDEX_NAME
    index = ShardIndex(str(path))
    write_tensors(str(path), FORMAT, index.tensors, {**index.description, "shards": ["../a.tar", "a-01.tar"]})
    with pytest.raises(UserError, match=r"names the shard \.\./a.tar, outside of its folder"):
        open_images(str(data), "train")


def test_a_compressed_tar_and_an_address_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match="no uncompressed tar"):
        index_shards(str(tmp_path))
    for address in ("pipe:rm -rf /", "https://example.org/x.tar"):
        with pytest.raises(UserError, match="local files alone"):
            index_shards([address])
    (tmp_path / "below").mkdir()
    with pytest.raises(UserError, match="not beside it or below"):
        index_shards([str(tar(tmp_path / "y.tar", samples(0, 1)))], out=str(tmp_path / "below" / "index"))


def cut_tail(split: Path) -> None:
    path = split / "a-01.tar"
    path.write_bytes(path.read_bytes()[:-512])


def of_another_data_set(split: Path) -> None:
    other = {name: bytes(255 - byte for byte in data) for name, data in samples(7, 5).items()}
    tar(split / "a-01.tar", other)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut_tail, "a-01.tar has [0-9]+ bytes instead of [0-9]+: copy the shards"),
    "missing": (lambda split: (split / "a-01.tar").unlink(), "a-01.tar can't be read .No such file"),
    "other": (of_another_data_set, "a-01.tar is not the one that was indexed"),
    "more": (
        lambda split: tar(split / "b.tar", samples(20, 1)),
        "knows nothing of 1 tar files beside it, such as b.tar",
    ),
    "no index": (lambda split: (split / INDEX_NAME).unlink(), "tar files without an index .*tlt index"),
    "packing": (lambda split: (split / INDEX_NAME).rename(split / "packing.json"), "run `tlt pack-images` again"),
    "cut index": (lambda split: os.truncate(split / INDEX_NAME, 700), "damaged or something else"),
    "empty index": (lambda split: os.truncate(split / INDEX_NAME, 0), "can't be read"),
    "pipe": (lambda split: ((split / "a-01.tar").unlink(), os.mkfifo(split / "a-01.tar")), "is not a regular file"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_shards_that_do_not_fit_their_index(data: Path, case: str) -> None:
    damage, message = BAD_FOLDERS[case]
    damage(data / "train")
    with pytest.raises(UserError, match=message) as error:
        open_images(str(data), "train")
    assert "\n" not in str(error.value)


def test_fault_26_a_flipped_bit_is_noticed(data: Path) -> None:
    source = open_shards(str(data / "train"))
    path, offset = Path(source.index.shards.paths[0]), int(source.index.offset[1])
    content = bytearray(path.read_bytes())
    content[offset + 300] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadImage, match="crc32 is wrong"):
        open_shards(str(data / "train")).read(1)
    index = bytearray((data / "train" / INDEX_NAME).read_bytes())
    index[-30] ^= 1
    (data / "train" / INDEX_NAME).write_bytes(index)
    with pytest.raises(UserError, match="crc32 is wrong"):
        open_shards(str(data / "train"))


def test_more_shards_than_files_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.data.sources.shards._OPEN_FILES", 2)
    for number in range(5):
        tar(tmp_path / f"{number}.tar", samples(number, 1))
    index_shards(str(tmp_path))
    source = open_shards(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert sorted(zip(source.paths, map(bytes, map(source.read, range(5))), strict=True)) == sorted(
            (f"c{number % 3}/image{number}.jpg", jpeg(number, (20 + number, 30))) for number in range(5)
        )
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_index_is_in_no_process_memory(tmp_path: Path) -> None:
    """Of a made-up index of 400,000 images, touched everywhere, a process has pages but of the file."""
    count = 400_000
    names = Names(f"class{number % 1000:03d}/image{number:08d}.jpg" for number in range(count))
    tensors = {name: np.zeros(count, np.int64) for name in ("offset", "length", "class")}
    tensors |= {name: np.zeros(count, np.uint32) for name in ("shard", "crc32")}
    tensors |= {"size": np.zeros((count, 2), np.uint16), "names": np.frombuffer(names.block, np.uint8)}
    tensors |= {"name_ends": names.ends, "shard_length": np.zeros(0, np.int64), "shard_head": np.zeros(0, np.uint32)}
    said = {
        "shards": [],
        "class_names": ["x"],
        "folder_names": ["x"],
        "warnings": [],
        "whole_folder": False,
        "broken": [],
    }
    write_tensors(str(tmp_path / INDEX_NAME), FORMAT, tensors, said)
    program = (
        "import sys; from tlt.data.sources.shards import open_shards; from tlt.data.sources import folder\n"
        "def private():\n"
        "    return sum(int(line.split()[1]) for line in open('/proc/self/smaps_rollup') if 'Private_Dirty' in line)\n"
        "before = private(); source = open_shards(sys.argv[1]); source.classes.sum()\n"
        "[source.paths[i] for i in range(0, len(source), 50)]; print(private() - before)"
    )
    out = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 4000  # KB; the index has 36,000


def test_names_may_be_anything(tmp_path: Path) -> None:
    name = os.fsdecode(b"cl\xffss/\xfe\n.jpg")
    tar(tmp_path / "x.tar", {name: jpeg(0), name[:-3] + "cls": b"0"})
    index_shards(str(tmp_path))
    assert list(open_shards(str(tmp_path)).paths) == [name]
    assert json.dumps(open_shards(str(tmp_path)).class_names) == '["cl\\udcffss"]'


def test_an_index_moves_with_its_shards(data: Path, tmp_path: Path) -> None:
    shutil.move(str(data), tmp_path / "moved")
    assert open_images(str(tmp_path / "moved"), "train").read(0) == jpeg(0, (20, 30))

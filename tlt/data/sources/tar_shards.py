"""Reads tar shards in WebDataset's layout, `KEY.jpg` with `KEY.cls` or `KEY.json`, strictly and without unpacking.

Shards in DATA/SPLIT need no flag. `--dataset wds/NAME` finds them as timm does, by `_info.json` in DATA or by a pattern
in place of the split; it ignores NAME.

    _info.json   {"splits": {"train": {"filenames": ["train-0000.tar", ...], "num_samples": 1281167, "alt_label": ""}}}
    pattern      --train-split 'imagenet-train-{0000..1023}.tar', or '...tar|1281167' with the number of images

Python's `tarfile` treats a damaged header as the end of the archive, as most readers do, and silently loses what
follows. We require the end marker that tar writers write, and nothing but zeros after it.
"""

import io
import itertools
import json
import math
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tlt.data.sources import records
from tlt.data.sources.folder import TABLE, split_names
from tlt.data.sources.image_file import image_extensions
from tlt.data.sources.records import ROW, FileRecords, RecordImages
from tlt.data.sources.source import MAX_CLASS, ProgressCallback, class_folder
from tlt.errors import MissingSplit, UserError
from tlt.io.files import blamed_on, read_at, regular_only
from tlt.io.text import leads_out, printable, some_names

LABEL_KEY = "label"  # entry of KEY.json with the class, if there is no KEY.cls
LABEL_EXTENSION = "labels.safetensors"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_MOST_SHARDS = 1_000_000
_AT_ONCE = 2**22  # bytes
_LONGEST_TEXT = 2**20  # maximum bytes of KEY.cls or KEY.json, and of the headers of a member


class Member(NamedTuple):
    """A file in a tar: its name, its position in bytes, and the class of its sample."""

    name: str
    offset: int
    length: int
    label: int = 0


Samples = dict[str, dict[str, Member]]  # key -> extension -> file


def open_shards(folder: str, on_progress: ProgressCallback | None = None) -> RecordImages:
    """Open the images in the tar files of a folder, except hidden files, which a killed writer left."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".tar") and not name.startswith("."))
    paths = [os.path.join(folder, name) for name in names]
    return records.open_records(paths, os.path.join(folder, TABLE), scan_tar, write_tar_table, on_progress)


def open_webdataset(_name: str, data: str, split: str, on_progress: ProgressCallback | None) -> RecordImages:
    """Open the images in the shards of a split. Raise UserError if there is no `_info.json`, it lacks the split, or a
    named shard is not in DATA."""
    if ".tar" in split or ".." in split:
        pattern = split.partition("|")[0]
        name = re.sub(r"[^\w.,-]+", "_", pattern)
        files = expand_braces(pattern)
        label_key = LABEL_KEY
    else:
        name, files, label_key = _split_entry(data, split)
    for file in files:
        if ":" in file or leads_out(file) or not file.endswith(".tar"):
            raise UserError(
                f"shard {printable(file)}: tar files below {printable(data)} alone are read, by relative names; copy "
                "it there, uncompressed"
            )
    paths = [os.path.join(data, file) for file in files]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing or not files:
        raise UserError(f"{len(missing)} of {len(files)} shards are missing: {some_names(missing)}")
    name += f".{class_folder(label_key)}" * (label_key != LABEL_KEY)  # other classes have a table of their own
    table = os.path.join(data, f"{name}.shards")
    scan = partial(scan_tar, label_key=label_key)
    return records.open_records(paths, table, scan, write_tar_table, on_progress)


def expand_braces(pattern: str) -> list[str]:
    """Return all names of a pattern: `{000..123}`, zero-padded to the width of the first number, and `{a,b}`. Raise
    UserError if the pattern has other braces, or more than a million names."""
    pieces = _BRACES.split(pattern)  # text and contents of braces alternate
    choices = [_choices(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if any("{" in text or "}" in text for text in pieces[::2]) or not 0 < math.prod(map(len, choices)) <= _MOST_SHARDS:
        raise UserError(
            f"split {printable(pattern)}: give patterns like train-{{0000..1023}}.tar or {{a,b}}.tar, of a million "
            "names at most"
        )
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(inside: str) -> Sequence[str]:
    """Return the alternatives that braces stand for; none if we don't know the syntax."""
    if match := _RANGE.fullmatch(inside):
        width = len(match[1]) if match[1].startswith("0") else 0
        return [f"{number:0{width}d}" for number in range(int(match[1]), int(match[2]) + 1)[: _MOST_SHARDS + 1]]
    return inside.split(",") if "," in inside else []


def _split_entry(data: str, split: str) -> tuple[str, list[str], str]:
    """Return the split's name in `_info.json`, its shards, and the key of their classes."""
    path = next((path for name in ("_info.json", "info.json") if os.path.isfile(path := os.path.join(data, name))), "")
    if not path:
        raise MissingSplit(
            f"no _info.json or info.json in {printable(data)}: give a pattern as the split, such as "
            "'train-{0000..1023}.tar', or leave --dataset out for shards in DATA/SPLIT"
        )
    with blamed_on(path, "lists no shards as timm does", "mend it, or give a pattern"):
        with open(path, encoding="utf-8") as file:
            splits = json.load(file)["splits"]
        name = next((item for item in split_names(split) if item in splits), None)
        if name is None:
            raise MissingSplit(f"{printable(path)} has no split {printable(split)}; it has {some_names(list(splits))}")
        files = [*splits[name]["filenames"]]
        label_key = splits[name].get("alt_label") or LABEL_KEY
        if not all(isinstance(item, str) for item in [*files, label_key]):
            raise TypeError("names that are none")
    return name, files, label_key


def scan_tar(path: str, label_key: str = LABEL_KEY, texts_only: bool = False) -> FileRecords:
    """Read a shard. A sample is one image with its class, in `KEY.cls` or as the number `label_key` in `KEY.json`. If
    `label_key` is not the usual one, `KEY.cls` is ignored. With `texts_only` the images are not read. Raise UserError
    if the shard is cut or damaged, or a sample has no class or several images."""
    return scan_packed(path, label_key, texts_only)[0]


def scan_packed(path: str, label_key: str = LABEL_KEY, texts_only: bool = False) -> tuple[FileRecords, FileRecords]:
    """Read the images of a shard as `scan_tar` does, and the label maps that `tlt pack-images` stored with them."""
    left_out = dict[str, list[str]]()
    images = list[Member]()
    maps = list[Member]()
    samples = list_members(path, left_out)
    with open(path, "rb") as file:
        descriptor = file.fileno()
        for key, files in samples.items():
            sample = f"tar {printable(path)}: sample {printable(key)}"
            if extension := _image_of(files, sample):
                label = _class_of(files, descriptor, label_key, sample)
                images.append(files[extension]._replace(name=f"{key}.{extension}", label=label))
            else:
                left_out.setdefault("samples without an image", []).append(key)
            if LABEL_EXTENSION in files:
                maps.append(files[LABEL_EXTENSION]._replace(name=f"{key}.{LABEL_EXTENSION}"))
        tables = [_file_records(path, descriptor, members, texts_only) for members in (images, maps)]
    return replace(tables[0], left_out=left_out), tables[1]


def _file_records(path: str, descriptor: int, members: list[Member], texts_only: bool) -> FileRecords:
    crc32 = partial(_crc32, descriptor)
    rows = [(0, at, size, 0 if texts_only else crc32(at, size), label, 0) for _, at, size, label in members]
    return FileRecords(path, os.fstat(descriptor).st_size, np.array(rows, ROW), [member.name for member in members])


def _crc32(descriptor: int, offset: int, length: int) -> int:
    crc = 0
    for start in range(offset, offset + length, _AT_ONCE):
        crc = zlib.crc32(read_at(descriptor, min(_AT_ONCE, offset + length - start), start), crc)
    return crc


def write_tar_table(table: str, shards: list[FileRecords]) -> None:
    """Write the table of shards of other programs, in natural order of the names. Classes are named after the keys'
    folders if each class has exactly one folder of its own, else by their number."""
    rows = records.concatenated(shards)
    names = [name for shard in shards for name in shard.names]
    keys = Counter(re.sub(r"\.[^/]*$", "", name) for name in names)
    if twice := [key for key, count in keys.items() if count > 1]:
        raise UserError(
            f"{len(twice)} keys are in several shards of {printable(table)}, such as {printable(twice[0])}: a key "
            "names one image; give each its own, or remove the copies"
        )
    classes = rows["class"].tolist()
    folders = [os.path.basename(os.path.dirname(name)) for name in names]
    class_names = [str(number) for number in range(max(classes, default=-1) + 1)]
    pairs = {*zip(folders, classes, strict=True)}
    if all(folders) and len(pairs) == len({*folders}) == len({*classes}):
        named_classes = {number: folder for folder, number in pairs}
        class_names = [named_classes.get(int(number), f"{number} (no image)") for number in class_names]
    paths = [name if folder else f"{label}/{name}" for name, folder, label in zip(names, folders, classes, strict=True)]
    records.write_table(table, shards, *records.in_natural_order(rows, paths), class_names)


def list_members(path: str, left_out: dict[str, list[str]]) -> Samples:
    """Return the samples of a tar file: the files of each key by extension. As in WebDataset, a key ends at the first
    dot of the file name, and extensions are in lower case. `left_out` collects by kind the names of files that belong
    to no sample. Raise UserError if the file is unreadable, compressed, cut or damaged, or has a link, two files with
    one name, or a name that is absolute or leads out of the tar."""
    tar = f"tar {printable(path)}"
    samples = Samples()
    try:
        for info in _infos(path):
            name = info.name.removeprefix("./")
            folder, base = os.path.split(name)
            stem, _, extension = base.partition(".")
            if leads_out(name):
                raise UserError(
                    f"{tar} names {printable(info.name)}, which is absolute or leads out of it: do not use this file"
                )
            if info.issym() or info.islnk():
                raise UserError(f"{tar} holds a link, {printable(info.name)}: make it of files (tar --dereference)")
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                left_out.setdefault("devices or sparse files", []).append(name)
            elif not stem or not extension:
                left_out.setdefault("hidden files or files without an extension", []).append(name)
            else:
                files = samples.setdefault(os.path.join(folder, stem), {})
                if extension.lower() in files:
                    raise UserError(f"{tar} holds two files named {printable(name)}: make it again")
                files[extension.lower()] = Member(name, info.offset_data, info.size)
    except (UserError, OSError):
        raise
    except Exception as error:  # damaged headers make tarfile raise OverflowError, RecursionError and more
        raise UserError(f"{tar} is cut, damaged, or no uncompressed tar ({error}): copy it again") from error
    return samples


class _Headers(io.FileIO):
    """The file from which `tarfile` reads headers; limits the bytes of one member's headers to what a name needs."""

    left = _LONGEST_TEXT

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.left:
            raise tarfile.ReadError(f"a member's headers have more than {_LONGEST_TEXT} bytes")
        self.left -= size
        return super().read(size) or b""


def _infos(path: str) -> Iterator[tarfile.TarInfo]:
    """Yield every member in order. Raise TarError if the tar is cut or damaged."""
    with _Headers(path, opener=regular_only) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        length = os.fstat(file.fileno()).st_size
        end = 0
        while (info := tar.next()) is not None:
            file.left = _LONGEST_TEXT
            tar.members.clear()  # type: ignore[attr-defined]  # otherwise all members stay in memory
            if info.offset < end or info.size < 0:  # this would loop for ever
                raise tarfile.ReadError(f"member at byte {info.offset} overlaps another one")
            end = info.offset_data + (info.size if info.isreg() else 0)
            if end > length:
                raise tarfile.ReadError(f"{printable(info.name)} ends at byte {end} of {length}")
            yield info
        if read_at(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end marker at byte {tar.offset}")
        for start in range(tar.offset, length, _AT_ONCE):
            if read_at(file.fileno(), _AT_ONCE, start).strip(b"\0"):
                raise UserError(
                    f"tar {printable(path)} goes on after its end marker at byte {tar.offset}, as files that were "
                    "joined do: unpack it with tar --ignore-zeros, and make it again"
                )


def _image_of(files: dict[str, Member], sample: str) -> str:
    """Return the extension of a sample's image, or "" if it has none. `jpg` precedes `mask.png`."""
    images = [file for file in files if f".{file.rpartition('.')[2]}" in image_extensions()]
    simple = [file for file in images if "." not in file] or images
    if len(simple) > 1:
        raise UserError(
            f"{sample} has several images ({', '.join(map(printable, simple))}); its name up to the first dot must be "
            "its own, as `tlt pack-images` makes it"
        )
    return simple[0] if simple else ""


def _class_of(files: dict[str, Member], descriptor: int, label_key: str, sample: str) -> int:
    extension = "cls" if label_key == LABEL_KEY and "cls" in files else "json"
    if extension not in files:
        dotted = next((member.name for name, member in files.items() if "." in name), "")
        hint = f"; a key ends at the first dot of a file's name: rename {printable(dotted)}" if dotted else ""
        raise UserError(f"{sample} has no class: no .json is there" + ", nor .cls" * (label_key == LABEL_KEY) + hint)
    _, offset, length, _ = files[extension]
    text = read_at(descriptor, min(length, _LONGEST_TEXT), offset)
    try:
        number = int(text) if extension == "cls" else json.loads(text)[label_key]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        number = None
    if type(number) is not int or not 0 <= number <= MAX_CLASS:
        where = f"{label_key!r} in .json" if extension == "json" else ".cls"
        raise UserError(f"{sample}: {where} is not a class number (0 to {MAX_CLASS})")
    return number

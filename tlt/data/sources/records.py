"""Images that lie in a few large files (tar shards, TFRecords), read in any order through a table of where each one is.

Three files beside the large ones, of which the last tells that the others are whole:

| file | |
|---|---|
| `NAME.npy` | a row of `ROW` for each image, which `np.load(..., mmap_mode="r")` reads |
| `NAME.names` | all names in one, each up to its `name_end` |
| `NAME.json` | the large files with their lengths, classes, and what was left out |

They are made when a data set is opened for the first time: every byte of the large files is read once. All processes of
a machine share the mapped files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_length
from tlt.data.sources.source import ImageSource, renumber
from tlt.errors import UserError
from tlt.io.files import READ_FLAGS, read_at, with_retries, write_whole
from tlt.io.names import Names, leads_out
from tlt.io.processes import available_cpus, in_processes
from tlt.io.progress import SearchProgress
from tlt.io.text import printable, some_names

FORMAT = "volo-tlt table of records, version 1"
# File by its number, then bytes; length 0: an empty image.
ROW = np.dtype(
    [("file", "<u4"), ("offset", "<i8"), ("length", "<i8"), ("crc32", "<u4"), ("class", "<i4"), ("name_end", "<i8")]
)
LONGEST_NAME = 4096  # bytes
_OPEN_FILES = 256  # kept open per table; others are opened for each read


@dataclass
class FileRecords:
    """What one large file holds, in its order.

    Attributes:
        path, length: The file and its bytes.
        rows: (n,) of `ROW`; `file` and `name_end` are not set.
        names: Of the images, "" where they have none.
        class_texts: Names of their classes, "" where they have none.
        left_out: Kind -> names of what is no image.
    """

    path: str
    length: int
    rows: np.ndarray
    names: list[str]
    class_texts: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def checked_name(name: str, path: str) -> str:
    """The name of an image in a file. Raises UserError: it can't be one."""
    if "\0" in name or len(name) > LONGEST_NAME:
        raise UserError(f"{printable(path)}: an image's name has {len(name)} characters, or NUL in it")
    return name


@dataclass
class Contents:
    """What a table says of its images besides where they are, in the order of the large files.

    Attributes:
        names: `CLASS/FILE`.
        classes: (N,) int64.
        class_names: By number.
        named: Whether classes have names, or only numbers.
        order: (N,) the images in the table's order; None: this one.
        folder_names: The classes that are there; None: those with images.
        notes: Warnings.
        about: What else is kept with the table.
    """

    names: Sequence[str]
    classes: np.ndarray
    class_names: list[str]
    named: bool = True
    order: np.ndarray | None = None
    folder_names: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    about: Any = None


@dataclass(frozen=True)
class RecordFiles:
    """The large files of a split, as its kind of data set finds them.

    Attributes:
        paths: Of the files, in order.
        table: Path of their table, without an ending.
        scan: Reads a file, every byte of it. Raises UserError: it is cut, damaged or something else.
        contents: What the scanned files hold together.
        count: Images in them; None: the data set doesn't say.
    """

    paths: list[str]
    table: str
    scan: Callable[[str], FileRecords]
    contents: Callable[[list[FileRecords]], Contents]
    count: int | None = None

    def open(
        self, class_names: Sequence[str] | None = None, found: Callable[[str, int], None] | None = None
    ) -> RecordImages:
        """The images; the table is made first where there is none, by one process at a time.

        Args:
            class_names: Imposed class list; None: the table's own.
            found: Called often, with what is done and how many files were read; None: lines are printed.

        Raises:
            UserError: A file is missing, cut, damaged, or not the one of the table; classes that are not in
                `class_names`.
        """
        remedy = f"put it back, or remove {printable(self.table)}.json: the table is then made anew"
        if not os.path.isfile(f"{self.table}.json"):
            self._make(found or SearchProgress())
        table = RecordTable(self.table)
        table.check_files()
        if list(map(os.path.abspath, table.files)) != list(map(os.path.abspath, self.paths)):
            other = sorted(set(map(os.path.basename, table.files)) ^ set(map(os.path.basename, self.paths)))
            raise UserError(
                f"{printable(self.table)}.json is of {len(table.files)} files, not of the {len(self.paths)} that are "
                f"there ({some_names(other)}): {remedy}"
            )
        if self.count is not None and len(table.rows) != self.count:
            raise UserError(
                f"{printable(self.table)}.json has {len(table.rows)} images, and the data set says {self.count}: copy "
                "the files again, or correct the number"
            )
        return RecordImages.of(table, class_names)

    def _make(self, found: Callable[[str, int], None]) -> None:
        what = f"reading every byte of {len(self.paths)} files for {printable(self.table)}"
        lock = FileLock(f"{self.table}.lock")
        try:
            while not lock.is_locked:
                with suppress(Timeout):
                    lock.acquire(timeout=1)
                found(what, 0)
            if not os.path.isfile(f"{self.table}.json"):
                files = []
                workers = min(available_cpus(), len(self.paths))
                for file in in_processes(_scan, self.scan, self.paths, workers, "reading files"):
                    files.append(file)
                    found(what, len(files))
                write_table(self.table, files, self.contents(files))
        except (OSError, NotImplementedError) as error:
            raise UserError(
                f"{printable(self.table)}.json can't be written ({error}): where the data set is read-only, make a "
                "folder with links to its files, and give that as DATA"
            ) from error
        finally:
            lock.release()


def _scan(scan: Callable[[str], FileRecords], path: str) -> FileRecords:
    try:
        return scan(path)
    except OSError as error:
        raise UserError(f"{printable(path)} can't be read ({error.strerror or error})") from error


def write_table(table: str, files: Sequence[FileRecords], contents: Contents) -> None:
    """Write a table, its `.json` last.

    Raises:
        UserError: No images, two of one name, or a file outside of the table's folder.
        OSError: It can't be written.
    """
    if not len(contents.names):
        raise UserError(f"no image in {len(files)} files, such as {printable(files[0].path)}")
    twice = [name for name, count in Counter(contents.names).items() if count > 1]
    if twice:
        raise UserError(f"{len(twice)} images are there more than once, such as {printable(twice[0])}: make it anew")
    folder = os.path.dirname(table) or "."
    paths = [os.path.relpath(file.path, folder) for file in files]
    if outside := [path for path in paths if leads_out(path)]:
        raise UserError(f"table {printable(table)}: {printable(outside[0])} is not beside it or below")
    rows = np.concatenate([file.rows for file in files])
    rows["file"] = np.repeat(np.arange(len(files)), [len(file.rows) for file in files])
    rows["class"] = contents.classes
    names = contents.names
    if contents.order is not None:
        rows, names = rows[contents.order], [names[row] for row in contents.order]
    block = Names(names)
    rows["name_end"] = block.ends
    there = [contents.class_names[number] for number in np.unique(contents.classes)]
    description = {
        "files": [[path, file.length] for path, file in zip(paths, files, strict=True)],
        "class_names": contents.class_names,
        "folder_names": there if contents.folder_names is None else contents.folder_names,
        "named": contents.named,
        "warnings": contents.notes + _left_out(files),
        "about": contents.about,
    }
    content = {"format": FORMAT, "crc32": _crc(rows, block.block, description), "description": description}
    temporary = os.path.join(folder, f".{os.path.basename(table)}.npy.tmp")
    with open(temporary, "wb") as file:
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, f"{table}.npy")
    write_whole(f"{table}.names", block.block)
    write_whole(f"{table}.json", json.dumps(content).encode())


def _left_out(files: Sequence[FileRecords]) -> list[str]:
    names: dict[str, list[str]] = {}
    for file in files:
        for kind, own in file.left_out.items():
            names.setdefault(kind, []).extend(own)
    return [f"left out {len(each)} {kind}, such as {printable(each[0])}" for kind, each in names.items()]


def _crc(rows: np.ndarray, names: bytes | memoryview, description: Any) -> int:
    return zlib.crc32(rows.view(np.uint8).data, zlib.crc32(names, zlib.crc32(json.dumps(description).encode())))


class RecordTable:
    """A table, mapped into memory. Travels to other processes as its path.

    Attributes:
        rows: (N,) of `ROW`.
        names: `CLASS/FILE` of each image.
        files: Paths of the large files.
        description: See `write_table`.

    Raises:
        UserError: It is cut, damaged or something else.
    """

    def __init__(self, table: str) -> None:
        self.path, shown = table, f"{printable(table)}.json"
        remedy = "copy the files again, or remove it: it is then made anew"
        try:
            with open(f"{table}.json", "rb") as file:
                content = json.load(file)
            self.rows: np.ndarray = np.load(f"{table}.npy", mmap_mode="r")
            block = np.memmap(f"{table}.names", np.uint8, "r")
            self.description: dict[str, Any] = content["description"]
            sound = content["format"] == FORMAT and self.rows.dtype == ROW and self.rows.ndim == 1
            sound = sound and content["crc32"] == _crc(self.rows, block.data, self.description)
            folder, files = os.path.dirname(table), self.description["files"]
            self.files = [os.path.join(folder, name) for name, _ in files]
        except Exception as error:  # damaged files make numpy raise anything from EOFError to SyntaxError
            raise UserError(f"{shown} and what belongs to it can't be read ({error}): {remedy}") from error
        if not sound:
            raise UserError(f"{shown} and what belongs to it are damaged or something else: {remedy}")
        if outside := [name for name, _ in files if leads_out(name)]:
            raise UserError(f"{shown} names {printable(outside[0])}, outside of its folder: {remedy}")
        ends = self.rows["name_end"]
        classes, number_of = self.rows["class"], len(self.description["class_names"])
        numbers = classes.min() >= 0 and classes.max() < number_of and self.rows["file"].max() < len(files)
        if not numbers or (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(block):
            raise UserError(f"{shown} is of other files or names: {remedy}")
        self.names = Names.packed(block.data, ends)
        self._open: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[RecordTable], tuple[str]]:
        return RecordTable, (self.path,)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)

    def check_files(self) -> None:
        """Compare the length of every file with the table. Raises UserError: one is missing, cut, or another one."""
        remedy = f"copy it again, or remove {printable(self.path)}.json: the table is then made anew"
        for path, (_, length) in zip(self.files, self.description["files"], strict=True):
            if not os.path.isfile(path):
                raise UserError(f"{printable(path)} is missing or no regular file: {remedy}")
            if os.path.getsize(path) != length:
                raise UserError(f"{printable(path)} has {os.path.getsize(path)} bytes instead of {length}: {remedy}")

    def damaged_files(self) -> list[str]:
        """Files in which a record's checksum is wrong; every record is read."""
        damaged = set()
        for number in range(len(self.rows)):
            try:
                self.read(number)
            except BadImage:
                damaged.add(self.files[self.rows["file"][number]])
        return sorted(damaged)

    def read(self, number: int) -> bytearray:
        """The bytes of a record, by any number of threads and processes. Raises BadImage: they can't be read, or their
        crc32 is wrong; MachineFault."""
        file, offset, length, crc32, *_ = self.rows[number].item()
        data = bytearray(length)
        try:
            done = with_retries(lambda: self._read(file, offset, data), self.files[file])
        except OSError as error:
            raise BadImage(f"{printable(self.files[file])} can't be read: {error.strerror}") from error
        if done < length:
            raise BadImage(f"{printable(self.files[file])} ends after {done} of its {length} bytes")
        if zlib.crc32(data) != crc32:
            raise BadImage(f"damaged in {printable(self.files[file])} (crc32 is wrong): copy that file again")
        return data

    def _read(self, file: int, offset: int, data: bytearray) -> int:
        if (descriptor := self._open.get(file)) is not None:
            try:
                return _fill(descriptor, data, offset)
            except OSError:
                # Opened anew the next time, which helps where it is stale. Not closed: others may be reading from it.
                self._open.pop(file, None)
                raise
        # Opening a pipe without a writer would wait for ever.
        descriptor = os.open(self.files[file], READ_FLAGS)
        kept = len(self._open) < _OPEN_FILES and self._open.setdefault(file, descriptor) == descriptor
        try:
            return _fill(descriptor, data, offset)
        finally:
            if not kept:
                os.close(descriptor)


def _fill(descriptor: int, data: bytearray, offset: int) -> int:
    """Read into all of `data`; returns how much of it there was."""
    view, done = memoryview(data), 0
    while done < len(data):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [view[done:]], offset + done)
        else:
            part = read_at(descriptor, len(data) - done, offset + done)
            view[done : done + len(part)], count = part, len(part)
        if not count:
            break
        done += count
    return done


@dataclass(frozen=True)
class RecordImages(ImageSource):
    """The images of a table."""

    table: RecordTable = field(kw_only=True)

    @classmethod
    def of(cls, table: RecordTable, class_names: Sequence[str] | None = None) -> RecordImages:
        """The images of a table, numbered by an imposed class list. Raises UserError: it lacks a class."""
        about = table.description
        own, there, classes = about["class_names"], about["folder_names"], table.rows["class"]
        if class_names is not None and not about["named"] and len(own) <= len(class_names):
            there, own = [class_names[int(number)] for number in there], list(class_names)
        classes, names = renumber(classes, own, class_names, f"{printable(table.path)}.json")
        warnings = [f"{printable(table.path)}: {text}" for text in about["warnings"]]
        folder = os.path.dirname(table.path) or "."
        return cls(folder, table.names, classes, names, there, warnings, table=table)

    def __reduce__(self) -> tuple[Callable[..., RecordImages], tuple[RecordTable, list[str]]]:
        return RecordImages.of, (self.table, self.class_names)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        check_length(int(self.table.rows["length"][index]), max_pixels)
        return self.table.read(index)

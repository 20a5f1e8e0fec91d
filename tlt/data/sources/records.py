"""Reads images inside a few large files (tar shards, TFRecords) in any order, by a table of their positions.

The table has three files beside the large ones. The last one is written last, so its presence means all are complete:

| file | |
|---|---|
| `NAME.npy` | one row of `ROW` per image, read by `np.load(..., mmap_mode="r")` |
| `NAME.names` | the concatenated names; each ends at its `name_end` |
| `NAME.json` | the large files with their lengths and checksums, the classes, and what was left out |

The table is made when a data set is opened for the first time, which reads every byte of the large files once. All
processes of a machine share the mapped files.
"""

import io
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_length
from tlt.data.sources.source import ImageSource, ProgressCallback, left_out_lines
from tlt.errors import UserError
from tlt.io.files import blamed_on, os_errors_as, read_into, regular_only, with_retries, write_whole
from tlt.io.jobs import SearchProgress, available_cpus, in_processes
from tlt.io.names import Names
from tlt.io.text import leads_out, natural_key, printable, some_names

FORMAT = "volo-tlt table of records, version 1"
# `file` is an index, `offset` and `length` are in bytes; length 0 means an empty image.
ROW = np.dtype(
    [("file", "<u4"), ("offset", "<i8"), ("length", "<i8"), ("crc32", "<u4"), ("class", "<i4"), ("name_end", "<i8")]
)
LONGEST_NAME = 4096  # bytes
_OPEN_FILES = 256  # maximum number of open files per table, the most recently used


@dataclass
class FileRecords:
    """The contents of one large file, in its order. Raises UserError if a name is too long or has NUL in it."""

    path: str
    length: int  # bytes
    rows: np.ndarray  # (n,) of `ROW`; `file` and `name_end` are not set
    names: list[str]  # name of each image, or ""
    class_texts: list[str] = field(default_factory=list)  # class name of each image, or ""
    left_out: dict[str, list[str]] = field(default_factory=dict)  # kind -> names of entries that are no images
    texts: int = field(init=False)  # checksum of the names, classes and positions of its images

    def __post_init__(self) -> None:
        positions = self.rows[["offset", "length", "class"]].tolist()
        self.texts = zlib.crc32(json.dumps([positions, self.names, self.class_texts]).encode())
        for name in (*self.names, *self.class_texts):
            if "\0" in name or len(name) > LONGEST_NAME:
                raise UserError(f"{printable(self.path)}: an image's name has {len(name)} characters, or NUL in it")


def open_records(
    paths: list[str],
    table: str,
    scan: Callable[..., FileRecords],
    write: Callable[[str, list[FileRecords]], None],
    on_progress: ProgressCallback | None = None,
) -> "RecordImages":
    """Return the images in large files. If there is no `table` (a path without an extension) yet, one process at a time
    makes it. Raise UserError if a file is missing, cut or damaged, or differs from the table.

    Args:
        scan: Reads every byte of a file; with `texts_only` it may leave out the images, whose crc32 is then 0. Raises
            UserError if the file is cut, damaged or of another kind.
        write: Writes the table of the scanned files, with `write_table`.
        on_progress: Called often with a message and the number of files so far; None prints lines.
    """
    name = f"{printable(table)}.json"
    lock = FileLock(f"{table}.lock")
    on_progress = on_progress or SearchProgress()
    task = f"reading every byte of {len(paths)} files for {name}"
    try:
        while not os.path.isfile(f"{table}.json"):
            try:
                with lock.acquire(timeout=1):
                    if os.path.isfile(f"{table}.json"):
                        break
                    write(table, _scanned(scan, paths, task, on_progress))
            except Timeout:  # another process is making it
                on_progress(task, 0)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"{name} can't be written ({error}): where the data set is read-only, make a folder with links to its "
            "files, and give that as DATA"
        ) from error
    images = RecordImages(table)
    if unlike := {*map(os.path.abspath, images.files)} ^ {*map(os.path.abspath, paths)}:
        raise UserError(
            f"{name} is of {len(images.files)} files, not of the {len(paths)} that are there "
            f"({some_names(sorted(map(os.path.basename, unlike)))}): put it back, or remove {name}: the table is then "
            "made anew"
        )
    _check_texts(images, table, scan, on_progress)
    return images


def _check_texts(
    images: "RecordImages", table: str, scan: Callable[..., FileRecords], on_progress: ProgressCallback
) -> None:
    """Check that files that were written or copied after their table still say the same about their images. Raise
    UserError if one of them does not."""
    name = f"{table}.json"
    made = os.stat(name).st_ctime_ns  # copying may preserve other times
    newer = [path for path in images.texts if os.stat(path).st_ctime_ns >= made]
    task = f"comparing {len(newer)} files with {printable(name)}, which is older"
    for file in _scanned(partial(scan, texts_only=True), newer, task, on_progress):
        if file.texts != images.texts[file.path]:
            raise UserError(
                f"{printable(file.path)} has other images or classes than when {printable(name)} was made: copy it "
                "again, or remove that: the table is then made anew"
            )
    if newer:
        with suppress(OSError):  # where the data set is read-only, they are compared at each start
            os.utime(name)


def _scanned(
    scan: Callable[..., FileRecords], paths: list[str], task: str, on_progress: ProgressCallback
) -> list[FileRecords]:
    """Return the contents of the files, which one process per CPU reads."""
    files = list[FileRecords]()
    for file in in_processes(_scan, scan, paths, min(available_cpus(), len(paths)), "reading files"):
        files.append(file)
        on_progress(task, len(files))
    return files


def _scan(scan: Callable[..., FileRecords], path: str) -> FileRecords:
    with os_errors_as(lambda error: f"{printable(path)} can't be read ({error.strerror or error})"):
        return scan(path)


def concatenated(files: Sequence[FileRecords]) -> np.ndarray:
    """Return the rows of all files, with the files' indices set."""
    rows = np.concatenate([file.rows for file in files])
    rows["file"] = np.repeat(np.arange(len(files)), [len(file.rows) for file in files])
    return rows


def in_natural_order(rows: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Sort rows and names in natural order of the names."""
    order = sorted(range(len(names)), key=lambda row: (natural_key(names[row]), names[row]))
    return rows[order], [names[row] for row in order]


def write_table(
    table: str,
    files: Sequence[FileRecords],
    rows: np.ndarray,
    names: Sequence[str],
    class_names: list[str],
    folder_names: list[str] | None = None,
    notes: Sequence[str] = (),
    about: Any = None,
) -> None:
    """Write the files of a table, whose path has no extension; `.json` comes last. Raise UserError if there are no
    images, or a file is outside the table's folder, and OSError if writing failed.

    Args:
        rows: (N,) of `ROW`, in index order of the images; `name_end` is set here.
        names: `CLASS/FILE` of each image.
        class_names: Name of each class index; its number, if classes have no names.
        folder_names: The classes of this data set; None means those with images.
        notes: Warnings.
        about: Other data to store in the table.
    """
    if not len(names):
        raise UserError(f"no image in {len(files)} files, such as {printable(files[0].path)}")
    paths = [os.path.relpath(file.path, os.path.dirname(table) or ".") for file in files]
    if outside := [path for path in paths if leads_out(path)]:
        raise UserError(f"table {printable(table)}: {printable(outside[0])} is not beside it or below")
    left_out = defaultdict[str, list[str]](list)
    for file in files:
        for kind, times in file.left_out.items():
            left_out[kind] += times
    packed = Names(names)
    rows["name_end"] = packed.ends
    description = {
        "files": [[path, file.length] for path, file in zip(paths, files, strict=True)],
        "texts": [file.texts for file in files],
        "class_names": class_names,
        "folder_names": folder_names or [class_names[number] for number in np.unique(rows["class"])],
        "warnings": [*notes, *left_out_lines(left_out)],
        "about": about,
    }
    np.save(array := io.BytesIO(), rows)
    write_whole(f"{table}.npy", array.getvalue())
    write_whole(f"{table}.names", packed.block)
    content = {"format": FORMAT, "crc32": _crc(rows, packed.block, description), "description": description}
    write_whole(f"{table}.json", json.dumps(content).encode())


def _read_table(table: str) -> tuple[np.ndarray, memoryview, dict[str, Any]]:
    """Map the files of a table. Return its rows, the block of names, and the description. Raise UserError if they are
    cut, damaged or of another kind."""
    table_name = f"{printable(table)}.json"
    remedy = "copy the files again, or remove it: it is then made anew"
    with blamed_on(f"{table_name} and what belongs to it", "can't be read", remedy):
        with open(f"{table}.json", "rb") as file:
            content = json.load(file)
        rows = np.load(f"{table}.npy", mmap_mode="r")
        names = np.memmap(f"{table}.names", np.uint8, "r").data
        description = content["description"]
        sound = content["format"] == FORMAT and content["crc32"] == _crc(rows, names, description)
        sound = sound and _is_consistent(rows, names, description)
    if not sound:
        raise UserError(f"{table_name} and what belongs to it are damaged or something else: {remedy}")
    if outside := next((name for name, _ in description["files"] if leads_out(name)), None):
        raise UserError(f"{table_name} names {printable(outside)}, outside of its folder: {remedy}")
    return rows, names, description


def _is_consistent(rows: np.ndarray, names: memoryview, description: dict[str, Any]) -> bool:
    """Return whether the rows refer to files, classes and names that are there. A checksum may be right by intent."""
    files = [name for name, _ in description["files"]]
    class_names = description["class_names"]
    ends = {"file": len(files), "class": len(class_names), "name_end": len(names) + 1}
    positions = (rows["offset"], rows["length"], rows["class"], np.diff(rows["name_end"], prepend=0))
    texts = [*files, *class_names, *description["folder_names"], *description["warnings"]]
    in_range = all(rows[key].max() < end for key, end in ends.items()) and all((part >= 0).all() for part in positions)
    known = rows.dtype == ROW and rows.ndim == 1 and "about" in description
    return known and in_range and all(isinstance(text, str) for text in texts)


def _crc(rows: np.ndarray, names: bytes | memoryview, description: Any) -> int:
    return zlib.crc32(rows.view(np.uint8).data, zlib.crc32(names, zlib.crc32(json.dumps(description).encode())))


class RecordImages(ImageSource):
    """A source of the images in large files. The table (path without an extension) is memory-mapped; pickling stores
    only its path. Raises UserError if the table is cut, damaged or of another kind; or a file is missing or has another
    length."""

    paths: Names

    def __init__(self, table: str) -> None:
        self.rows, names, description = _read_table(table)  # rows (N,) of `ROW`
        folder = os.path.dirname(table) or "."
        self.files = [os.path.join(folder, name) for name, _ in description["files"]]
        self.about = description["about"]  # of `write_table`
        self.texts = dict(zip(self.files, description.get("texts", ()), strict=False))  # older tables have none
        for path, (_, length) in zip(self.files, description["files"], strict=True):
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size != length:
                fault = "is missing or no regular file" if size is None else f"has {size} bytes instead of {length}"
                raise UserError(
                    f"{printable(path)} {fault}: copy it again, or remove {printable(table)}.json: the table is then "
                    "made anew"
                )
        paths = Names.packed(names, self.rows["name_end"])
        classes = self.rows["class"].astype(np.int64)
        warnings = [f"{printable(table)}: {text}" for text in description["warnings"]]
        super().__init__(folder, paths, classes, description["class_names"], description["folder_names"], warnings)
        self._table = table
        self._opened = lru_cache(_OPEN_FILES)(partial(open, mode="rb", buffering=0, opener=regular_only))

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordImages, (self._table,), {"classes": self.classes, "class_names": self.class_names}

    def damaged_files(self) -> list[str]:
        """Read every record and return the files in which a checksum is wrong."""
        damaged = set()
        for number in np.flatnonzero(self.rows["length"]).tolist():
            try:
                self.read(number)
            except BadImage:
                damaged.add(self.files[self.rows["file"][number]])
        return sorted(damaged)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        """Return the bytes of a record. Threads and processes may call this at once. Raise BadImage if they can't be
        read or their crc32 is wrong, or MachineFault."""
        file, offset, length, crc32, *_ = self.rows[index].item()
        data = bytearray(check_length(length, max_pixels))
        path = self.files[file]

        def read() -> int:
            try:
                opened = self._opened(path)
                return read_into(data, opened.fileno(), offset)
            except OSError:
                self._opened.cache_clear()  # the next attempt opens it again, which helps if the handle is stale
                raise

        try:
            done = with_retries(read, path)
        except OSError as error:
            raise BadImage(f"{printable(path)} can't be read: {error.strerror}") from error
        if done < length:
            raise BadImage(f"{printable(path)} ends after {done} of its {length} bytes")
        if zlib.crc32(data) != crc32:
            raise BadImage(f"damaged in {printable(path)} (crc32 is wrong): copy that file again")
        return data

"""The label archive: a folder of NumPy files with one row per image.

OUT/meta.json       `LabelInfo`, the number of records, checksums, agreement, and whether the archive is complete
OUT/values.npy      float16 (N, k, h, w) logits
OUT/ids.npy         uint16 (N, k, h, w) class ids, or int32 if there are more than 65,536 classes
OUT/lse.npy         float32 (N, h, w), optional: log-sum-exp of all the annotator's logits
OUT/crc32.npy       uint32 (N,) checksum of the row's bytes in ids, values and lse, in this order
OUT/done.npy        uint8 (N,): 0 not written yet, 1 has a label, 2 has no label because the image is unreadable
OUT/names.npy       uint8: the concatenated paths of the images, or of the label files (.pt) of unknown images
OUT/name_ends.npy   int64 (N,): the end of each path in names.npy
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt.errors import UserError
from tlt.io.files import blamed_on, os_errors_as, read_at, with_retries
from tlt.io.names import Names
from tlt.io.output_folder import read_marker
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.tree import find_labels

FORMAT = "volo-tlt label archive, version 2"
META_NAME = "meta.json"
LABEL = 1  # values in `done.npy`; 0: not written yet
NO_LABEL = 2
_REMEDY = "copy the archive again, or pack it again"


def map_file(path: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> np.memmap:
    """Map a .npy file of an archive into memory. Raise UserError if it is missing, cut, or holds something else."""
    name = f"label archive {printable(path)}"
    with blamed_on(name, "is missing, cut or damaged", _REMEDY):
        if not os.path.isfile(path):
            raise FileNotFoundError("it is not there, or no file")
        # np.load compares the header with the length of the file.
        mapped = with_retries(lambda: np.load(path, mmap_mode="r"), path)
    if not isinstance(mapped, np.memmap) or mapped.shape != shape or mapped.dtype not in map(np.dtype, dtypes):
        raise UserError(f"{name} holds something else than {dtypes[0]} {shape}: {_REMEDY}")
    return mapped


class Column:
    """One .npy file of an archive; it reads and writes rows by number. It does not use a memory map for that: the
    system kills a process that touches a part of a map that was cut off or for which a full disk has no room. All
    processes of a machine share the page cache anyway. Raises UserError if the file is missing, cut, or holds something
    else."""

    def __init__(self, path: str, shape: tuple[int, ...], dtypes: Sequence[str], writable: bool = False) -> None:
        self._arguments = path, shape, dtypes, writable
        mapped = map_file(path, shape, dtypes)
        self.path = path
        self.dtype = mapped.dtype
        self._begin = mapped.offset
        self._row_shape = shape[1:]
        self._row_bytes = math.prod(shape[1:]) * mapped.dtype.itemsize
        self._file = with_retries(lambda: open(path, "r+b" if writable else "rb", buffering=0), path)  # noqa: SIM115

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self._arguments

    def read(self, row: int) -> np.ndarray:
        """Return a row. Raise UserError if the file was cut."""
        offset = self._begin + row * self._row_bytes
        name = f"label archive {printable(self.path)}"
        with os_errors_as(lambda error: f"{name} can't be read any more ({error.strerror}): {_REMEDY}"):
            data = with_retries(lambda: read_at(self._file.fileno(), self._row_bytes, offset), self.path)
        if len(data) != self._row_bytes:
            raise UserError(f"{name} has been cut: row {row} is missing; {_REMEDY}")
        return np.frombuffer(data, self.dtype).reshape(self._row_shape)

    def write(self, row: int, data: bytes) -> None:
        """Write the bytes of a row. Raise OSError if that fails."""
        if os.pwrite(self._file.fileno(), data, self._begin + row * self._row_bytes) != len(data):
            raise OSError(28, "No space left on device", self.path)

    def sync(self) -> None:
        """Wait until all written rows are on the disk."""
        os.fsync(self._file.fileno())


class Rows:
    """The columns of an archive that have one row per image."""

    def __init__(self, root: str | Path, info: LabelInfo, records: int, writable: bool = False) -> None:
        self.columns = {
            name: Column(os.path.join(root, f"{name}.npy"), shape, dtypes, writable)
            for name, (shape, dtypes) in column_types(info, records).items()
        }
        self.contents = {name: column for name, column in self.columns.items() if name not in ("crc32", "done")}

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `done` and `crc32` of all rows as arrays in memory."""
        return np.load(self.columns["done"].path), np.load(self.columns["crc32"].path)

    def read(self, row: int, crc32: int, source: str = "label") -> LabelMap | None:
        """Return the map in a row, or None if `crc32` is not its checksum."""
        ids, values, *lse = arrays = [column.read(row) for column in self.contents.values()]
        if zlib.crc32(b"".join(array.tobytes() for array in arrays)) != crc32:
            return None
        return LabelMap(values.copy(), ids.astype(np.int32), source=source, log_sum_exp=lse[0].copy() if lse else None)

    def write(self, row: int, arrays: dict[str, np.ndarray], state: int) -> None:
        """Write a row, its checksum, and last its state. Raise OSError if that fails."""
        data = {name: arrays[name].astype(column.dtype).tobytes() for name, column in self.contents.items()}
        data["crc32"] = zlib.crc32(b"".join(data.values())).to_bytes(4, "little")
        for name, content in [*data.items(), ("done", bytes([state]))]:
            self.columns[name].write(row, content)


def column_types(info: LabelInfo, records: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return shape and allowed types of the columns with one row per image; first those that crc32 covers, in order."""
    maps = (records, *info.shape)
    return {
        "ids": (maps, ("<u2", "<i4")),
        "values": (maps, ("<f2",)),
        **({"lse": ((records, *info.grid), ("<f4",))} if info.log_sum_exp else {}),
        "crc32": ((records,), ("<u4",)),
        "done": ((records,), ("|u1",)),
    }


def read_description(root: str | Path) -> tuple[LabelInfo, Names]:
    """Return the description of a complete archive and the names of its rows, in memory that processes share. Raise
    UserError if there is no archive, or it is incomplete or damaged."""
    name = printable(os.fspath(root))
    path = os.path.join(root, META_NAME)
    if not os.path.isfile(path):
        raise UserError(f"{name} is not a label archive (no {META_NAME} in it): make one with `tlt pack`")
    content = read_marker(path, FORMAT)
    if content.get("complete") is not True:
        raise UserError(f"label archive {name} is not complete: run the command that was making it again")
    records = content.get("records")
    if not isinstance(records, int) or records < 1:
        raise UserError(f"{printable(path)} has no count of records: was it written by a newer version?")
    ends = map_file(os.path.join(root, "name_ends.npy"), (records,), ("<i8",))
    block = map_file(os.path.join(root, "names.npy"), (int(ends[-1]),), ("|u1",))
    if names_crc(block, ends) != content.get("names_crc32"):
        raise UserError(f"label archive {name}: names.npy or name_ends.npy is damaged; {_REMEDY}")
    return LabelInfo.from_json(content, path), Names.packed(block.data, ends)


def names_crc(block: np.ndarray, ends: np.ndarray) -> int:
    """Return the crc32 of the concatenated names and their ends."""
    return zlib.crc32(np.ascontiguousarray(ends).data, zlib.crc32(np.ascontiguousarray(block).data))


class ArchiveReader:
    """Reads the rows of an archive that belong to a list of images, given their paths relative to the image folder. A
    `tlt.labels.store.Reader`. Raises UserError if there is no archive, or it is incomplete, of an old version, or
    damaged. Rows are matched by name, so their order does not matter: by the image's name if the archive has it, else
    by label file with the rule of `find_labels`."""

    def __init__(self, root: str, names: Names) -> None:
        self.root = root
        self._names = names
        self.info, stored = read_description(root)
        self._rows = Rows(root, self.info, len(stored))
        self._done, self._crc32 = self._rows.states()
        self._row_of = stored.rows_of(names)  # (images,); -1: no row
        if len(without := np.flatnonzero(self._row_of < 0)):
            files = {name for name in stored if name.endswith(".pt")}
            self._row_of[without] = stored.rows_of(find_labels([names[i] for i in without.tolist()], files, root))
        self._row_of[self._done[self._row_of] == NO_LABEL] = -1
        self.missing = set(np.flatnonzero(self._row_of < 0).tolist())

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def identity(self) -> bytes:
        return Path(self.root, META_NAME).read_bytes()

    def read(self, index: int) -> LabelMap:
        row = int(self._row_of[index])
        source = self.source(index)
        label_map = self._rows.read(row, int(self._crc32[row]), source) if self._done[row] == LABEL else None
        if label_map is None:
            raise UserError(f"{source}, row {row}, is damaged (crc32 is wrong): {_REMEDY}")
        return label_map

    def extra(self) -> list[str]:
        unused = self._done == LABEL
        unused[self._row_of[self._row_of >= 0]] = False
        _, stored = read_description(self.root)
        return [stored[row] for row in np.flatnonzero(unused).tolist()]

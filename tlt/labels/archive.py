"""The label archive: one folder of NumPy files with a row an image.

OUT/meta.json       `LabelInfo`, the number of records, checksums, agreement; and whether the archive is complete
OUT/values.npy      float16 (N, k, h, w) logits
OUT/ids.npy         uint16 (N, k, h, w) class ids, int32 where there are more than 65,536 classes
OUT/lse.npy         float32 (N, h, w), optional: log-sum-exp of all the annotator's logits
OUT/crc32.npy       uint32 (N,) of the row's bytes in ids, values and lse, one after the other
OUT/done.npy        uint8 (N,): 0 not written yet, 1 a label, 2 no label, because the image could not be read
OUT/names.npy       uint8: the paths of the images one after the other, or of label files (.pt) whose image is not known
OUT/name_ends.npy   int64 (N,): where in names.npy each path ends
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
from tlt.io.files import blamed_on, os_errors_told, read_at, with_retries
from tlt.io.names import Names
from tlt.io.output_folder import read_marker
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.tree import find_labels

FORMAT = "volo-tlt label archive, version 2"
META_NAME = "meta.json"
LABEL, NO_LABEL = 1, 2  # of `done.npy`; 0: not done
_REMEDY = "copy the archive again, or pack it again"


def map_file(path: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> np.memmap:
    """A .npy file of an archive in a memory map. Raises UserError: it is missing, cut, or holds something else."""
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
    """One .npy file of an archive, whose rows are read and written by number.

    Not through a memory map: a process that touches a part of a map that has been cut off, or that a full disk has no
    room for, is killed by the system. All processes of a machine share the pages in the page cache.

    Raises:
        UserError: As `map_file`.
    """

    def __init__(self, path: str, shape: tuple[int, ...], dtypes: Sequence[str], writable: bool = False) -> None:
        self._arguments = path, shape, dtypes, writable
        mapped = map_file(path, shape, dtypes)
        self.path, self.dtype, self._begin, self._row_shape = path, mapped.dtype, mapped.offset, shape[1:]
        self._row_bytes = math.prod(shape[1:]) * mapped.dtype.itemsize
        self._file = with_retries(lambda: open(path, "r+b" if writable else "rb", buffering=0), path)  # noqa: SIM115

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self._arguments

    def read(self, row: int) -> np.ndarray:
        """A row. Raises UserError: the file has been cut."""
        offset, name = self._begin + row * self._row_bytes, f"label archive {printable(self.path)}"
        with os_errors_told(lambda error: f"{name} can't be read any more ({error.strerror}): {_REMEDY}"):
            data = with_retries(lambda: read_at(self._file.fileno(), self._row_bytes, offset), self.path)
        if len(data) != self._row_bytes:
            raise UserError(f"{name} has been cut: row {row} is missing; {_REMEDY}")
        return np.frombuffer(data, self.dtype).reshape(self._row_shape)

    def write(self, row: int, data: bytes) -> None:
        """Write the bytes of a row. Raises OSError."""
        if os.pwrite(self._file.fileno(), data, self._begin + row * self._row_bytes) != len(data):
            raise OSError(28, "No space left on device", self.path)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file.fileno())


class Rows:
    """The columns of an archive that have a row an image."""

    def __init__(self, root: str | Path, info: LabelInfo, records: int, writable: bool = False) -> None:
        self.columns = {
            name: Column(os.path.join(root, f"{name}.npy"), shape, dtypes, writable)
            for name, (shape, dtypes) in column_types(info, records).items()
        }
        self.contents = {name: column for name, column in self.columns.items() if name not in ("crc32", "done")}

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """`done` and `crc32` of all rows, in memory."""
        return np.load(self.columns["done"].path), np.load(self.columns["crc32"].path)

    def read(self, row: int, crc32: int, source: str = "label") -> LabelMap | None:
        """The map in a row; None where `crc32` is not its checksum."""
        ids, values, *lse = arrays = [column.read(row) for column in self.contents.values()]
        if zlib.crc32(b"".join(array.tobytes() for array in arrays)) != crc32:
            return None
        return LabelMap(values.copy(), ids.astype(np.int32), source=source, log_sum_exp=lse[0].copy() if lse else None)

    def write(self, row: int, arrays: dict[str, np.ndarray], state: int) -> None:
        """Write a row and its checksum, and last that it is done. Raises OSError."""
        data = {name: arrays[name].astype(column.dtype).tobytes() for name, column in self.contents.items()}
        data["crc32"] = zlib.crc32(b"".join(data.values())).to_bytes(4, "little")
        for name, content in [*data.items(), ("done", bytes([state]))]:
            self.columns[name].write(row, content)


def column_types(info: LabelInfo, records: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and possible types of the columns with a row an image; those that a row's crc32 covers first, in order."""
    maps = (records, *info.shape)
    return {
        "ids": (maps, ("<u2", "<i4")),
        "values": (maps, ("<f2",)),
        **({"lse": ((records, *info.grid), ("<f4",))} if info.log_sum_exp else {}),
        "crc32": ((records,), ("<u4",)),
        "done": ((records,), ("|u1",)),
    }


def read_description(root: str | Path) -> tuple[LabelInfo, Names]:
    """What a complete archive says of its maps, and the names of its rows, in memory that processes share.

    Raises:
        UserError: There is no archive, or it is not complete or damaged.
    """
    name, path = printable(os.fspath(root)), os.path.join(root, META_NAME)
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
    """The crc32 of names in one block."""
    return zlib.crc32(np.ascontiguousarray(ends).data, zlib.crc32(np.ascontiguousarray(block).data))


class ArchiveReader:
    """The rows of an archive that belong to a list of images. A `tlt.labels.store.Reader`.

    Images are matched by name, in whatever order the archive has them: by the image's own name where the archive knows
    it, else by label file, with the rule of `find_labels`.

    Args:
        names: Image paths relative to the image folder.

    Raises:
        UserError: No archive, not complete, old, or damaged.
    """

    def __init__(self, root: str, names: Names) -> None:
        self.root, self._names = root, names
        self.info, stored = read_description(root)
        self._rows = Rows(root, self.info, len(stored))
        self._done, self._crc32 = self._rows.states()
        self._row_of = stored.rows_of(names)  # (images,) -1: none
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
        row, source = int(self._row_of[index]), self.source(index)
        label_map = self._rows.read(row, int(self._crc32[row]), source) if self._done[row] == LABEL else None
        if label_map is None:
            raise UserError(f"{source}, row {row}, is damaged (crc32 is wrong): {_REMEDY}")
        return label_map

    def extra(self) -> list[str]:
        unused = self._done == LABEL
        unused[self._row_of[self._row_of >= 0]] = False
        _, stored = read_description(self.root)
        return [stored[row] for row in np.flatnonzero(unused).tolist()]

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

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlt.errors import MachineFault, UserError
from tlt.io.files import READ_FLAGS, read_at, with_retries, write_at
from tlt.io.names import Names
from tlt.io.output_folder import read_marker
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.label_files import find_labels, usual_label_name
from tlt.labels.label_info import LabelInfo

FORMAT = "volo-tlt label archive, version 2"
META_NAME = "meta.json"
LABEL, NO_LABEL = 1, 2  # of `done.npy`; 0: not done
_REMEDY = "copy the archive again, or pack it again"


class Column:
    """One .npy file of an archive, whose rows are read and written by number.

    All processes of a machine share its pages in the page cache. Rows are read from the file and not through a memory
    map: what touches a part of a map that has been cut off is killed by the system.

    Args:
        dtypes: It holds one of them.

    Raises:
        UserError: The file is missing, cut, or holds something else.
    """

    def __init__(self, path: str, shape: tuple[int, ...], dtypes: Sequence[str], writable: bool = False) -> None:
        self.path, self.shape, self.dtypes, self.writable = path, shape, dtypes, writable
        self._open()

    def _open(self) -> None:
        self.row_shape = self.shape[1:]
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) if self.writable else READ_FLAGS
        try:
            descriptor = with_retries(lambda: os.open(self.path, flags), self.path)
            self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115  (open as long as the archive is)
            shape, by_column, self.dtype = self._header()
            self._begin = self._file.tell()
            self.row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize
            missing = self._begin + self.shape[0] * self.row_bytes - os.fstat(self._file.fileno()).st_size
        except MachineFault:
            raise
        except OSError as error:
            raise UserError(f"{self._shown} can't be read ({error.strerror}): {_REMEDY}") from error
        if shape != self.shape or by_column or self.dtype not in map(np.dtype, self.dtypes):
            raise UserError(f"{self._shown} holds {self.dtype} {shape}, not {self.dtypes[0]} {self.shape}: {_REMEDY}")
        if missing > 0:
            raise UserError(f"{self._shown} has been cut, {missing} bytes are missing: {_REMEDY}")

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            if np.lib.format.read_magic(self._file) != (1, 0):
                raise ValueError("another version")
            return np.lib.format.read_array_header_1_0(self._file)
        except OSError:
            raise
        except Exception as error:  # whatever the bytes of a damaged header lead to
            raise UserError(f"{self._shown} is damaged ({error}): {_REMEDY}") from error

    @property
    def _shown(self) -> str:
        return f"label archive {printable(self.path)}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("path", "shape", "dtypes", "writable")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def read(self, row: int) -> bytes:
        """The bytes of a row. Raises UserError: the file has been cut."""
        place = self._begin + row * self.row_bytes
        try:
            data = with_retries(lambda: read_at(self._file.fileno(), self.row_bytes, place), self.path)
        except MachineFault:
            raise
        except OSError as error:
            raise UserError(f"{self._shown} can't be read any more ({error.strerror}): {_REMEDY}") from error
        if len(data) != self.row_bytes:
            raise UserError(f"{self._shown} has been cut: row {row} is missing; {_REMEDY}")
        return data

    def array(self, data: bytes) -> np.ndarray:
        """The bytes of a row as an array of its own."""
        return np.frombuffer(data, self.dtype).reshape(self.row_shape).copy()

    def whole(self) -> np.ndarray:
        """All rows, in memory."""
        return np.array(self.mapped())

    def mapped(self) -> np.ndarray:
        """All rows, in a memory map."""
        return np.memmap(self.path, self.dtype, "r", self._begin, self.shape)

    def write(self, row: int, data: bytes) -> None:
        """Write the bytes of a row. Raises OSError."""
        # Not through a memory map: a full disk would kill the process there, here it is an error.
        if write_at(self._file.fileno(), data, self._begin + row * self.row_bytes) != len(data):
            raise OSError(28, "No space left on device", self.path)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file.fileno())

    @staticmethod
    def create(path: Path, shape: tuple[int, ...], dtype: str) -> None:
        """Make a file of zeros, unless there is one already that was not cut while it was made."""
        header = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
        start, size = header.getvalue(), header.tell() + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with open(path, "r+b" if path.exists() else "w+b") as file:
            if file.read(len(start)) != start or os.fstat(file.fileno()).st_size != size:
                file.seek(0)
                file.write(start)
                file.truncate(size)


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


class Rows:
    """The columns of an archive: rows by number, checked when they are read."""

    def __init__(self, root: str, info: LabelInfo, records: int, writable: bool = False) -> None:
        self.columns = {
            name: Column(os.path.join(root, f"{name}.npy"), shape, dtypes, writable)
            for name, (shape, dtypes) in column_types(info, records).items()
        }
        self._contents = [column for name, column in self.columns.items() if name not in ("crc32", "done")]

    def state(self, row: int) -> int:
        """LABEL, NO_LABEL, 0 where it is not done, or something else where a bit was flipped."""
        return self.columns["done"].read(row)[0]

    def crc32(self, row: int) -> int:
        """The checksum of a row, as it is written."""
        return int.from_bytes(self.columns["crc32"].read(row), "little")

    def read(self, row: int, crc32: int) -> list[np.ndarray] | None:
        """ids, values and, if there is one, the log-sum-exp of a row; None where `crc32` is not their checksum."""
        data = [column.read(row) for column in self._contents]
        if crc_of(data) != crc32:
            return None
        return [column.array(each) for column, each in zip(self._contents, data, strict=True)]


def crc_of(parts: list[bytes]) -> int:
    """The crc32 of the contents of a row."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


class Meta(NamedTuple):
    """The content of meta.json in a complete archive."""

    info: LabelInfo
    records: int
    names_crc32: int
    agreement: dict[str, Any]


def is_archive(root: str | Path) -> bool:
    """Whether a folder is a label archive, of this version or the one before, complete or not."""
    return is_old_archive(root) or any(os.path.isfile(os.path.join(root, name)) for name in (META_NAME, "values.npy"))


def is_old_archive(root: str | Path) -> bool:
    """Whether a folder is a label archive of version 1, which `tlt pack` converts."""
    return any(os.path.isfile(os.path.join(root, name)) for name in ("manifest.json", "manifest.partial.json"))


def read_meta(root: str | Path) -> Meta:
    """The description of a complete archive. Raises UserError: there is none, it is not complete, damaged, or old."""
    shown, path = printable(os.fspath(root)), os.path.join(root, META_NAME)
    if not os.path.isfile(path):
        if is_old_archive(root):
            raise UserError(f"{shown} is a label archive of an earlier version: convert it with `tlt pack {shown} NEW`")
        raise UserError(f"{shown} is not a label archive (no {META_NAME} in it): make one with `tlt pack`")
    content = read_marker(path, FORMAT)
    if content.get("complete") is not True:
        raise UserError(f"label archive {shown} is not complete: run the command that was making it again")
    try:
        records, crc32, agreement = int(content["records"]), int(content["names_crc32"]), dict(content["agreement"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{printable(path)}: {error!r}; was it written by a newer version?") from error
    return Meta(LabelInfo.from_json(content, path), records, crc32, agreement)


def read_names(root: str, meta: Meta) -> Names:
    """The names of the rows, in memory that processes share. Raises UserError: damaged."""
    ends = Column(os.path.join(root, "name_ends.npy"), (meta.records,), ("<i8",)).mapped()
    block = Column(os.path.join(root, "names.npy"), (int(ends[-1]),), ("|u1",)).mapped()
    if names_crc(block, ends) != meta.names_crc32:
        raise UserError(f"label archive {printable(root)}: names.npy or name_ends.npy is damaged; {_REMEDY}")
    return Names.packed(block.data, ends)


def names_crc(block: np.ndarray, ends: np.ndarray) -> int:
    """The crc32 of names in one block."""
    return zlib.crc32(np.ascontiguousarray(ends).data, zlib.crc32(np.ascontiguousarray(block).data))


class ArchiveReader:
    """The rows of an archive that belong to a list of images. A `tlt.labels.store.Reader`.

    Images are matched by name, in whatever order the archive has them: by the image's own name where the archive knows
    it, else by label file, with the rule of `tlt.labels.tree.TreeReader`.

    Args:
        names: Image paths relative to the image folder.

    Raises:
        UserError: No archive, not complete, old, or damaged.
    """

    def __init__(self, root: str, names: Names) -> None:
        self.root, self._names = root, names
        self.info, self._records, _, self.agreement = meta = read_meta(root)
        self.rows = Rows(root, self.info, meta.records)
        self._states, self._crc32 = (self.rows.columns[name].whole() for name in ("done", "crc32"))
        stored = read_names(root, meta)
        # (images,) int64 row, -1: none; None: row i is that of image i
        self._row_of = None if stored == names else match_rows(stored, names, self._states, root)
        without = self._states == NO_LABEL if self._row_of is None else self._row_of < 0
        self.missing = set(np.flatnonzero(without).tolist())
        self._extra = self._unused(stored)

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def usual_label(self, name: str) -> str:
        return usual_label_name(name)

    def identity(self) -> bytes:
        return Path(self.root, META_NAME).read_bytes()

    def read(self, index: int) -> LabelMap:
        row = index if self._row_of is None else int(self._row_of[index])
        found = self.rows.read(row, int(self._crc32[row])) if self._states[row] == LABEL else None
        if found is None:
            raise UserError(f"{self.source(index)}, row {row}, is damaged (crc32 is wrong): {_REMEDY}")
        ids, values, *log_sum_exp = found
        source = self.source(index)
        return LabelMap(
            values, ids.astype(np.int32), source=source, log_sum_exp=log_sum_exp[0] if log_sum_exp else None
        )

    def extra(self) -> list[str]:
        return self._extra

    def _unused(self, stored: Names) -> list[str]:
        """The names of rows with a label that belong to none of the images."""
        if self._row_of is None:
            return []
        used = np.zeros(self._records, bool)
        used[self._row_of[self._row_of >= 0]] = True
        return [stored[row] for row in np.flatnonzero(~used & (self._states == LABEL)).tolist()]


def match_rows(stored: Names, names: Names, states: np.ndarray, root: str) -> np.ndarray:
    """(images,) the row of each image, -1 where it has no label. Raises UserError: a label file fits two images."""
    row_of = {name: row for row, name in enumerate(stored)}
    rows = np.array([row_of.get(name, -1) for name in names], np.int64)
    files: dict[str, set[str]] = {}  # label files whose image is not known, by folder
    for name in row_of:
        if name.endswith(".pt"):
            files.setdefault(os.path.dirname(name), set()).add(os.path.basename(name))
    if files:
        rest = np.flatnonzero(rows < 0)
        rest_names = [names[index] for index in rest.tolist()]
        found = find_labels(lambda folder: files.get(folder, set()), root, rest_names)
        rows[rest] = [
            -1 if place in found.missing else row_of[found.label(place, name)] for place, name in enumerate(rest_names)
        ]
    rows[states[rows] == NO_LABEL] = -1
    return rows

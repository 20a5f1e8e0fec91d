"""Archives with one row per image, such as the label archive and the feature archive: a folder of NumPy files.

OUT/meta.json       what all rows share, the number of records, checksums, and whether the archive is complete
OUT/COLUMN.npy      (N, ...) one row per image, for each column of the kind of archive
OUT/crc32.npy       uint32 (N,) checksum of the row's bytes in these columns, in their order
OUT/done.npy        uint8 (N,): 0 not written yet, 1 has its row, 2 has none because the image is unreadable
OUT/names.npy       uint8: the concatenated paths of the images (of label files, for labels of unknown images)
OUT/name_ends.npy   int64 (N,): the end of each path in names.npy
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from tlt.errors import UserError
from tlt.io.files import blamed_on, os_errors_as, read_at, with_retries
from tlt.io.names import Names
from tlt.io.output_folder import META_NAME, read_marker
from tlt.io.text import printable

WRITTEN = 1  # values in `done.npy`; 0: not written yet
ABSENT = 2
REMEDY = "copy the archive again, or make it again"

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Info = TypeVar("Info", bound="DataclassInstance")  # the description that all rows share: a dataclass
# Shape of a row and the allowed types of each column that crc32 covers, in order. New files get the first type.
Columns = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]


@dataclass(frozen=True)
class ArchiveKind(Generic[Info]):
    """A kind of archive.

    Attributes:
        one: What a row holds, such as "label".
        format: Its name and version in meta.json.
        made_with: The command that makes one.
        describe: Reads the description from the JSON object of a file. Raises UserError.
        columns: Returns the columns of an archive with this description.
    """

    one: str
    format: str
    made_with: str
    describe: Callable[[dict[str, Any], str], Info]
    columns: Callable[[Info], Columns]

    @property
    def what(self) -> str:
        """Its name in messages."""
        return f"{self.one.removesuffix('s')} archive"

    @property
    def all(self) -> str:
        """What its rows hold, such as "labels"."""
        return f"{self.one.removesuffix('s')}s"


def map_file(path: str, shape: tuple[int, ...], dtypes: Sequence[str], what: str) -> np.memmap:
    """Map a .npy file of an archive, which is a `what`, into memory. Raise UserError if it is missing, cut, or holds
    something else."""
    name = f"{what} {printable(path)}"
    with blamed_on(name, "is missing, cut or damaged", REMEDY):
        if not os.path.isfile(path):
            raise FileNotFoundError("it is not there, or no file")
        # np.load compares the header with the length of the file.
        mapped = with_retries(lambda: np.load(path, mmap_mode="r"), path)
    if not isinstance(mapped, np.memmap) or mapped.shape != shape or mapped.dtype not in map(np.dtype, dtypes):
        raise UserError(f"{name} holds something else than {dtypes[0]} {shape}: {REMEDY}")
    return mapped


class Column:
    """One .npy file of an archive; it reads and writes rows by number. It does not use a memory map for that: the
    system kills a process that touches a part of a map that was cut off or for which a full disk has no room. All
    processes of a machine share the page cache anyway. Raises UserError if the file is missing, cut, or holds something
    else."""

    def __init__(
        self, path: str, shape: tuple[int, ...], dtypes: Sequence[str], what: str, writable: bool = False
    ) -> None:
        self._arguments = path, shape, dtypes, what, writable
        mapped = map_file(path, shape, dtypes, what)
        self.path = path
        self.dtype = mapped.dtype
        self._name = f"{what} {printable(path)}"
        self._begin = mapped.offset
        self._row_shape = shape[1:]
        self._row_bytes = math.prod(shape[1:]) * mapped.dtype.itemsize
        self._file = with_retries(lambda: open(path, "r+b" if writable else "rb", buffering=0), path)  # noqa: SIM115

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self._arguments

    def read(self, row: int) -> np.ndarray:
        """Return a row. Raise UserError if the file was cut."""
        offset = self._begin + row * self._row_bytes
        with os_errors_as(lambda error: f"{self._name} can't be read any more ({error.strerror}): {REMEDY}"):
            data = with_retries(lambda: read_at(self._file.fileno(), self._row_bytes, offset), self.path)
        if len(data) != self._row_bytes:
            raise UserError(f"{self._name} has been cut: row {row} is missing; {REMEDY}")
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

    def __init__(
        self, root: str | Path, kind: ArchiveKind[Info], info: Info, records: int, writable: bool = False
    ) -> None:
        types = all_columns(kind.columns(info))
        self.columns = {
            name: Column(os.path.join(root, f"{name}.npy"), (records, *shape), dtypes, kind.what, writable)
            for name, (shape, dtypes) in types.items()
        }
        self.contents = {name: column for name, column in self.columns.items() if name not in ("crc32", "done")}

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `done` and `crc32` of all rows as arrays in memory."""
        return np.load(self.columns["done"].path), np.load(self.columns["crc32"].path)

    def read(self, row: int, crc32: int) -> dict[str, np.ndarray] | None:
        """Return the arrays of a row by column, or None if `crc32` is not their checksum."""
        arrays = {name: column.read(row) for name, column in self.contents.items()}
        checksum = 0
        for array in arrays.values():
            checksum = zlib.crc32(array.data, checksum)
        return arrays if checksum == crc32 else None

    def write(self, row: int, arrays: Mapping[str, np.ndarray], state: int) -> None:
        """Write a row, its checksum, and last its state. Raise OSError if that fails."""
        data = {name: arrays[name].astype(column.dtype, copy=False).tobytes() for name, column in self.contents.items()}
        data["crc32"] = zlib.crc32(b"".join(data.values())).to_bytes(4, "little")
        for name, content in [*data.items(), ("done", bytes([state]))]:
            self.columns[name].write(row, content)


def all_columns(columns: Columns) -> Columns:
    """Return all columns with one row per image."""
    return {**columns, "crc32": ((), ("<u4",)), "done": ((), ("|u1",))}


def read_description(root: str | Path, kind: ArchiveKind[Info]) -> tuple[Info, Names]:
    """Return the description of a complete archive and the names of its rows, in memory that processes share. Raise
    UserError if there is no archive of this kind, or it is incomplete or damaged."""
    name = printable(os.fspath(root))
    path = os.path.join(root, META_NAME)
    if not os.path.isfile(path):
        raise UserError(f"{name} is not a {kind.what} (no {META_NAME} in it): make one with {kind.made_with}")
    content = read_marker(path, kind.format)
    if content.get("complete") is not True:
        raise UserError(f"{kind.what} {name} is not complete: run the command that was making it again")
    records = content.get("records")
    if not isinstance(records, int) or records < 1:
        raise UserError(f"{printable(path)} has no count of records: was it written by a newer version?")
    ends = map_file(os.path.join(root, "name_ends.npy"), (records,), ("<i8",), kind.what)
    block = map_file(os.path.join(root, "names.npy"), (int(ends[-1]),), ("|u1",), kind.what)
    if names_crc(block, ends) != content.get("names_crc32"):
        raise UserError(f"{kind.what} {name}: names.npy or name_ends.npy is damaged; {REMEDY}")
    return kind.describe(content, path), Names.packed(block.data, ends)


def names_crc(block: np.ndarray, ends: np.ndarray) -> int:
    """Return the crc32 of the concatenated names and their ends."""
    return zlib.crc32(np.ascontiguousarray(ends).data, zlib.crc32(np.ascontiguousarray(block).data))


class RowReader(Generic[Info]):
    """Reads the rows of an archive that belong to a list of images, given their paths relative to the image folder.
    Rows are matched by name, so their order does not matter. Raises UserError if there is no archive of this kind, or
    it is incomplete, of an old version, or damaged.

    Attributes:
        missing: Indices of images without a row.
    """

    kind: ArchiveKind[Info]

    def __init__(self, root: str, names: Names) -> None:
        self.root = root
        self.info, stored = read_description(root, self.kind)
        self._names = names
        self._rows = Rows(root, self.kind, self.info, len(stored))
        self._done, self._crc32 = self._rows.states()
        self._row_of = self._find(names, stored)  # (images,); -1: no row
        self._row_of[self._done[self._row_of] == ABSENT] = -1
        self.missing = set(np.flatnonzero(self._row_of < 0).tolist())

    def _find(self, names: Names, stored: Names) -> np.ndarray:
        """Return the row of each image (images,), or -1."""
        return stored.rows_of(names)

    def source(self, index: int) -> str:
        """Return where the row of image `index` is, or should be, for messages."""
        return f"{self.kind.one} of {printable(self._names[index])} in {printable(self.root)}"

    def identity(self) -> bytes:
        """Return a text from which a checkpoint recognises this archive: its description, which has a checksum of all
        rows."""
        return Path(self.root, META_NAME).read_bytes()

    def extra(self) -> list[str]:
        """Return the names of the rows that belong to none of the images."""
        unused = self._done == WRITTEN
        unused[self._row_of[self._row_of >= 0]] = False
        _, stored = read_description(self.root, self.kind)
        return [stored[row] for row in np.flatnonzero(unused).tolist()]

    def read_row(self, index: int) -> dict[str, np.ndarray]:
        """Return the arrays of image `index`, which is not missing. Raise UserError if they are damaged."""
        row = int(self._row_of[index])
        arrays = self._rows.read(row, int(self._crc32[row])) if self._done[row] == WRITTEN else None
        if arrays is None:
            raise UserError(f"{self.source(index)}, row {row}, is damaged (crc32 is wrong): {REMEDY}")
        return arrays

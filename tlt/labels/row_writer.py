"""Writes an archive row by row, in any order, from any number of processes, each of which may be killed.

The crc32 of a row and its "done" are written last, so the same command run again finds the rows that are still to
write. The finished files depend on the rows only, not on the order or the processes that wrote them.
"""

import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np

from tlt.errors import UserError
from tlt.io.files import os_errors_as, write_whole
from tlt.io.names import Names
from tlt.io.output_folder import META_NAME, OutputFolder
from tlt.io.text import printable
from tlt.labels.rows import ABSENT, WRITTEN, ArchiveKind, Column, Info, Rows, all_columns, names_crc


class RowWriter(Generic[Info]):
    """Writes an archive into a folder, which is created if it does not exist. Raises UserError if it holds something
    else or another archive, or can't be written.

    Args:
        info: The description that all rows share, with what is known before they are made.
        names: The image path of every row, or its label file (.pt) if the image is not known.
        overwrite: First remove the archive in this folder, complete or not, and nothing else.
        first: Whether this process creates the archive; False in the other processes of the command.
        made_by: Other settings that must be equal for continuing, and what identifies the source of the rows.
    """

    kind: ArchiveKind[Info]
    found_out: tuple[str, ...] = ("skipped",)  # fields of the description that are known at the end
    other_files: tuple[str, ...] = ()  # besides the columns

    def __init__(
        self,
        root: str | Path,
        info: Info,
        names: Sequence[str],
        overwrite: bool = False,
        first: bool = True,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(root)
        self.info = info
        self._made_by = made_by or {}
        self.names = names if isinstance(names, Names) else Names(names)
        with self.writing():
            self._folder = self._begin(overwrite) if first else None
            # Whether the same command has finished this archive before. Then rows must not be written.
            self.complete = self._folder is not None and self._folder.complete
            self._rows = Rows(root, self.kind, info, len(names), writable=not self.complete)

    def pending(self) -> list[int]:
        """Return the rows that are not written yet. Rows marked as done are read and checked again."""
        done, crc32 = self._rows.states()
        for row in np.flatnonzero(done == WRITTEN).tolist():
            if self._rows.read(row, int(crc32[row])) is None:
                done[row] = 0
        return np.flatnonzero(done != WRITTEN).tolist()

    def write_row(self, row: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a row by column. Raise UserError if the disk is full."""
        with self.writing():
            self._rows.write(row, arrays, WRITTEN)

    def write_absent(self, row: int) -> None:
        """Mark a row as having no content, because its image is unreadable."""
        empty = {name: np.zeros(shape, np.uint8) for name, (shape, _) in self.kind.columns(self.info).items()}
        with self.writing():
            self._rows.write(row, empty, ABSENT)

    def written_rows(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield number and arrays of each row but the absent ones, after checking it. Raise UserError if a row is
        missing or damaged."""
        done, crc32 = self._rows.states()
        for row in range(len(self.names)):
            arrays = self._rows.read(row, int(crc32[row]))
            if arrays is None or done[row] not in (WRITTEN, ABSENT):
                raise UserError(
                    f"OUT {printable(str(self.root))}: row {row} reads other than it was written: is the disk damaged?"
                )
            if done[row] == WRITTEN:
                yield row, arrays

    def mark_complete(self, more: Mapping[str, Any], **found_out: Any) -> None:
        """Mark the archive complete and close it, when every row has been checked. `more` and `found_out`, fields of
        the description, are recorded. Raise UserError if writing fails."""
        assert self._folder is not None
        self.info = replace(self.info, **found_out)
        # With the checksum, meta.json differs if the rows differ.
        checksum = zlib.crc32(self._rows.states()[1].tobytes())
        with self.writing():
            for column in self._rows.columns.values():
                column.sync()
            self._folder.finish({**asdict(self.info), f"{self.kind.all}_crc32": checksum, **more})
        self.close()

    def close(self) -> None:
        """Release the folder."""
        if self._folder is not None:
            self._folder.close()

    def _begin(self, overwrite: bool) -> OutputFolder:
        """Write meta.json, then create the files that are missing or that an interrupted earlier run left cut."""
        block = np.frombuffer(self.names.block, np.uint8)
        ends = np.asarray(self.names.ends, np.int64)
        described = {key: value for key, value in asdict(self.info).items() if key not in self.found_out}
        settings = {"format": self.kind.format, **self._made_by, **described}
        settings |= {"records": len(self.names), "names_crc32": names_crc(block, ends)}
        columns = all_columns(self.kind.columns(self.info))
        files = [f"{name}.npy" for name in (*columns, "names", "name_ends")] + [*self.other_files]
        folder = OutputFolder(self.root, META_NAME, settings, files, overwrite)
        if folder.complete:
            return folder
        for name, array in (("names", block), ("name_ends", ends)):
            np.save(content := io.BytesIO(), array)
            write_whole(self.root / f"{name}.npy", content.getvalue())
        for name, (shape, dtypes) in columns.items():
            path = self.root / f"{name}.npy"
            shape = (len(self.names), *shape)
            try:
                Column(str(path), shape, dtypes, self.kind.what)
            except UserError:
                np.lib.format.open_memmap(path, "w+", dtypes[0], shape, version=(1, 0))  # all zeros
        return folder

    def writing(self) -> AbstractContextManager[None]:
        """Turn an OSError inside the block into a UserError that says what to do."""
        remedy = "make room and run the same command again"
        return os_errors_as(
            lambda e: f"OUT {printable(str(e.filename or self.root))} can't be written ({e.strerror}); {remedy}"
        )

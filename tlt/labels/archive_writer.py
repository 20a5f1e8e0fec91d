"""Writes a label archive row by row, in any order, from any number of processes, each of which may be killed.

The crc32 of a row and its "done" are written last, so the same command run again finds the rows that are still to
write. The finished files depend on the rows only, not on the order or the processes that wrote them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tlt.errors import UserError
from tlt.io.files import os_errors_as, write_whole
from tlt.io.names import Names
from tlt.io.output_folder import OutputFolder
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.archive import FORMAT, LABEL, META_NAME, NO_LABEL, Column, Rows, column_types, names_crc
from tlt.labels.label_info import Agreement, LabelInfo


class ArchiveWriter:
    """Writes an archive into a folder, which is created if it does not exist. Raises UserError if it holds something
    else or another archive, or can't be written.

    Args:
        info: The description that all maps share, with what is known before they are made.
        names: The image path of every row, or its label file (.pt) if the image is not known.
        overwrite: First remove the archive in this folder, complete or not, and nothing else.
        first: Whether this process creates the archive; False in the other processes of the command.
        made_by: Other settings that must be equal for continuing, and what identifies the source of the labels.
    """

    def __init__(
        self,
        root: str | Path,
        info: LabelInfo,
        names: Sequence[str],
        overwrite: bool = False,
        first: bool = True,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(root)
        self.info = info
        self._made_by = made_by or {}
        self.names = names if isinstance(names, Names) else Names(names)
        with self._writing():
            self._folder = self._begin(overwrite) if first else None
            # Whether the same command has finished this archive before. Then rows must not be written.
            self.complete = self._folder is not None and self._folder.complete
            self._rows = Rows(root, info, len(names), writable=not self.complete)

    def pending(self) -> list[int]:
        """Return the rows that have no label yet. Rows marked as done are read and checked again."""
        done, crc32 = self._rows.states()
        for row in np.flatnonzero(done == LABEL).tolist():
            if self._rows.read(row, int(crc32[row])) is None:
                done[row] = 0
        return np.flatnonzero(done != LABEL).tolist()

    def holds(self, row: int, label_map: LabelMap) -> bool:
        """Return whether this map is the one that was written into a row."""
        stored: Any = self._rows.read(row, int(self._rows.states()[1][row]))
        return all(np.array_equal(getattr(stored, name), getattr(label_map, name)) for name in ("ids", "values"))

    def write(self, row: int, label_map: LabelMap) -> None:
        """Write a map into a row. Raise UserError if the map is invalid or has another shape, or the disk is full."""
        info = self.info
        label_map.validate(info.num_classes)
        if label_map.shape != info.shape:
            raise UserError(
                f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the archive's is {info.shape}; make it "
                "again with the others' settings"
            )
        if label_map.ids.max() > np.iinfo(self._rows.columns["ids"].dtype).max:
            raise UserError(
                f"{label_map.source}: class id {label_map.ids.max()}, but nothing says that there are more than 65,536 "
                "classes: write num_classes into labels.json"
            )
        arrays = {"ids": label_map.ids, "values": label_map.values}
        if info.log_sum_exp:
            assert label_map.log_sum_exp is not None
            arrays["lse"] = label_map.log_sum_exp
        self._write(row, arrays, LABEL)

    def write_absent(self, row: int) -> None:
        """Mark a row as having no label."""
        empty = np.zeros(self.info.shape, np.uint8)
        self._write(row, {"ids": empty, "values": empty, "lse": empty[0]}, NO_LABEL)

    def finish(self, skipped: Sequence[str] = (), classes: npt.ArrayLike | None = None) -> dict[str, Any]:
        """Check every row, mark the archive complete and close it. Return how well the labels name the `classes`, those
        of the rows' images or -1; None if the labels have other classes. `skipped` names the images without a label.
        Raise UserError if a row is missing or damaged, or writing fails."""
        assert self._folder is not None
        tally = Agreement()
        max_id = 0
        truth = np.full(len(self.names), -1) if classes is None else np.asarray(classes)
        done, crc32 = self._rows.states()
        for row in range(len(self.names)):
            label_map = self._rows.read(row, int(crc32[row]))
            if label_map is None or done[row] not in (LABEL, NO_LABEL):
                raise UserError(
                    f"OUT {printable(str(self.root))}: row {row} reads other than it was written: is the disk damaged?"
                )
            if done[row] == LABEL:
                max_id = max(max_id, int(label_map.ids.max()))
                if truth[row] >= 0:
                    tally.add(int(truth[row]), label_map)
        info = replace(self.info, skipped=list(skipped), max_id=max_id)
        # With the checksum, meta.json differs if the labels differ.
        more = {"labels_crc32": zlib.crc32(crc32.tobytes()), "agreement": tally.summary()}
        with self._writing():
            for column in self._rows.columns.values():
                column.sync()
            self._folder.finish({**asdict(info), **more})
        self.close()
        return tally.summary()

    def close(self) -> None:
        """Release the folder."""
        if self._folder is not None:
            self._folder.close()

    def _begin(self, overwrite: bool) -> OutputFolder:
        """Write meta.json, then create the files that are missing or that an interrupted earlier run left cut."""
        block = np.frombuffer(self.names.block, np.uint8)
        ends = np.asarray(self.names.ends, np.int64)
        described = {key: value for key, value in asdict(self.info).items() if key not in ("skipped", "max_id")}
        settings = {"format": FORMAT, **self._made_by, **described}
        settings |= {"records": len(self.names), "names_crc32": names_crc(block, ends)}
        columns = ("values", "ids", "lse", "crc32", "done", "names", "name_ends")
        folder = OutputFolder(self.root, META_NAME, settings, [f"{name}.npy" for name in columns], overwrite)
        if folder.complete:
            return folder
        for name, array in (("names", block), ("name_ends", ends)):
            np.save(content := io.BytesIO(), array)
            write_whole(self.root / f"{name}.npy", content.getvalue())
        for name, (shape, dtypes) in column_types(self.info, len(self.names)).items():
            path = self.root / f"{name}.npy"
            try:
                Column(str(path), shape, dtypes)
            except UserError:
                large_ids = name == "ids" and (self.info.num_classes or 0) > 2**16
                np.lib.format.open_memmap(path, "w+", dtypes[large_ids], shape, version=(1, 0))  # all zeros
        return folder

    def _write(self, row: int, arrays: dict[str, np.ndarray], state: int) -> None:
        with self._writing():
            self._rows.write(row, arrays, state)

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room and run the same command again"
        return os_errors_as(
            lambda e: f"OUT {printable(str(e.filename or self.root))} can't be written ({e.strerror}); {remedy}"
        )

"""Writing a label archive, row by row, in any order, by any number of processes that may be killed at any time.

A row is written with its crc32 and its "done" last, so the same command finds what is left to do. The finished files
are a function of the rows alone, not of who wrote them when.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tlt.errors import UserError
from tlt.io.files import write_whole
from tlt.io.names import Names
from tlt.io.output_folder import OutputFolder
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.agreement import Agreement
from tlt.labels.archive import FORMAT, LABEL, META_NAME, NO_LABEL, Column, Rows, column_types, crc_of, names_crc
from tlt.labels.label_info import LabelInfo


class ArchiveWriter:
    """An archive that is being written.

    Args:
        root: Its folder; made if need be.
        info: What the maps have in common, as far as it is known before they are made.
        names: Image path of every row, or its label file (.pt) where the image is not known.
        overwrite: Begin anew: the archive that is there, complete or not, is removed, and nothing else.
        first: False in the other processes of the command that has begun to write it.
        large_ids: There may be class ids above 65,535.

    Attributes:
        complete: The same command has written the archive before; then no row may be written.
        begun: The same command has begun to write it before.

    Raises:
        UserError: The folder holds something else, another archive, or can't be written.
    """

    def __init__(
        self,
        root: str | Path,
        info: LabelInfo,
        names: Sequence[str],
        overwrite: bool = False,
        first: bool = True,
        large_ids: bool = False,
    ) -> None:
        self.root, self.info, self._large_ids = Path(root), info, large_ids
        self.names = names if isinstance(names, Names) else Names(names)
        self.complete = self.begun = False
        try:
            self._folder = self._begin(overwrite) if first else None
            self.rows = Rows(str(root), info, len(names), writable=not self.complete)
        except OSError as error:
            raise self._unwritable(error) from error

    def pending(self, step: Callable[[], None] = lambda: None) -> list[int]:
        """The rows that have no label yet; `step` is called once per row."""
        rows = []
        for row in range(len(self.names)):
            if not (self.complete or (self.rows.state(row) == LABEL and self._read(row) is not None)):
                rows.append(row)
            step()
        return rows

    def write(self, row: int, label_map: LabelMap) -> None:
        """Write a map into a row.

        Raises:
            UserError: The map can't be trained on, is of another shape, or the disk is full.
        """
        info, ids = self.info, self.rows.columns["ids"]
        label_map.validate(info.num_classes)
        if label_map.shape != info.shape:
            raise UserError(
                f"{label_map.source}: shape (k, h, w) = {label_map.shape}, but the archive's is {info.shape}; make it "
                "again with the others' settings"
            )
        if label_map.ids.max() > np.iinfo(ids.dtype).max:
            raise UserError(
                f"{label_map.source}: class id {label_map.ids.max()}, but the first label is in a number format of few "
                "classes: store all labels in one format, such as float32"
            )
        contents = {"ids": label_map.ids, "values": label_map.values}
        if info.log_sum_exp:
            assert label_map.log_sum_exp is not None
            contents["lse"] = label_map.log_sum_exp
        self._write(
            row,
            {name: array.astype(self.rows.columns[name].dtype).tobytes() for name, array in contents.items()},
            LABEL,
        )

    def write_absent(self, row: int) -> None:
        """Write that a row has no label."""
        columns = self.rows.columns
        self._write(
            row, {name: bytes(columns[name].row_bytes) for name in columns if name not in ("crc32", "done")}, NO_LABEL
        )

    def agreement(self, classes: npt.ArrayLike) -> dict[str, Any]:
        """How well the labels name `classes`, one per row, -1: not known (`Agreement.summary`). Raises UserError."""
        tally = Agreement()
        for found, class_id in zip(self._maps(), np.asarray(classes).tolist(), strict=True):
            if found is not None and class_id >= 0:
                tally.add(class_id, found)
        return tally.summary()

    def finish(self, skipped: Sequence[str] = (), agreement: Mapping[str, Any] | None = None) -> None:
        """Read every row again and close the archive.

        Args:
            skipped: Names of images without a label.
            agreement: To be recorded.

        Raises:
            UserError: A row is missing or damaged, or the disk fails.
        """
        assert self._folder is not None
        max_id = max((int(found.ids.max()) for found in self._maps() if found is not None), default=0)
        try:
            for column in self.rows.columns.values():
                column.sync()
            info = replace(self.info, skipped=list(skipped), max_id=max_id)
            checksums = zlib.crc32(
                self.rows.columns["crc32"].whole().tobytes()
            )  # so that meta.json differs where labels do
            self._folder.finish({**asdict(info), "labels_crc32": checksums, "agreement": dict(agreement or {})})
        except OSError as error:
            raise self._unwritable(error) from error
        self.close()

    def close(self) -> None:
        """Release the folder."""
        if self._folder is not None:
            self._folder.close()

    def _begin(self, overwrite: bool) -> OutputFolder:
        """Write meta.json first, then create the files that are missing or were cut while they were created."""
        block, ends = np.frombuffer(self.names.block, np.uint8), np.asarray(self.names.ends, np.int64)
        described = {key: value for key, value in asdict(self.info).items() if key not in ("skipped", "max_id")}
        settings = {"format": FORMAT, **described, "records": len(self.names), "names_crc32": names_crc(block, ends)}
        columns = ("values", "ids", "lse", "crc32", "done", "names", "name_ends")
        folder = OutputFolder(self.root, META_NAME, settings, [f"{name}.npy" for name in columns], overwrite)
        self.begun, self.complete = folder.begun, folder.complete
        if not folder.complete:
            for name, array in (("names", block), ("name_ends", ends)):
                np.save(content := io.BytesIO(), array)
                write_whole(self.root / f"{name}.npy", content.getvalue())
            for name, (shape, dtypes) in column_types(self.info, len(self.names)).items():
                Column.create(self.root / f"{name}.npy", shape, dtypes[self._large_ids and name == "ids"])
        return folder

    def _maps(self) -> Iterator[LabelMap | None]:
        """The map in every row, None in one without a label. Raises UserError: a row is missing or damaged."""
        for row in range(len(self.names)):
            state, found = self.rows.state(row), self._read(row)
            if found is None or state not in (LABEL, NO_LABEL):
                raise UserError(
                    f"OUT {printable(str(self.root))}: row {row} reads other than it was written: is the disk damaged?"
                )
            yield LabelMap(found[1], found[0].astype(np.int32)) if state == LABEL else None

    def _read(self, row: int) -> list[np.ndarray] | None:
        return self.rows.read(row, self.rows.crc32(row))

    def _write(self, row: int, contents: dict[str, bytes], state: int) -> None:
        try:
            for name, data in contents.items():
                self.rows.columns[name].write(row, data)
            self.rows.columns["crc32"].write(row, crc_of(list(contents.values())).to_bytes(4, "little"))
            self.rows.columns["done"].write(row, bytes([state]))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        where = printable(str(error.filename or self.root))
        return UserError(f"OUT {where} can't be written ({error.strerror}); make room and run the same command again")

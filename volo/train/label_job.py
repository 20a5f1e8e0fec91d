"""Writing label maps: finds those that exist, writes the missing ones, and marks the whole as complete.

A tree: OUT/<class>/<name>.pt     written one by one, each in one step
        OUT/labels.partial.json   how the maps are made, from the start, so that no other annotator continues the tree
        OUT/labels.json           the same, once all maps exist
An archive: see `tlt.labels.archive_format`.

Every rank creates its own job, rank 0 first, and writes the rows it is given. Only rank 0 discards old maps
(`overwrite`), looks for pending rows, and finishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.io.names import leads_out
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.agreement import Agreement
from tlt.labels.archive import is_archive
from tlt.labels.archive_format import FILE_DTYPES, MANIFEST_NAME, PARTIAL_NAME, Form, Manifest
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.label_files import label_names
from tlt.labels.metadata import METADATA_NAME, TreeMetadata
from tlt.labels.tree import label_dtype, read_map, refuse_other_files, write_map

TREE_PARTIAL_NAME = "labels.partial.json"


class LabelJob:
    """The label maps of one image folder.

    Args:
        root: The folder for the maps, created if missing.
        folder: The images.
        metadata: How the maps are made.
        overwrite: Replace existing maps, whatever made them; nothing else is replaced.

    Attributes:
        found: Whether there may be maps of an earlier run.
        origin_unknown: There are such maps, but no record of how they were made.

    Raises:
        UserError: The existing maps were made in another way, or nothing can be written.
    """

    found = origin_unknown = False

    def __init__(self, root: str | Path, folder: ImageSource, metadata: TreeMetadata, overwrite: bool = False) -> None:
        self.root, self.folder, self.metadata, self.overwrite = Path(root), folder, metadata, overwrite
        self._labels = label_names(folder.paths)
        if (outside := next(filter(leads_out, self._labels), None)) is not None:
            raise UserError(
                f"the label {printable(outside)} of an image of {printable(folder.root)} is outside of OUT: rename it"
            )
        try:
            self._open()
        except OSError as error:
            path = printable(str(error.filename or self.root))
            raise UserError(f"OUT: {path} can't be written ({error.strerror}); choose another folder") from error

    def pending(self, progress: Callable[[], None]) -> list[int]:
        """Return the rows whose map is missing, damaged or has another shape; calls `progress` once per row."""
        rows = []
        for row in range(len(self._labels)):
            if not self._is_made(row):
                rows.append(row)
            progress()
        return rows

    def write(self, row: int, label_map: LabelMap, log_sum_exp: np.ndarray, size: tuple[int, int]) -> None:
        """Write the map of one image.

        Args:
            log_sum_exp: (h, w) of all the annotator's logits.
            size: Width and height of the image.

        Raises:
            UserError: A logit is NaN or infinite, or the disk is full.
        """
        if not np.isfinite(label_map.values).all():
            raise UserError(
                f"the annotator's logits for {printable(self.folder.path(row))} are NaN or beyond half precision: "
                "check its weights, or leave out --amp"
            )
        self._write(row, label_map, log_sum_exp, size)

    def finish(self, skipped: Sequence[int]) -> list[str]:
        """Mark the maps as complete, except for the images `skipped`, which can't be read.

        Returns:
            Lines for the log.

        Raises:
            UserError: A map is missing or damaged, or the disk is full.
        """
        paths = sorted(self.folder.paths[row] for row in skipped)
        return self._finish(skipped, replace(self.metadata, skipped=paths))

    def _open(self) -> None:
        raise NotImplementedError

    def _is_made(self, row: int) -> bool:
        raise NotImplementedError

    def _write(self, row: int, label_map: LabelMap, log_sum_exp: np.ndarray, size: tuple[int, int]) -> None:
        raise NotImplementedError

    def _finish(self, skipped: Sequence[int], metadata: TreeMetadata) -> list[str]:
        raise NotImplementedError

    def _compare(self, recorded: TreeMetadata) -> None:
        old, new = ({**asdict(each), **each.annotator} for each in (recorded, self.metadata))
        for key in sorted(old | new, key="area".__eq__):  # in order; `area`, which follows from the others, last
            if key not in ("annotator", "skipped") and old.get(key) != new.get(key):
                raise UserError(
                    f"{printable(str(self.root))} holds labels made with {key} {_shown(old.get(key))}, this command "
                    f"says {_shown(new.get(key))}: choose another OUT, or --overwrite"
                )


class TreeJob(LabelJob):
    """One label file per image."""

    def _open(self) -> None:
        if is_archive(self.root):
            raise UserError(
                f"OUT {printable(str(self.root))} is a label archive: add --format archive, or choose another folder"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        for name in {os.path.dirname(label) for label in self._labels}:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.found = any((self.root / label).is_file() for label in self._labels)
        complete, begun = (TreeMetadata.read(self.root / name) for name in (METADATA_NAME, TREE_PARTIAL_NAME))
        recorded = complete or begun
        if recorded is None:
            shape = None if self.overwrite else (self.metadata.k, *self.metadata.grid)
            refuse_other_files(self.root, self._labels, shape)
        if self.overwrite:
            (self.root / METADATA_NAME).unlink(missing_ok=True)
        elif recorded is not None and self.found:
            self._compare(recorded)
        self.metadata.write(self.root / TREE_PARTIAL_NAME)
        self.origin_unknown = recorded is None and self.found

    def _is_made(self, row: int) -> bool:
        if self.overwrite:
            return False
        try:
            shape = read_map(self.root / self._labels[row], self.metadata.num_classes).shape
        except MachineFault:
            raise
        except UserError:
            return False
        return shape == (self.metadata.k, *self.metadata.grid)

    def _write(self, row: int, label_map: LabelMap, log_sum_exp: np.ndarray, size: tuple[int, int]) -> None:
        path = self.root / self._labels[row]
        try:
            write_map(path, label_map, self.metadata.num_classes)
        except (OSError, RuntimeError) as error:  # torch.save hides a full disk in a RuntimeError
            raise UserError(
                f"{printable(str(path))} can't be written ({error}); make room and run the same command again"
            ) from error

    def _finish(self, skipped: Sequence[int], metadata: TreeMetadata) -> list[str]:
        metadata.write(self.root / METADATA_NAME)
        (self.root / TREE_PARTIAL_NAME).unlink(missing_ok=True)
        return []


class ArchiveJob(LabelJob):
    """One archive, as `tlt pack --images` would make it from the tree, with the log-sum-exp of every place.

    Args:
        log_sum_exp: Write the log-sum-exp.
        Others: as of `LabelJob`.

    Attributes:
        complete: The archive existed already, with all its rows.
    """

    complete = False

    def __init__(
        self,
        root: str | Path,
        folder: ImageSource,
        metadata: TreeMetadata,
        overwrite: bool = False,
        log_sum_exp: bool = True,
    ) -> None:
        self.log_sum_exp = log_sum_exp
        super().__init__(root, folder, metadata, overwrite)

    def _open(self) -> None:
        shown, metadata, names = printable(str(self.root)), self.metadata, self.folder.paths
        if any((self.root / name).exists() for name in (METADATA_NAME, TREE_PARTIAL_NAME)):
            raise UserError(
                f"OUT {shown} is a tree of label files: leave out --format archive, or choose another folder"
            )
        header = make_header(
            (metadata.k, *metadata.grid),
            metadata.num_classes,
            names,
            self._labels,
            metadata.area,
            metadata,
            log_sum_exp=self.log_sum_exp,
        )
        manifest = self._recorded()
        self.found = manifest is not None
        if manifest is not None and manifest.header.labels_json is not None:
            self._compare(TreeMetadata.parse(manifest.header.labels_json, f"{self.root}/{MANIFEST_NAME}"))
        self.complete = manifest is not None and bool(manifest.files)
        if manifest is None or not self.complete:
            self._writer = ArchiveWriter(self.root, header, names, self._labels, self.overwrite)
        elif replace(manifest.header, labels_json=header.labels_json) != header:
            raise UserError(
                f"OUT {shown} is a label archive of other images, or another form of one: choose another folder, or "
                "--overwrite"
            )

    def _recorded(self) -> Manifest | None:
        if self.overwrite:
            return None
        paths = [self.root / name for name in (MANIFEST_NAME, PARTIAL_NAME)]
        return next((Manifest.read(path) for path in paths if path.is_file()), None)

    def _is_made(self, row: int) -> bool:
        return self.complete or self._writer.has_label(row)

    def _write(self, row: int, label_map: LabelMap, log_sum_exp: np.ndarray, size: tuple[int, int]) -> None:
        dtype = str(label_dtype(self.metadata.num_classes)).removeprefix("torch.")
        form = FILE_DTYPES.index(dtype) | Form.TEMPORARY_NAME  # of the file that `write_map` would have written
        self._writer.write(row, label_map, size, form, log_sum_exp if self.log_sum_exp else None)

    def _finish(self, skipped: Sequence[int], metadata: TreeMetadata) -> list[str]:
        if self.complete:
            (self.root / PARTIAL_NAME).unlink(missing_ok=True)
            return [f"{printable(str(self.root))} was complete already"]
        for row in skipped:
            self._writer.write_absent(row)
        tally = None if metadata.class_names is None else Agreement()
        self._writer.finish(metadata.text(), tally, self.folder.classes)
        return [tally.text()] if tally else []


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."

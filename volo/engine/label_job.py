"""A folder of label maps in the making: what is done already, what belongs together, what says that it is complete.

OUT/<class>/<name>.pt     written one by one, each whole or not there
OUT/labels.partial.json   how they are made, from the start; so that another annotator can't finish the tree
OUT/labels.json           the same, when all are there
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from tlt.data.folder import ImageFolder, printable
from tlt.errors import UserError
from tlt.label_files import label_names
from tlt.label_map import LabelMap
from tlt.store import METADATA_NAME, TreeMetadata, read_map, write_map

PARTIAL_NAME = "labels.partial.json"


class LabelJob:
    """The label maps of one image folder.

    Args:
        root: The tree; made if need be.
        folder: The images.
        metadata: How the maps are made.
        overwrite: Make maps anew that are there already, whoever made them.

    Attributes:
        found: Label files of this folder's images that were there before.
        origin_unknown: There were some, but nothing that says who made them.

    Raises:
        UserError: The tree was made, or begun, in another way, or can't be written to.
    """

    def __init__(self, root: str | Path, folder: ImageFolder, metadata: TreeMetadata, overwrite: bool = False) -> None:
        self.root, self.folder, self.metadata, self.overwrite = Path(root), folder, metadata, overwrite
        self._labels = label_names(folder.paths)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in {os.path.dirname(label) for label in self._labels}:
                (self.root / name).mkdir(parents=True, exist_ok=True)
            self.found = sum((self.root / label).is_file() for label in self._labels)
            recorded = self._recorded()
            if overwrite:
                (self.root / METADATA_NAME).unlink(missing_ok=True)
            elif recorded is not None and self.found:
                self._compare(recorded)
            self.metadata.write(self.root / PARTIAL_NAME)
        except OSError as error:
            path = printable(str(error.filename or self.root))
            raise UserError(f"OUT: {path} can't be written ({error.strerror}); choose another folder") from error
        self.origin_unknown = recorded is None and self.found > 0

    def pending(self, progress: Callable[[], None]) -> list[int]:
        """Rows of the folder whose map is not there, is damaged or has another shape; calls `progress` once per row."""
        rows = []
        for row in range(len(self._labels)):
            if self.overwrite or not self._is_valid(row):
                rows.append(row)
            progress()
        return rows

    def write(self, row: int, values: Tensor, ids: Tensor) -> None:
        """Write the map of one image: values and ids (k, h, w), on the CPU.

        Raises:
            UserError: A logit is NaN or infinite, or the disk is full.
        """
        label_map = LabelMap(values.numpy(), ids.numpy())
        path = self.root / self._labels[row]
        if not np.isfinite(label_map.values).all():
            raise UserError(
                f"the annotator's logits for {printable(self.folder.path(row))} are NaN or beyond half precision: "
                "check its weights, or leave out --amp"
            )
        try:
            write_map(path, label_map, self.metadata.num_classes)
        except (OSError, RuntimeError) as error:  # torch.save hides a full disk in a RuntimeError
            raise UserError(
                f"{printable(str(path))} can't be written ({error}); make room and run the same command again"
            ) from error

    def finish(self, skipped: list[str]) -> None:
        """Say that the tree is complete but for the images `skipped`, which can't be read."""
        replace(self.metadata, skipped=sorted(skipped)).write(self.root / METADATA_NAME)
        (self.root / PARTIAL_NAME).unlink(missing_ok=True)

    def _is_valid(self, row: int) -> bool:
        try:
            shape = read_map(self.root / self._labels[row], self.metadata.num_classes).shape
        except UserError:
            return False
        return shape == (self.metadata.k, *self.metadata.grid)

    def _recorded(self) -> TreeMetadata | None:
        return TreeMetadata.read(self.root / METADATA_NAME) or TreeMetadata.read(self.root / PARTIAL_NAME)

    def _compare(self, recorded: TreeMetadata) -> None:
        old, new = ({**asdict(each), **each.annotator} for each in (recorded, self.metadata))
        for key in old | new:  # in order
            if key not in ("annotator", "skipped") and old.get(key) != new.get(key):
                raise UserError(
                    f"{printable(str(self.root))} holds labels made with {key} {_shown(old.get(key))}, this command "
                    f"says {_shown(new.get(key))}: choose another OUT, or --overwrite"
                )


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Token labels that lie beside the images in tar shards, one small safetensors file each (`tlt pack-images`).

| tensor | | |
|---|---|---|
| `values` | float16 (k, h, w) | logits |
| `ids` | uint16 or int32 (k, h, w) | class ids |
| `log_sum_exp` | float32 (h, w), where the packed archive had it | of all the annotator's logits |
| `area` | float32 (4) | x0, y0, x1, y1: share of the image that the map covers; -1: only its size tells |
| `size` | int32 (2) | width and height of the image the map was made of; 0: not known |
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from tlt.data.sources.folder import TRAIN_SPLITS
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.records import RecordTable
from tlt.data.sources.tar_shards import LABELS, TABLE
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.labels.label_files import usual_label_name
from tlt.labels.records import MapForm, Record


def shard_folder(path: str | Path) -> str | None:
    """The folder of the shards that hold labels: `path` itself or the training split in it; None: it has neither."""
    for folder in [os.fspath(path), *(os.path.join(path, split) for split in TRAIN_SPLITS)]:
        if os.path.isfile(os.path.join(folder, f"{TABLE}.json")):
            return folder
    return None


class ShardReader:
    """The label maps of a list of images in tar shards, matched by name. A `tlt.labels.records.Reader`.

    Args:
        names: Image paths relative to the image folder.

    Raises:
        UserError: No index, a shard that doesn't fit it, or no labels in them.
    """

    def __init__(self, root: str, names: Names) -> None:
        self.root, self._names = root, names
        if not os.path.isfile(os.path.join(root, f"{LABELS}.json")):
            raise UserError(
                f"--token-label-data {printable(root)} are shards without labels: pack them with "
                "`tlt pack-images --labels LABELS`"
            )
        self.table = RecordTable(os.path.join(root, LABELS))
        self.table.check_files()
        said = dict(self.table.description["about"])
        self._identity = str(said.pop("identity"))
        said |= {name: tuple(said[name]) for name in ("shape", "area") if isinstance(said[name], list)}
        self.form = MapForm(**said)
        self._row_of = self._match(names)  # (images,) int64 row of the table, -1: none; None: row i is image i

    def identity(self) -> bytes:
        return self._identity.encode(errors="surrogateescape")

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def usual_label(self, name: str) -> str:
        return usual_label_name(name)

    def record(self, index: int) -> Record:
        row = index if self._row_of is None else int(self._row_of[index])
        try:
            return Record(**load(bytes(self.table.read(row))))
        except (BadImage, SafetensorError, TypeError) as error:
            raise UserError(f"{self.source(index)}: {error}") from error

    def extra(self) -> list[str]:
        used = np.arange(len(self._names)) if self._row_of is None else self._row_of
        return [self.table.names[row] for row in np.setdiff1d(np.arange(len(self.table.names)), used).tolist()]

    def damaged_files(self) -> list[str]:
        return self.table.damaged_files()

    def _match(self, names: Names) -> np.ndarray | None:
        self.missing: set[int] = set()
        if names == self.table.names:
            return None
        row_of = {name: row for row, name in enumerate(self.table.names)}
        rows = np.array([row_of.get(name, -1) for name in names], np.int64)
        self.missing = set(np.flatnonzero(rows < 0).tolist())
        return rows

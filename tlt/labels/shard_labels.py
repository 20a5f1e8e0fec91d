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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from tlt.data.sources.folder import TRAIN_SPLITS
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.shards import INDEX_NAME, ShardIndex
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import LabelMap
from tlt.labels.label_store import LabelStore
from tlt.labels.recorded_labels import MapForm, RecordedLabels


def shard_folder(path: str | Path) -> str | None:
    """The folder of the shards that hold labels: `path` itself or the training split in it; None: it has neither."""
    for folder in [os.fspath(path), *(os.path.join(path, split) for split in TRAIN_SPLITS)]:
        if os.path.isfile(os.path.join(folder, INDEX_NAME)):
            return folder
    return None


def describe_labels(labels: LabelStore, max_id: int) -> dict[str, Any]:
    """What an index says of the labels that were packed."""
    text = labels.metadata.text() if labels.metadata else None
    log_sum_exp = isinstance(labels, RecordedLabels) and labels.form.log_sum_exp
    form = MapForm(labels.shape, max_id, labels.area, log_sum_exp, text)
    return {**asdict(form), "identity": labels.identity().decode(errors="surrogateescape")}


def label_record(labels: LabelStore, index: int, size: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """The map of image `index` as it is written beside it. `size`: of the image, where it isn't the one labelled.

    Raises:
        UserError: The map is damaged, or can't be trained on.
    """
    if isinstance(labels, RecordedLabels):
        record = {name: np.ascontiguousarray(array) for name, array in labels.record(index).items()}
    else:
        # (1, 1): a map of the centred square is placed by the image's size, when that is known.
        whole, area = labels.load(index, 1, 1), labels.area
        bounds = (-1.0, -1.0, -1.0, -1.0) if area == "center" else whole.area
        record = {
            "values": whole.values,
            "ids": whole.ids.astype(np.uint16 if whole.ids.max() < 2**16 else np.int32),
            "area": np.array(bounds, np.float32),
            "size": np.zeros(2, np.int32),
        }
    classes = labels.metadata.num_classes if labels.metadata else labels.num_classes
    shape = LabelMap(record["values"], record["ids"]).validate(classes, labels.source(index)).shape
    if shape != labels.shape:
        raise UserError(f"{labels.source(index)}: shape (k, h, w) = {shape}, but the others' is {labels.shape}")
    if size is not None:
        record["size"] = np.array(size, np.int32)
    return record


class ShardLabels(RecordedLabels):
    """The label maps of a list of images, out of tar shards. Images are matched by name, as the index has it.

    Args and attributes: those of `LabelStore`, and `label_tail` (see `tlt.labels.recorded_labels`).

    Raises:
        UserError: No index, or a shard doesn't fit it; no labels in them; made for other classes or images; without the
            log-sum-exp that `"exact"` needs; with `"stop"` also if any image has no label.
    """

    def __init__(
        self,
        root: str | Path,
        names: Sequence[str],
        area: str | None = None,
        num_classes: int | None = None,
        bad_label: str = "stop",
        class_names: Sequence[str] | None = None,
        published_names: bool = False,
        label_tail: str = "zero",
    ) -> None:
        super().__init__(root, names, num_classes, bad_label)
        shown = f"--token-label-data {printable(self.root)}"
        if published_names:
            raise UserError(f"--compat label-names: {shown} are shards, where each label has its image; leave it out")
        self.index = ShardIndex(os.path.join(self.root, INDEX_NAME))
        if not self.index.labels:
            raise UserError(f"{shown} are shards without labels: pack them with `tlt pack-images --labels LABELS`")
        self.index.check_shards()
        said = dict(self.index.description["labels"])
        self._identity = str(said.pop("identity"))
        said |= {name: tuple(said[name]) for name in ("shape", "area") if isinstance(said[name], list)}
        self._describe(MapForm(**said), self.index.path, area, class_names, label_tail)
        self._row_of = self._match(names)  # (images,) int64 row of the index, -1: none; None: row i is image i
        self._refuse_missing(names)

    def identity(self) -> bytes:
        return self._identity.encode(errors="surrogateescape")

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def record(self, index: int) -> dict[str, np.ndarray]:
        where, row = self.index, index if self._row_of is None else int(self._row_of[index])
        offset, length, crc32 = (where.tensors[f"label_{name}"][row] for name in ("offset", "length", "crc32"))
        try:
            return load(bytes(where.shards.read(int(where.shard[row]), int(offset), int(length), int(crc32))))
        except (BadImage, SafetensorError) as error:
            raise UserError(f"{self.source(index)}: {error}") from error

    def extra(self) -> list[str]:
        there = np.flatnonzero(self.index.tensors["label_length"])
        used = np.arange(len(self._names)) if self._row_of is None else self._row_of
        return [self.index.names[row] for row in np.setdiff1d(there, used).tolist()]

    def damaged_files(self) -> list[str]:
        return self.index.damaged_files()

    def _match(self, names: Sequence[str]) -> np.ndarray | None:
        same = self._names == self.index.names
        row_of = {} if same else {name: row for row, name in enumerate(self.index.names)}
        rows = np.arange(len(names)) if same else np.array([row_of.get(name, -1) for name in names], np.int64)
        missing = (rows < 0) | (self.index.tensors["label_length"][rows] == 0)
        self._missing = set(np.flatnonzero(missing).tolist())
        return None if same else rows

"""Reads token labels stored with the images in tar shards, one small safetensors file each (`tlt pack-images`).

| tensor | | |
|---|---|---|
| `values` | float16 (k, h, w) | logits, or float32 shares |
| `ids` | uint16 or int32 (k, h, w) | class ids |
| `log_sum_exp` | float32 (h, w), if the packed archive had it | over all the annotator's logits |
| `void` | float32 (h, w), with shares alone | the share of each cell that has no class |
"""

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from tlt.data.sources.folder import LABELS, TABLE, TRAIN_SPLITS
from tlt.data.sources.records import RecordImages
from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.names import Names
from tlt.io.text import printable
from tlt.label_map import LabelMap, whole_ids
from tlt.labels.label_info import LabelInfo


def shard_folder(path: str | Path) -> str | None:
    """Return the folder of the shards: `path` itself or the training split in it; None if neither has shards."""
    folders = [os.fspath(path), *(os.path.join(path, split) for split in TRAIN_SPLITS)]
    return next((folder for folder in folders if os.path.isfile(os.path.join(folder, f"{TABLE}.json"))), None)


def label_bytes(label_map: LabelMap) -> bytes:
    """Return the bytes of a map's file in a shard."""
    ids = label_map.ids.astype(np.uint16 if label_map.ids.max() < 2**16 else np.int32)
    tensors = {"values": label_map.values, "ids": ids}
    for name in ("log_sum_exp", "void"):
        if (array := getattr(label_map, name)) is not None:
            tensors[name] = array
    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()})


class ShardReader:
    """Reads the label maps of a list of images from tar shards, matched by the images' paths relative to their folder.
    A `tlt.labels.store.Reader`. Raises UserError if there is no index, a shard does not fit it, or the shards have no
    labels."""

    def __init__(self, root: str, names: Names) -> None:
        self.root = root
        self._names = names
        table = os.path.join(root, f"{LABELS}.json")
        if not os.path.isfile(table):
            raise UserError(
                f"token labels {printable(root)}: these are shards without labels: pack them with "
                "`tlt pack-images --labels LABELS`"
            )
        self.table = RecordImages(os.path.join(root, LABELS))
        with blamed_on(table):
            self.info = LabelInfo.from_json(self.table.about["info"], table)
            self._identity = str(self.table.about["identity"]).encode(errors="surrogateescape")
        self._row_of = self.table.paths.rows_of(names)
        self.missing = set(np.flatnonzero(self._row_of < 0).tolist())

    def identity(self) -> bytes:
        return self._identity

    def source(self, index: int) -> str:
        return f"label of {printable(self._names[index])} in {printable(self.root)}"

    def read(self, index: int) -> LabelMap:
        source = self.source(index)
        with blamed_on(source):
            tensors = load(bytes(self.table.read(int(self._row_of[index]))))
            values = tensors["values"]
            ids = whole_ids(tensors["ids"], source)
        return LabelMap(values, ids, source=source, log_sum_exp=tensors.get("log_sum_exp"), void=tensors.get("void"))

    def extra(self) -> list[str]:
        stored = self.table.paths
        return [stored[row] for row in np.setdiff1d(np.arange(len(stored)), self._row_of).tolist()]

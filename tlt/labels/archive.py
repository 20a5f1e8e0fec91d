"""The label archive: a folder of NumPy files with one row per image (`tlt.labels.rows`).

OUT/meta.json       also has `LabelInfo` and the labels' agreement with the classes of the images
OUT/ids.npy         uint16 (N, k, h, w) class ids, or int32 if there are more than 65,536 classes
OUT/values.npy      float16 (N, k, h, w) logits
OUT/lse.npy         float32 (N, h, w), optional: log-sum-exp of all the annotator's logits
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tlt.io.names import Names
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.rows import ArchiveKind, Columns, RowReader
from tlt.labels.tree import find_labels


def _columns(info: LabelInfo) -> Columns:
    ids = ("<i4", "<u2") if (info.num_classes or 0) > 2**16 else ("<u2", "<i4")
    lse: Columns = {"lse": (info.grid, ("<f4",))} if info.log_sum_exp else {}
    return {"ids": (info.shape, ids), "values": (info.shape, ("<f2",)), **lse}


LABELS = ArchiveKind("label", "volo-tlt label archive, version 2", "`tlt pack`", LabelInfo.from_json, _columns)


def map_in(arrays: Mapping[str, np.ndarray], source: str = "label") -> LabelMap:
    """Return the map in the arrays of a row."""
    ids = arrays["ids"].astype(np.int32)
    lse = arrays.get("lse")
    return LabelMap(arrays["values"].copy(), ids, source=source, log_sum_exp=None if lse is None else lse.copy())


class ArchiveReader(RowReader[LabelInfo]):
    """Reads the maps of a list of images; a `tlt.labels.store.Reader`. A row is found by the image's name if the
    archive has it, else by its label file with the rule of `find_labels`."""

    def __init__(self, root: str, names: Names) -> None:
        super().__init__(root, names, LABELS)

    def _find(self, names: Names, stored: Names) -> np.ndarray:
        rows = super()._find(names, stored)
        if len(without := np.flatnonzero(rows < 0)):
            files = {name for name in stored if name.endswith(".pt")}
            rows[without] = stored.rows_of(find_labels([names[i] for i in without.tolist()], files, self.root))
        return rows

    def read(self, index: int) -> LabelMap:
        return map_in(self.read_row(index), self.source(index))

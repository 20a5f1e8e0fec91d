"""The label archive: a folder of NumPy files with one row per image (`tlt.labels.rows`).

OUT/meta.json       also has `LabelInfo` and the labels' agreement with the classes of the images
OUT/ids.npy         uint16 (N, k, h, w) class ids, or int32 if there are more than 65,536 classes
OUT/values.npy      float16 (N, k, h, w) logits, or float32 shares of a cell's pixels
OUT/void.npy        float32 (N, h, w), with shares alone: the share of each cell that has no class
OUT/lse.npy         float32 (N, h, w), optional: log-sum-exp of all the annotator's logits
"""

from collections.abc import Mapping

import numpy as np

from tlt.io.names import Names
from tlt.label_map import LabelMap
from tlt.labels.label_info import LabelInfo
from tlt.labels.rows import ArchiveKind, Columns, RowReader
from tlt.labels.tree import find_labels


def _columns(info: LabelInfo) -> Columns:
    ids = ("<i4", "<u2") if (info.num_classes or 0) > 2**16 else ("<u2", "<i4")
    per_cell = {"lse": info.log_sum_exp, "void": info.shares}
    values = "<f4" if info.shares else "<f2"
    more: Columns = {name: (info.grid, ("<f4",)) for name, there in per_cell.items() if there}
    return {"ids": (info.shape, ids), "values": (info.shape, (values,)), **more}


LABELS = ArchiveKind("label", "volo-tlt label archive, version 2", "`tlt pack`", LabelInfo.from_json, _columns)


def map_in(arrays: Mapping[str, np.ndarray], source: str = "label") -> LabelMap:
    """Return the map in the arrays of a row."""
    ids = arrays["ids"].astype(np.int32)
    lse, void = (arrays[name].copy() if name in arrays else None for name in ("lse", "void"))
    return LabelMap(arrays["values"].copy(), ids, source=source, log_sum_exp=lse, void=void)


class ArchiveReader(RowReader[LabelInfo]):
    """Reads the maps of a list of images; a `tlt.labels.store.Reader`. A row is found by the image's name if the
    archive has it, else by its label file with the rule of `find_labels`."""

    kind = LABELS

    def _find(self, names: Names, stored: Names) -> np.ndarray:
        rows = super()._find(names, stored)
        if len(without := np.flatnonzero(rows < 0)):
            files = {name for name in stored if name.endswith(".pt")}
            rows[without] = stored.rows_of(find_labels([names[i] for i in without.tolist()], files, self.root))
        return rows

    def read(self, index: int) -> LabelMap:
        return map_in(self.read_row(index), self.source(index))

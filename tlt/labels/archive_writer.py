"""Writes a label archive (`tlt.labels.row_writer`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tlt.errors import UserError
from tlt.label_map import LabelMap
from tlt.labels.archive import LABELS, map_in
from tlt.labels.label_info import Agreement, LabelInfo
from tlt.labels.row_writer import RowWriter


class ArchiveWriter(RowWriter[LabelInfo]):
    """Writes label maps. The arguments are those of `RowWriter`."""

    kind = LABELS
    found_out = ("skipped", "max_id")

    def holds(self, row: int, label_map: LabelMap) -> bool:
        """Return whether this map is the one that was written into a row."""
        stored = self._rows.read(row, int(self._rows.states()[1][row])) or {}
        return all(np.array_equal(stored.get(name, ()), array) for name, array in self._arrays(label_map).items())

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
        self.write_row(row, self._arrays(label_map))

    def _arrays(self, label_map: LabelMap) -> dict[str, np.ndarray]:
        """Return what is stored of a map, by column. Raise UserError if it lacks something."""
        has = {"ids": label_map.ids, "values": label_map.values, "lse": label_map.log_sum_exp, "void": label_map.void}
        arrays = {name: array for name in self._rows.contents if (array := has[name]) is not None}
        if len(arrays) < len(self._rows.contents) or (label_map.void is not None) != self.info.shares:
            raise UserError(f"{label_map.source}: the archive has {', '.join(self._rows.contents)}, this map others")
        return arrays

    def finish(self, skipped: Sequence[str] = (), classes: npt.ArrayLike | None = None) -> dict[str, Any]:
        """Check every row, mark the archive complete and close it. Return how well the labels name the `classes`, those
        of the rows' images or -1; None if the labels have other classes. `skipped` names the images without a label.
        Raise UserError if a row is missing or damaged, or writing fails."""
        tally = Agreement()
        max_id = 0
        truth = np.full(len(self.names), -1) if classes is None else np.asarray(classes)
        for row, arrays in self.written_rows():
            max_id = max(max_id, int(arrays["ids"].max()))
            if truth[row] >= 0:
                tally.add(int(truth[row]), map_in(arrays))
        self.mark_complete({"agreement": tally.summary()}, skipped=list(skipped), max_id=max_id)
        return tally.summary()

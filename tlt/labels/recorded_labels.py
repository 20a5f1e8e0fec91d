"""Label maps as our own writers record them, in archives and beside the images of shards.

`label_tail` is the logit of classes that a cell doesn't list. `"zero"`: 0, as published. `"exact"`: such that they have
the share that the annotator gave them (`tlt.io.tail`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlt.errors import UserError
from tlt.io.tail import relative_to_tail
from tlt.io.text import printable
from tlt.label_map import Area, LabelMap
from tlt.labels.label_store import LabelStore
from tlt.labels.metadata import TreeMetadata

GRID_FIELDS = ("values", "ids", "log_sum_exp")
RECORD_FIELDS = (*GRID_FIELDS, "area", "size")
_HALF_EXPONENT = np.uint16(0x7C00)  # all ones: infinite or not a number
_ASPECT_TOLERANCE = 0.02  # between the image a label was made of and the image now, which may have been made smaller


@dataclass(frozen=True)
class MapForm:
    """What all the records have in common.

    Attributes:
        shape: (k, h, w).
        max_id: The largest class id.
        area: "full", "center" or (x0, y0, x1, y1).
        log_sum_exp: Whether records have it.
        labels_json: How they were made, as text; None: not known.
    """

    shape: tuple[int, int, int]
    max_id: int
    area: str | Area
    log_sum_exp: bool
    labels_json: str | None


class RecordedLabels(LabelStore):
    """Label maps by image index. Constructors call `_describe`."""

    form: MapForm

    def record(self, index: int) -> dict[str, np.ndarray]:
        """What is recorded of image `index`, which is not missing: `values` (k, h, w) float16, `ids` (k, h, w),
        `log_sum_exp` (h, w) float32 where there is one, `area` (4,) float32, -1 where it depends on the image's size,
        and `size` (2,) width and height of the image the map was made of, 0 where not known.

        Raises:
            UserError: It is damaged.
        """
        raise NotImplementedError

    def extra(self) -> list[str]:
        """Labels that belong to none of the images."""
        raise NotImplementedError

    def damaged_files(self) -> list[str]:
        """Files whose sha256 is wrong."""
        raise NotImplementedError

    def load(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        record = self.record(index)
        values = record["values"]
        # Class ids were compared with the largest one when it was recorded, and haven't changed since. Values were
        # looked at too, but not by whatever other program may have written them.
        if np.maximum.reduce(values.view(np.uint16) & _HALF_EXPONENT, axis=None) == _HALF_EXPONENT:
            raise UserError(f"{self.source(index)}: a label value is NaN or infinite; make this label again")
        if self._tail_classes:
            values = self._relative_to_tail(index, values, record["log_sum_exp"])
        x0, y0, x1, y1 = record["area"].tolist()
        if width and height:
            self._compare_size(index, record["size"].tolist(), width, height)
        area = self._area_of(width, height) if self._area_asked or x0 <= -1 else (x0, y0, x1, y1)
        return LabelMap(values.copy(), record["ids"].astype(np.int32), area)

    def log_sum_exp(self, index: int) -> np.ndarray | None:
        """(h, w) float32 log-sum-exp of all the annotator's logits for image `index`; None: it isn't recorded."""
        record = self.record(index)
        return record["log_sum_exp"].copy() if "log_sum_exp" in record else None

    def _describe(
        self, form: MapForm, where: str, area: str | None, class_names: Sequence[str] | None, label_tail: str
    ) -> None:
        """Take over what all records have in common, and compare it with what is asked for. Raises UserError."""
        self.form, self.shape = form, form.shape
        self.metadata = None if form.labels_json is None else TreeMetadata.parse(form.labels_json, where)
        self._compare(class_names)
        self._check_ids()
        self._tail_classes = self._classes_of_tail(label_tail)
        self._area_asked = area is not None
        self._resolve_area(area, form.area)

    def _check_ids(self) -> None:
        if self.num_classes is not None and self.form.max_id >= self.num_classes:
            raise UserError(
                f"--token-label-data {printable(self.root)} has class ids up to {self.form.max_id}, which are not "
                f"in 0..{self.num_classes - 1} (--num-classes {self.num_classes}); were these labels made for other "
                "classes?"
            )

    def _classes_of_tail(self, label_tail: str) -> int:
        """C for `"exact"`, 0 for `"zero"`."""
        if label_tail == "zero":
            return 0
        shown = f"--label-tail {label_tail}: label archive {printable(self.root)}"
        classes = self.num_classes or (self.metadata.num_classes if self.metadata else 0)
        if not self.form.log_sum_exp:
            raise UserError(f"{shown} has no log-sum-exp: make it with `generate_label.py --format archive`")
        if not classes:
            raise UserError(f"{shown} does not say how many classes there are: give --num-classes")
        return classes

    def _relative_to_tail(self, index: int, values: np.ndarray, log_sum_exp: np.ndarray) -> np.ndarray:
        if not np.isfinite(log_sum_exp).all():
            raise UserError(f"{self.source(index)}: a log-sum-exp is NaN or infinite; make this label again")
        # Tensors want memory that they may write to.
        both = torch.from_numpy(values.copy()), torch.from_numpy(log_sum_exp.copy())
        return relative_to_tail(*both, self._tail_classes).numpy()

    def _compare_size(self, index: int, recorded: list[int], width: int, height: int) -> None:
        was_width, was_height = recorded
        if abs(was_width * height - was_height * width) > _ASPECT_TOLERANCE * max(was_width * height, 1):
            raise UserError(
                f"{self.source(index)} was made of an image of {was_width} x {was_height} pixels, which now has "
                f"{width} x {height}: make this label again"
            )

"""The label format: what a label map is, and what a batch of them is.

A label map covers a part of an image with an `h x w` grid. For each cell it holds the `k` classes that an annotator
network saw there, and their logits; or, made from a mask, the classes with the largest shares of its pixels, and their
shares. Shapes: `k` classes per cell, `h` rows, `w` columns, `B` images.

Coordinates are continuous shares of the source image: `(0, 0)` is its upper left edge and `(1, 1)` its lower right one,
whatever its aspect ratio. Cell `(row, column)` of a map whose area is `(x0, y0, x1, y1)` has its centre at
`(x0 + (column + 0.5) / w * (x1 - x0), y0 + (row + 0.5) / h * (y1 - y0))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tlt.errors import UserError

Area = tuple[float, float, float, float]

FULL_AREA: Area = (0.0, 0.0, 1.0, 1.0)
NO_AREA: Area = (0.0, 0.0, 0.0, 0.0)
_ROUNDING = 1e-4  # by which the shares of a cell may exceed 1


def centre_square(width: int, height: int) -> Area:
    """Return the area of the largest centred square of a `width x height` image. The published label-making program
    looks at this square only (it resizes the shorter side and crops the centre)."""
    side = min(width, height)
    x, y = (1 - side / width) / 2, (1 - side / height) / 2
    return (x, y, 1 - x, 1 - y)


@dataclass(frozen=True)
class LabelMap:
    """The labels of one image."""

    # (k, h, w) float16 logits of the classes in `ids`; float32 after `--label-tail exact` shifted them. With `void`:
    # float32 shares in [0, 1] of the cell's pixels that are not void; an entry of value 0 names no class.
    values: np.ndarray
    ids: np.ndarray  # (k, h, w) int32 class ids
    # `(x0, y0, x1, y1)`, the part of the source image that the map covers. If the network pads, it may reach beyond the
    # image by less than the image's size. An empty area means that the labels are unknown.
    area: Area = FULL_AREA
    source: str = "label map"  # where the map was read from, such as its file. Error messages start with it.
    # (h, w) float32, log-sum-exp over all logits of the annotator; None if it is not known.
    log_sum_exp: np.ndarray | None = None
    # (h, w) float32 in [0, 1], the share of each cell that has no class; None if the values are logits.
    void: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(k, h, w)`."""
        k, h, w = self.values.shape
        return k, h, w

    def validate(self, num_classes: int | None) -> LabelMap:
        """Return the map itself after checking it. Raise UserError if a value is NaN or infinite, shares are none, a
        class id is negative or not below `num_classes`, or the arrays are not of one (k, h, w) shape. The message
        starts with `source`."""
        source = self.source
        if self.values.ndim != 3 or self.values.shape != self.ids.shape or 0 in self.values.shape:
            raise UserError(f"{source}: values {self.values.shape} and ids {self.ids.shape} are not one (k, h, w) map")
        for name, array in (("log-sum-exp", self.log_sum_exp), ("void", self.void)):
            if array is not None and array.shape != self.values.shape[1:]:
                raise UserError(f"{source}: {name} {array.shape} is not of {self.values.shape[1:]} cells")
        if not np.isfinite(self.values).all():
            raise UserError(f"{source}: a label value is NaN or infinite; make this label again")
        if self.void is not None:
            shares = np.concatenate([self.values, self.values.sum(0, keepdims=True), self.void[None]])
            if not (shares >= 0).all() or (shares > 1 + _ROUNDING).any():
                raise UserError(f"{source}: the shares of a cell's classes are not in 0..1; make this label again")
        for class_id in (int(self.ids.min()), int(self.ids.max())):
            check_class_id(class_id, num_classes, source)
        return self

    @classmethod
    def unknown(cls, shape: tuple[int, int, int], area: Area = NO_AREA, shares: bool = False) -> LabelMap:
        """Return a map that knows no class. By default it covers nothing; in `area` all classes are equally likely."""
        void = np.zeros(shape[1:], np.float32) if shares else None
        return cls(np.zeros(shape, np.float32 if shares else np.float16), np.zeros(shape, np.int32), area, void=void)


def whole_ids(ids: np.ndarray, source: str) -> np.ndarray:
    """Return class ids as int32. Raises UserError, which starts with `source`, if they are not whole 32-bit numbers."""
    with np.errstate(invalid="ignore"):
        whole = ids.astype(np.int32)
    if (whole != ids).any():
        raise UserError(f"{source}: class ids are not whole numbers of 32 bits; is the order logits, class ids?")
    return whole


def check_class_id(class_id: int, num_classes: int | None, source: str) -> None:
    """Raise UserError, which starts with `source`, if a class id is negative or not below `num_classes`."""
    if class_id < 0 or (num_classes is not None and class_id >= num_classes):
        limit = "0 or more" if num_classes is None else f"in 0..{num_classes - 1} (--num-classes {num_classes})"
        raise UserError(f"{source}: class id {class_id} is not {limit}; were these labels made for other classes?")


def on_host(values: Any) -> bool:
    """Return whether there are values that can be compared now. Those of a tensor on a device, or traced, can't."""
    known = not isinstance(values, torch.Tensor) or (values.device.type == "cpu" and values.numel() > 0)
    return known and not torch.compiler.is_compiling()


@dataclass(frozen=True)
class LabelBatch:
    """The labels of B images as tensors on one device. Raises UserError if the shapes do not fit each other, or an id
    is negative.

    Attributes:
        values: (B, k, h, w) float16 (or wider) logits, or shares.
        ids: (B, k, h, w) int32 class ids.
        area: (B, 4) float32, the area `(x0, y0, x1, y1)` of each map.
        void: (B, h, w), the share of each cell that has no class; None if the values are logits.
        largest_id: The largest class id of the batch and the `source` of its map, in host memory, so that
            `make_targets` can check it without waiting for the device. None is replaced by the largest of ids in host
            memory; for ids on a device it means that they are below the number of classes.
    """

    values: torch.Tensor
    ids: torch.Tensor
    area: torch.Tensor
    largest_id: tuple[int, str] | None = None
    void: torch.Tensor | None = None

    def __post_init__(self) -> None:
        values = self.values
        ids = self.ids
        area = self.area
        if values.ndim != 4 or values.shape != ids.shape or area.shape != (len(values), 4):
            shapes = [tuple(part.shape) for part in (values, ids, area)]
            raise UserError(f"LabelBatch: {shapes} are not values and ids of one shape (B, k, h, w), and areas (B, 4)")
        if self.void is not None and self.void.shape != (len(values), *values.shape[2:]):
            raise UserError(f"LabelBatch: void {tuple(self.void.shape)} is not (B, h, w) of {tuple(values.shape)}")
        object.__setattr__(self, "ids", ids.to(torch.int32))
        if self.largest_id is None and on_host(ids):
            least, largest = map(int, self.ids.aminmax())
            check_class_id(least, None, "LabelBatch")
            object.__setattr__(self, "largest_id", (largest, "LabelBatch"))

    @classmethod
    def stack(cls, maps: Sequence[LabelMap]) -> LabelBatch:
        """Stack maps in order. Raise UserError if the maps differ in shape (all maps of a data set have one shape), or
        some hold shares and others logits."""
        shapes = {label_map.shape for label_map in maps}
        if len(shapes) != 1:
            raise UserError(f"label maps of different shapes (k, h, w) in one batch: {sorted(shapes)}")
        voids = [label_map.void for label_map in maps if label_map.void is not None]
        if len(voids) not in (0, len(maps)):
            raise UserError("label maps of shares and of logits in one batch")
        return cls(
            torch.from_numpy(np.stack([label_map.values for label_map in maps])),
            torch.from_numpy(np.stack([label_map.ids for label_map in maps])),
            torch.tensor([label_map.area for label_map in maps], dtype=torch.float32),
            max(((int(label_map.ids.max()), label_map.source) for label_map in maps), key=lambda pair: pair[0]),
            torch.from_numpy(np.stack(voids)) if voids else None,
        )

    def __len__(self) -> int:
        return self.values.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabelBatch:
        """Return the labels on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LabelBatch:
        """Return the labels in page-locked host memory. torch's DataLoader calls this."""
        return self.map(torch.Tensor.pin_memory)

    def __getitem__(self, rows: slice | torch.Tensor) -> LabelBatch:
        """Return the labels of the images that a slice or an index tensor selects."""
        return self.map(lambda tensor: tensor[rows])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LabelBatch:
        """Return the labels after applying a function to each tensor."""
        void = None if self.void is None else function(self.void)
        return LabelBatch(function(self.values), function(self.ids), function(self.area), self.largest_id, void)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        return [self.values, self.ids, self.area] + ([] if self.void is None else [self.void])

    def check_ids(self, num_classes: int) -> None:
        """Raise UserError, which names a map, if `largest_id` is known and not below `num_classes`."""
        if self.largest_id is not None:
            check_class_id(self.largest_id[0], num_classes, self.largest_id[1])


def has_area(labels: LabelBatch) -> torch.Tensor:
    """Return (B,) bool: whether the map covers any part of its image (a map with `NO_AREA` does not)."""
    return (labels.area[:, 2:] > labels.area[:, :2]).all(1)

"""A batch, from the numbers of its images to tensors on the training device.

Legend: B images, (H, W) output size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.data.augment.plan import Plan
from tlt.label_map import LabelBatch


class Skipped(NamedTuple):
    """An image that was left out, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class BatchKey:
    """Which images a batch shall hold: a data set makes the batch of a key, always the same one.

    Attributes:
        indices: Images; from the number of images on, repetitions of them.
        last: Whether this is the last micro-batch of its update.
        update_samples: Images of this rank in that update.
    """

    epoch: int
    indices: tuple[int, ...]
    last: bool = True
    update_samples: int = 0


@dataclass
class Batch:
    """A micro-batch of B images. B is smaller than asked for where evaluation leaves images out.

    Attributes:
        images: (B, 3, H, W). Decoded: uint8. After the device stage: float32, normalised and erased.
        classes: (B,) int64.
        indices: (B,) int64, of the images shown (a replaced image's is the replacement's).
        affine: (B, 2, 3) float32, unit square of the output -> unit square of the source, as labels take it; no rows in
            evaluation.
        visible: (B, 4) float32 x0, y0, x1, y1: share of the source that the crop shows; no rows in evaluation.
        labels: None without label maps.
        skipped: Images that could not be read.
        bad_labels: Images whose label map was replaced (`--bad-label skip` or `uniform`).
        plan: The augmentation; None in evaluation.
        key: What was asked for.
    """

    images: Tensor
    classes: Tensor
    indices: Tensor
    affine: Tensor
    visible: Tensor
    labels: LabelBatch | None = None
    skipped: list[Skipped] = field(default_factory=list)
    bad_labels: list[Skipped] = field(default_factory=list)
    plan: Plan | None = None
    key: BatchKey = BatchKey(0, ())

    @property
    def size(self) -> int:
        """B."""
        return len(self.indices)

    def large_tensors(self) -> list[Tensor]:
        """The images and the label maps."""
        return [self.images] + ([self.labels.values, self.labels.ids, self.labels.area] if self.labels else [])

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return self.large_tensors() + [getattr(self, name) for name in _SMALL]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory; torch's DataLoader calls this."""
        return self._map(lambda part: part if part.device.type == "cuda" else part.pin_memory())

    def select(self, rows: slice) -> Batch:
        """Return some of the images, without their plan."""
        return replace(self._map(lambda part: part[rows]), plan=None)

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        """Apply a function to labels and tensors."""
        changed = {name: function(getattr(self, name)) for name in ("images", *_SMALL)}
        return replace(self, labels=self.labels and function(self.labels), **changed)

    def __getstate__(self) -> dict[str, Any]:
        """Return what goes from a worker to the main process: small tensors as arrays, within the message. A tensor
        takes shared memory of its own, a file descriptor and a connection."""
        small = {name: getattr(self, name) for name in _SMALL}
        return self.__dict__ | {name: part.numpy() for name, part in small.items() if part.device.type == "cpu"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: part for name, part in state.items() if isinstance(part, np.ndarray)}
        self.__dict__ = state | {name: torch.from_numpy(part) for name, part in arrays.items()}


_SMALL = ("classes", "indices", "affine", "visible")

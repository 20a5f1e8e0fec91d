"""Chooses the images of each batch, as a function of (seed, epoch) only, and holds the tensors of a batch.

Legend: B images, (H, W) output size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.data.augment.counter import Ints, keys
from tlt.data.augment.plan import Plan
from tlt.data.size_schedule import SizeSchedule
from tlt.errors import UserError, in_range
from tlt.io.text import printable
from tlt.label_map import LabelBatch

_SHUFFLE = 0x5F0FF1E  # id of the permutation's random stream; it differs from those of the augmentation


def permutation(length: int, seed: int, epoch: int) -> Ints:
    """Return the order of the images in an epoch, (length,): their indices sorted by hash."""
    return np.argsort(keys(seed, epoch, _SHUFFLE, np.arange(length)), kind="stable")


@dataclass(frozen=True)
class IndexStream:
    """Cuts each epoch's permutation into global batches, ranks and micro-batches.

    Global batch k is the k-th slice of `global_batch` entries. Rank r takes every `world_size`-th entry of it and cuts
    these into `micro_batches` chunks. The last, smaller global batch is used too, rounded down to a multiple of
    `world_size` so that all ranks get equally many images: it leaves out at most world_size - 1 images, others in each
    epoch. Its micro-batches have the usual size, except that the last one may be smaller. `drop_last` omits this batch.

    With `repeats` = R an epoch shows 1/R of the images, each R times in a row, so that the ranks get it at the same
    time (repeated augmentation, arXiv:1901.09335). Repetition r of image i has the number `i + r * length`, so each has
    its own augmentation.

    With `sizes` the schedule gives the image size of each update. If its batch sizes differ, permutations follow each
    other without end, and an epoch has as many updates as one permutation takes on average. All images are equally
    frequent, but one epoch may have an image twice. So that both have their own augmentation, the second one has
    another number: an epoch of 3 images may read 2 (left from the epoch before), then 1 + 3, 0 + 3, 2 + 3. In general
    `k * repeats * length` is added to the numbers of the k-th permutation that an epoch reads, counted from 0. Raises
    UserError if the images do not fill a global batch, or it is no multiple of the ranks times the micro-batches.
    """

    length: int
    global_batch: int  # images per update; with `sizes`, the mean over the updates
    seed: int
    world_size: int = 1
    rank: int = 0
    micro_batches: int = 1
    drop_last: bool = False
    repeats: int = 1
    sizes: SizeSchedule | None = None

    def __post_init__(self) -> None:
        in_range("rank", self.rank, 0, self.world_size - 1, whole=True)
        in_range("--aug-repeats", self.repeats, 1, whole=True)
        largest = self.global_batch
        parts = self.world_size * self.micro_batches
        if self.sizes is not None:
            largest = max(self.sizes.batch_sizes) * parts
        elif self.global_batch <= 0 or self.global_batch % parts:
            raise UserError(
                f"a global batch of {self.global_batch} images can't be shared by {self.world_size} ranks with "
                f"{self.micro_batches} micro-batches each: make it a multiple of {parts}"
            )
        if self.length < largest:
            raise UserError(
                f"the training set has {self.length} images, fewer than one global batch of {largest}: lower "
                f"{'--batch-size' if self.sizes is None else '--train-batch-sizes, or --batch-size beside auto'} "
                "(or --grad-accum-steps, or the number of processes)"
            )

    @property
    def _endless(self) -> bool:
        return self.sizes is not None and len(set(self.sizes.batch_sizes)) > 1

    @property
    def images_per_epoch(self) -> int:
        """Number of images on which all ranks together train in an epoch, on average."""
        if self._endless:
            return max(1, round(self.length / self.global_batch)) * self.global_batch
        remainder = self.length % self.global_batch
        return self.length - (remainder if self.drop_last else remainder % self.world_size)

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(self.images_per_epoch / self.global_batch)

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches per rank and epoch."""
        return math.ceil(self.images_per_epoch * self.micro_batches / self.global_batch)

    @property
    def smallest_batch(self) -> int:
        """Images per rank in the smallest micro-batch of an epoch: the last one, unless batch sizes differ."""
        if self.sizes is not None and self._endless:
            return min(self.sizes.batch_sizes)
        size = self.global_batch // (self.world_size * self.micro_batches)
        return self.images_per_epoch // self.world_size % size or size

    def sizes_of(self, epoch: int) -> list[tuple[int, int] | None]:
        """Return (H, W) of the images of each update; None stands for the data set's size."""
        if self.sizes is None:
            return [None] * self.updates_per_epoch
        return [self.sizes.sizes[number] for number in self.sizes.choices(self.seed, epoch, self.updates_per_epoch)]

    def work(self, epochs: int) -> Sequence[float]:
        """Return (updates + 1,), the pixels of all ranks' images before each update of these epochs and after the last;
        without `sizes`, the number of updates instead of pixels."""
        if self.sizes is None:
            return range(epochs * self.updates_per_epoch + 1)
        pixels = np.prod(self.sizes.sizes, axis=1) * self.sizes.batch_sizes
        numbers = (self.sizes.choices(self.seed, epoch, self.updates_per_epoch) for epoch in range(epochs))
        return [0, *np.concatenate([pixels[chosen] for chosen in numbers]).cumsum().tolist()]

    def _batches(self, epoch: int) -> Ints:
        """Return (updates,), the images per rank in a full micro-batch of each update."""
        parts = self.world_size * self.micro_batches
        updates = self.updates_per_epoch
        if self.sizes is None:
            return np.full(updates, self.global_batch // parts)
        return np.array(self.sizes.batch_sizes)[self.sizes.choices(self.seed, epoch, updates)]

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[list[Ints]]:
        """Yield, for each update from `start_update` on, the micro-batches of this rank as arrays of indices."""
        batch_sizes = self._batches(epoch)
        parts = self.world_size * self.micro_batches
        ends = parts * batch_sizes.cumsum()
        if self._endless:
            order = self._entries(parts * sum(int(self._batches(before).sum()) for before in range(epoch)), ends[-1])
        else:
            order = self._entries(epoch * self.length, self.images_per_epoch)
        for end, batch_size in zip(ends[start_update:].tolist(), batch_sizes[start_update:].tolist(), strict=True):
            entries = order[end - batch_size * parts : end][self.rank :: self.world_size]
            yield [entries[cut : cut + batch_size] for cut in range(0, len(entries), batch_size)]

    def _entries(self, start: int, count: int) -> Ints:
        """Return (count,) entries, from `start` on, of the permutations in sequence."""
        first, skipped = divmod(start, self.length)
        passes = []
        for number in range(math.ceil((skipped + count) / self.length)):
            order = permutation(self.length, self.seed, first + number)[: math.ceil(self.length / self.repeats)]
            order = (order[:, None] + self.length * np.arange(self.repeats)).ravel()[: self.length]
            passes.append(order + number * self.repeats * self.length)
        return np.concatenate(passes)[skipped : skipped + count]


class Skipped(NamedTuple):
    """An image that was skipped, and why."""

    path: str
    reason: str


@dataclass
class SkipCounter:
    """Counts unreadable images, each path once. `limit` of them are allowed (`--max-bad-images`); None allows 0.1 % of
    the images, but at least 10 and at most 100."""

    images: int  # number of images in the data set
    limit: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)  # path -> why the image is unreadable
    _new: list[Skipped] = field(default_factory=list, repr=False)

    @property
    def allowed(self) -> int:
        if self.limit is not None:
            return self.limit
        return min(100, max(10, self.images // 1000))

    def record(self, skipped: Iterable[Skipped]) -> None:
        """Count images. Raise UserError if more than `allowed` images are unreadable."""
        for image in skipped:
            if image.path in self.reasons:
                continue
            self.reasons[image.path] = image.reason
            self._new.append(image)
            if (failed := len(self.reasons)) > self.allowed:
                raise UserError(
                    f"{failed} of {self.images} images can't be read, more than --max-bad-images {self.allowed}; "
                    f"the last one is {printable(image.path)} ({image.reason}): mend them, or raise the limit"
                )

    def take_new(self) -> list[Skipped]:
        """Return the images that failed for the first time since the last call."""
        new = self._new
        self._new = []
        return new

    def take_lines(self) -> list[str]:
        """Return one line for the log for each image of `take_new`."""
        return [f"left out {printable(path)}: {reason}" for path, reason in self.take_new()]


@dataclass(frozen=True)
class BatchKey:
    """Identifies the images of a batch. A data set always makes the same batch for a key."""

    epoch: int
    indices: tuple[int, ...]  # of images: see `IndexStream` for those beyond their number
    last: bool = True  # whether this is the last micro-batch of its update
    update_samples: int = 0  # images of this rank in the whole update
    size: tuple[int, int] | None = None  # (H, W) of the output; None takes the data set's size
    again: int = 0  # number, from 1, in its update if it is another rank's batch, to be computed again; else 0


@dataclass(frozen=True)
class FeatureBatch:
    """The stored features of B images, as a teacher's archive holds them (`tlt.labels.features`).

    Attributes:
        values: (B, h, w, D) float16 or int8.
        present: (B,) bool, whether the image has features; if not, its values are 0.
        scale: (B, h, w) float32, by which int8 values are multiplied.
    """

    values: Tensor
    present: Tensor
    scale: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [self.values, self.present] + ([] if self.scale is None else [self.scale])

    def map(self, function: Callable[[Tensor], Tensor]) -> FeatureBatch:
        """Return the features after applying a function to each tensor."""
        return FeatureBatch(*map(function, self.tensors()))

    def tokens(self) -> Tensor:
        """Return the features as float32 tokens (B, h * w, D)."""
        values = self.values.float()
        return (values if self.scale is None else values * self.scale[..., None]).flatten(1, 2)


_SMALL = ("classes", "indices", "affine", "visible")  # tensors of a batch with a few numbers for each image


@dataclass
class Batch:
    """A micro-batch of B images. Evaluation skips unreadable images, so B may be smaller than the key's batch.

    Attributes:
        images: (B, 3, H, W). After decoding: uint8. After the device stage: float32, normalised and erased.
        classes: (B,) int64.
        indices: (B,) int64, indices of the images; for a replaced image, that of the replacement.
        affine: (B, 2, 3) float32, maps the unit square of the output to that of the image, for reading labels
            (`Plan.normalised_affine`). Has no rows in evaluation without label maps.
        visible: (B, 4) float32 (x0, y0, x1, y1), the part of the image that the crop shows; rows as in `affine`.
        labels: The label maps, or None.
        features: The stored features of teachers, by the key of their `tlt.labels.features.FeatureStore`.
        skipped: Images that could not be read.
        bad_labels: Images whose label map was replaced, and why (`--bad-label skip` or `uniform`).
        plan: The augmentation; None in evaluation.
        key: The key from which the batch was made.
        num_classes: Number of classes of the data set; 0 if it is not known.
    """

    images: Tensor
    classes: Tensor
    indices: Tensor
    affine: Tensor
    visible: Tensor
    labels: LabelBatch | None = None
    features: dict[str, FeatureBatch] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    bad_labels: list[Skipped] = field(default_factory=list)
    plan: Plan | None = None
    key: BatchKey = BatchKey(0, ())
    num_classes: int = 0

    @property
    def size(self) -> int:
        """B, the number of images."""
        return len(self.indices)

    def large_tensors(self) -> list[Tensor]:
        """Return the images, the label maps and the stored features."""
        labels = self.labels.tensors() if self.labels else []
        return [self.images, *labels, *(part for stored in self.features.values() for part in stored.tensors())]

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return self.large_tensors() + [getattr(self, name) for name in _SMALL]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory; torch's DataLoader calls this."""
        return self._map(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())

    def clone(self) -> Batch:
        """Return a copy of the batch in new memory, without its plan."""
        return replace(self._map(torch.clone), plan=None)

    def select(self, rows: slice) -> Batch:
        """Return some of the images, without their plan."""
        return replace(self._map(lambda tensor: tensor[rows]), plan=None)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch after applying a function to each tensor, including those of labels and features."""
        changed: dict[str, Any] = {name: function(getattr(self, name)) for name in ("images", *_SMALL)}
        changed["features"] = {key: stored.map(function) for key, stored in self.features.items()}
        return replace(self, labels=self.labels and self.labels.map(function), **changed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the message from a worker to the main process. Small tensors become arrays in the message itself: a
        tensor would take shared memory, a file descriptor and a connection of its own."""
        small = {name: getattr(self, name) for name in _SMALL}
        return self.__dict__ | {name: part.numpy() for name, part in small.items() if part.device.type == "cpu"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: part for name, part in state.items() if isinstance(part, np.ndarray)}
        self.__dict__ = state | {name: torch.from_numpy(part) for name, part in arrays.items()}

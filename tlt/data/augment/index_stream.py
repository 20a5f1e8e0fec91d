"""Which images an update trains on: a function of (seed, epoch), whatever the number of ranks and workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tlt.data.augment.counter import keys
from tlt.errors import UserError

Ints = npt.NDArray[np.int64]

_SHUFFLE = 0x5F0FF1E  # sets the permutation's hash apart from those of the augmentation streams


def permutation(length: int, seed: int, epoch: int) -> Ints:
    """The order (length,) of the images in an epoch: the indices sorted by their hash."""
    return np.argsort(keys(seed, epoch, _SHUFFLE, np.arange(length)), kind="stable")


@dataclass(frozen=True)
class IndexStream:
    """Cuts each epoch's permutation into global batches, ranks and micro-batches.

    Global batch k is the k-th slice of `global_batch` entries; rank r takes every `world_size`-th entry of it; those
    are cut into `micro_batches` chunks. The last, smaller global batch is kept, rounded down to a multiple of
    `world_size` so that all ranks hold equally many images: at most world_size - 1 images are left out, other ones each
    epoch. Its micro-batches are as large as the others, the last one ragged. `drop_last` leaves the smaller batch out.

    With `repeats` an epoch shows an R-th of the images, each R times in a row, so that ranks get it at the same time
    (repeated augmentation, arXiv:1901.09335). Repetition r of image i is the number `i + r * length`: it is augmented
    in its own way.

    Raises:
        UserError: Fewer images than a global batch, or a global batch that ranks and micro-batches don't divide.
    """

    length: int
    global_batch: int
    seed: int
    world_size: int = 1
    rank: int = 0
    micro_batches: int = 1
    drop_last: bool = False
    repeats: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.global_batch <= 0 or self.global_batch % (self.world_size * self.micro_batches):
            raise UserError(
                f"a global batch of {self.global_batch} images can't be shared by {self.world_size} ranks with "
                f"{self.micro_batches} micro-batches each: make it a multiple of {self.world_size * self.micro_batches}"
            )
        if self.length < self.global_batch:
            raise UserError(
                f"the training set has {self.length} images, fewer than one global batch of {self.global_batch}: lower "
                "--batch-size (or --grad-accum-steps, or the number of processes)"
            )

    @property
    def tail(self) -> int:
        """Images in the smaller last global batch of an epoch, 0 if there is none."""
        left = self.length % self.global_batch
        return 0 if self.drop_last else left - left % self.world_size

    @property
    def updates_per_epoch(self) -> int:
        return self.length // self.global_batch + (self.tail > 0)

    @property
    def images_per_epoch(self) -> int:
        """Images that all ranks together train on in an epoch."""
        return self.length // self.global_batch * self.global_batch + self.tail

    @property
    def micro_batch(self) -> int:
        """Images in a full micro-batch of one rank."""
        return self.global_batch // (self.world_size * self.micro_batches)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[list[Ints]]:
        """Yield, per update from `start_update` on, the micro-batches (arrays of indices) of this rank."""
        order = permutation(self.length, self.seed, epoch)[: math.ceil(self.images_per_epoch / self.repeats)]
        order = (order[:, None] + self.length * np.arange(self.repeats)).ravel()[: self.images_per_epoch]
        for start in range(start_update * self.global_batch, len(order), self.global_batch):
            mine = order[start : start + self.global_batch][self.rank :: self.world_size]
            yield [mine[cut : cut + self.micro_batch] for cut in range(0, len(mine), self.micro_batch)]

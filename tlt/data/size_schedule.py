"""Training on images of several sizes: which size each update of an epoch has, by the weights of timm's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from timm.data import ScheduledBatchSampler

from tlt.data.augment.counter import keys
from tlt.errors import UserError

_SIZES = 0x517E5  # sets the order of sizes apart from the streams of permutations and augmentation
_AT_LAST = 0.1  # of the epochs of a progressive schedule have the last size alone, and at least one


@dataclass(frozen=True)
class SizeSchedule:
    """The sizes of the images of an epoch, a function of (seed, epoch): every rank finds the same.

    An epoch has each size as often as its weight says, but for one update, in random order. The weights are timm's
    (`--train-size-schedule`), but in the last tenth of a progressive schedule, and after it: these epochs have the last
    size alone.

    Args:
        sizes: (H, W) in pixels.
        batch_sizes: Images of a rank in a micro-batch of each size.
        weights: How often each size is drawn, in proportion; a size of weight 0 never is. None: equally often.
        epochs: In which the weights move from the first size to the last; None: they stay as they are.
        spread: Standard deviation of the moving window, in sizes; 0: the nearest size alone.
        random_mix: Part of a moving schedule that is drawn equally from all sizes.

    Raises:
        UserError: Numbers that don't fit each other, or are out of range.
    """

    sizes: Sequence[tuple[int, int]]
    batch_sizes: Sequence[int]
    weights: Sequence[float] | None = None
    epochs: int | None = None
    spread: float = 0.65
    random_mix: float = 0.1

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != len(self.sizes):
            count = f"{len(self.batch_sizes)} batch sizes (--train-batch-sizes)"
            raise UserError(f"{count} for {len(self.sizes)} image sizes (--train-img-sizes): give one for each")
        self._timm  # noqa: B018 - it checks the numbers

    @cached_property
    def _timm(self) -> ScheduledBatchSampler:
        mode = "constant" if self.epochs is None else "progressive"
        how = {"schedule_spread": self.spread, "schedule_random_mix": self.random_mix}
        try:
            return ScheduledBatchSampler(
                range(1), self.batch_sizes, self.weights, 0, True, True, 1, mode, self.epochs, **how
            )
        except ValueError as error:
            raise UserError(f"--train-img-sizes {' '.join(str(h) for h, _ in self.sizes)}: {error}") from error

    def weights_of(self, epoch: int) -> npt.NDArray[np.float64]:
        """The share of each size in the updates of an epoch."""
        shares: npt.NDArray[np.float64] = self._timm.choice_weights_for_epoch(epoch).numpy().copy()
        if self.epochs is not None and epoch >= self.epochs - max(1, round(_AT_LAST * self.epochs)):
            last = np.flatnonzero(shares)[-1]
            shares[:], shares[last] = 0, 1
        return shares

    @cached_property
    def mean_batch(self) -> float:
        """Images of a rank in a micro-batch, the mean over the updates of the schedule."""
        return float(np.mean([self.weights_of(epoch) @ self.batch_sizes for epoch in range(self.epochs or 1)]))

    @property
    def smallest_batch(self) -> int:
        """Images of a rank in the smallest micro-batch that may come."""
        return min(np.array(self.batch_sizes)[np.array(self.weights or [1.0] * len(self.sizes)) > 0].tolist())

    def choices(self, seed: int, epoch: int, updates: int) -> npt.NDArray[np.int64]:
        """(updates,) the number of the size of each update."""
        hashed = keys(seed, epoch, _SIZES, np.arange(updates + 1))
        places = np.empty(updates)
        places[np.argsort(hashed[1:], kind="stable")] = (np.arange(updates) + hashed[0] * 2.0**-64) / updates
        shares = self.weights_of(epoch)
        return np.minimum(np.searchsorted(shares.cumsum(), places, side="right"), np.flatnonzero(shares)[-1])

"""Training on images of several sizes: chooses the size of each update of an epoch by the weights of timm's sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from timm.data import ScheduledBatchSampler

from tlt.data.augment.counter import Floats, Ints, keys
from tlt.errors import UserError, in_range, size_of

_SIZES = 0x517E5  # id of this random stream; it differs from those of permutations and augmentation
_AT_LAST = 0.1  # share of a progressive schedule's epochs, at least one, that have the last size only


@dataclass(frozen=True)
class SizeSchedule:
    """The image sizes of an epoch, a function of (seed, epoch): every rank computes the same.

    Each size gets the share of updates that its weight says, to within one update, in random order. The weights are
    timm's (`--train-size-schedule`), except that the epochs in the last tenth of a progressive schedule, and those
    after it, have the last size only. Raises UserError if the numbers do not fit each other, or are out of range.

    Args:
        sizes: (H, W) in pixels.
        batch_sizes: For each size, images per micro-batch and rank.
        weights: Relative frequency of each size; a size of weight 0 never occurs. None: all are equally frequent.
        epochs: Number of epochs in which the weights move from the first size to the last; None: they are constant.
        spread: Weights that move are a bell curve over the list of sizes: its standard deviation, in sizes; 0 takes the
            nearest size only.
        random_mix: Share of a moving schedule that is drawn equally from all sizes.
    """

    sizes: Sequence[tuple[int, int]]
    batch_sizes: Sequence[int]
    weights: Sequence[float] | None = None
    epochs: int | None = None
    spread: float = 0.65
    random_mix: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(size_of("--train-img-sizes", size) for size in self.sizes))
        flag = "--train-batch-sizes (auto alone, or one for each of --train-img-sizes)"
        in_range(flag, self.batch_sizes, 1, counts=(len(self.sizes),), whole=True)
        self._timm  # noqa: B018 - it checks the numbers

    @cached_property
    def _timm(self) -> ScheduledBatchSampler:
        mode = "constant" if self.epochs is None else "progressive"
        settings = {"schedule_spread": self.spread, "schedule_random_mix": self.random_mix}
        try:
            return ScheduledBatchSampler(
                range(1), self.batch_sizes, self.weights, 0, True, True, 1, mode, self.epochs, **settings
            )
        except ValueError as error:
            reason = str(error).replace("choice_weights", "--train-size-probs").replace("batch_sizes", "the sizes")
            raise UserError(f"--train-img-sizes {' '.join(str(h) for h, _ in self.sizes)}: {reason}") from error

    def weights_of(self, epoch: int) -> Floats:
        """Return the share of each size in the updates of an epoch."""
        shares: Floats = self._timm.choice_weights_for_epoch(epoch).numpy().copy()
        if self.epochs is not None and epoch >= self.epochs - max(1, round(_AT_LAST * self.epochs)):
            last = np.flatnonzero(self._timm.choice_weights.numpy())[-1]
            shares[:] = 0
            shares[last] = 1
        return shares

    @cached_property
    def mean_batch(self) -> float:
        """Mean number of images per micro-batch and rank over the updates of the schedule."""
        return float(np.mean([self.weights_of(epoch) @ self.batch_sizes for epoch in range(self.epochs or 1)]))

    def choices(self, seed: int, epoch: int, updates: int) -> Ints:
        """Return (updates,) indices into `sizes`, one for each update.

        Places at equal distances in [0, 1), in random order, fall into the sizes' shares of this interval.
        """
        hashed = keys(seed, epoch, _SIZES, np.arange(updates + 1))
        places = np.empty(updates)
        places[np.argsort(hashed[1:], kind="stable")] = (np.arange(updates) + hashed[0] * 2.0**-64) / updates
        shares = self.weights_of(epoch)
        return np.minimum(np.searchsorted(shares.cumsum(), places, side="right"), np.flatnonzero(shares)[-1])

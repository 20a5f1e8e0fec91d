"""Soft labels of tokens, which name few of many classes.

A soft label is one number for all classes plus an excess at M entries, so targets (B, N, C) are never built. Shapes: B
images, N tokens, C classes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.label_map import Area


class Reading(NamedTuple):
    """How label maps are read: arguments of `tlt.targets.make_targets`."""

    grid: tuple[int, int]
    window: Area
    num_classes: int
    smoothing: float
    uncovered: str
    stretch: float = 1.0  # of maps of shares: see `tlt.shares.cells_across`


class SparseLabels(NamedTuple):
    """Soft labels of tokens: the probability of class c is `base` plus the sum of `excess` where `ids` is c."""

    # (B, N) in [0, 1], the weight of each token in the loss: the share of it that counts, which is 1 under
    # `uncovered="uniform"` unless the image has no map.
    weight: Tensor
    base: Tensor  # (B, N), the probability of every class without an entry
    ids: Tensor  # (B, N, M) int32 class ids. A class may occur more than once, but only one of its entries is not 0.
    excess: Tensor  # (B, N, M), what the entry adds to `base`; may be negative

    def dense(self, num_classes: int) -> Tensor:
        """Return the labels as (B, N, C) probabilities."""
        rows = self.base[..., None].repeat(1, 1, num_classes)
        return rows.scatter_add_(2, self.ids.long(), self.excess)


def smooth(probabilities: Tensor, smoothing: float) -> Tensor:
    """Return `(1 - s) p + s / C` over the last axis. It sums to 1; the published targets sum to `1 + s / C`."""
    if not smoothing:
        return probabilities
    return probabilities * (1 - smoothing) + smoothing / probabilities.shape[-1]


class Sums(NamedTuple):
    """The sum of the values of each class id, stored at the id's last position."""

    ids: Tensor  # (..., M), sorted
    sums: Tensor  # (..., M), 0 at other positions
    last: Tensor  # (..., M) bool, True at the last position of each id


def merge_equal(ids: Tensor, values: Tensor, longest: int) -> Sums:
    """Add up the `values` (..., M) of equal `ids` (..., M); ids that occur more than `longest` times have values of 0.

    Each step doubles how many entries a sum spans. The order of additions depends on the shape alone; differences of
    cumulative sums would lose digits.
    """
    ids, order = torch.sort(ids, dim=-1, stable=True)
    sums = values.gather(-1, order)
    for reach in (2**power for power in range(math.ceil(math.log2(longest)))):
        if reach < ids.shape[-1]:
            same = (ids[..., reach:] == ids[..., :-reach]).to(sums.dtype)
            pair_sums = torch.addcmul(sums[..., reach:], sums[..., :-reach], same)
            sums = torch.cat([sums[..., :reach], pair_sums], -1)
    last = torch.ones_like(ids, dtype=torch.bool)
    last[..., :-1] = ids[..., 1:] != ids[..., :-1]
    return Sums(ids, sums * last, last)

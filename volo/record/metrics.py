"""Sums that stay on the device until somebody asks, and are then added up over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from volo.cluster.distributed import World, from_all, sum_over_ranks


class Sums:
    """Named float64 sums, such as losses summed over images. `add` never synchronises with the device."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self._values = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, *values: Tensor | float) -> None:
        """Add one value per name, in order."""
        rows = [v.detach().double() if isinstance(v, Tensor) else float(v) for v in values]
        if len(rows) != len(self.names):
            raise ValueError(f"{len(rows)} values for {len(self.names)} names")
        for position, row in enumerate(rows):
            self._values[position] += row

    def totals(self) -> dict[str, float]:
        """Return the sums over all ranks. Synchronises; every rank must call it."""
        return dict(zip(self.names, sum_over_ranks(self._values).tolist(), strict=True))

    def by_rank(self) -> list[list[float]]:
        """Return each rank's own sums, to `restore` them. Synchronises; every rank must call it."""
        return from_all(self._values.tolist())

    def restore(self, by_rank: Sequence[Sequence[float]], world: World) -> None:
        """Go on from the sums that `by_rank` returned; on another number of ranks rank 0 takes them all.

        Raises:
            ValueError: Not one number per name.
        """
        rows = torch.tensor(by_rank, dtype=torch.float64).reshape(-1, len(self.names))
        if len(rows) != world.size:
            rows = torch.cat([rows.sum(0, keepdim=True), rows.new_zeros(world.size - 1, len(self.names))])
        self._values.copy_(rows[world.rank])

    def reset(self) -> None:
        """Start again from zero."""
        self._values.zero_()


def correct_in_top(logits: Tensor, classes: Tensor, ks: tuple[int, ...] = (1, 5)) -> list[Tensor]:
    """Count the samples whose class is among the k largest logits, for each k.

    Args:
        logits: (B, C).
        classes: (B,) int64; a class of -1 is never correct.
        ks: k larger than C counts as C.
    """
    largest = logits.topk(min(max(ks), logits.shape[1]), dim=1).indices  # (B, k)
    hits = largest == classes[:, None]
    return [hits[:, :k].any(dim=1).sum() for k in ks]

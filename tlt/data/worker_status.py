"""What data workers tell the main process: that they have begun, and which image they have in hand."""

from __future__ import annotations

import threading
import time

import torch

_OWN = threading.local()  # .slot: of a worker, be it a process or a thread


class WorkerStatus:
    """Shared between workers and main process: who has begun, which image each worker has in hand, and since when."""

    def __init__(self, workers: int) -> None:
        self._index = torch.full((max(workers, 1),), -1, dtype=torch.int64).share_memory_()
        self._since = torch.zeros(max(workers, 1), dtype=torch.float64).share_memory_()
        self._begun = torch.zeros(workers, dtype=torch.bool).share_memory_()

    def mark(self, index: int) -> None:
        """Note that this worker begins with image `index` (-1: with none)."""
        slot = getattr(_OWN, "slot", 0)
        # monotonic() is one clock for all processes of a machine.
        self._since.numpy()[slot] = time.monotonic()  # in a tenth of the time that torch takes for one number
        self._index.numpy()[slot] = index

    def begin(self, worker: int) -> None:
        """Note, in a worker, that it has begun."""
        _OWN.slot = worker
        self._begun[worker] = True

    def nobody_begun(self) -> None:
        """Note that new workers are about to be started."""
        self._begun.zero_()

    def not_begun(self) -> list[int]:
        """The workers that have not begun yet."""
        return (~self._begun).nonzero().flatten().tolist()

    def longest(self) -> tuple[int, float] | None:
        """Index and seconds of the image that has been in hand for longest, None if no worker has one."""
        busy = [(s, i) for i, s in zip(self._index.tolist(), self._since.tolist(), strict=True) if i >= 0]
        if not busy:
            return None
        since, index = min(busy)
        return index, time.monotonic() - since

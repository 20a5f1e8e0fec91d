"""Time several ways to do the same work, in turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[int], int]  # number of the round -> units of work done in it


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of work: median, smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    def spread(self, scale: float) -> str:
        """Smallest and largest, times `scale`."""
        return f"{self.low * scale:.1f}-{self.high * scale:.1f}"


def interleaved(
    arms: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Time every arm once a round, after a round that doesn't count; each round begins with another arm."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            units = arms[name](number)
            if number:
                seconds[name].append((clock() - start) / units)
    return {name: Timing(statistics.median(found), min(found), max(found)) for name, found in seconds.items()}


def machine() -> str:
    """What the numbers depend on, in one line."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cpus} CPUs to run on, {torch.get_num_threads()} thread(s); torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    )

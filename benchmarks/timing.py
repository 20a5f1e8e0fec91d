"""Time several ways to do the same work, in turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tlt.errors import UserError

Work = Callable[[int], int]  # number of the round -> units of work done in it
Name = TypeVar("Name", bound=Hashable)


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
    return by_clocks(arms, rounds, {"": clock})[""]


def by_clocks(
    arms: Mapping[Name, Work], rounds: int, clocks: Mapping[str, Callable[[], float]]
) -> dict[str, dict[Name, Timing]]:
    """As `interleaved`, by several clocks at once: clock -> arm -> timing."""
    names = list(arms)
    seconds: dict[str, dict[Name, list[float]]] = {clock: {name: [] for name in names} for clock in clocks}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = {clock: read() for clock, read in clocks.items()}
            units = arms[name](number)
            for clock, read in clocks.items():
                if number:
                    seconds[clock][name].append((read() - start[clock]) / units)
    return {
        clock: {name: Timing(statistics.median(found), min(found), max(found)) for name, found in arms_found.items()}
        for clock, arms_found in seconds.items()
    }


def cpu_seconds() -> float:
    """CPU time of all threads of this process and of its children that live.

    Raises:
        UserError: There are some, and the system has no clock of other processes (Linux does).
    """
    return time.process_time() + sum(_cpu_seconds_of(child.pid) for child in multiprocessing.active_children())


def _cpu_seconds_of(pid: int | None) -> float:
    number = ctypes.c_int()
    find = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    if find is None or find(pid, ctypes.byref(number)):
        raise UserError("CPU time of worker processes can't be read here: use --workers 0")
    return time.clock_gettime(number.value)


def machine() -> str:
    """What the numbers depend on, in one line."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cpus} CPUs to run on, {torch.get_num_threads()} thread(s); torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    )

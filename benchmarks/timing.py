"""Time candidates for the same work in turns, so that other work on the machine slows all of them alike."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from tlt.errors import UserError

Work = Callable[[int], int]  # number of the round -> units of work done in it
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Seconds per unit of work: median, smallest and largest over the rounds, and each round's."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()

    def spread(self, scale: float) -> str:
        """Return the smallest and the largest, times `scale`."""
        return f"{self.low * scale:.1f}-{self.high * scale:.1f}"


def interleaved(
    candidates: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Time every candidate once a round, after an unmeasured round; each round begins with another candidate."""
    return by_clocks(candidates, rounds, {"": clock})[""]


def by_clocks(
    candidates: Mapping[Name, Work], rounds: int, clocks: Mapping[str, Callable[[], float]]
) -> dict[str, dict[Name, Timing]]:
    """Do the same with several clocks at once: clock -> candidate -> timing."""
    names = list(candidates)
    seconds: dict[str, dict[Name, list[float]]] = {clock: {name: [] for name in names} for clock in clocks}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = {clock: read() for clock, read in clocks.items()}
            units = candidates[name](number)
            for clock, read in clocks.items():
                if number:
                    seconds[clock][name].append((read() - start[clock]) / units)
    return {
        clock: {
            name: Timing(statistics.median(found), min(found), max(found), tuple(found))
            for name, found in arms_found.items()
        }
        for clock, arms_found in seconds.items()
    }


def cpu_seconds() -> float:
    """Return the CPU time of all threads of this process and of its living children.

    Raises:
        UserError: There are children, and the system has no clock of other processes (Linux does).
    """
    return time.process_time() + sum(_cpu_seconds_of(child.pid) for child in multiprocessing.active_children())


def _cpu_seconds_of(pid: int | None) -> float:
    number = ctypes.c_int()
    find = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    if find is None or find(pid, ctypes.byref(number)):
        raise UserError("CPU time of worker processes can't be read here: use --workers 0")
    return time.clock_gettime(number.value)


def machine() -> str:
    """Return the machine and the versions in one line."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cpus} CPUs to run on, {torch.get_num_threads()} thread(s); torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    )


class Phases:
    """Seconds of the parts of a step, from marks at their ends. On CUDA the marks are events, which do not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str | None, Any]] = []  # name, seconds or event

    def start(self) -> None:
        """Begin a step; the time before it is not counted."""
        self._marks.append((None, self._now()))

    def mark(self, name: str) -> None:
        """End the part `name`, which began at the last mark."""
        self._marks.append((name, self._now()))

    def take(self) -> dict[str, float]:
        """Return the total seconds by name since the last call. Waits for the device."""
        synchronize(self.device)
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                seconds[name] += _between(before, after)
        self._marks.clear()
        return dict(seconds)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Do `work` and return the seconds until the device has finished it."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def _between(before: Any, after: Any) -> float:
    seconds: float = before.elapsed_time(after) / 1e3 if isinstance(before, torch.cuda.Event) else after - before
    return seconds


class Runner(Protocol):
    """The work of a candidate that is timed."""

    phases: Phases

    def run(self, steps: int) -> int:
        """Do `steps` batches and return their number of images; `phases` has the times of their parts."""

    def memory(self) -> dict[str, float]:
        """Return peak bytes per image, by the part of the work."""

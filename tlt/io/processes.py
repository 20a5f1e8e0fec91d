"""A long job in several processes."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tlt.errors import UserError
from tlt.io.progress import Progress

Job = TypeVar("Job")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How processes are started, on every Python: on Linux by fork, which Python 3.14 does only where asked. They share the
# data set and all modules with the main process, and begin at once. By "forkserver", each loads torch and unpickles the
# data set: 490 MB of its own in place of 20 (1.28 million images). The price is what Python warns of from 3.12 on: a
# thread may hold a lock at that moment. Python and glibc see to their own; a data worker that hangs is replaced
# (`tlt.data.workers.Workers`).
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_JOB: list[Any] = []  # of this process
_AHEAD = 64  # items of each process that are waited for at a time


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> float:
    """Bytes of memory of this machine; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def end_with_main_process() -> None:
    """Let the kernel end this process when the one that started it is no more (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def in_processes(
    function: Callable[[Job, Item], Result], job: Job, items: Sequence[Item], workers: int, what: str, unit: str = ""
) -> Iterator[Result]:
    """`function(job, item)` of every item, in order, with a progress bar that says `what` where there is a `unit`.

    Args:
        job: Given to each process once, on Linux without being copied.
        workers: Processes; 1: this one.

    Raises:
        UserError: What `function` raises; or a process was killed.
    """
    progress = Progress(what, len(items), unit) if unit else None
    for result in _alone(function, job, items) if workers <= 1 else _parallel(function, job, items, workers, what):
        if progress:
            progress.step()
        yield result
    if progress:
        progress.close()


def _alone(function: Callable[[Job, Item], Result], job: Job, items: Sequence[Item]) -> Iterator[Result]:
    return (function(job, item) for item in items)


def _parallel(
    function: Callable[[Job, Item], Result], job: Job, items: Sequence[Item], workers: int, what: str
) -> Iterator[Result]:
    context = multiprocessing.get_context(START_METHOD)
    pool = ProcessPoolExecutor(min(workers, len(items)) or 1, context, _take, (job,))
    try:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(_run, function, item))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"{what}: a process was killed, for want of memory perhaps; lower --workers and run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _take(job: Any) -> None:
    _JOB[:] = [job]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    if sys.platform == "linux":
        end_with_main_process()


def _run(function: Callable[[Any, Item], Result], item: Item) -> Result:
    return function(_JOB[0], item)

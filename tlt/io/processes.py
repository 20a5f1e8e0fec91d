"""A long job in several processes."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from tlt.errors import UserError
from tlt.io.progress import Progress

Job = TypeVar("Job")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How processes are started, on every Python: on Linux by fork, which Python 3.14 does only where asked. They share the
# data set and all modules with the main process, and begin at once. By "forkserver", each loads torch and unpickles the
# data set: 490 MB of its own in place of 20 (1.28 million images). The price is what Python warns of from 3.12 on: a
# thread may hold a lock at that moment. Python and glibc see to their own.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_JOB: list[Any] = []  # of this process


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> float:
    """Bytes of memory of this machine; infinity where the system does not say."""
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
    """Yield `function(job, item)` of every item, in order; where there is a `unit`, a progress bar says `what`.

    Args:
        job: Given to each process once, on Linux without being copied.
        workers: Processes; 1: this one.

    Raises:
        UserError: What `function` raises; or a process was killed.
    """
    progress = Progress(what, len(items), unit) if unit else None
    context = multiprocessing.get_context(START_METHOD)
    pool = ProcessPoolExecutor(min(workers, len(items)), context, _begin, (job,)) if workers > 1 and items else None
    try:
        results = pool.map(partial(_run, function), items) if pool else (function(job, item) for item in items)
        for result in results:
            if progress:
                progress.step()
            yield result
    except BrokenProcessPool as error:
        raise UserError(
            f"{what}: a process was killed, for want of memory perhaps; lower --workers and run the same command again"
        ) from error
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    if progress:
        progress.close()


def _begin(job: Any) -> None:
    _JOB[:] = [job]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    if sys.platform == "linux":
        end_with_main_process()


def _run(function: Callable[[Any, Item], Result], item: Item) -> Result:
    return function(_JOB[0], item)

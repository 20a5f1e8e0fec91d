"""Long jobs: how far one is, and one in several processes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from tlt.errors import UserError

Job = TypeVar("Job")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How processes are started, on every Python: on Linux by fork, which Python 3.14 does only where asked. They share the
# data set and all modules with the main process, and begin at once. By "forkserver", each loads torch and unpickles the
# data set: 490 MB of its own in place of 20 (1.28 million images). The price is what Python warns of from 3.12 on: a
# thread may hold a lock at that moment. Python and glibc see to their own.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_ROOT = Path("/")
_PR_SET_PDEATHSIG = 1
_JOB: list[Any] = []  # of this process
_by_main_thread = False  # whether the main thread has begun this process, or those that are being started
_REPORT_SECONDS = 10.0  # between lines where nobody watches a progress bar
_LOOK_SECONDS = 0.2  # between two looks whether the main process lives
_FIRST_SECONDS = 3.0  # until the first line of a search, most of which take less


class SearchProgress:
    """Counts what a search finds where the total is unknown: a line after 3 s, then one every 10 s.

    Args:
        report: Prints a line; None: nothing is printed.
        alive: Called at each step.
    """

    def __init__(self, report: Callable[[str], None] | None = print, alive: Callable[[], None] | None = None) -> None:
        self._report, self._alive = report, alive
        self._start = time.monotonic()
        self._due = self._start + _FIRST_SECONDS

    def __call__(self, what: str, count: int) -> None:
        """Count: `what` is done, and has found `count` by now."""
        if self._alive is not None:
            self._alive()
        now = time.monotonic()
        if self._report is not None and now >= self._due:
            self._due = now + _REPORT_SECONDS
            self._report(f"{what}: {count} found in {now - self._start:.0f} s")


class Progress:
    """Shows a bar with ETA in a terminal, lines with ETA in a log."""

    def __init__(self, what: str, total: int, unit: str = "image") -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.start = self.reported = time.monotonic()
        watched = sys.stderr.isatty()
        self.bar = tqdm(desc=what, total=total, unit=unit, dynamic_ncols=True, leave=False) if watched else None

    def step(self, count: int = 1) -> None:
        """Count items that are done."""
        self.done += count
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(count)
        elif now - self.reported >= _REPORT_SECONDS:
            self.reported = now
            left = (self.total - self.done) * (now - self.start) / self.done
            print(f"{self._rate(now - self.start)}, ETA {tqdm.format_interval(left)}", flush=True)

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()
        if self.total:
            seconds = time.monotonic() - self.start
            print(f"{self._rate(seconds)}, in {tqdm.format_interval(seconds)}", flush=True)

    def _rate(self, seconds: float) -> str:
        return (
            f"{self.what}: {self.done}/{self.total} {self.unit}s, {self.done / max(seconds, 1e-9):.1f} {self.unit}s/s"
        )


def available_cpus(process: int = 0) -> int:
    """CPUs that a process may use (0: this one): those that it is bound to, or the time that control groups leave it.

    Raises:
        OSError: There is no such process.
    """
    bound = len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(bound, _granted_cpus(_ROOT / "proc" / str(process or "self") / "cgroup"))))


def _granted_cpus(membership: Path) -> float:
    """CPU time per time that control groups of both versions grant, as `docker --cpus` sets it; perhaps infinity."""
    granted = math.inf
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _ROOT / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # Limits of a group are those of the groups in it. In a container the path may be that of the host.
        for group in (top / part for part in ("", *itertools.accumulate(Path(path).parts[1:], os.path.join))):
            with suppress(OSError, ValueError):  # it has none, or "max"
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = (int(n) for name in files for n in (group / name).read_text().split())
                granted = min(granted, quota / period if quota > 0 else math.inf)
    return granted


def physical_memory() -> float:
    """Bytes of memory of this machine; infinity where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


@contextmanager
def starting_processes() -> Iterator[None]:
    """Around the start of processes, each of which begins with `begin_process`, and collects no garbage before.

    What the main process has not collected yet is its own: a DALI pipeline, freed in a fork, waits for ever for threads
    that only the main process has.
    """
    global _by_main_thread
    _by_main_thread = threading.current_thread() is threading.main_thread()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def begin_process() -> None:
    """What a process begins with: it leaves what the main process has made alone, and ends when that is no more.

    On Linux the kernel ends it, also where it is stopped or hangs, when the thread that forked has ended: that of a
    process which another thread than the main one has begun may do so long before the main process.
    """
    gc.freeze()
    gc.enable()
    if sys.platform == "linux" and _by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main = multiprocessing.parent_process()
    while main is not None and os.getppid() == main.pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


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
        with starting_processes():
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
    begin_process()


def _run(function: Callable[[Any, Item], Result], item: Item) -> Result:
    return function(_JOB[0], item)

"""Runs long jobs: shows progress, and divides a job among processes."""

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
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from tlt.errors import WorkerDied
from tlt.io.files import os_errors_as

Job = TypeVar("Job")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How processes are started. On Linux by fork, also with Python 3.14, where it is no longer the default: forked
# processes start at once and share the data set and all modules with the main process. With "forkserver" each would
# load torch and unpickle the data set: 490 MB of its own instead of 20 (1.28 million images). The risk, of which Python
# warns from 3.12 on, is that another thread holds a lock at the fork. Python and glibc handle their own locks.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_ROOT = Path("/")
_PR_SET_PDEATHSIG = 1
_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
_JOB: list[Any] = []  # the job of this process
_starting = 0  # the process whose main thread is starting others, or 0
_ends_with_parent = False  # whether the kernel ends this process when the one that forked it ends
_REPORT_SECONDS = 10.0  # between progress lines if there is no terminal
_LOOK_SECONDS = 0.2  # between checks that the main process is alive
_FIRST_SECONDS = 3.0  # until the first line of a search; most searches take less
_ALONE = "make room in /dev/shm (docker --shm-size), or give --workers 1"
_MOST_WORKERS = 8
_START_SECONDS = 300.0  # for a process to start; a forked one takes milliseconds


class SearchProgress:
    """Reports the results of a search with unknown total by `report`, unless it is None: a line after 3 s, then one
    every 10 s. `alive` is called at each step."""

    def __init__(self, report: Callable[[str], None] | None = print, alive: Callable[[], None] | None = None) -> None:
        self._report = report
        self._alive = alive
        self._start = time.monotonic()
        self._due = self._start + _FIRST_SECONDS

    def __call__(self, what: str, count: int) -> None:
        """Report that the task `what` has found `count` items so far."""
        if self._alive is not None:
            self._alive()
        now = time.monotonic()
        if self._report is not None and now >= self._due:
            self._due = now + _REPORT_SECONDS
            self._report(f"{what}: {count} found in {now - self._start:.0f} s")


def progress_bar(**options: Any) -> tqdm | None:
    """Return a bar that disappears when it is closed. None if neither a terminal nor a notebook can draw it."""
    from tqdm.auto import tqdm as drawn  # which looks for a notebook when it is imported

    in_notebook = any(kind.__module__ == "tqdm.notebook" for kind in drawn.__mro__)
    return drawn(leave=False, dynamic_ncols=True, **options) if in_notebook or sys.stderr.isatty() else None


@dataclass
class Progress:
    """Shows a bar with the remaining time in a terminal, and lines with it in a log."""

    what: str
    total: int
    unit: str = "image"
    done: int = 0

    def __post_init__(self) -> None:
        self.start = self.reported = time.monotonic()
        self.bar = progress_bar(desc=self.what, total=self.total, unit=self.unit)

    def step(self, count: int = 1) -> None:
        """Count finished items."""
        self.done += count
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(count)
        elif now - self.reported >= _REPORT_SECONDS:
            self.reported = now
            remaining = (self.total - self.done) * (now - self.start) / self.done
            print(f"{self._rate(now - self.start)}, ETA {tqdm.format_interval(remaining)}", flush=True)

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
    """Return how many CPUs a process may use (0: this one): those of its affinity, limited by its control groups. Raise
    OSError if there is no such process."""
    bound = len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(bound, _granted_cpus(_ROOT / "proc" / str(process or "self") / "cgroup"))))


def cpu_share(processes: int = 1, free: int = 0) -> int:
    """Return how many CPUs this process may use beside `processes - 1` others like it, such as the ranks of a machine,
    which share the CPUs of their parent, if `free` CPUs are left for something else. At least 1."""
    cpus = of_all = available_cpus()
    with suppress(OSError):  # the parent process has ended
        of_all = available_cpus(os.getppid())
    return max(1, min(cpus - free, (of_all - free) // processes))


def default_workers(processes: int = 1) -> int:
    """Return the default of `--workers`, for `processes` that share the CPUs."""
    return min(_MOST_WORKERS, cpu_share(processes))


def _granted_cpus(membership: Path) -> float:
    """Return how many CPUs control groups (version 1 or 2) grant, as `docker --cpus` sets; may be infinity."""
    granted = math.inf
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)  # in version 2 `controllers` is empty
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _ROOT / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # A group's limit also binds the groups in it. In a container the path may be that of the host.
        for group in (top / part for part in ("", *itertools.accumulate(Path(path).parts[1:], os.path.join))):
            with suppress(OSError, ValueError):  # the group has no limit, or "max"
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = (int(n) for name in files for n in (group / name).read_text().split())
                granted = min(granted, quota / period if quota > 0 else math.inf)
    return granted


def physical_memory() -> float:
    """Return the bytes of memory of this machine; infinity if the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


@contextmanager
def starting_processes() -> Iterator[None]:
    """Wrap the start of processes, which must call `begin_process` first, and collect no garbage until then.

    Garbage of the main process must not be collected in a fork: a DALI pipeline that is freed there waits for ever for
    threads that only the main process has.
    """
    global _starting
    _starting = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _starting = 0
        if collecting:
            gc.enable()


def _end_with_forking_process() -> None:
    """Let the kernel end this process, even if it is stopped or hangs, when the thread that forked it ends.

    That thread must be the main thread: another one may end long before the main process. This is the first that a
    fork does: the main process may be killed at any time, and what comes next may hang beside threads of C++ libraries.
    """
    global _starting, _ends_with_parent
    parent = _starting
    _starting = 0
    if parent and _C_LIBRARY is not None:
        _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
        _ends_with_parent = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_with_forking_process)


def begin_process() -> None:
    """Initialise a process: never collect garbage of the main process, and end when the main process ends."""
    gc.freeze()
    gc.enable()
    if not _ends_with_parent:
        threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main = multiprocessing.parent_process()
    while main is not None and os.getppid() == main.pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def in_processes(
    function: Callable[[Job, Item], Result], job: Job, items: Sequence[Item], workers: int, what: str, unit: str = ""
) -> Iterator[Result]:
    """Yield `function(job, item)` for every item, in order, from `workers` processes, or with 1 from this one. Each
    gets the `job` once, on Linux without a copy. With a `unit`, show a progress bar titled `what`. Raise WorkerDied if
    a process was killed, or hung at its start, and the UserError of a function.

    The processes are killed at the end: CPython up to 3.11 can hang in a fork beside threads of C++ libraries, and we
    would wait for such a process for ever.
    """
    progress = Progress(what, len(items), unit) if unit else None
    processes = set[BaseProcess]()
    pool = None
    try:
        if workers > 1 and items:
            with starting_processes(), os_errors_as(lambda error: f"{what}: no processes ({error.strerror}): {_ALONE}"):
                others = {*multiprocessing.active_children()}
                context = multiprocessing.get_context(START_METHOD)
                started = context.Semaphore(0)
                pool = ProcessPoolExecutor(min(workers, len(items)), context, _begin, (job, started))
                results = pool.map(partial(_run, function), items)
                processes = {*multiprocessing.active_children()} - others
                if not all(started.acquire(timeout=_START_SECONDS) for _ in processes):
                    late = f"a process did not start in {_START_SECONDS:g} s"
                    raise WorkerDied(f"{what}: {late}: run the same command again")
        else:
            results = (function(job, item) for item in items)
        for result in results:
            if progress:
                progress.step()
            yield result
    except BrokenProcessPool as error:
        raise WorkerDied(
            f"{what}: a process was killed, for want of memory perhaps; lower --workers and run the same command again"
        ) from error
    finally:
        for process in processes:
            process.kill()
        if pool:
            pool.shutdown(cancel_futures=True)
    if progress:
        progress.close()


def _begin(job: Any, started: Semaphore) -> None:
    _JOB[:] = [job]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    begin_process()
    started.release()


def _run(function: Callable[[Any, Item], Result], item: Item) -> Result:
    return function(_JOB[0], item)

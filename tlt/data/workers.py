"""Batches are made ahead of time by worker processes of torch's DataLoader, or by one thread for backends that have
threads of their own. Where no batch comes, the file that is being read is named."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import LESS_MEMORY, BatchDataset, Fault, WorkerStatus
from tlt.errors import UserError, WorkerDied
from tlt.io.processes import START_METHOD, end_with_main_process
from tlt.io.text import printable

PREFETCH_FACTOR = 2  # batches ready or in the making per worker
_LOOK_S = 5.0  # between two looks whether workers live, while a batch is waited for
_BEGIN_S = 60.0  # within which a worker begins: CPython up to 3.11 can hang in a fork beside threads of C++ libraries
_DYING_S = 2.0  # within which a process that has closed its connections ends
_JOIN_S = 10.0  # within which a thread finishes its batch

Keys = Callable[[], Iterable[BatchKey]]


class _Keys(Sampler[BatchKey]):
    """The sampler of a DataLoader; `source` is set while a pass begins."""

    source: Keys = tuple

    def __iter__(self) -> Iterator[BatchKey]:
        return iter(self.source())


class Workers:
    """The worker processes of one data set. A pass that ends early, or fails, ends them.

    Nothing here, nor in the loaders, may refer back to its owner: torch's iterator must be freed by its last reference.
    In a cycle the collector ends the queues' threads first, and each worker is then waited for in vain for 5 s.

    Args:
        dataset: What to load.
        workers: Processes; 0: this one loads.
        pin_memory: Batches in page-locked memory.
        persistent: Keep the workers from pass to pass.
        timeout: Seconds to wait for a batch; 0: for ever.
    """

    def __init__(self, dataset: BatchDataset, workers: int, pin_memory: bool, persistent: bool, timeout: float) -> None:
        dataset.worker_status = WorkerStatus(workers)
        self.dataset, self.workers, self.timeout = dataset, workers, timeout
        self.pin_memory, self.persistent = pin_memory, persistent and workers > 0
        self._keys = _Keys()
        self._loader = self._new_loader()

    def run(self, keys: Keys) -> Iterator[Batch]:
        """Yield the batches of the keys, in their order. Raises UserError."""
        (batches, processes), complete = self._begin(keys), False
        try:
            while (batch := self._next(batches, processes)) is not None:
                yield _checked(batch)
            complete = True
        finally:
            if self.persistent and not complete:
                self._loader = self._new_loader()

    def _new_loader(self) -> DataLoader[Batch | Fault]:
        self.dataset.worker_status.clear()
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._keys,
            num_workers=self.workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            # torch waits for the whole of its timeout before it looks whether its workers live: see `_next`.
            timeout=min(self.timeout or _LOOK_S, _LOOK_S) if self.workers else 0,
            worker_init_fn=_obey_main_process,
            prefetch_factor=PREFETCH_FACTOR if self.workers else None,
            persistent_workers=self.persistent,
            multiprocessing_context=START_METHOD if self.workers else None,
            # DataLoader draws a seed at each pass, which would move the global generator.
            generator=torch.Generator(),
        )

    def _begin(self, keys: Keys) -> tuple[Iterator[Batch | Fault], list[BaseProcess]]:
        """Start the workers, or tell those that were kept to go on."""
        self._keys.source = keys
        if not self.persistent:
            self.dataset.worker_status.clear()
        try:
            with _sigchld_untouched():
                batches = iter(self._loader)
        except (RuntimeError, OSError) as error:
            reason = str(error).split("\n")[0]
            raise WorkerDied(f"data workers can't be started, or do not answer ({reason}): {LESS_MEMORY}") from error
        finally:
            self._keys.source = tuple  # the keys may refer to the owner
        processes = getattr(batches, "_workers", [])
        weakref.finalize(batches, _kill, processes, os.getpid())  # at the latest when the program ends
        return batches, processes

    def _next(self, batches: Iterator[Batch | Fault], processes: list[BaseProcess]) -> Batch | Fault | None:
        """Wait for the next batch; None at the end. Raises UserError."""
        began, sentinels = time.monotonic(), [process.sentinel for process in processes]
        try:
            while True:
                # Before each wait: a worker that was killed while it sent may have left half of a batch.
                if wait(sentinels, 0):
                    raise _died(processes)
                try:
                    return next(batches, None)
                except (RuntimeError, OSError, EOFError) as error:
                    timed_out = "DataLoader timed out" in str(error)
                    if wait(sentinels, 0 if timed_out else _DYING_S):
                        raise _died(processes) from error
                    if "open files" in str(error) or "ancdata" in str(error):
                        message = "too many open files: raise the limit (ulimit -n) or lower --workers"
                        raise WorkerDied(message) from error
                    if not timed_out:
                        raise
                waited = time.monotonic() - began
                if waited >= _BEGIN_S and not self.dataset.worker_status.all_begun():
                    raise WorkerDied(f"a data worker has not begun after {waited:.0f} s: it hangs; start again")
                if self.timeout and waited >= self.timeout:
                    raise _hung(self.dataset, self.timeout)
        except BaseException:
            _kill(processes, os.getpid())  # nothing is loaded any more: torch would wait 10 s for each that hangs
            raise


@contextmanager
def _sigchld_untouched() -> Iterator[None]:
    """Put back the handler of SIGCHLD. torch's raises for a dead worker wherever the main process is, in the middle of
    an optimizer step say; `Workers._next` looks for dead workers itself."""
    settable = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if settable else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


class OneThread:
    """A thread that makes the batches of one data set, two ahead; the interface of `Workers`.

    Args:
        dataset, pin_memory, timeout: As for `Workers`.
    """

    def __init__(self, dataset: BatchDataset, pin_memory: bool, timeout: float) -> None:
        dataset.worker_status = WorkerStatus(0)
        self.dataset, self.pin_memory, self.timeout = dataset, pin_memory, timeout

    def run(self, keys: Keys) -> Iterator[Batch]:
        """Yield the batches of the keys, in their order. Raises UserError."""
        wanted: SimpleQueue[BatchKey | None] = SimpleQueue()
        made: SimpleQueue[Batch | Fault | BaseException] = SimpleQueue()
        # A daemon: the interpreter waits for others at its end, for ever where a file hangs.
        thread = threading.Thread(target=self._serve, args=(wanted, made), daemon=True)
        thread.start()
        end = weakref.finalize(thread, _end_thread, thread, wanted)  # at the latest when the program ends
        pending, source = 0, iter(keys())
        try:
            while True:
                while pending < PREFETCH_FACTOR and (key := next(source, None)) is not None:
                    wanted.put(key)
                    pending += 1
                if not pending:
                    return
                try:
                    batch = made.get(timeout=self.timeout or None)
                except Empty:
                    raise _hung(self.dataset, self.timeout) from None
                pending -= 1
                if isinstance(batch, BaseException):
                    raise batch
                yield _checked(batch)
        finally:
            end()

    def _serve(self, wanted: SimpleQueue[BatchKey | None], made: SimpleQueue[Batch | Fault | BaseException]) -> None:
        while (key := wanted.get()) is not None:
            try:
                batch = self.dataset[key]
                made.put(batch.pin_memory() if self.pin_memory and isinstance(batch, Batch) else batch)
            except BaseException as error:
                made.put(error)


def _end_thread(thread: threading.Thread, wanted: SimpleQueue[BatchKey | None]) -> None:
    """Let a thread end after the batch in hand: the interpreter must not end while it is in a library's code."""
    with suppress(Empty):
        while True:
            wanted.get_nowait()
    wanted.put(None)
    thread.join(_JOIN_S)


def _checked(batch: Batch | Fault) -> Batch:
    if isinstance(batch, Fault):
        raise batch.kind(batch.message)
    return batch


def _died(processes: list[BaseProcess]) -> WorkerDied:
    ended = wait([process.sentinel for process in processes], 0)
    dead = next(process for process in processes if process.sentinel in ended)
    dead.join(_DYING_S)
    code = dead.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    cause = f"most likely too little memory; {LESS_MEMORY}"
    if how.endswith("SIGBUS"):
        cause += ". Or the label archive was cut, or its disk gone, while it was read: run tlt check"
    return WorkerDied(f"a data worker {how}: {cause}")


def _hung(dataset: BatchDataset, timeout: float) -> UserError:
    """Which file is being read, where no batch has come for `timeout` seconds."""
    limit = f"no batch after {timeout:g} s (--loader-timeout)"
    longest = dataset.worker_status.longest()
    if longest is None:
        return WorkerDied(f"{limit}, though no file is being read: the machine may be short of memory or stopped")
    path, seconds = printable(dataset.path(longest[0])), longest[1]
    return UserError(f"{limit}: reading {path} has taken {seconds:.0f} s; check the storage, or raise the limit")


def _kill(processes: list[BaseProcess], owner: int) -> None:
    """End workers at once, hung ones too. A process that was forked from their owner leaves them alone."""
    for process in processes if os.getpid() == owner else ():
        process.kill()


def _unchanged(batch: Any) -> Any:
    return batch


def _obey_main_process(worker: int) -> None:
    """Ignore what Ctrl-C, Slurm and torchrun send to all processes of a job: the main process decides. A worker ends by
    its queue, by SIGKILL, or with the main process."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has but the first two
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":
        end_with_main_process()
    info: Any = get_worker_info()
    info.dataset.worker_status.mark(-1)

"""Batches are made ahead of time by worker processes of torch's DataLoader, or by one thread for backends that have
threads of their own. Where no batch comes, the file that is being read is named."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import LESS_MEMORY, BatchDataset, WorkerStatus, out_of_memory
from tlt.errors import UserError, WorkerDied
from tlt.io.jobs import START_METHOD, end_with_main_process
from tlt.io.text import printable

PREFETCH_FACTOR = 2  # batches ready or in the making per worker
_LOOK_S = 5.0  # between two looks whether workers live, while a batch is waited for
_DYING_S = 2.0  # within which a process that has closed its connections ends
_JOIN_S = 10.0  # within which a thread finishes its batch


class _Keys(Sampler[BatchKey]):
    """The sampler of a DataLoader: the keys of the pass that begins."""

    keys: Iterator[BatchKey]

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys


class Workers:
    """The worker processes of one data set. A pass that ends early, or fails, ends them.

    Nothing here, nor in the loaders, may refer back to its owner: torch's iterator must be freed by its last reference.
    In a cycle the collector ends the queues' threads first, and each worker is then waited for in vain for 5 s.

    Args:
        dataset: What to load.
        workers: Processes; 0: this one loads. A backend with threads of its own is given one thread instead.
        pin_memory: Batches in page-locked memory.
        persistent: Keep the workers from pass to pass.
        timeout: Seconds to wait for a batch; 0: for ever.
    """

    def __init__(self, dataset: BatchDataset, workers: int, pin_memory: bool, persistent: bool, timeout: float) -> None:
        self.in_thread = dataset.backend.has_threads and workers > 0
        self.workers = 0 if self.in_thread else workers
        self.dataset, self.timeout, self.pin_memory = dataset, timeout, pin_memory
        self.persistent = persistent and self.workers > 0
        self._sampler = _Keys()
        self._kept: DataLoader[Batch | UserError] | None = None
        dataset.worker_status = WorkerStatus(self.workers)

    def run(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        """Yield the batches of the keys, in their order. Raises UserError."""
        batches = self._run(keys)
        return _from_one_thread(batches, self.dataset, self.timeout) if self.in_thread else batches

    def _run(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        loader, self._kept = self._new_loader() if self._kept is None else self._kept, None
        self._sampler.keys = keys
        self.dataset.worker_status.clear()
        try:
            batches = _begun(loader)
        except (RuntimeError, OSError) as error:
            reason = str(error).split("\n")[0]
            raise WorkerDied(f"data workers can't be started, or do not answer ({reason}): {LESS_MEMORY}") from error
        processes = getattr(batches, "_workers", [])
        weakref.finalize(batches, _kill, processes, os.getpid())  # at the latest when the program ends
        while (batch := self._next(batches, processes)) is not None:
            if isinstance(batch, UserError):
                raise batch
            yield batch
        if self.persistent:
            self._kept = loader

    def _new_loader(self) -> DataLoader[Batch | UserError]:
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._sampler,
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

    def _next(self, batches: Iterator[Batch | UserError], processes: list[BaseProcess]) -> Batch | UserError | None:
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
                    if not timed_out:
                        raise out_of_memory(error) or error from error
                if self.timeout and time.monotonic() - began >= self.timeout:
                    raise _hung(self.dataset, self.timeout)
        except BaseException:
            _kill(processes, os.getpid())  # nothing is loaded any more: torch would wait 10 s for each that hangs
            raise


def _begun(loader: DataLoader[Batch | UserError]) -> Iterator[Batch | UserError]:
    """Begin a pass, and put back the handler of SIGCHLD: torch's raises for a dead worker wherever the main process is,
    in the middle of an optimizer step say. `Workers._next` looks for dead workers itself."""
    settable = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if settable else None
    batches = iter(loader)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    return batches


def _from_one_thread(batches: Iterator[Batch], dataset: BatchDataset, timeout: float) -> Iterator[Batch]:
    """Yield the batches, which one thread makes two ahead. Raises UserError."""
    made: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
    free, stop = threading.Semaphore(PREFETCH_FACTOR), threading.Event()

    def make() -> None:
        while free.acquire() and not stop.is_set():
            try:
                made.put(next(batches, None))
            except BaseException as error:
                made.put(error)

    # A daemon: the interpreter waits for others at its end, for ever where a file hangs.
    thread = threading.Thread(target=make, daemon=True)

    def end() -> None:
        """Let the thread end after the batch in hand: the interpreter must not end while it is in a library's code."""
        stop.set()
        free.release()
        thread.join(_JOIN_S)

    at_exit = weakref.finalize(stop, end)  # at the latest when the program ends
    thread.start()
    try:
        while True:
            try:
                batch = made.get(timeout=timeout or None)
            except Empty:
                raise _hung(dataset, timeout) from None
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            free.release()
            yield batch
    finally:
        at_exit()


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
    if longest is None:  # CPython up to 3.11 can hang in a fork beside threads of C++ libraries
        return WorkerDied(f"{limit}, though no file is being read: a worker hangs, or the machine does; start again")
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

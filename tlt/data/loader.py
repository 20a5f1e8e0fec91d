"""Batches for training and evaluation, made ahead of time and finished on the device.

What is loaded is a function of (seed, epoch, index stream); workers, pinning and prefetching change nothing. No loader
holds random state, and none touches torch's. Batches are made by worker processes of torch's DataLoader, or by one
thread for backends that have threads of their own. Where no batch comes, the file that is being read is named.
"""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Listener, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tlt.data.batch import Batch, BatchKey, SkipCounter
from tlt.data.dataset import LESS_MEMORY, BatchDataset, EvalDataset, WorkerStatus, out_of_memory
from tlt.errors import UserError, WorkerDied, in_range
from tlt.io.jobs import START_METHOD, begin_process, starting_processes
from tlt.io.text import printable

DEFAULT_TIMEOUT = 300.0  # seconds
PREFETCH_FACTOR = 2  # batches ready or in the making per worker
_LOOK_S = 5.0  # between two looks whether workers live, while a batch is waited for
_DYING_S = 2.0  # within which a process that has closed its connections ends
_JOIN_S = 10.0  # within which a thread finishes its batch


class DeviceLoader:
    """What the loaders of training and evaluation share: loading, counting images that can't be read, the device stage.

    Args:
        device: Where the batches are finished and stay.
        workers: Worker processes; 0 loads in this thread. A backend with threads of its own is given one thread.
        pin_memory: Copy through page-locked memory (CUDA only).
        prefetch: On CUDA, copy and finish the next batch on a side stream while this one is used. Also pins: the host
            waits for a copy from memory that isn't page-locked.
        persistent_workers: Keep the workers from epoch to epoch.
        timeout: Seconds to wait for a batch before giving up, naming the file that is being read; 0 waits for ever.
            Without workers nobody watches.
        skips: Counter of unreadable images; None: a new one with the default limit.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        device: torch.device | str = "cpu",
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: bool = True,
        persistent_workers: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        skips: SkipCounter | None = None,
    ) -> None:
        in_range("--workers", workers, 0)
        in_range("--loader-timeout", timeout, 0)
        self.skips = skips or SkipCounter(len(dataset))
        self.device = torch.device(device)
        on_cuda = self.device.type == "cuda"
        self.prefetch, pin = prefetch and on_cuda, (pin_memory or prefetch) and on_cuda
        self._workers = Workers(dataset, workers, pin, persistent_workers, timeout)

    def _finish(self, batch: Batch) -> Tensor:
        """The device stage: uint8 images on the device to float32 ones."""
        raise NotImplementedError

    def _load(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        """Yield the batches of the keys. Raises UserError."""
        batches = self._workers.run(keys)
        return self._one_ahead(batches) if self.prefetch else map(self._finished, batches)

    def _finished(self, batch: Batch) -> Batch:
        self.skips.record(batch.skipped)
        if batch.images.is_cuda:
            # Made on a stream of the backend: its memory must not be given away before this stream is done with it.
            batch.images.record_stream(torch.cuda.current_stream(self.device))
        batch = batch.to(self.device, non_blocking=True)
        with torch.no_grad():
            return replace(batch, images=self._finish(batch))

    def _one_ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        stream = _side_stream(self.device)
        waiting: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                begun = self._finished(batch), stream.record_event()
            if waiting is not None:
                yield self._handed_over(*waiting)
            waiting = begun
        if waiting is not None:
            yield self._handed_over(*waiting)

    def _handed_over(self, batch: Batch, done: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for tensor in batch.tensors():
            # Made on the side stream: its memory must not be given away before the current stream is done with it.
            tensor.record_stream(current)
        return batch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all passes and loaders: torch keeps what was freed on a stream for that stream alone."""
    return torch.cuda.Stream(device)


class EvalLoader(DeviceLoader):
    """Every image of this rank once, in order; images that can't be read are left out and counted in `skips`.

    Args:
        stage: Normalises (images uint8 on the device) to float32.
        loading: `device`, `workers` and the other arguments of `DeviceLoader`.
        world_size, rank: The images are dealt to the ranks in turn.

    Attributes:
        left_out: Images of this rank that the newest pass has left out so far.
        bad_labels: Which label maps were replaced (`--bad-label`).
    """

    def __init__(
        self,
        dataset: EvalDataset,
        batch_size: int,
        stage: Callable[[Tensor], Tensor],
        world_size: int = 1,
        rank: int = 0,
        **loading: Any,
    ) -> None:
        super().__init__(dataset, **loading)
        self.dataset, self.batch_size, self.stage = dataset, batch_size, stage
        self.left_out = 0
        self.bad_labels = SkipCounter(len(dataset), len(dataset))
        self._indices = range(rank, len(dataset), world_size)

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self._indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches. Raises UserError: too many unreadable images, or a file that can't be read in time."""
        self.left_out = 0
        for batch in self._load(self._keys()):
            self.left_out += len(batch.skipped)
            self.bad_labels.record(batch.bad_labels)
            if batch.size:
                yield batch

    def _finish(self, batch: Batch) -> Tensor:
        return self.stage(batch.images)

    def _keys(self) -> Iterator[BatchKey]:
        for start in range(0, len(self._indices), self.batch_size):
            yield BatchKey(0, tuple(self._indices[start : start + self.batch_size]))


class _Keys(Sampler[BatchKey]):
    """The sampler of a DataLoader: the keys of the pass that begins."""

    keys: Iterator[BatchKey]

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys


class Workers:
    """The worker processes of one data set. A pass that ends early, or fails, ends them.

    Nothing here, nor in the loaders, may refer back to its owner: torch's iterator must be freed by its last reference.
    In a cycle the collector ends the queues' threads first, and each worker is then waited for in vain for 5 s.

    The arguments are those of `DeviceLoader`.
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
        if self.workers and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
            _check_sockets()
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._sampler,
            num_workers=self.workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            # torch waits for the whole of its timeout before it looks whether its workers live: see `_next`.
            timeout=min(self.timeout or _LOOK_S, _LOOK_S) if self.workers else 0,
            worker_init_fn=_begin_worker,
            prefetch_factor=PREFETCH_FACTOR if self.workers else None,
            persistent_workers=self.persistent,
            multiprocessing_context=_context() if self.workers else None,
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


def _check_sockets() -> None:
    """Raise UserError where no socket can be made as those by which workers hand over what they load."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise UserError(
            f"data workers can't hand over what they load: no socket can be made in {tempfile.gettempdir()} ({error}): "
            "set TMPDIR to a folder of this machine with a short name, such as /tmp, or give --workers 0"
        ) from error


class _EndFlag:
    """By which torch tells workers that the end has come. Its own event has a lock, which a worker that is killed as it
    looks leaves held: the main process would wait for it for ever.

    Args:
        value: A byte that processes share, 0.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


def _context() -> BaseContext:
    context: Any = copy.copy(multiprocessing.get_context(START_METHOD))
    context.Event = lambda: _EndFlag(context.RawValue("b", 0))
    return context


def _begun(loader: DataLoader[Batch | UserError]) -> Iterator[Batch | UserError]:
    """Begin a pass, and put back the handler of SIGCHLD: torch's raises for a dead worker wherever the main process is,
    in the middle of an optimizer step say. `Workers._next` looks for dead workers itself."""
    settable = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if settable else None
    with starting_processes():
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


def _begin_worker(worker: int) -> None:
    """Ignore what Ctrl-C, Slurm and torchrun send to all processes of a job: the main process decides. A worker ends by
    its queue, by SIGKILL, or with the main process."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has but the first two
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    begin_process()

"""Loads batches ahead of time and finishes them on the device: the base of all loaders, and that of evaluation; the
training loader is `tlt.api.Loader`.

The result is a function of (seed, epoch, index stream): workers, pinning and prefetching do not change it. No loader
has random state or uses torch's. Worker processes of torch's DataLoader make the batches, or one thread if the backend
has threads of its own. If no batch arrives in time, the error names the file that is being read.
"""

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
PREFETCH_FACTOR = 2  # batches that a worker makes ahead
_LOOK_S = 5.0  # while waiting for a batch, seconds between checks that the workers are alive
_DYING_S = 2.0  # seconds in which a process ends after it has closed its connections
_JOIN_S = 10.0  # seconds to wait for a thread to finish its batch


class DeviceLoader:
    """The base of the loaders for training and evaluation: loads, counts unreadable images, runs the device stage.

    Args:
        device: The device that finishes the batches and holds them.
        workers: Number of worker processes; 0 loads in this thread. A backend with threads of its own gets one thread.
        pin_memory: Copy through page-locked memory (CUDA only).
        prefetch: On CUDA, copy and finish the next batch on a side stream while this one is in use. This also pins
            memory, because the host would wait for a copy from memory that is not page-locked.
        persistent_workers: Keep the workers between epochs.
        timeout: Seconds to wait for a batch before an error that names the file being read; 0 waits for ever. It has no
            effect without workers.
        skips: Counter of unreadable images; None makes one with the default limit.
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
        in_range("--workers", workers, 0, whole=True)
        in_range("--loader-timeout", timeout, 0)
        self.skips = skips or SkipCounter(len(dataset))
        self.device = torch.device(device)
        on_cuda = self.device.type == "cuda"
        self.prefetch = prefetch and on_cuda
        pin = (pin_memory or prefetch) and on_cuda
        self._workers = Workers(dataset, workers, pin, persistent_workers, timeout)

    def _finish(self, batch: Batch) -> Tensor:
        """Run the device stage: turn uint8 images on the device into float32 ones."""
        raise NotImplementedError

    def _load(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        """Yield the batches of the keys. Raise UserError if that fails."""
        batches = self._workers.run(keys)
        return self._one_ahead(batches) if self.prefetch else map(self._finish_batch, batches)

    def _finish_batch(self, batch: Batch) -> Batch:
        self.skips.record(() if batch.key.again else batch.skipped)
        if batch.images.is_cuda:
            # It was made on a stream of the backend. Its memory must not be reused before this stream has read it.
            batch.images.record_stream(torch.cuda.current_stream(self.device))
        batch = batch.to(self.device, non_blocking=True)
        with torch.no_grad():
            return replace(batch, images=self._finish(batch))

    def _one_ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        stream = _side_stream(self.device)
        pending: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                started = self._finish_batch(batch), stream.record_event()
            if pending is not None:
                yield self._hand_over(*pending)
            pending = started
        if pending is not None:
            yield self._hand_over(*pending)

    def _hand_over(self, batch: Batch, done: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for tensor in batch.tensors():
            # It was made on the side stream. Its memory must not be reused before the current stream has read it.
            tensor.record_stream(current)
        return batch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of all loaders: torch reuses memory freed on a stream only on that stream."""
    return torch.cuda.Stream(device)


class EvalLoader(DeviceLoader):
    """Yields every image of this rank once, in order: rank r gets the images r, r + world_size, and so on. Unreadable
    images are skipped and counted in `skips`. `stage` turns uint8 images on the device into normalised float32;
    `loading` are `device`, `workers` and other arguments of `DeviceLoader`."""

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
        self.dataset = dataset
        self.batch_size = batch_size
        self.stage = stage
        self.left_out = 0  # images of this rank that the current pass has skipped so far
        self.bad_labels = SkipCounter(len(dataset), len(dataset))  # label maps that were replaced (`--bad-label`)
        self._indices = range(rank, len(dataset), world_size)

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return math.ceil(len(self._indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches. Raise UserError if too many images are unreadable or reading a file takes too long."""
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
    """The sampler of a DataLoader. It yields the keys of the pass that begins."""

    keys: Iterator[BatchKey]

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys


class Workers:
    """The worker processes of one data set. They are killed if a pass ends early or fails.

    This class and the loaders must make no reference cycles: torch's iterator must be freed when its last reference
    goes. In a cycle, the garbage collector ends the threads of its queues first, and then each worker costs 5 s.

    The arguments are those of `DeviceLoader`.
    """

    def __init__(self, dataset: BatchDataset, workers: int, pin_memory: bool, persistent: bool, timeout: float) -> None:
        self.in_thread = dataset.backend.has_threads and workers > 0
        self.workers = 0 if self.in_thread else workers
        self.dataset = dataset
        self.timeout = timeout
        self.pin_memory = pin_memory
        self.persistent = persistent and self.workers > 0
        self._sampler = _Keys()
        self._loader: DataLoader[Batch | UserError] | None = None

    def run(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        """Yield the batches of the keys, in their order. Raises UserError."""
        batches = self._run(keys)
        return _from_one_thread(batches, self.dataset, self.timeout) if self.in_thread else batches

    def _run(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        self._sampler.keys = keys
        try:
            loader = self._new_loader() if self._loader is None else self._loader
            self._loader = None  # a pass that begins meanwhile has workers of its own
            batches: Any = _start_pass(loader)
        except (RuntimeError, OSError) as error:
            reason = str(error).split("\n")[0]
            raise WorkerDied(f"data workers can't be started, or do not answer ({reason}): {LESS_MEMORY}") from error
        processes = getattr(batches, "_workers", [])
        weakref.finalize(batches, _kill, processes, os.getpid())  # runs at the program's end at the latest
        while (batch := self._next(batches, processes)) is not None:
            if isinstance(batch, UserError):
                raise batch
            is_last = self.persistent and batches._send_idx == batches._rcvd_idx
            if is_last:  # keep the workers already now: the consumer may not ask for the end, as `zip` does not
                self._loader = loader
            yield batch
            if is_last:
                return

    def _new_loader(self) -> DataLoader[Batch | UserError]:
        if self.workers and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
            _check_sockets()
        self.dataset.worker_status = WorkerStatus(self.workers)
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._sampler,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            # torch checks whether its workers are alive only after its whole timeout: see `_next`.
            timeout=min(self.timeout or _LOOK_S, _LOOK_S) if self.workers else 0,
            worker_init_fn=_begin_worker,
            prefetch_factor=PREFETCH_FACTOR if self.workers else None,
            persistent_workers=self.persistent,
            multiprocessing_context=_context() if self.workers else None,
            # DataLoader draws a seed at each pass, which would advance the global generator.
            generator=torch.Generator(),
        )

    def _next(self, batches: Iterator[Batch | UserError], processes: list[BaseProcess]) -> Batch | UserError | None:
        """Wait for the next batch and return it, or None at the end. Raise UserError if that fails."""
        sentinels = [process.sentinel for process in processes]
        waited = 0.0  # seconds; at most a wait's limit for each, because this process may have been suspended in it
        try:
            while True:
                # Check before each wait: a worker that was killed while sending may have left half a batch.
                if wait(sentinels, 0):
                    raise _death_error(processes)
                began = time.monotonic()
                try:
                    with torch.device("cpu"):  # the default device may be another one
                        return next(batches, None)
                except (RuntimeError, OSError, EOFError) as error:
                    timed_out = "DataLoader timed out" in str(error)
                    if wait(sentinels, 0 if timed_out else _DYING_S):
                        raise _death_error(processes) from error
                    if not timed_out:
                        raise out_of_memory(error) or error from error
                waited += min(time.monotonic() - began, _LOOK_S)
                if self.timeout and waited >= self.timeout:
                    raise _timeout_error(self.dataset, self.timeout)
        except BaseException:
            _kill(processes, os.getpid())  # otherwise torch would wait 10 s for each worker that hangs
            raise


def _check_sockets() -> None:
    """Raise UserError if the sockets by which workers send their batches can't be made."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise UserError(
            f"data workers can't hand over what they load: no socket can be made in {tempfile.gettempdir()} ({error}): "
            "set TMPDIR to a folder of this machine with a short name, such as /tmp, or give --workers 0"
        ) from error


class _EndFlag:
    """Replaces torch's event that tells workers to stop by a shared byte, which is 0 at first. If a worker is killed
    while it reads that event, the event's lock stays held, and the main process waits for it for ever."""

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


def _start_pass(loader: DataLoader[Batch | UserError]) -> Iterator[Batch | UserError]:
    """Begin a pass and restore the handler of SIGCHLD. torch's handler raises an error for a dead worker anywhere in
    the main process, even within an optimizer step; `Workers._next` checks for dead workers instead."""
    settable = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if settable else None
    with starting_processes(), torch.device("cpu"):
        batches = iter(loader)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    return batches


def _from_one_thread(batches: Iterator[Batch], dataset: BatchDataset, timeout: float) -> Iterator[Batch]:
    """Yield the batches, which one thread makes two ahead. Raise UserError if that fails."""
    queue: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
    free = threading.Semaphore(PREFETCH_FACTOR)
    stop = threading.Event()

    def make() -> None:
        while free.acquire() and not stop.is_set():
            try:
                queue.put(next(batches, None))
            except BaseException as error:
                queue.put(error)

    # A daemon thread, because Python waits at its end for other threads, for ever if a file hangs.
    thread = threading.Thread(target=make, daemon=True)

    def end() -> None:
        """Let the thread finish its batch and end: Python must not exit while it runs code of a library."""
        stop.set()
        free.release()
        thread.join(_JOIN_S)

    end_once = weakref.finalize(thread, end)  # the program's end calls it if nothing else has
    thread.start()
    try:
        while True:
            try:
                batch = queue.get(timeout=timeout or None)
            except Empty:
                raise _timeout_error(dataset, timeout) from None
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            free.release()
            yield batch
    finally:
        end_once()


def _death_error(processes: list[BaseProcess]) -> WorkerDied:
    ended = wait([process.sentinel for process in processes], 0)
    dead = next(process for process in processes if process.sentinel in ended)
    dead.join(_DYING_S)
    code = dead.exitcode or 0
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    cause = f"most likely too little memory; {LESS_MEMORY}"
    if ending.endswith("SIGBUS"):
        cause += ". Or the label archive was cut, or its disk gone, while it was read: run tlt check"
    return WorkerDied(f"a data worker {ending}: {cause}")


def _timeout_error(dataset: BatchDataset, timeout: float) -> UserError:
    """Return the error for no batch within `timeout` seconds, which names the file being read."""
    limit = f"no batch after {timeout:g} s (--loader-timeout)"
    longest = dataset.worker_status.longest()
    if longest is None:  # CPython up to 3.11 can hang when it forks beside threads of C++ libraries
        return WorkerDied(f"{limit}, though no file is being read: a worker hangs, or the machine does; start again")
    index, seconds = longest
    path = printable(dataset.path(index))
    return UserError(f"{limit}: reading {path} has taken {seconds:.0f} s; check the storage, or raise the limit")


def _kill(processes: list[BaseProcess], owner: int) -> None:
    """Kill workers at once, even if they hang, but only from the process that owns them, not from a fork of it."""
    for process in processes if os.getpid() == owner else ():
        process.kill()


def _begin_worker(worker: int) -> None:
    """Ignore the signals that Ctrl-C, Slurm and torchrun send to all processes of a job: the main process handles them.
    A worker ends when its queue says so, by SIGKILL, or with the main process."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has only the first two
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    begin_process()

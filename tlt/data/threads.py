"""Loading in threads of this process: for backends that can't be shared with other processes, or where these cost more
than Python's lock does. What is loaded, and what is told of faults, is as in `workers.py`."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch

from tlt.data.dataset import BatchDataset, BatchKey, Fault, HostBatch, WorkerStatus
from tlt.data.workers import PREFETCH_FACTOR, hung

_END_PATIENCE = 10.0  # seconds that threads have to end: one may hang in a file

Made: TypeAlias = "Future[HostBatch | Fault]"
Tasks: TypeAlias = "SimpleQueue[tuple[Made, BatchKey] | None]"


class ThreadWorkers:
    """The threads that load one dataset, started with the first pass; the interface of `tlt.data.workers.Workers`.

    Args:
        dataset: What to load.
        workers: Threads; 0: the caller's loads.
        pin_memory: Batches in page-locked memory (CUDA only).
        timeout: Seconds to wait for a batch; 0: for ever.
        device: Training device.

    Attributes:
        deaths: Empty: a thread can't be lost without its process.
    """

    def __init__(
        self, dataset: BatchDataset, workers: int, pin_memory: bool, timeout: float, device: torch.device
    ) -> None:
        dataset.board = WorkerStatus(workers)
        self.dataset = dataset
        self.workers = workers
        self.timeout = timeout
        self.deaths: list[str] = []
        self._load = _Load(dataset, pin_memory, device)
        self._tasks: Tasks = SimpleQueue()
        self._started = False

    def run(self, keys: Callable[[], Iterator[BatchKey]]) -> Iterator[HostBatch]:
        """The batches of the keys, in their order. Raises UserError."""
        for batch in self._ahead(keys()) if self.workers else map(self._load, keys()):
            if isinstance(batch, Fault):
                raise batch.kind(batch.message)
            yield batch

    def _ahead(self, keys: Iterator[BatchKey]) -> Iterator[HostBatch | Fault]:
        self._start()
        pending: deque[Made] = deque()
        try:
            while True:
                while len(pending) < self.workers + PREFETCH_FACTOR and (key := next(keys, None)) is not None:
                    pending.append(Future())
                    self._tasks.put((pending[-1], key))
                if not pending:
                    return
                if not wait([pending[0]], self.timeout or None).done:
                    raise hung(self.dataset, self.timeout)
                yield pending.popleft().result()
        finally:
            for made in pending:
                made.cancel()

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        threads_of_torch, begun = torch.get_num_threads(), threading.Barrier(self.workers + 1)
        threads = [
            # Daemons: the interpreter waits for others at its end, for ever where a file hangs.
            threading.Thread(
                target=_serve, args=(self._load, self._tasks, slot, begun), name=f"loader {slot}", daemon=True
            )
            for slot in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        begun.wait()
        torch.set_num_threads(threads_of_torch)  # threads to come take the number that was set last
        weakref.finalize(self, _end, self._tasks, threads)


class _Load:
    """Makes the batch of a key, whole when it is handed over: all that was started on a GPU has ended."""

    def __init__(self, dataset: BatchDataset, pin_memory: bool, device: torch.device) -> None:
        self.dataset = dataset
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pin_memory = pin_memory

    def __call__(self, key: BatchKey) -> HostBatch | Fault:
        if self.stream is None:
            return self.dataset[key]
        with torch.cuda.stream(self.stream):
            batch = self.dataset[key]
        self.stream.synchronize()  # deliberate: in a thread that loads, not in the one that trains
        return batch.pin_memory() if self.pin_memory and isinstance(batch, HostBatch) else batch


def _serve(load: _Load, tasks: Tasks, slot: int, begun: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first operation would set it to what was set last in any thread
    torch.set_num_threads(1)
    load.dataset.board.begin(slot)
    begun.wait()
    while (task := tasks.get()) is not None:
        made, key = task
        if not made.set_running_or_notify_cancel():
            continue
        try:
            made.set_result(load(key))
        except BaseException as error:
            made.set_exception(error)
        del task, made  # or its batch would stay until the next one comes


def _end(tasks: Tasks, threads: list[threading.Thread]) -> None:
    """Not later than the interpreter: a thread that it ends within a library's code takes the process with it."""
    with contextlib.suppress(Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    limit = time.monotonic() + _END_PATIENCE
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))

"""Worker processes: they make host batches, are started anew when one dies, and leave no process behind."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from tlt.data.dataset import BatchDataset, BatchKey, Fault, HostBatch, WorkerStatus
from tlt.errors import UserError
from tlt.io.processes import START_METHOD, end_with_main_process
from tlt.io.text import printable

PREFETCH_FACTOR = 2  # batches ready or in the making per worker
_DEATH_NOTICE = 2.0  # seconds
_FORKS, _FORK_PATIENCE = 3, 10.0  # times that workers are started, and seconds that they have to begin
_LESS = "lower --workers or --batch-size, and in a container give /dev/shm more room (docker --shm-size)"
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid\D*[\d, ]+\) (is killed by signal: [^.]*|exited unexpectedly)")


class _Keys(Sampler[BatchKey]):
    """The sampler of one DataLoader; what it yields is set before each pass."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[BatchKey]] = _no_keys

    def __iter__(self) -> Iterator[BatchKey]:
        return self.source()


class WorkerDied(UserError):
    """A data worker is gone: killed by a signal, or because memory, shared memory or open files have run out."""

    exit_code = 5  # as of a rank that is lost: the next start may have more of it


class _DeathWatch:
    """torch's SIGCHLD handler raises for a dead worker wherever the main process is, in the middle of an optimizer step
    say. This lets it do so only while a batch is waited for, where the step can still be had again."""

    def __init__(self) -> None:
        self._told: Any = None  # torch's handler
        self._waiting = False

    def take_over(self) -> None:
        """Stand in for torch's handler, which torch sets once in a process."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._received and threading.current_thread() is threading.main_thread():
            self._told = handler
            signal.signal(signal.SIGCHLD, self._received)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.take_over()
        self._waiting = True
        try:
            if self._told is not None:
                self._told(signal.SIGCHLD, None)  # one that has died since
            yield
        finally:
            self._waiting = False

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._told(number, frame)


_DEATHS = _DeathWatch()


class Workers:
    """The worker processes of one dataset. When one dies, all are started anew, once in a pass.

    Nothing here, nor in the loaders, may refer back to its owner: torch's iterator must be freed by its last reference.
    In a cycle the collector ends the queues' threads first, and each worker is then waited for in vain for 5 s.

    Attributes:
        deaths: Why workers were started anew.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        workers: int,
        pin_memory: bool,
        persistent: bool,
        timeout: float,
        device: torch.device,
    ) -> None:
        dataset.board = WorkerStatus(workers)
        self.dataset = dataset
        self.workers = workers
        self.deaths: list[str] = []
        self.keys = _Keys()
        self._make_loader = functools.partial(
            DataLoader,
            dataset,
            batch_size=None,
            sampler=self.keys,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory and device.type == "cuda",
            timeout=timeout if workers else 0,
            worker_init_fn=_obey_main_process,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            persistent_workers=persistent and workers > 0,
            multiprocessing_context=START_METHOD if workers else None,
            # DataLoader draws a seed at each pass, which would move the global generator.
            generator=torch.Generator(),
        )
        self.loader: DataLoader[HostBatch | Fault] = self._make_loader()

    def run(self, keys: Callable[[], Iterator[BatchKey]]) -> Iterator[HostBatch]:
        delivered, died = 0, False
        while True:
            try:
                for batch in self._pass(keys, delivered):
                    delivered += 1
                    yield batch
                return
            except WorkerDied as death:
                if died:
                    raise
                died = True
                self.deaths.append(str(death))
            # The old workers end with the last reference to their loader.
            self.loader = self._make_loader()

    def _pass(self, keys: Callable[[], Iterator[BatchKey]], start: int) -> Iterator[HostBatch]:
        self.keys.source = lambda: itertools.islice(keys(), start, None)
        try:
            batches = self._begin()
            while True:
                with _DEATHS.waiting():
                    batch = next(batches, None)
                if batch is None:
                    return
                if isinstance(batch, Fault):
                    raise WorkerDied(f"{batch.message}: {_LESS}") if batch.no_memory else batch.kind(batch.message)
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            if explained := self._explained(error):
                try:
                    raise explained from error
                finally:
                    del explained  # its traceback holds this frame
            raise
        finally:
            self.keys.source = _no_keys

    def _begin(self) -> Iterator[HostBatch | Fault]:
        """The batches of a pass, all of whose workers have begun.

        A process that is forked while a thread of a library takes or drops Python's lock can hang before it runs any
        code: CPython up to 3.11 waits there for a lock whose owner the child does not have. gloo's threads do so
        behind every collective. Such a worker is replaced.
        """
        board = self.dataset.board
        for _ in range(_FORKS):
            if not self.loader.persistent_workers:
                board.nobody_begun()
            batches: Any = iter(self.loader)
            _DEATHS.take_over()
            limit = time.monotonic() + _FORK_PATIENCE
            while board.not_begun() and time.monotonic() < limit:
                time.sleep(0.001)
            if not board.not_begun():
                return batches
            for worker in board.not_begun():
                batches._workers[worker].kill()
            del batches
            self.loader = self._make_loader()
        return iter(self.loader)

    def _explained(self, error: Exception) -> UserError | None:
        if not self.workers:
            return None
        if isinstance(error, RuntimeError):
            if "DataLoader timed out" in str(error):
                return hung(self.dataset, self.loader.timeout)
            return worker_fault(error)
        # A tensor could not be fetched from its worker. If that is because the worker died, torch's signal handler is
        # about to raise, here or in the middle of something else.
        try:
            with _DEATHS.waiting():
                time.sleep(_DEATH_NOTICE)
        except RuntimeError as death:
            return worker_fault(death)
        return None


def hung(dataset: BatchDataset, timeout: float) -> UserError:
    """What to tell when no batch has come for `timeout` seconds: which file is being read."""
    limit = f"no batch after {timeout:g} s (--loader-timeout)"
    longest = dataset.board.longest()
    if longest is None:
        return UserError(f"{limit}, though no file is being read: the machine may be short of memory or stopped")
    path, seconds = printable(dataset.path(longest[0])), longest[1]
    return UserError(f"{limit}: reading {path} has taken {seconds:.0f} s; check the storage, or raise the limit")


def kill_workers() -> None:
    """End all worker processes at once, hung ones too: nothing will be loaded any more."""
    _DEATHS.take_over()
    for process in multiprocessing.active_children():
        process.kill()


def worker_fault(error: RuntimeError) -> WorkerDied | None:
    """The user's view of a dead data worker, None for other errors.

    torch notices a dead worker in a signal handler, so that the error can come up anywhere in the main process: a
    program passes what it catches around its loop.
    """
    text = str(error)
    if match := _DEAD_WORKER.search(text):
        how = match[1].replace("is killed", "was killed")
        return WorkerDied(
            f"a data worker {how}: most likely too little memory; {_LESS}. After a bus error, run tlt check: the label "
            "archive may have been cut, or its disk gone, while it was read"
        )
    if "No space left on device" in text or "unable to allocate shared memory" in text:
        return WorkerDied(f"no room in shared memory (/dev/shm) for a batch: {_LESS}")
    if "Too many open files" in text or "received 0 items of ancdata" in text:
        return WorkerDied(
            "too many open files between the data workers: raise the limit (ulimit -n) or lower --workers"
        )
    return None


def _no_keys() -> Iterator[BatchKey]:
    return iter(())


def _unchanged(batch: Any) -> Any:
    return batch


def _obey_main_process(worker: int) -> None:
    """What ends a job (Ctrl-C, Slurm, torchrun) reaches all its processes: the main process decides what becomes of a
    worker, which ends when told so or when the main process is no more."""
    info: Any = get_worker_info()
    # A batch that can't be sent for want of memory would be waited for until --loader-timeout.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_give_up)  # type: ignore[attr-defined]
    info.dataset.board.begin(worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    # A thread also gets the signal while a file that hangs is being read.
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()
    # torch's own check for a lost parent comes between two batches only.
    end_with_main_process()


def _give_up(error: Exception, batch: object) -> None:
    print(f"a data worker could not send a batch: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_when_told(main_process: int) -> None:
    while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != main_process:
        pass
    os._exit(0)

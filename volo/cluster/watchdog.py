"""Ends a rank that hangs, and lets all ranks stop at the same update.

Each rank watches itself alone. Where one hangs the others wait for it, so that all end at about the same time, and
their stacks show which it was: the one that does not wait in a collective. The launcher, or Slurm, ends those that are
left.

Imports no torch, as `volo.cluster.stopping`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Literal, TypeVar

from tlt.errors import UserError
from volo.cluster.stopping import Stopped, StopSignal

if TYPE_CHECKING:
    from tlt.data.batch import Batch

T = TypeVar("T")
Phase = Literal["start", "data", "others", "step", "capture", "validation", "saving"]

HUNG = 5
_OTHERS_S = 2.0  # in which the others print their stacks, before they lose a rank that hangs


class Watchdog:
    """Watches this process: prints the stacks of all its threads, and ends it, where nothing goes on.

    Args:
        timeout: Seconds without progress (`--dist-timeout`). At least `START_S` where this or another rank may be
            compiling or saving: until all ranks have met after the first step of each batch size, and before the step
            that follows a validation or a save.
        loader_timeout: Seconds for which a rank may wait for data; 0: for ever.
        note: Called with the fields of an event before the end.
    """

    START_S = 600.0

    def __init__(self, rank: int, timeout: float, loader_timeout: float, note: Callable[..., None]) -> None:
        self.rank, self.timeout, self.loader_timeout, self.note = rank, timeout, loader_timeout, note
        self._since = time.monotonic()
        self._phase: Phase = "start"
        self._meetings = 2  # of all ranks, before each of which a phase may take `START_S`
        self._sizes = set[int]()  # of batches that a step has begun with
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        self._thread.start()

    def enter_phase(self, phase: Phase, size: int | None = None) -> None:
        """Note that something was done, and that `phase` begins.

        Args:
            phase: "others" waits for the data of all ranks, "capture" is that of a CUDA graph.
            size: Images of the batch with which a step begins.
        """
        if phase == "validation":
            self._meetings = 2  # at its end, and when what it has led to is saved
        elif phase in ("saving", "capture"):
            self._meetings = max(self._meetings, 1)
        elif self._phase == "others":
            self._meetings = max(self._meetings - 1, 0)
        if size is not None and size not in self._sizes:
            self._meetings = max(self._meetings, 1)
            self._sizes.add(size)
        self._phase, self._since = phase, time.monotonic()

    def end(self) -> None:
        """Watch no more: the run is over."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def allowed(self) -> float:
        """Return the seconds that this rank may spend in the present phase without doing anything."""
        waits = max(self.timeout, self.START_S) if self._meetings else self.timeout
        if self._phase in ("data", "others"):  # the others wait for the rank whose data are late
            return max(waits, self.loader_timeout + 30) if self.loader_timeout else float("inf")
        return waits

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.timeout / 10)):
            phase, idle = self._phase, time.monotonic() - self._since
            if idle > self.allowed() and not self._ended.is_set():
                # The process may be full of locks: nothing here waits for another thread but the event's file.
                reason = f"no progress for {idle:.0f} s (--dist-timeout {self.timeout:g}), in phase {phase}"
                os.write(2, f"[rank {self.rank}] hung: {reason}\n".encode())
                faulthandler.dump_traceback(file=2, all_threads=True)
                with suppress(Exception):
                    self.note(fault="hung", reason=reason, phase=phase)
                time.sleep(_OTHERS_S)
                os._exit(HUNG)


class StopGuard:
    """Yields batches until the run has to stop, and reports progress to the watchdog. `largest` returns the largest of
    the ints that all ranks call it with."""

    def __init__(self, stop: StopSignal, watchdog: Watchdog, largest: Callable[[int], int]) -> None:
        self.stop, self.watchdog, self._largest = stop, watchdog, largest
        self.waited = 0.0  # seconds, for batches

    def iterate_until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield training batches. An update begins when all ranks have its first batch.

        Raises:
            Stopped: Between two updates, on all ranks: one of them received a signal, or its data failed (then that
                UserError is the cause, on that rank).
        """
        iterator, at_boundary = iter(batches), True
        while True:
            batch, failure = self._next(iterator, at_boundary)
            if at_boundary:
                self._agree(failure)
            if batch is None:
                return
            self.watchdog.enter_phase("step", batch.size)
            at_boundary = batch.key.last
            yield batch

    def iterate_validation(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield validation batches; at the end the ranks agree whether each has had all of its own, or stop."""
        iterator = iter(loader)
        while True:
            item, failure = self._next(iterator, True)
            if item is None:
                break
            self.watchdog.enter_phase("validation")
            yield item
        self._agree(failure)

    def _next(self, iterator: Iterator[T], at_boundary: bool) -> tuple[T | None, UserError | Stopped | None]:
        self.watchdog.enter_phase("data")
        began = time.perf_counter()
        try:
            with self.stop.raising() if at_boundary else nullcontext():
                return next(iterator, None), None
        except (UserError, Stopped) as error:
            if not at_boundary:
                raise
            return None, error
        finally:
            self.waited += time.perf_counter() - began

    def _agree(self, failure: UserError | Stopped | None) -> None:
        self.watchdog.enter_phase("others")
        code = self._largest(self.stop.exit_code if failure is None else failure.exit_code)
        self.watchdog.enter_phase("step")
        if isinstance(failure, UserError):
            raise Stopped(failure.exit_code, str(failure)) from failure
        if code:
            self.stop.check()
            raise Stopped(code, "stopped because another rank had to")

"""Ends a rank that hangs, and lets all ranks stop at the same update.

Each rank watches only itself. If one rank hangs the others wait for it, so all ranks end at about the same time. Their
stacks show which rank hung: the only one that is not waiting in a collective. The launcher or Slurm ends the ranks that
are left.

This module imports no torch, like `volo.cluster.stopping`.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from tlt.errors import UserError
from volo.cluster.stopping import Stopped, StopSignal

if TYPE_CHECKING:
    from tlt.data.batch import Batch

T = TypeVar("T")
Phase = Literal["start", "data", "others", "step", "capture", "validation", "saving"]

# Phases after which a rank may still compile or save, and after how many meetings of all ranks ("others") none does:
# validation has one at its end, and one after the save that may follow.
_MEETINGS: dict[Phase, int] = {"start": 2, "validation": 2, "saving": 1, "capture": 1}
HUNG = 5
_STOOD_STILL_S = 2.0  # so much later than asked for this thread wakes only if time stood still for the whole process
_OTHERS_S = 2.0  # a rank that hangs waits so long before it ends, so that the other ranks can print their stacks


@dataclass(eq=False)
class Watchdog:
    """Watches this process. If it makes no progress, the watchdog prints the stacks of all threads and ends it. At
    least `START_S` seconds are allowed while any rank may be compiling or saving: until all ranks have met after the
    first step of each batch size, and before the first step after a validation or a save."""

    START_S = 600.0

    rank: int
    timeout: float  # seconds without progress after which the process ends (`--dist-timeout`)
    loader_timeout: float  # seconds for which a rank may wait for data; 0 sets no limit
    note: Callable[..., None]  # records an event; it is called with the event's fields before the process ends
    count: Callable[[str], object] = str  # receives what the time from now on is spent on
    validates: bool = False  # whether data are waited for in a validation

    def __post_init__(self) -> None:
        self._since = time.monotonic()
        self._phase: Phase = "start"
        self._meetings_ahead = _MEETINGS["start"]  # until phases are limited to `timeout`
        self._sizes = set[int]()  # batch sizes with which a step has begun
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start watching."""
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        self._thread.start()

    def enter_phase(self, phase: Phase, size: int | None = None) -> None:
        """Record progress, and that `phase` begins: "others" waits until all ranks have their data, "capture" captures
        a CUDA graph. `size` is the number of images in the batch of a step, whose first one compiles."""
        compiles = size is not None and size not in self._sizes
        if size is not None:
            self._sizes.add(size)
        if phase == "saving" or self.validates:
            self.count("saving" if phase == "saving" else "validation")
        elif phase != "start":  # whose parts the program tells
            self.count("data" if phase == "others" else phase)
        have_met = self._phase == "others" and phase not in _MEETINGS
        self._meetings_ahead = max(self._meetings_ahead - have_met, _MEETINGS.get(phase, int(compiles)))
        self._since = time.monotonic()
        self._phase = phase

    def end(self) -> None:
        """Stop watching, because the run is over."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def allowed(self) -> float:
        """Return how many seconds this rank may spend in the current phase without progress."""
        waits = max(self.timeout, self.START_S) if self._meetings_ahead else self.timeout
        if self._phase in ("data", "others"):  # in "others" a rank waits for another rank whose data are late
            return max(waits, self.loader_timeout + 30) if self.loader_timeout else float("inf")
        return waits

    def _watch(self) -> None:
        pause = min(1.0, self.timeout / 10)
        woke = time.monotonic()
        while not self._ended.wait(pause):
            before = woke
            woke = time.monotonic()
            if woke - before > pause + _STOOD_STILL_S:
                self._since = woke  # the process was suspended (SIGSTOP, a frozen container, a laptop)
            phase = self._phase
            idle = woke - self._since
            if idle > self.allowed() and not self._ended.is_set():
                # Other threads may hold any lock, so this code waits for no lock except that of the event's file.
                reason = f"no progress for {idle:.0f} s (--dist-timeout {self.timeout:g}), in phase {phase}"
                os.write(2, f"[rank {self.rank}] hung: {reason}\n".encode())
                faulthandler.dump_traceback(file=2, all_threads=True)
                with suppress(Exception):
                    self.note(fault="hung", reason=reason, phase=phase)
                time.sleep(_OTHERS_S)
                os._exit(HUNG)


@dataclass(eq=False)
class StopGuard:
    """Yields batches until the run has to stop, and reports progress to the watchdog."""

    stop: StopSignal
    watchdog: Watchdog
    largest: Callable[[int], int]  # takes one int from each rank and returns the largest of them
    waited: float = 0.0  # seconds spent waiting for batches

    def iterate_until_stopped(self, batches: "Iterable[Batch]") -> "Iterator[Batch]":
        """Yield training batches. An update begins after all ranks have received its first batch. Raise Stopped between
        two updates, on all ranks, if a rank received a signal or its data failed; on the rank whose data failed, its
        UserError is the cause. Raise UserError if data failed within an update."""
        iterator = iter(batches)
        at_boundary = True
        self.watchdog.validates = False
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
        """Yield validation batches. At the end the ranks agree whether all got all their batches; if not, they stop."""
        self.watchdog.validates = True
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
        """Exchange exit codes with all ranks, and raise Stopped on each of them if one is not 0: with its own code
        on a rank that has received a signal or whose data have failed, on the others with the largest."""
        self.watchdog.enter_phase("others")
        code = self.largest(self.stop.exit_code if failure is None else failure.exit_code)
        self.watchdog.enter_phase("step")
        if isinstance(failure, UserError):
            raise Stopped(failure.exit_code, str(failure)) from failure
        if code:
            self.stop.check()
            raise Stopped(code, "stopped because another rank had to")

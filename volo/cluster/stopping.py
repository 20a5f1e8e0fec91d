"""Ends a run by a signal: SIGTERM, SIGUSR1 (Slurm's warning before the time limit), SIGHUP or SIGINT (Ctrl-C); and a
rank that hangs, or has lost its launcher.

The first signal is noted. Before each update, and once more after an epoch's last, the ranks agree whether one of them
has to stop, by an all-reduce of one int on the hosts: it waits for no GPU, and finds every rank with the same weights.
Then they save and exit. While a run is built, and while a batch does not come, a signal takes effect at once. A second
signal ends the process at once, unless it is inside of C++ code: there the watchdog ends it, or whoever started it.

Each rank watches itself alone. Where one hangs the others wait for it, so that they all end at about the same time, and
their stacks tell which it was: the one that doesn't wait in a collective. The launcher, or Slurm, ends who is left.

Imports no torch: signals are handled before that is loaded.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from tlt.errors import UserError

if TYPE_CHECKING:
    from tlt.data.batch import Batch

T = TypeVar("T")

PREEMPTED = 85  # "start me again": a code that no shell, Python or torchrun uses
INTERRUPTED = 130
HUNG = 5
_SIGNALS = [  # Windows has but the first two
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGALRM") if hasattr(signal, name)
]
_ALARM = getattr(signal, "SIGALRM", None)
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_SAME_WARNING_S = 1.0  # Slurm, torchrun and process groups may deliver one warning several times
_OTHERS_S = 2.0  # in which the others print their stacks, before they lose a rank that hangs


class Stopped(BaseException):
    """Training ends here. It is no Exception, so that no handler between here and `main` catches it."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class StopSignal:
    """The signal that this process received. There is one object per process: `STOP`."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first one
        self._since, self._raises = 0.0, False

    @property
    def exit_code(self) -> int:
        """Exit code of this process: 0 without a signal."""
        if self.number is None:
            return 0
        return INTERRUPTED if self.number == signal.SIGINT else PREEMPTED

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside the block; SIGINT even where a script's `&` ignores it, SIGHUP not with nohup."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = getattr(signal, "SIGHUP", None)
        nohup = {hangup} if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._received) for number in _SIGNALS if number not in nohup}
        try:
            yield
        finally:
            if _ALARM is not None:
                signal.alarm(0)
            for number, handler in before.items():
                # The run is ending already, so later signals (torchrun ends all ranks when one has ended) are ignored.
                # An alarm is not: the trackers' processes, and whatever else is started from here, would inherit that.
                ignored = self.number is not None and number != _ALARM
                signal.signal(number, signal.SIG_IGN if ignored else handler)
            self.number = None  # of this run

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside the block a signal, also one that has come before, raises Stopped at any place, once the block has had
        a second to end by itself: both ends of an interrupted transfer of a batch would report errors. Use it only
        where nothing can be left half done."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def only_noted(self) -> None:
        """From here on a signal raises nothing."""
        self._raises = False

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.number is not None:
            raise Stopped(self.exit_code, f"stopped by {signal.Signals(self.number).name}")

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == _ALARM:
            pass
        elif self.number is None:
            self.number, self._since = number, time.monotonic()
            with suppress(OSError):  # the terminal may be gone; and print() may be what the signal has interrupted
                message = "this run stops as soon as it has saved; once more: at once"
                os.write(2, f"{signal.Signals(number).name}: {message}\n".encode())
        elif time.monotonic() - self._since > _SAME_WARNING_S:
            os._exit(128 + number)
        if self._raises and number != _ALARM and _ALARM is not None:
            signal.alarm(1)
        elif self._raises:
            self.check()


STOP = StopSignal()


def end_with_launcher() -> None:
    """Have Linux tell this process to save and end (SIGTERM) when the agent that started it ends, even by kill -9."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.kill(int(os.environ.get("LAUNCH_PID", os.getppid())), 0)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


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
        self._phase, self._since = "start", time.monotonic()
        self._meetings = 2  # of all ranks, before each of which a phase may take `START_S`
        self._sizes = set[int]()  # of batches that a step has begun with
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        self._thread.start()

    def enter_phase(self, phase: str, size: int | None = None) -> None:
        """Something was done, and `phase` begins: start, data, others (waiting for the data of all ranks), step (with a
        batch of so many images), capture (of a CUDA graph), validation or saving."""
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


def tell_batch_script(state: str) -> None:
    """Write "begun" or "done" to the file REQUEUE_MARKER.state for the batch script that named it; rank 0 calls it."""
    if marker := os.environ.get("REQUEUE_MARKER"):
        with suppress(OSError):
            Path(f"{marker}.state").write_text(state)


def ask_for_requeue(stop: Stopped, update: int, checkpoint: Path) -> None:
    """Write the file REQUEUE_MARKER, one line of JSON, for the batch script; rank 0 calls it once it has saved.

    A script can't rely on the exit code of `srun` or `torchrun`, which mixes the codes of many processes.
    """
    marker = os.environ.get("REQUEUE_MARKER")
    if marker and stop.exit_code == PREEMPTED:
        saved = str(checkpoint) if checkpoint.is_file() else None
        try:
            Path(marker).write_text(json.dumps({"reason": str(stop), "update": update, "checkpoint": saved}) + "\n")
        except OSError as error:  # the checkpoint is safe: the run ends normally and has to be started by hand
            print(f"REQUEUE_MARKER={marker}: {error.strerror}: nobody requeues the job", file=sys.stderr)

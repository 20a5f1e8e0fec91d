"""Signals that end a run: SIGTERM, SIGUSR1 (Slurm's warning before the time limit), SIGHUP (a terminal that is closed;
not with nohup) and SIGINT (Ctrl-C).

The first signal lets the step end, after which the run saves and exits (`volo.cluster.stopping`); while there is
nothing to finish (building, waiting for a batch) it takes effect at once. A second one ends the process at once without
saving. A thread counts signals, because Python's handlers wait for the main thread, which a collective may block.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PREEMPTED = 85  # "start me again": a code that no shell, Python or torchrun uses
INTERRUPTED = 130
_SIGNALS = tuple(  # Windows has but the first two
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
# Slurm, torchrun and process groups may deliver one warning several times.
_SAME_WARNING_S = 1.0
# Time for a batch that is nearly there: both ends of an interrupted transfer between processes would report errors.
_PATIENCE_S = 1.0


class Stopped(BaseException):
    """Training ends here. It is no Exception, so that no handler between here and `main` catches it."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def ask_for_requeue(stop: Stopped, update: int, checkpoint: Path) -> None:
    """Write the file REQUEUE_MARKER, one line of JSON, for the batch script that named it. Rank 0 calls it once it has
    saved.

    A script can't rely on the exit code of `srun` or `torchrun`, which mixes the codes of many processes.
    """
    marker = os.environ.get("REQUEUE_MARKER")
    if not marker or stop.exit_code != PREEMPTED:
        return
    record = {"reason": str(stop), "update": update, "checkpoint": str(checkpoint) if checkpoint.is_file() else None}
    try:
        Path(marker).write_text(json.dumps(record) + "\n")
    except OSError as error:  # the checkpoint is safe: the run ends normally and has to be started by hand
        print(f"REQUEUE_MARKER={marker} cannot be written ({error.strerror}): nobody requeues the job", file=sys.stderr)


def tell_batch_script(state: str) -> None:
    """Write "begun" or "done" to the file REQUEUE_MARKER.state for the batch script that named it; rank 0 calls it."""
    if marker := os.environ.get("REQUEUE_MARKER"):
        with suppress(OSError):
            Path(f"{marker}.state").write_text(state)


class StopSignal:
    """The signal that this process received. There is one object per process: `STOP`.

    Attributes:
        number: The first signal; None if there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self._own = False  # whether this process received it, not another rank
        self._may_raise = False
        self._patient = False
        self._handled = False
        self._lock = threading.RLock()  # a handler may come while the main thread holds it

    @property
    def exit_code(self) -> int:
        """Exit code of this process: 0 without a signal."""
        if self.number is None:
            return 0
        return INTERRUPTED if self.number == signal.SIGINT else PREEMPTED

    @property
    def name(self) -> str:
        return "no signal" if self.number is None else signal.Signals(self.number).name

    @property
    def reason(self) -> str:
        """Why this process stops."""
        return f"stopped by {self.name}" if self._own else "stopped because another rank had to"

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside the block, at once until `deferred`; SIGINT even where a script's `&` ignores it."""
        self.number, self._own = None, False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = getattr(signal, "SIGHUP", None)
        nohup = {hangup} if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._received) for number in _SIGNALS if number not in nohup}
        if hasattr(signal, "SIGALRM"):
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._waited)
        arrived, arrival = os.pipe()
        os.set_blocking(arrival, False)
        signal.set_wakeup_fd(arrival)
        counter = threading.Thread(target=self._count, args=(arrived,), daemon=True)
        counter.start()
        self._handled = True
        try:
            with self.interruptible():
                yield
        finally:
            self._handled = False
            signal.set_wakeup_fd(-1)
            # The end of the thread, which may still have signals to count. Closing the pipe is none: a data worker that
            # storage holds up has it open, too.
            os.write(arrival, b"\0")
            counter.join()
            os.close(arrival)
            for number, handler in before.items():
                # The run is ending already, so later signals (torchrun ends all ranks when one has ended) are ignored.
                signal.signal(number, handler if self.number is None else signal.SIG_IGN)
            self.number = None  # of this run

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is only noted. Raises Stopped on entry if there was one."""
        self._may_raise = False
        self._raise_if_stopped()
        try:
            yield
        finally:
            self._may_raise = False

    @contextmanager
    def interruptible(self, patient: bool = False) -> Iterator[None]:
        """Inside the block a signal raises Stopped at any place; use it only where nothing can be left half done.

        Args:
            patient: Whether the block first gets a second to end by itself.
        """
        self._may_raise, self._patient = True, patient
        try:
            self._raise_if_stopped()
            yield
        finally:
            self._may_raise = False

    def too_late(self) -> None:
        """From here on only note signals: the program is about to end and reports why."""
        self._may_raise = False

    def follow(self, exit_code: int) -> None:
        """Stop because another rank was told to: signals that follow are ignored while this process ends."""
        with self._lock:
            if self.number is None and exit_code in (PREEMPTED, INTERRUPTED):
                self.number = signal.SIGINT if exit_code == INTERRUPTED else signal.SIGTERM

    def request(self, number: int) -> bool:
        """Note a signal that this rank received; return whether it is the first."""
        with self._lock:
            if self.number is not None:
                return False
            self._since, self.number, self._own = time.monotonic(), number, True
        if self._handled and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
        with suppress(OSError):  # the terminal may be gone
            # print() may be what the signal has interrupted.
            os.write(2, f"{self.name}: this run stops as soon as it has saved; once more: at once\n".encode())
        return True

    def _count(self, arrived: int) -> None:
        """Read every signal, which arrives as a byte; 0 is the end."""
        with open(arrived, "rb", buffering=0) as numbers:
            while number := int.from_bytes(numbers.read(1), "big"):
                again = number in _SIGNALS and not self.request(number)
                if again and time.monotonic() - self._since > _SAME_WARNING_S:
                    os._exit(128 + number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if self._may_raise and not self._patient:
            self._raise_if_stopped()

    def _waited(self, number: int, frame: FrameType | None) -> None:
        if self._may_raise:
            self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self.number is not None:
            raise Stopped(self.exit_code, self.reason)


STOP = StopSignal()

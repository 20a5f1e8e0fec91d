"""Ends a run by a signal: SIGTERM, SIGUSR1 (Slurm's warning before the time limit), SIGHUP or SIGINT (Ctrl-C); or when
its launcher has ended.

The first signal is noted. Before each update, and once more after an epoch's last, the ranks agree whether one of them
has to stop (`volo.cluster.watchdog.StopGuard`), by an all-reduce of one int on the hosts: it waits for no GPU, and
finds every rank with the same weights. Then they save and exit. While a run is built, and while a batch does not come,
a signal takes effect within a second. A second signal ends the process at once, unless it is inside C++ code: there the
watchdog ends it, or whoever started it.

Imports no torch: signals are handled before torch is loaded.
"""

from __future__ import annotations

import ctypes
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
_SIGNALS = [  # Windows has but the first two
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGALRM") if hasattr(signal, name)
]
_ALARM = getattr(signal, "SIGALRM", None)
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_SAME_WARNING_S = 1.0  # Slurm, torchrun and process groups may deliver one warning several times


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
        """Inside the block a signal raises Stopped at any place, after a second; one that came before raises at entry.

        The second lets a transfer of a batch end by itself: interrupted, both its ends would report errors. Use this
        only where nothing can be left half done.
        """
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

"""Ends a run by a signal: SIGTERM, SIGUSR1 (Slurm's warning before the time limit), SIGHUP or SIGINT (Ctrl-C); or when
the launcher of the run has ended.

The first signal is recorded. Before each update, and once more after the last update of an epoch, the ranks agree
whether one of them has to stop (`volo.cluster.watchdog.StopGuard`). They exchange their exit codes (0 goes on) by an
all-reduce from CPU to CPU, which waits for no GPU; at that moment all ranks have the same weights. Then they save
(`train` in `volo.commands.train`) and exit with the code of `Stopped` (`volo.commands.console`). The launcher
(`volo.cluster.elastic`) passes signals on to its ranks and ends with one code for them; in a Slurm job
`slurm/requeue.sh` passes them on, and requeues the job. While a run is built, and while it waits for a batch, a signal
takes effect after one second. A second signal ends the process at once. A process that is inside C++ code can't react:
the watchdog or the launcher ends it.

This module imports no torch, so that signals are handled before torch is loaded.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PREEMPTED = 85  # means "start me again"; no shell uses this code, nor do Python and torchrun
INTERRUPTED = 130
_SIGNALS = [  # Windows has only the first two
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGALRM") if hasattr(signal, name)
]
_ALARM = getattr(signal, "SIGALRM", None)
_PR_SET_PDEATHSIG = 1  # an option of Linux's prctl(): send a signal to this process when its parent ends
_SAME_WARNING_S = 1.0  # Slurm, torchrun and process groups may deliver one warning several times


class Stopped(BaseException):
    """Training ends here. It is no Exception, so that no `except Exception` between here and `main` catches it."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class StopSignal:
    """The signal that this process received. There is one object per process: `STOP`."""

    def __init__(self) -> None:
        self.number: int | None = None  # number of the first signal
        self._since = 0.0
        self._begun = False
        self._raises = False
        self._ends_process = True

    @property
    def exit_code(self) -> int:
        """Exit code with which this process should end: 0 if no signal has come."""
        if self.number is None:
            return 0
        return INTERRUPTED if self.number == signal.SIGINT else PREEMPTED

    @contextmanager
    def handled(self, ends_process: bool = True) -> Iterator[None]:
        """Handle signals inside the block: SIGINT even if the shell's `&` ignores it, SIGHUP unless nohup does. If the
        process goes on after the block (`ends_process` False), a second Ctrl-C raises KeyboardInterrupt at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = getattr(signal, "SIGHUP", None)
        nohup = {hangup} if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN else set()
        self._ends_process = ends_process
        self._begun = not ends_process  # who calls from Python has read the flags before
        before = {number: signal.signal(number, self._received) for number in _SIGNALS if number not in nohup}
        try:
            yield
        finally:
            if _ALARM is not None:
                signal.alarm(0)
            for number, handler in before.items():
                # The run is ending, so later signals are ignored: torchrun signals all ranks when one has ended.
                # SIGALRM is not ignored: child processes, such as the trackers', would inherit that.
                ignored = ends_process and self.number is not None and number != _ALARM
                signal.signal(number, signal.SIG_IGN if ignored else handler)
            self.number = None  # the next run in this process starts without a signal

    def begin(self) -> None:
        """Print from now on that a signal has come, also one that came before. Until the flags are accepted nothing
        could stop: a launcher signals the ranks that still read the flags when one has refused them."""
        self._begun = True
        if self.number is not None:
            self._tell(self.number)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise Stopped anywhere inside the block, one second after a signal; at entry if a signal came before.

        Within this second a transfer of a batch can end by itself; both its ends would report errors if it were
        interrupted. Use this only for code that may be interrupted at any point.
        """
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def only_noted(self) -> None:
        """Only record signals from now on, and raise nothing."""
        self._raises = False

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.number is not None:
            raise Stopped(self.exit_code, f"stopped by {signal.Signals(self.number).name}")

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == _ALARM:
            pass
        elif self.number is None:
            self._since = time.monotonic()  # before the number: another signal may come in between
            self.number = number
            if self._begun:
                self._tell(number)
        elif time.monotonic() - self._since > _SAME_WARNING_S:
            if number == signal.SIGINT and not self._ends_process:
                raise KeyboardInterrupt
            os._exit(128 + number)
        if self._raises and number != _ALARM and _ALARM is not None:
            signal.alarm(1)
        elif self._raises:
            self.check()

    @staticmethod
    def _tell(number: int) -> None:
        message = "this run stops as soon as it has saved; once more: at once"
        with suppress(OSError):  # the terminal may be closed; not print(), which the signal may have interrupted
            os.write(2, f"{signal.Signals(number).name}: {message}\n".encode())


STOP = StopSignal()


def end_with_launcher() -> None:
    """Let Linux send this process SIGTERM, which saves and ends it, when its agent ends, even by `kill -9`."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.kill(int(os.environ.get("LAUNCH_PID", os.getppid())), 0)
    except ProcessLookupError:  # the agent has already ended
        os.kill(os.getpid(), signal.SIGTERM)


def tell_batch_script(state: str) -> None:
    """Write "begun" or "done" to REQUEUE_MARKER.state, which the batch script reads; only rank 0 calls this."""
    if marker := os.environ.get("REQUEUE_MARKER"):
        with suppress(OSError):
            Path(f"{marker}.state").write_text(state)


def ask_for_requeue(reason: str, update: int, checkpoint: Path, exclude: Sequence[str] = ()) -> None:
    """Write a line of JSON to the file REQUEUE_MARKER, which the batch script reads; rank 0 calls this after it saved.
    The job should not get the machines of `exclude` again.

    The batch script can't use the exit code of `srun` or `torchrun`, which combines the codes of many processes.
    """
    if marker := os.environ.get("REQUEUE_MARKER"):
        saved = str(checkpoint) if checkpoint.is_file() else None
        line = {"reason": reason, "update": update, "checkpoint": saved}
        line |= {"exclude": ",".join(exclude)} if exclude else {}
        try:
            Path(marker).write_text(json.dumps(line) + "\n")
        except OSError as error:  # the checkpoint is safe: the run ends normally, and the user has to restart it
            print(f"REQUEUE_MARKER={marker}: {error.strerror}: nobody requeues the job", file=sys.stderr)

"""Ends a rank that hangs: prints the stacks of all its threads and leaves with exit code 5.

Each rank watches itself alone. Where one hangs the others wait for it, so that they all end at about the same time, and
their stacks tell which it was: the one that doesn't wait in a collective. The launcher, or Slurm, ends who is left.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from volo.cluster.distributed import shut_down, wait_for_hosts

HUNG = 5
START_TIMEOUT_S = 600.0
_OTHERS_S = 2.0  # in which the others print their stacks, before they lose this rank


class Watchdog:
    """Watches this process.

    Args:
        timeout: Seconds without progress (`--dist-timeout`); up to the first step, in the first validation, and while
            any rank saves, at least `START_TIMEOUT_S`.
        loader_timeout: Seconds for which a rank may wait for data; 0: for ever.
        note: Called with the fields of an event before the end.
    """

    def __init__(self, rank: int, timeout: float, loader_timeout: float, note: Callable[..., None]) -> None:
        self.rank, self.timeout, self.loader_timeout, self.note = rank, timeout, loader_timeout, note
        self._phase, self._since = "start", time.monotonic()
        self._passed: set[str] = set()  # phases that have ended once: what they had to compile is compiled
        self._saving = False  # on this rank, or on one that it will wait for
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        self._thread.start()

    def at(self, phase: str) -> None:
        """Something was done, and `phase` begins: start, data, others (waiting for the data of all ranks), step,
        validation or saving."""
        if phase != self._phase:
            self._passed.add(self._phase)
        self._saving = phase == "saving" or (self._saving and phase != "step")
        self._phase, self._since = phase, time.monotonic()

    def end(self) -> None:
        """Watch no more: the run is over."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def allowed(self, phase: str) -> float:
        """Return the seconds that this rank may spend in `phase` without doing anything."""
        waits = self.timeout
        if phase in ("data", "others"):  # the others wait for the rank whose data are late
            waits = max(waits, self.loader_timeout + 30) if self.loader_timeout else float("inf")
        return max(waits, START_TIMEOUT_S) if self._saving or phase not in self._passed else waits

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.timeout / 10)):
            phase, idle = self._phase, time.monotonic() - self._since
            if idle > self.allowed(phase) and not self._ended.is_set():
                # The process may be full of locks: nothing here waits for another thread but the event's file.
                reason = f"no progress for {idle:.0f} s (--dist-timeout {self.timeout:g}), in phase {phase}"
                os.write(2, f"[rank {self.rank}] hung: {reason}\n".encode())
                faulthandler.dump_traceback(file=2, all_threads=True)
                with suppress(Exception):
                    self.note(fault="hung", reason=reason, phase=phase)
                time.sleep(_OTHERS_S)
                os._exit(HUNG)


def leave_together(watchdog: Watchdog) -> None:
    """Leave the process group when no rank needs it any more: torchrun ends the others as soon as one has left."""
    wait_for_hosts()  # watched: rank 0 may still be writing
    watchdog.end()
    shut_down()


def collective_timeout(dist_timeout: float, loader_timeout: float) -> float:
    """Seconds after which a collective fails by itself: late enough for the watchdog to tell why before."""
    return max(dist_timeout, START_TIMEOUT_S, loader_timeout or 7 * 24 * 3600) + 120

"""A thread per rank that ends a run which hangs: names the rank that is late and prints every rank's stacks.

Each rank tells the others through the process group's store how far it is. A rank that has made no step for too long
looks at them: those that give no sign of life are late, else those that are the fewest steps along. All ranks then
print their stacks and leave with exit code 5. Two threads, because a store whose host has stopped never answers.
A rank whose launcher has ended is told to save and stop.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from volo.cluster.distributed import shut_down, wait_for_all
from volo.cluster.preempt import StopSignal
from volo.cluster.ranks import launch_id
from volo.cluster.run_store import SignedStore, start_scope

HUNG = 5
START_TIMEOUT_S = 600.0
_STORE_TIMEOUT_S = 20.0
_SILENT = "stopped, killed, or its machine is gone"


@dataclass
class Progress:
    """How far a rank is, as it tells."""

    tick: int  # of its watchdog: alive if this moves
    steps: int
    phase: str
    idle: float  # seconds since it did something
    host: str
    pid: int
    seen: float = 0.0  # here, when the tick last moved

    def __str__(self) -> str:
        doing = {"data": "waiting for data", "start": "starting"}.get(self.phase, f"in {self.phase}")
        return f"{self.host}, pid {self.pid}, {doing} for {self.idle:.0f} s"


def late_ranks(ranks: Sequence[Progress], now: float, silent_after: float) -> tuple[list[int], bool]:
    """The ranks that the others wait for, and whether they are silent (stopped, or their machine gone).

    Silent ones if there are any, else those with the fewest steps; all of them if they are equally far.
    """
    silent = [rank for rank, one in enumerate(ranks) if now - one.seen > silent_after]
    if silent:
        return silent, True
    fewest = min(one.steps for one in ranks)
    return [rank for rank, one in enumerate(ranks) if one.steps == fewest], False


class Watchdog:
    """Watches this process, and through the store the others.

    Args:
        rank, size: Of this process.
        timeout: Seconds without progress (`--dist-timeout`); up to the first step, in the first validation, and while
            saving, at least `START_TIMEOUT_S`.
        loader_timeout: Seconds for which a rank may wait for data; 0: for ever.
        stop: Where signals are noted: one rank's is passed on to all.
        note: Called with the fields of an event before the end.
        store: Of this run, with several processes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        loader_timeout: float,
        stop: StopSignal,
        note: Callable[..., None],
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.size, self.stop, self.note, self._store = rank, size, stop, note, store
        self.patience = {phase: max(timeout, START_TIMEOUT_S) for phase in ("start", "saving")}
        self.timeout, self.loader_timeout = timeout, loader_timeout
        self.interval = min(1.0, timeout / 10)
        self.own = Progress(0, 0, "start", 0.0, socket.gethostname(), os.getpid())
        self._since = time.monotonic()
        self._passed: set[str] = set()  # phases that have ended once: what they had to compile is compiled
        self._ranks: list[Progress] = []
        self._answered = self._since  # the store, last
        self._alarm: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Of a process that runs for its launcher alone; one started by hand may outlive its shell.
        self._launcher = os.getppid() if launch_id() is not None else None

    def start(self) -> None:
        """Begin to watch; the process group exists."""
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        self._threads.append(threading.Thread(target=self._judge, daemon=True))
        if self.size > 1 and self._store is not None:
            # A connection of its own: the process group's may be blocked by whoever uses it.
            self._threads.append(threading.Thread(target=self._exchange, args=(self._store.clone(),), daemon=True))
        for thread in self._threads:
            thread.start()

    def at(self, phase: str, count: bool = False) -> None:
        """Something was done, and `phase` begins; `count` where all ranks pass equally often."""
        if phase != self.own.phase:
            self._passed.add(self.own.phase)
        self.own.phase, self._since = phase, time.monotonic()
        self.own.steps += count

    def end(self) -> None:
        """Watch no more: the run is over."""
        self._ended.set()
        for thread in self._threads:
            # A thread that is inside the store when Python ends aborts the process ("terminate called without an active
            # exception") after a run that went well.
            thread.join(_STORE_TIMEOUT_S + 10)

    def allowed(self, phase: str) -> float:
        """Seconds that a rank may spend in `phase` without doing anything."""
        if phase == "data":
            return max(self.timeout, self.loader_timeout + 30) if self.loader_timeout else float("inf")
        if phase not in self._passed:
            return max(self.timeout, START_TIMEOUT_S)
        return self.patience.get(phase, self.timeout)

    def _exchange(self, store: Any) -> None:
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        signed = SignedStore(store, start_scope())
        keys = [f"watchdog/{rank}" for rank in range(self.size)]
        passed_on = False
        # An error means that the host of the store is gone, or is about to be: _judge decides.
        with suppress(Exception):
            while not self._ended.wait(self.interval):
                self.own.tick += 1
                self.own.idle = time.monotonic() - self._since
                signed.set(keys[self.rank], vars(self.own))
                if self.stop.number is not None and not passed_on:
                    signed.set("watchdog/stop", self.stop.number)
                    passed_on = True
                elif self.stop.number is None and (number := signed.get("watchdog/stop")):
                    self.stop.request(number, own=False)
                if self._alarm is not None:
                    signed.set("watchdog/alarm", self._alarm)
                else:
                    self._alarm = signed.get("watchdog/alarm")
                if told := signed.get_all(keys):
                    self._update(told)

    def _update(self, told: list[dict[str, Any] | None]) -> None:
        now, before = time.monotonic(), self._ranks
        if not before and None in told:  # somebody else has written there
            return
        ranks = [before[rank] if fields is None else Progress(**fields) for rank, fields in enumerate(told)]
        for rank, one in enumerate(ranks):
            moved = not before or before[rank].tick != one.tick
            one.seen = now if moved else before[rank].seen
        self._ranks, self._answered = ranks, now

    def _judge(self) -> None:
        while not self._ended.wait(self.interval):
            if self._launcher not in (None, os.getppid()):
                os.write(2, f"[rank {self.rank}] its launcher has ended\n".encode())
                self._launcher = None
                self.stop.request(signal.SIGTERM)
            idle = time.monotonic() - self._since
            if self._alarm is None:
                self._alarm = self._verdict(idle) if idle > self.allowed(self.own.phase) else self._loss()
            if self._alarm is not None:
                self._leave(self._alarm)

    def _loss(self) -> str | None:
        """Who has given no sign of life for so long that nobody needs to wait for what he was to do; None: nobody."""
        now = time.monotonic()
        if now - self._answered > self.timeout / 2:
            return None  # nothing is known of anybody
        limits = {"data": self.timeout}  # threads go on telling while data are waited for
        lost = [
            f"rank {rank} ({one})"
            for rank, one in enumerate(list(self._ranks))
            if now - one.seen > limits.get(one.phase, self.allowed(one.phase))
        ]
        return f"no sign of life from {'; '.join(lost)} for {self.timeout:g} s: {_SILENT}" if lost else None

    def _verdict(self, idle: float) -> str | None:
        """Why the run hangs; None while a late rank is still within its timeout."""
        now, silent_after = time.monotonic(), max(5 * self.interval, self.timeout / 2)
        ranks = list(self._ranks) or [replace(self.own, idle=idle, seen=now)]
        if len(ranks) > 1 and now - self._answered > silent_after:
            late, silent = [0], True  # it hosts the store, which is why nothing is known of the others
        else:
            late, silent = late_ranks(ranks, now, silent_after)
        if not silent and any(ranks[rank].idle <= self.allowed(ranks[rank].phase) for rank in late):
            return None
        waited = f"no progress for {idle:.0f} s (--dist-timeout {self.timeout:g})"
        names = "; ".join(f"rank {rank} ({ranks[rank]})" for rank in late)
        if silent:
            return f"{waited}: no sign of life from {names}: {_SILENT}"
        if len(late) == len(ranks) > 1:
            return f"{waited} on any rank; all {len(ranks)} are equally far: see their stacks"
        return f"{waited}: the others wait for {names}" if len(ranks) > 1 else f"{waited}: {names}"

    def _leave(self, alarm: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            # The process may be full of locks: nothing here waits for another thread but the event's file.
            os.write(2, f"[rank {self.rank}] hung: {alarm}\n".encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
            with suppress(Exception):
                self.note(fault="hung", reason=alarm, phase=self.own.phase)
            # The store ends with its host, rank 0: the others must have heard first.
            time.sleep((4 if self.rank == 0 else 2) * self.interval)
            os._exit(HUNG)


def leave_together(watchdog: Watchdog) -> None:
    """Leave the process group when no rank needs it any more: torchrun ends the others as soon as one has left."""
    wait_for_all()  # watched: rank 0 may still be writing
    watchdog.end()
    wait_for_all()  # or a watchdog looks for rank 0, which has gone
    shut_down()


def collective_timeout(dist_timeout: float, loader_timeout: float) -> float:
    """Seconds after which a collective fails by itself: late enough for the watchdog to tell why before."""
    return max(dist_timeout, START_TIMEOUT_S, loader_timeout or 7 * 24 * 3600) + 120

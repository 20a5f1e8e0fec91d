"""Ends a run that hangs: names the rank that is late and prints every rank's stacks.

Each rank tells rank 0 how far it is, by a heartbeat through the process group's store. When one has made no step for
too long rank 0 looks for the late ones: those that give no sign of life, else those that are the fewest steps along.
All ranks then print their stacks and leave with exit code 5. Where rank 0 itself gives no sign of life the others say
so. A rank whose launcher has ended is told to save and stop; a signal that one rank got is passed on to all.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from volo.cluster.distributed import shut_down, wait_for_all
from volo.cluster.heartbeat import Heartbeat, State
from volo.cluster.preempt import StopSignal
from volo.cluster.ranks import launch_id
from volo.cluster.run_store import start_scope

HUNG = 5
START_TIMEOUT_S = 600.0
_STORE_TIMEOUT_S = 20.0
_SILENT = "stopped, killed, or its machine is gone"


@dataclass
class RankProgress:
    """How far a rank is, as it tells.

    Attributes:
        phase: What it does: start, data, step, validation or saving.
        idle: Seconds since it did something.
        allowed: Seconds that it may be idle in this phase.
        signal: That it got; None: none.
    """

    steps: int
    phase: str
    idle: float
    allowed: float
    host: str
    pid: int
    signal: int | None = None

    def __str__(self) -> str:
        doing = {"data": "waiting for data", "start": "starting"}.get(self.phase, f"in {self.phase}")
        return f"{self.host}, pid {self.pid}, {doing} for {self.idle:.0f} s"


def those_behind(ranks: Mapping[int, RankProgress]) -> list[int]:
    """Return the ranks with the fewest steps, which the others wait for; all of them if they are equally far."""
    fewest = min(one.steps for one in ranks.values())
    return [rank for rank, one in ranks.items() if one.steps == fewest]


class Watchdog:
    """Watches this process, and through the store the others.

    Args:
        rank, size: Of this process.
        timeout: Seconds without progress (`--dist-timeout`); up to the first step, in the first validation, and while
            saving, at least `START_TIMEOUT_S`.
        loader_timeout: Seconds for which a rank may wait for data; 0: for ever.
        stop: Where signals are noted.
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
        self.timeout, self.loader_timeout = timeout, loader_timeout
        self.interval = min(1.0, timeout / 10)
        self._phase, self._steps, self._since = "start", 0, time.monotonic()
        self._passed: set[str] = set()  # phases that have ended once: what they had to compile is compiled
        self._host = socket.gethostname()
        self._heartbeat: Heartbeat | None = None
        self._rank_0: RankProgress | None = None  # as it told
        self._alarm: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        # Of a process that runs for its launcher alone; one started by hand may outlive its shell.
        self._launcher = os.getppid() if launch_id() is not None else None

    def start(self) -> None:
        """Begin to watch; the process group exists."""
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        if self.size > 1 and self._store is not None:
            self._heartbeat = Heartbeat(
                self._store, start_scope(), "watchdog", self.rank, self.size, self.interval, _STORE_TIMEOUT_S
            )
            self._heartbeat.start(lambda: asdict(self.progress()), self._decide, self._hear)
        self._thread.start()

    def at(self, phase: str, count: bool = False) -> None:
        """Something was done, and `phase` begins; `count` where all ranks pass equally often."""
        if phase != self._phase:
            self._passed.add(self._phase)
        self._phase, self._since = phase, time.monotonic()
        self._steps += count

    def end(self) -> None:
        """Watch no more: the run is over."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._heartbeat is not None:
            # A thread that is inside the store when Python ends aborts the process ("terminate called without an active
            # exception") after a run that went well.
            self._heartbeat.stop(_STORE_TIMEOUT_S + 10)

    def allowed(self, phase: str) -> float:
        """Return the seconds that this rank may spend in `phase` without doing anything."""
        if phase == "data":
            return max(self.timeout, self.loader_timeout + 30) if self.loader_timeout else float("inf")
        if phase == "saving" or phase not in self._passed:
            return max(self.timeout, START_TIMEOUT_S)
        return self.timeout

    def progress(self) -> RankProgress:
        """Return how far this rank is."""
        idle, number = time.monotonic() - self._since, self.stop.number
        return RankProgress(self._steps, self._phase, idle, self.allowed(self._phase), self._host, os.getpid(), number)

    def _decide(self) -> State:
        """Rank 0: tell all ranks of an alarm, and of a signal that one of them got."""
        assert self._heartbeat is not None
        self._pass_on(member.state["signal"] for member in self._heartbeat.members.values())
        return {"alarm": self._alarm, "signal": self.stop.number, "rank_0": asdict(self.progress())}

    def _hear(self, state: State) -> None:
        self._alarm, self._rank_0 = self._alarm or state["alarm"], RankProgress(**state["rank_0"])
        self._pass_on([state["signal"]])

    def _pass_on(self, signals: Iterable[int | None]) -> None:
        if self.stop.number is None and (number := next(filter(None, signals), None)):
            self.stop.request(number, own=False)

    def _watch(self) -> None:
        while not self._ended.wait(self.interval):
            if self._launcher not in (None, os.getppid()):
                os.write(2, f"[rank {self.rank}] its launcher has ended\n".encode())
                self._launcher = None
                self.stop.request(signal.SIGTERM)
            self._alarm = self._alarm or self._verdict(*self._known())
            if self._alarm is not None:
                self._leave(self._alarm)

    def _known(self) -> tuple[dict[int, RankProgress], dict[int, float]]:
        """Return how far ranks are, as far as this one knows, and for how many seconds each has given no sign of life.

        Nothing is known of the others as long as one of them has not come.
        """
        own, beat = {self.rank: self.progress()}, self._heartbeat
        if beat is None:
            return own, {self.rank: 0.0}
        now = time.monotonic()
        silent = {rank: now - member.moved for rank, member in list(beat.members.items())}
        if self.rank:
            told = {0: self._rank_0} if self._rank_0 is not None else {}
        elif len(silent) == self.size:
            told = {rank: RankProgress(**member.state) for rank, member in list(beat.members.items())}
        else:
            told = {}
        return {**told, **own}, {**silent, self.rank: 0.0}

    def _verdict(self, ranks: dict[int, RankProgress], silent: dict[int, float]) -> str | None:
        """Return why the run hangs, None while a late rank is still within its timeout.

        Args:
            ranks: All of them on rank 0; elsewhere this one and rank 0.
            silent: For how many seconds each has given no sign of life.
        """
        silent_after = max(5 * self.interval, self.timeout / 2)
        # Otherwise nothing is known of anybody: the store is to blame, or its host.
        answers = self._heartbeat is None or time.monotonic() - self._heartbeat.answered <= silent_after
        lost = [rank for rank, one in ranks.items() if silent[rank] > self._silence_allowed(one)]
        if lost and answers:
            return f"no sign of life from {_names(lost, ranks)} for {self.timeout:g} s: {_SILENT}"
        idle = [one.idle for rank, one in ranks.items() if silent[rank] <= silent_after and one.idle > one.allowed]
        if not idle:
            return None
        waited = f"no progress for {max(idle):.0f} s (--dist-timeout {self.timeout:g})"
        late = [rank for rank in ranks if (silent[rank] > silent_after if answers else rank == 0)]
        if late:
            return f"{waited}: no sign of life from {_names(late, ranks)}: {_SILENT}"
        if self.rank and len(ranks) > 1:
            return None  # rank 0 knows more, and decides
        late = those_behind(ranks)
        if any(ranks[rank].idle <= ranks[rank].allowed for rank in late):
            return None
        if len(late) == len(ranks) > 1:
            return f"{waited} on any rank; all {len(ranks)} are equally far: see their stacks"
        return f"{waited}: {'the others wait for ' if len(ranks) > 1 else ''}{_names(late, ranks)}"

    def _silence_allowed(self, one: RankProgress) -> float:
        # Threads go on telling while data are waited for; a disk may hold up the whole process.
        return self.timeout if one.phase == "data" else one.allowed

    def _leave(self, alarm: str) -> None:
        if self._ended.is_set():
            return
        # The process may be full of locks: nothing here waits for another thread but the event's file.
        os.write(2, f"[rank {self.rank}] hung: {alarm}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        with suppress(Exception):
            self.note(fault="hung", reason=alarm, phase=self._phase)
        # The store ends with its host, rank 0: the others must have heard first.
        time.sleep((5 if self.rank == 0 else 2) * self.interval)
        os._exit(HUNG)


def _names(numbers: Sequence[int], ranks: Mapping[int, RankProgress]) -> str:
    return "; ".join(f"rank {rank} ({ranks[rank]})" for rank in sorted(numbers))


def leave_together(watchdog: Watchdog) -> None:
    """Leave the process group when no rank needs it any more: torchrun ends the others as soon as one has left."""
    wait_for_all()  # watched: rank 0 may still be writing
    watchdog.end()
    wait_for_all()  # or a watchdog looks for rank 0, which has gone
    shut_down()


def collective_timeout(dist_timeout: float, loader_timeout: float) -> float:
    """Seconds after which a collective fails by itself: late enough for the watchdog to tell why before."""
    return max(dist_timeout, START_TIMEOUT_S, loader_timeout or 7 * 24 * 3600) + 120

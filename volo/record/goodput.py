"""Where a run's time went: what each process measures of it, and the account of all of them since the first start.

Rank 0 tells with every event how many seconds of its process each part has taken so far (`Stopwatch`, field `spent`).
While nothing else happens, the event `time` does so as often as the process has become 1 % older: that much of a killed
process is unknown, and counts as being away. Within a process no clock is used that can be set; between two processes,
the time of day.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path

from tlt import starts_program
from volo.cluster.stopping import PREEMPTED
from volo.record.history import Reading, Records, Start, starts_in

AWAY = "away"
COMPILING = "compiling"
TWICE = "done twice"
UNKNOWN = "not told"
# The parts of a run's time, in the order of the report: their marks in its bar, and the names in the events.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "training": ("#", ("step",)),
    "waiting for data": ("d", ("data",)),
    "compiling, capturing": ("c", (COMPILING, "capture")),
    "validation": ("v", ("validation",)),
    "saving": ("s", ("saving",)),
    TWICE: ("2", ()),
    "starting": ("+", ("imports", "connecting", "listing", "labels", "building", "checkpoint")),
    AWAY: (".", (AWAY,)),
    UNKNOWN: ("?", (UNKNOWN,)),
}
_REPEATED = ("step", "data", "validation")  # what an update that is done again takes again
_STOOD_STILL_S = 3.0  # if nobody looked at the stopwatch for so long, the process or the machine may have stood still


def clock() -> float:
    """Return the seconds of a clock that cannot be set, and that goes on while the machine sleeps."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def _age() -> float:
    """Return for how many seconds this process has run, if it was started for a program of this project, else 0."""
    if starts_program:
        with suppress(OSError, LookupError, ValueError):
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            return max(0.0, clock() - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


class Stopwatch:
    """Counts the seconds of this process by part. Any thread may look at it; it has to be looked at every second or so,
    because what passes unseen, while the process uses no processor, counts as being away (SIGSTOP, a sleeping machine).
    """

    def __init__(self) -> None:
        self._part = "imports"
        self._spent = {self._part: _age()}
        self._at = clock()
        self._processor = time.process_time()
        self._lock = threading.RLock()  # a signal handler may look at it, too

    def enter(self, part: str | None = None) -> str:
        """Count what follows as this part (None: as before), and return what was counted before."""
        with self._lock:
            passed = clock() - self._at
            processor = time.process_time()
            still = passed > _STOOD_STILL_S and processor - self._processor < passed / 10
            counted = AWAY if still else self._part
            self._spent[counted] = self._spent.get(counted, 0.0) + passed
            self._at += passed
            self._processor = processor
            before = self._part
            self._part = part or before
            return before

    def spent(self) -> dict[str, float]:
        """Return the seconds of each part until now."""
        self.enter()
        with self._lock:
            return {part: round(seconds, 3) for part, seconds in self._spent.items()}

    @contextmanager
    def compiling_counted(self) -> Iterator[None]:
        """Count in this block what torch compiles, whenever it does so."""
        from torch._dynamo.callback import callback_handler

        before: list[str] = []
        hooks = {"start": lambda _: before.append(self.enter(COMPILING)), "end": lambda _: self.enter(before.pop())}
        for when, hook in hooks.items():
            getattr(callback_handler, f"register_{when}_callback")(hook)
        try:
            yield
        finally:
            for when, hook in hooks.items():
                getattr(callback_handler, f"remove_{when}_callback")(hook)


@dataclass
class Account:
    """The seconds since the first start by part, over all starts, and what the restarts cost."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    restarts: int = 0
    cost: float = 0.0  # of the restarts: being away, updates done twice, starting and compiling again
    queue: float = 0.0  # part of `cost`: before a start of a Slurm job that was requeued, or is another job
    after_end: float = 0.0  # being away after the run had ended with exit code 0, which is no cost of a restart

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        total = self.total
        text = f"{100 * self.parts['training'] / max(total, 1e-9):.0f} % of {_told(total)} trained"
        if self.restarts:
            text += f"; {self.restarts} restart{'s' * (self.restarts > 1)} cost {_told(self.cost)}"
            text += f", of which {_told(self.queue)} in the queue" if self.queue else ""
        text += f"; {_told(self.after_end)} passed after it had ended" if self.after_end else ""
        if unknown := self.parts[UNKNOWN]:
            text += f"; an older version has not told where {_told(unknown)} went"
        return text

    def bar(self, columns: int = 79) -> str:
        """Return a bar of so many characters, each of the part that it marks."""
        ends = [0, *(round(columns * done / max(self.total, 1e-9)) for done in accumulate(self.parts.values()))]
        widths = (end - begin for begin, end in pairwise(ends))
        return "".join(PARTS[part][0] * width for part, width in zip(self.parts, widths, strict=True))


def account_of(records: Records) -> Account:
    """Return where the time of a run's starts went, and that between them."""
    account = Account()
    before: Start | None = None
    own = [start for start in starts_in(records.events) if not start.kept_out]
    for position, start in enumerate(own):
        later = own[position + 1 :]
        resumed = [other.first for other in later if other.first is not None]
        untold = {UNKNOWN: _seconds(start.time, start.last_event)}  # by an older version
        spent = dict(start.readings[-1].spent) if start.readings else untold
        twice = _take_repeated(spent, start, min(resumed)) if start.readings and resumed else 0.0
        parts = {part: sum(spent.pop(name, 0.0) for name in names) for part, (_, names) in PARTS.items()}
        parts[TWICE] = twice
        parts["starting"] += sum(spent.values())  # names of a newer version
        account.cost += twice + parts[AWAY]
        if before is not None:
            account.restarts += 1
            gap = _between(before, start)
            account.cost += parts["starting"] + parts["compiling, capturing"]
            parts[AWAY] += gap
            if before.exit_code == 0:
                account.after_end += gap
            else:
                account.cost += gap
                # The same job that has started its processes again was in no queue.
                if start.job and (start.job != before.job or before.exit_code == PREEMPTED):
                    account.queue += gap
        for part, seconds in parts.items():
            account.parts[part] += seconds
        before = start
    return account


def _take_repeated(spent: dict[str, float], start: Start, kept: int) -> float:
    """Take from what a start has `spent` what went into work beyond the updates that were `kept`, and return it."""
    then = spent if start.exit_code == 0 and kept >= start.last else _reading_at(start.readings, kept)
    lost = {name: spent[name] - then.get(name, 0.0) for name in _REPEATED if name in spent}
    spent |= {name: spent[name] - seconds for name, seconds in lost.items()}
    return sum(lost.values())


def _reading_at(readings: Sequence[Reading], update: int) -> dict[str, float]:
    """Return what had been spent when `update` was saved, or was done by the readings before and after."""
    if at := [reading for reading in readings if reading.update == update and reading.saved]:
        return at[-1].spent
    for (done, before, _), (then_done, after, _) in pairwise(readings):
        if done <= update < then_done:
            share = (update - done) / (then_done - done)
            return {name: before.get(name, 0.0) * (1 - share) + seconds * share for name, seconds in after.items()}
    return readings[-1 if update >= readings[-1].update else 0].spent


def _between(before: Start, start: Start) -> float:
    """Return the seconds from the last sign of life of a start to the beginning of the next one's process."""
    age = sum(start.readings[0].spent.values()) if start.readings else 0.0
    return max(0.0, _seconds(before.last_event, start.time) - age)


def _seconds(first: datetime | None, last: datetime | None) -> float:
    """Return the seconds between two times of day: 0 if the clock was set back, or if one is not known."""
    return 0.0 if first is None or last is None else max(0.0, (last - first).total_seconds())


def _told(seconds: float) -> str:
    """Return a time as `41 h`, `1.9 h`, `12 min`, `5.0 s`."""
    unit, size = next(((unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds >= size), ("s", 1))
    return f"{seconds / size:.{int(seconds < 10 * size)}f} {unit}"

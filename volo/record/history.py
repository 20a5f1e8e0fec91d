"""The history of a run from the records in its directory: each start, what it did, and how it ended.

Reads records of a run that is still going on, of one that was killed, of an older version without events.jsonl, and
files with damaged lines.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from volo.record.events import FILE as EVENTS
from volo.record.json_lines import read_json_lines
from volo.record.run_directory import METRICS, SUPERSEDED

Record = dict[str, Any]
# Kinds of events that every healthy run has.
ORDINARY = {"start", "resume", "checkpoint", "end"}


@dataclass
class RunStart:
    """One start of the program, as recorded by rank 0. Updates are counted over the whole run; times are UTC."""

    time: datetime | None
    node: str = "?"
    pid: int | None = None
    ranks: int | None = None
    first: int = 0  # updates done when it started
    last: int = 0  # updates done when it ended, as far as known
    seen: datetime | None = None  # last sign of life
    end: datetime | None = None
    ended: str = ""  # exit code and reason; empty if not recorded
    records: list[Record] = field(default_factory=list)  # its reports, also those repeated later

    def saw(self, record: Record) -> None:
        """Update times and position from an event or a report."""
        if (time := time_of(record)) is not None:
            self.seen = max(time, self.seen or time)
        self.last = max(self.last, int(number(record, "update", self.last)))

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as this machine can tell."""
        if self.ended or self.pid is None or self.node != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return True

    @property
    def seconds(self) -> float:
        """Seconds from its start to its last record."""
        return (self.seen - self.time).total_seconds() if self.seen and self.time else 0.0


@dataclass
class History:
    """A run from its first start to now, in order of time; `reports` and `epochs` exclude superseded records."""

    run: Path
    starts: list[RunStart]
    events: list[Record]
    reports: list[Record]
    epochs: list[Record]
    superseded: list[Record]  # reports of updates that were repeated
    damaged: dict[str, int]  # file -> lines that could not be read

    @property
    def trained(self) -> list[RunStart]:
        """The starts that have trained."""
        return [start for start in self.starts if start.records or start.last > start.first]


def read_history(run: Path) -> History:
    """Read the records of a run directory.

    Raises:
        UserError: The folder is no run directory, or can't be read.
    """
    if not any((run / name).is_file() for name in (EVENTS, METRICS, "run.json", "args.yaml")):
        raise UserError(f"{run} is no run directory: it holds none of {EVENTS}, {METRICS}, run.json and args.yaml")
    try:
        files = {name: read_json_lines(run / name) for name in (EVENTS, METRICS, SUPERSEDED)}
        noted = _noted_starts(run / "run.json")
    except OSError as error:
        raise UserError(f"{run} can't be read: {error.strerror}") from error
    events, metrics, superseded = (files[name][0] for name in (EVENTS, METRICS, SUPERSEDED))
    reports = [record for record in metrics if record.get("event") == "train"]
    history = History(
        run,
        _starts(events, noted),
        events,
        reports,
        [record for record in metrics if record.get("event") == "epoch"],
        [record for record in superseded if record.get("event") == "train"],
        {name: count for name, (_, count) in files.items() if count},
    )
    for record in sorted(history.superseded + reports, key=lambda r: time_of(r) or _BEGINNING):
        _assign(history.starts, record)
    return history


def faults(history: History) -> Counter[str]:
    """Count the recorded faults by kind."""
    kinds = Counter(str(event.get("kind")) for event in history.events)
    passed_over = sum(len(e["skipped"]) for e in history.events if isinstance(e.get("skipped"), list))
    return Counter({k: n for k, n in kinds.items() if k not in ORDINARY}) + Counter(checkpoints_passed_over=passed_over)


def skipped_files(history: History) -> dict[str, str]:
    """Return the reason by path of the images and labels that could not be used."""
    kinds = ("skipped-image", "bad-label")
    return {str(e.get("path")): str(e.get("reason")) for e in history.events if e.get("kind") in kinds}


@dataclass(frozen=True)
class Losses:
    """Lost time in seconds, and repeated updates. None: unknown from the records."""

    total: float | None  # from the first start to the last record
    down: float | None  # between the last record before a restart and the work after it
    again: int
    again_seconds: float
    trained: float
    waited: float  # of `trained`, for data


def losses(history: History) -> Losses:
    """Return the time that restarts and waiting for data have cost."""
    begun = [start.time for start in history.starts if start.time]
    seen = [start.seen for start in history.starts if start.seen]
    total = (max(seen) - min(begun)).total_seconds() if begun and seen else None
    down, again, again_seconds = 0.0, 0, 0.0
    for before, after in pairwise(history.trained):
        down += gap(before, after)
        twice = max(0, before.last - after.first)
        again += twice
        again_seconds += twice * _seconds_per_update(before.records or history.reports)
    trained, waited = (sum(number(r, key) for r in history.reports) for key in ("seconds", "wait_seconds"))
    return Losses(total, down if total is not None else None, again, again_seconds, trained, waited)


def gap(before: RunStart, after: RunStart) -> float:
    """Return the seconds from the last record before a restart to the first update after it."""
    if before.seen is None or after.time is None:
        return 0.0
    begun = (after.time - before.seen).total_seconds()
    first = after.records[0] if after.records else {}
    reported = time_of(first)
    if reported is not None:
        # The first report after a resume within an interval counts the seconds from before it, too.
        worked = reported.timestamp() - number(first, "seconds")
        begun = max(begun, worked - before.seen.timestamp())
    return max(0.0, begun)


def number(record: Record, key: str, default: float = 0.0) -> float:
    """Return a finite number of a record, or `default`."""
    value = record.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return default


def time_of(record: Record) -> datetime | None:
    """Return the time of a record in UTC, or None."""
    try:
        return datetime.fromisoformat(record["time"]).astimezone(timezone.utc)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


_BEGINNING = datetime.min.replace(tzinfo=timezone.utc)


def _seconds_per_update(records: list[Record]) -> float:
    updates = sum(number(r, "updates") for r in records)
    return sum(number(r, "seconds") for r in records) / updates if updates else 0.0


def _noted_starts(file: Path) -> list[RunStart]:
    """Return the starts in run.json, which older versions wrote without events.jsonl."""
    try:
        records = json.loads(file.read_bytes()) if file.is_file() else []
    except (ValueError, RecursionError):
        return []
    found = []
    for record in records if isinstance(records, list) else []:
        if isinstance(record, dict):
            time = time_of(record)
            ranks = int(number(record, "world_size")) or None
            found.append(RunStart(time, str(record.get("host", "?")), ranks=ranks, seen=time))
    return found


def _starts(events: list[Record], noted: list[RunStart]) -> list[RunStart]:
    """Group the events of rank 0 by start. Node and process id identify a process: an old one may outlive a restart."""
    starts: list[RunStart] = []
    for event in events:
        if event.get("rank") != 0:
            continue
        kind, who = event.get("kind"), (str(event.get("node")), event.get("pid"))
        if kind == "start":
            ranks = int(number(event, "world_size")) or None
            pid = who[1] if isinstance(who[1], int) else None
            starts.append(RunStart(time_of(event), who[0], pid, ranks))
        start = next((s for s in reversed(starts) if (s.node, s.pid) == who), None)
        if start is None:
            continue
        start.saw(event)
        if kind == "resume":
            start.first = int(number(event, "update"))
        elif kind == "end":
            start.end = time_of(event)
            start.ended = f"{event.get('exit_code')}: {event.get('reason')}"
    first = min((start.time for start in starts if start.time), default=None)
    # run.json has whole seconds, and a start is recorded there a moment later than as an event.
    earlier = [s for s in noted if first is None or (s.time is not None and s.time + timedelta(seconds=1) < first)]
    return earlier + starts


def _assign(starts: list[RunStart], record: Record) -> None:
    """Assign a report to the start that made it: the last one that had begun and not ended.

    A later start may have ended in between, because another one held the lock of the run.
    """
    time = time_of(record)
    begun = [s for s in starts if time is None or ((s.time or time) <= time and (s.end or time) >= time)]
    if begun:
        begun[-1].records.append(record)
        begun[-1].saw(record)

"""Reads the records of a run, which may be unfinished, killed or damaged: its events, intervals, epochs and starts.

Report, curves, resume and model card read the records here; trackers, whose script imports nothing, follow them alone.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tlt.errors import UserError
from tlt.io.files import os_errors_as

Record = dict[str, Any]
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"


class Records(NamedTuple):
    """The records in the files of a run, in the order in which they were written."""

    events: list[Record]
    reports: list[Record]  # records of intervals of training
    epochs: list[Record]  # records of finished epochs
    damaged: dict[str, int]  # by file, the number of lines that could not be read


class Reading(NamedTuple):
    """What rank 0 had spent since its process began, in seconds by part, when so many updates were done, and whether
    they had just been saved."""

    update: int
    spent: dict[str, float]
    saved: bool


@dataclass(eq=False)
class Start:
    """One start of the program, from the events of rank 0. Updates count over the whole run; times are UTC."""

    node: str
    ranks: Any
    time: datetime | None
    job: str = ""  # Slurm's job, and how often that was requeued; "" outside Slurm
    first: int | None = None  # updates done when it started; None if it ended before that was known
    last: int = 0  # updates done at its last event, such as a checkpoint
    last_event: datetime | None = None  # time of its last event
    exit_code: Any = None
    end: str = ""  # exit code and reason; "" if not recorded
    readings: list[Reading] = field(default_factory=list)
    kept_out: bool = False  # refused while an earlier start went on, as a second job in the same directory is


def record_of(line: bytes) -> Record | None:
    """Return the record in a line of JSON; None if it is damaged."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    return record if isinstance(record, dict) else None


def read_json_lines(file: Path) -> tuple[list[Record], int]:
    """Return the records of a file ([] if it is missing), and the number of damaged lines, which are left out."""
    lines = [line for line in file.read_bytes().splitlines() if line.strip()] if file.is_file() else []
    records = [record for line in lines if (record := record_of(line)) is not None]
    return records, len(lines) - len(records)


def read_records(folder: Path) -> Records:
    """Read the files of a run directory. Raises UserError if the folder is not a run directory, or can't be read."""
    if not any((folder / name).is_file() for name in (EVENTS, METRICS)):
        raise UserError(f"{folder} is no run directory: it holds neither {EVENTS} nor {METRICS}")
    with os_errors_as(lambda error: f"{folder} can't be read: {error.strerror}"):
        (events, bad_events), (metrics, bad_metrics) = (read_json_lines(folder / name) for name in (EVENTS, METRICS))
    reports, epochs = ([record for record in metrics if record.get("event") == kind] for kind in ("train", "epoch"))
    return Records(events, reports, epochs, {EVENTS: bad_events, METRICS: bad_metrics})


def epochs_of(folder: Path) -> list[Record]:
    """Return the records of the finished epochs of a run; [] if the folder is not a run directory."""
    return [record for record in read_json_lines(folder / METRICS)[0] if record.get("event") == "epoch"]


def starts_of(run: Path) -> list[Record]:
    """Return the records of a run's starts from run.json; one empty record if it is missing or damaged."""
    content: Any = None
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads((run / "run.json").read_bytes())
    return [start for start in content if isinstance(start, dict)] or [{}] if isinstance(content, list) else [{}]


def starts_in(events: Sequence[Record]) -> list[Start]:
    """Return the starts of the run, each with its extent."""
    starts: list[Start] = []
    by_process: dict[tuple[str, str], Start] = {}
    for event in (event for event in events if event.get("rank") == 0):
        kind = event.get("kind")
        process = (str(event.get("node")), str(event.get("pid")))
        if kind == "start":
            job = str(event.get("job") or "")
            by_process[process] = Start(process[0], event.get("world_size"), time_of(event), job)
            starts.append(by_process[process])
        if (start := by_process.get(process)) is None:
            continue
        for later in starts[starts.index(start) + 1 :]:
            later.kept_out = later.exit_code == UserError.exit_code
        start.last_event = time_of(event) or start.last_event
        start.last = max(start.last, int(number(event, "update")))
        if isinstance(spent := event.get("spent"), dict):
            seconds = {name: number(spent, name) for name in spent}
            start.readings.append(Reading(start.last, seconds, kind == "checkpoint"))
        if kind == "resume":
            start.first = int(number(event, "update"))
        elif kind == "end":
            start.exit_code = event.get("exit_code")
            start.end = f"{start.exit_code}: {event.get('reason')}"
        elif start.first is None and kind != "start" and "update" in event:
            start.first = 0
    return starts


def number(record: Record, key: str, default: float = 0.0) -> float:
    """Return the finite number `record[key]`, or `default`."""
    value = record.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number and value is not None else default


def time_of(record: Record) -> datetime | None:
    """Return the time of a record in UTC, or None."""
    try:
        return datetime.fromisoformat(record["time"]).astimezone(timezone.utc)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None

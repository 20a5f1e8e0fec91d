"""What happened to a run, from the records in its directory: `volo report RUN`.

Prints its starts, speed, checkpoints and faults; `--html` also writes RUN/report.html: one page with these, the curves,
the first batch and the settings. Reads runs that go on or were killed, and damaged files.
"""

from __future__ import annotations

import base64
import html
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tlt.errors import UserError
from tlt.io.text import table
from tlt.io.weights import peek_checkpoint, read_checkpoint
from volo.record.records import EVENTS, METRICS, duration, read_json_lines

Record = dict[str, Any]
PAGE = "report.html"
_ORDINARY = {"start", "resume", "checkpoint", "end"}  # kinds of events that every healthy run has
_SHOWN_FILES = 20
_PICTURES = {"curve.png": "Loss and accuracy", "first_batch.png": "The first images, as the model got them"}
_SETTINGS = {"args.yaml": "Settings", "run.json": "Starts, with versions"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{font:13px/1.4 ui-monospace,monospace;background:#f6f6f6;padding:.8rem;overflow-x:auto}"
    "img{max-width:100%;height:auto}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
)


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    folder = Path(args.run)
    records = read_records(folder)
    starts = starts_of(records.events)
    sections = {
        "": _head(folder, records),
        "Starts": table([_HEADS, *(_row(number, start) for number, start in enumerate(starts, 1))]) if starts else [],
        "Speed": _speed(records),
        "Checkpoints": _checkpoints(folder, verify=not args.quick),
        "Faults": [f"{count} x {kind}" for kind, count in sorted(faults(records.events).items())],
        "Files that could not be used": _skipped(records.events),
    }
    for title, lines in sections.items():
        print("\n".join([*([f"\n{title}"] if title else []), *(lines or ["none recorded"])]))
    if args.html:
        try:
            (folder / PAGE).write_text(_page(folder, sections), "utf-8")
        except OSError as error:
            raise UserError(f"--html: {folder / PAGE} can't be written ({error.strerror})") from error
        print(f"\nwritten: {folder / PAGE}")
    return 0


class Records(NamedTuple):
    """What the files of a run hold, in the order in which it was written."""

    events: list[Record]
    reports: list[Record]  # of intervals of training
    epochs: int  # that are finished
    damaged: dict[str, int]  # file -> lines that could not be read


@dataclass
class Start:
    """One start of the program, by the events of its rank 0. Updates are counted over the whole run; times are UTC."""

    node: str
    ranks: Any
    time: datetime | None
    first: int = 0  # updates done when it started
    last: int = 0  # updates done at its last event, such as a checkpoint
    seen: datetime | None = None  # time of its last event
    end: str = ""  # exit code and reason; empty if not recorded


def read_records(folder: Path) -> Records:
    """Read the files of a run directory.

    Raises:
        UserError: The folder is no run directory, or can't be read.
    """
    if not any((folder / name).is_file() for name in (EVENTS, METRICS)):
        raise UserError(f"{folder} is no run directory: it holds neither {EVENTS} nor {METRICS}")
    try:
        (events, bad_events), (metrics, bad_metrics) = (read_json_lines(folder / name) for name in (EVENTS, METRICS))
    except OSError as error:
        raise UserError(f"{folder} can't be read: {error.strerror}") from error
    reports = [record for record in metrics if record.get("event") == "train"]
    epochs = sum(record.get("event") == "epoch" for record in metrics)
    return Records(events, reports, epochs, {EVENTS: bad_events, METRICS: bad_metrics})


def starts_of(events: Sequence[Record]) -> list[Start]:
    """Return each start with what it did."""
    starts: list[Start] = []
    by_process: dict[tuple[str, str], Start] = {}
    for event in (event for event in events if event.get("rank") == 0):
        kind, process = event.get("kind"), (str(event.get("node")), str(event.get("pid")))
        if kind == "start":
            by_process[process] = Start(process[0], event.get("world_size"), _time(event))
            starts.append(by_process[process])
        if (start := by_process.get(process)) is None:
            continue
        start.seen = _time(event) or start.seen
        start.last = max(start.last, int(_number(event, "update")))
        if kind == "resume":
            start.first = int(_number(event, "update"))
        elif kind == "end":
            start.end = f"{event.get('exit_code')}: {event.get('reason')}"
    return starts


def faults(events: Sequence[Record]) -> Counter[str]:
    """Count the recorded faults by kind, and the damaged checkpoints that resuming has skipped."""
    found = Counter(kind for event in events if (kind := str(event.get("kind"))) not in _ORDINARY)
    skipped = sum(len(event["skipped"]) for event in events if isinstance(event.get("skipped"), list))
    return found + Counter({"damaged checkpoint skipped": skipped})


def _head(folder: Path, records: Records) -> list[str]:
    last = records.reports[-1] if records.reports else {}
    loss = f", loss {_number(last, 'loss', math.nan):.4f}" if last else ""
    updates = int(_number(last, "update"))
    lines = [f"{folder}: {updates} updates reported, {records.epochs} epochs finished{loss}"]
    return lines + [f"{count} damaged lines of {name} are left out" for name, count in records.damaged.items() if count]


_HEADS = ("#", "started (UTC)", "node", "ranks", "updates", "for", "ended")


def _row(number: int, start: Start) -> tuple[str, ...]:
    ended = start.end or f"not recorded, last event {_clock(start.seen)}"
    seconds = (start.seen - start.time).total_seconds() if start.seen and start.time else 0.0
    ranks, span = str(start.ranks or "?"), f"{start.first} -> {start.last}"
    return str(number), _clock(start.time), start.node, ranks, span, duration(seconds), ended


def _speed(records: Records) -> list[str]:
    keys = ("seconds", "wait_seconds", "images", "updates")
    seconds, waited, images, updates = (sum(_number(r, key) for r in records.reports) for key in keys)
    if not seconds:
        return []
    lines = [
        f"training {duration(seconds)} for {updates:.0f} updates, {images / seconds:.1f} images/s",
        f"of that waiting for data {duration(waited)} ({100 * waited / seconds:.0f} %)",
    ]
    if times := [time for record in (*records.events, *records.reports) if (time := _time(record))]:
        lines.append(f"from the first start to the last record {duration((max(times) - min(times)).total_seconds())}")
    return lines


def _checkpoints(folder: Path, verify: bool) -> list[str]:
    """Return one row per file, newest first; a file with several names is read once."""
    rows = [("file", "epochs", "updates", "MiB", "state")]
    seen: dict[int, str] = {}
    files = []
    for path in folder.glob("*.pth.tar"):
        with suppress(FileNotFoundError):  # a running run removes files
            files.append((path, path.stat()))
    for path, status in sorted(files, key=lambda item: (-item[1].st_mtime, item[0].name)):
        if status.st_ino in seen:
            rows.append((path.name, "", "", "", f"the same file as {seen[status.st_ino]}"))
            continue
        seen[status.st_ino] = path.name
        epoch, update, state = "", "", "verified" if verify else "not verified"
        try:
            content = peek_checkpoint(path)
            if isinstance(content.get("epoch"), int):
                epoch = str(content["epoch"] + 1)  # so many are finished
            update = str(content.get("update", ""))
            if verify:
                read_checkpoint(path)
        except UserError as error:
            state = f"BAD: {str(error).removeprefix(f'{path} ')}"
        rows.append((path.name, epoch, update, f"{status.st_size / 2**20:.1f}", state))
    return table(rows) if len(rows) > 1 else []


def _skipped(events: Sequence[Record]) -> list[str]:
    kinds = ("skipped-image", "bad-label")
    files = {str(e.get("path")): str(e.get("reason")) for e in events if e.get("kind") in kinds}
    lines = [f"{path}: {reason}" for path, reason in list(files.items())[:_SHOWN_FILES]]
    return lines + ([f"and {len(files) - _SHOWN_FILES} more, in {EVENTS}"] if len(files) > _SHOWN_FILES else [])


def _page(folder: Path, sections: dict[str, list[str]]) -> str:
    name = html.escape(folder.resolve().name)
    texts = {title or "Run": "\n".join(lines or ["none recorded"]) for title, lines in sections.items()}
    for file, title in _SETTINGS.items():
        if (folder / file).is_file():
            texts[title] = (folder / file).read_text("utf-8", "replace")
    blocks = [f"<h2>{title}</h2><pre>{html.escape(text)}</pre>" for title, text in texts.items()]
    for file, title in _PICTURES.items():
        if (folder / file).is_file():
            data = base64.b64encode((folder / file).read_bytes()).decode()
            blocks.insert(1, f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{"".join(blocks)}</body></html>\n'


def _number(record: Record, key: str, default: float = 0.0) -> float:
    """Return a finite number of a record, or `default`."""
    value = record.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number and value is not None else default


def _time(record: Record) -> datetime | None:
    """Return the time of a record in UTC, or None."""
    try:
        return datetime.fromisoformat(record["time"]).astimezone(timezone.utc)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _clock(time: datetime | None) -> str:
    return "?" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"

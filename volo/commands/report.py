"""Reports what happened to a run, from the records in its directory: `volo report RUN`.

It prints accuracy, data and model, command, starts, speed, checkpoints and faults. `--html` writes RUN/report.html,
one page with these, the curves, the settings and the first batch, for any screen width, light and dark. Runs may be
unfinished or killed, and files may be damaged.
"""

from __future__ import annotations

import base64
import csv
import html
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from tlt.io.text import table
from tlt.io.weights import peek_checkpoint, read_checkpoint
from volo.config.settings_tools import ReportSettings
from volo.config.train import changed_flags
from volo.record.confusion import CLASSES, CONFUSION, MISTAKES, WORST
from volo.record.records import EVENTS, METRICS, duration, read_json_lines

Record = dict[str, Any]
PAGE = "report.html"
_ORDINARY = {"start", "resume", "checkpoint", "verdict", "end"}  # kinds of events of a run without faults
_SHOWN_FILES = 20
_OF_LOG = ("model", "data")  # first words of the lines of log.txt that the report quotes
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#585858;--paper:#ffffff;--box:#f2f2f2}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--faint:#a9adb5;--paper:#17191d;--box:#24272d}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:.5rem 1rem;color:var(--ink)}
html{background:var(--paper)}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:.3rem 1rem}dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}
dd:first-of-type{font-size:1.25rem;font-weight:600}img{max-width:100%;height:auto;background:#fff}
div{overflow-x:auto}div img{max-width:max(100%,36rem)}
pre{font:14px/1.45 ui-monospace,monospace;background:var(--box);padding:.7rem;overflow-x:auto}summary{cursor:pointer}
"""


def run(settings: ReportSettings) -> int:
    """Print the report, and with `--html` write it as a page."""
    folder = Path(settings.run)
    records = read_records(folder)
    starts = starts_of(records.events)
    head = _head(folder, records)
    sections = {
        "Settings other than the defaults": _settings(folder),
        "Classes, the least accurate first": _classes(folder),
        "Starts": table([_HEADS, *(_row(number, start) for number, start in enumerate(starts, 1))]) if starts else [],
        "Speed": _speed(records),
        "Checkpoints": _checkpoints(folder, verify=not settings.quick),
        "Faults": [f"{count} x {kind}" for kind, count in sorted(faults(records.events).items())],
        "Files that could not be used": _skipped(records.events),
    }
    print(*(f"{term:<9}{text}" for term, text in head.items()), sep="\n")
    for title, lines in sections.items():
        print(f"\n{title}", *(lines or ["none recorded"]), sep="\n")
    if settings.html:
        with os_errors_as(lambda error: f"--html: {folder / PAGE} can't be written ({error.strerror})"):
            (folder / PAGE).write_text(_page(folder, head, sections), "utf-8")
        print(f"\nwritten: {folder / PAGE}")
    return 0


class Records(NamedTuple):
    """The records in the files of a run, in the order in which they were written."""

    events: list[Record]
    reports: list[Record]  # records of intervals of training
    epochs: list[Record]  # records of finished epochs
    damaged: dict[str, int]  # by file, the number of lines that could not be read


@dataclass
class Start:
    """One start of the program, from the events of rank 0. Updates count over the whole run; times are UTC."""

    node: str
    ranks: Any
    time: datetime | None
    first: int = 0  # updates done when it started
    last: int = 0  # updates done at its last event, such as a checkpoint
    last_event: datetime | None = None  # time of its last event
    end: str = ""  # exit code and reason; "" if not recorded


def read_records(folder: Path) -> Records:
    """Read the files of a run directory. Raises UserError if the folder is not a run directory, or can't be read."""
    if not any((folder / name).is_file() for name in (EVENTS, METRICS)):
        raise UserError(f"{folder} is no run directory: it holds neither {EVENTS} nor {METRICS}")
    with os_errors_as(lambda error: f"{folder} can't be read: {error.strerror}"):
        (events, bad_events), (metrics, bad_metrics) = (read_json_lines(folder / name) for name in (EVENTS, METRICS))
    reports = [record for record in metrics if record.get("event") == "train"]
    epochs = [record for record in metrics if record.get("event") == "epoch"]
    return Records(events, reports, epochs, {EVENTS: bad_events, METRICS: bad_metrics})


def starts_of(events: Sequence[Record]) -> list[Start]:
    """Return the starts of the run, each with its extent."""
    starts: list[Start] = []
    by_process: dict[tuple[str, str], Start] = {}
    for event in (event for event in events if event.get("rank") == 0):
        kind = event.get("kind")
        process = (str(event.get("node")), str(event.get("pid")))
        if kind == "start":
            by_process[process] = Start(process[0], event.get("world_size"), _time(event))
            starts.append(by_process[process])
        if (start := by_process.get(process)) is None:
            continue
        start.last_event = _time(event) or start.last_event
        start.last = max(start.last, int(_number(event, "update")))
        if kind == "resume":
            start.first = int(_number(event, "update"))
        elif kind == "end":
            start.end = f"{event.get('exit_code')}: {event.get('reason')}"
    return starts


def faults(events: Sequence[Record]) -> Counter[str]:
    """Count the recorded faults by kind, and the damaged checkpoints that a resume skipped."""
    counts = Counter(kind for event in events if (kind := str(event.get("kind"))) not in _ORDINARY)
    skipped = sum(len(event["skipped"]) for event in events if isinstance(event.get("skipped"), list))
    return counts + Counter({"damaged checkpoint skipped": skipped})


def _head(folder: Path, records: Records) -> dict[str, str]:
    """Return the most important facts by name: accuracy, how far the run came, data and model, and the command. Facts
    that are not recorded are left out."""
    last = records.reports[-1] if records.reports else {}
    loss = f", loss {_number(last, 'loss', math.nan):.4f}" if last else ""
    run = [f"{int(_number(last, 'update'))} updates reported, {len(records.epochs)} epochs finished{loss}"]
    run += [f"{count} damaged lines of {name} are left out" for name, count in records.damaged.items() if count]
    verdicts = [event.get("text") for event in records.events if event.get("kind") == "verdict"]
    summary = {"verdict": str(verdicts[-1] or "") if verdicts else ""}
    summary |= {"top-1": _accuracy(records.epochs), "run": "; ".join(run)}
    begun = [event for event in records.events if event.get("kind") in ("start", "resume")][:2]
    if begun and begun[-1]["kind"] == "resume" and begun[-1].get("path"):
        summary["branch"] = f"of {begun[-1]['path']}, with {int(_number(begun[-1], 'update'))} updates done"
    with suppress(OSError):
        for line in (folder / "log.txt").read_text("utf-8", "replace").splitlines():
            word, _, text_after = line[20:].partition(" ")  # the first 20 characters are the time
            if word.rstrip(":") in _OF_LOG:
                summary[word.rstrip(":")] = text_after
    if times := [time for record in (*records.events, *records.reports) if (time := _time(record))]:
        span = duration((max(times) - min(times)).total_seconds())
        summary["time"] = f"from the first start to the last record {span}"
    commands = [event["command"] for event in records.events if isinstance(event.get("command"), list)]
    if words := [str(word) for word in commands[-1]] if commands else []:
        script = Path(words[0]).name
        program = "volo" if script == "__main__.py" else f"python {script}" if script.endswith(".py") else script
        summary["command"] = f"{program} {shlex.join(words[1:])}"
    return {term: text for term, text in summary.items() if text}


def _accuracy(epochs: list[Record]) -> str:
    """Return the best and the last top-1 of the weights that rank the epochs; "" if none was measured."""
    for name, weights in (("eval_top1_ema", " of the averaged weights"), ("eval_top1", "")):
        if scored := [record for record in epochs if _number(record, name, -1.0) >= 0]:
            best, last = (
                f"{_number(record, name):.2f} % (epoch {int(_number(record, 'epoch')) + 1})"
                for record in (max(scored, key=lambda record: _number(record, name)), scored[-1])
            )
            return f"best {best}, last {last}{weights}, {int(_number(scored[-1], 'eval_images'))} validation images"
    return ""


_HEADS = ("#", "started (UTC)", "node", "ranks", "updates", "for", "ended")


def _row(number: int, start: Start) -> tuple[str, ...]:
    ended = start.end or f"not recorded, last event {_clock(start.last_event)}"
    seconds = (start.last_event - start.time).total_seconds() if start.last_event and start.time else 0.0
    ranks = str(start.ranks or "?")
    span = f"{start.first} -> {start.last}"
    return str(number), _clock(start.time), start.node, ranks, span, duration(seconds), ended


def _speed(records: Records) -> list[str]:
    keys = ("seconds", "wait_seconds", "images", "updates")
    seconds, waited, images, updates = (sum(_number(r, key) for r in records.reports) for key in keys)
    if not seconds:
        return []
    return [
        f"training {duration(seconds)} for {updates:.0f} updates, {images / seconds:.1f} images/s",
        f"of that waiting for data {duration(waited)} ({100 * waited / seconds:.0f} %)",
    ]


def _checkpoints(folder: Path, verify: bool) -> list[str]:
    """Return a row per file, newest first. A file that has several names is read once."""
    rows = [("file", "epochs", "updates", "MiB", "state")]
    name_of: dict[int, str] = {}
    files = []
    for path in folder.glob("*.pth.tar"):
        with suppress(FileNotFoundError):  # the run may still be going on and remove files
            files.append((path, path.stat()))
    for path, status in sorted(files, key=lambda item: (-item[1].st_mtime, item[0].name)):
        if status.st_ino in name_of:
            rows.append((path.name, "", "", "", f"the same file as {name_of[status.st_ino]}"))
            continue
        name_of[status.st_ino] = path.name
        epoch = ""
        update = ""
        state = "verified" if verify else "not verified"
        try:
            content = peek_checkpoint(path)
            if isinstance(content.get("epoch"), int):
                epoch = str(content["epoch"] + 1)  # number of finished epochs
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


def _settings(folder: Path) -> list[str]:
    settings = None
    with suppress(OSError, yaml.YAMLError):
        settings = yaml.safe_load((folder / "args.yaml").read_bytes())
    return [*map(shlex.join, changed_flags(settings).values())] if isinstance(settings, dict) else []


def _classes(folder: Path) -> list[str]:
    """Return the accuracy of the worst classes, and where that of the others is."""
    with suppress(OSError, ValueError, csv.Error):
        heading, *rows = csv.reader((folder / CLASSES).read_text("utf-8").splitlines())
        more = [f"and {len(rows) - WORST} more, in {CLASSES}"] if len(rows) > WORST else []
        return table([heading, *rows[:WORST]]) + more
    return []


def _page(folder: Path, head: dict[str, str], sections: dict[str, list[str]]) -> str:
    name = html.escape(folder.resolve().name)
    facts = "".join(f"<dt>{term}</dt><dd>{html.escape(text)}</dd>" for term, text in head.items())
    settings, classes, *others = (
        f"<h2>{title}</h2><pre>{html.escape(chr(10).join(lines or ['none recorded']))}</pre>"
        for title, lines in sections.items()
    )
    files = {"curve.png": "Loss and accuracy", CONFUSION: "What is taken for what", MISTAKES: "The surest mistakes"}
    files |= {"first_batch.png": "First images"}
    files |= {"args.yaml": "All settings", "run.json": "Starts, with versions"}
    curve, confusion, mistakes, images, flags, starts = (_shown(folder / file, title) for file, title in files.items())
    listed, link = f"more, in {CLASSES}", f'more, in <a href="{CLASSES}">{CLASSES}</a>'
    body = f"<h1>{name}</h1><dl>{facts}</dl>{curve}<div>{confusion}</div>{classes.replace(listed, link)}{mistakes}"
    body += f"{settings}{flags}<div>{images}</div>{''.join(others)}{starts}"
    tags = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    tags += f"<title>{name}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{tags}</head><body>{body}</body></html>\n'


def _shown(file: Path, title: str) -> str:
    """Return a picture, or a text that is folded; "" if the file is missing."""
    content = file.read_bytes() if file.is_file() else b""
    if content and file.suffix == ".png":
        data = base64.b64encode(content).decode()
        return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">'
    text = html.escape(content.decode("utf-8", "replace"))
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>" if content else ""


def _number(record: Record, key: str, default: float = 0.0) -> float:
    """Return the finite number `record[key]`, or `default`."""
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

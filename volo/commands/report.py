"""What happened to a run, from its records: `volo report RUN`."""

from __future__ import annotations

import csv
import json
import os
from argparse import Namespace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path

from tlt.errors import UserError
from tlt.io.text import table
from volo.record.events import duration
from volo.record.history import History, RunStart, faults, losses, number, read_history, skipped_files
from volo.record.json_lines import read_json_lines
from volo.record.report_page import page
from volo.record.run_directory import TIME_KEYS

PICTURE, PAGE = "report.png", "report.html"
_SHOWN_FILES = 20


def run(args: Namespace) -> int:
    """Print the report, and draw it where matplotlib is installed."""
    if args.same_as:
        _compare(Path(args.run), Path(args.same_as))
        return 0
    history = read_history(Path(args.run))
    sections = (
        ("", _head(history)),
        ("Starts", _starts(history)),
        ("Time", _time(history)),
        ("Checkpoints", _checkpoints(history.run, verify=not args.quick)),
        ("Faults", [f"{count} x {kind.replace('_', ' ')}" for kind, count in sorted(faults(history).items())]),
        ("Files that could not be used", _skipped(history)),
    )
    for title, lines in sections:
        print("\n".join([*([f"\n{title}"] if title else []), *(lines or ["none noted"])]))
    if not args.no_picture:
        print("\n" + _draw(history, Path(args.picture or history.run / PICTURE)))
    if args.html:
        print(_write_page(history, [(title or "Run", lines) for title, lines in sections]))
    return 0


def without_times(file: Path) -> list[str]:
    """Return the lines of a metrics.jsonl or summary.csv without the values that depend on the clock.

    Two runs that computed the same give equal lists, however often either was interrupted.
    """
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as lines:
            records = list(csv.DictReader(lines))
    else:
        records, _ = read_json_lines(file)
    return [json.dumps({k: v for k, v in record.items() if k not in TIME_KEYS}) for record in records]


def _compare(run: Path, other: Path) -> None:
    """Compare the records of two runs, and print that they are equal.

    Raises:
        UserError: They differ; the message names the first difference.
    """
    for name in ("metrics.jsonl", "summary.csv"):
        for file in (run / name, other / name):
            if not file.is_file():
                raise UserError(f"{file} is missing: --same-as compares the directories of two runs")
        mine, theirs = without_times(run / name), without_times(other / name)
        for line, (one, two) in enumerate(zip_longest(mine, theirs, fillvalue="nothing"), start=1):
            if one != two:
                raise UserError(f"{name} differs in line {line}: {one} in {run}, {two} in {other}")
        print(f"{name}: {len(mine)} lines, the same in {run} and {other} but for {', '.join(TIME_KEYS)}")


def _head(history: History) -> list[str]:
    last = history.reports[-1] if history.reports else {}
    lines = [f"{history.run}: {int(number(last, 'update'))} updates reported, {len(history.epochs)} epochs finished"]
    if last:
        lines[0] += f", loss {number(last, 'loss', float('nan')):.4f}"
    if any(start.is_alive for start in history.starts[-1:]):
        lines.append("it is running now")
    lines += [f"{count} damaged lines of {name} are left out" for name, count in history.damaged.items()]
    if not history.events:
        lines.append("there is no events.jsonl (an older version's run): how it ended and its faults were not noted")
    return lines


def _starts(history: History) -> list[str]:
    rows = [("#", "started (UTC)", "node", "ranks", "updates", "for", "ended")]
    for count, start in enumerate(history.starts, start=1):
        ranks = "?" if start.ranks is None else str(start.ranks)
        span = f"{start.first} -> {start.last}"
        rows.append((str(count), _clock(start.time), start.node, ranks, span, duration(start.seconds), _end(start)))
    return table(rows) if history.starts else []


def _end(start: RunStart) -> str:
    if start.ended:
        return start.ended
    return "runs" if start.is_alive else f"no end noted, last sign of life {_clock(start.seen)}"


def _clock(time: datetime | None) -> str:
    return "?" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def _time(history: History) -> list[str]:
    found = losses(history)
    if not found.trained:
        return []
    images, updates = (sum(number(r, key) for r in history.reports) for key in ("images", "updates"))
    share = found.waited / found.trained
    lines = [
        f"training {duration(found.trained)} for {updates:.0f} updates, {images / found.trained:.1f} images/s",
        f"of that waiting for data {duration(found.waited)} ({100 * share:.0f} %)",
        f"updates done twice after restarts {found.again} (about {duration(found.again_seconds)})",
    ]
    if found.total and found.down is not None:
        down = 100 * found.down / found.total
        lines.append(f"between starts {duration(found.down)} ({down:.0f} % of {duration(found.total)} in all)")
    return lines


def _checkpoints(run: Path, verify: bool) -> list[str]:
    """Return one row per file, newest first; a file with several names is read once."""
    rows = [("file", "epoch", "update", "MiB", "state")]
    seen: dict[int, tuple[str, ...]] = {}
    files = [(path, status) for path in run.glob("*.pth.tar") if (status := _status(path)) is not None]
    for path, status in sorted(files, key=lambda item: (-item[1].st_mtime, item[0].name)):
        if status.st_ino in seen:
            name, *_, size, _ = seen[status.st_ino]
            rows.append((path.name, "", "", size, f"the same file as {name}"))
        else:
            rows.append((path.name, *_look(path, verify, status.st_size)))
            seen[status.st_ino] = rows[-1]
    return table(rows) if len(rows) > 1 else []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # a running run removes files
        return None


def _look(path: Path, verify: bool, size: int) -> tuple[str, str, str, str]:
    """Return (epoch, update, MiB, state) of a checkpoint, whose file has `size` bytes."""
    from tlt.io.weights import peek_checkpoint, verify_checkpoint

    mebibytes = f"{size / 2**20:.1f}"
    try:
        content = peek_checkpoint(path)
        if verify:
            verify_checkpoint(path)
    except UserError as error:
        return "", "", mebibytes, f"BAD: {str(error).removeprefix(f'{path} ')}"
    epoch, update = (str(content[key]) if isinstance(content.get(key), int) else "" for key in ("epoch", "update"))
    return epoch, update, mebibytes, "verified" if verify else "not verified"


def _skipped(history: History) -> list[str]:
    files = skipped_files(history)
    lines = [f"{path}: {reason}" for path, reason in list(files.items())[:_SHOWN_FILES]]
    return lines + ([f"and {len(files) - _SHOWN_FILES} more, in events.jsonl"] if len(files) > _SHOWN_FILES else [])


def _draw(history: History, file: Path) -> str:
    try:
        from volo.record.report_picture import draw
    except ImportError:
        return "no picture is drawn: pip install 'volo-tlt[plot]'"
    try:
        draw(history, file)
    except OSError as error:
        raise UserError(f"{file} can't be written ({error.strerror}): name another with --picture FILE") from error
    return f"drawn: {file}"


def _write_page(history: History, sections: list[tuple[str, list[str]]]) -> str:
    file, run = history.run / PAGE, history.run
    texts = {"Arguments": run / "args.yaml", "Starts, with versions": run / "run.json"}
    try:
        read = {title: each.read_text(errors="replace") for title, each in texts.items() if each.is_file()}
        file.write_text(page(run, sections, read))
    except OSError as error:
        raise UserError(f"--html: {file} can't be written ({error.strerror})") from error
    return f"written: {file}"

"""`events.jsonl`: what happened to a run, when and where; every start adds to it and nothing is ever taken out.

One JSON object per line: `time` (UTC, ISO 8601), `kind`, `rank`, `node`, `pid`, `epoch` (epochs finished) and
`update` (done in the whole run) where they are known, then what belongs to the kind. docs/training.md has the table.
"""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from volo.record.json_lines import LineFile, strict_json

FILE = "events.jsonl"

Kind = Literal[
    "start",
    "resume",
    "checkpoint",
    "checkpoint-failed",
    "checkpoint-skipped",
    "signal",
    "fault",
    "nonfinite",
    "skipped-image",
    "bad-label",
    "worker-died",
    "straggler",
    "data-wait",
    "lock",
    "end",
]


def utc_now() -> str:
    """The present moment, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def duration(seconds: float) -> str:
    """Format seconds as `1d 02:03:04`, `02:03:04` or `03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}" if hours or days else f"{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


class EventLog:
    """One process's way into a run's events.jsonl. What comes before `open` is kept and written then.

    Ranks on another machine reach the file where the run directory is shared; elsewhere theirs are lost.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._file = LineFile()

    def open(self, directory: Path) -> None:
        """Write to the file in `directory` from now on; it must exist."""
        self._file.path = directory / FILE
        self._file.flush()

    def add(self, kind: Kind, **fields: Any) -> None:
        """Add an event. Never raises for a file that can't be written."""
        record = {"time": utc_now(), "kind": kind, "rank": self.rank, "node": socket.gethostname(), "pid": os.getpid()}
        self._file.append(strict_json(record | fields))


def exit_code(error: BaseException | None) -> int:
    """The code with which a program ends that `error` leaves (None: all is well), as in `volo.commands.console`."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 141
    return getattr(error, "exit_code", 1)


def reason(error: BaseException | None) -> str:
    """Why a program ends, in one line."""
    if error is None:
        return "done"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if hasattr(error, "exit_code"):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]

"""`events.jsonl`: the events of a run with time and place; every start adds to it, and nothing is ever removed.

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
    "straggler",
    "data-wait",
    "end",
]


def utc_now() -> str:
    """Return the present time in milliseconds, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def duration(seconds: float) -> str:
    """Format seconds as `1d 02:03:04`, `02:03:04` or `03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}" if hours or days else f"{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


class EventLog:
    """Writes the events of one process to events.jsonl. Events before `open` are kept and written then.

    Events of ranks on other machines are lost unless the run directory is shared.
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
    """Return the exit code of a program that ends with `error` (None: success), as in `volo.commands.console`."""
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
    """Return in one line why a program ends."""
    if error is None:
        return "done"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if hasattr(error, "exit_code"):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]

"""Records in lines of JSON: files that several processes may append to and any parser reads; times in them.

`events.jsonl` has the events of a run, by `volo.record.logger.Logger.event`; docs/training.md lists their kinds.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tlt.io.files import read_at

EVENTS = "events.jsonl"
_MOST_PENDING = 10_000  # lines kept in memory while a file can't be written


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


def strict_json(record: dict[str, Any]) -> str:
    """Return a line of standard JSON: NaN and infinity become null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def read_json_lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file (none if it is missing), and the number of damaged lines that are left out."""
    records, damaged = [], 0
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.strip():
            damaged += 1
    return records, damaged


class LineFile:
    """Appends lines, each by one write, so that processes on one machine do not interleave their lines.

    A line that can't be written (no file yet, full disk) is kept in memory and tried again with the next one: a failed
    record must not end the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path  # None until it is known
        self._pending: deque[bytes] = deque(maxlen=_MOST_PENDING)

    def open(self, path: Path) -> None:
        """Write to this file from now on, the waiting lines first."""
        self.path = path
        self._flush()

    def append(self, line: str) -> None:
        """Write a line after the waiting ones."""
        self._pending.append(line.encode(errors="backslashreplace") + b"\n")
        self._flush()

    def _flush(self) -> None:
        if self.path is None:
            return
        with suppress(OSError), open(self.path, "a+b", buffering=0) as file:
            # It is taken out first, because a signal handler or another thread may append in the meantime.
            while self._pending and self._wrote(file.fileno(), self._pending.popleft()):
                pass

    def _wrote(self, descriptor: int, line: bytes) -> bool:
        """Write a line; put it back and return False where that fails."""
        # The file may end within a line, because the machine or the disk failed during a write.
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and read_at(descriptor, 1, size - 1) != b"\n"
        whole, written = b"\n" + line if is_torn else line, 0
        with suppress(OSError):
            written = os.write(descriptor, whole)
        if written < len(whole):
            self._pending.appendleft(line)
        return written == len(whole)

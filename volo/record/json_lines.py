"""Files of JSON lines that several processes may append to, that survive a full disk, and that any parser reads."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from tlt.io.files import read_at

_MOST_PENDING = 10_000  # lines kept in memory while a file can't be written


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

    Attributes:
        path: None until the place of the file is known.
        error: The error of the last attempt; None if all lines are written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.error: OSError | None = None
        self._pending: deque[bytes] = deque(maxlen=_MOST_PENDING)

    def open(self, path: Path) -> None:
        """Write to this file from now on, the waiting lines first."""
        self.path = path
        self.flush()

    def append(self, line: str) -> None:
        """Write a line after the waiting ones."""
        self._pending.append(line.encode(errors="backslashreplace") + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines, if possible."""
        if self.path is None:
            return
        self.error = None
        try:
            with open(self.path, "a+b", buffering=0) as file:
                while self._pending:
                    # It is taken out first, because a signal handler or another thread may append in the meantime.
                    self._write(file.fileno(), self._pending.popleft())
        except OSError as error:
            self.error = error

    def _write(self, descriptor: int, line: bytes) -> None:
        # The file may end within a line, because the machine or the disk failed during a write.
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and read_at(descriptor, 1, size - 1) != b"\n"
        whole = b"\n" + line if is_torn else line
        try:
            if os.write(descriptor, whole) < len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._pending.appendleft(line)
            raise

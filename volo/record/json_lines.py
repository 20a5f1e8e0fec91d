"""Files of JSON lines that several processes may append to, that survive a full disk, and that any parser reads."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

_MOST_PENDING = 10_000  # lines kept in memory while a file can't be written


def strict_json(record: dict[str, Any]) -> str:
    """One line of JSON as the standard has it: NaN and infinity, which it doesn't know, become null."""
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
    """The records of a file (none if it is missing) and the number of lines that hold none, which are left out."""
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
    """Appends lines, each by one write, so that processes on one machine don't tear each other's lines apart.

    A line that can't be written (no file yet, full disk) waits in memory and is tried again with the next one: records
    must not end the run that they are of.

    Attributes:
        path: None until the file's place is known.
        error: Of the last attempt; None if all lines are written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.error: OSError | None = None
        self._pending: deque[bytes] = deque(maxlen=_MOST_PENDING)

    def append(self, line: str) -> None:
        """Write a line, after those that wait."""
        self._pending.append(line.encode(errors="backslashreplace") + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait, if it can be done."""
        if self.path is None:
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._write(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.error = error
        else:
            self.error = None

    def _write(self, descriptor: int) -> None:
        torn = _is_torn(descriptor)
        while self._pending:
            # Taken out first: a signal's handler or another thread may append in the meantime.
            line = self._pending.popleft()
            whole = b"\n" + line if torn else line
            torn = False
            try:
                written = os.write(descriptor, whole)
            except OSError:
                self._pending.appendleft(line)
                raise
            if written < len(whole):
                self._pending.appendleft(line)
                torn = written > 0
                if not torn:
                    raise OSError("nothing could be written")


def _is_torn(descriptor: int) -> bool:
    """Whether the file ends within a line: the machine or the disk gave out while it was written."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"

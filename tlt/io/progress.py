"""Shows how far a long job is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

_REPORT_SECONDS = 10.0  # between lines where nobody watches a progress bar
_FIRST_SECONDS = 3.0  # until the first line of a search, most of which take less


class SearchProgress:
    """Counts what a search finds where the total is unknown: a line after 3 s, then one every 10 s.

    Args:
        report: Prints a line; None: nothing is printed.
        alive: Called at each step.
    """

    def __init__(self, report: Callable[[str], None] | None = print, alive: Callable[[], None] | None = None) -> None:
        self._report, self._alive = report, alive
        self._start = time.monotonic()
        self._due = self._start + _FIRST_SECONDS

    def __call__(self, what: str, count: int) -> None:
        """Count: `what` is done, and has found `count` by now."""
        if self._alive is not None:
            self._alive()
        now = time.monotonic()
        if self._report is not None and now >= self._due:
            self._due = now + _REPORT_SECONDS
            self._report(f"{what}: {count} found in {now - self._start:.0f} s")


class Progress:
    """Shows a bar with ETA in a terminal, lines with ETA in a log."""

    def __init__(self, what: str, total: int, unit: str = "image") -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.start = self.reported = time.monotonic()
        watched = sys.stderr.isatty()
        self.bar = tqdm(desc=what, total=total, unit=unit, dynamic_ncols=True, leave=False) if watched else None

    def step(self, count: int = 1) -> None:
        """Count items that are done."""
        self.done += count
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(count)
        elif now - self.reported >= _REPORT_SECONDS:
            self.reported = now
            left = (self.total - self.done) * (now - self.start) / self.done
            print(f"{self._rate(now - self.start)}, ETA {tqdm.format_interval(left)}", flush=True)

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()
        if self.total:
            seconds = time.monotonic() - self.start
            print(f"{self._rate(seconds)}, in {tqdm.format_interval(seconds)}", flush=True)

    def _rate(self, seconds: float) -> str:
        return (
            f"{self.what}: {self.done}/{self.total} {self.unit}s, {self.done / max(seconds, 1e-9):.1f} {self.unit}s/s"
        )

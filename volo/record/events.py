"""`events.jsonl`: the events of a run with time and place; every start adds to it, and nothing is ever removed.

One JSON object per line, by `volo.record.logger.Logger.event`: `time` (UTC, ISO 8601), `kind`, `rank`, `node`, `pid`,
`epoch` (epochs finished) and `update` (done in the whole run) where they are known, then what belongs to the kind.
docs/training.md lists the kinds.
"""

from __future__ import annotations

from datetime import datetime, timezone

FILE = "events.jsonl"


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


def outcome(error: BaseException | None) -> tuple[int, str]:
    """Return the exit code of a program that ends with `error` (None: success), as in `volo.commands.console`, and in
    one line why it ends."""
    if error is None:
        return 0, "done"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted from the keyboard"
    if hasattr(error, "exit_code"):
        return error.exit_code, str(error)
    code = 141 if isinstance(error, BrokenPipeError) else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return code, f"{type(error).__name__}: {error}".splitlines()[0]

"""One job per run directory: a second one (a double requeue, say) is kept out of it.

The kernel's lock on RUN/run.lock ends with the process that holds it, however that ends. It keeps out jobs of
other machines where the file system passes locks on, as NFS does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tlt.errors import UserError

FILE = "run.lock"
_WAIT = 2.0  # seconds, for data workers of a killed job, which have inherited the lock before filelock 4


class RunLock:
    """The lock of a run directory; leaving its context releases it.

    Args:
        warn: Receives a line when a directory that was removed is made again.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = directory / FILE, warn
        self._lock: FileLock | None = None
        self._inode = 0

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def acquire(self) -> None:
        """Take the lock of a directory that exists; for rank 0. Does nothing if it is held already.

        Raises:
            UserError: Another job holds it.
        """
        if self._lock is not None:
            return
        lock = FileLock(self.path, thread_local=False)
        try:
            lock.acquire(timeout=_WAIT)
        except Timeout as error:
            raise UserError(
                f"{self.path.parent} is in use by {self._holder()}: end that job first, or name another --experiment"
            ) from error
        except (OSError, NotImplementedError) as error:  # no permission, or a file system without locks
            raise UserError(f"{self.path} cannot be locked ({error}): name another --output") from error
        self._lock, self._inode = lock, os.stat(self.path).st_ino

    def check(self) -> None:
        """Create the directory again if it was removed, and take its lock again; does nothing without the lock.

        Raises:
            UserError: Another job has taken the directory meanwhile.
        """
        if self._lock is None:
            return
        with suppress(OSError):  # the next save fails for the same reason, reports it and is tried again
            if self.path.exists() and self.path.stat().st_ino == self._inode:
                return
            self.path.parent.mkdir(exist_ok=True)
            self._lock = None
            self.acquire()
            self._warn(
                f"warning: {self.path.parent} was removed while this run goes on: made anew, without what it held"
            )

    def _holder(self) -> str:
        """Return who holds the lock, by the newest start in run.json."""
        try:
            start = json.loads((self.path.parent / "run.json").read_bytes())[-1]
            return f"process {start['pid']} on {start['host']} (since {start['time']})"
        except (OSError, ValueError, LookupError, TypeError):  # it has not begun, or is damaged
            return "another job"

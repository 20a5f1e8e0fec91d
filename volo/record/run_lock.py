"""One job per run directory: a second one (a double requeue, say) is kept out of it.

The kernel's lock on RUN/run.lock keeps out every job of the same machine, and of others where the file system passes
locks on. Where it doesn't, the file tells who holds it and its heartbeat whether the holder lives. A killed job leaves
a lock that is recognised as stale: at once on the same machine, else after the heartbeat has been still for a while.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from tlt.errors import UserError
from tlt.io.files import read_at, write_at

try:
    import fcntl
except ImportError:  # Windows: the heartbeat alone tells whether another job holds the lock
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"
HEARTBEAT, STALE = 10.0, 60.0  # seconds between beats; and without one until the holder counts as dead
_HELD = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK}


class RunLock:
    """The lock of a run directory; leaving its context releases it.

    Args:
        tell: Told in a line what takes time or was found.
        heartbeat: Seconds between beats.
        stale: Seconds for which the heartbeat of a job on another machine is watched before it counts as dead.
    """

    def __init__(
        self, directory: Path, tell: Callable[[str], None], heartbeat: float = HEARTBEAT, stale: float = STALE
    ) -> None:
        self.path, self._tell, self._heartbeat, self._stale = directory / FILE, tell, heartbeat, stale
        self._me = _identity()
        self._file: int | None = None
        self._lost: str | None = None
        self._stop, self._thread = Event(), Thread(target=self._beat, name="run-lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock of a directory that exists; for rank 0. Does nothing if it is held already.

        Raises:
            UserError: Another job holds it.
        """
        if self._file is not None:
            return
        try:
            file = self._open()
        except OSError as error:
            raise UserError(f"{self.path} cannot be opened: {error.strerror}") from error
        try:
            self._take(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._thread.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Create the directory again if it was removed, and take its lock again; does nothing without the lock.

        Raises:
            UserError: Another job has taken the directory, because this job was stopped for too long, or because the
                directory was removed.
        """
        if self._lost:
            raise UserError(f"{self._lost} has taken {self.path.parent} over, because this job gave no sign of life")
        if self._file is None or _names(self.path, self._file):
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            file = self._open()
        except OSError:  # the next save fails for the same reason, reports it and is tried again
            return
        self._take(file)
        self._file = file  # the old file stays open: the heartbeat may be writing to it
        self._tell(f"warning: {self.path.parent} was removed while this run goes on: made anew, without what it held")

    def _open(self) -> int:
        # Open as long as the lock is held: closing any descriptor of the file would give up the kernel's lock.
        return os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)

    def release(self) -> None:
        """Release the lock. The file stays, empty, because another job may be waiting for it."""
        if self._file is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            if not self._lost:
                os.ftruncate(self._file, 0)
        os.close(self._file)

    def _take(self, file: int) -> None:
        try:
            # Not flock: data workers would inherit it and hold it after this process was killed.
            locked = fcntl is not None
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise UserError(self._refusal(_read(file))) from error
            locked = False  # a file system without locks
        holder = _read(file)
        if holder is not None:
            if not (self._is_dead_here(holder, locked) or self._stands_still(file, holder)):
                raise UserError(self._refusal(holder))
            self._tell(f"broke the lock that a dead job left: {_shown(holder)}")
        self._write(file)

    def _is_dead_here(self, holder: dict[str, Any], locked: bool) -> bool:
        """Whether the holder was a process of this kernel that has ended."""
        if holder.get("boot") != self._me["boot"]:
            return False
        same_numbers = holder.get("pid_namespace") == self._me["pid_namespace"]
        return locked or (same_numbers and process_started(holder.get("pid")) != holder.get("process_started"))

    def _stands_still(self, file: int, holder: dict[str, Any]) -> bool:
        """Whether the heartbeat stands still; clocks of different machines are not compared."""
        self._tell(f"watching for {self._stale:g} s whether {_shown(holder)} still holds {self.path.parent}")
        until = time.monotonic() + self._stale
        while time.monotonic() < until:
            time.sleep(self._heartbeat / 2)
            now = _read(file)
            if now is None or now.get("beat") != holder.get("beat") or now.get("token") != holder.get("token"):
                return now is None
        return True

    def _beat(self) -> None:
        assert self._file is not None
        while not self._stop.wait(self._heartbeat):
            with suppress(OSError):  # a mount that is lost for a while
                holder = _read(self._file)
                if holder is not None and holder.get("token") != self._me["token"]:
                    self._lost = _shown(holder)
                    return
                self._me["beat"] += 1
                self._write(self._file)

    def _write(self, file: int) -> None:
        """Write the holder in one write of fixed length, so that no reader sees half of it."""
        try:
            write_at(file, json.dumps(self._me).ljust(1023).encode() + b"\n", 0)
            os.fsync(file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        return (
            f"{self.path.parent} is in use by {_shown(holder or {})}: end that job first, or name another --experiment"
        )


def _read(file: int) -> dict[str, Any] | None:
    """Return the holder of the lock, or None. Damaged content counts as an unknown holder."""
    content = read_at(file, 1 << 16, 0)
    if not content.strip(b"\0 \n"):
        return None
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _names(path: Path, file: int) -> bool:
    """Whether `path` names the open `file`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "token": uuid4().hex,
        "beat": 0,
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _pid_namespace(),
        "process_started": process_started(os.getpid()),
    }


def _shown(holder: dict[str, Any]) -> str:
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job} (since {holder.get('started', '?')})"


def process_started(pid: Any) -> str | None:
    """Return when a process on this machine started, in kernel ticks; None if it does not exist or is a zombie."""
    text = _first_line(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split() if text else []
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _first_line(file: str) -> str | None:
    try:
        return Path(file).read_text().splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return None

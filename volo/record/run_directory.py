"""The directories of runs: finding one, making one, and a lock that keeps other jobs from writing there."""

import itertools
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from filelock import FileLock, Timeout

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from volo.cluster.distributed import restarts
from volo.record.history import starts_of
from volo.record.records import launch_record, plain

_LOCK = "run.lock"
_TIME = "%Y%m%d-%H%M%S"  # the time in the names of runs
_WAIT = 2.0  # seconds to wait for the lock: before filelock 4, data workers of a killed job hold it a little longer


def check_writable(folder: Path, flag: str) -> None:
    """Check that results can be written in `folder`, or in the nearest existing parent if `folder` doesn't exist.

    This creates and removes a temporary folder, because permissions are not enough (root, read-only mounts). Raises
    UserError if nothing can be written there.
    """
    there = folder
    with os_errors_as(lambda error: f"{flag} {folder}: nothing can be written in {there} ({error.strerror})"):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        TemporaryDirectory(dir=there, prefix=".writable-").cleanup()


def run_of_launch(root: Path, experiment: str, resumed: Path | None) -> Path | None:
    """Return the run directory that an earlier start of this launch used (run.json records its id), or None.

    Args:
        experiment: The name of the run in `root`; "" for any of them.
        resumed: Another directory that it may be.
    """
    launch = launch_record()
    if not restarts() or launch is None:
        return None
    records = [root / experiment / "run.json"] if experiment else [*root.glob("*/run.json")]
    if resumed is not None:
        records.append(resumed / "run.json")
    matches = [file for file in records if starts_of(file.parent)[-1].get("launch") == launch]
    return max(matches, key=lambda file: file.stat().st_mtime).parent if matches else None


def newest_alike(
    root: Path, name_end: str, settings: dict[str, Any], defaulted: Sequence[str], report: Callable[[str], None]
) -> Path | None:
    """Return the newest run with these settings whose name ends so, or None; report the newest that has other settings.

    A setting that the data determine, because neither command gives it, is not compared (`FITTED` in settings_train).
    """
    alike, passed_over = None, ""
    for run in sorted((file.parent for file in root.glob(f"*{name_end}/args.yaml")), key=_begun, reverse=True):
        fitted = starts_of(run)[-1].get("fitted", list(defaulted))  # earlier versions don't record it
        asked = {k: v for k, v in settings.items() if k not in defaulted or k not in fitted}
        changes: list[str] = []
        with suppress(OSError, yaml.YAMLError):  # if the file is damaged, the run's checkpoints are compared later
            changes = changed_settings(yaml.safe_load((run / "args.yaml").read_bytes()), asked)
        if not changes:
            alike = run
            break
        passed_over = passed_over or (
            f"--resume auto leaves {run} alone, another experiment ({'; '.join(changes)}): "
            f"--experiment {run.name} would go on with it"
        )
    if passed_over:
        report(passed_over)
    return alike


def _begun(run: Path) -> tuple[float, int, str]:
    """Return a key that sorts runs by their beginning: the time, then the number among runs of the same second.

    Names alone don't suffice: they have a machine's local time, which depends on its time zone and may be set back.
    """
    numbered = re.match(r"\d{8}-\d{6}-(\d+)-", run.name)
    place = int(numbered[1]) if numbered else 1, run.name
    with suppress(LookupError, TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(starts_of(run)[0]["time"]).timestamp(), *place
    with suppress(ValueError, OverflowError):
        return datetime.strptime(run.name[:15], _TIME).timestamp(), *place
    return 0.0, *place


def changed_settings(recorded: Any, now: dict[str, Any]) -> list[str]:
    """Compare settings recorded in a checkpoint with those of this run; return a line for each of `now` that differs.
    Recorded values are compared but never traversed, because in a hostile file that might not end."""
    if not isinstance(recorded, dict):
        return []
    # A flag that used to take one value may take several now: the two forms of the same value are equal.
    differing = [k for k in sorted(now) if k in recorded and plain(now[k]) not in (recorded[k], [recorded[k]])]
    shortener = reprlib.Repr()
    shortener.maxstring = 1000
    return [f"{k}: {shortener.repr(recorded[k])} before, {now[k]!r} now" for k in differing]


def new_directory(root: Path, name_end: str, make: bool) -> Path:
    """Return a new directory named after the current second, with a number if that name exists already, and `make` it,
    so that two runs that start in the same second get different ones."""
    now = datetime.now().strftime(_TIME)
    path = root / f"{now}{name_end}"
    with os_errors_as(lambda error: f"--output {path}: cannot create the run directory ({error.strerror})"):
        for number in itertools.count(2) if make else ():
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
            path = root / f"{now}-{number}{name_end}"
    return path


def remove_unused(directory: Path) -> None:
    """Remove a directory that holds nothing, or only a lock that nobody holds."""
    with suppress(OSError):
        if os.listdir(directory) == [_LOCK]:
            (directory / _LOCK).unlink()
        directory.rmdir()


class RunLock:
    """Lets only one job use a run directory: a second one, say after a double requeue, fails. For use in `with`.

    The kernel's lock on RUN/run.lock ends with its process, however that ends. It keeps out jobs on other machines if
    the file system shares locks, as NFS does.

    Args:
        warn: Receives a line when a directory that was removed is created again.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._lock: FileLock | None = None
        self._path = Path()
        self._inode = 0

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def acquire(self, directory: Path) -> None:
        """Take the lock of an existing directory, on rank 0. Do nothing if this process holds it already. Raises
        UserError if another job holds it."""
        if self._lock is not None:
            return
        self._path = directory / _LOCK
        lock = FileLock(self._path, thread_local=False)
        try:
            lock.acquire(timeout=_WAIT)
        except Timeout as error:
            raise UserError(
                f"{directory} is in use by {_holder(directory)}: end that job first, or name another --experiment"
            ) from error
        except (OSError, NotImplementedError) as error:  # no permission, or a file system without locks
            raise UserError(f"{self._path} cannot be locked ({error}): name another --output") from error
        self._lock, self._inode = lock, os.stat(self._path).st_ino

    def check(self) -> None:
        """If the directory was removed, create it again and take its lock again. Do nothing without the lock. Raises
        UserError if another job has taken the directory meanwhile."""
        if self._lock is None:
            return
        directory = self._path.parent
        with suppress(OSError):  # the next save fails for the same reason, reports it and is tried again
            if self._path.exists() and self._path.stat().st_ino == self._inode:
                return
            directory.mkdir(exist_ok=True)
            self._lock = None
            self.acquire(directory)
            self._warn(f"warning: {directory} was removed while this run goes on: made anew, without what it held")


def _holder(directory: Path) -> str:
    """Return a description of the job that holds the lock, from the newest start in run.json."""
    start = starts_of(directory)[-1]
    try:
        return f"process {start['pid']} on {start['host']} (since {start['time']})"
    except LookupError:  # the job has not written it yet, or the file is damaged
        return "another job"

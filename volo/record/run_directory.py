"""The directory of one run: which directory it is, and a lock that keeps other jobs from writing there."""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
from argparse import Namespace
from collections.abc import Callable
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
from volo.config.checkpoint_files import MILESTONE
from volo.config.flags_train import EXPERIMENT
from volo.record.records import launch_record, plain, settings_of

DEFAULT_ROOT = "output/train"
_TIME = "%Y%m%d-%H%M%S"  # the time in the names of runs
_WAIT = 2.0  # seconds to wait for the lock: before filelock 4, data workers of a killed job hold it a little longer


def check_writable(folder: Path, flag: str) -> None:
    """Check that results can be written in `folder`, or in the nearest existing parent if `folder` doesn't exist.

    This creates and removes a temporary folder, because permissions are not enough (root, read-only mounts).

    Raises:
        UserError: Nothing can be written there.
    """
    there = folder
    with os_errors_as(lambda error: f"{flag} {folder}: nothing can be written in {there} ({error.strerror})"):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        TemporaryDirectory(dir=there, prefix=".writable-").cleanup()


def choose_directory(
    args: Namespace, image_size: tuple[int, int], report: Callable[[str], None] = print, make: bool = True
) -> tuple[Path, str]:
    """Return the directory of this run, and the value of `--resume` for it.

    `--output ROOT` (default `output/train`) holds one directory per run: `--experiment NAME`, or `TIME-MODEL-SIZE`,
    which is created here, so that two runs that start in the same second get different ones. A restart by the launcher
    continues the run that an earlier start of the same launch has begun.
    With `--resume FILE` it is the directory of the file, if that is a run directory and the flags don't name another
    one. From a milestone a new run branches off, unless `--experiment` names the milestone's run. With `--resume auto`
    and no name, it is the newest run of the same experiment: the same model, image size, seed, labels, optimizer,
    schedule, augmentation and regularisation.

    `report` receives a line if a newer run is another experiment. With `make` False (`--dry-run`) nothing is created.

    Raises:
        UserError: The directory holds checkpoints of another run without `--resume`, or can't be made.
    """
    root = Path(args.output or DEFAULT_ROOT)
    if directory := _of_this_launch(root, args.experiment, args.resume):
        return directory, "auto" if any(directory.glob("*.pth.tar")) else args.resume
    suffix = f"-{re.sub(r'[^-.a-zA-Z0-9_]+', '_', args.model)}-{max(image_size)}"
    resumed = Path(args.resume).parent if args.resume not in ("", "auto") else None
    branches = not args.experiment and MILESTONE.fullmatch(Path(args.resume).name)
    if resumed and not branches and (resumed / "args.yaml").is_file() and _is_named(resumed, args):
        return resumed, args.resume
    if not args.experiment:
        newest = _newest_alike(root, suffix, args, report) if args.resume == "auto" else None
        return newest or _new(root, suffix, make), args.resume
    directory = root / args.experiment
    if args.branch and Path(args.branch).resolve().parent == directory.resolve():
        raise UserError(f"--branch {args.branch} is of {directory} itself: name another --experiment for the branch")
    if args.resume != "auto" and any(directory.glob("*.pth.tar")):
        raise UserError(
            f"{directory} already holds checkpoints: continue it with --resume auto, or name another --experiment"
        )
    return directory, args.resume


def _of_this_launch(root: Path, experiment: str, resume: str) -> Path | None:
    """Return the run directory that an earlier start of this launch used (run.json records its id), or None."""
    launch = launch_record()
    if not restarts() or launch is None:
        return None
    records = [root / experiment / "run.json"] if experiment else [*root.glob("*/run.json")]
    if resume not in ("", "auto") and not MILESTONE.fullmatch(Path(resume).name):
        records.append(Path(resume).parent / "run.json")
    matches = [file for file in records if _starts(file.parent)[-1].get("launch") == launch]
    return max(matches, key=lambda file: file.stat().st_mtime).parent if matches else None


def _newest_alike(root: Path, suffix: str, args: Namespace, report: Callable[[str], None]) -> Path | None:
    """Return the newest run with the settings of `args`, or None; report the newest run that has other settings.

    A setting that the data determine, because neither command gives it, is not compared (see `FITTED` in flags_train).
    """
    now = {k: v for k, v in settings_of(args).items() if k in EXPERIMENT}
    defaulted = getattr(args, "defaulted", ())
    alike, passed_over = None, ""
    for run in sorted((file.parent for file in root.glob(f"*{suffix}/args.yaml")), key=_begun, reverse=True):
        fitted = _starts(run)[-1].get("fitted", list(defaulted))  # earlier versions don't record it
        asked = {k: v for k, v in now.items() if k not in defaulted or k not in fitted}
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


def _starts(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's starts from run.json; one empty record if it is missing or damaged."""
    content: Any = None
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads((run / "run.json").read_bytes())
    return [start for start in content if isinstance(start, dict)] or [{}] if isinstance(content, list) else [{}]


def _begun(run: Path) -> tuple[float, int, str]:
    """Return a key that sorts runs by their beginning: the time, then the number among runs of the same second.

    Names alone don't suffice: they have a machine's local time, which depends on its time zone and may be set back.
    """
    numbered = re.match(r"\d{8}-\d{6}-(\d+)-", run.name)
    place = int(numbered[1]) if numbered else 1, run.name
    with suppress(LookupError, TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(_starts(run)[0]["time"]).timestamp(), *place
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


def _is_named(directory: Path, args: Namespace) -> bool:
    """Whether `directory` is the one that `--output` and `--experiment` name, as far as they are used."""
    if args.experiment:
        return (Path(args.output or DEFAULT_ROOT) / args.experiment).resolve() == directory.resolve()
    return not args.output or Path(args.output).resolve() == directory.resolve().parent


def _new(root: Path, suffix: str, make: bool) -> Path:
    """Create and return a directory named after the current second, with a number if that name exists already."""
    now = datetime.now().strftime(_TIME)
    path = root / f"{now}{suffix}"
    with os_errors_as(lambda error: f"--output {path}: cannot create the run directory ({error.strerror})"):
        for number in itertools.count(2) if make else ():
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
            path = root / f"{now}-{number}{suffix}"
    return path


class RunLock:
    """Lets only one job use a run directory: a second one, say after a double requeue, fails. For use in `with`.

    The kernel's lock on RUN/run.lock ends with its process, however that ends. It keeps out jobs on other machines if
    the file system shares locks, as NFS does.

    Args:
        warn: Receives a line when a directory that was removed is created again.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = directory / "run.lock", warn
        self._lock: FileLock | None = None
        self._inode = 0

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def acquire(self) -> None:
        """Take the lock of an existing directory, on rank 0. Do nothing if this process holds it already.

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
        """If the directory was removed, create it again and take its lock again. Do nothing without the lock.

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
        """Return a description of the job that holds the lock, from the newest start in run.json."""
        start = _starts(self.path.parent)[-1]
        try:
            return f"process {start['pid']} on {start['host']} (since {start['time']})"
        except LookupError:  # the job has not written it yet, or the file is damaged
            return "another job"

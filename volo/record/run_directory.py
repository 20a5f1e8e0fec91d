"""The directory of one run: which one it is, and that no other job writes there."""

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
from volo.config.flags_data import AUGMENTATION, TOKEN_LABELS
from volo.config.flags_train import BATCH_NORM, EMA, MODEL, OPTIMIZER, REGULARISATION, SCHEDULE
from volo.record.records import plain, settings_of

DEFAULT_ROOT = "output/train"
_WAIT = 2.0  # seconds, for data workers of a killed job, which have inherited the lock before filelock 4
# The settings that define an experiment, without places of files and without the machines.
_OF_EXPERIMENT = {
    flag.dest
    for group in (MODEL, TOKEN_LABELS, OPTIMIZER, SCHEDULE, AUGMENTATION, REGULARISATION, BATCH_NORM, EMA)
    for flag in group.flags
} - {"token_label_data", "grad_accum_steps"} | {"seed", "batch_size"}  # the steps follow from the number of processes


def check_writable(folder: Path, flag: str) -> None:
    """Check that results can be written in `folder`, or in the existing parent where it would be created.

    A temporary folder is created and removed, because permissions alone say too little (root, read-only mounts).

    Raises:
        UserError: Nothing can be written there.
    """
    there = folder
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        TemporaryDirectory(dir=there, prefix=".writable-").cleanup()
    except OSError as error:
        raise UserError(f"{flag} {folder}: nothing can be written in {there} ({error.strerror})") from error


def choose_directory(
    args: Namespace, image_size: tuple[int, int], report: Callable[[str], None] = print, make: bool = True
) -> Path:
    """Return the directory of this run.

    `--output ROOT` (default `output/train`) holds one directory per run: `--experiment NAME`, or `TIME-MODEL-SIZE`. The
    latter is made here, so that no two runs that start in the same second have the same one.
    With `--resume FILE` it is the directory of the file, if that is a run directory and neither flag names another one;
    with `--resume auto` and no name, the newest run of this experiment: of this model and size, with the same seed,
    labels, optimizer, schedule, augmentation and regularisation.

    `report` receives a line about a newer run that is another experiment. Without `make` nothing is made (`--dry-run`).

    Raises:
        UserError: The directory holds checkpoints of another run without `--resume`, or can't be made.
    """
    root = Path(args.output or DEFAULT_ROOT)
    suffix = f"-{re.sub(r'[^-.a-zA-Z0-9_]+', '_', args.model)}-{max(image_size)}"
    resumed = Path(args.resume).parent if args.resume not in ("", "auto") else None
    if resumed and (resumed / "args.yaml").is_file() and _is_named(resumed, args):
        return resumed
    if not args.experiment:
        return (args.resume == "auto" and _newest_alike(root, suffix, args, report)) or _new(root, suffix, make)
    directory = root / args.experiment
    if args.resume != "auto" and any(directory.glob("*.pth.tar")):
        raise UserError(
            f"{directory} already holds checkpoints: continue it with --resume auto, or name another --experiment"
        )
    return directory


def _newest_alike(root: Path, suffix: str, args: Namespace, report: Callable[[str], None]) -> Path | None:
    """Return the newest run with the settings of `args`, or None; report the newest one that has others."""
    now = {k: v for k, v in settings_of(args).items() if k in _OF_EXPERIMENT}
    alike, passed_over = None, ""
    for file in sorted(root.glob(f"*{suffix}/args.yaml"), reverse=True):
        changes: list[str] = []
        with suppress(OSError, yaml.YAMLError):  # where it is damaged, its checkpoints are compared all the same
            changes = changed_settings(yaml.safe_load(file.read_bytes()), now)
        if not changes:
            alike = file.parent
            break
        passed_over = passed_over or (
            f"--resume auto leaves {file.parent} alone, another experiment ({'; '.join(changes)}): "
            f"--experiment {file.parent.name} would go on with it"
        )
    if passed_over:
        report(passed_over)
    return alike


def changed_settings(recorded: Any, now: dict[str, Any]) -> list[str]:
    """Compare settings recorded in a checkpoint, which are plain, with the present ones; return a line for each of
    `now` that differs. What is recorded is not walked: in a hostile file it may never end."""
    if not isinstance(recorded, dict):
        return []
    differing = [k for k in sorted(now) if k in recorded and recorded[k] != plain(now[k])]
    shown = reprlib.Repr()
    shown.maxstring = 1000
    return [f"{k}: {shown.repr(recorded[k])} before, {now[k]!r} now" for k in differing]


def _is_named(directory: Path, args: Namespace) -> bool:
    """Whether `--output` and `--experiment`, where given, name `directory`."""
    if args.experiment:
        return (Path(args.output or DEFAULT_ROOT) / args.experiment).resolve() == directory.resolve()
    return not args.output or Path(args.output).resolve() == directory.resolve().parent


def _new(root: Path, suffix: str, make: bool) -> Path:
    """Make and return a directory named after the present second, with a number if that name exists."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = root / f"{now}{suffix}"
    try:
        for number in itertools.count(2) if make else ():
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
            path = root / f"{now}-{number}{suffix}"
    except OSError as error:
        raise UserError(f"--output {path}: cannot create the run directory ({error.strerror})") from error
    return path


class RunLock:
    """One job per run directory: a second one (a double requeue, say) is kept out. Leaving the context releases it.

    The kernel's lock on RUN/run.lock ends with the process that holds it, however that ends. It keeps out jobs of other
    machines where the file system passes locks on, as NFS does.

    Args:
        warn: Receives a line when a directory that was removed is made again.
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

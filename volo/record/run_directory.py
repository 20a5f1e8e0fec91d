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
from tlt.io.files import os_errors_told
from volo.config.checkpoint_files import MILESTONE
from volo.config.flags_data import AUGMENTATION, TOKEN_LABELS
from volo.config.flags_train import BATCH_NORM, EMA, MODEL, OPTIMIZER, REGULARISATION, SCHEDULE
from volo.record.records import plain, settings_of

DEFAULT_ROOT = "output/train"
_TIME = "%Y%m%d-%H%M%S"  # in the names of runs
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
    with os_errors_told(lambda error: f"{flag} {folder}: nothing can be written in {there} ({error.strerror})"):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        TemporaryDirectory(dir=there, prefix=".writable-").cleanup()


def choose_directory(
    args: Namespace, image_size: tuple[int, int], report: Callable[[str], None] = print, make: bool = True
) -> Path:
    """Return the directory of this run.

    `--output ROOT` (default `output/train`) holds one directory per run: `--experiment NAME`, or `TIME-MODEL-SIZE`. The
    latter is made here, so that no two runs that start in the same second have the same one.
    With `--resume FILE` it is the directory of the file, if that is a run directory and neither flag names another one;
    of a milestone only if `--experiment` names it, because a run of its own branches off there. With `--resume auto`
    and no name, it is the newest run of this experiment: of this model and size, with the same seed, labels, optimizer,
    schedule, augmentation and regularisation.

    `report` receives a line about a newer run that is another experiment. Without `make` nothing is made (`--dry-run`).

    Raises:
        UserError: The directory holds checkpoints of another run without `--resume`, or can't be made.
    """
    root = Path(args.output or DEFAULT_ROOT)
    suffix = f"-{re.sub(r'[^-.a-zA-Z0-9_]+', '_', args.model)}-{max(image_size)}"
    resumed = Path(args.resume).parent if args.resume not in ("", "auto") else None
    branches = not args.experiment and MILESTONE.fullmatch(Path(args.resume).name)
    if resumed and not branches and (resumed / "args.yaml").is_file() and _is_named(resumed, args):
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
    """Return the newest run with the settings of `args`, or None; report the newest one that has others.

    What neither command gives, and the data decide, is not compared (`volo.config.flags_train.FITTED`).
    """
    now = {k: v for k, v in settings_of(args).items() if k in _OF_EXPERIMENT}
    left = {name: "left to the data" for name in getattr(args, "defaulted", ()) if name in now}
    alike, passed_over = None, ""
    for run in sorted((file.parent for file in root.glob(f"*{suffix}/args.yaml")), key=_begun, reverse=True):
        fitted = _starts(run)[-1].get("fitted", list(left))  # earlier versions don't tell
        asked = {k: v for k, v in (now | left).items() if k not in left or k not in fitted}
        changes: list[str] = []
        with suppress(OSError, yaml.YAMLError):  # where it is damaged, its checkpoints are compared all the same
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
    """Return the records of a run's starts (run.json), an empty one where there is none that can be read."""
    content: Any = None
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads((run / "run.json").read_bytes())
    return [start for start in content if isinstance(start, dict)] or [{}] if isinstance(content, list) else [{}]


def _begun(run: Path) -> tuple[float, int, str]:
    """Return what orders runs by their beginning: the instant, and their number among those of one second.

    Names alone don't: they are in the local time of a machine, which may lie in another zone or put its clock back.
    """
    numbered = re.match(r"\d{8}-\d{6}-(\d+)-", run.name)
    place = int(numbered[1]) if numbered else 1, run.name
    with suppress(LookupError, TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(_starts(run)[0]["time"]).timestamp(), *place
    with suppress(ValueError, OverflowError):
        return datetime.strptime(run.name[:15], _TIME).timestamp(), *place
    return 0.0, *place


def changed_settings(recorded: Any, now: dict[str, Any]) -> list[str]:
    """Compare settings recorded in a checkpoint, which are plain, with the present ones; return a line for each of
    `now` that differs. What is recorded is not walked: in a hostile file it may never end."""
    if not isinstance(recorded, dict):
        return []
    # A flag that takes several values now has the same one as when it took one.
    differing = [k for k in sorted(now) if k in recorded and plain(now[k]) not in (recorded[k], [recorded[k]])]
    shortener = reprlib.Repr()
    shortener.maxstring = 1000
    return [f"{k}: {shortener.repr(recorded[k])} before, {now[k]!r} now" for k in differing]


def _is_named(directory: Path, args: Namespace) -> bool:
    """Whether `--output` and `--experiment`, where given, name `directory`."""
    if args.experiment:
        return (Path(args.output or DEFAULT_ROOT) / args.experiment).resolve() == directory.resolve()
    return not args.output or Path(args.output).resolve() == directory.resolve().parent


def _new(root: Path, suffix: str, make: bool) -> Path:
    """Make and return a directory named after the present second, with a number if that name exists."""
    now = datetime.now().strftime(_TIME)
    path = root / f"{now}{suffix}"
    with os_errors_told(lambda error: f"--output {path}: cannot create the run directory ({error.strerror})"):
        for number in itertools.count(2) if make else ():
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
            path = root / f"{now}-{number}{suffix}"
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
        start = _starts(self.path.parent)[-1]
        try:
            return f"process {start['pid']} on {start['host']} (since {start['time']})"
        except LookupError:  # it has not begun, or is damaged
            return "another job"

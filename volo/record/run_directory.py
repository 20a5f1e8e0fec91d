"""The directory of one run: its arguments, its machines and its results. Only rank 0 writes.

docs/training.md lists the files.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import platform
import re
import reprlib
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from tlt._version import __version__
from tlt.errors import UserError
from volo.cluster.ranks import launch_id
from volo.config.flags_data import AUGMENTATION, TOKEN_LABELS
from volo.config.flags_train import BATCH_NORM, EMA, MODEL, OPTIMIZER, REGULARISATION, SCHEDULE
from volo.record.json_lines import LineFile, read_json_lines, strict_json, utc_now

METRICS, SUMMARY = "metrics.jsonl", "summary.csv"
DEFAULT_ROOT = "output/train"
_CURVES = {
    "loss": ("train_loss", "train_cls_loss", "train_dense_loss", "eval_loss"),
    "accuracy (%)": ("eval_top1", "eval_top5", "eval_top1_ema"),
}
# Arguments that only say how a run was started.
_NOT_SETTINGS = {"config", "notes", "local_rank", "debug", "dry_run", "resume", "no_resume_opt", "start_epoch"}
_NOT_SETTINGS |= {"allow_changed_data"}

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


def launch_record() -> str | None:
    """Return what tells this launch from all others in run.json, the same over restarts: the launcher's id; the process
    of a torchrun that was given none; None without a launcher."""
    if launch_id() is not None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return launch_id()
    started = ""
    with suppress(OSError, LookupError):  # in kernel ticks, because the system gives a process's number out again
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {os.getppid()} on {socket.gethostname()}, started at {started}"


class RunDirectory:
    """Writes the records of one run. Construct it on rank 0 only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = LineFile(path / METRICS)
        self._started: dict[str, bytes] = {}  # contents of the files that a start writes
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {path}: cannot create the run directory ({error.strerror})") from error

    def record_start(
        self, args: Namespace, world_size: int, device: str, more: Mapping[str, bytes] | None = None
    ) -> None:
        """Write args.yaml and `more` files, and add a record to run.json."""
        starts: Any = []
        with suppress(OSError, ValueError):  # missing or damaged; events.jsonl has the starts, too
            starts = json.loads((self.path / "run.json").read_bytes())
        start = {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": sys.argv,
            "working_directory": os.getcwd(),
            "launch": launch_record(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "versions": versions(),
            "world_size": world_size,
            "device": device,
        }
        starts = [*starts, start] if isinstance(starts, list) else [start]
        settings = yaml.safe_dump(settings_of(args), sort_keys=True)
        self._started = {"args.yaml": settings.encode(), "run.json": json.dumps(starts, indent=1).encode() + b"\n"}
        self._started |= more or {}
        for name, content in self._started.items():
            _write(self.path / name, content)

    def rewind(self, epoch: int, update: int) -> int:
        """Remove the records after a position from metrics.jsonl and summary.csv: the run will make them again.

        Args:
            epoch, update: Epochs finished, and optimizer steps done.

        Returns:
            How many lines of metrics.jsonl were removed.

        Raises:
            UserError: The files can't be written.
        """
        file = self.path / METRICS
        lines = file.read_bytes().splitlines() if file.is_file() else []
        kept = [line for line in lines if _is_before(line, epoch, update)]
        if len(kept) < len(lines):
            try:
                _write(file, b"".join(line + b"\n" for line in kept))
                self._write_summary()
            except OSError as error:
                raise UserError(f"{file} can't be written ({error.strerror}): make room there") from error
        return len(lines) - len(kept)

    def sync(self) -> None:
        """Write the records to the disk, as far as possible: a checkpoint must not outlive them.

        The files of the start are written again if they were removed.
        """
        for name in [name for name in self._started if not (self.path / name).exists()]:
            with suppress(OSError):
                _write(self.path / name, self._started[name])
        for name in (METRICS, SUMMARY):
            with suppress(OSError), (self.path / name).open("rb") as file:
                os.fsync(file.fileno())

    def metrics(self, record: dict[str, Any]) -> None:
        """Add a record to metrics.jsonl."""
        self._metrics.append(strict_json(record))

    def epoch(self, row: dict[str, Any]) -> None:
        """Add the record of an epoch to metrics.jsonl, and write summary.csv anew from all of them if possible."""
        self.metrics({"event": "epoch", **row, "time": utc_now()})
        with suppress(OSError):
            self._write_summary()

    def _write_summary(self) -> None:
        rows = [{k: v for k, v in record.items() if k not in ("event", "time")} for record in epochs_of(self.path)]
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
        _write(self.path / SUMMARY, out.getvalue().encode())

    def draw_curve(self) -> Path:
        """Draw curve.png from the records of the epochs. Raises whatever matplotlib raises."""
        from matplotlib.figure import Figure  # not pyplot, whose backend is a notebook's to choose

        figure, epochs = Figure(figsize=(10, 4), layout="constrained"), epochs_of(self.path)
        for axes, label, names in zip(figure.subplots(1, 2), _CURVES, _CURVES.values(), strict=True):
            for name in names:
                points = [(record["epoch"] + 1, record[name]) for record in epochs if record.get(name) is not None]
                if any(value for _, value in points):
                    axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker=".")
            axes.set(xlabel="epoch", ylabel=label)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
        file = self.path / "curve.png"
        figure.savefig(file, dpi=120)
        return file


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the finished epochs of a run."""
    return [record for record in read_json_lines(folder / METRICS)[0] if record.get("event") == "epoch"]


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on; torch's with its build (+cu130)."""
    found = {"volo-tlt": __version__, "torch": torch.__version__}
    for name in ("torchvision", "timm", "numpy", "simplejpeg"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the arguments that define the run, as plain types, without those that only say how it was started."""
    return plain({k: v for k, v in sorted(vars(args).items()) if k not in _NOT_SETTINGS})


def _is_before(line: bytes, epoch: int, update: int) -> bool:
    """Whether a record is from before a position. The epoch is compared first, since epochs may change their length."""
    try:
        record = json.loads(line)
        if record["event"] == "epoch" or record["epoch"] != epoch:
            return record["epoch"] < epoch
        return record["update"] <= update
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def plain(value: Any) -> Any:
    """Convert `value` to plain types (tuples to lists, paths to text)."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _write(file: Path, content: bytes) -> None:
    staged = file.with_name(file.name + ".tmp")
    staged.write_bytes(content)
    staged.replace(file)

"""The directory of one run: what was asked for, what it ran on, what came out. Only rank 0 writes.

args.yaml        resolved arguments; `-c args.yaml` repeats the run
run.json         one record per start: command line, versions, host, world size
log.txt          the console's lines
metrics.jsonl    one record per report and per epoch
summary.csv      one row per epoch
curve.png        learning curves (where matplotlib is installed)
first_batch.png  the first images with their targets (where matplotlib is installed; `volo.engine.first_batch`)
*.pth.tar        checkpoints (`volo.engine.checkpoint`)
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import platform
import socket
import sys
from argparse import Namespace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from tlt.errors import UserError

DEFAULT_ROOT = "output/train"
_NOT_A_SETTING = {"config", "notes", "local_rank", "debug", "resume", "no_resume_opt", "start_epoch", "dry_run"}


def choose_directory(args: Namespace, image_size: tuple[int, int]) -> Path:
    """Return where this run writes; creates nothing.

    `--output ROOT` (default `output/train`) holds one directory per run: `--experiment NAME`, or `TIME-MODEL-SIZE`.
    With `--resume FILE` it is the directory of the file, if that is a run's and neither flag names another place; with
    `--resume auto` and no name, the newest run of this model and size.

    Raises:
        UserError: The directory holds another run's checkpoints and nobody asked to resume it.
    """
    root = Path(args.output or DEFAULT_ROOT)
    suffix = f"-{args.model.replace('/', '_')}-{max(image_size)}"
    resumed = Path(args.resume).parent if args.resume not in ("", "auto") else None
    if resumed and (resumed / "args.yaml").is_file() and _is_named(resumed, args):
        return resumed
    if not args.experiment:
        earlier = sorted(p.parent for p in root.glob(f"*{suffix}/args.yaml")) if args.resume == "auto" else []
        return earlier[-1] if earlier else _unused(root, suffix)
    directory = root / args.experiment
    if args.resume != "auto" and any(directory.glob("*.pth.tar")):
        raise UserError(
            f"{directory} already holds checkpoints: continue it with --resume auto, or name another --experiment"
        )
    return directory


def _is_named(directory: Path, args: Namespace) -> bool:
    """Whether `--output` and `--experiment`, where given, mean `directory`."""
    if args.experiment:
        return (Path(args.output or DEFAULT_ROOT) / args.experiment).resolve() == directory.resolve()
    return not args.output or Path(args.output).resolve() == directory.resolve().parent


def _unused(root: Path, suffix: str) -> Path:
    """A directory named after the present second, with a number where another run has started in it."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{number}" for number in itertools.count(2)))
    return next(path for path in (root / (name + suffix) for name in names) if not path.exists())


class RunDirectory:
    """Writes the records of one run. Construct it on rank 0 only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {path}: cannot create the run directory ({error.strerror})") from error

    def record_start(self, args: Namespace, world_size: int, device: str) -> None:
        """Write args.yaml and add a record to run.json."""
        _write(self.path / "args.yaml", yaml.safe_dump(settings_of(args), sort_keys=True))
        starts = self._starts()
        starts.append(
            {
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                "command": sys.argv,
                "working_directory": os.getcwd(),
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "versions": {name: _version(name) for name in ("volo-tlt", "torch", "torchvision", "timm", "numpy")},
                "world_size": world_size,
                "device": device,
            }
        )
        _write(self.path / "run.json", json.dumps(starts, indent=1) + "\n")

    def _starts(self) -> list[dict[str, Any]]:
        file = self.path / "run.json"
        return json.loads(file.read_text()) if file.is_file() else []

    def log(self, line: str) -> None:
        """Add a line to log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def metrics(self, record: dict[str, Any]) -> None:
        """Add a record to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def summary(self, row: dict[str, Any]) -> None:
        """Add an epoch's row to summary.csv; rows of the same or later epochs, from before a resume, are dropped."""
        file = self.path / "summary.csv"
        rows = [r for r in read_summary(file) if int(r["epoch"]) < row["epoch"]]
        rows.append({k: str(v) for k, v in row.items()})
        columns = list(dict.fromkeys(name for r in rows for name in r))
        staged = file.with_suffix(".tmp")
        with staged.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        staged.replace(file)

    def draw_curve(self) -> Path | None:
        """Draw curve.png from summary.csv; None where matplotlib isn't installed."""
        try:
            import matplotlib
        except ImportError:
            return None
        matplotlib.use("Agg")
        return _draw(read_summary(self.path / "summary.csv"), self.path / "curve.png")


def settings_of(args: Namespace) -> dict[str, Any]:
    """The arguments that make the run what it is, as plain types: not those that only say how it was started."""
    return plain({k: v for k, v in sorted(vars(args).items()) if k not in _NOT_A_SETTING})


def read_summary(file: Path) -> list[dict[str, str]]:
    """Return the rows of a summary.csv, none if there is no such file."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def plain(value: Any) -> Any:
    """Return `value` with everything that is not a plain type turned into one (tuples into lists, paths into text)."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _draw(rows: list[dict[str, str]], file: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, (losses, accuracy) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axes, names, label in (
        (losses, ("train_loss", "train_cls_loss", "train_dense_loss", "eval_loss"), "loss"),
        (accuracy, ("eval_top1", "eval_top5", "eval_top1_ema"), "accuracy (%)"),
    ):
        for name in names:
            points = [(int(r["epoch"]), float(r[name])) for r in rows if r.get(name)]
            if points:
                axes.plot(
                    *zip(*points, strict=True), label=name.replace("_", " "), marker="." if len(points) < 30 else ""
                )
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


def _write(file: Path, text: str) -> None:
    staged = file.with_name(file.name + ".tmp")
    staged.write_text(text, encoding="utf-8")
    staged.replace(file)


def _version(name: str) -> str:
    """The version that runs, with the build that torch adds to it (+cu130); of the metadata where not imported."""
    module = sys.modules.get(name)
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

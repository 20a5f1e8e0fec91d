"""The records of a run: files of JSON lines, and the other files in the run directory that describe it.

`volo.record.logger.Logger.event` writes the events in `events.jsonl`. docs/training.md lists their kinds and all files.
"""

import json
import math
import os
import platform
import socket
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import yaml

from tlt import __version__
from tlt.io.files import os_errors_as, read_at, write_csv, write_whole
from tlt.tools.drawing import INK, drawable, new_figure, shorten
from volo.cluster.distributed import launch_id
from volo.config.settings_train import FITTED, START_ONLY, TrainSettings
from volo.record.history import METRICS, epochs_of, record_of, starts_of

SUMMARY = "summary.csv"
_MOST_PENDING = 10_000  # lines kept in memory while a file can't be written
# For each picture of curve.png: its curves' names in the records, and their legends. No two differ only in colour.
_CURVES = (
    {"train_loss": "training loss", "train_cls_loss": "class", "train_dense_loss": "dense"}
    | {"eval_loss": "validation loss"},
    {"eval_top1": "top-1", "eval_top5": "top-5", "eval_top1_ema": "top-1 of the average"}
    | {"dense_top1": "dense top-1", "dense_top1_ema": "dense top-1 of the average"},
)
KD_LOSS = "kd_loss_"  # prefix of the names of teachers' losses
_LINES = (
    *(("#0072b2", "-", "o"), ("#d55e00", "--", "s"), ("#009e73", ":", "^"), (INK, "-.", "D"), ("#cc79a7", "-", "v")),
    *(("#e69f00", "--", "P"), ("#56b4e9", ":", "X"), ("#999999", "-.", "*")),
)


def utc_now() -> str:
    """Return the current time in UTC as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def duration(seconds: float) -> str:
    """Format seconds as `1d 02:03:04`, `02:03:04` or `03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}" if hours or days else f"{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


def plain(value: Any, strict: bool = False) -> Any:
    """Convert `value` to plain types: tuples to lists, other objects to text; if `strict` NaN and infinity to None."""
    if isinstance(value, dict):
        return {str(k): plain(v, strict) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, strict) for v in value]
    if strict and isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def strict_json(record: dict[str, Any]) -> str:
    """Return the record as one line of standard JSON."""
    return json.dumps(plain(record, strict=True), allow_nan=False)


class LineFile:
    """Appends lines, each with one write, so that processes on one machine don't mix their lines.

    A line that can't be written (no file yet, full disk) stays in memory and is tried again with the next one, because
    a failed record must not end the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path  # None until it is known
        self._pending: deque[bytes] = deque(maxlen=_MOST_PENDING)

    def open(self, path: Path) -> None:
        """Write to this file from now on, beginning with the pending lines."""
        self.path = path
        self._flush()

    def append(self, line: str) -> None:
        """Write a line after the pending ones."""
        self._pending.append(line.encode(errors="backslashreplace") + b"\n")
        self._flush()

    def _flush(self) -> None:
        if self.path is None:
            return
        with suppress(OSError), open(self.path, "a+b", buffering=0) as file:
            # Take the line out first, because a signal handler or another thread may append meanwhile.
            while self._pending and self._wrote(file.fileno(), self._pending.popleft()):
                pass

    def _wrote(self, descriptor: int, line: bytes) -> bool:
        """Write a line; if that fails, put it back and return False."""
        # The file may end in the middle of a line, if the machine or the disk failed during a write.
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and read_at(descriptor, 1, size - 1) != b"\n"
        whole = b"\n" + line if is_torn else line
        written = 0
        with suppress(OSError):
            written = os.write(descriptor, whole)
        if written < len(whole):
            self._pending.appendleft(line)
        return written == len(whole)


class RunRecords:
    """Writes the records of one run. Construct it on rank 0 only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = LineFile(path / METRICS)
        self._started: dict[str, bytes] = {}  # contents of the files that `record_start` wrote
        self._settings: dict[str, Any] = {}
        with os_errors_as(lambda error: f"--output {path}: cannot create the run directory ({error.strerror})"):
            path.mkdir(parents=True, exist_ok=True)

    def record_start(
        self, settings: TrainSettings, world_size: int, device: str, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Write args.yaml and the files in `files`, and add a record of this start to run.json."""
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
            # Settings that the data or a checkpoint determine.
            "fitted": [name for name in FITTED if not settings.set_by_user(name)],
        }
        starts = [*filter(None, starts_of(self.path)), start]  # events.jsonl also has those of a damaged file
        self._settings = settings_of(settings)
        text = yaml.safe_dump(self._settings, sort_keys=True)
        log = json.dumps(starts, indent=1) + "\n"
        self._started = {"args.yaml": text.encode(), "run.json": log.encode(), **(files or {})}
        for name, content in self._started.items():
            write_whole(self.path / name, content)

    def rewind(self, epoch: int, update: int) -> int:
        """Remove the records after so many finished epochs and optimizer steps from metrics.jsonl and summary.csv,
        since the run will repeat them; return the number of lines removed from metrics.jsonl. Raises UserError if the
        files can't be written."""
        file = self.path / METRICS
        lines = file.read_bytes().splitlines() if file.is_file() else []
        earlier = [line for line in lines if _is_before(line, epoch, update)]
        if len(earlier) < len(lines):
            with os_errors_as(lambda error: f"{file} can't be written ({error.strerror}): make room there"):
                write_whole(file, b"".join(line + b"\n" for line in earlier))
                self._write_summary()
        return len(lines) - len(earlier)

    def sync(self) -> None:
        """Write the records to the disk if possible, because a checkpoint must not outlive them. Write the files of
        `record_start` again if they were removed."""
        for name in [name for name in self._started if not (self.path / name).exists()]:
            with suppress(OSError):
                write_whole(self.path / name, self._started[name])
        with suppress(OSError), (self.path / METRICS).open("rb") as file:
            os.fsync(file.fileno())

    def metrics(self, record: dict[str, Any]) -> None:
        """Add a record to metrics.jsonl."""
        self._metrics.append(strict_json(record))

    def epoch(self, row: dict[str, Any]) -> None:
        """Add an epoch's record to metrics.jsonl and, if possible, write summary.csv again from all epochs."""
        self.metrics({"event": "epoch", **row, "time": utc_now()})
        with suppress(OSError):
            self._write_summary()

    def _write_summary(self) -> None:
        # Epochs count from 1 for readers, here as in the log.
        rows = [
            {k: v + 1 if k == "epoch" else v for k, v in record.items() if k not in ("event", "time")}
            for record in epochs_of(self.path)
        ]
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_csv(self.path / SUMMARY, [names, *([row.get(name, "") for name in names] for row in rows)])

    def draw_curve(self) -> None:
        """Draw curve.png from the records of the epochs. Raises any error of matplotlib."""
        from matplotlib.ticker import MaxNLocator

        figure = new_figure(6, 7, layout="constrained")
        epochs = epochs_of(self.path)
        teachers = {name: name.partition(KD_LOSS)[2] for row in epochs for name in row if f"_{KD_LOSS}" in name}
        curves = (_CURVES[0] | teachers, _CURVES[1])
        figure.suptitle(drawable(shorten(self.path.resolve().name, 44)), fontsize=9, parse_math=False)
        labels = self._loss_text(), "validation accuracy (%)"
        for axes, label, names in zip(figure.subplots(2), labels, curves, strict=True):
            drawn: list[Any] = []
            for (name, legend), (colour, line, marker) in zip(names.items(), cycle(_LINES), strict=False):
                points = [(record["epoch"] + 1, record[name]) for record in epochs if record.get(name) is not None]
                # Without a dense loss, the class loss is the training loss, and its line would lie on that one.
                if any(value for _, value in points) and points not in drawn:
                    drawn.append(points)
                    axes.plot(*zip(*points, strict=True), line, label=legend, color=colour, marker=marker, markersize=4)
            axes.set(xlabel="epoch", ylabel=label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
            if axes.lines:  # in the order in which the lines end
                axes.legend(handles=sorted(axes.lines, key=lambda line: -line.get_ydata()[-1]))
        figure.savefig(self.path / "curve.png", dpi=120)

    def _loss_text(self) -> str:
        """Return the label of the loss axis: a weighted sum, if the loss consists of the two losses of token labels."""
        settings = self._settings
        if not settings.get("token_label") or settings["token_label_size"] == 1 or settings["kd_model_name"]:
            return "loss"
        weights = {"class": settings["cls_weight"], "dense": settings["dense_weight"]}
        return "loss = " + " + ".join(n if w == 1 else f"{w:g} {n}" for n, w in weights.items() if w)


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on; torch's includes its build (+cu130)."""
    installed = {"volo-tlt": __version__, "torch": torch.__version__}
    for name in ("torchvision", "timm", "numpy", "simplejpeg"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def settings_of(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings that define the run, as plain types; those that say only how it started are left out."""
    return plain({k: v for k, v in sorted(settings.values().items()) if k not in START_ONLY})


def _is_before(line: bytes, epoch: int, update: int) -> bool:
    """Whether a record is before a position. Compare the epoch first, since the length of epochs may change."""
    record = record_of(line) or {}
    with suppress(TypeError, KeyError):
        if record["event"] == "epoch" or record["epoch"] != epoch:
            return record["epoch"] < epoch
        return record["update"] <= update
    return False


def slurm_job() -> str | None:
    """Return the Slurm job of this process and how often it was requeued, such as `42.1`; None outside Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if job else None


def launch_record() -> str | None:
    """Return an id for this launch in run.json that stays the same over restarts: the launcher's id, or a description
    of the torchrun process if it has no id; None without a launcher."""
    if launch_id() is not None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return launch_id()
    started = ""
    with suppress(OSError, LookupError):  # the start time, in kernel ticks, because process ids are reused
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {os.getppid()} on {socket.gethostname()}, started at {started}"

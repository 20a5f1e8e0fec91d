"""Experiment trackers: Weights & Biases, TensorBoard, MLflow and Trackio. Each runs in a process of its own.

    python volo/record/trackers.py NAME RUN PROJECT [TAG ...]       `Trackers` starts this for every --log-NAME

The process follows RUN/metrics.jsonl, so a library that is slow, hangs or crashes can't delay training. It writes to
RUN/trackers/NAME.json which record it sent last, and sends only later ones. So a resumed run's curve has no double
points, and the next start sends what a failed tracker has missed. The file runs as a script and imports nothing
of this project, so that it loads neither torch nor the models.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Files of the run directory (`volo.record.records`).
METRICS = "metrics.jsonl"
ARGUMENTS = "args.yaml"
FOLDER = "trackers"
DEFAULT_PROJECT = "volo-tlt"
POLL_S = 1.0
CALL_S = 120  # seconds that a call of a library may take before the process ends
WAIT_S = 30.0  # seconds that a run waits for its trackers after its last update
_POSITION = {"event", "time", "epoch", "update", "update_in_epoch", "updates_per_epoch", "updates"}
_OFF = "off: "  # prefix of the line that says why a process ended


class Trackers:
    """The processes that send the records of a run; there are none before `start`. Use this on rank 0 only.

    Args:
        warn: Receives a line for each tracker that can't start, has failed, or doesn't finish in time.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._folder = Path()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, run: Path, names: Sequence[str], project: str = "", tags: Sequence[str] = ()) -> None:
        """Start the trackers `names` for the run directory `run`."""
        self._folder = run / FOLDER
        for name in names:
            command = [sys.executable, __file__, name, str(run), project, *tags]
            try:
                self._folder.mkdir(exist_ok=True)
                with (self._folder / f"{name}.log").open("wb") as log:
                    # In a session of its own, so that signals that stop the run don't reach it.
                    self._running[name] = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
            except OSError as error:
                self._warn(f"--log-{name} is off: {error.strerror}")

    def check(self) -> None:
        """Warn about each tracker that has failed since the last call."""
        for name in [name for name, process in self._running.items() if process.poll() is not None]:
            self._warn_of(name, self._running.pop(name).returncode)

    def close(self, exit_code: int) -> None:
        """Send the trackers the run's exit code; they send the remaining records and end by themselves."""
        for process in self._running.values():
            assert process.stdin is not None
            with suppress(OSError), process.stdin as pipe:
                pipe.write(b"%d" % exit_code)

    def wait(self) -> None:
        """Wait at most WAIT_S for the trackers after `close`. Call this at the very end, when no other rank waits."""
        until = time.monotonic() + WAIT_S
        for name, process in self._running.items():
            try:
                if code := process.wait(max(0.0, until - time.monotonic())):
                    self._warn_of(name, code)
            except subprocess.TimeoutExpired:
                self._warn(f"--log-{name} is still sending; it goes on without this run")

    def _warn_of(self, name: str, code: int) -> None:
        log = self._folder / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        reason = next((line for line in reversed(lines) if line.startswith(_OFF)), f"{_OFF}it ended with {code}")
        self._warn(f"--log-{name} is {reason} ({log})")


class Start(NamedTuple):
    """The values with which a tracker is opened."""

    run: Path  # run directory; its name is the name of the run
    id: str  # the tracker's `id` in an earlier start; "" for a new run
    step: int  # last update that was sent
    project: str
    tags: Sequence[str]
    config: dict[str, Any]  # arguments of the run


# A tracker's constructor takes a `Start`. Its methods may raise any error of the library and may be slow.
# `log(values, step, seconds)` sends the values of an update, recorded `seconds` after 1970. `finish(exit_code)` sends
# the rest and how the run ended. `id` is what `Start.id` needs to continue this run.


class WandB:
    """Weights & Biases; its files are in RUN/wandb."""

    def __init__(self, start: Start) -> None:
        import wandb

        self.id = start.id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=start.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            id=self.id,
            name=start.run.name,
            tags=start.tags or None,
            dir=str(start.run),
            config=start.config,
            allow_val_change=True,
            resume="allow",
            # W&B measures CPU, GPU, memory and network of the training process.
            settings={"console": "off", "x_stats_pid": os.getppid()},
        )
        # W&B's own step can't be used: it only grows, but a run may resume earlier, and an epoch shares an update.
        self._run.define_metric("*", step_metric="update")

    def log(self, values: dict[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "update": step})

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    """Event files in RUN/tensorboard."""

    id = ""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        new = start.step < 0
        # TensorBoard drops what was written about later updates but not recorded as sent.
        self._writer = SummaryWriter(start.run / "tensorboard", purge_step=None if new else start.step + 1)
        if new:
            lines = yaml.safe_dump(start.config).splitlines()
            self._writer.add_text("arguments", "\n".join(f"    {line}" for line in lines))  # Markdown shows it as code

    def log(self, values: dict[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, seconds)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


class MLflow:
    """MLflow at MLFLOW_TRACKING_URI."""

    def __init__(self, start: Start) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = mlflow.MlflowClient()
        self.id = start.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        name = start.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = mlflow.set_experiment(name).experiment_id
        self.id = self._client.create_run(experiment, run_name=start.run.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in start.config.items()]
        for first in range(0, len(params), 100):  # a request may have at most 100
            self._client.log_batch(self.id, params=params[first : first + 100])

    def log(self, values: dict[str, float], step: int, seconds: float) -> None:
        metrics = [self._metric(name, value, int(1000 * seconds), step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self.id, "FAILED" if exit_code else "FINISHED")


class Trackio:
    """Trackio, in the folder TRACKIO_DIR or the Space TRACKIO_SPACE_ID."""

    def __init__(self, start: Start) -> None:
        import trackio

        # Trackio identifies a run by its name, but runs in two folders may have the same name.
        self.id = start.id or f"{start.run.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(start.project or DEFAULT_PROJECT, self.id, config=start.config, resume="allow")

    def log(self, values: dict[str, float], step: int, seconds: float) -> None:
        self._run.log(values, step)

    def finish(self, exit_code: int) -> None:
        self._run.finish()


TRACKERS: dict[str, Any] = {"wandb": WandB, "tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}


def new_records(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, again and again, the records added to a file of JSON lines since the last time, without damaged lines."""
    position = 0
    while True:
        records = []
        with suppress(FileNotFoundError), file.open("rb") as lines:
            lines.seek(position)
            whole, newline, _ = lines.read().rpartition(b"\n")
            position += len(whole) + len(newline)
            for line in whole.splitlines():
                with suppress(ValueError):
                    records.append(json.loads(line))
        yield records


def values_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a record of metrics.jsonl, such as `train/loss` and `epoch/eval_top1`."""
    event = record["event"]
    values = {key: record[key] for key in record.keys() - _POSITION if isinstance(record[key], (int, float))}
    if event == "train":
        values["epoch"] = record["epoch"] + record["update_in_epoch"] / record["updates_per_epoch"]
        values["data_wait_share"] = record["wait_seconds"] / max(record["seconds"], 1e-9)
    return {f"{event}/{key}": float(values[key]) for key in sorted(values)}


def how_it_ended(training: int) -> int | None:
    """Wait at most POLL_S; return the run's exit code, or None while it goes on. `training` is the id of its process: a
    data worker may hold the other end of the pipe after that has ended."""
    if select.select([sys.stdin], [], [], POLL_S)[0]:
        return int(os.read(sys.stdin.fileno(), 16) or 1)
    return 1 if os.getppid() != training else None


def follow(name: str, run: Path, project: str, tags: Sequence[str]) -> None:
    """Send the records of a run until it ends; stdin brings its exit code. No call may take longer than CALL_S.

    RUN/trackers/NAME.json holds the tracker's `id` and the place of the last record sent: epoch, whether the record is
    of the whole epoch, update.
    """
    training = os.getppid()
    code = None
    note = run / FOLDER / f"{name}.json"

    def write_note() -> None:
        staged = note.with_suffix(".tmp")
        staged.write_text(json.dumps(sent))
        staged.replace(note)

    signal.alarm(CALL_S)
    sent: dict[str, Any] = {"id": "", "last": [-1, 0, -1]}
    if note.exists():
        sent = json.loads(note.read_text())
    step = sent["last"][2]
    config = yaml.safe_load((run / ARGUMENTS).read_bytes())
    tracker = TRACKERS[name](Start(run, sent["id"], step, project, tags, config))
    sent["id"] = tracker.id
    write_note()
    for records in new_records(run / METRICS):
        for record in records:
            step = record.get("update", step)
            place = [record["epoch"], int(record["event"] == "epoch"), step]
            if place <= sent["last"]:
                continue
            signal.alarm(CALL_S)
            tracker.log(values_of(record), step, datetime.fromisoformat(record["time"]).timestamp())
            sent["last"] = place
            write_note()
        signal.alarm(CALL_S)
        if code is not None:
            break
        code = how_it_ended(training)
    tracker.finish(code)


def main() -> None:
    """Follow a run as the command line says. If that fails, print a line that begins with _OFF and exit with 1."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends these signals to all processes of a job
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a call that takes too long, even if the parent ignored it
    os.nice(10)
    name, run, project, *tags = sys.argv[1:]
    try:
        follow(name, Path(run), project, tags)
    except BaseException as error:
        reason = " ".join(str(error).split())[:300]
        print(f"\n{_OFF}{type(error).__name__}: {reason}", flush=True)
        os._exit(1)  # exit handlers of the library might wait for the network


if __name__ == "__main__":
    del sys.path[0]  # this folder has modules whose names libraries may use, too
    main()

"""Runs for the tests of trackers, and what each library's own files say afterwards."""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from volo.cluster.distributed import World
from volo.config.train import TRAIN
from volo.record.logger import Logger
from volo.record.metrics import EpochTotals, Evaluation, Interval
from volo.record.records import RunRecords

UPDATES = 3  # of an epoch
SETTINGS = TRAIN.parse(["/data", "--lr", "0.25"])


class Tracked(NamedTuple):
    """What a library holds of the only run that it has."""

    curves: dict[str, list[tuple[int, float]]]  # (update, value) in the order in which they were sent
    settings: dict[str, Any]


def open_run(run: Path, update: int, *trackers: str, project: str = "", tags: tuple[str, ...] = ()) -> Logger:
    """Start a run, or resume it from a checkpoint of this update."""
    directory = RunRecords(run)
    directory.record_start(SETTINGS, 1, "cpu")
    directory.rewind(update // UPDATES, update)
    logger = Logger(World(0, 0, 1, torch.device("cpu")))
    logger.open(directory, range(7))
    logger.track(trackers, project, tags)
    return logger


def report(update: int, seconds: float = 2.0, wait_seconds: float = 0.5) -> Interval:
    """Return the report of one update, numbered from 1. Its loss is 10 x the update, its gradients are not finite."""
    epoch, before = divmod(update - 1, UPDATES)
    losses = {"loss": 10.0 * update, "cls_loss": 1.0, "dense_loss": 0.5, "grad_norm": float("nan")}
    times = {"seconds": seconds, "wait_seconds": wait_seconds}
    return Interval(epoch, update, before + 1, UPDATES, 1, 8, lr=0.1, skipped_steps=0, **losses, **times)


def train(logger: Logger, updates: range) -> None:
    """Report updates, and each epoch after its last one."""
    for update in updates:
        epoch, before = divmod(update - 1, UPDATES)
        logger.interval(report(update))
        if before + 1 == UPDATES:
            totals = EpochTotals(24, 0, 6.0, 2.0, 1.0, 0.5, 0.1)
            logger.epoch(epoch, totals, {"model": Evaluation(50.0 + epoch, 90.0, 1.0, 8, 0, 1.0)}, None)


def end(logger: Logger, exit_code: int = 0) -> None:
    """End a run as `volo.commands.train.run` does."""
    logger.trackers.close(exit_code)
    logger.trackers.wait()


def read_tensorboard(run: Path) -> Tracked:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard")).Reload()
    curves = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert all(e.wall_time > 1.7e9 for tag in curves for e in read.Scalars(tag))
    (text,) = read.Tensors("arguments/text_summary")
    settings = yaml.safe_load(text.tensor_proto.string_val[0].decode())
    return Tracked(curves, settings)


def read_mlflow(run: Path) -> Tracked:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("mine")
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.run_name == run.name and one.info.status == "FINISHED"
    curves = {key: client.get_metric_history(one.info.run_id, key) for key in one.data.metrics}
    found = {key: [(m.step, m.value) for m in sorted(points, key=lambda m: m.step)] for key, points in curves.items()}
    return Tracked(found, one.data.params)


def read_trackio(run: Path) -> Tracked:
    with sqlite3.connect(f"{os.environ['TRACKIO_DIR']}/mine.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
        ((name,),) = database.execute("select distinct run_name from metrics").fetchall()
    assert name.startswith(f"{run.name}-")
    return _from_rows([(step, json.loads(values)) for step, values in rows], json.loads(config))


def _from_rows(rows: list[tuple[int, dict[str, Any]]], config: dict[str, Any]) -> Tracked:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, values in rows:
        for key, value in values.items():
            curves.setdefault(key, []).append((step, value))
    return Tracked(curves, config)


READERS: dict[str, Callable[[Path], Tracked]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}

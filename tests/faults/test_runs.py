"""Faults that a whole run meets, on digits: each ends in the bits of a run that was spared, or in one line."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import Call, digest, metrics
from tlt.io.weights import read_checkpoint
from volo.train.precision import Precision

FLAGS = (
    "--model volo_test --img-size 32 --num-classes 10 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --lr 1e-3 "
    "--log-interval 1 --drop-path 0.2 --model-ema"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")


@pytest.mark.parametrize(("failing", "code", "update"), [pytest.param(1, 85, 7, marks=pytest.mark.slow), (99, 4, 5)])
def test_fault_08_14_full_disk_at_slurms_warning(
    call: Call, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, code: int, update: int
) -> None:
    """It is full for the first attempt to save the seventh update, or for all; the epoch before is saved."""
    marker, done, full = tmp_path / "marker", itertools.count(1), itertools.count(1)
    monkeypatch.setenv("REQUEUE_MARKER", str(marker))
    monkeypatch.setattr("volo.checkpoint.saver._FINAL_RETRIES", (0.0, 0.0))
    update_weights, replace = Precision.step, os.replace

    def warned(*given: Any) -> Any:
        if next(done) == 7:
            signal.raise_signal(signal.SIGUSR1)
            monkeypatch.setattr(os, "replace", no_space)
        return update_weights(*given)

    def no_space(old: Path, new: Path) -> None:
        if Path(new).name == "last.pth.tar" and next(full) <= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    monkeypatch.setattr(Precision, "step", warned)
    ended = call("train", f"{FLAGS} --epochs 9 --output {tmp_path} --experiment run", digits)
    assert ended.code == code and "training goes on" not in ended.out, ended.out + ended.err
    saved = {"reason": "stopped by SIGUSR1", "update": update, "checkpoint": str(tmp_path / "run" / "last.pth.tar")}
    assert json.loads(marker.read_text()) == saved
    assert read_checkpoint(tmp_path / "run" / "last.pth.tar")["update"] == update


@linux
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fault_22_worker_is_killed_within_a_step(
    call: Call, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """The step is completed. Where its next micro-batch never comes, the newest checkpoint counts."""
    size = f"-b {8 // micro_batches} --grad-accum-steps {micro_batches}"
    flags = f"{FLAGS} {size} --epochs 2 --recovery-interval 2 -j 1 --loader-timeout 0 --output {tmp_path} --experiment"
    assert call("train", f"{flags} whole", digits).code == 0
    backward, calls = Precision.backward, itertools.count(1)

    def kill_then_go_on(precision: Precision, *args: Any, **named: Any) -> None:
        if next(calls) == 4 * micro_batches - (micro_batches - 1):  # the first pass of the fourth update
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()
        backward(precision, *args, **named)

    monkeypatch.setattr(Precision, "backward", kill_then_go_on)
    killed = call("train", f"{flags} run", digits)
    assert (killed.code, killed.err.count("\n")) == (5, 1) and "killed by SIGKILL" in killed.err, killed.err
    monkeypatch.undo()
    update = read_checkpoint(tmp_path / "run" / "last.pth.tar")["update"]
    assert update == (4 if micro_batches == 1 else 2)
    assert call("train", f"{flags} run --resume auto", digits).code == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


def test_fault_52_last_update_of_one(
    call: Call, digits: Path, make_labels: Callable[..., Path], tmp_path: Path
) -> None:
    labels = make_labels(digits, classes=10)
    flags = f"{FLAGS} -b 13 --epochs 1 --token-label --output {tmp_path} --experiment run --token-label-data"
    ended = call("train", f"{flags} {labels}", digits)
    assert ended.code == 0, ended.err
    records = metrics(tmp_path / "run")
    assert [record["images"] for record in records] == [13, 13, 13, 1]
    assert all(math.isfinite(record["loss"]) for record in records)

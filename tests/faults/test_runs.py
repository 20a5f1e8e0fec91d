"""Faults that a whole run meets, on digits: each ends in the bits of a run that was spared, or in one line."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.conftest import Call, digest, metrics, start
from tlt.api import Loader
from tlt.io.weights import read_checkpoint
from tlt.tools.pack_images import pack_images
from volo.train.precision import Precision

FLAGS = (
    "--model volo_test --img-size 32 --num-classes 10 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --lr 1e-3 "
    "--log-interval 1 --drop-path 0.2 --model-ema"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")


@linux
def test_fault_14_a_disk_that_fills_up_and_is_emptied(call: Call, digits: Path, tmp_path: Path) -> None:
    """A limit to the size of files, set and lifted from outside, stands for the disk."""
    flags = f"{FLAGS} --epochs 9999 --recovery-interval 2 --output {tmp_path} --experiment run --max-failed-saves 9999"
    running = start(flags, digits)
    try:
        running.read_until("saved last.pth.tar")
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
        running.read_until("training goes on")
        known = (tmp_path / "run" / "last.pth.tar").stat().st_ino
        running.read_until("training goes on")
        assert (tmp_path / "run" / "last.pth.tar").stat().st_ino == known
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        running.read_until("saved last.pth.tar")
        assert running.end(signal.SIGTERM) == 85, running.output
    finally:
        running.process.kill()
    message = next(line for line in running.output.splitlines() if "training goes on" in line)
    assert "cannot write" in message and "it needs 3.1 MiB" in message
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)["update"]
    assert saved == metrics(tmp_path / "run")[-1]["update"]
    assert not list((tmp_path / "run").glob(".staged-*"))


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


def test_fault_19_a_second_job_in_the_same_directory(call: Call, digits: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run"
    running = start(flags, digits)
    try:
        running.read_until("epoch 2 validation")
        second = call("train", f"{flags} --resume auto", digits)
        assert (second.code, second.err.count("\n")) == (2, 1), second.err
        assert f"{running.process.pid}" in second.err
        running.read_until("validation")  # the first goes on
        assert running.end(signal.SIGTERM) == 85
    finally:
        running.process.kill()


@pytest.mark.parametrize("source", ["42 names", "43 cut", "43 missing", "44 pipe"])
def test_fault_42_43_44_tars_and_shards(call: Call, digits: Path, tmp_path: Path, source: str) -> None:
    """Nothing of a tar is unpacked, followed or run, and no image is missed silently."""
    where = tmp_path / "source"
    pack_images(str(digits), str(where), shard_mb=1)
    shard = where / "train" / "00000.tar"
    if source == "42 names":
        for file in (where / "train").iterdir():
            file.unlink()
        with tarfile.open(shard, "w") as tar:
            tar.add(digits / "train", "../../escaped")
    elif source == "43 cut":
        shard.write_bytes(shard.read_bytes()[:-2048])
    elif source == "43 missing":
        shard.unlink()
    else:
        shutil.rmtree(where / "train")
        url = f"pipe:touch {tmp_path}/ran"
        (where / "_info.json").write_text(json.dumps({"splits": {"train": {"filenames": [url]}}}))
    ended = call("train", f"{FLAGS} --epochs 1 --output {tmp_path} --experiment run", where)
    assert (ended.code, ended.err.count("\n")) == (2, 1) and str(where) in ended.err
    assert ("which is absolute or leads out of it" in ended.err) == (source == "42 names")
    assert not [*tmp_path.rglob("escaped"), *tmp_path.glob("ran"), *tmp_path.glob("run")]


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


def test_fault_53_huge_batch_costs_one_step(
    call: Call, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, batches = Loader._finish, itertools.count(1)
    monkeypatch.setattr(Loader, "_finish", lambda *given: finish(*given) * (1e38 if next(batches) == 8 else 1.0))
    ended = call("train", f"{FLAGS} --model-dtype bfloat16 --epochs 2 --output {tmp_path} --experiment run", digits)
    assert ended.code == 0, ended.err
    assert [record["skipped_steps"] for record in metrics(tmp_path / "run")] == [*[0] * 7, *[1] * 3]
    checkpoint = read_checkpoint(tmp_path / "run" / "last.pth.tar")
    for entry in ("state_dict", "state_dict_ema"):
        assert all(torch.isfinite(value).all() for value in checkpoint[entry].values())


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

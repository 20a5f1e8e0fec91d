"""Signals to the real train.py: one checkpoint at one step on all ranks, the documented exit code, no process left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, Running, children, ended, held, metrics, start, storage
from tests.conftest import wait_until
from tlt.errors import WorkerDied

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
slow = pytest.mark.slow
# So many epochs that no run has ended before it is hit.
FLAGS = f"{QUICK} -j 1 --epochs 9999 --lr 1e-3 --experiment run --output"


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=40, validation=8)


def saved(run: Path) -> dict[str, object]:
    return torch.load(run / "last.pth.tar", weights_only=True)


def sha256(run: Path) -> str:
    """Of the weights in a run's newest checkpoint."""
    weights = saved(run)["state_dict"]
    assert isinstance(weights, dict)
    return hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()


@linux
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 85, id="07"),
        pytest.param(signal.SIGUSR1, 85, id="08", marks=slow),
        pytest.param(signal.SIGINT, 130, id="09", marks=slow),
        pytest.param(signal.SIGHUP, 85, id="SIGHUP", marks=slow),
    ],
)
def test_fault_07_08_09_a_signal_saves_the_present_step_and_ends_all_processes(
    data: Path, tmp_path: Path, number: int, code: int
) -> None:
    run = start(f"{FLAGS} {tmp_path}", data)
    run.read_until("epoch 2 [3/5]")
    workers = wait_until(lambda: children(run.process.pid))  # none between two epochs
    # As a terminal or Slurm does it: to the data workers, too.
    os.killpg(run.process.pid, number)
    assert run.end() == code, run.output
    assert "Traceback" not in run.output
    assert saved(tmp_path / "run")["update"] == metrics(tmp_path / "run")[-1]["update"] >= 8
    wait_until(lambda: all(map(ended, workers)))


@slow
@linux
def test_nohup_is_heeded_by_launcher_ranks_and_data_workers(data: Path, tmp_path: Path) -> None:
    launcher = [str(ROOT / "distributed_train.sh"), "2", str(data)]
    run = Running(["nohup", *launcher, *f"{FLAGS} {tmp_path} -b 4".split()])
    run.read_until("[2/5]")
    os.killpg(run.process.pid, signal.SIGHUP)
    run.read_until("epoch 3 [2/5]")
    assert run.end(signal.SIGTERM) == 85


@linux
def test_fault_63_ranks_save_and_end_when_their_launcher_is_killed(data: Path, tmp_path: Path) -> None:
    run = start(f"{FLAGS} {tmp_path} -b 4", data, processes=2)
    run.read_until("[2/5]")
    ranks = list(run.ranks().values())
    assert run.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: all(map(ended, ranks)), lambda: run.output)
    assert "stopped by SIGTERM" in run.output
    assert saved(tmp_path / "run")["update"] == metrics(tmp_path / "run")[-1]["update"] >= 2
    again = start(f"{FLAGS} {tmp_path} --resume auto", data)  # the directory is free
    again.read_until(f"{saved(tmp_path / 'run')['update']} updates done")
    assert again.end(signal.SIGTERM) == 85


@slow
@linux
def test_fault_09_a_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    run = start(f"{FLAGS} {tmp_path} -b 4", data, processes=2, **held(tmp_path, at=8))
    run.read_until("[2/5]")
    os.kill(run.ranks()[1], signal.SIGSTOP)  # rank 0 waits for it, inside of torch, as soon as it is told to end
    run.process.send_signal(signal.SIGINT)
    time.sleep(2)  # what comes within a second is the same warning
    assert len(run.ranks()) == 2
    assert run.end(signal.SIGINT) == 137, run.output
    assert not (tmp_path / "run" / "last.pth.tar").exists()


def test_fault_09_a_background_process_of_a_script_heeds_sigint(data: Path, tmp_path: Path) -> None:
    # What a shell does to the processes that it starts with &.
    ignored = [
        "import os, signal, sys",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "os.execv(sys.argv[1], sys.argv[1:])",
    ]
    run = Running([sys.executable, "-c", ";".join(ignored), sys.executable, str(ROOT / "train.py"), str(data),
                   *f"{FLAGS} {tmp_path}".split()])  # fmt: skip
    run.read_until("[2/5]")
    assert run.end(signal.SIGINT) == 130
    assert (tmp_path / "run" / "last.pth.tar").exists()


@linux
@pytest.mark.parametrize("target", ["launcher", pytest.param("rank 1", marks=slow)])
def test_fault_07_all_ranks_stop_at_the_same_step_and_a_resumed_run_ends_in_the_same_bits(
    data: Path, tmp_path: Path, target: str
) -> None:
    flags = f"{QUICK} -j 1 -b 4 --lr 1e-3 --epochs 2 --output {tmp_path} --experiment"
    slowly = held(tmp_path, at=12) if target == "launcher" else storage(tmp_path, "time.sleep(0.3)")
    cut = start(f"{flags} cut", data, processes=2, **slowly)
    cut.read_until("epoch 1 [3/5]")
    os.kill(cut.process.pid if target == "launcher" else cut.ranks()[1], signal.SIGTERM)
    assert cut.end() == 85, cut.output
    assert saved(tmp_path / "cut")["update"] == metrics(tmp_path / "cut")[-1]["update"] >= 3
    assert start(f"{flags} cut --resume auto", data, processes=2).end() == 0
    assert start(f"{flags} whole", data, processes=2).end() == 0
    assert sha256(tmp_path / "cut") == sha256(tmp_path / "whole")


@slow
@linux
def test_fault_07_a_signal_while_the_data_hangs(data: Path, tmp_path: Path) -> None:
    run = start(f"{FLAGS} {tmp_path}", data, **held(tmp_path, at=16))
    run.read_until("epoch 1 [2/5]")
    (worker,) = children(run.process.pid)
    os.kill(worker, signal.SIGSTOP)
    assert run.end(signal.SIGTERM) == 85, run.output
    assert saved(tmp_path / "run")["update"] == metrics(tmp_path / "run")[-1]["update"] == 2
    resumed = start(f"{FLAGS} {tmp_path} --resume auto", data)
    resumed.read_until("volo_test:")
    assert resumed.end(signal.SIGUSR1) == 85, resumed.output


@slow
@linux
def test_fault_07_a_signal_during_validation_does_not_end_the_epoch(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data = make_dataset(train=8)
    hanging = held(tmp_path, at=5, where="/validation/")
    run = start(f"{FLAGS} {tmp_path} -j 0 --validation-batch-size 1", data, **hanging)
    run.read_until("[1/1]")
    assert run.end(signal.SIGTERM) == 85, run.output
    checkpoint = saved(tmp_path / "run")
    assert (checkpoint["epoch"], checkpoint["update"]) == (-1, 1)
    resumed = start(f"{FLAGS} {tmp_path} -j 0 --resume auto", data)
    resumed.read_until("epoch 1 validation")
    assert resumed.end(signal.SIGTERM) == 85, resumed.output


def test_fault_08_the_job_goes_back_into_the_queue(data: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "scontrol"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\n[ $1 = show ] && echo JobState=RUNNING || echo "$@" >> {tmp_path}/asked\n')
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = [str(ROOT / "slurm" / "requeue.sh")]
    run = Running([*script, sys.executable, str(ROOT / "train.py"), str(data), *f"{FLAGS} {tmp_path}".split()], **env)
    run.read_until("[2/5]")
    assert run.end(signal.SIGUSR1) == 85, run.output
    assert int(saved(tmp_path / "run")["update"]) >= 2  # type: ignore[call-overload]
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    marked = "echo {} > $REQUEUE_MARKER; exit 85"
    for does, code, more in ((marked, 85, array), ("exit 0", 0, {}), ("exit 85", 85, {}), ("exit 143", 143, {})):
        assert Running([*script, "sh", "-c", does], **env, **more).end() == code
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 7", "requeue 40_3"]


@slow
@linux
def test_fault_20_a_killed_rank_is_restarted_and_the_run_ends_in_the_same_bits(data: Path, tmp_path: Path) -> None:
    flags = f"{QUICK} -j 1 -b 4 --lr 1e-3 --epochs 3 --output {tmp_path}"
    # No name: the restarted processes have to find their own run.
    run = start(f"{flags} --recovery-interval 2", data, processes=2, MAX_RESTARTS="1", **held(tmp_path, at=12))
    run.read_until("epoch 1 [3/5]")
    wait_until(lambda: [*tmp_path.glob("*/last.pth.tar")], lambda: run.output)
    os.kill(run.ranks()[1], signal.SIGKILL)
    assert run.end() == 0, run.output
    assert "restart 1 of 1" in run.output and "resumed" in run.output
    (directory,) = tmp_path.glob("*-volo_test-32")
    assert start(f"{flags} --experiment whole", data, processes=2).end() == 0
    assert sha256(directory) == sha256(tmp_path / "whole")


@linux
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=slow), 1])
def test_fault_21_where_a_rank_hangs_all_print_their_stacks_and_end(data: Path, tmp_path: Path, stopped: int) -> None:
    slowly = storage(tmp_path, "time.sleep(0.3)")  # so that it happens within an epoch
    run = start(f"{FLAGS} {tmp_path} -b 4 --dist-timeout 6 --loader-timeout 5", data, processes=2, **slowly)
    run.read_until("epoch 2 [1/5]")
    ranks = run.ranks()
    os.kill(ranks[stopped], signal.SIGSTOP)
    run.read_until(f"[rank {1 - stopped}] hung")
    run.read_until("in train_epoch")  # the stacks
    assert run.end() == 5, run.output
    assert '"kind": "fault"' in (tmp_path / "run" / "events.jsonl").read_text()


@linux
def test_fault_22_a_data_worker_that_is_killed_while_its_batch_is_waited_for_saves_and_stops_the_run(
    data: Path, tmp_path: Path
) -> None:
    run = start(f"{FLAGS} {tmp_path} -b 2 --loader-timeout 0", data, **held(tmp_path, at=6))
    run.read_until("epoch 1 [3/20]")
    (worker,) = children(run.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert run.end() == WorkerDied.exit_code, run.output
    assert "a data worker was killed by SIGKILL: most likely too little memory" in run.output
    assert "Traceback" not in run.output
    assert saved(tmp_path / "run")["update"] == metrics(tmp_path / "run")[-1]["update"] == 3


@linux
def test_fault_23_dead_storage_is_named_and_the_run_saves_and_stops(data: Path, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    hangs = f'while str(path).endswith("blue0.jpg") and os.path.exists({str(dead)!r}): time.sleep(0.1)'
    run = start(f"{FLAGS} {tmp_path} --loader-timeout 6 --dist-timeout 4", data, **storage(tmp_path, hangs))
    run.read_until("epoch 1 [5/5]")
    dead.touch()
    assert run.end() == 2, run.output
    assert re.search(r"no batch after 6 s \(--loader-timeout\): reading .*/blue0.jpg has taken", run.output)
    assert "Traceback" not in run.output
    assert int(saved(tmp_path / "run")["update"]) >= 5  # type: ignore[call-overload]


@linux
def test_fault_23_failing_storage_makes_no_image_bad_and_the_run_saves_and_stops(data: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    fails = (
        f'if str(path).endswith("blue0.jpg") and os.path.exists({str(lost)!r}): raise OSError(116, os.strerror(116))'
    )
    run = start(f"{FLAGS} {tmp_path}", data, **storage(tmp_path, fails))
    run.read_until("epoch 1 [5/5]")
    lost.touch()
    assert run.end() == 5, run.output
    assert re.search(r"error: .*/blue0.jpg can't be read: Stale file handle, 4 times in a row; its storage", run.output)
    assert "Traceback" not in run.output and "left out" not in run.output
    assert int(saved(tmp_path / "run")["update"]) >= 5  # type: ignore[call-overload]


@linux
def test_a_slow_rank_is_named(data: Path, tmp_path: Path) -> None:
    slowly = storage(tmp_path, 'time.sleep(0.2 * (os.environ.get("RANK") == "1" and "/train/" in str(path)))')
    run = start(f"{FLAGS} {tmp_path} -j 0 -b 4 --epochs 1", data, processes=2, **slowly)
    assert run.end() == 0, run.output
    assert run.output.count("the others wait for rank 1 on ") == 1
    assert "[rank 1] warning: data wait" in run.output and "the others wait for rank 0" not in run.output
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "straggler" in kinds and "data-wait" in kinds


@slow
@linux
def test_fault_07_data_workers_end_with_a_killed_main_process(data: Path, tmp_path: Path) -> None:
    run = start(f"{FLAGS} {tmp_path}", data, **held(tmp_path, at=16))
    run.read_until("epoch 1 [2/5]")
    (worker,) = children(run.process.pid)
    os.kill(worker, signal.SIGSTOP)  # or it would notice by itself
    assert run.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: ended(worker))

"""Signals to the real train.py, and faults of one rank or of all, wherever the others are: one checkpoint at one step
on all ranks, the exit code says why, no process is left."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import (
    QUICK,
    ROOT,
    Make,
    Running,
    children,
    digest,
    ended,
    held,
    metrics,
    spent_in,
    start,
    storage,
)
from tests.conftest import python_path, wait_until
from tlt.io.weights import read_checkpoint
from volo.record.run_directory import RunLock

UPDATES = 5  # of an epoch of 40 images
# train.py, in which rank 1 meets a fault in the second update of the second epoch.
DRIVER = """
import os, sys, time
from volo import cli
from volo.train.meter import Meter
faults = {"nan": lambda batch: batch.images.fill_(float("nan")), "hang": lambda batch: time.sleep(9999)}
fault, updates, *flags = sys.argv[1:]
look_at = Meter.look_at
def look(meter, batch):
    look_at(meter, batch)
    faults[fault](batch) if meter.state.update > int(updates) else None
if os.environ["RANK"] == "1":
    Meter.look_at = look
sys.exit(cli.run("train", flags))
"""


def run_with(fault: str, make_dataset: Make, tmp_path: Path, more: str) -> Running:
    """Two ranks, after their ends."""
    (tmp_path / "driver.py").write_text(DRIVER)
    launcher = [sys.executable, str(ROOT / "volo/commands/launch.py"), "2", str(tmp_path / "driver.py")]
    data = make_dataset(train=8 * UPDATES, validation=8)
    flags = f"{QUICK} -b 4 --epochs 9 --lr 1e-3 {more} --output {tmp_path} --experiment run"
    run = Running([*launcher, fault, str(UPDATES), str(data), *flags.split()], PYTHONPATH=python_path(ROOT))
    run.end()
    return run


@pytest.mark.slow
def test_fault_53_all_ranks_end_with_the_failed_rank_code(make_dataset, tmp_path):
    run = run_with("nan", make_dataset, tmp_path, "--skip-nonfinite 2")
    assert run.end() == 3, run.output
    assert run.output.count("] error: the gradients of 3 steps in a row") == 1 and "hung" not in run.output
    assert read_checkpoint(tmp_path / "run/last.pth.tar")["update"] == UPDATES  # what there was


def test_fault_23_storage_fault_of_one_rank_stops_all(make_dataset, tmp_path):
    lost = tmp_path / "lost"
    here = f"os.environ.get('RANK') == '1' and '/train/' in str(path) and os.path.exists({str(lost)!r})"
    fails = f"if {here}: raise OSError(116, os.strerror(116))"
    data, flags = make_dataset(train=40, validation=8), f"{QUICK} -j 1 -b 4 --epochs 9999 --lr 1e-3"
    run = start(f"{flags} --output {tmp_path} --experiment run", data, processes=2, **storage(tmp_path, fails))
    run.read_until("epoch 1 [5/5]")
    lost.touch()
    assert run.end() == 5, run.output
    assert run.output.count(".jpg can't be read: Stale file handle, 4 times in a row; its storage") == 1
    assert not any(word in run.output for word in ("Traceback", "left out", "hung"))
    assert read_checkpoint(tmp_path / "run/last.pth.tar")["update"] >= 5
    assert spent_in(tmp_path / "run").parts["waiting for data"] > 0


def test_fault_21_hang_of_one_rank_prints_all_stacks_and_ends(make_dataset, tmp_path):
    run = run_with("hang", make_dataset, tmp_path, "--dist-timeout 3")
    assert run.end() == 5, run.output
    for rank in (0, 1):
        assert f"[rank {rank}] hung: no progress for " in run.output
    assert "in <lambda>" in run.output and run.output.count("in train_epoch") >= 2  # the stacks
    assert '"kind": "fault"' in (tmp_path / "run" / "events.jsonl").read_text()
    spent = spent_in(tmp_path / "run")
    assert spent.parts["training"] > 3 and not spent.restarts  # in the phase "step", and nothing is done again yet


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
slow = pytest.mark.slow
# So many epochs that no run has ended before it is hit.
FLAGS = f"{QUICK} -j 1 --epochs 9999 --lr 1e-3 --experiment run --output"


@pytest.fixture
def data(make_dataset: Make) -> Path:
    return make_dataset(train=40, validation=8)


def saved(run: Path) -> dict[str, object]:
    return torch.load(run / "last.pth.tar", weights_only=True)


def last_update(run: Path) -> int:
    """The update that was saved, which is the last one that was done."""
    update = saved(run)["update"]
    assert isinstance(update, int) and update == metrics(run)[-1]["update"]
    spent = spent_in(run)
    assert spent.parts["done twice"] == spent.restarts == 0 < min(spent.parts["training"], spent.parts["starting"])
    return update


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=slow)])
def test_fault_07_08_signal_saves_this_step_and_ends_all(data, tmp_path, number):
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, which may be round these tests, it is ignored
    run = start(f"{FLAGS} {tmp_path} -b 4", data, processes=2, REQUEUE_MARKER=str(tmp_path / "marker"))
    signal.signal(signal.SIGHUP, handler)
    run.read_until("[3/5]")
    processes = [pid for rank in run.ranks().values() for pid in (rank, *children(rank))]
    # As a terminal or Slurm does it: to the ranks and the data workers, too.
    os.killpg(run.process.pid, number)
    assert run.end() == 85, run.output
    assert "Traceback" not in run.output
    marker = {"reason": f"stopped by {signal.Signals(number).name}", "update": last_update(tmp_path / "run")}
    assert marker["update"] >= 3
    assert json.loads((tmp_path / "marker").read_text()) == {**marker, "checkpoint": str(tmp_path / "run/last.pth.tar")}
    wait_until(lambda: all(map(ended, processes)))


def test_fault_63_ranks_save_when_their_launcher_is_killed(data, tmp_path):
    run = start(f"{FLAGS} {tmp_path} -b 4", data, processes=2)
    run.read_until("[2/5]")
    ranks = list(run.ranks().values())
    assert run.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: all(map(ended, ranks)), lambda: run.output)
    assert "stopped by SIGTERM" in run.output and last_update(tmp_path / "run") >= 2
    with RunLock(print) as lock:  # the directory is free
        lock.acquire(tmp_path / "run")


def test_fault_09_a_background_process_of_a_script_heeds_sigint(data, tmp_path):
    # What a shell does to the processes that it starts with &.
    ignored = "import os, sys, signal as s; s.signal(s.SIGINT, s.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignored, sys.executable, str(ROOT / "train.py"), str(data)]
    run = Running([*command, *f"{FLAGS} {tmp_path}".split()])
    run.read_until("[2/5]")
    assert run.end(signal.SIGINT) == 130
    assert last_update(tmp_path / "run") >= 2


@slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGKILL, -signal.SIGKILL)])
def test_fault_07_signal_in_a_data_hang_ends_workers(data, tmp_path, number, code):
    run = start(f"{FLAGS} {tmp_path}", data, **held(tmp_path, at=16))
    run.read_until("epoch 1 [2/5]")
    (worker,) = children(run.process.pid)
    os.kill(worker, signal.SIGSTOP)  # or it would notice by itself
    assert run.end(number) == code, run.output
    assert number == signal.SIGKILL or last_update(tmp_path / "run") == 2
    wait_until(lambda: ended(worker))


@slow
def test_fault_07_signal_in_validation_keeps_the_epoch_open(make_dataset, tmp_path):
    data, hanging = make_dataset(train=8), held(tmp_path, at=5, where="/validation/")
    run = start(f"{FLAGS} {tmp_path} -j 0 --validation-batch-size 1", data, **hanging)
    run.read_until("[1/1]")
    assert run.end(signal.SIGTERM) == 85, run.output
    checkpoint = saved(tmp_path / "run")
    assert (checkpoint["epoch"], checkpoint["update"]) == (-1, 1)
    assert spent_in(tmp_path / "run").parts["validation"] > 0


# Of each phase: more flags, what holds the processes in it, and which file or line tells that they are there.
PHASES = {
    "training": ("", "False", "[3/5]"),
    "save": ("--recovery-interval 2", "os.path.exists(f'{path}/last.pth.tar') and os.environ['RANK'] == '0'", "held"),
    "validation": ("", "'/validation/' in str(path)", "held"),
    "data": ("", "'/train/' in str(path) and next(number) > 6", "held"),
    "compile": ("--torchcompile --drop-path 0", "False", "*.cpp"),
}


@slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_fault_20_death_of_a_rank_ends_all_in_each_phase(data, tmp_path, phase, rank):
    more, where, there = PHASES[phase]
    holds = storage(tmp_path, f"if {where}: print('held', flush=True); time.sleep(9999)")
    cache = tmp_path / "cache"
    run = start(f"{FLAGS} {tmp_path} -b 4 {more}", data, processes=2, TORCHINDUCTOR_CACHE_DIR=str(cache), **holds)
    wait_until(lambda: there in run.output or [*cache.rglob(there)], lambda: run.output)
    processes = [pid for each in run.ranks().values() for pid in (each, *children(each))]
    killed = time.monotonic()
    os.kill(run.ranks()[rank], signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL and "Traceback" not in run.output, run.output
    wait_until(lambda: all(map(ended, processes)))
    print(f"all had ended {time.monotonic() - killed:.1f} s after rank {rank} in phase {phase}")


@slow
def test_fault_20_restart_after_a_killed_rank_has_the_same_bits(data, tmp_path):
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
    assert digest(directory) == digest(tmp_path / "whole")
    spent = spent_in(directory)
    assert spent.restarts == 1 and spent.parts["away"] > 0 == spent.queue

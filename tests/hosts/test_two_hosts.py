"""Training on two hosts that were started by hand: what is lost, what goes on, and what is said."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, Running, start, storage
from tests.commands.launch.test_preemption import sha256
from tests.hosts.conftest import Host

pytestmark = pytest.mark.hosts
# 40 images, 8 an update: 5 updates an epoch on two ranks.
FLAGS = f"{QUICK} -b 4 --lr 1e-3 --dist-timeout 6 --loader-timeout 5"
Launch = Callable[..., list[Running]]


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=40, validation=8)


def ends(runs: list[Running]) -> list[int]:
    return [run.end() for run in runs]


def test_two_hosts_end_in_the_weights_of_one(launch: Launch, data: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} -b 2 --epochs 2 --output {tmp_path} --experiment"
    logs = tmp_path / "logs"
    runs = launch(f"{flags} two", data, processes=2, LOG_DIR=str(logs))
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
    assert start(f"{flags} one", data, processes=4).end() == 0
    assert sha256(tmp_path / "two") == sha256(tmp_path / "one")
    # Ranks are numbered as NODE_RANK says: rank 0, which speaks, is on the first host.
    assert "[host0:0] done: 10 updates" in runs[0].output and "done:" not in runs[1].output
    first = [log.read_text() for log in logs.glob("volo-*/attempt_0/0/stdout.log")]
    assert ["done: 10 updates" in log for log in first].count(True) == 1
    assert len([*logs.rglob("std*.log")]) == 8


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_the_other(
    launch: Launch, hosts: list[Host], data: Path, tmp_path: Path, killed: int
) -> None:
    runs = launch(f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data)
    runs[0].read_until("epoch 2 [2/5]")
    hosts[killed].kill()
    other = runs[1 - killed]
    assert other.end() == 5, other.output
    assert f"[rank {1 - killed}] error: another rank has ended" in other.output and "Traceback" not in other.output


def test_a_pulled_cable_ends_both_hosts_which_name_each_other(
    launch: Launch, hosts: list[Host], data: Path, tmp_path: Path
) -> None:
    slowly = storage(tmp_path, "time.sleep(0.3)")  # so that it happens within an epoch
    runs = launch(f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data, **slowly)
    runs[0].read_until("epoch 2 [1/5]")
    hosts[1].pull_cable()
    assert ends(runs) == [5, 5], "\n".join(run.output for run in runs)
    for rank, run in enumerate(runs):
        assert f"[rank {rank}] hung: no progress for " in run.output and "in train_epoch" in run.output


def test_a_signal_to_one_host_stops_both_at_the_same_step(launch: Launch, data: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} --epochs 2 --output {tmp_path} --experiment"
    runs = launch(f"{flags} cut", data, **storage(tmp_path, "time.sleep(0.3)"))
    runs[0].read_until("epoch 1 [2/5]")
    runs[1].process.send_signal(signal.SIGUSR1)
    assert ends(runs) == [85, 85], "\n".join(run.output for run in runs)
    runs = launch(f"{flags} cut --resume auto", data)
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
    assert start(f"{flags} whole", data, processes=2).end() == 0
    assert sha256(tmp_path / "cut") == sha256(tmp_path / "whole")


def test_a_mistake_on_one_host_ends_both(hosts: list[Host], data: Path, tmp_path: Path) -> None:
    nodes = {"NNODES": "2", "MASTER_ADDR": hosts[0].address}
    folders = [data, tmp_path / "unmounted"]
    runs = [hosts[rank].train(FLAGS, folders[rank], NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    assert ends(runs) == [5, 2], "\n".join(run.output for run in runs)
    assert "[rank 1] error: " in runs[1].output and "[rank 0] error: another rank has ended" in runs[0].output


@pytest.mark.parametrize("missing", [0, 1])
def test_a_node_that_never_comes_is_named(hosts: list[Host], data: Path, missing: int) -> None:
    there = 1 - missing
    nodes = {"NNODES": "2", "NODE_RANK": str(there), "MASTER_ADDR": hosts[0].address, "JOIN_TIMEOUT": "4"}
    run = hosts[there].train(FLAGS, data, **nodes)
    assert run.end() == 5
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    said = "node 0 did not answer" if missing == 0 else "node 1 did not join"
    assert said in line and f"{hosts[0].address}:29500 within 4 s" in line
    assert "Traceback" not in run.output

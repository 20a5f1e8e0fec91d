"""Training on two hosts that were started by hand: what is lost, what goes on, and what is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, Running, held, start
from tests.commands.launch.test_preemption import sha256
from tests.conftest import wait_until
from tests.hosts.conftest import Host

pytestmark = pytest.mark.hosts
# 40 images, 8 an update: 5 updates an epoch on two ranks.
FLAGS = f"{QUICK} -b 4 --lr 1e-3 --dist-timeout 6"
Launch = Callable[..., list[Running]]


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=40, validation=8)


def ends(runs: list[Running]) -> list[int]:
    return [run.end() for run in runs]


def test_two_hosts_end_in_the_weights_of_one(launch: Launch, data: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} -b 2 --epochs 2 --output {tmp_path} --experiment"
    logs = tmp_path / "logs"
    runs = launch(f"{flags} two", data, processes=2, LOG_DIR=str(logs), RUN_ID="two")
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
    assert start(f"{flags} one", data, processes=4).end() == 0
    assert sha256(tmp_path / "two") == sha256(tmp_path / "one")
    # Ranks are numbered as NODE_RANK says: rank 0, which speaks, is on the first host.
    assert "[host0:0] done: 10 updates" in runs[0].output and "done:" not in runs[1].output
    names = {f"two.0-rank{rank}.{end}" for rank in range(4) for end in ("out", "err")}
    assert {file.name for file in logs.iterdir()} == names
    assert "done: 10 updates" in (logs / "two.0-rank0.out").read_text()


def test_a_killed_worker_is_restarted_with_all_others(launch: Launch, data: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} --epochs 2 --output {tmp_path}"
    runs = launch(flags, data, MAX_RESTARTS="1", LOG_DIR=str(tmp_path / "logs"), **held(tmp_path, at=24))
    runs[0].read_until("epoch 2 [1/5]")
    (worker,) = runs[1].ranks().values()
    os.kill(worker, signal.SIGKILL)
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
    assert all(run.output.count("a process ended with code 137: restart 1 of 1") == 1 for run in runs)
    assert "resumed" in runs[0].output
    assert (tmp_path / "logs" / "volo.1-rank1.out").exists()
    (directory,) = tmp_path.glob("*-volo_test-32")
    assert start(f"{flags} --experiment whole", data, processes=2).end() == 0
    assert sha256(directory) == sha256(tmp_path / "whole")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_the_other_which_names_it(
    launch: Launch, hosts: list[Host], data: Path, tmp_path: Path, killed: int
) -> None:
    runs = launch(f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data, MAX_RESTARTS="3")
    runs[0].read_until("epoch 2 [2/5]")
    hosts[killed].kill()
    other = runs[1 - killed]
    assert other.end() == 5, other.output
    assert f"node {killed} (host{killed}, {hosts[killed].address}) is gone" in other.output
    assert "restart" not in other.output and "Traceback" not in other.output


def test_a_pulled_cable_ends_both_hosts_which_name_each_other(
    launch: Launch, hosts: list[Host], data: Path, tmp_path: Path
) -> None:
    runs = launch(f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data, MAX_RESTARTS="3")
    runs[0].read_until("epoch 2 [2/5]")
    hosts[1].pull_cable()
    assert ends(runs) == [5, 5], "\n".join(run.output for run in runs)
    for rank, other in ((0, 1), (1, 0)):
        assert f"no sign of life from rank {other} (" in runs[rank].output
        assert f"node {other} (host{other}, {hosts[other].address}) is gone" in runs[rank].output
        assert "restart" not in runs[rank].output


def test_a_signal_to_one_host_stops_both_at_the_same_step(launch: Launch, data: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} --epochs 2 --output {tmp_path} --experiment"
    runs = launch(f"{flags} cut", data, MAX_RESTARTS="3", **held(tmp_path, at=8))
    runs[0].read_until("epoch 1 [2/5]")
    runs[1].process.send_signal(signal.SIGUSR1)
    assert ends(runs) == [85, 85], "\n".join(run.output for run in runs)
    runs = launch(f"{flags} cut --resume auto", data)
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)
    assert start(f"{flags} whole", data, processes=2).end() == 0
    assert sha256(tmp_path / "cut") == sha256(tmp_path / "whole")


def test_a_mistake_on_one_host_ends_both_with_its_code(hosts: list[Host], data: Path, tmp_path: Path) -> None:
    nodes = {"NNODES": "2", "MASTER_ADDR": hosts[0].address, "MAX_RESTARTS": "3"}
    folders = [data, tmp_path / "unmounted"]
    runs = [hosts[rank].train(FLAGS, folders[rank], NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    assert ends(runs) == [2, 2], "\n".join(run.output for run in runs)
    assert "[rank 1] error: " in runs[1].output and "restart" not in runs[0].output + runs[1].output


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


def test_two_nodes_with_one_number_are_told(hosts: list[Host], data: Path) -> None:
    nodes = {"NNODES": "3", "MASTER_ADDR": hosts[0].address}
    first, *twins = [hosts[number].train(FLAGS, data, NODE_RANK=str(number), **nodes) for number in (0, 1, 1)]
    assert any("another machine has joined as NODE_RANK 1" in run.output for run in twins if run.end() == 2)
    assert first.end() == 5 and "node 2 did not join" in first.output


def test_a_port_in_use_is_told_and_waiting_can_be_broken_off(hosts: list[Host], data: Path) -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": hosts[0].address}
    runs = [hosts[0].train(FLAGS, data, **nodes) for _ in range(2)]
    wait_until(lambda: any(run.process.poll() is not None for run in runs), lambda: runs[0].output + runs[1].output)
    refused, waiting = sorted(runs, key=lambda run: run.process.poll() is None)
    assert refused.end() == 2 and "can't listen on port 29500" in refused.output
    assert waiting.end(signal.SIGTERM) == 143 and "SIGTERM while waiting for node 1" in waiting.output

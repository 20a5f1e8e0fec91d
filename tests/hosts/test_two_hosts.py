"""Training on two hosts that were started by hand: what is lost, what goes on, and what is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, ROOT, Running, digest, start, storage
from tests.hosts.conftest import ip, launch

pytestmark = pytest.mark.hosts
# 40 images, 8 an update: 5 updates an epoch on two ranks.
FLAGS = f"{QUICK} -b 4 --lr 1e-3 --dist-timeout 6 --loader-timeout 5"


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=40, validation=8)


def check_ends(runs: list[Running], code: int) -> None:
    assert [run.end() for run in runs] == [code] * len(runs), "\n".join(run.output for run in runs)


def test_two_ipv6_hosts_end_in_the_weights_of_one(hosts, data, tmp_path):
    addresses = [f"fd00:78::{10 + number}" for number in range(2)]
    for host, address in zip(hosts, addresses, strict=True):
        for words in ("addr flush dev eth0 scope global", f"addr add {address}/64 dev eth0 nodad"):
            ip(f"-n {host.namespace} {words}")
        host.names.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
    flags, where = f"{FLAGS} -b 2 --epochs 2 --output {tmp_path} --experiment", {"MASTER_ADDR": addresses[0]}
    runs = launch(hosts, f"{flags} two", data, processes=2, **where)
    check_ends(runs, 0)
    assert start(f"{flags} one", data, processes=4).end() == 0
    assert digest(tmp_path / "two") == digest(tmp_path / "one")
    # Ranks are numbered as NODE_RANK says: rank 0, which speaks, is on the first host.
    assert "[host0:0] done: 10 updates" in runs[0].output and "done:" not in runs[1].output


def test_ranks_that_kubeflow_starts_on_two_hosts_train_as_one(hosts, data, tmp_path):
    hosts[1].names.write_text(f"127.0.0.1 localhost\n{hosts[0].address} host0\n")  # on host0 that is 127.0.1.1
    runs = []
    for rank, host in enumerate(hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        env["MASTER_ADDR"] = "host0" if rank else "localhost"
        flags = [*f"{FLAGS} --epochs 1 --output {tmp_path} --experiment one".split()]
        runs.append(host.start([sys.executable, str(ROOT / "train.py"), str(data), *flags], **env))
    check_ends(runs, 0)
    assert "done: 5 updates" in runs[0].output and "x 2 x 1 accumulation steps; 5 updates" in runs[0].output


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_the_other(hosts, data, tmp_path, killed):
    runs = launch(hosts, f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data)
    runs[0].read_until("epoch 2 [2/5]")
    hosts[killed].kill()
    other = runs[1 - killed]
    assert other.end() == 5, other.output
    assert f"[rank {1 - killed}] error: another rank has ended" in other.output and "Traceback" not in other.output


def test_a_pulled_cable_ends_both_hosts_which_name_each_other(hosts, data, tmp_path):
    slowly = storage(tmp_path, "time.sleep(0.3)")  # so that it happens within an epoch
    runs = launch(hosts, f"{FLAGS} --epochs 9999 --output {tmp_path} --experiment run", data, **slowly)
    runs[0].read_until("epoch 2 [1/5]")
    hosts[1].cable("down")
    check_ends(runs, 5)
    for rank, run in enumerate(runs):
        assert f"[rank {rank}] hung: no progress for " in run.output and "in train_epoch" in run.output


@pytest.mark.parametrize(
    ("wrong", "flag", "message"),
    [(0, "--device cuda", "there is no GPU cuda:0"), (1, "--no-such-flag", "error: unknown flag --no-such-flag")],
)
def test_fault_64_host_that_cannot_begin_ends_both(hosts, data, wrong, flag, message):
    flags = [f"{FLAGS} {flag if rank == wrong else ''}" for rank in (0, 1)]
    runs = [host.train(its, data, MASTER_ADDR=hosts[0].address) for host, its in zip(hosts, flags, strict=True)]
    assert [run.end() for run in runs] == ([2, 5] if wrong == 0 else [5, 2]), "\n".join(run.output for run in runs)
    other = runs[1 - wrong].output
    assert message in runs[wrong].output and "Traceback" not in other
    # The store ends with host 0's launcher, before rank 1 has reached it or after.
    missed = ("rank 0 did not", "another rank has ended", "node 0 did not")
    assert any(f"error: {message}" in other for message in (missed if wrong == 0 else ["rank 1 did not come in time"]))

"""The preflight on two hosts, healthy and with a slow cable. Only the network between them is made up."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.hosts.conftest import Host

pytestmark = pytest.mark.hosts


def preflight(hosts: list[Host], *more: str) -> tuple[list[int], list[str]]:
    """How it ends on each host, with the variables that torchrun sets for one rank each; what rank 0 prints."""
    run = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address}
    command = [sys.executable, "-m", "volo", "preflight", "--device", "cpu", "--shm-gb", "0.001", *more]
    runs = [host.start(*command, **run, RANK=str(rank), GROUP_RANK=str(rank)) for rank, host in enumerate(hosts)]
    return [run.end() for run in runs], runs[0].output.splitlines()


def test_healthy_hosts_are_fit(hosts: list[Host]) -> None:
    codes, lines = preflight(hosts)
    assert codes == [0, 0] and [line.split()[:2] for line in lines[-4:-2]] == [["host0#0", "1"], ["host1#1", "1"]]


def test_a_slow_cable_is_told(hosts: list[Host]) -> None:
    if shutil.which("tc") is None:
        pytest.skip("needs tc: apt-get install iproute2")
    brake = f"tc -n {hosts[1].namespace} qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 400ms"
    subprocess.run(brake.split(), check=True)
    # 40 Mbit/s are 0.005 GB/s, whatever else the machine does.
    codes, lines = preflight(hosts, "--min-bandwidth", "0.02")
    assert codes == [6, 6] and lines[-2].startswith("all ranks: the all-reduce reaches 0.00")

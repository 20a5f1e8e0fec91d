"""The preflight on two hosts, healthy and with a slow cable. Only the network between them is made up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import Host

pytestmark = pytest.mark.hosts


def preflight(hosts: list[Host], record: Path, *more: str) -> list[int]:
    """How it ends on each host, with the variables that torchrun sets for one rank each."""
    flags = ["--device", "cpu", "--shm-gb", "0.001", "--json", str(record), *more]
    run = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address}
    command = [sys.executable, "-m", "volo", "preflight", *flags]
    runs = [host.start(*command, **run, RANK=str(rank), GROUP_RANK=str(rank)) for rank, host in enumerate(hosts)]
    return [run.end() for run in runs]


def test_healthy_hosts_are_fit(hosts: list[Host], tmp_path: Path) -> None:
    assert preflight(hosts, tmp_path / "record") == [0, 0]
    nodes = json.loads((tmp_path / "record").read_text())["nodes"]
    assert [(node["name"], node["ranks"]) for node in nodes] == [("host0#0", [0]), ("host1#1", [1])]


def test_a_slow_cable_is_told(hosts: list[Host], tmp_path: Path) -> None:
    if shutil.which("tc") is None:
        pytest.skip("needs tc: apt-get install iproute2")
    brake = f"tc -n {hosts[1].namespace} qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 400ms"
    subprocess.run(brake.split(), check=True)
    # 40 Mbit/s are 0.005 GB/s, whatever else the machine does.
    assert preflight(hosts, tmp_path / "record", "--min-bandwidth", "0.02") == [6, 6]
    (found,) = json.loads((tmp_path / "record").read_text())["findings"]
    assert found["text"].startswith("the all-reduce reaches 0.00")

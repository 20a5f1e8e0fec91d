"""The preflight on several hosts: healthy, throttled, missing, different. Only the network between them is made up."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import LIMIT
from tests.hosts.netns import Hosts, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]
# Cores that all hosts share make bandwidths differ more than machines do.
SHARED_CORES = ("--slow-below", "0.2", "--timeout", "240", "--round-timeout", "120")
# One node that runs something else than the others: real but for what it says of itself.
PRETENDING = """
import sys, time, torch
torch.__version__ = "2.9.9"
real = time.time
time.time = lambda: real() - 100
from volo.cli import run
sys.exit(run("preflight"))
"""


class Ended(NamedTuple):
    """How the preflight ended on one host."""

    code: int
    text: str


class Cluster:
    """Starts the preflight on some of the hosts, as a user does by hand."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.json = folder / "preflight.json"

    def run(
        self, *flags: str, missing: str = "", pretending: str = "", hosts_file: Path | None = None, **env: str
    ) -> dict[str, Ended]:
        """Return how it ended on each host, by name."""
        names = self.hosts.names
        variables = {"NODES": " ".join(names), "NNODES": str(len(names)), "MASTER_ADDR": self.hosts.addresses[0], **env}
        running = {}
        for rank, name in enumerate(names):
            program = ["-c", PRETENDING] if name == pretending else ["-m", "volo", "preflight"]
            command = [sys.executable, *program, "--json", str(self.json), *flags]
            if name != missing:
                running[name] = self.hosts.start(name, command, hosts_file, NODE_RANK=str(rank), **variables)
        return {name: Ended(process.wait(LIMIT), process.communicate()[0]) for name, process in running.items()}

    def findings(self) -> list[dict[str, Any]]:
        """What node 0 wrote by --json."""
        found: list[dict[str, Any]] = json.loads(self.json.read_text())["findings"]
        return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts, the same for all tests."""
    with Hosts(3, f"preflight{os.getpid()}") as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Cluster:
    """The hosts with a file for the outcome."""
    return Cluster(hosts, tmp_path)


def test_healthy_hosts_are_fit(cluster: Cluster) -> None:
    ended = cluster.run(*SHARED_CORES, "--data", "tests", "--output", str(cluster.json.parent), "--free-gb", "0.1")
    assert {each.code for each in ended.values()} == {0}, ended
    assert "3 nodes checked in" in ended["n1"].text and ended["n1"].text.rstrip().endswith("fit")
    assert not ended["n2"].text and not ended["n3"].text
    record = json.loads(cluster.json.read_text())
    assert [node["name"] for node in record["nodes"]] == cluster.hosts.names
    assert [node["address"] for node in record["nodes"]] == cluster.hosts.addresses
    assert [pair["nodes"] for pair in record["bandwidth_gb_per_s"]["ring"]] == [[0, 1], [1, 2], [2, 0]]
    assert all(pair["bandwidth"] > 0 for pair in record["bandwidth_gb_per_s"]["ring"])


def test_a_missing_node_is_named(cluster: Cluster) -> None:
    ended = cluster.run("--timeout", "60", missing="n2")
    assert {name: each.code for name, each in ended.items()} == {"n1": 6, "n3": 6}
    assert "n2: has not come within 60 s: see there whether it is up" in ended["n1"].text
    assert [each["nodes"] for each in cluster.findings() if not each["is_note"]] == [["n2"]]


def test_node_0_is_missing(cluster: Cluster) -> None:
    ended = cluster.run("--timeout", "8", missing="n1")
    for name in ("n2", "n3"):
        assert ended[name].code == 6
        assert f"error: n1: node 0 doesn't answer at 10.78.0.11:29501, asked from {name}" in ended[name].text


def test_a_node_that_differs_is_named(cluster: Cluster) -> None:
    ended = cluster.run("--no-bandwidth", "--timeout", "240", pretending="n3")
    assert {each.code for each in ended.values()} == {6}, ended
    problems = [each for each in cluster.findings() if not each["is_note"]]
    assert {tuple(each["nodes"]) for each in problems} == {("n3",)}
    assert [each["what"].split(",")[0] for each in problems] == ["torch 2.9.9", "its clock is 100 s behind node 0's"]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("no-such-host", "n1 (host n1): MASTER_ADDR no-such-host can't be resolved"),
        ("n1", "n1 (host n1): MASTER_ADDR n1 resolves to 127.0.1.1, which is a loopback address"),
        ("127.0.0.1", "n1 (host n1): MASTER_ADDR 127.0.0.1 is a loopback address"),
        ("10.78.0.12", "n1 (host n1): MASTER_ADDR 10.78.0.12 is no address of this node"),
    ],
)
def test_an_address_that_leads_nowhere(cluster: Cluster, tmp_path: Path, address: str, told: str) -> None:
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 n1\n")
    ended = cluster.run("--timeout", "3", MASTER_ADDR=address, hosts_file=hosts_file)
    assert {each.code for each in ended.values()} == {6}
    assert f"error: {told}" in ended["n1"].text


def test_two_nodes_that_reach_only_the_third(cluster: Cluster) -> None:
    cluster.hosts.cut("n2", "n3")
    try:
        ended = cluster.run(*SHARED_CORES, "--round-timeout", "20")
    finally:
        cluster.hosts.mend("n2", "n3")
    assert {each.code for each in ended.values()} == {6}, ended
    problems = [each for each in cluster.findings() if not each["is_note"]]
    assert [each["nodes"] for each in problems] == [["n2", "n3"]]
    assert problems[0]["what"].startswith("all-reduce between them fails (")


def test_a_throttled_node_is_named(cluster: Cluster) -> None:
    """Last: the brake stays on."""
    cluster.hosts.throttle("n2", "40mbit")
    ended = cluster.run(*SHARED_CORES)
    assert {each.code for each in ended.values()} == {6}, ended
    problems = [each for each in cluster.findings() if not each["is_note"]]
    assert [each["nodes"] for each in problems] == [["n2"]]
    assert problems[0]["what"].startswith("all-reduce with its neighbours reaches 0.00")
    assert "--exclude=n2" in problems[0]["remedy"]

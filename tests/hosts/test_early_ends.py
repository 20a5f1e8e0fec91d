"""What happens before the ranks of two hosts have met: all end, and say which host it was and why."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running
from tests.conftest import wait_until
from tests.hosts.conftest import Host, ip
from tests.hosts.test_two_hosts import FLAGS, ends

pytestmark = pytest.mark.hosts


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset(train=8, validation=8)


@pytest.fixture
def pair(hosts: list[Host], data: Path) -> Callable[..., list[Running]]:
    """`pair(flags of host 0, flags of host 1, **environment)`."""

    def start(*flags: str, **env: str) -> list[Running]:
        nodes = {"NNODES": "2", "MASTER_ADDR": hosts[0].address, "MAX_RESTARTS": "3", **env}
        return [hosts[rank].train(flags[rank], data, NODE_RANK=str(rank), **nodes) for rank in (0, 1)]

    return start


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("flag", "told"),
    [("--no-such-flag", "error: unknown flag --no-such-flag"), ("--device cuda", "this machine shows 0")],
)
def test_fault_64_a_host_where_the_run_cannot_begin_ends_both(
    pair: Callable[..., list[Running]], wrong: int, flag: str, told: str
) -> None:
    runs = pair(*(f"{FLAGS} {flag if rank == wrong else ''}" for rank in (0, 1)))
    assert ends(runs) == [2, 2], "\n".join(run.output for run in runs)
    other = runs[1 - wrong].output
    assert f"the run has not begun: node {wrong} (host{wrong}, " in other and told in other
    assert "Traceback" not in other and "restart" not in other


@pytest.mark.parametrize("warned", [0, 1])
def test_fault_64_a_signal_while_a_slow_host_still_starts_ends_both_to_be_requeued(
    pair: Callable[..., list[Running]], tmp_path: Path, warned: int
) -> None:
    # Ranks of host 1 read their libraries from a file server that hangs.
    hang = 'open(os.environ["HANGS"], "w").close(); time.sleep(9999)'
    (tmp_path / "sitecustomize.py").write_text(f'import os, time\nif os.environ.get("RANK") == "1": {hang}')
    hangs = tmp_path / "hangs"
    runs = pair(FLAGS, FLAGS, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", HANGS=str(hangs))
    wait_until(hangs.exists, lambda: runs[1].output)
    runs[warned].process.send_signal(signal.SIGUSR1)
    codes = ends(runs)
    # The second is that of a rank that has not come to handling signals; either brings a job back.
    assert codes in ([85, 85], [128 + signal.SIGUSR1] * 2), "\n".join(run.output for run in runs)
    assert "restart" not in runs[0].output + runs[1].output


def test_fault_64_a_firewall_that_opens_the_launchers_port_alone_is_told(
    hosts: list[Host], pair: Callable[..., list[Running]]
) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("needs iptables: apt-get install iptables")
    for host in hosts:
        for rule in ("-p tcp --dport 29500 -j ACCEPT", "-i eth0 -p tcp --syn -j DROP"):
            inside = ["nsenter", f"--net=/run/netns/{host.namespace}", "iptables", "-A", "INPUT", *rule.split()]
            if (done := subprocess.run(inside, capture_output=True, text=True)).returncode:
                pytest.skip(f"iptables {rule}: {done.stderr.strip()}")
    runs = pair(FLAGS, FLAGS, MAX_RESTARTS="0")
    assert ends(runs) == [5, 5], "\n".join(run.output for run in runs)
    told = runs[0].output + runs[1].output
    assert "host0 cannot connect to host1 (10.78.0.11, port " in told and "firewalls" in told
    assert "Traceback" not in told


def test_hosts_that_have_ipv6_alone_train_together(hosts: list[Host], data: Path, tmp_path: Path) -> None:
    addresses = [f"fd00:78::{10 + number}" for number in range(2)]
    for host, address in zip(hosts, addresses, strict=True):
        for words in ("addr flush dev eth0 scope global", f"addr add {address}/64 dev eth0 nodad"):
            assert ip("-n", host.namespace, *words.split()).returncode == 0
        host.names.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
    nodes = {"NNODES": "2", "MASTER_ADDR": addresses[0]}
    flags = f"{FLAGS} --epochs 1 --output {tmp_path} --experiment"
    runs = [hosts[rank].train(f"{flags} six", data, NODE_RANK=str(rank), **nodes) for rank in (0, 1)]
    assert ends(runs) == [0, 0], "\n".join(run.output for run in runs)


def test_a_host_that_does_not_know_the_secret_is_not_heard(hosts: list[Host], data: Path) -> None:
    nodes = {"NNODES": "2", "MASTER_ADDR": hosts[0].address, "JOIN_TIMEOUT": "5"}
    runs = [
        hosts[rank].train(FLAGS, data, NODE_RANK=str(rank), RUN_SECRET=secret, **nodes)
        for rank, secret in enumerate(("of this run", "guessed"))
    ]
    assert ends(runs) == [5, 5], "\n".join(run.output for run in runs)
    for rank, run in enumerate(runs):
        assert f"node {1 - rank} did not join" in run.output and "RUN_SECRET" in run.output

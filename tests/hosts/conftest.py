"""Several hosts on this machine: network namespaces with names of their own, joined by a bridge. Root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture

NET = "10.78.0"
_PREFIX = f"h{os.getpid() % 100000}"  # of the namespaces and interfaces of this test session
# Debian maps a machine's own name to 127.0.1.1, which the other hosts must not be told.
_START = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ip(8)."""
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class Host:
    """A machine of its own as far as network and names go; files and processes are shared."""

    def __init__(self, number: int, names: Path) -> None:
        self.number, self.name, self.address, self.names = number, f"host{number}", f"{NET}.{10 + number}", names
        self.namespace, self.cable = f"{_PREFIX}n{number}", f"{_PREFIX}v{number}"

    def connect(self, bridge: str) -> None:
        for words in (
            f"netns add {self.namespace}",
            f"link add {self.cable} type veth peer name eth0 netns {self.namespace}",
            f"link set {self.cable} master {bridge} up",
            f"-n {self.namespace} addr add {self.address}/24 dev eth0",
            f"-n {self.namespace} link set eth0 up",
            f"-n {self.namespace} link set lo up",
        ):
            done = ip(*words.split())
            if done.returncode:
                pytest.skip(f"ip {words}: {done.stderr.strip()}")

    def train(self, flags: str, data: Path, processes: int = 1, **env: str) -> Running:
        """Start distributed_train.sh here, as one of two nodes."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        script = [str(ROOT / "distributed_train.sh"), str(processes), str(data), *flags.split()]
        env = {"NNODES": "2", "NODE_RANK": str(self.number), **env}
        return Running([*inside, "sh", "-c", _START, "sh", self.name, str(self.names), *script], **env)

    def pull_cable(self) -> None:
        assert ip("link", "set", self.cable, "down").returncode == 0

    def kill(self) -> None:
        """End all processes here at once, as a crash of the kernel does, but for closing their connections."""
        for pid in ip("netns", "pids", self.namespace).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other, and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install iproute2 util-linux")
    made = [Host(number, tmp_path / f"hosts{number}") for number in range(2)]
    for host in made:
        host.names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
    bridge = f"{_PREFIX}b"
    try:
        if (done := ip("link", "add", bridge, "type", "bridge")).returncode:
            pytest.skip(f"no bridge: {done.stderr.strip()}")
        ip("link", "set", bridge, "up")
        for host in made:
            host.connect(bridge)
        yield made
    finally:
        for host in made:
            host.kill()
            ip("netns", "del", host.namespace)
            ip("link", "del", host.cable)
        ip("link", "del", bridge)


@pytest.fixture
def launch(hosts: list[Host]) -> Callable[..., list[Running]]:
    """`launch(flags, data, **environment)`: distributed_train.sh on every host."""
    return lambda flags, data, **env: [
        host.train(flags, data, **{"MASTER_ADDR": hosts[0].address, **env}) for host in hosts
    ]

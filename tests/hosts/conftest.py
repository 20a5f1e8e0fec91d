"""Several hosts on this machine: network namespaces with names of their own, joined by a bridge. Root only."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture

NET = "10.78.0"
_PREFIX = f"h{os.getpid() % 100000}"  # of the namespaces and interfaces of this test session
# Debian maps a machine's own name to 127.0.1.1, which the other hosts must not be told.
_START = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def ip(words: str, check: bool = True) -> str:
    """Run ip(8) and return what it prints."""
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True).stdout


class Host:
    """A machine of its own as far as network and names go; files and processes are shared."""

    def __init__(self, number: int, names: Path) -> None:
        self.number, self.name, self.address, self.names = number, f"host{number}", f"{NET}.{10 + number}", names
        self.namespace, self.cable = f"{_PREFIX}n{number}", f"{_PREFIX}v{number}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")

    def connect(self, bridge: str) -> None:
        ip(f"netns add {self.namespace}")
        ip(f"link add {self.cable} type veth peer name eth0 netns {self.namespace}")
        ip(f"link set {self.cable} master {bridge} up")
        ip(f"-n {self.namespace} addr add {self.address}/24 dev eth0")
        for device in ("eth0", "lo"):
            ip(f"-n {self.namespace} link set {device} up")

    def start(self, command: list[str], **env: str) -> Running:
        """Start a program here."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return Running([*inside, "sh", "-c", _START, "sh", self.name, str(self.names), *command], **env)

    def train(self, flags: str, data: Path, processes: int = 1, **env: str) -> Running:
        """Start distributed_train.sh here, as one of two nodes."""
        script = [str(ROOT / "distributed_train.sh"), str(processes), str(data), *flags.split()]
        return self.start(script, **{"NNODES": "2", "NODE_RANK": str(self.number), **env})

    def kill(self) -> None:
        """End all processes here at once, as a crash of the kernel does, but for closing their connections."""
        for pid in ip(f"netns pids {self.namespace}", check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other, and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install iproute2 util-linux")
    made, bridge = [Host(number, tmp_path / f"hosts{number}") for number in range(2)], f"{_PREFIX}b"
    try:
        ip(f"link add {bridge} type bridge")
        ip(f"link set {bridge} up")
        for host in made:
            host.connect(bridge)
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{shlex.join(error.cmd)}: {error.stderr.strip()}")
    finally:
        for host in made:
            host.kill()
            ip(f"netns del {host.namespace}", check=False)
            ip(f"link del {host.cable}", check=False)
        ip(f"link del {bridge}", check=False)


def launch(hosts: list[Host], flags: str, data: Path, **env: str) -> list[Running]:
    """Start distributed_train.sh on every host."""
    return [host.train(flags, data, **{"MASTER_ADDR": hosts[0].address, **env}) for host in hosts]

"""Several hosts on this machine: network namespaces with names of their own, joined by a bridge. Root only."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, Running
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import wait_until

NET = "10.78.0"
_PREFIX = f"h{os.getpid() % 100000}"  # of the namespaces of this test session
_START = 'hostname "$1"; mount --bind "$2" /etc/hosts; mount --bind "$3" "$4"; shift 4; exec "$@"'


def ip(words: str, check: bool = True) -> str:
    """Run ip(8) and return what it prints."""
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True).stdout


class Host:
    """A machine with its own network, name, /etc/hosts and disk (`folder`/disk). All else is shared."""

    def __init__(self, number: int, name: str, folder: Path) -> None:
        self.number, self.name, self.address = number, name, f"{NET}.{10 + number}"
        self.namespace, self.names, self.disk = f"{_PREFIX}-{name}", folder / f"{name}.hosts", folder / f"{name}.disk"
        # Debian maps a machine's own name to 127.0.1.1, which the other hosts must not be told.
        self.names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        for disk in (self.disk, folder / "disk"):
            disk.mkdir(exist_ok=True)

    def connect(self) -> None:
        ip(f"netns add {self.namespace}")
        ip(f"-n {_PREFIX} link add {self.name} type veth peer name eth0 netns {self.namespace}")
        ip(f"-n {_PREFIX} link set {self.name} master bridge up")
        ip(f"-n {self.namespace} addr add {self.address}/24 dev eth0")
        for device in ("eth0", "lo"):
            ip(f"-n {self.namespace} link set {device} up")

    def cable(self, state: str) -> None:
        """Pull its cable ("down"), or plug it in ("up")."""
        ip(f"-n {_PREFIX} link set {self.name} {state}")

    def inside(self, *command: str) -> list[str]:
        start = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount", "sh", "-ec", _START]
        return [*start, "sh", self.name, str(self.names), str(self.disk), str(self.disk.with_name("disk")), *command]

    def start(self, command: list[str], **env: str) -> Running:
        return Running(self.inside(*command), **env)

    def train(self, flags: str, data: Path, processes: int = 1, **env: str) -> Running:
        """Start distributed_train.sh here, as one of two nodes."""
        script = [str(ROOT / "distributed_train.sh"), str(processes), str(data), *flags.split()]
        return self.start(script, **{"NNODES": "2", "NODE_RANK": str(self.number), **env})

    def kill(self) -> None:
        """End all processes here at once, as a crash of the kernel does, but for closing their connections."""

        def killed() -> bool:
            pids = ip(f"netns pids {self.namespace}", check=False).split()
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(killed)


@contextmanager
def network(names: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Hosts that reach each other, and nothing else; their files are in `folder`. They end with the block."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install iproute2 util-linux")
    folder.mkdir(parents=True, exist_ok=True)
    hosts = [Host(number, name, folder) for number, name in enumerate(names)]
    try:
        try:
            ip(f"netns add {_PREFIX}")
            ip(f"-n {_PREFIX} link add bridge type bridge")
            ip(f"-n {_PREFIX} link set bridge up")
            for host in hosts:
                host.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{shlex.join(error.cmd)}: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            ip(f"netns del {host.namespace}", check=False)
        ip(f"netns del {_PREFIX}", check=False)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with network(["host0", "host1"], tmp_path / "hosts") as made:
        yield made


def launch(hosts: list[Host], flags: str, data: Path, **env: str) -> list[Running]:
    return [host.train(flags, data, **{"MASTER_ADDR": hosts[0].address, **env}) for host in hosts]

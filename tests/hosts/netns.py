"""Several hosts on one: network namespaces with an address and a host name each, joined by a bridge. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str:
    """What is missing here, or nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)" if missing else ""


class Hosts:
    """`count` hosts n1, n2, ... at 10.78.0.11, 10.78.0.12, ... The bridge has a namespace of its own, too."""

    def __init__(self, count: int, prefix: str) -> None:
        self.names = [f"n{i + 1}" for i in range(count)]
        self.addresses = [f"10.78.0.{11 + i}" for i in range(count)]
        self._prefix = prefix
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _make(self) -> None:
        switch = self._space("switch")
        _do(f"ip netns add {switch}")
        _do(f"ip -n {switch} link add bridge type bridge")
        _do(f"ip -n {switch} link set bridge up")
        for name, address in zip(self.names, self.addresses, strict=True):
            space = self._space(name)
            _do(f"ip netns add {space}")
            _do(f"ip -n {switch} link add to_{name} type veth peer name eth0 netns {space}")
            _do(f"ip -n {switch} link set to_{name} master bridge up")
            _do(f"ip -n {space} addr add {address}/24 dev eth0")
            _do(f"ip -n {space} link set eth0 up")
            _do(f"ip -n {space} link set lo up")

    def throttle(self, name: str, rate: str) -> None:
        """Let a host send no faster than `rate`, such as 20mbit."""
        _do(f"tc -n {self._space(name)} qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 400ms")

    def cut(self, name: str, other: str) -> None:
        """Let a host send nothing to another one any more."""
        _do(f"ip -n {self._space(name)} route add blackhole {self.addresses[self.names.index(other)]}/32")

    def mend(self, name: str, other: str) -> None:
        """Undo `cut`."""
        _do(f"ip -n {self._space(name)} route del blackhole {self.addresses[self.names.index(other)]}/32")

    def start(self, name: str, command: list[str], etc_hosts: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host; `etc_hosts` replaces /etc/hosts for it. Output and errors come together."""
        inside = f"hostname {name}; " + (f"mount --bind {etc_hosts} /etc/hosts; " if etc_hosts else "") + 'exec "$@"'
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._space(name),
                "unshare",
                "--uts",
                "--mount",
                "sh",
                "-c",
                inside,
                "-",
                *command,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def remove(self) -> None:
        """End what still runs, and remove the namespaces with their links."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
        for name in (*self.names, "switch"):
            subprocess.run(["ip", "netns", "del", self._space(name)], stderr=subprocess.DEVNULL)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)

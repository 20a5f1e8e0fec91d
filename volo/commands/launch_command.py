"""The command that starts this node's processes, from the environment that volo/commands/launch.sh describes.

    python volo/commands/launch_command.py N PROGRAM [flags]

It checks the environment (a mistake is one line, exit code 2), prints command and environment with DRY_RUN=1, and
becomes the command otherwise. Standard library only: it answers at once.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_LAUNCH = Path(__file__).resolve().parent / "launch.py"


class Mistake(Exception):
    """The environment asks for something that cannot work; the message is one line with the remedy."""


class Launch(NamedTuple):
    """The command that starts this node's processes, and the variables to set for it."""

    command: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """Return shell code: a line for each variable, then the command."""
        variables = [f"{name}={shlex.quote(value)} \\\n" for name, value in self.environment.items()]
        return "".join(variables) + shlex.join(self.command)


def compose(processes: int, program: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Return what starts `processes` processes of `program` (a file and its flags) on this node.

    Raises:
        Mistake: A variable is missing or out of range, or names something that other nodes cannot use.
    """
    nodes = _number(env, "NNODES", 1, least=1)
    prefixed = bool(env.get("LOG_DIR")) or nodes > 1
    command = [sys.executable, str(_LAUNCH), "--nproc-per-node", str(processes)]
    command += _several_nodes(nodes, env) if nodes > 1 else _one_node(env)
    command += ["--rdzv-id", _run_id(env)]
    if prefixed:
        command += ["--tee", "3"]
    if env.get("LOG_DIR"):
        command += ["--log-dir", env["LOG_DIR"]]
        _make_directory(env)
    return Launch([*command, *program], _environment(processes, prefixed, env))


def _make_directory(env: Mapping[str, str]) -> None:
    try:
        if not env.get("DRY_RUN"):
            Path(env["LOG_DIR"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"LOG_DIR={env['LOG_DIR']}: {error.strerror}") from None


def _environment(processes: int, prefixed: bool, env: Mapping[str, str]) -> dict[str, str]:
    patience = _number(env, "SHUTDOWN_TIMEOUT", _number(env, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 300, least=0), least=0)
    variables = {
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(_threads(processes)),
        "MAX_RESTARTS": str(_number(env, "MAX_RESTARTS", 0, least=0)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience),
    }
    if prefixed:
        # Not the flag, nor ${hostname}: torch 2.9 has neither.
        name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
        variables[name] = env.get(name) or f"[{socket.gethostname()}:${{rank}}] "
    return variables


def _one_node(env: Mapping[str, str]) -> list[str]:
    if _number(env, "NODE_RANK", 0, least=0):
        raise Mistake(f"NODE_RANK={env['NODE_RANK']}, but NNODES is 1: say how many nodes there are")
    # By its own name, which not every machine can resolve, the processes would not find each other.
    return ["--standalone"]


def _several_nodes(nodes: int, env: Mapping[str, str]) -> list[str]:
    rank = _node_rank(nodes, env)
    address = _master(env)
    port = _number(env, "MASTER_PORT", 29500, least=1, most=65535)
    if rank == 0 and not env.get("DRY_RUN") and not _is_own(address):
        raise Mistake(
            f"MASTER_ADDR={env['MASTER_ADDR']} ({address}) is not an address of this machine ({socket.gethostname()}), "
            "but NODE_RANK is 0: node 0 is the one that has this address"
        )
    joined = _number(env, "JOIN_TIMEOUT", 300, least=1)
    return [
        *("--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)),
        *("--join-timeout", str(joined), "--local-addr", _local_address(address, env)),
    ]


def _node_rank(nodes: int, env: Mapping[str, str]) -> int:
    name = "NODE_RANK"
    if not env.get(name) and "SLURM_STEP_NUM_NODES" in env:  # an srun step; SLURM_NODEID alone is in batch scripts, too
        name = "SLURM_NODEID"
    if not env.get(name):
        raise Mistake(f"NNODES={nodes} needs NODE_RANK: 0 on the node that has MASTER_ADDR, 1, 2, ... on the others")
    rank = _number(env, name, 0, least=0)
    if rank >= nodes:
        raise Mistake(f"{name}={rank}, but NNODES={nodes}: nodes are numbered from 0 to {nodes - 1}")
    return rank


def _master(env: Mapping[str, str]) -> str:
    """Return the IP address that MASTER_ADDR stands for; other machines can reach it."""
    name = env.get("MASTER_ADDR")
    remedy = "give the IP address of node 0 that the other nodes reach it by (ip -4 addr)"
    if not name:
        raise Mistake(f"NNODES={env['NNODES']} needs MASTER_ADDR: {remedy}")
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        raise Mistake(f"MASTER_ADDR={name}: {socket.gethostname()} can't resolve this name; {remedy}") from None
    address = next((each for each in found if "." in each), found[0])  # IPv4 where there is one
    if ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_unspecified:
        named = "" if name == address else f" is {address} on {socket.gethostname()}, which"
        raise Mistake(f"MASTER_ADDR={name}{named or ':'} no other node can reach; {remedy}")
    return address


def _local_address(master: str, env: Mapping[str, str]) -> str:
    """Return LOCAL_ADDR, or the address from which packets go to node 0."""
    address = env.get("LOCAL_ADDR")
    if address:
        if not env.get("DRY_RUN") and not _is_own(address):
            raise Mistake(f"LOCAL_ADDR={address} is not an address of this machine ({socket.gethostname()})")
        return address
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing
        except OSError as error:
            raise Mistake(
                f"MASTER_ADDR={master}: {socket.gethostname()} has no route to it ({error.strerror})"
            ) from None
        return probe.getsockname()[0]


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _run_id(env: Mapping[str, str]) -> str:
    run_id = env.get("RUN_ID") or "volo"
    if not re.fullmatch(r"[\w.-]+", run_id):
        raise Mistake(f"RUN_ID={run_id}: letters, digits, '.', '_' and '-' only; it is part of file names")
    return run_id


def _number(env: Mapping[str, str], name: str, default: int, least: int, most: int | None = None) -> int:
    text = env.get(name) or str(default)
    limits = f"from {least} to {most}" if most else f"of at least {least}"
    if not text.isdecimal() or not least <= int(text) <= (most or int(text)):
        raise Mistake(f"{name}={text}: a whole number {limits} is needed")
    return int(text)


def _threads(processes: int) -> int:
    """Return a process's share of the CPUs, and print a line that says so."""
    cpus = available_cpus()
    # Without GPUs one stays free: data loading runs beside the ranks, and oversubscribed cores are many times slower.
    free = not Path("/proc/driver/nvidia").exists()
    threads = max(1, int(cpus - free) // processes)
    kept = ", one of them left for data loading" if free else ""
    print(f"OMP_NUM_THREADS={threads}: {cpus:g} CPUs for {processes} processes{kept}", file=sys.stderr)
    return threads


def available_cpus(root: Path = Path("/")) -> float:
    """Return how many CPUs this process may use: the least of its affinity and the quotas of its cgroups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return count
    quotas = [float(count)]
    for _, controllers, path in groups:
        if controllers == "":
            top, read = root / "sys/fs/cgroup", _quota
        elif "cpu" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        group = top / path.lstrip("/")
        quotas += [read(each) for each in (group, *group.parents) if each.is_relative_to(top)]
    return min(quotas)


def _quota(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def _quota_v1(group: Path) -> float:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return float("inf") if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return float("inf")


def run(args: Namespace) -> int:
    """`volo launch`: what `distributed_train.sh` does in a checkout."""
    # Not a file of the package where that can be avoided: its folder would stand in sys.path.
    own, script = Path(__file__).resolve().parents[1] / "__main__.py", Path(sys.argv[0])
    program = script if script.name == "volo" and script.is_file() else own
    return main([str(args.processes), str(program), args.command, *args.flags])


def main(argv: Sequence[str]) -> int:
    """Print or become the command; `argv` is the number of processes, the program's file and its flags."""
    try:
        launch = compose(int(argv[0]), argv[1:], os.environ)
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    if os.environ.get("DRY_RUN"):
        print(launch)
        return 0
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.environment})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How the processes of this node are to be started, from the environment that volo/commands/launch.sh describes.

Standard library only, so that a mistake is told at once.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


class Mistake(Exception):
    """The environment asks for something that cannot work; the message is one line with the remedy."""


@dataclass(frozen=True)
class Launch:
    """The processes of this node.

    Attributes:
        program: A Python file and its flags.
        nodes: How many there are; `node_rank` is this one, from 0.
        address, port: Where the store of node 0 listens; port 0: any that is free.
        join_timeout: Seconds until all nodes must be there.
        restarts: How often the processes are started again after one was lost.
        patience: Seconds that processes that were told to end have for it.
        log_dir: Where what processes print is written, too.
        prefix: Of each printed line; None: lines come as they are.
    """

    processes: int
    program: tuple[str, ...]
    run_id: str
    restarts: int
    patience: int
    log_dir: str | None
    prefix: str | None
    nodes: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    join_timeout: int = 60

    def __str__(self) -> str:
        """Return shell code: the command of torchrun that starts the same processes."""
        where = ["--standalone"]
        if self.nodes > 1:
            where = [f"--nnodes={self.nodes}", f"--node-rank={self.node_rank}"]
            where += [f"--master-addr={self.address}", f"--master-port={self.port}"]
        flags = ["--nproc-per-node", str(self.processes), *where, "--max-restarts", str(self.restarts)]
        if self.prefix:
            flags += ["--tee", "3"]
        if self.log_dir:
            flags += ["--log-dir", self.log_dir]
        return shlex.join([sys.executable, "-m", "torch.distributed.run", *flags, *self.program])


def described(processes: int, program: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Return what the environment describes.

    Raises:
        Mistake: A variable is missing or out of range, or names something that other nodes cannot use.
    """
    nodes = _number(env, "NNODES", 1, least=1)
    restarts = _number(env, "MAX_RESTARTS", 0, least=0)
    if nodes == 1 and _number(env, "NODE_RANK", 0, least=0):
        raise Mistake(f"NODE_RANK={env['NODE_RANK']}, but NNODES is 1: say how many nodes there are")
    if nodes > 1 and restarts:
        raise Mistake(
            f"MAX_RESTARTS={restarts}: started by hand, several nodes do not start again together; Slurm's requeue "
            "(slurm/) and torchrun --max-restarts do that"
        )
    log_dir = env.get("LOG_DIR") or None
    default = f"[{socket.gethostname()}:${{rank}}] " if log_dir or nodes > 1 else None
    launch = Launch(
        processes,
        tuple(program),
        run_id=_run_id(env),
        restarts=restarts,
        patience=_number(env, "SHUTDOWN_TIMEOUT", 300, least=0),
        log_dir=log_dir,
        prefix=env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or default,
    )
    _make_directory(env)
    return launch if nodes == 1 else _several_nodes(launch, nodes, env)


def _make_directory(env: Mapping[str, str]) -> None:
    try:
        if env.get("LOG_DIR") and not env.get("DRY_RUN"):
            Path(env["LOG_DIR"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"LOG_DIR={env['LOG_DIR']}: {error.strerror}") from None


def _several_nodes(launch: Launch, nodes: int, env: Mapping[str, str]) -> Launch:
    rank = _node_rank(nodes, env)
    address = _master(env)
    if rank == 0 and not env.get("DRY_RUN") and not _is_own(address):
        raise Mistake(
            f"MASTER_ADDR={env['MASTER_ADDR']} ({address}) is not an address of this machine ({socket.gethostname()}), "
            "but NODE_RANK is 0: node 0 is the one that has this address"
        )
    return replace(
        launch,
        nodes=nodes,
        node_rank=rank,
        address=address,
        port=_number(env, "MASTER_PORT", 29500, least=1, most=65535),
        join_timeout=_number(env, "JOIN_TIMEOUT", 60, least=1),
    )


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

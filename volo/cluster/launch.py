"""How the processes of this node are to be started, from the environment that volo/commands/launch.sh describes.

Imports no torch, so that a mistake is told at once.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt.errors import UserError


@dataclass(frozen=True)
class Launch:
    """The processes of this node.

    Attributes:
        program: A Python file and its flags.
        restarts: How often the processes are started again after one was lost.
        patience: Seconds that processes that were told to end have for it.
        log_dir: Where what processes print is written, too.
        nodes: How many there are; `node_rank` is this one, from 0.
        address, port: Where the store of node 0 listens; port 0: any that is free.
        join_timeout: Seconds until all nodes must be there.
    """

    processes: int
    program: tuple[str, ...]
    restarts: int
    patience: int
    log_dir: str | None
    nodes: int
    node_rank: int
    address: str
    port: int
    join_timeout: int

    @property
    def prefix(self) -> str | None:
        """Of each printed line; None: lines come as they are."""
        return f"[{socket.gethostname()}:${{rank}}] " if self.log_dir or self.nodes > 1 else None


def described(processes: int, program: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Return what the environment describes.

    Raises:
        UserError: A variable is missing or out of range, or names something that other nodes cannot use.
    """
    nodes = _number(env, "NNODES", 1, least=1)
    if nodes > 1 and not env.get("NODE_RANK"):
        raise UserError(f"NNODES={nodes} needs NODE_RANK: 0 on the node that has MASTER_ADDR, 1, 2, ... on the others")
    launch = Launch(
        processes,
        tuple(program),
        restarts=_number(env, "MAX_RESTARTS", 0),
        patience=_number(env, "SHUTDOWN_TIMEOUT", 300),
        log_dir=env.get("LOG_DIR") or None,
        nodes=nodes,
        node_rank=_number(env, "NODE_RANK", 0, most=nodes - 1),
        address="127.0.0.1" if nodes == 1 else _master(env),
        port=0 if nodes == 1 else _number(env, "MASTER_PORT", 29500, least=1, most=65535),
        join_timeout=_number(env, "JOIN_TIMEOUT", 60, least=1),
    )
    if nodes > 1 and launch.restarts:
        raise UserError(
            f"MAX_RESTARTS={launch.restarts}: started by hand, several nodes do not start again together; Slurm's "
            "requeue (slurm/) and torchrun --max-restarts do that"
        )
    try:
        if launch.log_dir:
            Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"LOG_DIR={launch.log_dir}: {error.strerror}") from None
    return launch


def _master(env: Mapping[str, str]) -> str:
    """Return the IP address that MASTER_ADDR stands for."""
    name, remedy = env.get("MASTER_ADDR"), "give the IP address of node 0 that the other nodes reach it by"
    if not name:
        raise UserError(f"NNODES={env['NNODES']} needs MASTER_ADDR: {remedy}")
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"MASTER_ADDR={name}: {error.strerror}; {remedy}") from None
    if ipaddress.ip_address(address).is_loopback:  # as Debian maps a machine's own name to
        raise UserError(f"MASTER_ADDR={name} is {address} on {socket.gethostname()}; {remedy}")
    return address


def _number(env: Mapping[str, str], name: str, default: int, least: int = 0, most: int | None = None) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        limits = "on" if most is None else f"to {most}"
        raise UserError(f"{name}={text}: a whole number from {least} {limits} is needed")
    return int(text)

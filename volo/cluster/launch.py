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

_LEAST = {"MAX_RESTARTS": 0, "SHUTDOWN_TIMEOUT": 0, "NNODES": 1, "NODE_RANK": 0, "MASTER_PORT": 1, "JOIN_TIMEOUT": 1}
_ADDRESS = "give the IP address of node 0 that the other nodes reach it by"


@dataclass(frozen=True)
class Launch:
    """The processes of this node: how many, of which Python file with which flags, and the variables of the launcher.

    The address is where the store of node 0 listens, its port 0 any that is free.
    """

    processes: int
    program: tuple[str, ...]
    log_dir: str
    master_addr: str
    master_port: int
    nnodes: int = 1
    node_rank: int = 0
    max_restarts: int = 0
    shutdown_timeout: int = 300
    join_timeout: int = 60

    @property
    def prefix(self) -> str | None:
        """Of each printed line; None: lines come as they are."""
        return f"[{socket.gethostname()}:${{rank}}] " if self.log_dir or self.nnodes > 1 else None


def described(processes: int, program: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Return what the environment describes.

    Raises:
        UserError: A variable is missing or out of range, or names something that other nodes cannot use.
    """
    given = {name.lower(): _number(name, env[name], least) for name, least in _LEAST.items() if env.get(name)}
    nodes, rank = given.get("nnodes", 1), given.get("node_rank")
    if (rank or 0) >= nodes or (nodes > 1 and rank is None):
        numbers = f"from 0 to {nodes - 1}, 0 on the node that has MASTER_ADDR"
        raise UserError(f"NODE_RANK={'' if rank is None else rank}: NNODES={nodes} needs a number {numbers}")
    if nodes > 1 and "max_restarts" in given:
        raise UserError(
            "MAX_RESTARTS: started by hand, several nodes do not start again together; Slurm's requeue (slurm/) and "
            "torchrun --max-restarts do that"
        )
    address = _address(env) if nodes > 1 else "127.0.0.1"
    given["master_port"] = given.get("master_port", 29500) if nodes > 1 else 0
    launch = Launch(processes, tuple(program), env.get("LOG_DIR", ""), address, **given)
    try:
        if launch.log_dir:
            Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"LOG_DIR={launch.log_dir}: {error.strerror}") from None
    return launch


def _address(env: Mapping[str, str]) -> str:
    """Return the IP address that MASTER_ADDR stands for."""
    name = env.get("MASTER_ADDR")
    if not name:
        raise UserError(f"NNODES={env['NNODES']} needs MASTER_ADDR: {_ADDRESS}")
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"MASTER_ADDR={name}: {error.strerror}; {_ADDRESS}") from None
    if ipaddress.ip_address(address).is_loopback:  # as Debian maps a machine's own name to
        raise UserError(f"MASTER_ADDR={name} is {address} on {socket.gethostname()}; {_ADDRESS}")
    return address


def _number(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name}={text}: a whole number from {least} on is needed")
    return int(text)

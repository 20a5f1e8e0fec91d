"""Which node this is, how many there are, and how they reach node 0. Imports no torch."""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from tlt.errors import UserError
from volo.cluster.ranks import own_address

_DEFAULT_PORT = 29500
_RESOLVER_S = 10.0


class Unfit(UserError):
    """The machines are not fit for a run; the message names the node and the remedy."""

    exit_code = 6


@dataclass(frozen=True)
class Rendezvous:
    """This node among all.

    Attributes:
        names: Names of all nodes by rank; empty where they are not known.
        master: MASTER_ADDR as it was given; empty for a single node.
        port: The port of the preflight's store: MASTER_PORT + 1, so that the run finds its own port free.
    """

    rank: int
    nodes: int
    names: tuple[str, ...]
    master: str
    port: int

    def name(self, rank: int) -> str:
        """Return what messages call a node."""
        return self.names[rank] if self.names else f"node {rank}"


def rendezvous_from_environment(env: Mapping[str, str]) -> Rendezvous:
    """Read NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NODES, or Slurm's variables where those are not set.

    Raises:
        UserError: Something is missing or contradicts itself.
    """
    nodes = _number(env, "NNODES", _number(env, "SLURM_NNODES", 1))
    if nodes < 1:
        raise UserError("NNODES must be at least 1")
    if nodes == 1:
        return Rendezvous(0, 1, (), "", 0)
    if "NODE_RANK" not in env and _number(env, "SLURM_LOCALID", 0):
        raise UserError("the preflight runs once per node: start it with srun --ntasks-per-node=1")
    rank = _number(env, "NODE_RANK", _number(env, "SLURM_NODEID", -1))
    if not 0 <= rank < nodes:
        which = f"NODE_RANK {rank} is not one of 0 to {nodes - 1}" if rank >= 0 else "NODE_RANK is not set"
        raise UserError(f"{which}: with NNODES={nodes}, start the preflight on each node with its own, or by srun")
    if not env.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set: export the IPv4 address of node 0, as `hostname -I` shows it there")
    port = _number(env, "MASTER_PORT", _DEFAULT_PORT) + 1
    if not 1 < port < 65536:
        raise UserError(f"MASTER_PORT {port - 1} leaves no port after it for the preflight: choose 1024 to 65534")
    return Rendezvous(rank, nodes, _names(env, nodes), env["MASTER_ADDR"], port)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name) or default)
    except ValueError:
        raise UserError(f"{name}={env[name]!r} is not a whole number") from None


def _names(env: Mapping[str, str], nodes: int) -> tuple[str, ...]:
    given = env.get("NODES")
    text = given or env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    names = tuple(expand_hostlist(text)) if text else ()
    if given and len(names) != nodes:
        raise UserError(f"NODES names {len(names)} nodes and NNODES is {nodes}: name each node once")
    # For a step on some nodes of a job, Slurm does not say on which ones.
    return names if len(names) == nodes else ()


def addresses(rendezvous: Rendezvous) -> tuple[str, str]:
    """Return node 0's address and this node's own on the way there.

    Raises:
        Unfit: MASTER_ADDR is not usable (see `master_address`), or there is no route to node 0.
    """
    if rendezvous.nodes == 1:
        return "127.0.0.1", "127.0.0.1"
    address = master_address(rendezvous)
    try:
        return address, own_address(address)
    except OSError as error:
        name = rendezvous.name(rendezvous.rank)
        raise Unfit(f"{name}: no route to node 0 at {address} ({error.strerror}): bring its network up") from error


def master_address(rendezvous: Rendezvous) -> str:
    """Return node 0's IPv4 address, as this node sees it.

    Raises:
        Unfit: It can't be resolved, is a loopback address, or is no address of node 0.
    """
    here = f"{rendezvous.name(rendezvous.rank)} (host {socket.gethostname()})"
    try:
        address = within(_RESOLVER_S, lambda: socket.gethostbyname(rendezvous.master))
    except (OSError, TimeoutError, UnicodeError) as error:
        raise Unfit(
            f"{here}: MASTER_ADDR {rendezvous.master} can't be resolved ({error}): export node 0's IPv4 address in its "
            "rendezvous, or mend /etc/hosts or DNS on this node"
        ) from error
    if address.startswith("127."):
        resolved = "" if address == rendezvous.master else f" resolves to {address}, which"
        raise Unfit(
            f"{here}: MASTER_ADDR {rendezvous.master}{resolved} is a loopback address, which no other node can reach: "
            "export node 0's IPv4 address, as `hostname -I` shows it there"
        )
    if rendezvous.rank == 0 and not _is_own(address):
        raise Unfit(
            f"{here}: MASTER_ADDR {rendezvous.master} is no address of this node, which is node 0: export one that "
            "`hostname -I` shows here, or put the node that has it first"
        )
    return address


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def own_name_note() -> str | None:
    """Return a note if this host's own name doesn't resolve, or to loopback; the preflight doesn't need the name."""
    try:
        address = within(_RESOLVER_S, lambda: socket.gethostbyname(socket.gethostname()))
    except (OSError, TimeoutError, UnicodeError):
        return "the own host name can't be resolved: harmless, nodes are addressed by IP here"
    if address.startswith("127."):
        return f"the own host name resolves to {address}: harmless, as long as MASTER_ADDR is no such name"
    return None


T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, or raise its exception: dead storage or a dead name server must not block the preflight.

    Raises:
        TimeoutError: The call takes longer than `seconds`. Its thread is left behind.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()


# One name: plain text and [lists of numbers and ranges]; commas inside brackets belong to it.
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 65536  # names of one range, as many as Slurm writes out


def expand_hostlist(text: str) -> list[str]:
    """Return the names that `n[1-3,08-10],login1` stands for, in that order.

    Names are divided by commas or spaces. Numbers keep the zeros that the start of their range has. With several
    brackets, as in `r[1-2]n[1-2]`, the last one counts first.

    Raises:
        UserError: `text` is no such list.
    """
    names = []
    for name in _NAME.findall(text):
        parts = [_numbers(numbers) if numbers else [plain] for numbers, plain in _PART.findall(name)]
        names += ["".join(choice) for choice in product(*parts)]
    if re.sub(r"[\s,]", "", _NAME.sub("", text)) or not names:
        raise UserError(f"node list {text!r}: expected names such as n[1-3,5],gpu7 (SLURM_JOB_NODELIST, NODES)")
    return names


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        found = _RANGE.fullmatch(item)
        low, high = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(high) - int(low) < _MOST:
            raise UserError(f"node list: [{text}] holds {item!r}, which is no number and no range such as 01-16")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers

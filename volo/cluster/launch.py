"""How this process was started: its rank in the run and its place on its machine, by the variables of its launcher.

torchrun's names count first; `volo launch`, Ray Train and many clusters set them, too, though not always all of them.
What is missing is taken from another launcher that means the same processes.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tlt.errors import UserError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_OTHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", _PER_NODE),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE"),  # Cray's
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),  # MVAPICH
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),  # DeepSpeed
)


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together."""

    rank: int = 0  # -1 where it is missing
    local_rank: int = 0
    size: int = 1
    local_size: int | None = 1  # how many run on this machine; None where nobody tells
    address: str | None = None  # of rank 0's machine; None where nobody tells
    port: int = 29500  # at which rank 0 listens there
    threads_set: bool = False  # whether the user has set OMP_NUM_THREADS

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are on this machine, and no other one has to be let in."""
        return self.local_size == self.size


def launch_of(env: Mapping[str, str], local_rank_flag: int = 0) -> Launch:
    """Return what the launcher has set in the environment `env`; a single process where there is none.

    `local_rank_flag` is the value of `--local-rank`, which old launchers give in place of LOCAL_RANK.

    Raises:
        UserError: A variable that has to be a number is none.
    """
    numbers, *others = (_numbers(env, names) for names in (_TORCHRUN, *_OTHERS))
    # The launcher of most ranks counts: it may have been started by another one, with fewer.
    others = sorted((row for row in others if "rank" in row and row.get("size", 1) > 1), key=lambda row: -row["size"])
    numbers = numbers or (others[0] if others else {})
    for row in others:
        if all(numbers.get(name, row[name]) == row[name] for name in ("rank", "size")):
            numbers = row | numbers
    size, address = numbers.get("size", 1), env.get("MASTER_ADDR") or None
    rank = numbers.get("rank", -1) if size > 1 else 0
    # Kubeflow tells the first pod "localhost", and no pod of how many processes it has.
    elsewhere = not _is_loopback(address) or ("KUBERNETES_SERVICE_HOST" in env and "local_rank" not in numbers)
    local_size = numbers.get("local_size", None if elsewhere and size > 1 else size)
    local_rank = numbers.get("local_rank", local_rank_flag or (rank if local_size == size else 0))
    by_slurm = size > 1 and _numbers(env, _OTHERS[1]).items() >= {("rank", rank), ("size", size)}
    if by_slurm and address is None and local_size != size:  # the first of "node[01-04],gpu7"
        hosts = re.match(r"([^,\[]|\[[^\]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
        address = re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts[0]) if hosts else None
    # Runs on one machine must not meet at one port; mpirun is the parent of all its processes.
    port = 29500 if "MASTER_ADDR" in env else 20000 + int(env.get("SLURM_JOB_ID") or os.getppid()) % 20000
    # A hook of enroot sets 1 thread for NVIDIA's image, and what torchrun would, but for LOCAL_WORLD_SIZE.
    hook = by_slurm and "WORLD_SIZE" in env and "LOCAL_WORLD_SIZE" not in env and env.get("OMP_NUM_THREADS") == "1"
    port = _number(env, "MASTER_PORT", port) if size > 1 else port  # Kubernetes names its services so, too
    return Launch(rank, local_rank, size, local_size, address, port, "OMP_NUM_THREADS" in env and not hook)


def _numbers(env: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Return what there is of a launcher that tells the size: RANK alone is somebody else's."""
    named = dict(zip(("rank", "local_rank", "size", "local_size"), names, strict=True))
    return {key: _number(env, name) for key, name in named.items() if env.get(name) and env.get(named["size"])}


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name) or str(default)
    if name == _PER_NODE:  # such as "4(x2),3": four on each of two nodes, three on the next
        counts = [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
        text = [*counts[int(env.get("SLURM_NODEID") or 0) :], *counts, text][0]
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} in the environment: a whole number is needed") from None


def _is_loopback(address: str | None) -> bool:
    """Whether no other machine is meant. A machine's own name may mean a loopback address there, and none elsewhere."""
    with suppress(ValueError):
        return address is None or ipaddress.ip_address(address).is_loopback
    return address == "localhost"

"""How this process was started: its rank in the run and its place on its machine, from its launcher's variables.

torchrun's names take precedence. `volo launch`, Ray Train and many clusters set them too, but not always all of them.
Missing values come from the variables of another launcher if they describe the same processes.
"""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tlt.errors import UserError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", _PER_NODE)
_OTHER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _SLURM,
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE"),  # Cray MPICH
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),  # MVAPICH
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),  # DeepSpeed
)


@dataclass(frozen=True)
class Launch:
    """The place of this process among all processes that a launcher started together."""

    rank: int = 0  # -1 if the launcher doesn't set it
    local_rank: int = 0
    size: int = 1
    local_size: int | None = 1  # number of ranks on this machine; None if unknown
    address: str | None = None  # of rank 0's machine; None if unknown
    port: int = 29500  # port at which rank 0 listens
    threads_set: bool = False  # whether the user has set OMP_NUM_THREADS

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are on this machine, so that rank 0 need not accept connections from others."""
        return self.local_size == self.size


def launch_of(env: Mapping[str, str], local_rank_flag: int = 0) -> Launch:
    """Return what the launcher has set in the environment `env`; a single process if there is no launcher. Raise
    UserError if the value of a variable is not a whole number. `local_rank_flag` is the value of `--local-rank`, which
    old launchers pass instead of setting LOCAL_RANK."""
    numbers, *rows = (_numbers(env, names) for names in (_TORCHRUN, *_OTHER_LAUNCHERS))
    # If several launchers are nested, the one with the most ranks counts.
    rows = sorted((row for row in rows if "rank" in row and row.get("size", 1) > 1), key=lambda row: -row["size"])
    numbers = numbers or (rows[0] if rows else {})
    for row in rows:
        if all(numbers.get(name, row[name]) == row[name] for name in ("rank", "size")):
            numbers = row | numbers
    size = numbers.get("size", 1)
    address = env.get("MASTER_ADDR") or None
    rank = numbers.get("rank", -1) if size > 1 else 0
    # Kubeflow sets MASTER_ADDR=localhost in the first pod, and sets the number of local processes in no pod.
    elsewhere = not _is_loopback(address) or ("KUBERNETES_SERVICE_HOST" in env and "local_rank" not in numbers)
    local_size = numbers.get("local_size", None if elsewhere and size > 1 else size)
    local_rank = numbers.get("local_rank", local_rank_flag or (rank if local_size == size else 0))
    by_slurm = size > 1 and _numbers(env, _SLURM).items() >= {("rank", rank), ("size", size)}
    if by_slurm and address is None and local_size != size:  # take the first host of, e.g., "node[01-04],gpu7"
        hosts = re.match(r"([^,\[]|\[[^\]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
        address = re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts[0]) if hosts else None
    # Two runs on one machine need different ports. All processes of an mpirun have the same parent.
    port = 29500 if "MASTER_ADDR" in env else 20000 + int(env.get("SLURM_JOB_ID") or os.getppid()) % 20000
    # enroot's hook for NVIDIA images sets OMP_NUM_THREADS=1, and torchrun's variables except LOCAL_WORLD_SIZE.
    hook = by_slurm and "WORLD_SIZE" in env and "LOCAL_WORLD_SIZE" not in env and env.get("OMP_NUM_THREADS") == "1"
    port = _number(env, "MASTER_PORT", port) if size > 1 else port  # Kubernetes may set this name for a service
    return Launch(rank, local_rank, size, local_size, address, port, "OMP_NUM_THREADS" in env and not hook)


def _numbers(env: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Return the launcher's values by name; empty if it doesn't set the size, since RANK alone may mean anything."""
    named = dict(zip(("rank", "local_rank", "size", "local_size"), names, strict=True))
    return {key: _number(env, name) for key, name in named.items() if env.get(name) and env.get(named["size"])}


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name) or str(default)
    if name == _PER_NODE:  # "4(x2),3" means four tasks on each of two nodes and three on the next
        counts = [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
        text = [*counts[int(env.get("SLURM_NODEID") or 0) :], *counts, text][0]
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} in the environment: a whole number is needed") from None


def _is_loopback(address: str | None) -> bool:
    """Whether `address` can only mean this machine. A name is not enough: other machines may resolve it otherwise."""
    with suppress(ValueError):
        return address is None or ipaddress.ip_address(address).is_loopback
    return address == "localhost"

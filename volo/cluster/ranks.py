"""The rank of this process in a run, by the variables of torchrun, mpirun or srun. Imports no torch."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# What others call them; the first that is there counts: Slurm starts the daemons of Open MPI by srun, and sets MPICH's
# variables beside its own.
_OTHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "of srun"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
_PR_SET_PDEATHSIG = 1


def adopt_launcher(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of mpirun or of an `srun` step of several tasks, unless torchrun has."""
    theirs = {**env, **_tasks_here(env)}
    for names in _OTHERS:
        if "WORLD_SIZE" not in env and all(name in theirs for name in names[:3]) and int(theirs[names[2]]) > 1:
            env.update({own: theirs[name] for own, name in zip(_TORCHRUN, names, strict=True) if name in theirs})


def _tasks_here(env: Mapping[str, str]) -> dict[str, str]:
    """Return how many tasks of the `srun` step are on this machine, if Slurm tells it."""
    # "4(x2),3": four tasks on each of the first two nodes, three on the next.
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", next((env[name] for name in names if name in env), ""))
    per_node = [tasks for tasks, nodes in counts for _ in range(int(nodes or 1))]
    return {"of srun": per_node[min(int(env.get("SLURM_NODEID", "0")), len(per_node) - 1)]} if per_node else {}


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Have Linux tell this process to save and end (SIGTERM) when the agent that started it ends, even by kill -9."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in env:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.kill(int(env.get("LAUNCH_PID", os.getppid())), 0)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def ranks_from_environment(env: Mapping[str, str], local_rank_flag: int = 0) -> tuple[int, int, int]:
    """Return (rank, local rank, world size), without a launcher (0, flag, 1)."""
    size = int(env.get("WORLD_SIZE", "1"))
    return int(env["RANK"]) if size > 1 else 0, int(env.get("LOCAL_RANK", local_rank_flag)), size


def local_size_from_environment(env: Mapping[str, str]) -> int | None:
    """Return how many processes of the run are on this machine; None where there are several, and the launcher doesn't
    tell."""
    local_size = env.get("LOCAL_WORLD_SIZE") or ("1" if ranks_from_environment(env)[2] == 1 else None)
    return int(local_size) if local_size else None


def cpus_of_rank(env: Mapping[str, str], free: int = 0) -> int:
    """Return how many CPUs this rank has, at least 1; all ranks here leave `free` to others."""
    own, together = cpus_of_ranks(env)
    return max(1, int(min(own - free, (together - free) / (local_size_from_environment(env) or 1))))


def cpus_of_ranks(env: Mapping[str, str]) -> tuple[int, float]:
    """Return how many CPUs this process may run on, and how many the ranks of this machine have together: those of the
    `srun` step, else those of the process that started this one, but no more than a cgroup lets them use at a time.

    A rank that its launcher has confined to its own CPUs (srun --cpu-bind, mpirun --bind-to) has fewer than all.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1, os.cpu_count() or 1
    own = together = len(os.sched_getaffinity(0))
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_CPUS_ON_NODE" in env:
        together = int(env["SLURM_CPUS_ON_NODE"])
    else:
        with suppress(OSError):
            together = len(os.sched_getaffinity(os.getppid()))
    return own, min(together, cpu_quota())


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs the cgroups (version 2) of this process let it use at a time; infinity without a limit."""
    quotas, top = [math.inf], root / "sys/fs/cgroup"
    with suppress(OSError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = top / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(top) and (each / "cpu.max").exists():
                quota, period = (each / "cpu.max").read_text().split()
                quotas += [int(quota) / int(period)] if quota != "max" else []
    return min(quotas)


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has restarted these processes."""
    return sum(int(env.get(name) or 0) for name in ("LAUNCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def launch_id(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher's id, None without one; torchrun's is "none" unless the user sets it."""
    found = env.get("TORCHELASTIC_RUN_ID")
    return found if found != "none" else None

"""The rank of this process in a run, read from the variables of torchrun, srun or mpirun. Imports no torch."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

# Rank, local rank, number of processes, number on this machine: variables of Open MPI; of MPICH and Intel MPI.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
BOUND_GPU = "VOLO_BOUND_GPU"  # the PCI address of the GPU beside which a process was bound
_PR_SET_PDEATHSIG = 1
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def adopt_mpi(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of mpirun, unless torchrun has set them.

    The variables of an `srun` step win over those that Slurm sets for MPI, but not over those of Open MPI, which starts
    its daemons by `srun`.
    """
    names = _OPEN_MPI if _OPEN_MPI[0] in env else _HYDRA
    if "RANK" in env or not all(name in env for name in names) or int(env[names[2]]) == 1:
        return
    if names is _OPEN_MPI or ranks_from_environment(env)[2] == 1:
        env.update({own: env[theirs] for own, theirs in zip(_TORCHRUN, names, strict=True)})
        # Runs on one machine must not meet at one port; mpirun is the parent of all its processes there.
        env.setdefault("MASTER_PORT", str(20000 + os.getppid() % 20000))


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
    """Return (rank, local rank, world size) from torchrun's variables, else from an `srun` step, else (0, flag, 1)."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env.get("LOCAL_RANK", local_rank_flag)), int(env["WORLD_SIZE"])
    # SLURM_NTASKS is also set in a batch script that starts a single process; the step's count is set by srun alone.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return 0, int(env.get("LOCAL_RANK", local_rank_flag)), 1


def local_size_from_environment(env: Mapping[str, str]) -> int | None:
    """Return how many processes of the run are on this machine: from torchrun, else from an `srun` step, else 1.

    None where there are several processes, and the launcher doesn't set it.
    """
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    if ranks_from_environment(env)[2] == 1:
        return 1
    # "4(x2),3": four tasks on each of the first two nodes, three on the next.
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", next((env[name] for name in names if name in env), ""))
    per_node = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
    return per_node[min(int(env.get("SLURM_NODEID", "0")), len(per_node) - 1)] if per_node else None


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
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_CPUS_ON_NODE" in env:
        together = int(env["SLURM_CPUS_ON_NODE"])
    else:
        with suppress(OSError):
            together = len(os.sched_getaffinity(os.getppid()))
    return own, min(together, cpu_quota())


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs the cgroups of this process let it use at a time; infinity where they don't say."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return math.inf
    quotas = [math.inf]
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
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _quota_v1(group: Path) -> float:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return math.inf if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has restarted these processes."""
    return sum(int(env.get(name) or 0) for name in ("LAUNCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def launch_id(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher's id, None without one; torchrun's is "none" unless the user sets it."""
    found = env.get("LAUNCH_ID") or env.get("TORCHELASTIC_RUN_ID")
    return found if found != "none" else None


def own_address(target: str) -> str:
    """Return this machine's own address on the way to `target`.

    Raises:
        OSError: There is no route, or no such name.
    """
    family, *_, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])

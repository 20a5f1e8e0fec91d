"""The rank of this process in a run, by the variables of torchrun, mpirun or srun. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

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
    # Such as "4(x2)": four tasks on each of two nodes.
    counts = (env.get(name, "") for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
    here = next((found[0] for count in counts if (found := re.match(r"\d+", count))), None)
    theirs = {**env, **({"of srun": here} if here else {})}
    for names in _OTHERS:
        if "WORLD_SIZE" not in env and all(name in theirs for name in names[:3]) and int(theirs[names[2]]) > 1:
            env.update({own: theirs[name] for own, name in zip(_TORCHRUN, names, strict=True) if name in theirs})


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Have Linux tell this process to save and end (SIGTERM) when the agent that started it ends, even by kill -9."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in env:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.kill(int(env.get("LAUNCH_PID", os.getppid())), 0)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


class Ranks(NamedTuple):
    """This process among all processes of the run, and among those of its machine."""

    rank: int
    local_rank: int
    size: int
    local_size: int


def ranks_from_environment(env: Mapping[str, str], local_rank_flag: int = 0) -> Ranks:
    """Return what a launcher has set; all ranks are on this machine where it doesn't tell how many."""
    size = int(env.get("WORLD_SIZE", "1"))
    local_size = int(env.get("LOCAL_WORLD_SIZE", size))
    return Ranks(int(env["RANK"]) if size > 1 else 0, int(env.get("LOCAL_RANK", local_rank_flag)), size, local_size)


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has restarted these processes."""
    return sum(int(env.get(name) or 0) for name in ("LAUNCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def launch_id(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher's id, None without one; torchrun's is "none" unless the user sets it."""
    found = env.get("TORCHELASTIC_RUN_ID")
    return found if found != "none" else None

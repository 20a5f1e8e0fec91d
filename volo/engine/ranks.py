"""Which process of a run this one is, from what torchrun or srun put into the environment. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping


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

    None where there are several processes, and the launcher doesn't say.
    """
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    if ranks_from_environment(env)[2] == 1:
        return 1
    # "4(x2),3": four tasks on each of the first two nodes, three on the next.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    per_node = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
    node = int(env.get("SLURM_NODEID", "0"))
    return per_node[node] if node < len(per_node) else None

"""The global batch of a resumed run: the same on another number of processes, where they can share it."""

from __future__ import annotations

from typing import Any

KEY = "batch"


def batch_record(batch_size: int, steps: int, world_size: int, asked_steps: int) -> dict[str, int]:
    """What a checkpoint tells of the batch: images of an update, processes, and how many of each the flags ask for."""
    return {"global": batch_size * steps * world_size, "world_size": world_size, "asked": batch_size * asked_steps}


def steps_to_keep(checkpoint: dict[str, Any], batch_size: int, steps: int, world_size: int) -> tuple[int, str | None]:
    """Return the accumulation steps with which a run goes on, and what a user should know.

    The global batch is kept if only the number of processes has changed and full batches make it up; then the images of
    every update are the same. What the flags ask for otherwise is done, and said.
    """
    recorded = checkpoint.get(KEY)
    if not isinstance(recorded, dict) or not all(isinstance(recorded.get(k), int) for k in batch_record(1, 1, 1, 1)):
        return steps, None
    before, now, each = recorded["global"], batch_size * steps * world_size, batch_size * world_size
    if before == now or before < 1:
        return steps, None
    if recorded["asked"] == batch_size * steps and before % each == 0:
        kept = before // each
        return kept, (
            f"{recorded['world_size']} processes before, {world_size} now: {kept} accumulation steps, not {steps}, "
            f"keep the global batch of {before}"
        )
    return steps, f"warning: the global batch was {before}, it is {now} now; {_remedy(before, batch_size, world_size)}"


def _remedy(wanted: int, batch_size: int, world_size: int) -> str:
    fitting = [size for size in range(batch_size, 0, -1) if wanted % (size * world_size) == 0]
    if not fitting:
        return f"{world_size} processes can't share {wanted} images evenly"
    size = fitting[0]
    return f"-b {size} --grad-accum-steps {wanted // (size * world_size)} would keep it"

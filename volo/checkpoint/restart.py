"""Processes that a launcher has started again go on in the run directory of their launch, from its newest checkpoint.

`distributed_train.sh` with MAX_RESTARTS=N and `torchrun --max-restarts N` both tell how often they have done so, and
have an id that stays the same.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from volo.cluster.ranks import launch_id, restarts
from volo.record.run_directory import DEFAULT_ROOT


class Continued(NamedTuple):
    """A run that this launch has begun: its directory, and what `--resume` is to be there."""

    directory: Path
    resume: str


def continued_run(args: Namespace) -> Continued | None:
    """The run that this launch has begun before; None for a first start, or one that had no directory yet."""
    if not restarts() or launch_id() is None:
        return None
    records = [*Path(args.output or DEFAULT_ROOT).glob("*/run.json")]
    if args.resume not in ("", "auto"):
        records.append(Path(args.resume).parent / "run.json")
    begun = [file for file in records if _launch_of(file) == launch_id()]
    if not begun:
        return None
    directory = max(begun, key=lambda file: file.stat().st_mtime).parent
    return Continued(directory, "auto" if any(directory.glob("*.pth.tar")) else args.resume)


def _launch_of(file: Path) -> str | None:
    """Of the newest start in a run.json."""
    try:
        return json.loads(file.read_text())[-1].get("launch")
    except (OSError, ValueError, LookupError, AttributeError):
        return None

"""`benchmark.py checkpoint`: how long training waits for a save, and how long the verification of a checkpoint takes.

The state is that of a run (weights, two moments of AdamW, moving average), and is saved as `train.py` saves it. Forward
passes of one image stand for training: alone, and while a save is being written.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

from benchmarks.timing import seconds_of
from tlt.errors import UserError
from tlt.io.weights import read_checkpoint
from volo import models as models  # registers them with timm
from volo.checkpoint.checkpoint import LAST, CheckpointDir
from volo.checkpoint.saver import SavePolicy, Saver
from volo.checkpoint.train_state import TrainState
from volo.cluster.distributed import choose_device


@dataclass(frozen=True)
class SaveTimes:
    """Seconds, as medians over the repeats without the first save; bytes of the file."""

    bytes: int
    synchronous_blocked: float
    first_asynchronous_blocked: float  # after the first update, when memory is allocated
    asynchronous_blocked: float
    asynchronous_written: float
    forward_alone: float
    forward_during_write: float
    verified: float


class _Silent:
    """A logger that only records saves."""

    def __init__(self) -> None:
        self.saves: list[dict[str, Any]] = []

    def line(self, text: str) -> None:
        pass

    def event(self, kind: Any, **fields: Any) -> None:
        self.saves.append(fields)

    def sync(self) -> None:
        pass


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    device = choose_device(args.device, 0)
    if not Path(args.output).is_dir():
        raise UserError(f"--output {args.output} is not a directory")
    try:
        model = timm.create_model(args.model).to(device)
    except RuntimeError as error:
        raise UserError(f"--model {args.model}: {error}") from error
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=args.output) as directory:
        found = measure(state_of(model, not args.no_ema), Path(directory), args.repeats)
    shown = {"model": args.model, "device": str(device), "torch": torch.__version__, "cpu": platform.machine()}
    print(json.dumps(shown | asdict(found)) if args.json else _table(args.model, found), flush=True)
    return 0


def state_of(model: nn.Module, ema: bool) -> TrainState:
    """Return the state of a run after its first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, optimizer, ema=ModelEmaV3(model) if ema else None, updates_per_epoch=10**9)


def measure(state: TrainState, directory: Path, repeats: int) -> SaveTimes:
    """Save `repeats` times synchronously and asynchronously, to files in `directory`."""
    parameter = next(state.model.parameters())
    size = getattr(state.model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    image = torch.zeros(1, *size, device=parameter.device)
    state.model.eval()

    def forward() -> float:
        with torch.inference_mode():
            return seconds_of(lambda: state.model(image), image.device)

    alone = [forward() for _ in range(repeats + 1)][1:]
    during: list[float] = []
    told = {kind: _saves(state, directory, kind, repeats, forward, during) for kind in (True, False)}
    blocked = [save["blocked_seconds"] for save in told[False]]
    verified = [seconds_of(lambda: read_checkpoint(directory / LAST), image.device) for _ in range(repeats)]
    return SaveTimes(
        bytes=(directory / LAST).stat().st_size,
        synchronous_blocked=statistics.median(save["blocked_seconds"] for save in told[True]),
        first_asynchronous_blocked=blocked[0],
        asynchronous_blocked=statistics.median(blocked[1:]),
        asynchronous_written=statistics.median(save["seconds"] for save in told[False][1:]),
        forward_alone=statistics.median(alone),
        forward_during_write=statistics.median(during),
        verified=statistics.median(verified),
    )


def _saves(
    state: TrainState,
    directory: Path,
    synchronous: bool,
    repeats: int,
    forward: Callable[[], float],
    during: list[float],
) -> list[dict[str, Any]]:
    """Save, once more if asynchronous, as the first save allocates memory; call `forward` while a save is written."""
    told = _Silent()
    saver = Saver(state, CheckpointDir(directory), told, SavePolicy(every_updates=1, synchronous=synchronous))
    for _ in range(repeats if synchronous else repeats + 1):
        state.update += 1
        saver.after_update()
        while not synchronous and not saver.idle:
            during.append(forward())
            saver.poll()
    saver.finish()
    return told.saves


def _table(model: str, found: SaveTimes) -> str:
    gib = found.bytes / 2**30
    rows = [
        ("synchronous save: training waits", found.synchronous_blocked),
        ("asynchronous save: training waits", found.asynchronous_blocked),
        ("    at the first update: gets its memory", found.first_asynchronous_blocked),
        ("    written in the background", found.asynchronous_written),
        ("forward pass of one image, alone", found.forward_alone),
        ("    while a save is being written", found.forward_during_write),
        (f"read and verified ({found.verified / gib:.2f} s/GiB)", found.verified),
    ]
    lines = [f"{model}: {gib:.2f} GiB; torch {torch.__version__}, {torch.get_num_threads()} threads"]
    return "\n".join(lines + [f"{name:42} {seconds:8.3f} s" for name, seconds in rows])

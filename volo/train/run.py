"""What a run is: its arguments, settled before anything is built, what surrounds its training, and what it trains with.

A run on sixty images is not a small run on ImageNet. The published defaults (128 images per device, 20 epochs of
warm-up, 10 of cool-down, 10 checkpoints) stand wherever they make sense. What is given on the command line or in a
recipe is never changed, but for the accumulation steps that keep a resumed run's global batch on other processes.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tlt.api import Loader
from tlt.data.loader import EvalLoader
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import World
from volo.cluster.watchdog import StopGuard
from volo.config.args import FrozenArgs, TrainArgs, checked_settings
from volo.config.flag_rules import check_drop_path
from volo.config.flags_train import CYCLIC_SCHEDULES
from volo.record.logger import Logger
from volo.record.metrics import Arithmetic
from volo.record.run_directory import RunLock
from volo.train.architecture import known_config
from volo.train.criterion import Criterion
from volo.train.dense_score import DenseScore
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule

if TYPE_CHECKING:
    from volo.train.distillation import Distillation

BATCH_KEY = "batch"  # of a checkpoint
_HORIZONS = 5  # of the moving average in a run, 1 / (1 - decay) updates each: 0.7 % of it are the initial weights then
_TOLD_SHARE = 0.1  # of them, from which on a warning tells of it
_LEAST_UPDATES, _LARGEST_BATCH = 4, 128  # in an epoch, and images of a device, where neither is given


@dataclass(frozen=True)
class Run:
    """What surrounds the training.

    Attributes:
        args: Settled: by command line and recipe, then by the data, then by the checkpoint.
        guard: Yields batches until the run has to stop.
        directory: Of records and checkpoints.
        lock: Keeps other jobs out of the directory.
        resumed: The checkpoint that the run goes on from; None for a fresh start.
    """

    args: TrainArgs
    world: World
    logger: Logger
    guard: StopGuard
    directory: Path
    lock: RunLock
    resumed: Path | None = None


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready for the first step.

    Attributes:
        state: Model, optimizer, scaler, moving average and the position in the run.
        model: The module that the loop calls: the state's model or its working copy, possibly compiled or distributed.
        average: The module that validation calls for the moving average; None without a moving average.
        lr_formula: How the peak learning rate was computed, for the log.
        arithmetic: The arithmetic of a step; None where it can't be counted, and on ranks that write no records.
        distillation: What teachers add to the loss; None without one.
        dense_score: Compares tokens with labels in validation; None without `--val-label-data`.
    """

    state: TrainState
    model: nn.Module
    average: nn.Module | None
    loader: Loader
    validation: EvalLoader
    criterion: Criterion
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    arithmetic: Arithmetic | None = None
    distillation: Distillation | None = None
    dense_score: DenseScore | None = None


def resolve_args(
    args: TrainArgs, checkpoint: dict[str, Any], images: int, classes: int, world_size: int
) -> tuple[FrozenArgs, dict[str, int], list[str]]:
    """Return the arguments with what data and checkpoint decide, `batch_record`, and lines for the user.

    Args:
        args: The parsed arguments: `defaulted` has the names among `FITTED` that were not given.
        checkpoint: That the run resumes; {} for a fresh start.
        images: Number of training images.
        classes: Number of their classes.
        world_size: Number of processes that see different images.

    Raises:
        UserError: `--drop-path-mode subset` would drop nothing in batches of that size; or the checkpoint has a value
            that its flag doesn't take.
    """
    decided, line = dataset_defaults(args, images, classes, world_size)
    if kept := settings_from_checkpoint(checkpoint, args, world_size):
        decided |= kept
        line = _shown("as the run has begun", {k: v for k, v in decided.items() if v != getattr(args, k)})
    batch_size, asked = decided.get("batch_size", args.batch_size), args.grad_accum_steps
    steps, message = steps_to_keep(checkpoint, batch_size, asked, world_size)
    settled = FrozenArgs(args, **decided | {"grad_accum_steps": steps})
    batch = batch_record(batch_size, steps, world_size, asked)
    messages = line, message, _useless_average(settled, settled.epochs * math.ceil(images / batch["global"]))
    return settled, batch, [each for each in messages if each]


def dataset_defaults(args: TrainArgs, images: int, classes: int, world_size: int) -> tuple[dict[str, Any], str]:
    """Return the values that replace defaults, and a line that tells of them, "" without any. See `resolve_args`."""
    fitted: dict[str, Any] = {
        "warmup_epochs": min(20, args.epochs // 5),
        "cooldown_epochs": 10 if args.epochs >= 30 and args.sched in CYCLIC_SCHEDULES else 0,
        "checkpoint_hist": min(10, max(3, args.epochs // 10)),
    }
    if args.kd_only:  # heads learn logits alone
        fitted |= {} if "logit" in args.kd_distill_type else {"num_classes": 0}
    elif classes != known_config(args.model).get("num_classes"):
        fitted["num_classes"] = classes
    # The largest power of two with which an epoch has so many updates.
    share = images // (args.grad_accum_steps * world_size)
    most = min(_LARGEST_BATCH, max(2, share // _LEAST_UPDATES), max(1, share))  # BatchNorm may need two
    size = 1 << (most.bit_length() - 1)
    fitted["drop_last"] = "batch_size" in args.defaulted and size > 1 and images // world_size % size == 1
    if size < args.batch_size:
        fitted["batch_size"] = size
        if "batch_size" in args.defaulted and args.lr is None:
            # A rate that shrinks in proportion would be 1e-5 at 8 images; Adam's noise grows with the square root.
            fitted["lr_base_scale"] = "sqrt"
    batch = (size if "batch_size" in fitted.keys() & args.defaulted else args.batch_size) * args.grad_accum_steps
    if args.model_ema and not args.model_ema_warmup:
        updates = args.epochs * math.ceil(images / (batch * world_size))
        decay = max(0.0, round(1 - _HORIZONS / updates, 6))
        fitted["model_ema_decay"] = min(args.model_ema_decay, decay)
    fitted = {name: value for name, value in fitted.items() if name in args.defaulted and value != getattr(args, name)}
    check_drop_path(Namespace(**vars(args) | fitted))
    return fitted, _shown(f"defaults for {images} images of {classes} classes and {args.epochs} epochs", fitted)


def _useless_average(args: TrainArgs, updates: int) -> str:
    """Return a warning where the moving average of so many updates consists of the initial weights, else ""."""
    share = args.model_ema_decay**updates
    if not args.model_ema or args.model_ema_warmup or share <= _TOLD_SHARE:
        return ""
    return (
        f"warning: after the {updates} updates of this run {100 * share:.0f} % of its moving average are still the "
        f"initial weights: without --model-ema-decay {args.model_ema_decay:g} it is fitted to the run"
    )


def _shown(what: str, values: dict[str, Any]) -> str:
    """Return a line with the values as flags, "" without any."""
    flags = " ".join(f"--{k.replace('_', '-')}" + (f" {v}" if v is not True else "") for k, v in values.items())
    return flags and f"{what}: {flags}"


def settings_from_checkpoint(checkpoint: dict[str, Any], args: TrainArgs, world_size: int) -> dict[str, Any]:
    """Return the fitted values that the checkpoint of a resumed run has: the run goes on with these."""
    recorded = [checkpoint.get(name) for name in ("args", "model_config", BATCH_KEY)]
    settings, config, batch = (each if isinstance(each, dict) else {} for each in recorded)
    kept = checked_settings({k: v for k, v in settings.items() if k in args.defaulted and k != "num_classes"})
    if "num_classes" in args.defaulted and type(classes := config.get("num_classes")) is int:
        kept["num_classes"] = classes
    each, images = world_size * args.grad_accum_steps, batch.get("global")
    if "batch_size" in kept and type(images) is int and images % (kept["batch_size"] * world_size):
        kept["batch_size"] = images // each if images % each == 0 else kept["batch_size"]  # more processes than before
    return kept


def batch_record(batch_size: int, steps: int, world_size: int, asked_steps: int) -> dict[str, int]:
    """Return the record of the batch in checkpoints: images per update, processes, images as the flags ask for."""
    return {"global": batch_size * steps * world_size, "world_size": world_size, "asked": batch_size * asked_steps}


def steps_to_keep(checkpoint: dict[str, Any], batch_size: int, steps: int, world_size: int) -> tuple[int, str | None]:
    """Return the accumulation steps for a resumed run, and a line for the user.

    The global batch is kept if only the number of processes has changed and full batches add up to it; then every
    update has the same images. Otherwise the flags are followed, with a warning.
    """
    recorded = checkpoint.get(BATCH_KEY)
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
    return steps, f"warning: the global batch (-b x --grad-accum-steps x processes) was {before}, it is {now} now"

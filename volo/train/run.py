"""A run: its arguments, which are completed before anything is built, its surroundings, and what it trains with.

A run on sixty images is not a small run on ImageNet. The published defaults (128 images per device, 20 epochs of
warm-up, 10 of cool-down, 10 checkpoints) are used where they make sense. Values from the command line or a recipe never
change, except the accumulation steps, which keep a resumed run's global batch if the number of processes changes.
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
from tlt.kinds import KINDS
from volo.checkpoint.resume import table
from volo.checkpoint.start import Start
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import World
from volo.cluster.watchdog import StopGuard
from volo.config.args import TRAIN, FrozenArgs, TrainArgs, checked_settings, load_yaml
from volo.config.flag_rules import check_drop_path
from volo.config.flags_train import CYCLIC_SCHEDULES, FINE_TUNING, FROM_NOTHING, STABLE_SCHEDULES, STARTS
from volo.record.logger import Logger
from volo.record.metrics import Arithmetic
from volo.record.run_directory import RunLock
from volo.train.architecture import image_size_by_name, known_config
from volo.train.criterion import Criterion
from volo.train.data import size_schedule
from volo.train.dense_score import DenseScore
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule

if TYPE_CHECKING:
    from volo.train.distillation import Distillation

BATCH_KEY = "batch"  # key in a checkpoint
_HORIZONS = 5  # a run has so many times 1 / (1 - decay) updates; then 0.7 % of the average are the initial weights
_WARNED_SHARE = 0.1  # share of the initial weights in the average above which a warning is logged
_LEAST_UPDATES, _LARGEST_BATCH = 4, 128  # per epoch, and images per device, if the user sets no batch size
# A command without a model takes the recipe from nothing for so many images at most, with so many epochs at least and
# at most, until so many images have been seen, and validates so many times at most.
_FEW_IMAGES, _LEAST_EPOCHS, _MOST_EPOCHS, _IMAGES_SEEN, _VALIDATIONS = 20_000, 40, 600, 36_000, 60


@dataclass(frozen=True)
class Run:
    """The surroundings of training.

    Attributes:
        args: Final arguments: from command line and recipe, completed from the data and the checkpoint.
        guard: Yields batches until the run has to stop.
        start: What the run has begun as.
        lock: Keeps other jobs out of the directory.
    """

    args: TrainArgs
    world: World
    logger: Logger
    guard: StopGuard
    start: Start
    lock: RunLock

    @property
    def directory(self) -> Path:
        """Directory of records and checkpoints."""
        return self.start.directory


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready for the first step.

    Attributes:
        state: Model, optimizer, scaler, moving average and the position in the run.
        forward_model: The module that a step calls: the state's model or its working copy, perhaps compiled or
            distributed.
        average: The module that validates the moving average; None if it is not validated.
        lr_formula: How the peak learning rate was computed, for the log.
        arithmetic: Operations of a step; None if they can't be counted, and on ranks that write no records.
        distillation: The teachers and their losses; None without teachers.
        dense_score: Compares tokens with labels in validation; None without `--val-label-data`.
    """

    state: TrainState
    forward_model: nn.Module
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


def recipe_from_nothing(args: TrainArgs, images: int, world_size: int) -> TrainArgs:
    """Return the arguments over the recipe for few images from nothing, if the command names no recipe, no model and no
    weights, and the folder holds few images; published commands name a model. The fewer images, the more epochs.

    Args:
        images: Number of training images.
        world_size: Number of processes that see different images.
    """
    if {"model", "config", *STARTS} & args.explicit.keys() or args.data_backend == "synthetic" or images > _FEW_IMAGES:
        return args
    batch = min(load_yaml(FROM_NOTHING, TRAIN.parser())["batch_size"], _fitting_batch(images // world_size))
    epochs = args.explicit.get("epochs", min(_MOST_EPOCHS, max(_LEAST_EPOCHS, -(-_IMAGES_SEEN // images))))
    fitted = {"epochs": epochs, "val_interval": -(-epochs // _VALIDATIONS), "batch_size": batch}
    chosen = TRAIN.over_recipe({"config": FROM_NOTHING} | fitted | args.explicit)
    line = (
        f"no --model: -c {FROM_NOTHING} --epochs {epochs} for {images} images, which trains {chosen.model} from "
        f"nothing; photographs do better with -c {FINE_TUNING} --model volo_d1 --pretrained"
    )
    chosen.notes = [*dict.fromkeys([*args.notes, *chosen.notes, line])]
    return chosen


def resolve_args(
    args: TrainArgs, checkpoint: dict[str, Any], images: int, classes: int, world_size: int
) -> tuple[FrozenArgs, dict[str, int], list[str]]:
    """Return the arguments completed from data and checkpoint, the `batch_record`, and lines for the user.

    Args:
        args: The parsed arguments; `defaulted` names those of `FITTED` that the user did not set.
        checkpoint: Content of the checkpoint that the run resumes; {} for a fresh start.
        images: Number of training images.
        classes: Number of their classes.
        world_size: Number of processes that see different images.

    Raises:
        UserError: `--drop-path-mode subset` would drop nothing from batches of the resulting size, or a flag doesn't
            accept the checkpoint's value.
    """
    recorded = settings_from_checkpoint(checkpoint, args, world_size)
    changed = fit_to_data(args, checkpoint, recorded, images, classes, world_size)
    decided = FrozenArgs(args, **changed)
    sizes = size_schedule(decided, image_size_by_name(args))
    check_drop_path(decided if sizes is None else FrozenArgs(decided, train_batch_sizes=sizes.batch_sizes))
    steps, kept_batch = steps_to_keep(checkpoint, decided.batch_size, args.grad_accum_steps, world_size)
    batch = batch_record(decided.batch_size, steps, world_size, args.grad_accum_steps)
    begun = {name: value for name, value in changed.items() if recorded.get(name) == value}
    new = {name: value for name, value in changed.items() if name not in begun}
    source = f"defaults for {images} images of {classes} classes and {args.epochs} epochs"
    average = _useless_average(decided, _updates(decided, images, batch["global"]))
    lines = _as_flags("as the run has begun", begun), _as_flags(source, new), kept_batch, average
    return FrozenArgs(decided, grad_accum_steps=steps), batch, [line for line in lines if line]


def fit_to_data(
    args: TrainArgs, checkpoint: dict[str, Any], recorded: dict[str, Any], images: int, classes: int, world_size: int
) -> dict[str, Any]:
    """Return new values for flags of `FITTED`, one row of this table each: a flag that the user has not set takes the
    value that the resumed checkpoint has `recorded`, or else the row's, which follows from the data. What was fitted to
    the length of the checkpoint's run is fitted again, because this one may be of another length."""
    decided: dict[str, Any] = {}
    then = Namespace(**vars(args) | _length_of(checkpoint, args))

    def row(name: str, from_data: Any, before: Any = None) -> Any:
        kept = {k: v for k, v in recorded.items() if v != before}
        decided[name] = kept.get(name, from_data) if name in args.defaulted else getattr(args, name)
        return decided[name]

    row("warmup_epochs", *(min(20, run.epochs // 5) for run in (args, then)))
    row("cooldown_epochs", *(10 * (run.epochs >= 30 and run.sched in CYCLIC_SCHEDULES) for run in (args, then)))
    row("checkpoint_hist", *(min(10, max(3, run.epochs // 10)) for run in (args, then)))
    row("sched_on_updates", *(run.sched in STABLE_SCHEDULES for run in (args, then)))
    if args.kd_only:
        trains_heads = any(KINDS[kind].of_classes for kind in args.kd_distill_type)
        row("num_classes", args.num_classes if trains_heads else 0)
    else:
        row("num_classes", args.num_classes if classes == known_config(args.model).get("num_classes") else classes)
    share = images // (args.grad_accum_steps * world_size)
    if args.train_batch_sizes == ["auto"]:  # the smallest images come in the largest batches
        full = math.prod(image_size_by_name(args))
        share = share * min(full, min(args.train_img_sizes) ** 2) // full
    size, fitted = row("batch_size", _fitting_batch(share)), "batch_size" in args.defaulted
    row("drop_last", fitted and size > 1 and images // world_size % size == 1)
    # A rate in proportion to 8 images would be as small as 1e-5; Adam's noise grows with the square root.
    row("lr_base_scale", "sqrt" if fitted and size < _LARGEST_BATCH and args.lr is None else args.lr_base_scale)
    batch = size * world_size * steps_to_keep(checkpoint, size, args.grad_accum_steps, world_size)[0]
    updates = _updates(Namespace(**vars(args) | {"batch_size": size}), images, batch)
    updates_then = _updates(then, images, (_recorded_batch(checkpoint) or {"global": batch})["global"])
    # The rest of the run has to forget the initial weights that the checkpoint's average still holds.
    gone = _HORIZONS * then.done / max(1, then.epochs) if then.model_ema else 0.0
    horizons = max(_HORIZONS, (-math.log(_WARNED_SHARE) - gone) / (1 - then.done / args.epochs))
    row("model_ema_decay", _average_decay(args, updates, horizons), _average_decay(then, updates_then, _HORIZONS))
    return {name: value for name, value in decided.items() if value != getattr(args, name)}


def _fitting_batch(images: int) -> int:
    """Return the largest power of two with which an epoch of so many images has at least _LEAST_UPDATES updates."""
    most = min(_LARGEST_BATCH, max(2, images // _LEAST_UPDATES), max(1, images))  # BatchNorm may need 2 images
    return 1 << (most.bit_length() - 1)


def _length_of(checkpoint: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """Return what the length of the checkpoint's run follows from, as far as the checkpoint has it, and the number of
    epochs that this run need not do."""
    settings, epoch = table(checkpoint, "args"), checkpoint.get("epoch")
    known = {name: settings.get(name) for name in ("epochs", "sched", "batch_size", "model_ema", "model_ema_warmup")}
    done = epoch + 1 if type(epoch) is int and -1 <= epoch < args.epochs - 1 else 0
    return {k: v for k, v in known.items() if type(v) is type(getattr(args, k))} | {"done": done}


def _updates(args: Namespace, images: int, global_batch: int) -> int:
    """Return the number of updates of a run with this global batch, or with several image sizes one in proportion."""
    sizes = size_schedule(args, image_size_by_name(args))
    mean = 1 if sizes is None else sizes.mean_batch / args.batch_size
    return args.epochs * -(-images // max(1, round(mean * global_batch)))


def _average_decay(args: Namespace, updates: int, horizons: float) -> float:
    if not args.model_ema or args.model_ema_warmup:
        return args.model_ema_decay
    return min(args.model_ema_decay, max(0.0, round(1 - horizons / max(1, updates), 6)))


def _useless_average(args: Namespace, updates: int) -> str:
    """Return a warning if the moving average after `updates` is mostly the initial weights, else ""."""
    share = args.model_ema_decay**updates
    if not args.model_ema or args.model_ema_warmup or share <= _WARNED_SHARE:
        return ""
    return (
        f"warning: after the {updates} updates of this run {100 * share:.0f} % of its moving average are still the "
        f"initial weights: --model-ema-decay {args.model_ema_decay:g} was given, without it one is fitted to the run"
    )


def _as_flags(title: str, values: dict[str, Any]) -> str:
    """Return a line with the values written as flags; "" without values."""
    flags = " ".join(f"--{k.replace('_', '-')}" + (f" {v}" if v is not True else "") for k, v in values.items())
    return flags and f"{title}: {flags}"


def settings_from_checkpoint(checkpoint: dict[str, Any], args: TrainArgs, world_size: int) -> dict[str, Any]:
    """Return the checkpoint's values of fitted arguments, with which a resumed run continues. If more processes can't
    make the checkpoint's global batch of its batches, these are smaller."""
    settings, config = table(checkpoint, "args"), table(checkpoint, "model_config")
    recorded = checked_settings({k: v for k, v in settings.items() if k in args.defaulted and k != "num_classes"})
    if "num_classes" in args.defaulted and type(classes := config.get("num_classes")) is int:
        recorded["num_classes"] = classes
    if "batch_size" in recorded and (batch := _recorded_batch(checkpoint)):
        images, parts = batch["global"], world_size * args.grad_accum_steps
        if images % (recorded["batch_size"] * world_size) and images % parts == 0:
            recorded["batch_size"] = images // parts
    return recorded


def _recorded_batch(checkpoint: dict[str, Any]) -> dict[str, int] | None:
    """Return the `batch_record` of a checkpoint, or None if it has none."""
    batch = checkpoint.get(BATCH_KEY)
    complete = isinstance(batch, dict) and all(type(batch.get(key)) is int for key in batch_record(1, 1, 1, 1))
    return batch if complete else None


def batch_record(batch_size: int, steps: int, world_size: int, asked_steps: int) -> dict[str, int]:
    """Return the record of the batch in checkpoints: images per update, processes, images that the flags ask for."""
    return {"global": batch_size * steps * world_size, "world_size": world_size, "asked": batch_size * asked_steps}


def steps_to_keep(checkpoint: dict[str, Any], batch_size: int, steps: int, world_size: int) -> tuple[int, str | None]:
    """Return the accumulation steps for a resumed run, and a line for the user.

    If only the number of processes has changed and full batches can add up to the old global batch, that is kept, so
    that every update has the same images. Otherwise the flags are followed, with a warning.
    """
    if (recorded := _recorded_batch(checkpoint)) is None:
        return steps, None
    before, now, per_step = recorded["global"], batch_size * steps * world_size, batch_size * world_size
    if before == now or before < 1:
        return steps, None
    if recorded["asked"] == batch_size * steps and before % per_step == 0:
        kept = before // per_step
        return kept, (
            f"{recorded['world_size']} processes before, {world_size} now: {kept} accumulation steps, not {steps}, "
            f"keep the global batch of {before}"
        )
    return steps, f"warning: the global batch (-b x --grad-accum-steps x processes) was {before}, it is {now} now"

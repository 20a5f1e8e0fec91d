"""A run: its arguments, which are completed before anything is built, its surroundings, and what it trains with.

A run on sixty images is not a small run on ImageNet. The published defaults (128 images per device, 20 epochs of
warm-up, 10 of cool-down, 10 checkpoints) are used where they make sense. Values from the command line or a recipe never
change, except the accumulation steps, which keep a resumed run's global batch if the number of processes changes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tlt.api import Loader
from tlt.data.batch import Batch
from tlt.data.loader import EvalLoader
from tlt.kinds import KINDS
from volo.checkpoint.replicas import Replicas
from volo.checkpoint.resume import table
from volo.checkpoint.start import Start
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import World
from volo.cluster.watchdog import StopGuard
from volo.config.recipes import load_yaml
from volo.config.rules import check_drop_path
from volo.config.settings_train import (
    CYCLIC_SCHEDULES,
    FINE_TUNING,
    FITTED,
    FROM_NOTHING,
    STABLE_SCHEDULES,
    STARTS,
    Average,
    ImageSizes,
    TrainSettings,
)
from volo.config.train import TRAIN, checked_settings
from volo.record.logger import Logger
from volo.record.metrics import Arithmetic
from volo.record.run_directory import RunLock
from volo.train.architecture import image_size_by_name, known_config
from volo.train.criterion import Criterion
from volo.train.data import sizes_of
from volo.train.dense_score import DenseScore
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule

if TYPE_CHECKING:
    from volo.train.distillation import Distillation

BATCH_KEY = "batch"  # key in a checkpoint
_HORIZONS = 5  # a run has so many times 1 / (1 - decay) updates; then 0.7 % of the average are the initial weights
_WARNED_SHARE = 0.1  # share of the initial weights in the average above which a warning is logged
_LEAST_UPDATES = 4  # per epoch, if the user sets no batch size
_LARGEST_BATCH = 128  # images per device, likewise
# A command without a model takes the recipe from nothing for so many images at most, with so many epochs at least and
# at most, until so many images have been seen, and validates so many times at most.
_FEW_IMAGES = 20_000
_LEAST_EPOCHS = 20
_MOST_EPOCHS = 600
_IMAGES_SEEN = 60_000
_VALIDATIONS = 25
# `--aa` by the least number of images, in place of the recipe's: many images vary enough, and the network would not
# learn the changed ones in this time.
_LESS_AUGMENTED = {1_000: "rand-m5-n2-mstd0.5-inc1", 2_000: "none"}


@dataclass(frozen=True)
class Run:
    """The surroundings of training: the final settings, completed from the data and the checkpoint; the guard, which
    yields batches until the run has to stop; what the run has begun as; the lock that keeps other jobs out."""

    settings: TrainSettings
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
        forward_model: What a step calls: the state's model or its working copy, perhaps compiled or distributed.
        average: The module that validates the moving average; None if it is not validated.
        replicas: The ranks' copies of the state.
        lr_formula: How the peak learning rate was computed, for the log.
        arithmetic: Operations of a step; None if they can't be counted, and on ranks that write no records.
        dense_score: Compares tokens with labels in validation; None without `--val-label-data`.
    """

    state: TrainState
    replicas: Replicas
    forward_model: nn.Module
    average: nn.Module | None
    loader: Loader
    validation: EvalLoader
    criterion: Criterion
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    arithmetic: Arithmetic | None = None
    distillation: "Distillation | None" = None
    dense_score: DenseScore | None = None

    def batches(self, again: tuple[int, int] | None = None) -> Iterator[Batch]:
        """Yield the batches of the current epoch from the state's position on; `again` is as in `Loader.epoch`."""
        state = self.state
        where = state.epoch, state.update - state.epoch * state.updates_per_epoch, again
        batches = self.loader.epoch(*where)
        return batches if self.distillation is None else self.distillation.paired(batches, *where)


def recipe_from_nothing(settings: TrainSettings, images: int, world_size: int) -> TrainSettings:
    """Return the settings over the recipe for few images from nothing, if the command names no recipe, no model and no
    weights, and the folder holds few images; published commands name a model. The fewer images, the more epochs."""
    typed = {name: settings[name] for name, source in settings.sources.items() if source == "command line"}
    synthetic = settings.images.loading.data_backend == "synthetic"
    if {"model", "config", *STARTS} & typed.keys() or synthetic or images > _FEW_IMAGES:
        return settings
    batch = min(load_yaml(FROM_NOTHING, TRAIN.parser())["batch_size"], _fitting_batch(images // world_size))
    epochs = typed.get("epochs", min(_MOST_EPOCHS, max(_LEAST_EPOCHS, -(-_IMAGES_SEEN // images))))
    fitted = {"epochs": epochs, "val_interval": -(-epochs // _VALIDATIONS), "batch_size": batch}
    for least, policy in _LESS_AUGMENTED.items():
        if images >= least and not settings.augment.no_aug:
            fitted["aa"] = policy
    unasked = {name: value for name, value in ({"config": FROM_NOTHING} | fitted).items() if name not in typed}
    chosen = TRAIN.over_recipe(unasked | typed).decide("recipe", **unasked)
    flags = f"-c {FROM_NOTHING} --epochs {epochs}" + (f" --aa {unasked['aa']}" if "aa" in unasked else "")
    line = (
        f"no --model: {flags} for {images} images, which trains {chosen.network.model} from nothing; photographs do "
        f"better with -c {FINE_TUNING} --model volo_d1 --pretrained"
    )
    return replace(chosen, notes=(*dict.fromkeys([*settings.notes, *chosen.notes, line]),))


def resolve_args(
    settings: TrainSettings, checkpoint: dict[str, Any], images: int, classes: int, world_size: int
) -> tuple[TrainSettings, dict[str, int], list[str]]:
    """Return the settings completed from the numbers of training images and their classes and from the checkpoint that
    the run resumes ({} for a fresh start), the `batch_record`, and lines for the user. `world_size` processes see
    different images. Raise UserError if `--drop-path-mode subset` would drop nothing from batches of the resulting
    size, or a flag doesn't accept the checkpoint's value."""
    recorded = settings_from_checkpoint(checkpoint, settings, world_size)
    fitted = fit_to_data(settings, checkpoint, recorded, images, classes, world_size)
    begun = {name: value for name, value in fitted.items() if recorded.get(name) == value}
    decided = settings.decide("data", **fitted).decide("checkpoint", **begun)
    asked, asked_size = settings.optim.grad_accum_steps, decided.images.batch_size
    steps, size, kept_batch = parts_to_keep(checkpoint, asked_size, asked, world_size, settings.sizes)
    batch = batch_record(size, steps, world_size, asked_size * asked)
    if (steps, size) != (asked, asked_size):
        decided = decided.decide("checkpoint", grad_accum_steps=steps, batch_size=size)
    sizes = sizes_of(decided, image_size_by_name(decided.network, decided.images.pixels))
    check_drop_path(decided, decided.sizes.train_batch_sizes if sizes is None else sizes.batch_sizes)
    changes = {name: value for name, value in fitted.items() if value != settings[name]}
    new = {name: value for name, value in changes.items() if name not in begun}
    source = f"defaults for {images} images of {classes} classes and {settings.schedule.epochs} epochs"
    lines = (
        _as_flags("as the run has begun", {name: changes[name] for name in changes if name in begun}),
        _as_flags(source, new),
        kept_batch,
        _useless_average(decided.ema, _updates(decided, images, batch["global"])),
    )
    return decided, batch, [line for line in lines if line]


def fit_to_data(
    settings: TrainSettings,
    checkpoint: dict[str, Any],
    recorded: dict[str, Any],
    images: int,
    classes: int,
    world_size: int,
) -> dict[str, Any]:
    """Return the values of those settings of `FITTED` that the user has left open, one row of this table each: the
    value that the resumed checkpoint has `recorded`, or else the row's, which follows from the data. What was fitted to
    the length of the checkpoint's run is fitted again, because this one may be of another length."""
    fitted: dict[str, Any] = {}
    length, done = _length_of(checkpoint, settings)
    then = settings.decide("checkpoint", **length)
    now_and_then = [(s.schedule.epochs, s.schedule.sched) for s in (settings, then)]

    def fit(name: str, from_data: Any, before: Any = None) -> None:
        """Decide a setting: as recorded, unless that is the value `before`, which was fitted to another length."""
        if not settings.set_by_user(name):
            fitted[name] = recorded[name] if recorded.get(name, before) != before else from_data

    fit("warmup_epochs", *(min(20, epochs // 5) for epochs, _ in now_and_then))
    fit("cooldown_epochs", *(10 * (epochs >= 30 and sched in CYCLIC_SCHEDULES) for epochs, sched in now_and_then))
    fit("checkpoint_hist", *(min(10, max(3, epochs // 10)) for epochs, _ in now_and_then))
    fit("sched_on_updates", *(sched in STABLE_SCHEDULES for _, sched in now_and_then))
    asked_classes = settings.network.num_classes
    if settings.teachers.kd_only:
        trains_heads = any(KINDS[kind].of_classes for kind in settings.teachers.kd_distill_type)
        fit("num_classes", asked_classes if trains_heads else 0)
    else:
        known = known_config(settings.network.model).get("num_classes")
        fit("num_classes", asked_classes if classes == known else classes)
    steps, sizes = settings.optim.grad_accum_steps, settings.sizes
    share = images // (steps * world_size)
    if sizes.train_img_sizes and sizes.train_batch_sizes == ["auto"]:  # the smallest images: in the largest batches
        full = math.prod(image_size_by_name(settings.network, settings.images.pixels))
        share = share * min(full, min(sizes.train_img_sizes) ** 2) // full
    fit("batch_size", _fitting_batch(share))
    size = fitted.get("batch_size", settings.images.batch_size)
    fit("drop_last", "batch_size" in fitted and size > 1 and images // world_size % size == 1)
    # A rate in proportion to 8 images would be as small as 1e-5; Adam's noise grows with the square root.
    few = "batch_size" in fitted and size < _LARGEST_BATCH and settings.schedule.lr is None
    fit("lr_base_scale", "sqrt" if few else settings.schedule.lr_base_scale)
    parts, part, _ = parts_to_keep(checkpoint, size, steps, world_size, sizes)
    batch = part * world_size * parts
    updates = _updates(settings.decide("data", batch_size=size), images, batch)
    updates_then = _updates(then, images, (_recorded_batch(checkpoint) or {"global": batch})["global"])
    # The rest of the run has to forget the initial weights that the checkpoint's average still holds.
    gone = _HORIZONS * done / max(1, then.schedule.epochs) if then.ema.model_ema else 0.0
    horizons = max(_HORIZONS, (-math.log(_WARNED_SHARE) - gone) / (1 - done / settings.schedule.epochs))
    fit("model_ema_decay", _average_decay(settings.ema, updates, horizons), _average_decay(then.ema, updates_then))
    return fitted


def _fitting_batch(images: int) -> int:
    """Return the largest power of two with which an epoch of so many images has at least _LEAST_UPDATES updates."""
    most = min(_LARGEST_BATCH, max(2, images // _LEAST_UPDATES), max(1, images))  # BatchNorm may need 2 images
    return 1 << (most.bit_length() - 1)


def _length_of(checkpoint: dict[str, Any], settings: TrainSettings) -> tuple[dict[str, Any], int]:
    """Return what the length of the checkpoint's run follows from, as far as the checkpoint has it, and the number of
    epochs that this run need not do."""
    recorded = table(checkpoint, "args")
    epoch = checkpoint.get("epoch")
    names = ("epochs", "sched", "batch_size", "model_ema", "model_ema_warmup")
    known = {name: recorded[name] for name in names if type(recorded.get(name)) is type(settings[name])}
    return known, epoch + 1 if type(epoch) is int and -1 <= epoch < settings.schedule.epochs - 1 else 0


def _updates(settings: TrainSettings, images: int, global_batch: int) -> int:
    """Return the number of updates of a run with this global batch, or with several image sizes one in proportion."""
    sizes = sizes_of(settings, image_size_by_name(settings.network, settings.images.pixels))
    mean = 1 if sizes is None else sizes.mean_batch / settings.images.batch_size
    return settings.schedule.epochs * -(-images // max(1, round(mean * global_batch)))


def _average_decay(ema: Average, updates: int, horizons: float = _HORIZONS) -> float:
    if not ema.model_ema or ema.model_ema_warmup:
        return ema.model_ema_decay
    return min(ema.model_ema_decay, max(0.0, round(1 - horizons / max(1, updates), 6)))


def _useless_average(ema: Average, updates: int) -> str:
    """Return a warning if the moving average after `updates` is mostly the initial weights, else ""."""
    share = ema.model_ema_decay**updates
    if not ema.model_ema or ema.model_ema_warmup or share <= _WARNED_SHARE:
        return ""
    return (
        f"warning: after the {updates} updates of this run {100 * share:.0f} % of its moving average are still the "
        f"initial weights: --model-ema-decay {ema.model_ema_decay:g} was given, without it one is fitted to the run"
    )


def _as_flags(title: str, values: dict[str, Any]) -> str:
    """Return a line with the values written as flags; "" without values."""
    flags = " ".join(f"--{k.replace('_', '-')}" + (f" {v}" if v is not True else "") for k, v in values.items())
    return flags and f"{title}: {flags}"


def settings_from_checkpoint(checkpoint: dict[str, Any], settings: TrainSettings, world_size: int) -> dict[str, Any]:
    """Return the checkpoint's values of fitted settings that the user leaves open, with which a resumed run continues.
    If more processes can't make the checkpoint's global batch of its batches, these are smaller."""
    before = table(checkpoint, "args")
    config = table(checkpoint, "model_config")
    left_open = [name for name in FITTED if not settings.set_by_user(name)]
    recorded = checked_settings({k: v for k, v in before.items() if k in left_open and k != "num_classes"})
    if "num_classes" in left_open and type(classes := config.get("num_classes")) is int:
        recorded["num_classes"] = classes
    if "batch_size" in recorded and (batch := _recorded_batch(checkpoint)):
        images, steps = batch["global"], settings.optim.grad_accum_steps
        if batch["asked"] % steps == 0:  # with other processes the batches may have been smaller
            recorded["batch_size"] = batch["asked"] // steps
        if images % (recorded["batch_size"] * world_size) and images % (world_size * steps) == 0:
            recorded["batch_size"] = min(recorded["batch_size"], images // (world_size * steps))
    return recorded


def _recorded_batch(checkpoint: dict[str, Any]) -> dict[str, int] | None:
    """Return the `batch_record` of a checkpoint, or None if it has none."""
    batch = checkpoint.get(BATCH_KEY)
    complete = isinstance(batch, dict) and all(type(batch.get(key)) is int for key in batch_record(1, 1, 1, 1))
    return batch if complete else None


def batch_record(batch_size: int, steps: int, world_size: int, asked: int) -> dict[str, int]:
    """Return the record of the batch in checkpoints: images per update, processes, images per process and update that
    the flags ask for."""
    return {"global": batch_size * steps * world_size, "world_size": world_size, "asked": asked}


def parts_to_keep(
    checkpoint: dict[str, Any], batch_size: int, steps: int, world_size: int, sizes: ImageSizes
) -> tuple[int, int, str | None]:
    """Return the accumulation steps and the batch size for a resumed run, and a line for the user. If only the number
    of processes has changed and divides the old global batch, that is kept, so that every update has the same images,
    in batches that are at most as large as before and at least half as large if there are several. Otherwise, or if
    image sizes have batch sizes of their own, the flags are followed, with a warning."""
    recorded = _recorded_batch(checkpoint) or {"global": 0}
    before = recorded["global"]
    now = batch_size * world_size * steps
    if before == now or before < 1:
        return steps, batch_size, None
    if recorded["asked"] == batch_size * steps and before % world_size == 0:
        images = before // world_size
        kept = next(count for count in range(-(-images // batch_size), images + 1) if images % count == 0)
        size = images // kept
        if size == batch_size or (not sizes.train_img_sizes and (kept == 1 or 2 * size >= batch_size)):
            changed = f"{recorded['world_size']} processes before, {world_size} now: {kept} accumulation steps"
            smaller = f", of batches of {size} images, not {batch_size}," if size < batch_size else ","
            return kept, size, f"{changed}, not {steps}{smaller} keep the global batch of {before}"
    told = f"warning: the global batch (-b x --grad-accum-steps x processes) was {before}, it is {now} now"
    return steps, batch_size, told

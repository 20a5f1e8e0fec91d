"""Settles the arguments before anything is built: the data decide defaults, a checkpoint decides what a run keeps.

A run on sixty images is not a small run on ImageNet. The published defaults (128 images per device, 20 epochs of
warm-up, 10 of cool-down, 10 checkpoints) stand wherever they make sense. What is given on the command line or in a
recipe is never changed, but for the accumulation steps that keep a resumed run's global batch on other processes.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

from volo.config.args import FrozenArgs, TrainArgs
from volo.config.flag_rules import check_drop_path
from volo.train.model import known_config

BATCH_KEY = "batch"  # of a checkpoint
_LEAST_UPDATES = 4  # in an epoch


class Settled(NamedTuple):
    """The arguments of a run.

    Attributes:
        batch: The record of the global batch for the run's own checkpoints.
        messages: Lines for the user.
    """

    args: FrozenArgs
    batch: dict[str, int]
    messages: list[str]


def settle(args: TrainArgs, checkpoint: dict[str, Any], images: int, classes: int, world_size: int) -> Settled:
    """Return the arguments with what the data and the checkpoint decide.

    Args:
        args: The parsed arguments: `defaulted` has the names among `FITTED` that were not given.
        checkpoint: That the run resumes; {} for a fresh start.
        images: Number of training images.
        classes: Number of their classes.
        world_size: Number of processes that see different images.

    Raises:
        UserError: `--drop-path-mode subset` would drop nothing in batches of that size.
    """
    decided, line = dataset_defaults(args, images, classes, world_size)
    decided |= settings_from_checkpoint(checkpoint, args, world_size)
    batch_size, asked = decided.get("batch_size", args.batch_size), args.grad_accum_steps
    steps, message = steps_to_keep(checkpoint, batch_size, asked, world_size)
    frozen = FrozenArgs(args, **decided | {"grad_accum_steps": steps})
    messages = [each for each in (line, message) if each]
    return Settled(frozen, batch_record(batch_size, steps, world_size, asked), messages)


def dataset_defaults(args: TrainArgs, images: int, classes: int, world_size: int) -> tuple[dict[str, Any], str]:
    """Return the values that replace defaults, and a line that tells of them, "" without any. See `settle`."""
    fitted: dict[str, Any] = {
        "warmup_epochs": min(20, args.epochs // 5),
        "cooldown_epochs": 10 if args.epochs >= 30 else 0,
        "checkpoint_hist": min(10, max(3, args.epochs // 10)),
    }
    if args.kd_only:  # heads learn logits alone
        fitted |= {} if args.kd_distill_type == "logit" else {"num_classes": 0}
    elif classes != known_config(args.model).get("num_classes"):
        fitted["num_classes"] = classes
    size = _batch_size(images // (args.grad_accum_steps * world_size))
    if size < args.batch_size:
        fitted["batch_size"] = size
        if "batch_size" in args.defaulted and args.lr is None:
            # A rate that shrinks in proportion would be 1e-5 at 8 images; Adam's noise grows with the square root.
            fitted["lr_base_scale"] = "sqrt"
    fitted = {name: value for name, value in fitted.items() if name in args.defaulted and value != getattr(args, name)}
    check_drop_path(Namespace(**vars(args) | fitted))
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fitted.items())
    return fitted, shown and f"defaults for {images} images of {classes} classes and {args.epochs} epochs: {shown}"


def settings_from_checkpoint(checkpoint: dict[str, Any], args: TrainArgs, world_size: int) -> dict[str, Any]:
    """Return the fitted values that the checkpoint of a resumed run has: the run goes on with these."""
    recorded = [checkpoint.get(name) for name in ("args", "model_config", BATCH_KEY)]
    settings, config, batch = (each if isinstance(each, dict) else {} for each in recorded)
    found = settings | {"num_classes": config.get("num_classes")}
    kept = {k: v for k, v in found.items() if k in args.defaulted and type(v) in (int, str)}
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


def _batch_size(images: int) -> int:
    """The largest power of two up to 128 with which an epoch of `images` has `_LEAST_UPDATES` updates."""
    size = 128
    while size > 1 and size * _LEAST_UPDATES > images:
        size //= 2
    return size

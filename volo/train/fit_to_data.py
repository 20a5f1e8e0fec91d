"""Defaults that depend on the data: a run on sixty images is not a small run on ImageNet.

The published defaults (128 images per device, 20 epochs of warm-up, 10 of cool-down, 10 checkpoints) stand wherever
they make sense. What is given on the command line or in a recipe is never changed.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import timm

from volo.checkpoint.resume import BATCH_KEY
from volo.config.args import TrainArgs
from volo.config.flag_rules import check_drop_path
from volo.train.stored_model import architecture_of

_LEAST_UPDATES = 4  # in an epoch


def fit_to_data(args: TrainArgs, images: int, classes: int, world_size: int) -> tuple[dict[str, Any], str]:
    """Return the values that replace defaults, and a line that tells of them, "" without any.

    Args:
        args: The parsed arguments: `defaulted` has the names among `FITTED` that were not given.
        images: Number of training images.
        classes: Number of their classes.
        world_size: Number of processes.

    Raises:
        UserError: `--drop-path-mode subset` would drop nothing in batches of that size.
    """
    fitted = _schedule_of(args.epochs)
    if classes != _own_classes(args.model):
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


def settings_from_checkpoint(checkpoint: dict[str, Any] | None, args: TrainArgs, world_size: int) -> dict[str, Any]:
    """Return the fitted values that the checkpoint of a resumed run has: the run goes on with these."""
    recorded = [(checkpoint or {}).get(name) for name in ("args", "model_config", BATCH_KEY)]
    settings, config, batch = (each if isinstance(each, dict) else {} for each in recorded)
    found = settings | {"num_classes": config.get("num_classes")}
    kept = {k: v for k, v in found.items() if k in args.defaulted and type(v) in (int, str)}
    each, images = world_size * args.grad_accum_steps, batch.get("global")
    if "batch_size" in kept and type(images) is int and images % (kept["batch_size"] * world_size):
        kept["batch_size"] = images // each if images % each == 0 else kept["batch_size"]  # more processes than before
    return kept


def _schedule_of(epochs: int) -> dict[str, Any]:
    return {
        "warmup_epochs": min(20, epochs // 5),
        "cooldown_epochs": 10 if epochs >= 30 else 0,
        "checkpoint_hist": min(10, max(3, epochs // 10)),
    }


def _batch_size(images: int) -> int:
    """The largest power of two up to 128 with which an epoch of `images` has `_LEAST_UPDATES` updates."""
    size = 128
    while size > 1 and size * _LEAST_UPDATES > images:
        size //= 2
    return size


def _own_classes(name: str) -> int | None:
    name, kwargs, _ = architecture_of(name)
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    found: int | None = kwargs.get("num_classes", None if config is None else config.num_classes)
    return found

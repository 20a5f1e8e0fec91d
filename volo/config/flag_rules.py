"""Checks that concern several flags, and values that one flag decides for another."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tlt.data.sources import needs_folder
from tlt.errors import UserError, install_command
from tlt.kinds import KINDS
from tlt.upstream import resolve
from volo.config.flag_table import Flag, check_flags
from volo.config.flags_data import DENSE, LABELS, PER_TEACHER
from volo.config.flags_train import (
    CUDA_GRAPH_MODES,
    ENDING_SCHEDULES,
    FINE_TUNING,
    FROM_NOTHING,
    STARTS,
    TRACKERS,
    mixes,
)


def _check_pixels(args: Namespace) -> None:
    """Raise UserError for contradictions between flags about pixels, in every program that reads images."""
    if not {len(args.mean or [0]), len(args.std or [0])} <= {1, 3}:
        raise UserError("--mean and --std take one number, or three (red, green, blue)")
    channels = (args.in_chans or 3,) if "in_chans" in args else (1, 3)
    if args.input_size and args.input_size[0] not in channels:
        raise UserError(
            f"--input-size {' '.join(map(str, args.input_size))}: images are read as RGB, the first number must be 3, "
            "or of a grey model (volo train --in-chans 1) 1"
        )


def _check_compile(args: Namespace) -> None:
    """Raise UserError if blocks are to be compiled to CUDA graphs."""
    if args.torchcompile_scope == "blocks" and args.torchcompile_mode in CUDA_GRAPH_MODES:
        raise UserError(
            f"--torchcompile-mode {args.torchcompile_mode} records where a graph's weights lie, and blocks of other "
            "weights share a graph: --torchcompile-scope model, or --torchcompile-mode max-autotune-no-cudagraphs"
        )


def _check_data(args: Namespace) -> None:
    """Raise UserError for contradictions between train.py's flags about schedule, images and starting weights."""
    noise, scale, ratio = args.lr_noise or [], args.scale, args.ratio
    if len(noise) > 2 or noise != sorted(noise):
        raise UserError("--lr-noise takes one or two parts of the epochs, the smaller first")
    if args.val_fraction == 1 or (args.val_fraction > 0 and args.data_backend == "synthetic"):
        raise UserError(f"--val-fraction {args.val_fraction:g} leaves nothing to train on, or splits synthetic images")
    if not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
        raise UserError(
            f"--scale {scale[0]:g} {scale[1]:g} and --ratio {ratio[0]:g} {ratio[1]:g}: two numbers above 0, the "
            "smaller first, of a scale up to 1 (the whole image)"
        )
    # With auto, a job that is started again resumes its own checkpoint; only its first start fine-tunes.
    begins = {"--branch": args.branch, "--resume": args.resume if args.resume != "auto" else ""}
    begins = {flag: file for flag, file in begins.items() if file}
    if len(begins) > 1:
        raise UserError(f"--branch and --resume {args.resume} both say where to begin: give --resume auto")
    for flag, file in begins.items():
        if args.pretrained or args.initial_checkpoint or args.finetune:
            raise UserError(
                f"weights to start from have no effect with {flag} {file}: leave out --finetune, "
                "--initial-checkpoint and --pretrained" + ", or give --resume auto" * (flag == "--resume")
            )
        if os.path.isdir(file):
            other = ", or --resume auto --experiment NAME" * (flag == "--resume")
            raise UserError(f"{flag} {file} is a folder: name the file, such as last.pth.tar in it{other}")
    if args.in_chans == 2:
        raise UserError(f"--in-chans {args.in_chans}: 3 (RGB) or 1 (grey)")


def _check_losses(args: Namespace) -> None:
    """Raise UserError for contradictions between train.py's flags about losses, teachers and precision."""
    mixed = mixes(args)
    if args.token_label and args.cls_weight == 0 and (args.dense_weight == 0 or args.token_label_size == 1):
        raise UserError(f"--cls-weight 0 leaves nothing to train without {DENSE} and a --dense-weight above 0")
    if args.kd_only and (args.token_label or args.bce_loss or mixed or args.val_fraction > 0):
        raise UserError("--kd-only has no labels: no --token-label, --bce-loss, --mixup, --cutmix, --val-fraction")
    of_classes = [KINDS[kind].of_classes for kind in args.kd_distill_type]
    if args.kd_only and args.num_classes and not any(of_classes):
        kind = args.kd_distill_type[0]
        raise UserError(f"--kd-only with --kd-distill-type {kind} trains no heads: leave out --num-classes")
    if args.freeze and args.kd_model_name and not all(of_classes):
        raise UserError(
            "--freeze and --kd-distill-type other than logit: frozen features learn nothing; leave out one of them"
        )
    other_view = args.kd_size is not None or "whole" in args.kd_view or (args.kd_model_name and args.train_img_sizes)
    if (mixed or args.compat) and other_view:
        raise UserError(
            "--mixup, --cutmix and --compat: the teacher must see what the student sees; leave out --kd-size, "
            "--kd-view and --train-img-sizes"
        )
    if args.freeze and args.grad_checkpointing:
        raise UserError("--freeze stores no activations: remove --grad-checkpointing")
    if args.amp and args.model_dtype != "float32":
        raise UserError(f"--amp and --model-dtype {args.model_dtype} both set the precision: keep one of them")


def _check_divided(args: Namespace, flag: str) -> None:
    """Raise UserError for what FSDP2 or distributed tensors can't do with `flag`; volo/train/optim.py has more."""
    if args.channels_last:
        raise UserError(f"{flag} and --channels-last: torch divides contiguous weights alone")
    if args.model_ema_force_cpu:
        raise UserError(f"{flag} and --model-ema-force-cpu: the average is divided as well")
    if args.torchcompile_scope == "model":
        raise UserError(f"{flag} and --torchcompile-scope model: blocks are compiled")
    if args.torchcompile_mode in CUDA_GRAPH_MODES:
        raise UserError(f"{flag} and CUDA graphs (--torchcompile-mode {args.torchcompile_mode}): blocks are compiled")
    if args.clip_grad is not None and args.clip_mode == "agc":
        raise UserError(f"{flag} and --clip-mode agc: the norms of units would need whole weights; --clip-mode norm")


def check_train(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what train.py can't do, decide `token_label_size` and `compat`, and return lines for the log.

    Raises:
        UserError: Flags contradict each other, or a flag has no effect.
    """
    _check_folder(args, args.data_dir, "DATA_DIR")
    _check_model(args.model, "--finetune")
    args.kd_model_name = "" if args.kd_model_name == [""] else args.kd_model_name  # [""] in a recipe means no teacher
    notes = _settle_token_labels(args) + _settle_compat(args) + check_flags(args, flags)
    for check in (_check_pixels, _check_compile, _check_data, _check_losses):
        check(args)
    if args.kd_model_name:
        teachers_of(args)
    check_drop_path(args)
    if flag := sharding_flag(args):
        _check_divided(args, flag)
    _check_trackers(args)
    return notes + _remarks(args)


def check_images(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what validate.py and generate_label.py can't do, and return lines for the log.

    Raises:
        UserError: As in `check_train`.
    """
    _check_folder(args, args.data, "DATA")
    return check_weights(args, flags)


def check_weights(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Check the flags about images, and decide where the weights come from, in all programs except train.py; return
    lines for the log.

    Raises:
        UserError: There are two sources of weights or none, or a flag has no effect.
    """
    _check_model(args.model or "", "--checkpoint")
    notes = check_flags(args, flags)
    _check_pixels(args)
    if "torchcompile" in args:
        _check_compile(args)
    if args.use_ema and args.no_use_ema:
        raise UserError("--use-ema and --no-use-ema contradict each other: keep one of them")
    if args.model is None and not args.checkpoint:
        raise UserError("--model is missing, or a --checkpoint that says what model it holds")
    if args.checkpoint or args.pretrained:
        return notes
    args.pretrained = True
    return [*notes, f"no --checkpoint: the published weights of {args.model}, as --pretrained"]


def teachers_of(args: Namespace) -> Namespace:
    """Return the flags of `PER_TEACHER`, each as a list with one value per teacher; `kd_size` has (H, W) pairs or None.

    Raises:
        UserError: A flag has neither one value nor one per teacher, or `--kd-view whole` is used without tokens.
    """
    count, flags = len(args.kd_model_name), Namespace()
    for row in PER_TEACHER:
        values, sides = getattr(args, row.dest) or [None], ""
        if row.dest == "kd_size" and args.kd_size:
            both, sides = len(values) == 2 * count, ", or a height and a width,"
            values = [*zip(values[::2], values[1::2], strict=True)] if both else [(side, side) for side in values]
        if len(values) not in (1, count):
            problem = f"{row.label} has {len(values)} values for {count} teacher{'s' * (count > 1)}"
            raise UserError(f"{problem}: give one{sides} for all or for each")
        setattr(flags, row.dest, values * count if len(values) == 1 else values)
    for model, kind, view in zip(flags.kd_model_name, flags.kd_distill_type, flags.kd_view, strict=True):
        if view == "whole" and not KINDS[kind].of_places:
            raise UserError(f"--kd-view whole: {model} gives no tokens (--kd-distill-type {kind})")
    return flags


def check_drop_path(args: Namespace) -> None:
    """Raise UserError if `--drop-path-mode subset` drops nothing at one of the batch sizes."""
    if args.drop_path_mode == "mask" or args.drop_path is None or args.train_batch_sizes == ["auto"]:
        return
    batch, label = min(args.train_batch_sizes or [args.batch_size]), "--train-batch-sizes"
    # The number of dropped images is rounded to a whole number, and is never all images.
    if batch == 1 or batch * args.drop_path < 0.5:
        raise UserError(
            f"--drop-path-mode {args.drop_path_mode} drops nothing at --drop-path {args.drop_path:g} with "
            f"{label if args.train_batch_sizes else '--batch-size'} {batch}: leave it out, or take larger batches"
        )


def sharding_flag(args: Namespace) -> str:
    """Return the flag that divides weights among ranks with its value, such as "--shard 4"; "" if none does."""
    flags = {"--tensor-parallel": args.tensor_parallel, "--shard": args.shard}
    return next((f"{flag} {ranks}" for flag, ranks in flags.items() if ranks > 1), "")


def other_sizes(args: Namespace) -> list[tuple[int, int]]:
    """Return the image sizes (H, W) that a run uses besides the model's own size."""
    sizes = [*(getattr(args, "train_img_sizes", None) or []), getattr(args, "val_img_size", None)]
    return [(side, side) for side in dict.fromkeys(sizes) if side]


def trackers_of(args: Namespace) -> list[str]:
    """Return the names of the requested experiment trackers."""
    return [name for name in TRACKERS if getattr(args, f"log_{name}")]


def _check_trackers(args: Namespace) -> None:
    for name in trackers_of(args):
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder without a package, such as a tracker's own ./wandb
            raise UserError(f"--log-{name} needs {name}: {install_command(name)}")


def join_data_dir(args: Namespace, label: str, dest: str) -> None:
    """Set `dest` to the data folder, which is given as a positional argument or as `--data-dir`.

    Raises:
        UserError: Both are given, and they differ.
    """
    option = args.__dict__.pop("data_dir_option")
    positional = getattr(args, dest)
    if option and positional and option != positional:
        raise UserError(f"{label} is given twice: {positional} and --data-dir {option}")
    setattr(args, dest, positional or option)


def _check_folder(args: Namespace, root: str | None, label: str) -> None:
    if needs_folder(args.dataset) and not root and args.data_backend != "synthetic":
        raise UserError(f"{label} is missing: the folder that holds the images")


def _check_model(model: str, flag: str) -> None:
    """Raise UserError if `--model` names weights, which `flag` takes."""
    if model.endswith((".pt", ".pth", ".tar", ".ckpt", ".safetensors")) or (os.sep in model and os.path.exists(model)):
        raise UserError(f"--model {model} names no architecture: weights are given as {flag} {model}")


def _settle_token_labels(args: Namespace) -> list[str]:
    """Set the token-label size to 1, as in the published code, if there are no labels and the user gives no size."""
    if not args.token_label or LABELS.met(args):
        return []
    args.token_label_size = args.token_label_size or 1
    targets = "class targets alone" if args.token_label_size == 1 else "every token on its image's class"
    return [f"--token-label without --token-label-data trains {targets}"]


def _settle_compat(args: Namespace) -> list[str]:
    """Reduce `--compat` to the rows that have an effect in this run, and set the flag that one of them stands for."""
    if args.compat is None:
        return []
    rows, everything = resolve(args.compat)
    if not (args.token_label and args.token_label_data):
        raise UserError(f"--compat {args.compat[0]} has no effect without --token-label-data")
    if "target-sum" in rows and not 0 < args.smoothing < 1:
        if not everything:
            raise UserError("--compat target-sum has no effect without --smoothing above 0 and below 1")
        rows.remove("target-sum")
    args.compat = rows
    args.uncovered = "uniform" if "uncovered" in rows else args.uncovered
    return [f"--compat: {', '.join(rows)}"]


def _remarks(args: Namespace) -> list[str]:
    """Return lines about settings that are valid but may surprise."""
    notes = []
    started = any(vars(args)[dest] for dest in STARTS) or args.token_label  # labels teach from nothing, too
    if args.config and Path(args.config).stem == FINE_TUNING and not started:
        notes.append(
            f"warning: -c {FINE_TUNING} is for fine-tuning: add --pretrained or --finetune FILE; from nothing the "
            f"small network of -c {FROM_NOTHING} learns more"
        )
    if args.aa and args.aa != "none" and args.color_jitter != 0.4:
        notes.append(f"--color-jitter {args.color_jitter:g} is not used beside --aa {args.aa}; --aa '' would use it")
    if args.lr is not None and args.lr < args.min_lr and args.sched in ENDING_SCHEDULES:
        notes.append(f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}: the learning rate rises to it")
    return notes

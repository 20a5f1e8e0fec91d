"""Checks that concern several flags, and values that one flag decides for another."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from tlt.data.sources import needs_folder
from tlt.errors import UserError, install_command
from tlt.upstream import resolve
from volo.config.flag_table import Flag, check_flags
from volo.config.flags_data import DENSE, LABELS, PER_TEACHER
from volo.config.flags_train import CUDA_GRAPH_MODES, ENDING_SCHEDULES, TRACKERS, mixes

# When a rule is broken, and its message, in which {flag} stands for the flag's value.
Rule = tuple[Callable[[Namespace], bool], str]


def check_rules(args: Namespace, rules: tuple[Rule, ...]) -> None:
    """Raise UserError for the first rule that is broken."""
    for is_broken, message in rules:
        if is_broken(args):
            raise UserError(message.format_map(vars(args)))


PIXELS: tuple[Rule, ...] = (
    (
        lambda a: not {len(a.mean or [0]), len(a.std or [0])} <= {1, 3},
        "--mean and --std take one number, or three (red, green, blue)",
    ),
    (
        lambda a: bool(a.input_size) and a.input_size[0] not in ((a.in_chans or 3,) if "in_chans" in a else (1, 3)),
        "--input-size {input_size[0]} {input_size[1]} {input_size[2]}: images are read as RGB, the first number must "
        "be 3, or of a grey model (volo train --in-chans 1) 1",
    ),
)
COMPILE: tuple[Rule, ...] = (
    (
        lambda a: a.torchcompile_scope == "blocks" and a.torchcompile_mode in CUDA_GRAPH_MODES,
        "--torchcompile-mode {torchcompile_mode} records where a graph's weights lie, and blocks of other weights "
        "share a graph: --torchcompile-scope model, or --torchcompile-mode max-autotune-no-cudagraphs",
    ),
)
TRAIN: tuple[Rule, ...] = (
    (
        lambda a: len(a.lr_noise or []) > 2 or (a.lr_noise or []) != sorted(a.lr_noise or []),
        "--lr-noise takes one or two parts of the epochs, the smaller first",
    ),
    (
        lambda a: a.val_fraction == 1 or (a.val_fraction > 0 and a.data_backend == "synthetic"),
        "--val-fraction {val_fraction:g} leaves nothing to train on, or splits synthetic images",
    ),
    (
        lambda a: not (0 < a.scale[0] <= a.scale[1] <= 1 and 0 < a.ratio[0] <= a.ratio[1]),
        "--scale {scale[0]:g} {scale[1]:g} and --ratio {ratio[0]:g} {ratio[1]:g}: two numbers above 0, the smaller "
        "first, of a scale up to 1 (the whole image)",
    ),
    (
        # With auto, a job that is started again resumes its own checkpoint; only its first start fine-tunes.
        lambda a: bool(a.pretrained or a.initial_checkpoint or a.finetune) and a.resume not in ("", "auto"),
        "weights to start from have no effect with --resume {resume}: leave out --finetune, --initial-checkpoint and "
        "--pretrained, or give --resume auto",
    ),
    (
        lambda a: a.resume != "auto" and os.path.isdir(a.resume),
        "--resume {resume} is a folder: name the file, such as last.pth.tar in it, or --resume auto --experiment NAME",
    ),
    (
        lambda a: a.token_label and a.cls_weight == 0 and (a.dense_weight == 0 or a.token_label_size == 1),
        f"--cls-weight 0 leaves nothing to train without {DENSE} and a --dense-weight above 0",
    ),
    (
        lambda a: "auto" in (a.train_batch_sizes or []) and len(a.train_batch_sizes) > 1,
        "--train-batch-sizes takes auto alone, or a batch for each of --train-img-sizes",
    ),
    (lambda a: a.in_chans == 2, "--in-chans {in_chans}: 3 (RGB) or 1 (grey)"),
    (
        lambda a: a.kd_only and (a.token_label or a.bce_loss or mixes(a) or a.val_fraction > 0),
        "--kd-only has no labels: no --token-label, --bce-loss, --mixup, --cutmix, --val-fraction",
    ),
    (
        lambda a: a.kd_only and bool(a.num_classes) and "logit" not in a.kd_distill_type,
        "--kd-only with --kd-distill-type {kd_distill_type[0]} trains no heads: leave out --num-classes",
    ),
    (
        lambda a: a.freeze and bool(a.kd_model_name) and bool({*a.kd_distill_type} - {"logit"}),
        "--freeze and --kd-distill-type other than logit: frozen features learn nothing; leave out one of them",
    ),
    (
        lambda a: (
            (mixes(a) or bool(a.compat))
            and (a.kd_size is not None or "whole" in a.kd_view or bool(a.kd_model_name and a.train_img_sizes))
        ),
        "--mixup, --cutmix and --compat: the teacher must see what the student sees; leave out --kd-size, --kd-view "
        "and --train-img-sizes",
    ),
    (lambda a: a.freeze and a.grad_checkpointing, "--freeze stores no activations: remove --grad-checkpointing"),
    (
        lambda a: a.amp and a.model_dtype != "float32",
        "--amp and --model-dtype {model_dtype} both set the precision: keep one of them",
    ),
)
# Rules for --shard and --tensor-parallel: FSDP2 or distributed tensors can't do this; see also volo/train/optim.py.
DIVIDED: tuple[Rule, ...] = (
    (lambda a: a.channels_last, "--channels-last: torch divides contiguous weights alone"),
    (lambda a: a.model_ema_force_cpu, "--model-ema-force-cpu: the average is divided as well"),
    (lambda a: a.torchcompile_scope == "model", "--torchcompile-scope model: blocks are compiled"),
    (
        lambda a: a.torchcompile_mode in CUDA_GRAPH_MODES,
        "CUDA graphs (--torchcompile-mode {torchcompile_mode}): blocks are compiled",
    ),
    (
        lambda a: a.clip_grad is not None and a.clip_mode == "agc",
        "--clip-mode agc: the norms of units would need whole weights; --clip-mode norm",
    ),
)


def check_train(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what train.py can't do, decide `token_label_size` and `compat`, and return lines for the log.

    Raises:
        UserError: Flags contradict each other, or a flag has no effect.
    """
    _check_folder(args, args.data_dir, "DATA_DIR")
    args.kd_model_name = "" if args.kd_model_name == [""] else args.kd_model_name  # [""] in a recipe means no teacher
    notes = _settle_token_labels(args) + _settle_compat(args) + check_flags(args, flags)
    check_rules(args, (*PIXELS, *COMPILE, *TRAIN))
    if args.kd_model_name:
        teachers_of(args)
    check_drop_path(args)
    if flag := sharding_flag(args):
        check_rules(args, tuple((is_broken, f"{flag} and {message}") for is_broken, message in DIVIDED))
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
    notes = check_flags(args, flags)
    check_rules(args, PIXELS + (COMPILE if "torchcompile" in args else ()))
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
            told = f"{row.label} has {len(values)} values for {count} teacher{'s' * (count > 1)}"
            raise UserError(f"{told}: give one{sides} for all or for each")
        setattr(flags, row.dest, values * count if len(values) == 1 else values)
    for model, kind, view in zip(flags.kd_model_name, flags.kd_distill_type, flags.kd_view, strict=True):
        if view == "whole" and kind != "token":
            raise UserError(f"--kd-view whole: {model} gives no tokens (--kd-distill-type {kind})")
    return flags


def check_drop_path(args: Namespace) -> None:
    """Raise UserError if `--drop-path-mode subset` drops nothing at this batch size."""
    if args.drop_path_mode == "mask" or args.drop_path is None:
        return
    # The number of dropped images is rounded to a whole number, and is never all images.
    if args.batch_size == 1 or args.batch_size * args.drop_path < 0.5:
        raise UserError(
            f"--drop-path-mode {args.drop_path_mode} drops nothing at --drop-path {args.drop_path:g} with "
            f"--batch-size {args.batch_size}: leave it out, or take larger batches"
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
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder without a package, such as a tracker's own ./wandb
            raise UserError(f"--log-{name} needs {name}: {install_command(name)}")


def join_data_dir(args: Namespace, shown: str, dest: str) -> None:
    """Set `dest` to the data folder, which is given as a positional argument or as `--data-dir`.

    Raises:
        UserError: Both are given, and they differ.
    """
    option = args.__dict__.pop("data_dir_option")
    positional = getattr(args, dest)
    if option and positional and option != positional:
        raise UserError(f"{shown} is given twice: {positional} and --data-dir {option}")
    setattr(args, dest, positional or option)


def _check_folder(args: Namespace, root: str | None, shown: str) -> None:
    if needs_folder(args.dataset) and not root and args.data_backend != "synthetic":
        raise UserError(f"{shown} is missing: the folder that holds the images")


def _settle_token_labels(args: Namespace) -> list[str]:
    """Set the token-label size to 1, as in the published code, if there are no labels and the user gives no size."""
    if not args.token_label or LABELS.met(args):
        return []
    args.token_label_size = args.token_label_size or 1
    what = "class targets alone" if args.token_label_size == 1 else "every token on its image's class"
    return [f"--token-label without --token-label-data trains {what}"]


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
    if args.aa and args.aa != "none" and args.color_jitter != 0.4:
        notes.append(f"--color-jitter {args.color_jitter:g} is not used beside --aa {args.aa}; --aa '' would use it")
    if args.lr is not None and args.lr < args.min_lr and args.sched in ENDING_SCHEDULES:
        notes.append(f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}: the learning rate rises to it")
    return notes

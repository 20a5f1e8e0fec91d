"""Checks of the arguments before a program starts: contradictions, and flags without an effect."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec

from tlt.data.sources.dataset_kinds import needs_folder, parse_kind
from tlt.errors import UserError
from tlt.upstream.rows import resolve
from volo.config.flag_table import Flag, check_flags, nearest
from volo.config.flags_data import DENSE, LABELS
from volo.config.flags_optimizer import CYCLIC_SCHEDULES, SCHEDULES
from volo.config.flags_train import CUDA_GRAPH_MODES, TRACKERS, mixes


def resolve_aliases(args: Namespace) -> list[str]:
    """Replace old flags by new ones, in place; return lines for the user."""
    notes = []
    for dest in ("apex_amp", "native_amp"):
        if getattr(args, dest):
            args.amp = True
            said = "apex has removed its own" if dest == "apex_amp" else "the only one there is"
            notes.append(f"--{dest.replace('_', '-')}: torch's mixed precision ({said}), as --amp")
    if getattr(args, "drop_connect", None) is not None:
        if args.drop_path not in (None, args.drop_connect):
            shown = f"--drop-connect {args.drop_connect:g} and --drop-path {args.drop_path:g}"
            raise UserError(f"{shown} set the same rate: keep --drop-path")
        args.drop_path = args.drop_connect
        notes.append(f"--drop-connect is the old name of --drop-path, which is now {args.drop_path:g}")
    if getattr(args, "pretrained_path", None):
        if args.finetune not in ("", args.pretrained_path):
            raise UserError(f"--pretrained-path {args.pretrained_path} is --finetune {args.finetune}: keep one of them")
        args.finetune, args.pretrained = args.pretrained_path, False
        notes.append(f"--pretrained-path: --finetune {args.finetune}")
    return notes


def check_train(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what train.py cannot honour; settle `token_label_size`; return lines for the log.

    Raises:
        UserError: A contradiction, or a flag without effect.
    """
    _check_schedule(args, flags)
    _check_data(args)
    _check_weights(args)
    notes = _settle_token_labels(args)
    notes += _settle_compat(args)
    check_flags(args, flags)
    _check_compile(args)
    if args.token_label and args.cls_weight == 0 and (args.dense_weight == 0 or args.token_label_size == 1):
        raise UserError(f"--cls-weight 0 leaves nothing to train without {DENSE} and a --dense-weight above 0")
    if args.in_chans == 2 or (args.token_label_teacher and args.in_chans == 1):
        raise UserError(f"--in-chans {args.in_chans}: 3 (RGB) or 1 (grey), which --token-label-teacher cannot read")
    if args.freeze and args.grad_checkpointing:
        raise UserError("--freeze stores no activations: remove --grad-checkpointing")
    if args.cutmix_minmax is not None and len(args.cutmix_minmax) != 2:
        raise UserError("--cutmix-minmax takes two numbers, the least and the most")
    check_drop_path(args)
    if args.amp and args.model_dtype != "float32":
        raise UserError(f"--amp and --model-dtype {args.model_dtype} both set the precision: keep one of them")
    _check_divided(args)
    _check_trackers(args)
    return notes + _remarks(args)


# What torch's FSDP2 or its distributed tensors can't do, by flag; optimizers are in volo/train/optim.py.
_NOT_SHARDED = (
    ("--channels-last", "torch divides contiguous weights alone", lambda a: a.channels_last),
    ("--model-ema-force-cpu", "it divides the average as well", lambda a: a.model_ema_force_cpu),
    ("--torchcompile-scope model", "it compiles blocks", lambda a: a.torchcompile_scope == "model"),
    ("CUDA graphs (--torchcompile-mode)", "it compiles blocks", lambda a: a.torchcompile_mode in CUDA_GRAPH_MODES),
)


def divides_weights(args: Namespace) -> str:
    """Return the flag that divides weights among ranks, as one types it; "" where they are whole on every rank."""
    flags = {"--tensor-parallel": args.tensor_parallel, "--shard": args.shard}
    return next((f"{flag} {ranks}" for flag, ranks in flags.items() if ranks > 1), "")


def _check_divided(args: Namespace) -> None:
    flag = divides_weights(args)
    for what, why, given in _NOT_SHARDED if flag else ():
        if given(args):
            raise UserError(f"{flag} and {what}: {why}; leave one of them out")
    if args.tensor_parallel > 1 and args.clip_grad is not None and args.clip_mode == "agc":
        raise UserError(f"{flag} and --clip-mode agc: units lie on several ranks; --clip-mode norm, or --shard alone")


def trackers_of(args: Namespace) -> list[str]:
    """Return the experiment trackers that are asked for."""
    return [name for name in TRACKERS if getattr(args, f"log_{name}")]


def _check_trackers(args: Namespace) -> None:
    for name in trackers_of(args):
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder such as the ./wandb that it writes is no package
            raise UserError(f"--log-{name} needs {name}: pip install 'volo-tlt[{name}]'")


def join_data_dir(args: Namespace, shown: str, dest: str) -> None:
    """Set `dest` to the data folder, which the command line names by its place or as `--data-dir`.

    Raises:
        UserError: It has both, and they differ.
    """
    option = args.__dict__.pop("data_dir_option")
    positional = getattr(args, dest)
    if option and positional and option != positional:
        raise UserError(f"{shown} is given twice: {positional} and --data-dir {option}")
    setattr(args, dest, positional or option)


def check_images(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what validate.py, generate_label.py and `volo predict` cannot honour; return lines for the log.

    Raises:
        UserError: As `check_train`.
    """
    notes = resolve_aliases(args)
    if "data" in args:
        _check_dataset(args, args.data, "DATA")
    check_pixels(args)
    return notes + check_weights(args, flags)


def check_weights(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Decide where the weights come from, for all programs except train.py; return lines for the log.

    Raises:
        UserError: Two sources of weights, or none; a flag without effect.
    """
    check_flags(args, flags)
    if "torchcompile" in args:
        _check_compile(args)
    if args.checkpoint and args.pretrained:
        raise UserError("--checkpoint and --pretrained both name weights: keep one of them")
    if args.use_ema and args.no_use_ema:
        raise UserError("--use-ema and --no-use-ema contradict each other: keep one of them")
    if args.model is None and not args.checkpoint:
        raise UserError("--model is missing, or a --checkpoint that says what model it holds")
    if args.checkpoint or args.pretrained:
        return []
    args.pretrained = True
    return [f"no --checkpoint: the published weights of {args.model}, as --pretrained"]


def _check_schedule(args: Namespace, flags: Mapping[str, Flag]) -> None:
    if args.sched == "plateau":
        raise UserError("--sched plateau: the schedule has to be a function of the update number; use cosine or step")
    if args.sched not in SCHEDULES:
        near = nearest(args.sched, SCHEDULES)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(SCHEDULES)}"
        raise UserError(f"--sched {args.sched}: unknown schedule, {hint}")
    scaled = any(getattr(args, dest) != flags[dest].default for dest in flags["lr"].excludes)
    if args.lr is not None and scaled:
        raise UserError(f"--lr {args.lr:g} is absolute and --lr-base... scales with the batch: keep one of them")
    if args.lr_noise is not None and (len(args.lr_noise) > 2 or args.lr_noise != sorted(args.lr_noise)):
        raise UserError("--lr-noise takes one or two parts of the epochs, the smaller first")
    if args.lr_cycle_mul == 0 or args.decay_epochs == 0:
        raise UserError("--lr-cycle-mul and --decay-epochs must be larger than 0")


def _check_dataset(args: Namespace, root: str | None, shown: str) -> None:
    kind, _ = parse_kind(args.dataset)
    if kind and args.data_backend == "synthetic":
        raise UserError(f"--dataset {args.dataset} has no effect with --data-backend synthetic: keep one of them")
    if not root and args.data_backend != "synthetic" and needs_folder(args.dataset):
        raise UserError(f"{shown} is missing: the folder that holds the images")


def check_pixels(args: Namespace) -> None:
    """Check pixel means, deviations and image sizes.

    Raises:
        UserError: A value is impossible, or two contradict each other.
    """
    for dest in ("mean", "std"):
        values = getattr(args, dest)
        if values is not None and len(values) not in (1, 3):
            raise UserError(f"--{dest} takes one number, or three (red, green, blue): {len(values)} are given")
    if args.input_size is None:
        return
    channels, height, width = args.input_size
    shown = f"--input-size {channels} {height} {width}"
    if channels != (getattr(args, "in_chans", None) or 3):
        raise UserError(f"{shown}: images are read as RGB, the first number must be 3, or with --in-chans 1 (grey) 1")
    if args.img_size is not None and (height, width) != (args.img_size, args.img_size):
        raise UserError(f"{shown} and --img-size {args.img_size} differ: keep one of them")


def _check_data(args: Namespace) -> None:
    _check_dataset(args, args.data_dir, "DATA_DIR")
    if args.val_fraction == 1 or (args.val_fraction and args.data_backend == "synthetic"):
        raise UserError(f"--val-fraction {args.val_fraction:g} leaves nothing to train on, or splits synthetic images")
    check_pixels(args)
    if args.validation_batch_size is not None and args.validation_batch_size_multiplier != 1:
        raise UserError("--validation-batch-size and --validation-batch-size-multiplier both set it: keep one of them")
    for dest in ("scale", "ratio"):
        values = getattr(args, dest)
        if len(values) != 2 or not 0 < values[0] <= values[1]:
            raise UserError(f"--{dest} {' '.join(f'{v:g}' for v in values)}: two numbers above 0, the smaller first")
    if args.scale[1] > 1:
        raise UserError(f"--scale {args.scale[0]:g} {args.scale[1]:g}: the crop cannot be larger than the image (1)")
    if args.tta > 1:
        raise UserError(f"--tta {args.tta}: test-time augmentation is not supported; remove the flag")


def _check_weights(args: Namespace) -> None:
    sources = [f"--{d.replace('_', '-')}" for d in ("pretrained", "initial_checkpoint", "finetune") if getattr(args, d)]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)} name different weights to start from: keep one of them")
    # A job that is started again goes on from its own checkpoint; only its first start fine-tunes.
    if sources and args.resume not in ("", "auto"):
        raise UserError(f"{sources[0]} has no effect with --resume {args.resume}: keep one, or --resume auto")
    if args.drop_block:
        raise UserError(
            f"--drop-block {args.drop_block:g}: no VOLO or LV-ViT has DropBlock; use --drop-path "
            "(other models: --model-kwargs drop_block_rate=...)"
        )


def _settle_token_labels(args: Namespace) -> list[str]:
    """Without labels the token-label size is 1, as published, unless the command line says otherwise."""
    if args.token_label_data and args.token_label_teacher:
        raise UserError(
            f"--token-label-data {args.token_label_data} and --token-label-teacher {args.token_label_teacher} both "
            "give labels: keep one of them"
        )
    if not args.token_label or LABELS.met(args):
        return []
    args.token_label_size = args.token_label_size or 1
    what = "class targets alone" if args.token_label_size == 1 else "every token on its image's class"
    return [f"--token-label without --token-label-data trains {what}"]


def _settle_compat(args: Namespace) -> list[str]:
    """Reduce `--compat` to the rows that have an effect in this run, and set the flag that is a row of it."""
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


def _check_compile(args: Namespace) -> None:
    if args.torchcompile_scope == "blocks" and args.torchcompile_mode in CUDA_GRAPH_MODES:
        raise UserError(
            f"--torchcompile-mode {args.torchcompile_mode} records where a graph's weights lie, and blocks of other "
            "weights share a graph: --torchcompile-scope model, or --torchcompile-mode max-autotune-no-cudagraphs"
        )


def check_drop_path(args: Namespace) -> None:
    """Raise UserError if `--drop-path-mode subset` drops nothing at this batch size."""
    if args.drop_path_mode == "mask" or args.drop_path is None:
        return
    # Whole images are dropped, to the nearest number of them, and never all.
    if args.batch_size == 1 or args.batch_size * args.drop_path < 0.5:
        raise UserError(
            f"--drop-path-mode {args.drop_path_mode} drops nothing at --drop-path {args.drop_path:g} with "
            f"--batch-size {args.batch_size}: leave it out, or take larger batches"
        )


def _remarks(args: Namespace) -> list[str]:
    """Return lines about settings that are valid but may surprise."""
    notes = []
    if args.token_label and mixes(args) and not args.no_mix_token:
        notes.append("MixToken mixes what --mixup or --cutmix mixed; --no-mix-token would leave it at that")
    if args.aa and args.aa != "none" and args.color_jitter != 0.4:
        notes.append(f"--color-jitter {args.color_jitter:g} is not used beside --aa {args.aa}; --aa '' would use it")
    fitted = getattr(args, "defaulted", ())  # no flags of train.py: all are as given
    if "warmup_epochs" not in fitted and args.warmup_epochs >= args.epochs and not args.warmup_prefix:
        notes.append(f"--warmup-epochs {args.warmup_epochs} covers all of --epochs {args.epochs}")
    if args.lr is not None and args.lr < args.min_lr and args.sched in CYCLIC_SCHEDULES:
        notes.append(f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}: the learning rate rises to it")
    return notes

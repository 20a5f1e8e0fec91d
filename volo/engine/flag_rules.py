"""What the programs refuse before they start: contradictions, and flags that would have no effect."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tlt.errors import UserError
from volo.engine.flag_table import Flag, nearest
from volo.engine.flags_train import SCHEDULES

_FOLDERS = ("", "imagefolder", "image_folder", "folder")
_COMPILE = "TorchScript is not supported: use --torchcompile"
_DENSE = "dense targets (--token-label-data, and no --token-label-size 1)"
CYCLIC = ("cosine", "tanh", "poly")
# What --no-aug leaves no room for; --train-interpolation it uses.
AUGMENTATION_FLAGS = ("scale", "ratio", "hflip", "vflip", "aa", "color_jitter", "reprob", "remode", "recount")
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"

# Flags that can only stay at their default, and why.
_REFUSED_TRAIN: Mapping[str, str] = {
    "torchscript": _COMPILE,
    "jsd": _SPLITS,
    "aug_splits": _SPLITS,
    "resplit": _SPLITS,
    "split_bn": "there are no augmentation splits, so BatchNorm cannot be split by them: remove the flag",
    "patience_epochs": "belongs to --sched plateau, which is not supported: remove the flag",
}
_REFUSED_VALIDATE: Mapping[str, str] = {
    "torchscript": _COMPILE,
    "legacy_jit": _COMPILE,
    "tf_preprocessing": "TensorFlow's preprocessing is not supported: remove the flag",
    "num_gpu": "one process drives one GPU: torchrun --nproc-per-node N validate.py ...",
}


class Need(NamedTuple):
    """Flags that mean nothing unless `met(args)` holds, which `of` puts in words."""

    flags: tuple[str, ...]
    of: str
    met: Callable[[Namespace], bool]


def _cuts(args: Namespace) -> bool:
    return args.cutmix > 0 or args.cutmix_minmax is not None


def _mixes(args: Namespace) -> bool:
    return args.mixup > 0 or _cuts(args)


_NEEDS_PRECISION = (
    Need(("amp_dtype",), "--amp", lambda a: a.amp),
    Need(("torchcompile_mode",), "--torchcompile inductor", lambda a: a.torchcompile == "inductor"),
)
_NEEDS_VALIDATE = (
    *_NEEDS_PRECISION,
    Need(("use_ema",), "--checkpoint", lambda a: bool(a.checkpoint)),
    Need(("results_format",), "--results-file", lambda a: bool(a.results_file)),
)
_NEEDS_TRAIN = (
    *_NEEDS_PRECISION,
    Need(
        ("token_label_data", "token_label_size", "cls_weight", "ground_truth"), "--token-label", lambda a: a.token_label
    ),
    Need(("no_mix_token",), "--token-label", lambda a: a.token_label),
    # Without dense targets there is no dense loss, so a weight of 0 says what happens.
    Need(("dense_weight",), "--token-label", lambda a: a.token_label or a.dense_weight == 0),
    Need(("ground_truth",), _DENSE, lambda a: a.token_label_size != 1),
    Need(("dense_weight",), _DENSE, lambda a: a.token_label_size != 1 or a.dense_weight == 0),
    Need(("token_label_area", "bad_label"), "--token-label-data", lambda a: bool(a.token_label_data)),
    Need(("gt_weight_agree", "gt_weight_disagree"), "--ground-truth", lambda a: a.ground_truth),
    Need(("mixup_prob", "mixup_mode", "mixup_off_epoch"), "--mixup or --cutmix", _mixes),
    Need(("mixup_switch_prob",), "--mixup and --cutmix", lambda a: a.mixup > 0 and _cuts(a)),
    Need(("model_ema_decay", "model_ema_warmup", "model_ema_force_cpu"), "--model-ema", lambda a: a.model_ema),
    Need(("clip_mode",), "--clip-grad", lambda a: a.clip_grad is not None),
    Need(("lr_noise_pct", "lr_noise_std"), "--lr-noise", lambda a: a.lr_noise is not None),
    Need(("no_resume_opt", "allow_changed_data"), "--resume", lambda a: bool(a.resume)),
    Need(("warmup_lr", "warmup_prefix"), "--warmup-epochs", lambda a: a.warmup_epochs > 0),
    Need(("remode", "recount"), "--reprob", lambda a: a.reprob > 0),
    Need(AUGMENTATION_FLAGS, "augmentation (--no-aug)", lambda a: not a.no_aug),
    Need(("outlooker_drop_path",), "--drop-path above 0", lambda a: a.drop_path or "drop_path_rate" in a.model_kwargs),
    Need(("decay_epochs",), "--sched step", lambda a: a.sched == "step"),
    Need(
        ("decay_rate",),
        "--sched step, poly or several cosine cycles",
        lambda a: a.sched in ("step", "poly") or (a.sched == "cosine" and a.lr_cycle_limit > 1),
    ),
    Need(("min_lr", "lr_cycle_limit"), "--sched cosine, tanh or poly", lambda a: a.sched in CYCLIC),
    # 0 says what happens.
    Need(("cooldown_epochs",), "--sched cosine, tanh or poly", lambda a: a.sched in CYCLIC or a.cooldown_epochs == 0),
    Need(("lr_cycle_mul",), "--lr-cycle-limit above 1", lambda a: a.lr_cycle_limit > 1),
)


def resolve_aliases(args: Namespace) -> list[str]:
    """Map old flags onto new ones, in place; return what the user should be told about it."""
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
    return notes


def check_train(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what train.py cannot honour; settle `token_label_size`; return lines for the log.

    Raises:
        UserError: A contradiction, or a flag without effect.
    """
    _check_refused(args, flags, _REFUSED_TRAIN)
    _check_schedule(args)
    _check_data(args)
    _check_weights(args)
    notes = _settle_token_labels(args)
    _check_needs(args, flags, _NEEDS_TRAIN)
    if args.token_label and args.cls_weight == 0 and (args.dense_weight == 0 or args.token_label_size == 1):
        raise UserError(f"--cls-weight 0 leaves nothing to train without {_DENSE} and a --dense-weight above 0")
    _check_mixing(args)
    return notes + _remarks(args)


def check_validate(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    """Refuse what validate.py and generate_label.py cannot honour; return lines for the log.

    Raises:
        UserError: As `check_train`.
    """
    _check_refused(args, flags, _REFUSED_VALIDATE)
    _check_dataset(args, args.data, "DATA")
    _check_pixels(args)
    _check_needs(args, flags, _NEEDS_VALIDATE)
    if args.checkpoint and args.pretrained:
        raise UserError("--checkpoint and --pretrained both name weights: keep one of them")
    if args.model is None and not args.checkpoint:
        raise UserError("--model is missing, or a --checkpoint that says what model it holds")
    if args.checkpoint or args.pretrained:
        return []
    args.pretrained = True
    return [f"no --checkpoint: the published weights of {args.model}, as --pretrained"]


def _check_refused(args: Namespace, flags: Mapping[str, Flag], refused: Mapping[str, str]) -> None:
    for dest, reason in refused.items():
        row = flags.get(dest)
        if row is not None and getattr(args, dest) != row.default:
            raise UserError(f"{_shown(row, getattr(args, dest))}: {reason}")


def _check_needs(args: Namespace, flags: Mapping[str, Flag], needs: tuple[Need, ...]) -> None:
    for need in needs:
        for dest in (name for name in need.flags if name in flags):
            value = getattr(args, dest)
            if value != flags[dest].default and not need.met(args):
                raise UserError(f"{_shown(flags[dest], value)} has no effect without {need.of}")


def _shown(row: Flag, value: Any) -> str:
    """The flag as it would stand on a command line."""
    if row.switch:
        return row.label
    return f"{row.label} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _check_schedule(args: Namespace) -> None:
    if args.sched == "plateau":
        raise UserError("--sched plateau: the schedule has to be a function of the update number; use cosine or step")
    if args.sched not in SCHEDULES:
        near = nearest(args.sched, SCHEDULES)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(SCHEDULES)}"
        raise UserError(f"--sched {args.sched}: unknown schedule, {hint}")
    lr_bases = (args.lr_base, args.lr_base_size, args.lr_base_scale)
    if args.lr is not None and lr_bases != (1.6e-3, 1024, "linear"):
        raise UserError(f"--lr {args.lr:g} is absolute and --lr-base... scales with the batch: keep one of them")
    if args.lr_noise is not None and (len(args.lr_noise) > 2 or args.lr_noise != sorted(args.lr_noise)):
        raise UserError("--lr-noise takes one or two parts of the epochs, the smaller first")
    if args.lr_cycle_mul == 0 or args.decay_epochs == 0:
        raise UserError("--lr-cycle-mul and --decay-epochs must be larger than 0")


def _check_dataset(args: Namespace, root: str | None, shown: str) -> None:
    if args.dataset.lower() not in _FOLDERS:
        raise UserError(
            f"--dataset {args.dataset}: image folders ({shown}/SPLIT/CLASS/IMAGE) alone are read; leave it out"
        )
    if not root and args.data_backend != "synthetic":
        raise UserError(f"{shown} is missing: the folder that holds the images")


def _check_pixels(args: Namespace) -> None:
    for dest in ("mean", "std"):
        values = getattr(args, dest)
        if values is not None and len(values) not in (1, 3):
            raise UserError(f"--{dest} takes one number, or three (red, green, blue): {len(values)} are given")
    if args.input_size is None:
        return
    channels, height, width = args.input_size
    shown = f"--input-size {channels} {height} {width}"
    if channels != 3:
        raise UserError(f"{shown}: images are read as RGB, the first number must be 3")
    if args.img_size is not None and (height, width) != (args.img_size, args.img_size):
        raise UserError(f"{shown} and --img-size {args.img_size} differ: keep one of them")


def _check_data(args: Namespace) -> None:
    _check_dataset(args, args.data_dir, "DATA_DIR")
    _check_pixels(args)
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
    """Without label data the token-label size is 1, as published, unless the command line says otherwise."""
    if not args.token_label or args.token_label_data:
        return []
    args.token_label_size = args.token_label_size or 1
    what = "class targets alone" if args.token_label_size == 1 else "every token on its image's class"
    return [f"--token-label without --token-label-data trains {what}"]


def _check_mixing(args: Namespace) -> None:
    if args.cutmix_minmax is not None and len(args.cutmix_minmax) != 2:
        raise UserError("--cutmix-minmax takes two numbers, the least and the most")


def _remarks(args: Namespace) -> list[str]:
    """What is honoured but may surprise."""
    notes = []
    if args.token_label and _mixes(args) and not args.no_mix_token:
        notes.append("MixToken mixes what --mixup or --cutmix mixed; --no-mix-token would leave it at that")
    if args.aa and args.aa != "none" and args.color_jitter != 0.4:
        notes.append(f"--color-jitter {args.color_jitter:g} is not used beside --aa {args.aa}; --aa '' would use it")
    if args.warmup_epochs >= args.epochs and not args.warmup_prefix:
        notes.append(f"--warmup-epochs {args.warmup_epochs} covers all of --epochs {args.epochs}")
    if args.lr is not None and args.lr < args.min_lr and args.sched in CYCLIC:
        notes.append(f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}: the learning rate rises to it")
    return notes

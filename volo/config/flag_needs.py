"""Flags that mean nothing without others, and flags that can only stay as they are: the tables, and their check."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tlt.errors import UserError
from volo.config.flag_table import Flag

_COMPILE = "TorchScript is not supported: use --torchcompile"
DENSE = "dense targets (--token-label-data or --token-label-teacher, and no --token-label-size 1)"
CYCLIC = ("cosine", "tanh", "poly")
# What --no-aug leaves no room for; --train-interpolation it uses.
AUGMENTATION_FLAGS = (
    "aug_order",
    "scale",
    "ratio",
    "hflip",
    "vflip",
    "aa",
    "color_jitter",
    "reprob",
    "remode",
    "recount",
)
_SPLITS = "AugMix splits and the Jensen-Shannon loss are not supported: remove the flag"

# Flags that can only stay at their default, and why.
REFUSED_TRAIN: Mapping[str, str] = {
    "torchscript": _COMPILE,
    "jsd": _SPLITS,
    "aug_splits": _SPLITS,
    "resplit": _SPLITS,
    "split_bn": "there are no augmentation splits, so BatchNorm cannot be split by them: remove the flag",
    "patience_epochs": "belongs to --sched plateau, which is not supported: remove the flag",
}
REFUSED_VALIDATE: Mapping[str, str] = {
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


def mixes(args: Namespace) -> bool:
    return args.mixup > 0 or _cuts(args)


def has_labels(args: Namespace) -> bool:
    return bool(args.token_label_data or args.token_label_teacher)


_NEEDS_PRECISION = (
    Need(("amp_dtype",), "--amp", lambda a: a.amp),
    Need(("torchcompile_mode",), "--torchcompile inductor", lambda a: a.torchcompile == "inductor"),
    Need(("torchcompile_scope",), "--torchcompile", lambda a: bool(a.torchcompile)),
)
NEEDS_VALIDATE = (
    *_NEEDS_PRECISION,
    Need(("use_ema",), "--checkpoint", lambda a: bool(a.checkpoint)),
    Need(("results_format",), "--results-file", lambda a: bool(a.results_file)),
)
NEEDS_GENERATE_LABEL = (
    *NEEDS_VALIDATE,
    Need(("no_log_sum_exp",), "--format archive", lambda a: a.format == "archive"),
)
NEEDS_TRAIN = (
    *_NEEDS_PRECISION,
    Need(
        ("token_label_data", "token_label_teacher", "token_label_size", "cls_weight", "ground_truth"),
        "--token-label",
        lambda a: a.token_label,
    ),
    Need(
        ("token_label_teacher_checkpoint", "token_label_teacher_top_k"),
        "--token-label-teacher",
        lambda a: bool(a.token_label_teacher),
    ),
    Need(("no_mix_token",), "--token-label", lambda a: a.token_label),
    # Without dense targets there is no dense loss, so a weight of 0 says what happens.
    Need(("dense_weight",), "--token-label", lambda a: a.token_label or a.dense_weight == 0),
    Need(("ground_truth",), DENSE, lambda a: a.token_label_size != 1),
    Need(("dense_weight",), DENSE, lambda a: a.token_label_size != 1 or a.dense_weight == 0),
    Need(("token_label_area", "uncovered", "bad_label"), "--token-label-data", lambda a: bool(a.token_label_data)),
    Need(("label_tail",), "--token-label-data or --token-label-teacher", has_labels),
    Need(("gt_weight_agree", "gt_weight_disagree"), "--ground-truth", lambda a: a.ground_truth),
    Need(("mixup_prob", "mixup_mode", "mixup_off_epoch"), "--mixup or --cutmix", mixes),
    Need(("mixup_switch_prob",), "--mixup and --cutmix", lambda a: a.mixup > 0 and _cuts(a)),
    Need(("model_ema_decay", "model_ema_warmup", "model_ema_force_cpu"), "--model-ema", lambda a: a.model_ema),
    Need(("clip_mode",), "--clip-grad", lambda a: a.clip_grad is not None),
    Need(("lr_noise_pct", "lr_noise_std"), "--lr-noise", lambda a: a.lr_noise is not None),
    Need(("no_resume_opt", "allow_changed_data"), "--resume", lambda a: bool(a.resume)),
    Need(("warmup_lr", "warmup_prefix"), "--warmup-epochs", lambda a: a.warmup_epochs > 0),
    Need(
        ("full_decode",),
        "--data-backend torchvision or dali-cpu",
        lambda a: a.data_backend in ("torchvision", "dali-cpu"),
    ),
    Need(("remode", "recount"), "--reprob", lambda a: a.reprob > 0),
    Need(AUGMENTATION_FLAGS, "augmentation (--no-aug)", lambda a: not a.no_aug),
    Need(
        ("outlooker_drop_path", "drop_path_mode"),
        "--drop-path above 0",
        lambda a: a.drop_path or "drop_path_rate" in a.model_kwargs,
    ),
    Need(("activation_memory",), "--no-grad-checkpointing", lambda a: not a.grad_checkpointing),
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


# Rows of --compat, what they change nothing without, and whether it is there.
COMPAT_NEEDS = (
    Need(
        (
            "label-crop",
            "label-scale",
            "label-area",
            "label-affine",
            "roi-align",
            "uncovered",
            "target-sum",
            "half-ids",
            "label-names",
        ),
        "--token-label-data",
        lambda a: a.token_label and bool(a.token_label_data),
    ),
    Need(("token-places",), "--token-label", lambda a: a.token_label),
    Need(("label-names",), "label files", lambda a: a.data_backend != "synthetic"),
    Need(("aug-order", "label-affine"), "augmentation (--no-aug)", lambda a: not a.no_aug),
    Need(("target-sum",), "--smoothing above 0 and below 1", lambda a: 0 < a.smoothing < 1),
    Need(
        ("untrained-dense-head",),
        "--dense-weight 0 and a --token-label-size other than 1",
        lambda a: a.token_label and a.dense_weight == 0 and a.token_label_size != 1,
    ),
    Need(("mixtoken-rng",), "MixToken (--token-label)", lambda a: a.token_label and not a.no_mix_token),
)


def check_needs(args: Namespace, flags: Mapping[str, Flag], needs: tuple[Need, ...]) -> None:
    """Refuse flags that mean nothing without others.

    Raises:
        UserError: The first of them.
    """
    for need in needs:
        for dest in (name for name in need.flags if name in flags):
            value = getattr(args, dest)
            if value != flags[dest].default and not need.met(args):
                raise UserError(f"{with_value(flags[dest], value)} has no effect without {need.of}")


def with_value(row: Flag, value: Any) -> str:
    """The flag as it would stand on a command line."""
    if row.switch:
        return row.label
    return f"{row.label} {' '.join(map(str, value)) if isinstance(value, list) else value}"

"""Checks that concern several settings, and values that one setting decides for another."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tlt.data.sources import needs_folder
from tlt.errors import UserError, install_command
from tlt.kinds import KINDS
from tlt.upstream import resolve
from volo.config.checkpoint_files import holds_features
from volo.config.fields import S, check_flags, flags_of
from volo.config.settings_data import DENSE, LABELS, ImageSizes, Teachers
from volo.config.settings_shared import CUDA_GRAPH_MODES, Compilation, Pixels, TrainedNetwork
from volo.config.settings_train import (
    ENDING_SCHEDULES,
    FINE_TUNING,
    FROM_NOTHING,
    STARTS,
    TRACKERS,
    Distributed,
    Tracking,
    TrainSettings,
)


def _check_pixels(pixels: Pixels, channels: tuple[int, ...] = (1, 3)) -> None:
    """Raise UserError for contradictions between flags about pixels, in every program that reads images."""
    if not {len(pixels.mean or [0]), len(pixels.std or [0])} <= {1, 3}:
        raise UserError("--mean and --std take one number, or three (red, green, blue)")
    if pixels.input_size and pixels.input_size[0] not in channels:
        raise UserError(
            f"--input-size {' '.join(map(str, pixels.input_size))}: images are read as RGB, the first number must be "
            "3, or of a grey model (volo train --in-chans 1) 1"
        )


def _check_compile(compilation: Compilation) -> None:
    """Raise UserError if blocks are to be compiled to CUDA graphs."""
    if compilation.torchcompile_scope == "blocks" and compilation.torchcompile_mode in CUDA_GRAPH_MODES:
        raise UserError(
            f"--torchcompile-mode {compilation.torchcompile_mode} records where a graph's weights lie, and blocks of "
            "other weights share a graph: --torchcompile-scope model, or --torchcompile-mode max-autotune-no-cudagraphs"
        )


def _check_data(s: TrainSettings) -> None:
    """Raise UserError for contradictions between train.py's flags about schedule, images and starting weights."""
    noise = s.schedule.lr_noise or []
    if len(noise) > 2 or noise != sorted(noise):
        raise UserError("--lr-noise takes one or two parts of the epochs, the smaller first")
    fraction = s.images.val_fraction
    if fraction == 1 or (fraction > 0 and s.images.loading.data_backend == "synthetic"):
        raise UserError(f"--val-fraction {fraction:g} leaves nothing to train on, or splits synthetic images")
    scale, ratio = s.augment.scale, s.augment.ratio
    if not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
        raise UserError(
            f"--scale {scale[0]:g} {scale[1]:g} and --ratio {ratio[0]:g} {ratio[1]:g}: two numbers above 0, the "
            "smaller first, of a scale up to 1 (the whole image)"
        )
    # With auto, a job that is started again resumes its own checkpoint; only its first start fine-tunes.
    resume = s.checkpoints.resume
    begins = {"--branch": s.checkpoints.branch, "--resume": resume if resume != "auto" else ""}
    begins = {flag: file for flag, file in begins.items() if file}
    if len(begins) > 1:
        raise UserError(f"--branch and --resume {resume} both say where to begin: give --resume auto")
    for flag, file in begins.items():
        if any(s[start] for start in STARTS):
            raise UserError(
                f"weights to start from have no effect with {flag} {file}: leave out --finetune, "
                "--initial-checkpoint and --pretrained" + ", or give --resume auto" * (flag == "--resume")
            )
        if os.path.isdir(file):
            other = ", or --resume auto --experiment NAME" * (flag == "--resume")
            raise UserError(f"{flag} {file} is a folder: name the file, such as last.pth.tar in it{other}")
    if s.network.in_chans == 2:
        raise UserError(f"--in-chans {s.network.in_chans}: 3 (RGB) or 1 (grey)")


def _check_losses(s: TrainSettings) -> None:
    """Raise UserError for contradictions between train.py's flags about losses, teachers and precision."""
    labels = s.labels
    teachers = s.teachers
    mixed = s.regular.mixes
    if labels.token_label and labels.cls_weight == 0 and (labels.dense_weight == 0 or labels.token_label_size == 1):
        raise UserError(f"--cls-weight 0 leaves nothing to train without {DENSE} and a --dense-weight above 0")
    if teachers.kd_only and (labels.token_label or s.regular.bce_loss or mixed or s.images.val_fraction > 0):
        raise UserError("--kd-only has no labels: no --token-label, --bce-loss, --mixup, --cutmix, --val-fraction")
    of_classes = [KINDS[kind].of_classes for kind in teachers.kd_distill_type]
    if teachers.kd_only and s.network.num_classes and not any(of_classes):
        kind = teachers.kd_distill_type[0]
        raise UserError(f"--kd-only with --kd-distill-type {kind} trains no heads: leave out --num-classes")
    if s.network.freeze and teachers.kd_model_name and not all(of_classes):
        raise UserError(
            "--freeze and --kd-distill-type other than logit: frozen features learn nothing; leave out one of them"
        )
    other_view = teachers.kd_size is not None or "whole" in teachers.kd_view
    other_view = other_view or bool(teachers.kd_model_name and s.sizes.train_img_sizes)
    if (mixed or labels.compat) and other_view:
        if stored := [*filter(holds_features, teachers.kd_model_name)]:
            raise UserError(f"--mixup, --cutmix and --compat: {stored[0]} is of unmixed images; leave them out")
        raise UserError(
            "--mixup, --cutmix and --compat: the teacher must see what the student sees; leave out --kd-size, "
            "--kd-view and --train-img-sizes"
        )
    if s.network.freeze and s.precision.grad_checkpointing:
        raise UserError("--freeze stores no activations: remove --grad-checkpointing")
    mixed_precision = s.precision.mixed
    if mixed_precision.amp and mixed_precision.model_dtype != "float32":
        raise UserError(
            f"--amp and --model-dtype {mixed_precision.model_dtype} both set the precision: keep one of them"
        )


def _check_divided(s: TrainSettings, flag: str) -> None:
    """Raise UserError for what FSDP2 or distributed tensors can't do with `flag`; volo/train/optimizer.py has more."""
    compilation = s.precision.compilation
    if s.precision.channels_last:
        raise UserError(f"{flag} and --channels-last: torch divides contiguous weights alone")
    if s.ema.model_ema_force_cpu:
        raise UserError(f"{flag} and --model-ema-force-cpu: the average is divided as well")
    if compilation.torchcompile_scope == "model":
        raise UserError(f"{flag} and --torchcompile-scope model: blocks are compiled")
    if compilation.torchcompile_mode in CUDA_GRAPH_MODES:
        mode = compilation.torchcompile_mode
        raise UserError(f"{flag} and CUDA graphs (--torchcompile-mode {mode}): blocks are compiled")
    if s.optim.clip_grad is not None and s.optim.clip_mode == "agc":
        raise UserError(f"{flag} and --clip-mode agc: the norms of units would need whole weights; --clip-mode norm")


def check_train(s: TrainSettings) -> TrainSettings:
    """Refuse what train.py can't do. Return the settings with those that follow from others, and lines for the log.
    Raises UserError: flags contradict each other, or a flag has no effect."""
    check_folder(s.images.data_dir, s.images.dataset, s.images.loading.data_backend, "DATA_DIR")
    _check_model(s.network.model, "--finetune")
    if s.teachers.kd_model_name == [""]:  # in a recipe it means no teacher
        s = s.decide(s.sources["kd_model_name"], kd_model_name="")
    s = check_flags(_with_stored_teachers(_with_compat(_with_token_label_size(s))))
    _check_pixels(s.images.pixels, (s.network.in_chans or 3,))
    _check_compile(s.precision.compilation)
    _check_data(s)
    _check_losses(s)
    if s.teachers.kd_model_name:
        teachers_of(s.teachers)
    check_drop_path(s, s.sizes.train_batch_sizes)
    if flag := sharding_flag(s.distributed):
        _check_divided(s, flag)
    _check_trackers(s.tracking)
    return s.noting(*_remarks(s))


def check_weights(settings: S, network: TrainedNetwork, pixels: Pixels, compilation: Compilation | None = None) -> S:
    """Check the flags about images, and decide where the weights come from, in all programs except train.py. Raises
    UserError: there are two sources of weights or none, or a flag has no effect."""
    _check_model(network.model or "", "--checkpoint")
    settings = check_flags(settings)
    _check_pixels(pixels)
    if compilation is not None:
        _check_compile(compilation)
    if network.use_ema and network.no_use_ema:
        raise UserError("--use-ema and --no-use-ema contradict each other: keep one of them")
    if network.model is None and not network.checkpoint:
        raise UserError("--model is missing, or a --checkpoint that says what model it holds")
    if network.checkpoint or network.pretrained:
        return settings
    line = f"no --checkpoint: the published weights of {network.model}, as --pretrained"
    return settings.decide("other flags", pretrained=True).noting(line)


def _with_stored_teachers(s: TrainSettings) -> TrainSettings:
    """Return the settings in which stored teachers give tokens of whole images, as they do. Raises UserError if a flag
    says something else of one."""
    names = s.teachers.kd_model_name
    stored = [*map(holds_features, names)]
    if not any(stored):
        return s
    if all(stored) and s.teachers.kd_size:
        raise UserError(
            f"--kd-size: {names[0]} holds features of images of one size; leave it out, or store others (volo features)"
        )
    decided = {}
    for setting, only in (("kd_distill_type", "token"), ("kd_view", "whole")):
        given = s[setting]
        values = list(given) * len(names) if len(given) == 1 else given
        rows = zip(names, values, stored, strict=False)  # `teachers_of` refuses other numbers of values
        wrong = [name for name, value, is_stored in rows if is_stored and value != only]
        if wrong and s.set_by_user(setting):
            row = flags_of(TrainSettings)[setting]
            raise UserError(
                f"{row.as_typed(given)}: {wrong[0]} holds the features of tokens of whole images; leave the flag out, "
                f"give {only} for it, or name the teacher itself"
            )
        if len(values) == len(names):
            values = [only if is_stored else value for value, is_stored in zip(values, stored, strict=True)]
            decided[setting] = values if len({*values}) > 1 else values[:1]
    return s.decide("other flags", **decided)


class TeacherSettings(NamedTuple):
    """The settings of one teacher; `size` is (H, W), or None for the student's and for stored features."""

    model: str
    kind: str
    weight: float
    temperature: float
    dense_loss: str
    size: tuple[int, int] | None
    view: str


def teachers_of(teachers: Teachers) -> list[TeacherSettings]:
    """Return the settings of each teacher, of which the flags give one value for all, or one for each; `--kd-size` for
    those whose features are not stored. Raises UserError: a flag has neither one value nor one per teacher, or
    `--kd-view whole` is used without tokens."""
    flags: dict[str, Sequence[Any]] = {
        "--kd-model-name": teachers.kd_model_name,
        "--kd-distill-type": teachers.kd_distill_type,
        "--kd-loss-weight": teachers.kd_loss_weight,
        "--kd-temperature": teachers.kd_temperature,
        "--kd-dense-loss": teachers.kd_dense_loss,
        "--kd-size": teachers.kd_size or [None],
        "--kd-view": teachers.kd_view,
    }
    count = len(teachers.kd_model_name)
    live = [not holds_features(name) for name in teachers.kd_model_name]
    counts = {label: sum(live) if label == "--kd-size" else count for label in flags}
    sides = ""
    if sizes := teachers.kd_size:
        both = len(sizes) == 2 * sum(live)
        flags["--kd-size"] = (
            list(zip(sizes[::2], sizes[1::2], strict=True)) if both else [(side, side) for side in sizes]
        )
        sides = ", or a height and a width,"
    for label, values in flags.items():
        if len(values) not in (1, counts[label]):
            problem = f"{label} has {len(values)} values for {counts[label]} teacher{'s' * (counts[label] > 1)}"
            raise UserError(f"{problem}: give one{sides * (label == '--kd-size')} for all or for each")
    each = {label: list(values) * (counts[label] if len(values) == 1 else 1) for label, values in flags.items()}
    for number in (number for number, is_live in enumerate(live) if not is_live):
        each["--kd-size"].insert(number, None)
    rows = [TeacherSettings(*row) for row in zip(*each.values(), strict=True)]
    for row in rows:
        if row.view == "whole" and not KINDS[row.kind].of_places:
            raise UserError(f"--kd-view whole: {row.model} gives no tokens (--kd-distill-type {row.kind})")
    return rows


def check_drop_path(s: TrainSettings, batch_sizes: Sequence[int | str] | None) -> None:
    """Raise UserError if `--drop-path-mode subset` drops nothing at one of the batch sizes, if there are several."""
    rate = s.regular.drop_path
    if s.regular.drop_path_mode == "mask" or rate is None or batch_sizes == ["auto"]:
        return
    batch = min(map(int, batch_sizes)) if batch_sizes else s.images.batch_size
    # The number of dropped images is rounded to a whole number, and is never all images.
    if batch == 1 or batch * rate < 0.5:
        raise UserError(
            f"--drop-path-mode {s.regular.drop_path_mode} drops nothing at --drop-path {rate:g} with "
            f"{'--train-batch-sizes' if batch_sizes else '--batch-size'} {batch}: leave it out, or take larger batches"
        )


def sharding_flag(distributed: Distributed) -> str:
    """Return the flag that divides weights among ranks with its value, such as "--shard 4"; "" if none does."""
    flags = {"--tensor-parallel": distributed.tensor_parallel, "--shard": distributed.shard}
    return next((f"{flag} {ranks}" for flag, ranks in flags.items() if ranks > 1), "")


def other_sizes(sizes: ImageSizes) -> list[tuple[int, int]]:
    """Return the image sizes (H, W) that a run uses besides the model's own size."""
    sides = [*(sizes.train_img_sizes or []), sizes.val_img_size]
    return [(side, side) for side in dict.fromkeys(sides) if side]


def trackers_of(tracking: Tracking) -> list[str]:
    """Return the names of the requested experiment trackers."""
    return [name for name in TRACKERS if getattr(tracking, f"log_{name}")]


def _check_trackers(tracking: Tracking) -> None:
    for name in trackers_of(tracking):
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder without a package, such as a tracker's own ./wandb
            raise UserError(f"--log-{name} needs {name}: {install_command(name)}")


def join_data_dir(settings: S, label: str, name: str) -> S:
    """Return the settings with the data folder, which is given as a positional argument or as `--data-dir`. Raises
    UserError: both are given, and they differ."""
    option, positional = settings["data_dir_option"], settings[name]
    if option and positional and option != positional:
        raise UserError(f"{label} is given twice: {positional} and --data-dir {option}")
    if not option:
        return settings
    return settings.decide(settings.sources["data_dir_option"], **{name: option, "data_dir_option": None})


def check_folder(root: str | None, dataset: str, backend: str, label: str) -> None:
    """Raise UserError if the folder of the images is missing."""
    if needs_folder(dataset) and not root and backend != "synthetic":
        raise UserError(f"{label} is missing: the folder that holds the images")


def _check_model(model: str, flag: str) -> None:
    """Raise UserError if `--model` names weights, which `flag` takes."""
    if model.endswith((".pt", ".pth", ".tar", ".ckpt", ".safetensors")) or (os.sep in model and os.path.exists(model)):
        raise UserError(f"--model {model} names no architecture: weights are given as {flag} {model}")


def _with_token_label_size(s: TrainSettings) -> TrainSettings:
    """Set the token-label size to 1, as in the published code, if there are no labels and the user gives no size."""
    if not s.labels.token_label or LABELS.met(s):
        return s
    size = s.labels.token_label_size or 1
    targets = "class targets alone" if size == 1 else "every token on its image's class"
    line = f"--token-label without --token-label-data trains {targets}"
    return (s if s.labels.token_label_size else s.decide("other flags", token_label_size=1)).noting(line)


def _with_compat(s: TrainSettings) -> TrainSettings:
    """Reduce `--compat` to the rows that have an effect in this run, and set the flag that one of them stands for."""
    if s.labels.compat is None:
        return s
    rows, everything = resolve(s.labels.compat)
    if not (s.labels.token_label and s.labels.token_label_data):
        raise UserError(f"--compat {s.labels.compat[0]} has no effect without --token-label-data")
    if "target-sum" in rows and not 0 < s.regular.smoothing < 1:
        if not everything:
            raise UserError("--compat target-sum has no effect without --smoothing above 0 and below 1")
        rows.remove("target-sum")
    s = s.decide(s.sources["compat"], compat=rows)
    s = s.decide("other flags", uncovered="uniform") if "uncovered" in rows else s
    return s.noting(f"--compat: {', '.join(rows)}")


def _remarks(s: TrainSettings) -> list[str]:
    """Return lines about settings that are valid but may surprise."""
    notes = []
    started = any(s[start] for start in STARTS) or s.labels.token_label  # labels teach from nothing, too
    if s.run.config and Path(s.run.config).stem == FINE_TUNING and not started:
        notes.append(
            f"warning: -c {FINE_TUNING} is for fine-tuning: add --pretrained or --finetune FILE; from nothing the "
            f"small network of -c {FROM_NOTHING} learns more"
        )
    jitter, policy = s.augment.color_jitter, s.augment.aa
    if policy and policy != "none" and jitter != 0.4:
        notes.append(f"--color-jitter {jitter:g} is not used beside --aa {policy}; --aa '' would use it")
    lr, least = s.schedule.lr, s.schedule.min_lr
    if lr is not None and lr < least and s.schedule.sched in ENDING_SCHEDULES:
        notes.append(f"--lr {lr:g} is below --min-lr {least:g}: the learning rate rises to it")
    return notes

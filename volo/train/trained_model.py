"""Builds a trained model from its checkpoint, to evaluate or export it, or to make labels with it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.text import first_difference, some_names
from tlt.io.weights import EMA_KEYS, count_weights, read_checkpoint
from tlt.models.fit_weights import Classes, dense_head_of, number_classes
from tlt.models.wrap import TOKEN_LABEL_MODELS, with_dense_head
from volo.checkpoint.finetune import load_weights, place_text
from volo.checkpoint.model_config import model_config_of, own_names
from volo.checkpoint.state import selected_by_ema
from volo.train.architecture import image_size_of, takes_image_size
from volo.train.model import TimmModel, build_model, eval_settings


@dataclass
class TrainedModel:
    """A model with its weights, and its settings."""

    model: TimmModel  # on the CPU, in evaluation mode
    args: Namespace  # the flags, completed from the checkpoint
    config: dict[str, Any]  # the checkpoint's `model_config`, and `label_names` of a described model without one
    settings: dict[str, Any]  # how images are prepared, from `eval_settings`
    notes: list[str]  # lines for the user


def load_model(
    args: Namespace, path: str | Path | None, dense: bool | None = None, num_classes: int | None = None
) -> TrainedModel:
    """Build the model of a checkpoint, or a published one, and load its weights.

    Args:
        args: `model`, `pretrained`, `use_ema`, `no_use_ema`, `num_classes`, `img_size`, `input_size`, `gp` and
            `model_kwargs`. Values that are None come from the checkpoint.
        path: Path of the checkpoint; None for `args.pretrained`.
        dense: Whether to load the dense head that token labeling added to a timm model, if the checkpoint has one; None
            loads it if training used it.
        num_classes: Number of classes if the checkpoint does not record it.

    Raises:
        UserError: The model or file does not exist, or the weights don't fit.
    """
    with blamed_on(path):
        return _load(args, path, dense, num_classes)


def load_frozen(
    model: str | None,
    path: str | None,
    input_size: tuple[int, int, int],
    other_sizes: Sequence[int] | None = None,
    student: tuple[Classes, int, str] | None = None,
    dense: bool | None = None,
) -> TrainedModel:
    """Build a network that a run uses but doesn't train, as `load_model` does.

    Args:
        model: What `--model` would name; None takes it from the checkpoint.
        path: Path of the checkpoint; None takes the published weights.
        input_size: (channels, H, W) of the run's images.
        other_sizes: Sides of further images, as of `--train-img-sizes`.
        student: Further arguments of `take_classes`, if the network has to have the student's classes.
        dense: As in `load_model`.

    Raises:
        UserError: As in `load_model`; or the network takes images of another number of channels, or has other classes.
    """
    channels, *img_size = input_size
    args = Namespace(model=model, pretrained=path is None, img_size=tuple(img_size), input_size=None, model_kwargs={})
    args.num_classes, args.gp, args.train_img_sizes = None, None, other_sizes
    args.use_ema, args.no_use_ema = False, False
    trained = load_model(args, path, dense, student[1] if student else None)
    if (own_channels := trained.settings["input_size"][0]) != channels:
        raise UserError(f"it takes images of {own_channels} channels, the student of {channels}")
    trained.notes += take_classes(trained, *student) if student else []
    return trained


def take_classes(trained: TrainedModel, class_names: Classes, count: int, whose: str) -> list[str]:
    """Renumber the classes of a model as `count` classes, of which the first have `class_names`, if the model names its
    own; it may have more classes than these. Return lines for the user.

    Args:
        whose: What has so many classes, for messages.

    Raises:
        UserError: The model lacks a class, or names none and has another number of them.
    """
    names = own_names(trained.config, class_names)
    lines, missing = number_classes(trained.model, names, class_names, count)
    if missing:
        raise UserError(
            f"it was trained on other class folders ({first_difference(names, class_names)}), without {len(missing)} "
            f"of {count} classes ({some_names(missing)}): use one that was trained on these"
        )
    if trained.model.num_classes != count:
        raise UserError(f"it has {trained.model.num_classes} classes, {whose}: use one that was trained on these")
    if lines:
        trained.config = trained.config | {"class_names": list(class_names), "num_classes": count}
    return lines


def _load(args: Namespace, path: str | Path | None, dense: bool | None, num_classes: int | None) -> TrainedModel:
    checkpoint = read_checkpoint(path) if path is not None else {}
    config = model_config_of(checkpoint, path or "") or {}
    args = with_recorded(args, config, checkpoint, path)
    if path is not None:
        args.num_classes = num_classes if args.num_classes is None else args.num_classes
    use_ema, notes = choose_weights(args, checkpoint)
    args.use_ema = bool(use_ema)
    kwargs = config.get("kwargs") if args.model == config.get("name") else None
    if kwargs is not None and "img_size" in config and takes_image_size(args.model):
        kwargs = kwargs | {"img_size": tuple(config["img_size"])}
    model = build_model(args, kwargs, count_weights(checkpoint))
    if path is not None:
        if dense is None:
            dense = bool(config.get("dense_head"))
        if dense and dense_head_of(checkpoint, use_ema, path):
            model = with_dense_head(model, image_size_of(args))
        report = load_weights(model, path, use_ema, checkpoint)
        notes.append(f"weights: {place_text(report.entry, report.prefix)}")
    if config.get("dense_head") is False and isinstance(model, TOKEN_LABEL_MODELS):
        model.set_dense_head(False)
    described = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    if not config and described and len(described) == model.num_classes:
        config = {"label_names": list(described)}
    return TrainedModel(model.eval(), args, config, eval_settings(args, model, config), notes)


def with_recorded(
    args: Namespace, config: dict[str, Any], checkpoint: dict[str, Any], path: str | Path | None
) -> Namespace:
    """Complete the flags from the checkpoint: model, class count and image size.

    Raises:
        UserError: Neither the flags nor the checkpoint names the model.
    """
    filled = Namespace(**vars(args))
    filled.model = args.model or config.get("name") or checkpoint.get("arch")
    if not filled.model:
        remedy = "add --model NAME" if "checkpoint" in args else "name a checkpoint that does"  # for a teacher
        raise UserError(f"{path} does not say what model it holds: {remedy}")
    filled.num_classes = args.num_classes or config.get("num_classes")
    if args.input_size is None:
        filled.in_chans = config.get("in_chans")
    if image_size_of(args) is None:
        filled.img_size = config.get("val_img_size") or config.get("img_size")
    return filled


def choose_weights(args: Namespace, checkpoint: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """Return whether to take the moving average (see `tlt.io.weights.weights_entry`), and lines for the user.

    Without `--use-ema` and `--no-use-ema` the weights are those that training used to select its best epoch. If the
    file doesn't say, they are the plain weights, as in timm's validate.py.
    """
    if args.use_ema or args.no_use_ema:
        return args.use_ema, []
    if not any(isinstance(checkpoint.get(key), dict) for key in EMA_KEYS):
        return None, []
    selected = selected_by_ema(checkpoint)
    if selected:
        return True, ["weights: EMA (training selected by it); --no-use-ema takes the plain ones"]
    why = "training selected by them" if selected is False else "the file does not say by which training selected"
    return False, [f"weights: plain ({why}); --use-ema takes the EMA"]

"""Builds a trained model from its checkpoint, to evaluate or export it, or to make labels with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from timm.layers import to_2tuple

from tlt.errors import UserError
from tlt.io.files import blamed_on
from tlt.io.text import first_difference, some_names
from tlt.io.weights import EMA_KEYS, count_weights, read_checkpoint
from tlt.models.fit_weights import Classes, dense_head_of, number_classes
from tlt.models.wrap import TOKEN_LABEL_MODELS, with_dense_head
from volo.checkpoint.finetune import load_weights, place_text
from volo.checkpoint.model_config import model_config_of, own_names
from volo.checkpoint.state import selected_by_ema
from volo.train.architecture import ModelRequest, takes_image_size
from volo.train.model import TimmModel, build_model, data_config_of


@dataclass
class TrainedModel:
    """A model with its weights, and its settings.

    Attributes:
        model: The model on the CPU, in evaluation mode.
        request: What the program asked of it, completed from the checkpoint.
        ema: Whether the weights are the moving average of the checkpoint.
        config: The checkpoint's `model_config`, and `label_names` of a described model without one.
        data_config: How images are prepared, from `data_config_of`.
    """

    model: TimmModel
    request: ModelRequest
    ema: bool
    config: dict[str, Any]
    data_config: dict[str, Any]
    notes: list[str]

    @property
    def name(self) -> str:
        """What `--model` names, or the checkpoint."""
        return self.request.name


def load_model(
    request: ModelRequest,
    path: str | Path | None,
    dense: bool | None = None,
    num_classes: int | None = None,
    use_ema: bool | None = None,
) -> TrainedModel:
    """Build the model of a checkpoint, or a published one, and load its weights. Raise UserError if they don't fit.

    Args:
        path: Path of the checkpoint; None for published weights.
        dense: Whether to load the dense head that token labeling added to a timm model, if the checkpoint has one; None
            loads it if training used it.
        num_classes: Number of classes if the checkpoint does not record it.
        use_ema: Whether to take the moving average of the weights; None takes what training selected by.
    """
    with blamed_on(path):
        checkpoint = read_checkpoint(path) if path is not None else {}
        config = model_config_of(checkpoint, path or "") or {}
        request = with_recorded(request, config, checkpoint, path)
        if path is not None and request.num_classes is None:
            request = replace(request, num_classes=num_classes)
        notes = list[str]()
        if use_ema is None:
            use_ema, notes = choose_weights(checkpoint)
        kwargs = config.get("kwargs") if request.name == config.get("name") else None
        if kwargs is not None and "img_size" in config and takes_image_size(request.name):
            kwargs = kwargs | {"img_size": tuple(config["img_size"])}
        model = build_model(request, kwargs, count_weights(checkpoint))
        if path is not None:
            dense = bool(config.get("dense_head")) if dense is None else dense
            if dense and dense_head_of(checkpoint, use_ema, path):
                model = with_dense_head(model, request.image_size)
            report = load_weights(model, path, use_ema, checkpoint)
            notes.append(f"weights: {place_text(report.entry, report.prefix)}")
        if config.get("dense_head") is False and isinstance(model, TOKEN_LABEL_MODELS):
            model.set_dense_head(False)
        described = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
        if not config and described and len(described) == model.num_classes:
            config = {"label_names": list(described)}
        return TrainedModel(model.eval(), request, bool(use_ema), config, data_config_of(request, model, config), notes)


def load_frozen(
    model: str | None,
    path: str | None,
    input_size: tuple[int, int, int],
    other_sizes: Sequence[tuple[int, int]] = (),
    student: tuple[Classes, int, str] | None = None,
    dense: bool | None = None,
) -> TrainedModel:
    """Build a network that a run uses but doesn't train, as `load_model` does, for the run's images of `input_size`
    (channels, H, W) and `other_sizes` (H, W). `model` is what `--model` would name, None takes it from the checkpoint;
    `student` has further arguments of `take_classes`, if the network has to have the student's classes."""
    channels, height, width = input_size
    sizes = tuple(other_sizes)
    request = ModelRequest(name=model or "", pretrained=path is None, image_size=(height, width), other_sizes=sizes)
    trained = load_model(request, path, dense, student[1] if student else None)
    if (own_channels := trained.data_config["input_size"][0]) != channels:
        raise UserError(f"it takes images of {own_channels} channels, the student of {channels}")
    trained.notes += take_classes(trained, *student) if student else []
    return trained


def take_classes(trained: TrainedModel, class_names: Classes, count: int, whose: str) -> list[str]:
    """Renumber the classes of a model as `count` classes, of which the first have `class_names`, if the model names its
    own; it may have more classes than these. Return lines for the user. Raise UserError if the model lacks a class, or
    names none and has another number of them than `whose`, as messages name the student."""
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


def with_recorded(
    request: ModelRequest, config: dict[str, Any], checkpoint: dict[str, Any], path: str | Path | None
) -> ModelRequest:
    """Complete what the flags ask for from the checkpoint: model, class count, channels and image size. Raise UserError
    if neither names the model."""
    name = request.name or config.get("name") or checkpoint.get("arch")
    if not name:
        remedy = "add --model NAME" if request.file_flag else "name a checkpoint that does"
        raise UserError(f"{path} does not say what model it holds: {remedy}")
    size = config.get("val_img_size") or config.get("img_size")
    return replace(
        request,
        name=name,
        num_classes=request.num_classes or config.get("num_classes"),
        in_chans=request.in_chans or config.get("in_chans"),
        image_size=request.image_size or (None if size is None else to_2tuple(size)),
    )


def choose_weights(checkpoint: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """Return whether to take the moving average (see `tlt.io.weights.weights_entry`), and lines for the user. Weights
    are those by which training selected its best epoch; if the file doesn't say, the plain ones, as in timm."""
    if not any(isinstance(checkpoint.get(key), dict) for key in EMA_KEYS):
        return None, []
    selected = selected_by_ema(checkpoint)
    if selected:
        return True, ["weights: EMA (training selected by it); --no-use-ema takes the plain ones"]
    why = "training selected by them" if selected is False else "the file does not say by which training selected"
    return False, [f"weights: plain ({why}); --use-ema takes the EMA"]

"""The loss of a training step: `step_loss`, of a criterion (token labels, classes, or no labels) and of teachers.

`draw` of a criterion draws a step's random numbers on the host: how Mixup or CutMix mix images, and MixToken's box.
`step_loss` runs on the device, where a CUDA graph can repeat it. `StepKey` seeds everything random, so that a resumed
run draws the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.api import StepKey, draw_box
from tlt.data.augment.operations import to_device
from tlt.data.batch import Batch
from tlt.errors import UserError
from tlt.loss import SETTINGS, LossTerms, TokenLabelLoss
from tlt.mix import MixRatios, Mixup
from tlt.mixtoken import mixed_share
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.targets import Targets
from volo.config.rules import other_sizes
from volo.config.settings_train import Regularisation, TrainSettings

if TYPE_CHECKING:
    from volo.train.distillation import Distillation
    from volo.train.online_annotator import OnlineAnnotator

_MIXUP_STREAM = 0x57EB  # another random stream of a step, besides those of `tlt.api`


class Drawn(NamedTuple):
    """The random numbers of a step, except the model's, on the batch's device: how images are mixed, and MixToken's box
    (4,) int32; None for what is not used."""

    ratios: MixRatios | None = None
    box: Tensor | None = None

    def mix(self, images: Tensor) -> Tensor:
        """Return images (B, 3, H, W) as Mixup or CutMix mix them."""
        return images if self.ratios is None else self.ratios.blend_images(images)


def step_loss(
    criterion: "Criterion", teachers: "Distillation | None", model: Callable[..., Any], batch: Batch, drawn: Drawn
) -> LossTerms:
    """Return the losses of a step, averaged over the batch: those of the criterion, and the teachers' in the total."""
    targets: Any = criterion.targets(batch)  # before the model, so that the memory of an annotator is free by then
    images = drawn.mix(batch.images)
    options = criterion.options(drawn)
    if teachers is None:
        return criterion.losses(model(images, **options), targets, drawn)
    lessons = teachers.lessons(batch, images)
    if teachers.learns_features:
        outputs, features = model(images, taught=True, **options)
    else:
        outputs = model(images, **options)
        features = [outputs[0] if isinstance(outputs, tuple) else outputs] * len(lessons)  # logits (B, C)
    mixed = 0.0 if drawn.box is None else mixed_share(drawn.box, targets.grid)
    taught, of_teachers = teachers.losses.terms(features, lessons, mixed)
    losses = criterion.losses(outputs, targets, drawn)
    return losses._replace(total=losses.total + taught, teachers=dict(zip(teachers.names, of_teachers, strict=True)))


@dataclass(frozen=True)
class TokenLabelCriterion(TokenLabelLoss):
    """Class loss plus dense loss on token labels, with MixToken.

    Args:
        mix: Mixup or CutMix of the images and their labels, which precedes MixToken; None for neither.
        published_sum: Whether smoothed targets sum to 1 + s / C (`--compat target-sum`).
        annotator: Labels each batch before it is mixed; None if the batch has labels already, or needs none.
        Others: As in `tlt.loss.TokenLabelLoss`. If `dense` is False, `model(x)` is trained on the class labels.
    """

    mix_token: bool = True
    mix: Mixup | None = None
    published_sum: bool = False
    annotator: "OnlineAnnotator | None" = None

    def draw(self, batch: Batch, step: StepKey) -> Drawn:
        """Return the step's random numbers. Raises UserError if a label map has a class that doesn't exist."""
        if batch.labels is not None:
            batch.labels.check_ids(self.num_classes)
        cells = draw_box(step, self.place(batch.images)[0]) if self.mix_token else None
        box = None if cells is None else to_device(np.array(cells, np.int32), batch.images.device)
        return Drawn(_draw_ratios(self.mix, batch, step), box)

    def targets(self, batch: Batch) -> Targets:
        """Return the targets of the images before they are mixed."""
        batch = batch if self.annotator is None else self.annotator.label(batch)
        targets = super().targets(batch)
        if self.published_sum and batch.labels is not None:
            from tlt.upstream.behaviour import summing_to_more

            return summing_to_more(targets, batch.labels, self.smoothing)
        return targets

    def options(self, drawn: Drawn) -> dict[str, Any]:
        """Return the model's arguments besides the images."""
        return {"mix_box": drawn.box} | ({"dense": True} if self.dense else {})

    def losses(self, outputs: Any, targets: Targets, drawn: Drawn) -> LossTerms:
        """Return the losses of class logits (B, C) and token logits (B, N, C), or of class logits alone."""
        return self(outputs if self.dense else (outputs, None), targets, drawn.box, drawn.ratios)


@dataclass(frozen=True)
class ClassCriterion:
    """Cross-entropy on the image's class, for any timm model. Its methods are those of `TokenLabelCriterion`. `mix`
    (Mixup or CutMix) smooths the targets, too, and `bce` (binary cross-entropy in place of softmax) class numbers."""

    smoothing: float = 0.1
    mix: Mixup | None = None
    bce: nn.Module | None = None

    def draw(self, batch: Batch, step: StepKey) -> Drawn:
        return Drawn(_draw_ratios(self.mix, batch, step))

    def targets(self, batch: Batch) -> Any:
        return batch.classes

    def options(self, drawn: Drawn) -> dict[str, Any]:
        return {}

    def losses(self, outputs: Tensor, targets: Tensor, drawn: Drawn) -> LossTerms:
        logits = outputs.float()  # (B, C)
        smoothing = self.smoothing
        if self.mix is not None and drawn.ratios is not None:
            targets = self.mix.soft_targets(targets, drawn.ratios, logits.dtype)
            smoothing = 0.0
        entropy = self.bce or partial(F.cross_entropy, label_smoothing=smoothing)
        loss = entropy(logits, targets)
        return LossTerms(loss, loss, torch.zeros_like(loss))


class NoLabels(ClassCriterion):
    """The criterion of `--kd-only`: the teachers' losses are all."""

    def losses(self, outputs: Tensor, targets: Tensor, drawn: Drawn) -> LossTerms:
        return LossTerms(*torch.zeros(3, device=outputs.device))


Criterion: TypeAlias = TokenLabelCriterion | ClassCriterion


def _draw_ratios(mix: Mixup | None, batch: Batch, step: StepKey) -> MixRatios | None:
    return None if mix is None else mix.draw(batch.images, step.generator(_MIXUP_STREAM))


def make_criterion(
    settings: TrainSettings, model: Any, image_size: tuple[int, int], annotator: "OnlineAnnotator | None" = None
) -> "Criterion":
    """Return the criterion that the flags describe; `image_size` is (H, W). If the dense loss has weight 0, switch off
    the model's dense head. Raise UserError if the model has none, or a label size doesn't fit its tokens."""
    if settings.teachers.kd_only:
        return NoLabels()
    mix = _mixup(settings.regular, model.num_classes)
    labels = settings.labels
    if not labels.token_label:
        return ClassCriterion(settings.regular.smoothing, mix, _bce(settings.regular))
    if not isinstance(model, TOKEN_LABEL_MODELS):
        name = settings.network.model
        raise UserError(f"--model {name} has no dense head for --token-label: give it one with add_dense_head")
    rows, columns = model.token_grid(image_size)
    if labels.token_label_size and labels.token_label_size > max(rows, columns, 1):
        raise UserError(
            f"--token-label-size {labels.token_label_size} doesn't fit: {settings.network.model} has {rows} x "
            f"{columns} tokens at {image_size[0]} x {image_size[1]} px; leave the flag out"
        )
    if not labels.dense_weight:
        model.set_dense_head(False)
    return TokenLabelCriterion.of(
        model,
        image_size,
        other_sizes(settings.sizes),
        dense=model.dense_head and labels.token_label_size != 1,
        **{name: settings[name] for name in SETTINGS},
        mix_token=not labels.no_mix_token,
        mix=mix,
        published_sum="target-sum" in (labels.compat or ()),
        annotator=annotator,
    )


def _bce(regular: Regularisation) -> nn.Module | None:
    if not regular.bce_loss:
        return None
    from timm.loss import BinaryCrossEntropy

    threshold, weight = regular.bce_target_thresh, regular.bce_pos_weight
    return BinaryCrossEntropy(regular.smoothing, threshold, sum_classes=regular.bce_sum, pos_weight=weight)


def _mixup(regular: Regularisation, num_classes: int) -> Mixup | None:
    if not regular.mixes:
        return None
    return Mixup(
        regular.mixup,
        regular.cutmix,
        regular.cutmix_minmax,
        regular.mixup_prob,
        regular.mixup_switch_prob,
        regular.mixup_mode,
        regular.smoothing,
        num_classes,
    )

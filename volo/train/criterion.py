"""The loss of a training step, with or without token labels.

A step calls `draw`, then `loss_of`; `loss` is both in one call. `draw` draws random numbers on the host: how Mixup or
CutMix mix images, and MixToken's box. `loss_of` runs on the device, where a CUDA graph can repeat it: `prepare` makes
images and targets, then come the model and the losses of its outputs. `StepKey` seeds everything random, so that a
resumed run draws the same numbers.
"""

from __future__ import annotations

from argparse import Namespace
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
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.targets import Targets
from volo.config.flag_rules import other_sizes
from volo.train.precision import autocast

if TYPE_CHECKING:
    from volo.train.online_annotator import OnlineAnnotator

_MIXUP_STREAM = 0x57EB  # another random stream of a step, besides those of `tlt.api`


class Drawn(NamedTuple):
    """The random numbers of a step, except the model's, on the batch's device: how images are mixed, and MixToken's box
    (4,) int32; None for what is not used."""

    ratios: MixRatios | None
    box: Tensor | None = None


class Prepared(NamedTuple):
    """The inputs of the model in a step: `terms(model(images, **options))` are the step's losses."""

    images: Tensor
    options: dict[str, Any]
    terms: Callable[[Any], LossTerms]


class StepLoss:
    """The methods that all criteria share."""

    amp_dtype: torch.dtype | None
    draw: Callable[[Batch, StepKey], Drawn]
    prepare: Callable[[Batch, Drawn], Prepared]

    def loss(self, model: Callable[..., Any], batch: Batch, step: StepKey) -> LossTerms:
        """Return the losses of a step, averaged over the batch. They depend only on the arguments."""
        return self.loss_of(model, batch, self.draw(batch, step))

    def loss_of(self, model: Callable[..., Any], batch: Batch, drawn: Drawn) -> LossTerms:
        """Return the losses of a step with these random numbers."""
        images, options, terms = self.prepare(batch, drawn)
        with autocast(images.device, self.amp_dtype):
            return terms(model(images, **options))


@dataclass(frozen=True)
class TokenLabelCriterion(StepLoss, TokenLabelLoss):
    """Class loss plus dense loss on token labels, with MixToken.

    Args:
        mix_token: Whether to draw a MixToken box for each batch.
        mix: Mixup or CutMix of the images and their labels, which precedes MixToken; None for neither.
        published_sum: Whether smoothed targets sum to 1 + s / C (`--compat target-sum`).
        annotator: Labels each batch before it is mixed; None if the batch has labels already, or needs none.
        amp_dtype: The dtype in which autocast computes the forward pass; None for float32.
        Others: As in `tlt.loss.TokenLabelLoss`. If `dense` is False, `model(x)` is trained on the class labels.
    """

    mix_token: bool = True
    mix: Mixup | None = None
    published_sum: bool = False
    annotator: OnlineAnnotator | None = None
    amp_dtype: torch.dtype | None = None

    def targets(self, batch: Batch) -> Targets:
        # The annotator runs before the student's forward pass, so that the memory of its activations is free by then.
        batch = batch if self.annotator is None else self.annotator.label(batch)
        targets = super().targets(batch)
        if self.published_sum and batch.labels is not None:
            from tlt.upstream.behaviour import summing_to_more

            return summing_to_more(targets, batch.labels, self.smoothing)
        return targets

    def draw(self, batch: Batch, step: StepKey) -> Drawn:
        """Return the step's random numbers. Raises UserError if a label map has a class that doesn't exist."""
        if batch.labels is not None:
            batch.labels.check_ids(self.num_classes)
        cells = draw_box(step, self.place(batch.images)[0]) if self.mix_token else None
        box = None if cells is None else to_device(np.array(cells, np.int32), batch.images.device)
        return Drawn(_draw_ratios(self.mix, batch, step), box)

    def prepare(self, batch: Batch, drawn: Drawn) -> Prepared:
        """Return the images, the model's options, and a function from its outputs to losses."""
        targets, (ratios, box) = self.targets(batch), drawn
        images = batch.images if ratios is None else ratios.blend_images(batch.images)

        def terms(outputs: Any) -> LossTerms:
            """Return the losses of class logits (B, C) and token logits (B, N, C), or of class logits alone."""
            return self(outputs if self.dense else (outputs, None), targets, box, ratios)

        return Prepared(images, {"mix_box": box} | ({"dense": True} if self.dense else {}), terms)


@dataclass(frozen=True)
class ClassCriterion(StepLoss):
    """Cross-entropy on the image's class, for any timm model.

    Args:
        mix: Mixup or CutMix, which also smooth the targets; None for neither.
        bce: Binary cross-entropy of logits and targets, which smooths class numbers itself; None for softmax.
        amp_dtype: As in `TokenLabelCriterion`.
    """

    smoothing: float = 0.1
    mix: Mixup | None = None
    bce: nn.Module | None = None
    amp_dtype: torch.dtype | None = None

    def draw(self, batch: Batch, step: StepKey) -> Drawn:
        """Return the step's random numbers."""
        return Drawn(_draw_ratios(self.mix, batch, step))

    def prepare(self, batch: Batch, drawn: Drawn) -> Prepared:
        """Do what `TokenLabelCriterion.prepare` does."""
        images, targets, smoothing, ratios = batch.images, batch.classes, self.smoothing, drawn.ratios
        if self.mix is not None and ratios is not None:
            images = ratios.blend_images(images)
            targets, smoothing = self.mix.soft_targets(targets, ratios, images.dtype), 0.0
        return Prepared(images, {}, partial(self._terms, targets=targets, smoothing=smoothing))

    def _terms(self, outputs: Tensor, targets: Tensor, smoothing: float) -> LossTerms:
        logits = outputs.float()  # (B, C)
        if self.bce is not None:
            loss = self.bce(logits, targets)
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        return LossTerms(loss, loss, torch.zeros_like(loss))


Criterion: TypeAlias = TokenLabelCriterion | ClassCriterion


def _draw_ratios(mix: Mixup | None, batch: Batch, step: StepKey) -> MixRatios | None:
    return None if mix is None else mix.draw(batch.images, step.generator(_MIXUP_STREAM))


def make_criterion(
    args: Namespace,
    model: Any,
    image_size: tuple[int, int],
    amp_dtype: torch.dtype | None = None,
    annotator: OnlineAnnotator | None = None,
) -> Criterion:
    """Return the criterion that the flags describe. If the dense loss has weight 0, switch off the model's dense head.

    Args:
        image_size: (H, W) of `--img-size`.
        amp_dtype: The dtype of autocast; None for float32.

    Raises:
        UserError: `--token-label` is used with a model without a dense head, or a label size doesn't fit its tokens.
    """
    if not args.token_label:
        return ClassCriterion(args.smoothing, _mixup(args, model.num_classes), _bce(args), amp_dtype)
    if not isinstance(model, TOKEN_LABEL_MODELS):
        raise UserError(f"--model {args.model} has no dense head for --token-label: give it one with add_dense_head")
    grid = model.token_grid(image_size)
    if args.token_label_size and args.token_label_size > max(*grid, 1):
        raise UserError(
            f"--token-label-size {args.token_label_size} doesn't fit: {args.model} has {grid[0]} x {grid[1]} tokens at "
            f"{image_size[0]} x {image_size[1]} px; leave the flag out"
        )
    if not args.dense_weight:
        model.set_dense_head(False)
    return TokenLabelCriterion.of(
        model,
        image_size,
        other_sizes(args),
        dense=model.dense_head and args.token_label_size != 1,
        **{name: getattr(args, name) for name in SETTINGS},
        mix_token=not args.no_mix_token,
        mix=_mixup(args, model.num_classes),
        published_sum="target-sum" in (args.compat or ()),
        annotator=annotator,
        amp_dtype=amp_dtype,
    )


def _bce(args: Namespace) -> nn.Module | None:
    if not args.bce_loss:
        return None
    from timm.loss import BinaryCrossEntropy

    weight = args.bce_pos_weight
    return BinaryCrossEntropy(args.smoothing, args.bce_target_thresh, sum_classes=args.bce_sum, pos_weight=weight)


def _mixup(args: Namespace, num_classes: int) -> Mixup | None:
    if not (args.mixup or args.cutmix or args.cutmix_minmax):
        return None
    how = (args.mixup, args.cutmix, args.cutmix_minmax, args.mixup_prob, args.mixup_switch_prob, args.mixup_mode)
    return Mixup(*how, args.smoothing, num_classes)

"""Targets and loss: with token labels, or with plain class labels.

A step (`volo.train.loop`) gets three things from a criterion: the targets of the batch, the random part of the step
(images mixed by Mixup or CutMix, MixToken's box), and the loss of the model's outputs. `StepKey` seeds everything
random, so that a resumed run draws the same numbers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

from tlt.api import StepKey, draw_box
from tlt.data.batch import Batch
from tlt.errors import UserError
from tlt.loss import LossTerms, TokenLabelLoss
from tlt.mix import MixRatios, Mixup
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.targets import Targets
from tlt.upstream.behaviour import summing_to_more
from volo.train.model import TimmModel

if TYPE_CHECKING:
    from volo.train.teacher import Teacher

_MIXUP_STREAM = 0x57EB  # one more random stream of a step, beside those of `tlt.api`


@dataclass(frozen=True)
class Mixed:
    """The images and boxes of a step, after its random draws.

    Attributes:
        images: (B, 3, H, W), mixed if Mixup or CutMix is on.
        ratios: How Mixup or CutMix mixed the images; None without them.
        box: MixToken's box, an int tensor (4,) on the device; None without MixToken.
    """

    images: Tensor
    ratios: MixRatios | None = None
    box: Tensor | None = None


class Criterion(Protocol):
    """Turns a batch into a loss. Every method is pure: the same arguments give the same numbers."""

    def targets(self, batch: Batch) -> Any:
        """Return the targets of the batch; the images are not mixed yet."""

    def draw(self, batch: Batch, step: StepKey) -> Mixed:
        """Mix the images and draw MixToken's box."""

    def arguments(self, mixed: Mixed) -> dict[str, Any]:
        """Return the keyword arguments of the model besides the images."""

    def __call__(self, outputs: Any, targets: Any, mixed: Mixed) -> LossTerms:
        """Return the loss of the model's outputs: means over the batch."""


@dataclass(frozen=True)
class TokenLabelCriterion(TokenLabelLoss):
    """Class loss plus dense loss on token labels, with MixToken.

    Args:
        mix_token: Draw one MixToken box per batch.
        mix: Mixup or CutMix of the images and their labels, before MixToken; None for neither.
        published_sum: Let smoothed targets sum to 1 + s / C (`--compat target-sum`).
        teacher: Labels the batch before anything is mixed; None: the batch has its labels already, or has none.
        The others: as `tlt.loss.TokenLabelLoss`; where `dense` is False, `model(x)` is trained on the class labels.
    """

    mix_token: bool = True
    mix: Mixup | None = None
    published_sum: bool = False
    teacher: Teacher | None = None

    def targets(self, batch: Batch) -> Targets:
        # Before the forward pass, so that the memory of the teacher's activations is free again.
        batch = batch if self.teacher is None else self.teacher.label(batch)
        targets = super().targets(batch)
        if self.published_sum and batch.labels is not None:
            return summing_to_more(targets, batch.labels, self.smoothing)
        return targets

    def draw(self, batch: Batch, step: StepKey) -> Mixed:
        box = _on_device(draw_box(step, self.grid), batch.images.device) if self.mix_token else None
        if self.mix is None:
            return Mixed(batch.images, box=box)
        ratios = self.mix.draw(batch.images, step.generator(_MIXUP_STREAM))
        return Mixed(ratios.blend_images(batch.images), ratios, box)

    def arguments(self, mixed: Mixed) -> dict[str, Any]:
        return {"dense": True, "mix_box": mixed.box} if self.dense else {"mix_box": mixed.box}

    def __call__(self, outputs: Any, targets: Targets, mixed: Mixed) -> LossTerms:  # type: ignore[override]
        cls_logits, token_logits = outputs if self.dense else (outputs, None)
        return super().__call__((cls_logits, token_logits), targets, mixed.box, mixed.ratios)


@dataclass(frozen=True)
class ClassCriterion:
    """Cross-entropy on the image's class, for any timm model.

    Args:
        mix: Mixup or CutMix, which also smooths the targets; None for neither.
        bce: Binary cross-entropy of logits and targets, which smooths targets that are class numbers; None: softmax.
    """

    smoothing: float = 0.1
    mix: Mixup | None = None
    bce: nn.Module | None = None

    def targets(self, batch: Batch) -> Tensor:
        return batch.classes

    def draw(self, batch: Batch, step: StepKey) -> Mixed:
        if self.mix is None:
            return Mixed(batch.images)
        ratios = self.mix.draw(batch.images, step.generator(_MIXUP_STREAM))
        return Mixed(ratios.blend_images(batch.images), ratios)

    def arguments(self, mixed: Mixed) -> dict[str, Any]:
        return {}

    def __call__(self, outputs: Tensor, targets: Tensor, mixed: Mixed) -> LossTerms:
        smoothing = self.smoothing
        if self.mix is not None and mixed.ratios is not None:
            targets, smoothing = self.mix.soft_targets(targets, mixed.ratios, mixed.images.dtype), 0.0
        if self.bce is not None:
            loss = self.bce(outputs.float(), targets)
        else:
            loss = F.cross_entropy(outputs.float(), targets, label_smoothing=smoothing)
        return LossTerms(loss, loss, torch.zeros_like(loss))


def _on_device(box: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(box, dtype=torch.int32)
    # A copy from pinned memory does not block the host.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def make_criterion(
    args: Namespace, model: TimmModel, image_size: tuple[int, int], teacher: Teacher | None = None
) -> Criterion:
    """Choose the criterion from the flags and prepare `model` for it: a dense head of weight 0 is switched off.

    Raises:
        UserError: `--token-label` for a model without a dense head, or a label size that doesn't fit its tokens.
    """
    if not args.token_label:
        return ClassCriterion(args.smoothing, _mixup(args, model.num_classes), _bce(args))
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
    return TokenLabelCriterion(
        grid,
        model.num_classes,
        model.dense_head and args.token_label_size != 1,
        args.smoothing,
        args.cls_weight,
        args.dense_weight,
        args.ground_truth,
        args.gt_weight_agree,
        args.gt_weight_disagree,
        mix_token=not args.no_mix_token,
        mix=_mixup(args, model.num_classes),
        uncovered=args.uncovered,
        window=model.token_places(image_size).window(grid, image_size),
        published_sum="target-sum" in (args.compat or ()),
        teacher=teacher,
    )


def _bce(args: Namespace) -> nn.Module | None:
    if not args.bce_loss:
        return None
    weight = args.bce_pos_weight
    return BinaryCrossEntropy(args.smoothing, args.bce_target_thresh, sum_classes=args.bce_sum, pos_weight=weight)


def _mixup(args: Namespace, num_classes: int) -> Mixup | None:
    if not (args.mixup or args.cutmix or args.cutmix_minmax):
        return None
    return Mixup(
        args.mixup,
        args.cutmix,
        args.cutmix_minmax,
        args.mixup_prob,
        args.mixup_switch_prob,
        args.mixup_mode,
        args.smoothing,
        num_classes,
    )

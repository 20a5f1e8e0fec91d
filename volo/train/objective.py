"""From a batch to a loss: with token labels, or with plain class labels.

Both objectives are called as `objective(model, batch, step)` and return `LossTerms(total, cls, dense)`, means over the
batch. `step` is the key of everything random in the step, so that a resumed run draws the same numbers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt import mixtoken
from tlt.data.augment.counter import key
from tlt.data.loader import Batch
from tlt.errors import UserError
from tlt.label_map import FULL_AREA, Area, LabelBatch
from tlt.loss import LossTerms
from tlt.mix import Mixup
from tlt.mixed_loss import mixed_token_label_loss
from tlt.models.wrap import TOKEN_LABEL_MODELS
from tlt.sparse_targets import SparseTargets, entries_per_token, make_sparse_targets
from tlt.targets import Targets, make_targets
from tlt.upstream import published
from volo.train.model import TimmModel
from volo.train.teacher import Teacher

# Keep the uses of one step apart, and from those of the data (tlt.data.augment.plan.Stream).
_TORCH_STREAM, _MIX_BOX_STREAM, _MIXUP_STREAM = 0x57E9, 0x57EA, 0x57EB


@dataclass(frozen=True)
class StepKey:
    """Names one forward pass of the run: every random number drawn in it is a function of these four."""

    seed: int
    update: int
    micro_batch: int
    rank: int

    def seed_torch(self) -> None:
        """Key dropout and stochastic depth: torch's generators restart at this step's own seed."""
        torch.manual_seed(int(self._key(_TORCH_STREAM)) >> 1)  # 63 bits

    def generator(self, stream: int) -> np.random.Generator:
        """A generator for one use of this step."""
        return np.random.Generator(np.random.Philox(key=int(self._key(stream))))

    def _key(self, stream: int) -> np.uint64:
        return key(self.seed, stream, self.update, self.micro_batch, self.rank)


Objective = Callable[[nn.Module, Batch, StepKey], LossTerms]
Grid = tuple[int, int]


def box_of_step(step: StepKey, grid: Grid) -> Sequence[int]:
    """MixToken's box of a step, from its own generator."""
    return mixtoken.sample_box(step.generator(_MIX_BOX_STREAM), grid)


def sparse_or_dense_targets(
    labels: LabelBatch | None,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: Grid,
    num_classes: int,
    *more: Any,
) -> Targets | SparseTargets:
    """Targets in sparse form unless there are fewer classes than a sparse label has entries. Both forms are the same
    targets; arguments as `tlt.targets.make_targets`."""
    sparse = entries_per_token(labels, grid) <= num_classes
    make = make_sparse_targets if sparse else make_targets
    return make(labels, affine, visible, classes, grid, num_classes, *more)


@dataclass(frozen=True)
class TokenLabelObjective:
    """Class loss plus dense loss on token labels, with MixToken.

    Args:
        grid: Token rows and columns of the model at the training resolution.
        num_classes: Outputs of both heads.
        token_label_size: None: one label per token; 1: one label per crop, no dense loss (ReLabel mode).
        dense: Train the dense head on the token labels; else `model(x)` is trained on the class labels.
        mix_token: Draw one MixToken box per batch.
        mix: Mixup or CutMix of the images and their labels, before MixToken; None for neither.
        uncovered: What counts where no label is known, see `tlt.targets.make_targets`.
        window: What of an image the tokens cover (`tlt.models.token_places`).
        make_targets, draw_box: How targets are made and boxes drawn; `--compat` has other ways.
        teacher: Labels the batch, before anything is mixed; None: it comes with labels, or without.
    """

    grid: Grid
    num_classes: int
    token_label_size: int | None = None
    smoothing: float = 0.1
    cls_weight: float = 1.0
    dense_weight: float = 0.5
    ground_truth: bool = False
    gt_weight_agree: float = 0.5
    gt_weight_disagree: float = 0.1
    dense: bool = True
    mix_token: bool = True
    mix: Mixup | None = None
    uncovered: str = "ignore"
    window: Area = FULL_AREA
    make_targets: published.TargetMaker = sparse_or_dense_targets
    draw_box: Callable[[StepKey, Grid], Sequence[int]] = box_of_step
    teacher: Teacher | None = None

    def __call__(self, model: nn.Module, batch: Batch, step: StepKey) -> LossTerms:
        targets = self.targets(batch)  # before the forward pass: a teacher's activations don't add to the student's
        box = self._box(step, batch.images.device) if self.mix_token else None
        shares = None if self.mix is None else self.mix.draw(batch.images, step.generator(_MIXUP_STREAM))
        images = batch.images if shares is None else shares.blend_images(batch.images)
        if self.dense:
            cls_logits, token_logits = model(images, dense=True, mix_box=box)
        else:
            cls_logits, token_logits = model(images, mix_box=box), None
        terms = mixed_token_label_loss(
            cls_logits,
            token_logits,
            targets,
            box,
            cls_weight=self.cls_weight,
            dense_weight=self.dense_weight,
            ground_truth=self.ground_truth,
            gt_weight_agree=self.gt_weight_agree,
            gt_weight_disagree=self.gt_weight_disagree,
            shares=shares,
        )
        if token_logits is not None and not self.dense_weight:
            # A dense head that is on but not trained gets gradients of 0, as published: weight decay still shrinks it.
            terms = terms._replace(total=terms.total + 0 * token_logits.sum())
        return terms

    def targets(self, batch: Batch) -> Targets | SparseTargets:
        """What the outputs for `batch` are compared with; its images are not mixed yet."""
        batch = batch if self.teacher is None else self.teacher.label(batch)
        made: Targets | SparseTargets = self.make_targets(
            batch.labels,
            batch.affine,
            batch.visible,
            batch.classes,
            self.grid,
            self.num_classes,
            self.smoothing,
            self.token_label_size,
            self.uncovered,
            self.window,
        )
        return made

    def _box(self, step: StepKey, device: torch.device) -> Tensor:
        box = torch.tensor(self.draw_box(step, self.grid), dtype=torch.int32)
        # From pinned memory the copy doesn't hold up the host.
        return box.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else box


@dataclass(frozen=True)
class ClassObjective:
    """Cross-entropy on the image's class, for any timm model.

    Args:
        mix: Mixup or CutMix, which also smooths the targets; None for neither.
    """

    smoothing: float = 0.1
    mix: Mixup | None = None

    def __call__(self, model: nn.Module, batch: Batch, step: StepKey) -> LossTerms:
        if self.mix is None:
            loss = F.cross_entropy(model(batch.images).float(), batch.classes, label_smoothing=self.smoothing)
        else:
            images, targets = self.mix(batch.images, batch.classes, step.generator(_MIXUP_STREAM))
            loss = F.cross_entropy(model(images).float(), targets)
        return LossTerms(loss, loss, torch.zeros_like(loss))


def make_objective(args: Namespace, model: TimmModel, image_size: tuple[int, int], rank: int = 0) -> Objective:
    """Choose the objective from the flags and prepare `model` for it: a dense head of weight 0 is switched off.

    Raises:
        UserError: `--token-label` for a model without a dense head, or a label size that doesn't fit its tokens.
    """
    if not args.token_label:
        return ClassObjective(args.smoothing, _mixup(args, model.num_classes))
    if not isinstance(model, TOKEN_LABEL_MODELS):
        raise UserError(f"--model {args.model} has no dense head for --token-label: give it one with add_dense_head")
    grid = model.token_grid(image_size)
    if args.token_label_size and args.token_label_size > max(*grid, 1):
        raise UserError(
            f"--token-label-size {args.token_label_size} doesn't fit: {args.model} has {grid[0]} x {grid[1]} tokens at "
            f"{image_size[0]} x {image_size[1]} px; leave the flag out"
        )
    rows = args.compat or ()
    if not args.dense_weight and "untrained-dense-head" not in rows:
        model.set_dense_head(False)
    return TokenLabelObjective(
        grid,
        model.num_classes,
        1 if args.token_label_size == 1 else None,
        args.smoothing,
        args.cls_weight,
        args.dense_weight,
        args.ground_truth,
        args.gt_weight_agree,
        args.gt_weight_disagree,
        dense=model.dense_head and args.token_label_size != 1,
        mix_token=not args.no_mix_token,
        mix=_mixup(args, model.num_classes),
        uncovered=args.uncovered,
        window=FULL_AREA if "token-places" in rows else model.token_places(image_size).window(grid, image_size),
        make_targets=published.target_maker(rows, sparse_or_dense_targets),
        draw_box=_legacy_boxes(args, grid, rank) if "mixtoken-rng" in rows else box_of_step,
    )


def _legacy_boxes(args: Namespace, grid: Grid, rank: int) -> Callable[[StepKey, Grid], Sequence[int]]:
    """The published boxes: the number of this rank's forward passes so far says which."""
    boxes = published.LegacyBoxes(args.seed, rank, grid)
    return lambda step, grid: boxes(step.update * args.grad_accum_steps + step.micro_batch)


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

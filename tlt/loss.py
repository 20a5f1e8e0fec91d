"""Token-label losses: the class token against the crop's soft label, every other token against its own (Token Labeling,
section 3.1), with MixToken's two class labels (section 3.3), of images that Mixup or CutMix mixed too.

`token_label_loss` is what our programs use. The classes below it have the published names and take the published dense
target tensors.

Shapes: B images, N tokens, C classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.io.chunks import image_chunks
from tlt.mix import MixRatios
from tlt.mixtoken import Box, mixed_share
from tlt.targets import SparseLabels, Targets


class LossTerms(NamedTuple):
    """Scalars: `total = cls_weight * cls + dense_weight * dense`."""

    total: Tensor
    cls: Tensor
    dense: Tensor


def token_label_loss(
    cls_logits: Tensor,
    token_logits: Tensor | None,
    targets: Targets,
    mix_box: Box | None = None,
    ratios: MixRatios | None = None,
    *,
    cls_weight: float = 1.0,
    dense_weight: float = 0.5,
    ground_truth: bool = False,
    gt_weight_agree: float = 0.5,
    gt_weight_disagree: float = 0.1,
) -> LossTerms:
    """Class loss and dense loss of one batch.

    Args:
        cls_logits: (B, C).
        token_logits: (B, N, C), un-mixed; None where the dense head is off.
        targets: Of the images before they were mixed. Without token targets (label size 1) the dense loss is 0.
        mix_box: MixToken's box `(row0, col0, row1, col1)` in tokens, ints or an int tensor; None for no mixing. The
            class target is mixed with the partner's (sample B - 1 - i) by the share of tokens the box covers.
        ratios: What `tlt.mix.Mixup.draw` drew; None where the images were not mixed by Mixup or CutMix. MixToken's box
            mixes what they mixed already: a token inside it shows the partner's mixture.
        cls_weight, dense_weight: A term of weight 0 is not computed, so that a head which is not trained can't spoil
            the total with an infinity.
        ground_truth: Blend the folder class into the class target, of each image before it is mixed.
        gt_weight_agree, gt_weight_disagree: The folder class's share in that blend where the label map's top class is
            the folder class, and where it is not. The defaults are the published numbers.

    The dense loss divides by B * N whatever is covered, each token weighing its coverage; so the mean over
    micro-batches or ranks, weighted by their images, equals one large batch.
    """
    cls_target = targets.cls
    if ground_truth:
        cls_target = blend_truth(cls_target, targets.truth_target(), gt_weight_agree, gt_weight_disagree)
    if ratios is not None:
        cls_target = ratios.blend_labels(cls_target)
    share = 0.0 if mix_box is None else mixed_share(mix_box, targets.grid)
    cls = _class_loss(cls_logits, cls_target, share) if cls_weight else _zero(cls_logits)
    dense = _zero(cls_logits)
    if dense_weight and token_logits is not None and targets.tokens is not None:
        dense = _dense_loss(token_logits, targets, ratios)
    return LossTerms(cls_weight * cls + dense_weight * dense, cls, dense)


def _class_loss(logits: Tensor, target: Tensor, share: float | Tensor) -> Tensor:
    """Mix each target with its partner's, which has weight `share` (MixToken)."""
    # Not torch.lerp: the share may be a number or a tensor on any device.
    return soft_cross_entropy(logits, target * (1 - share) + target.flip(0) * share).mean()


def _dense_loss(logits: Tensor, targets: Targets, ratios: MixRatios | None) -> Tensor:
    """Mean over images and tokens, each token weighing its coverage.

    A label that is a mixture of two costs what the two cost, each by its share: cross-entropy is linear in the label.
    So a token of mixed images costs what its own image's label does by the share that stays, and what the partner's
    does by the rest, each by its own coverage. No mixed labels are built.
    """
    assert targets.tokens is not None and targets.weight is not None
    if ratios is None:
        return (sparse_cross_entropy(logits, targets.tokens) * targets.weight).mean()
    stays = ratios.of_tokens(targets.grid, targets.window, targets.weight)  # (B or 1, N)
    own = (sparse_cross_entropy(logits, targets.tokens) * (targets.weight * stays)).mean()
    rest = targets.weight * (1 - stays.flip(0))
    return own + (sparse_cross_entropy(logits.flip(0), targets.tokens) * rest).mean()


def _zero(logits: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)


def blend_truth(cls_target: Tensor, truth: Tensor, agree: float, disagree: float) -> Tensor:
    """Mix (B, C) smoothed one-hot `truth` into (B, C) `cls_target`, with weight `agree` in the rows where both have the
    same top class and `disagree` in the others."""
    same = truth.argmax(-1, keepdim=True) == cls_target.argmax(-1, keepdim=True)  # (B, 1)
    weight = same.to(cls_target.dtype) * (agree - disagree) + disagree
    return torch.lerp(cls_target, truth.to(cls_target.dtype), weight)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """(..., C) logits and soft targets -> (...) cross-entropy, computed in at least float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(logits.to(dtype).flatten(0, -2), target.to(dtype).flatten(0, -2), reduction="none")
    return losses.view(logits.shape[:-1])


def sparse_cross_entropy(logits: Tensor, target: SparseLabels) -> Tensor:
    """(B, N, C) logits and sparse soft labels -> (B, N) cross-entropy, computed in at least float32.

    Equals `soft_cross_entropy(logits, target.dense(C))` without any tensor of that size but the logits' gradient. The
    labels get no gradient.
    """
    losses: Tensor = _SparseCrossEntropy.apply(logits, target.base, target.ids, target.excess)
    return losses


class _SparseCrossEntropy(torch.autograd.Function):
    """With labels t = base + excess: loss = -sum t log softmax(x), and d loss / d x = sum(t) softmax(x) - t.

    The softmax is computed again in the backward pass: keeping it would take the memory of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, base: Tensor, ids: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(logits, base, ids, excess)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device)
        for rows in _groups(logits):
            scores = torch.log_softmax(logits[rows], -1, dtype=dtype)
            listed = (scores.gather(-1, ids[rows].long()) * excess[rows]).sum(-1)
            losses[rows] = -(scores.sum(-1) * base[rows] + listed)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, base, ids, excess = ctx.saved_tensors
        dtype = torch.promote_types(logits.dtype, torch.float32)
        mass = base * logits.shape[-1] + excess.sum(-1)  # (B, N), 1 up to rounding for labels of ours
        result = torch.empty_like(logits)
        for rows in _groups(logits):
            part = torch.softmax(logits[rows], -1, dtype=dtype)
            part.mul_(mass[rows, :, None]).sub_(base[rows, :, None])
            # At most one entry per class is not 0, so the order of CUDA's atomic additions can't matter.
            part.scatter_add_(-1, ids[rows].long(), -excess[rows].to(dtype))
            result[rows] = part.mul_(grad[rows, :, None])
        return result, None, None, None


def _groups(logits: Tensor) -> list[slice]:
    batch, tokens, classes = logits.shape
    return image_chunks(batch, tokens * classes, logits.device)


def _token_columns(target: Tensor, tokens: int) -> Tensor:
    """(B, N, C) token part of a published target tensor; the crop's label for every token where there is none."""
    if target.ndim == 3 and target.shape[2] == tokens + 2:
        return target[:, :, 2:].transpose(1, 2)
    if target.ndim == 3 and target.shape[2] != 2:
        raise ValueError(f"a target of {target.shape[2] - 2} token labels for {tokens} tokens: check the label size")
    crop = target if target.ndim == 2 else target[:, :, 1]
    return crop[:, None].expand(-1, tokens, -1)


class TokenLabelSoftTargetCrossEntropy(nn.Module):
    """Published name. Cross-entropy of class logits alone, for label size 1 (ReLabel)."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x (B, C); target (B, C), or (B, C, 2) with the crop's label in column 1. Fewer target rows are repeated."""
        if target.ndim == 3:
            target = target[:, :, 1]
        if target.shape[0] != x.shape[0]:
            target = target.repeat(x.shape[0] // target.shape[0], 1)
        return soft_cross_entropy(x, target).mean()


class TokenLabelCrossEntropy(nn.Module):
    """Published name. Class loss plus dense loss on dense target tensors.

    Args:
        dense_weight, cls_weight: Weights of the two terms; not both 0.
        mixup_active, classes: Kept for callers; the published class does not use them either.
    """

    def __init__(
        self, dense_weight: float = 1.0, cls_weight: float = 1.0, mixup_active: bool = True, classes: int = 1000
    ) -> None:
        super().__init__()
        if dense_weight + cls_weight <= 0:
            raise ValueError("dense_weight and cls_weight are both 0")
        self.dense_weight, self.cls_weight = dense_weight, cls_weight
        self.mixup_active, self.classes = mixup_active, classes

    def forward(self, x: tuple[Tensor, Tensor, Box], target: Tensor) -> Tensor:
        """x = (class logits (B, C), un-mixed token logits (B, N, C), box).

        target (B, C, 2 + N): folder class, crop label, N token labels; (B, C, 2) repeats the crop's label for every
        token; (B, C) is the crop's label.
        """
        cls_logits, token_logits, box = x
        tokens = token_logits.shape[1]
        cls_target = target if target.ndim == 2 else self.class_target(target)
        token_target = _token_columns(target, tokens)
        total = _zero(cls_logits)
        if self.cls_weight:
            total = total + self.cls_weight * _class_loss(cls_logits, cls_target, mixed_share(box, (tokens, 1)))
        if self.dense_weight:
            total = total + self.dense_weight * soft_cross_entropy(token_logits, token_target).mean()
        return total

    def class_target(self, target: Tensor) -> Tensor:
        """(B, C, 2 or more) -> (B, C) target of the class token."""
        return target[:, :, 1]


class TokenLabelGTCrossEntropy(TokenLabelCrossEntropy):
    """Published name. As `TokenLabelCrossEntropy`, with the folder class blended into the class target.

    Args:
        smoothing: Kept for callers; the published class does not use it either.
        gt_weight_agree, gt_weight_disagree: See `token_label_loss`.
    """

    def __init__(
        self,
        dense_weight: float = 1.0,
        cls_weight: float = 1.0,
        mixup_active: bool = True,
        smoothing: float = 0.1,
        classes: int = 1000,
        gt_weight_agree: float = 0.5,
        gt_weight_disagree: float = 0.1,
    ) -> None:
        super().__init__(dense_weight, cls_weight, mixup_active, classes)
        self.smoothing = smoothing
        self.gt_weight_agree, self.gt_weight_disagree = gt_weight_agree, gt_weight_disagree

    def class_target(self, target: Tensor) -> Tensor:
        return blend_truth(target[:, :, 1], target[:, :, 0], self.gt_weight_agree, self.gt_weight_disagree)

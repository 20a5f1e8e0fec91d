"""The loss of token labeling: the class token learns the crop's soft label, every other token its own (Token Labeling,
section 3.1). MixToken mixes two class labels (section 3.3); Mixup and CutMix may have mixed the images before.

Shapes: B images, N tokens, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.batch import Batch
from tlt.errors import UserError, in_range, size_of
from tlt.io.chunks import image_chunks
from tlt.label_map import FULL_AREA, Area
from tlt.mix import MixRatios
from tlt.mixtoken import Box, mixed_share
from tlt.models.wrap import TOKEN_LABEL_MODELS, bare
from tlt.targets import SparseLabels, Targets, TokenPlaces, make_targets

if TYPE_CHECKING:
    from typing_extensions import Self


class LossTerms(NamedTuple):
    """Losses of a step, scalars: `total = cls_weight * cls + dense_weight * dense` plus the weighted teacher losses.
    `teachers` maps each teacher's name to its unweighted loss."""

    total: Tensor
    cls: Tensor
    dense: Tensor
    teachers: Mapping[str, Tensor] = MappingProxyType({})

    def map(self, change: Callable[[Tensor], Tensor]) -> "LossTerms":
        """Return the losses after applying `change` to each."""
        teachers = {name: change(loss) for name, loss in self.teachers.items()}
        return LossTerms(change(self.total), change(self.cls), change(self.dense), teachers)


# Fields of the loss for which train.py has flags of the same names.
SETTINGS = (
    "smoothing",
    "cls_weight",
    "dense_weight",
    "ground_truth",
    "gt_weight_agree",
    "gt_weight_disagree",
    "uncovered",
)


@dataclass(frozen=True)
class TokenLabelLoss(TokenPlaces):
    """The class loss plus the dense loss on token labels. `TokenLabelLoss.of(model, img_size)` makes one for a model.

    Args:
        grid: Token rows and columns of the model at the training resolution.
        num_classes: Outputs of both heads.
        dense: Whether every token has a label. False: only the crop has one, and there is no dense loss (ReLabel).
        smoothing: Label smoothing in [0, 1).
        cls_weight, dense_weight: A term of weight 0 is not computed, so that infinite outputs of an untrained head do
            not reach the total.
        ground_truth: Blend the folder class of each image into its class target, before mixing.
        gt_weight_agree, gt_weight_disagree: Weight of the folder class in that blend if the label map has the same top
            class, and if it has another. The defaults are the published numbers.
        uncovered: How to treat what no label covers, see `tlt.targets.make_targets`.
        window: The part of an image that the tokens cover (`tlt.models.spatial`).
        places: Grid and window for images of each size (H, W); if empty, all have `grid` and `window`.
    """

    grid: tuple[int, int]
    num_classes: int
    dense: bool = True
    smoothing: float = 0.1
    cls_weight: float = 1.0
    dense_weight: float = 0.5
    ground_truth: bool = False
    gt_weight_agree: float = 0.5
    gt_weight_disagree: float = 0.1
    uncovered: str = "ignore"
    window: Area = FULL_AREA
    places: Mapping[tuple[int, int], tuple[tuple[int, int], Area]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cls_weight", "dense_weight"):
            in_range(name, getattr(self, name), 0)
        for name in ("gt_weight_agree", "gt_weight_disagree"):
            in_range(name, getattr(self, name), 0, 1)

    @classmethod
    def of(
        cls, model: Any, img_size: tuple[int, int], sizes: Sequence[tuple[int, int]] = (), **settings: Any
    ) -> "Self":
        """Return the loss for a model and images of (H, W) pixels, or of other `sizes`. Raise UserError if the model
        has no dense head, or does not take this size.

        Args:
            model: VOLO, LV-ViT, or a model from `with_dense_head`, before DistributedDataParallel or compilation. If
                `dense_weight` is 0, its dense head is frozen, because DistributedDataParallel would wait for its
                gradients, and adds nothing to `model(x)`.
            settings: Other arguments of the class.
        """
        trained = bool(settings.get("dense_weight", cls.dense_weight))
        model = bare(model, "" if trained else "TokenLabelLoss.of with dense_weight=0, which freezes the dense head")
        if not isinstance(model, TOKEN_LABEL_MODELS):
            raise UserError(f"{type(model).__name__} has no dense head: call tlt.with_dense_head(model, img_size)")
        sizes = [size_of("img_size", size) for size in (img_size, *sizes)]
        places = {
            size: (grid := model.token_grid(size), model.token_positions(size).window(grid, size)) for size in sizes
        }
        grid, window = places[sizes[0]]
        criterion = cls(grid, model.num_classes, window=window, places=places, **settings)
        if not trained:
            model.set_dense_head(model.dense_head, trained=False)
        return criterion

    def targets(self, batch: Batch) -> Targets:
        """Return the targets of a batch, on its device. Its images must not be mixed yet. Raise UserError if its data
        set has more classes than the model."""
        if batch.num_classes > self.num_classes:  # on CUDA a class id that is too large would end the process
            raise UserError(
                f"the images are of {batch.num_classes} classes, the model has {self.num_classes}: create it with "
                "num_classes=len(images.class_names)"
            )
        crops = batch.labels, batch.affine, batch.visible, batch.classes
        grid, window = self.place(batch.images)
        settings = self.smoothing, self.dense, self.uncovered, window
        return make_targets(*crops, grid, self.num_classes, *settings)

    def __call__(
        self,
        outputs: tuple[Tensor, Tensor | None],
        targets: Targets,
        box: Box | None = None,
        ratios: MixRatios | None = None,
    ) -> "LossTerms":
        """Return the losses, as means over the batch.

        The dense loss weighs each token by its coverage and always divides by B * N. So the mean over micro-batches or
        ranks, weighted by their number of images, equals the loss of one large batch. Raise UserError if the outputs
        have another number of tokens or classes than the targets.

        Args:
            outputs: Class logits (B, C) and un-mixed token logits (B, N, C) or None, from `model(images, dense=True,
                mix_box=box)`.
            targets: The targets of the images before mixing. Without token targets the dense loss is 0.
            box: MixToken's box `(row0, col0, row1, col1)` of that forward pass in tokens, ints or a tensor, or None.
                The class target is mixed with the partner's (sample B - 1 - i) by the share of tokens in the box.
            ratios: The result of `tlt.mix.Mixup.draw`, or None without Mixup and CutMix. MixToken works on images that
                these mixed already: a token inside its box shows the partner's mixture.
        """
        cls_logits, token_logits = outputs
        fits = cls_logits.shape == targets.cls.shape
        if token_logits is not None and targets.tokens is not None:
            fits &= token_logits.shape[:2] == targets.tokens.weight.shape
        if not fits:
            raise UserError(
                "the model gives other tokens or classes than the targets have: make the loss by "
                "TokenLabelLoss.of(model, img_size), for images of this size"
            )
        dtype = torch.promote_types(cls_logits.dtype, torch.float32)
        cls = dense = torch.zeros((), dtype=dtype, device=cls_logits.device)
        if self.cls_weight:
            target = targets.cls
            if self.ground_truth:
                target = blend_truth(target, targets.truth, self.gt_weight_agree, self.gt_weight_disagree)
            if ratios is not None:
                target = ratios.blend_labels(target)
            share = 0.0 if box is None else mixed_share(box, targets.grid)
            # torch.lerp can't be used here: the share may be a number, or a tensor on any device.
            target = target * (1 - share) + target.flip(0) * share
            cls = F.cross_entropy(cls_logits.to(dtype), target.to(dtype), reduction="none").mean()
        if self.dense_weight and token_logits is not None and targets.tokens is not None:
            dense = _dense_loss(token_logits, targets.tokens, targets, ratios)
        return LossTerms(self.cls_weight * cls + self.dense_weight * dense, cls, dense)


def blend_truth(cls_target: Tensor, truth: Tensor, agree: float, disagree: float) -> Tensor:
    """Mix (B, C) smoothed one-hot `truth` into (B, C) `cls_target`, with weight `agree` in the rows where both have the
    same top class and `disagree` in the others."""
    same = truth.argmax(-1, keepdim=True) == cls_target.argmax(-1, keepdim=True)  # (B, 1)
    weight = same.to(cls_target.dtype) * (agree - disagree) + disagree
    return torch.lerp(cls_target, truth, weight)


def _dense_loss(logits: Tensor, tokens: SparseLabels, targets: Targets, ratios: MixRatios | None) -> Tensor:
    """Return the mean over images and tokens of the token loss, each token weighted by its coverage.

    Cross-entropy is linear in the label, so the loss of a mixed label is the mixture of two losses, and we build no
    mixed labels. A token of a mixed image has the loss against its own image's label, weighted by the share that stays,
    plus the loss against the partner's label, weighted by the remainder; each is also weighted by its own coverage.
    """
    if ratios is None:
        return (sparse_cross_entropy(logits, tokens) * tokens.weight).mean()
    share = ratios.of_tokens(targets.grid, targets.window, tokens.weight)  # (B or 1, N)
    loss = (sparse_cross_entropy(logits, tokens) * (tokens.weight * share)).mean()
    partner_weight = tokens.weight * (1 - share.flip(0))
    return loss + (sparse_cross_entropy(logits.flip(0), tokens) * partner_weight).mean()


def sparse_cross_entropy(logits: Tensor, target: SparseLabels) -> Tensor:
    """Return the cross-entropy (B, N) of logits (B, N, C) and sparse soft labels, computed in at least float32.

    It equals the cross-entropy with `target.dense(C)`, but allocates no tensor of that size except the gradient of the
    logits. The labels get no gradient.
    """
    losses: Tensor = _SparseCrossEntropy.apply(logits, target.base, target.ids, target.excess)
    return losses


class _SparseCrossEntropy(torch.autograd.Function):
    """For labels t = base + excess: loss = -sum(t log softmax(x)), and d loss / d x = sum(t) softmax(x) - t.

    The backward pass computes the softmax again: keeping it would take as much memory as the logits.
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
        mass = base * logits.shape[-1] + excess.sum(-1)  # (B, N), 1 up to rounding for labels of `make_targets`
        result = torch.empty_like(logits)
        for rows in _groups(logits):
            part = torch.softmax(logits[rows], -1, dtype=dtype)
            part.mul_(mass[rows, :, None]).sub_(base[rows, :, None])
            # At most one entry per class is not 0, so the order of CUDA's atomic additions does not matter.
            part.scatter_add_(-1, ids[rows].long(), -excess[rows].to(dtype))
            result[rows] = part.mul_(grad[rows, :, None])
        return result, None, None, None


def _groups(logits: Tensor) -> list[slice]:
    batch, tokens, classes = logits.shape
    return image_chunks(batch, tokens * classes, logits.device)

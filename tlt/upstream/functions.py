"""Targets for training loops written for the published `tlt.data`: dense, made of the published label tensor.

Loops of one's own that begin here use `tlt.Loader` and `tlt.TokenLabelLoss` (docs/python_api.md).

Shapes: B images, C classes, N = label_size^2 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.label_map import FULL_AREA, LabelBatch
from tlt.mix import Mixup
from tlt.targets import make_targets, one_hot

_CLASS_COLUMN = 5


def create_token_label_target(
    target: Tensor,
    num_classes: int,
    lam: float | Tensor = 1.0,
    smoothing: float = 0.0,
    device: torch.device | str | None = None,
    label_size: int = 1,
) -> Tensor:
    """Dense targets for the losses with published names (`tlt.loss`).

    Args:
        target: (B,) class ids, or the published (B, 3, k, H, W): logits of a map of the whole image, class ids, and a
            plane with the crop's (y, x, h, w) as shares of the image at [0, 0, :4] and the class at [0, 0, 5].
        lam: Share of each sample that stays when it is mixed with its partner (sample B - 1 - i); a number, or one per
            sample.
        smoothing: Label smoothing in [0, 1).
        device: Where to compute; None: where `target` is (the published default is "cuda").
        label_size: Tokens per side; 1: a label of the crop only.

    Returns:
        (B, C) for class ids; else (B, C, 2) or (B, C, 2 + N): folder class, crop, tokens.
    """
    target = target if device is None else target.to(device)
    if target.ndim == 1:
        dense = one_hot(target, num_classes, smoothing, torch.float32)
    else:
        dense = _dense_targets(target, num_classes, smoothing, label_size)
    if isinstance(lam, Tensor):
        lam = lam.to(dense).view(-1, *[1] * (dense.ndim - 1))
    return dense * lam + dense.flip(0) * (1 - lam)


def _dense_targets(target: Tensor, num_classes: int, smoothing: float, label_size: int) -> Tensor:
    if target.ndim != 5 or target.shape[1] != 3 or target.shape[4] <= _CLASS_COLUMN:
        raise ValueError(f"{tuple(target.shape)} is not (B, 3, k, H, W) with W of at least 6")
    y, x, h, w = target[:, 2, 0, 0, :4].float().unbind(1)
    none = torch.zeros_like(x)
    affine = torch.stack([w, none, x, none, h, y], 1).view(-1, 2, 3)
    visible = torch.stack([x, y, x + w, y + h], 1)
    area = torch.tensor(FULL_AREA, device=target.device).expand(len(target), 4)
    labels = LabelBatch(target[:, 0], target[:, 1].round().int(), area)
    classes = target[:, 2, 0, 0, _CLASS_COLUMN].round().long()
    size, grid = (1, (1, 1)) if label_size == 1 else (None, (label_size, label_size))
    made = make_targets(labels, affine, visible, classes, grid, num_classes, smoothing, size)
    columns = [made.truth_target()[..., None], made.cls[..., None]]
    if made.tokens is not None:
        columns.append(made.tokens.dense(num_classes).transpose(1, 2))
    return torch.cat(columns, 2)


class TokenLabelMixup(Mixup):
    """Mixup and CutMix of images together with their token labels: dense targets come out.

    Args:
        correct_lam: Only True: the share is always that of the box as clipped.
        label_size: See `create_token_label_target`.
        seed: Of all draws of this object. The others: as `tlt.mix.Mixup`.

    Attributes:
        mixup_enabled: Set to False to stop mixing.
    """

    def __init__(
        self,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: Sequence[float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        correct_lam: bool = True,
        label_smoothing: float = 0.1,
        num_classes: int = 1000,
        label_size: int = 1,
        seed: int = 0,
    ) -> None:
        if not correct_lam:
            raise UserError("correct_lam=False is not supported: the share of a CutMix box is that of the clipped box")
        alphas = mixup_alpha, cutmix_alpha, cutmix_minmax
        super().__init__(*alphas, prob, switch_prob, mode, label_smoothing, num_classes)
        self.label_size = label_size
        self.mixup_enabled = True
        self._generator = np.random.default_rng(seed)

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Images (B, 3, H, W) and their labels -> mixed images, dense mixed targets."""
        lam: float | Tensor = 1.0
        if self.mixup_enabled:
            ratios = self.draw(x, self._generator)
            x, lam = ratios.blend_images(x), ratios.label[:, 0]
        smoothing = self.label_smoothing
        return x, create_token_label_target(target, self.num_classes, lam, smoothing, label_size=self.label_size)

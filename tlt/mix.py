"""Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) with timm's rules, but with the caller's generator in place of
numpy's global one, and for batches of any size. `tlt.loss` mixes token labels by the same shares.

Sample i is mixed with sample B - 1 - i, its partner, as in timm. The middle sample of an odd batch is its own partner.

Legend: B images of (H, W), C classes, R = 1 in mode "batch", else B. `lam` is the share of a sample that stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tlt.data.augment.operations import precise_dtype, to_device
from tlt.errors import UserError
from tlt.label_map import Area
from tlt.targets import one_hot

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MODES = ("batch", "pair", "elem")


@dataclass(frozen=True)
class MixRatios:
    """The share that each sample keeps in a mixed batch. The rest comes from its partner."""

    label: Tensor  # (R, 1), the share of its label that stays
    image: Tensor  # (R, 1, H or 1, W or 1), the share that stays of each pixel of its image

    def blend_images(self, images: Tensor) -> Tensor:
        """Mix images (B, 3, H, W)."""
        return _blend(images, self.image.to(images.dtype))

    def blend_labels(self, labels: Tensor) -> Tensor:
        """Mix the soft labels (B, C) of the images."""
        return _blend(labels, self.label.to(labels.dtype))

    def of_tokens(self, grid: tuple[int, int], window: Area, like: Tensor) -> Tensor:
        """Return the share that stays of each token, (R, N), in the dtype of `like`: the mean over its pixels. The grid
        covers `window` of the image (see `tlt.targets.make_targets`)."""
        dtype = like.dtype
        if self.image.shape[2:] == (1, 1):
            return self.label.to(like.dtype).expand(-1, grid[0] * grid[1])
        # On a GPU float32 products may round to TF32, and a share would depend on whether the batch was split.
        like = like.double() if like.is_cuda else like
        pixels = self.image.to(like.dtype)
        rows, cols = (
            _pixels_of_tokens(count, low, high, side, like)
            for count, low, high, side in zip(grid, window[1::-1], window[:1:-1], pixels.shape[2:], strict=True)
        )
        return (rows @ pixels @ cols.T).flatten(1).to(dtype)


@dataclass(eq=False)
class Mixup:
    """Draws how images are mixed. It has the arguments of `timm.data.Mixup`. Raises UserError if Mixup and CutMix are
    both off, `cutmix_minmax` is no range, or the mode is unknown."""

    mixup_alpha: float = 1.0  # Mixup draws lam from Beta(alpha, alpha); 0 turns Mixup off
    cutmix_alpha: float = 0.0  # the same for CutMix; 0 turns CutMix off
    # Smallest and largest side of CutMix's box as a share of the image; replaces `cutmix_alpha`.
    cutmix_minmax: Sequence[float] | None = None
    prob: float = 1.0  # probability that a batch (a pair or sample in the other modes) is mixed
    switch_prob: float = 0.5  # probability of CutMix if both are on
    mode: str = "batch"  # one draw per "batch", per "pair" of samples, or per sample ("elem")
    label_smoothing: float = 0.1  # label smoothing of the targets, in [0, 1)
    num_classes: int = 1000  # C

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"--mixup-mode {self.mode}: choose from {', '.join(MODES)}")
        if (sides := self.cutmix_minmax) is not None:
            if len(sides) != 2 or not 0 <= sides[0] < sides[1] <= 1:
                raise UserError(f"--cutmix-minmax {' '.join(map(str, sides))}: give two shares, the smaller first")
            self.cutmix_alpha = 1.0
        if max(self.mixup_alpha, self.cutmix_alpha) <= 0:
            raise UserError("--mixup and --cutmix are both 0: one of them must be positive to mix")

    @property
    def cuts(self) -> bool:
        """Whether CutMix can happen: then the pixels of one image have different shares."""
        return self.cutmix_alpha > 0

    def soft_targets(self, classes: Tensor, ratios: MixRatios, dtype: torch.dtype) -> Tensor:
        """Return smoothed and mixed targets (B, C) for folder classes (B,)."""
        return ratios.blend_labels(one_hot(classes, self.num_classes, self.label_smoothing, dtype))

    def draw(self, images: Tensor, generator: np.random.Generator) -> MixRatios:
        """Decide how a batch of images (B, 3, H, W) is mixed; do not change or wait for them. `generator` is used in
        timm's order."""
        size = (images.shape[-2], images.shape[-1])
        lam, boxes = self._draw(len(images), size, generator)
        return _mix_ratios(lam, boxes, size, images)

    def _draw(
        self, batch: int, size: tuple[int, int], generator: np.random.Generator
    ) -> tuple[Floats, list[Ints | None]]:
        """Return the share of each sample that stays, (R,), and its box or None: inside the box the partner shows."""
        if self.mode == "batch":
            lam, cutmix = self._draw_batch(generator)
        else:
            lam, cutmix = self._draw_rows(batch // 2 if self.mode == "pair" else batch, generator)
        boxes = [self._box(lam[i], size, generator) if cut and lam[i] != 1 else None for i, cut in enumerate(cutmix)]
        if self.mode == "pair":
            middle = batch % 2
            boxes = boxes + [None] * middle + boxes[::-1]
            lam = np.concatenate([lam, np.ones(middle), lam[::-1]])
        return lam, boxes

    def _draw_batch(self, generator: np.random.Generator) -> tuple[Floats, list[bool]]:
        if generator.random() >= self.prob:
            return np.ones(1), [False]
        cutmix = self._both and generator.random() < self.switch_prob or self.mixup_alpha <= 0
        alpha = self.cutmix_alpha if cutmix else self.mixup_alpha
        return np.array([generator.beta(alpha, alpha)]), [bool(cutmix)]

    def _draw_rows(self, rows: int, generator: np.random.Generator) -> tuple[Floats, list[bool]]:
        cutmix = np.full(rows, self.mixup_alpha <= 0)
        if self._both:
            cutmix = generator.random(rows) < self.switch_prob
        lam = np.ones(rows)
        for chosen, alpha in ((cutmix, self.cutmix_alpha), (~cutmix, self.mixup_alpha)):
            if alpha > 0:
                lam = np.where(chosen, generator.beta(alpha, alpha, size=rows), lam)
        return np.where(generator.random(rows) < self.prob, lam, 1.0), cutmix.tolist()

    @property
    def _both(self) -> bool:
        return self.mixup_alpha > 0 and self.cutmix_alpha > 0

    def _box(self, lam: float, size: tuple[int, int], generator: np.random.Generator) -> Ints:
        """Return CutMix's box: top, left, bottom, right in pixels, half-open."""
        if self.cutmix_minmax is not None:
            low, high = self.cutmix_minmax
            cut = np.array(
                [generator.integers(int(side * low), max(int(side * high), int(side * low) + 1)) for side in size]
            )
            start = np.array([generator.integers(0, side - c + 1) for side, c in zip(size, cut, strict=True)])
            return np.concatenate([start, start + cut])
        sides = np.array(size)
        cut = (sides * np.sqrt(1 - lam)).astype(np.int64)
        centre = np.array([generator.integers(0, side) for side in size])
        return np.concatenate([(centre - cut // 2).clip(0), np.minimum(centre + (cut + 1) // 2, sides)])


def _mix_ratios(lam: Floats, boxes: Sequence[Ints | None], size: tuple[int, int], images: Tensor) -> MixRatios:
    """Return the shares as tensors with the images' device and dtype. A sample with a box keeps the area around it."""
    height, width = size
    cut = np.array([box is not None for box in boxes])
    edges = np.array([[0] * 4 if box is None else box for box in boxes], np.float64)
    area = (edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1])
    table = np.column_stack([np.where(cut, 1.0 - area / (height * width), lam), cut, edges])
    label, is_cut, *sides = to_device(table, images.device)[..., None].unbind(1)  # (R, 1) each
    label = label.to(images.dtype)
    if not cut.any():
        return MixRatios(label, label[..., None, None])
    top, left, bottom, right = (side[..., None] for side in sides)  # (R, 1, 1)
    y, x = (torch.arange(length, device=images.device) for length in size)
    outside = ((y < top) | (y >= bottom))[..., None] | ((x < left) | (x >= right))[..., None, :]  # (R, 1, H, W)
    outside_cut = torch.where(is_cut[..., None, None] > 0, outside.to(images.dtype), label[..., None, None])
    return MixRatios(label, outside_cut)


def _pixels_of_tokens(count: int, low: float, high: float, side: int, like: Tensor) -> Tensor:
    """Return (count, side) weights of the pixels in `count` tokens that cover `low` to `high` of `side` pixels."""
    edges = (
        low + torch.arange(count + 1, dtype=precise_dtype(like.device), device=like.device) / count * (high - low)
    ).clamp(0, 1)
    pixel = torch.arange(side, device=like.device)
    shares = torch.minimum(edges[1:, None] * side, pixel + 1) - torch.maximum(edges[:-1, None] * side, pixel)
    shares = shares.clamp(min=0)
    return (shares / shares.sum(1, keepdim=True).clamp(min=1e-6)).to(like.dtype)


def _blend(values: Tensor, weight: Tensor) -> Tensor:
    """Return weight * values + (1 - weight) * values of the partner."""
    return values * weight + values.flip(0) * (1 - weight)

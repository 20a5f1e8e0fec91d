"""From label maps and the geometry of the augmentation to the target of every token.

A token's target is the label of the image content that the token shows. One affine per sample tells where in the source
image each point of the crop comes from; the map is read there, several points per token, and averaged. Nothing is
resampled twice, and it is the same for crops, flips, shears, rotations and translations, on every device.

Shapes: B images, a token grid of `rows x cols` with N = rows * cols tokens, C classes, maps of `h x w` cells with k
classes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tlt.errors import UserError
from tlt.label_map import FULL_AREA, Area, LabelBatch

UNCOVERED = ("ignore", "uniform")

# Samples are worked off in groups, so that the dense form of the label maps stays below this many numbers (64 MiB).
_DENSE_NUMBERS = 2**24


@dataclass(frozen=True)
class Targets:
    """What the loss compares a batch of outputs with.

    Attributes:
        cls: (B, C) soft label of the whole crop.
        tokens: (B, N, C) soft label of every token, or None where only the crop has one (label size 1, as in ReLabel).
            May be an expanded view: don't write into it.
        weight: (B, N) in [0, 1], how much each token counts: the share of it that its label map covers, or 1 where
            what isn't covered counts as uniform; None with `tokens`.
        truth: (B,) int64 class of each image by its folder.
        smoothing: Label smoothing in [0, 1) that `cls` and `tokens` contain.
        grid: Token grid, (rows, cols); N = rows * cols.
        window: What of the crop the grid covers, see `sample_tokens`.
    """

    cls: torch.Tensor
    tokens: torch.Tensor | None
    weight: torch.Tensor | None
    truth: torch.Tensor
    smoothing: float
    grid: tuple[int, int]
    window: Area = FULL_AREA

    def truth_target(self) -> torch.Tensor:
        """(B, C) one-hot folder class with the same smoothing as the other targets."""
        return one_hot(self.truth, self.cls.shape[1], self.smoothing, self.cls.dtype)


def one_hot(classes: torch.Tensor, num_classes: int, smoothing: float, dtype: torch.dtype) -> torch.Tensor:
    """(B,) class ids -> (B, C) smoothed one-hot rows that sum to 1."""
    rows = torch.zeros(classes.shape[0], num_classes, dtype=dtype, device=classes.device)
    return smooth(rows.scatter_(1, classes.long()[:, None], 1.0), smoothing)


def smooth(probabilities: torch.Tensor, smoothing: float) -> torch.Tensor:
    """`(1 - s) p + s / C` over the last axis. Sums to 1, where the published targets sum to `1 + s / C`."""
    if not smoothing:
        return probabilities
    return probabilities * (1 - smoothing) + smoothing / probabilities.shape[-1]


def points_per_token(map_size: tuple[int, int], grid: tuple[int, int]) -> int:
    """How many points per axis are read for one token: enough that no map cell of a full-image crop is jumped over, and
    at least 2 so that a token never depends on one point."""
    return max(2, *(math.ceil(cells / tokens) for cells, tokens in zip(map_size, grid, strict=True)))


def sample_tokens(
    labels: LabelBatch,
    affine: torch.Tensor,
    grid: tuple[int, int],
    visible: torch.Tensor,
    num_classes: int,
    window: Area = FULL_AREA,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean label logits of every token, and how much of each token is labelled.

    Every token is read at n x n evenly spaced points, bilinearly, with the edge cells continued to the edge of the map.
    Points outside the map's area, outside the crop, or outside the part of the source that the crop shows, do not
    count. For a plain crop this is `torchvision.ops.roi_align(..., sampling_ratio=n, aligned=True)` of the dense map
    with the true box.

    Classes that a cell does not list have logit 0 there (this defines the published targets). A class that a cell lists
    twice counts once, with its larger value.

    Args:
        labels: The label maps of the batch.
        affine: (B, 2, 3) maps the unit square of the crop, `(x, y, 1)`, to the unit square of the source image.
            float32 gives float32 results, float64 gives float64.
        grid: Token grid, (rows, cols).
        visible: (B, 4) `(x0, y0, x1, y1)`, the part of the source image that the crop shows; where a rotation or shift
            reaches outside of it, the crop shows the fill colour.
        num_classes: C.
        window: `(x0, y0, x1, y1)`, what the grid covers in shares of the crop (`tlt.models.token_places`); it may
            reach outside of it.

    Returns:
        logits (B, N, C), 0 where nothing is covered; coverage (B, N), the share of covered points.
    """
    batch, _, h, w = labels.values.shape
    tokens = grid[0] * grid[1]
    logits = affine.new_empty(batch, tokens, num_classes)
    coverage = affine.new_empty(batch, tokens)
    step = max(1, _DENSE_NUMBERS // (h * w * num_classes))
    # In lower precision the weights of a token's points would no longer sum to one.
    with torch.autocast(affine.device.type, enabled=False):
        for start in range(0, batch, step):
            rows = slice(start, start + step)
            part = labels.select(rows)
            weights, coverage[rows] = _cell_weights(part.area, (h, w), affine[rows], grid, visible[rows], window)
            torch.bmm(weights, _dense(part, num_classes, affine.dtype), out=logits[rows])
    return logits, coverage


def make_targets(
    labels: LabelBatch | None,
    affine: torch.Tensor,
    visible: torch.Tensor,
    classes: torch.Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    token_label_size: int | None = None,
    uncovered: str = "ignore",
    window: Area = FULL_AREA,
) -> Targets:
    """Targets of one batch, computed on the device of its labels without synchronising with the host.

    Args:
        labels: Label maps, or None: then every token gets the class of its image.
        affine: (B, 2, 3), see `sample_tokens`.
        visible: (B, 4), see `sample_tokens`.
        classes: (B,) class ids by folder.
        grid: Token grid of the model, (rows, cols).
        num_classes: C.
        smoothing: Label smoothing in [0, 1), put on top of the soft labels as published.
        token_label_size: None takes the model's grid. 1 makes a soft label of the crop only (ReLabel).
        uncovered: What a point means that the map doesn't cover or the crop doesn't show. "ignore": nothing, it is left
            out of the mean. "uniform": logit 0 for all classes, as published, and every token weighs 1.
        window: See `sample_tokens`.

    The class label is the mean over all points of the crop that count, as `roi_align` to 1 x 1 would give, then the
    softmax; a sample with no such point gets its folder class. A map of empty area says nothing of its image: there no
    point counts.

    Raises:
        UserError: `token_label_size` is neither 1 nor the model's grid, or `uncovered` is unknown.
    """
    check_size(token_label_size, grid)
    check_uncovered(uncovered)
    dtype = torch.promote_types(affine.dtype, torch.float32)
    classes = classes.long()
    truth = one_hot(classes, num_classes, smoothing, dtype)
    if labels is None:
        weight = truth.new_ones(classes.shape[0], grid[0] * grid[1])
        cls, tokens = truth, truth[:, None].expand(-1, weight.shape[1], -1)
    else:
        logits, weight = _sampled(labels, affine.to(dtype), grid, visible.to(dtype), num_classes, uncovered, FULL_AREA)
        with torch.autocast(affine.device.type, enabled=False):
            cls = _crop_label(logits, weight, truth, smoothing)
        if window != FULL_AREA and token_label_size != 1:
            logits, weight = _sampled(labels, affine.to(dtype), grid, visible.to(dtype), num_classes, uncovered, window)
        tokens = logits if token_label_size == 1 else smooth(logits.softmax(-1), smoothing)
    if token_label_size == 1:
        return Targets(cls, None, None, classes, smoothing, grid, window)
    return Targets(cls, tokens, weight, classes, smoothing, grid, window)


def _sampled(
    labels: LabelBatch,
    affine: torch.Tensor,
    grid: tuple[int, int],
    visible: torch.Tensor,
    num_classes: int,
    uncovered: str,
    window: Area,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N, C) token logits and (B, N) how much each token counts."""
    logits, weight = sample_tokens(labels, affine, grid, visible, num_classes, window)
    if uncovered == "uniform":
        logits, weight = logits * weight[..., None], known(labels).to(weight)[:, None].expand_as(weight)
    return logits, weight


def check_size(token_label_size: int | None, grid: tuple[int, int]) -> None:
    if token_label_size not in (None, 1) and (token_label_size, token_label_size) != tuple(grid):
        raise UserError(
            f"--token-label-size {token_label_size} does not fit the model's {grid[0]} x {grid[1]} tokens; "
            "leave it out, or give 1 for one label per crop"
        )


def check_uncovered(uncovered: str) -> None:
    if uncovered not in UNCOVERED:
        raise UserError(f"--uncovered {uncovered} is none of {', '.join(UNCOVERED)}")


def known(labels: LabelBatch) -> torch.Tensor:
    """(B,) bool: whether a map covers any of its image (`tlt.label_map.NO_AREA` doesn't)."""
    return (labels.area[:, 2:] > labels.area[:, :2]).all(1)


def _crop_label(logits: torch.Tensor, weight: torch.Tensor, truth: torch.Tensor, smoothing: float) -> torch.Tensor:
    """(B, N, C) token logits and their (B, N) weights -> (B, C) soft label of the crop, `truth` where all weigh 0."""
    total = weight.sum(1, keepdim=True)  # (B, 1)
    mean = torch.bmm((weight / total.clamp(min=torch.finfo(weight.dtype).tiny))[:, None], logits)[:, 0]  # (B, C)
    return torch.where(total > 0, smooth(mean.softmax(-1), smoothing), truth)


def _cell_weights(
    area: torch.Tensor,
    map_size: tuple[int, int],
    affine: torch.Tensor,
    grid: tuple[int, int],
    visible: torch.Tensor,
    window: Area,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N, h * w) weight of every map cell in every token, rows summing to 1 or all 0, and (B, N) coverage.

    The points are added up one position in the token at a time: a scatter would not be deterministic on CUDA, and all
    points at once would take n x n times the memory.
    """
    n = points_per_token(map_size, grid)
    shape = (affine.shape[0], grid[0] * grid[1], *map_size)
    weights = affine.new_zeros(shape)  # (B, N, h, w)
    count = affine.new_zeros(shape[:2])  # (B, N)
    area = area.to(affine.dtype)
    low, high = torch.maximum(area[:, :2], visible[:, :2]), torch.minimum(area[:, 2:], visible[:, 2:])  # (B, 2)
    for index in range(n * n):
        point, shown = source_points(affine, grid, ((index // n + 0.5) / n, (index % n + 0.5) / n), window)  # (B, N, 2)
        # Strict, so that an empty area covers nothing.
        inside = (shown & ((point > low[:, None]) & (point < high[:, None])).all(-1)).to(affine.dtype)  # (B, N)
        across, down = hat_weights(point, area, map_size)
        weights.addcmul_((down * inside[..., None])[..., None], across[..., None, :])
        count += inside
    return weights.div_(count.clamp(min=1)[..., None, None]).flatten(2), count / (n * n)


def source_points(
    affine: torch.Tensor, grid: tuple[int, int], offset: tuple[float, float], window: Area = FULL_AREA
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N, 2) source `(x, y)` of the point at `offset` = (row share, column share) inside every token of a grid that
    covers `window` of the crop, and (N,) whether it is in the crop."""
    x, y = (
        low + (torch.arange(count, dtype=affine.dtype, device=affine.device) + share) / count * (high - low)
        for low, high, count, share in zip(window[:2], window[2:], grid[::-1], offset[::-1], strict=True)
    )
    # Elementwise rather than a matrix product: TF32 would move the points.
    points = affine[:, None, None, :, 0] * x[None, None, :, None] + affine[:, None, None, :, 1] * y[None, :, None, None]
    shown = ((y > 0) & (y < 1))[:, None] & ((x > 0) & (x < 1))[None, :]
    return (points + affine[:, None, None, :, 2]).flatten(1, 2), shown.flatten()


def hat_weights(
    point: torch.Tensor, area: torch.Tensor, map_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear weights of the map's columns (B, N, w) and rows (B, N, h) at (B, N, 2) source points."""
    h, w = map_size
    extent = (area[:, 2:] - area[:, :2]).clamp(min=torch.finfo(area.dtype).eps)[:, None]  # (B, 1, 2)
    share = (point - area[:, None, :2]) / extent  # (B, N, 2) of the map
    return _hat(share[..., 0], w), _hat(share[..., 1], h)


def _hat(share: torch.Tensor, size: int) -> torch.Tensor:
    """(...) positions along an axis of `size` cells, as shares of it -> (..., size) bilinear weights."""
    position = (share * size - 0.5).clamp(0, size - 1)[..., None]
    cells = torch.arange(size, dtype=share.dtype, device=share.device)
    return (1 - (position - cells).abs()).clamp(min=0)


def dense_maps(labels: LabelBatch, num_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, C, h, w) logits of every cell, 0 for classes it does not list."""
    return _dense(labels, num_classes, dtype).transpose(1, 2).unflatten(2, labels.values.shape[2:]).contiguous()


def _dense(labels: LabelBatch, num_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, h * w, C) logits of every cell, 0 for classes it does not list."""
    ids = labels.ids.flatten(2).transpose(1, 2).long()  # (B, h * w, k)
    values = labels.values.flatten(2).transpose(1, 2).to(dtype)
    dense = values.new_zeros(*ids.shape[:2], num_classes)
    return dense.scatter_reduce_(2, ids, values, "amax", include_self=False)

"""From label maps and the geometry of the augmentation to the target of every token.

A token's target is the label of the image content that the token shows. One affine per sample tells where in the source
image each point of the crop comes from; the map is read there, at n x n points per token, and averaged. Nothing is
resampled twice, and it is the same for crops, flips, shears, rotations and translations, on every device.

Label logits are zero but for the classes of the map cells that a token shows: four cells per point and k classes per
cell are at most M = 4 n n k entries, 80 for 18 x 18 maps of 5 classes on 14 x 14 tokens. So a soft label is one number
for all classes plus an excess at M entries, and neither targets (B, N, C) nor label maps (B, h * w, C) are ever made.
Deterministic on CUDA too: entries are sorted and added in a fixed order, nothing is scattered by atomics onto an entry
that another one changes.

Shapes: B images, a token grid of `rows x cols` with N = rows * cols tokens, C classes, maps of `h x w` cells with k
classes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.io.chunks import image_chunks
from tlt.label_map import FULL_AREA, Area, LabelBatch

UNCOVERED = ("ignore", "uniform")


@dataclass(frozen=True)
class SparseLabels:
    """Soft labels: class c of a token has `base` plus the sum of `excess` where `ids` is c.

    Attributes:
        base: (B, N).
        ids: (B, N, M) int32 class ids. A class may stand there more than once; only one of its entries is not 0.
        excess: (B, N, M), may be negative.
    """

    base: Tensor
    ids: Tensor
    excess: Tensor

    def dense(self, num_classes: int) -> Tensor:
        """(B, N, C) the same labels written out."""
        rows = self.base[..., None].repeat(1, 1, num_classes)
        return rows.scatter_add_(2, self.ids.long(), self.excess)

    @classmethod
    def of(cls, dense: Tensor) -> SparseLabels:
        """(B, N, C) labels with an entry for every class; nothing is copied."""
        ids = torch.arange(dense.shape[2], dtype=torch.int32, device=dense.device).expand(dense.shape)
        return cls(dense.new_zeros(dense.shape[:2]), ids, dense)


@dataclass(frozen=True)
class Targets:
    """What the loss compares a batch of outputs with.

    Attributes:
        cls: (B, C) soft label of the whole crop.
        tokens: Soft labels of the tokens, or None where only the crop has one (label size 1, as in ReLabel).
        weight: (B, N) in [0, 1], how much each token counts: the share of it that its label map covers, or 1 where
            what isn't covered counts as uniform; None with `tokens`.
        truth: (B,) int64 class of each image by its folder.
        smoothing: Label smoothing in [0, 1) that `cls` and `tokens` contain.
        grid: Token grid, (rows, cols); N = rows * cols.
        window: What of the crop the grid covers, in shares `(x0, y0, x1, y1)` (`tlt.models.token_places`); it may
            reach outside of it.
    """

    cls: Tensor
    tokens: SparseLabels | None
    weight: Tensor | None
    truth: Tensor
    smoothing: float
    grid: tuple[int, int]
    window: Area = FULL_AREA

    def truth_target(self) -> Tensor:
        """(B, C) one-hot folder class with the same smoothing as the other targets."""
        return one_hot(self.truth, self.cls.shape[1], self.smoothing, self.cls.dtype)


def make_targets(
    labels: LabelBatch | None,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    token_label_size: int | None = None,
    uncovered: str = "ignore",
    window: Area = FULL_AREA,
) -> Targets:
    """The targets of one batch, on the device of its labels and without synchronising with the host.

    Every token is read at n x n evenly spaced points, bilinearly, with the edge cells continued to the edge of the map.
    Points outside the map's area, outside the crop, or outside the part of the source that the crop shows, do not
    count. For a plain crop this is `torchvision.ops.roi_align(..., sampling_ratio=n, aligned=True)` of the dense map
    with the true box, then the softmax.

    Classes that a cell does not list have logit 0 there (this defines the published targets). A class that a cell lists
    twice counts once, with its larger value. The class label is the mean over all points of the crop that count, as
    `roi_align` to 1 x 1 would give, then the softmax; a sample with no such point gets its folder class. A map of empty
    area says nothing of its image: there no point counts.

    Args:
        labels: Label maps, or None: then every token gets the class of its image.
        affine: (B, 2, 3) maps the unit square of the crop, `(x, y, 1)`, to the unit square of the source image.
            float32 gives float32 results, float64 gives float64.
        visible: (B, 4) `(x0, y0, x1, y1)`, the part of the source image that the crop shows; where a rotation or shift
            reaches outside of it, the crop shows the fill colour.
        classes: (B,) class ids by folder.
        grid: Token grid of the model, (rows, cols).
        num_classes: C.
        smoothing: Label smoothing in [0, 1), put on top of the soft labels as published.
        token_label_size: None takes the model's grid. 1 makes a soft label of the crop only (ReLabel).
        uncovered: What a point means that the map doesn't cover or the crop doesn't show. "ignore": nothing, it is left
            out of the mean. "uniform": logit 0 for all classes, as published, and every token weighs 1.
        window: See `Targets`.

    Raises:
        UserError: `token_label_size` or `uncovered` is unknown, or a class id too large (`LabelBatch.check_ids`).
    """
    check_token_label_size(token_label_size, grid)
    check_uncovered(uncovered)
    dtype = torch.promote_types(affine.dtype, torch.float32)
    classes = classes.long()
    cls = one_hot(classes, num_classes, smoothing, dtype)
    if labels is None:
        tokens, weight = _truth_tokens(classes, grid, num_classes, smoothing, dtype)
    else:
        labels.check_ids(num_classes)
        crops = _Crops(labels, affine.to(dtype), visible.to(dtype), grid, uncovered)
        # In lower precision the weights of a token's points would no longer sum to one.
        with torch.autocast(affine.device.type, enabled=False):
            cls = _crop_labels(crops, cls, smoothing)
            if token_label_size != 1:
                tokens, weight = _token_labels(crops, num_classes, smoothing, window)
    if token_label_size == 1:
        return Targets(cls, None, None, classes, smoothing, grid, window)
    return Targets(cls, tokens, weight, classes, smoothing, grid, window)


def one_hot(classes: Tensor, num_classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
    """(B,) class ids -> (B, C) smoothed one-hot rows that sum to 1."""
    rows = torch.zeros(classes.shape[0], num_classes, dtype=dtype, device=classes.device)
    return smooth(rows.scatter_(1, classes.long()[:, None], 1.0), smoothing)


def smooth(probabilities: Tensor, smoothing: float) -> Tensor:
    """`(1 - s) p + s / C` over the last axis. Sums to 1, where the published targets sum to `1 + s / C`."""
    if not smoothing:
        return probabilities
    return probabilities * (1 - smoothing) + smoothing / probabilities.shape[-1]


def points_per_token(map_size: tuple[int, int], grid: tuple[int, int]) -> int:
    """How many points per axis are read for one token: enough that no map cell of a full-image crop is jumped over, and
    at least 2 so that a token never depends on one point."""
    return max(2, *(math.ceil(cells / tokens) for cells, tokens in zip(map_size, grid, strict=True)))


def entries_per_token(labels: LabelBatch | None, grid: tuple[int, int]) -> int:
    """M, how many entries the sparse label of one token has; 1 without label maps."""
    if labels is None:
        return 1
    _, k, h, w = labels.values.shape
    return 4 * points_per_token((h, w), grid) ** 2 * k


def check_token_label_size(token_label_size: int | None, grid: tuple[int, int]) -> None:
    if token_label_size not in (None, 1) and (token_label_size, token_label_size) != tuple(grid):
        raise UserError(
            f"--token-label-size {token_label_size} does not fit the model's {grid[0]} x {grid[1]} tokens; "
            "leave it out, or give 1 for one label per crop"
        )


def check_uncovered(uncovered: str) -> None:
    if uncovered not in UNCOVERED:
        raise UserError(f"--uncovered {uncovered} is none of {', '.join(UNCOVERED)}")


def known(labels: LabelBatch) -> Tensor:
    """(B,) bool: whether a map covers any of its image (`tlt.label_map.NO_AREA` doesn't)."""
    return (labels.area[:, 2:] > labels.area[:, :2]).all(1)


def _truth_tokens(
    classes: Tensor, grid: tuple[int, int], num_classes: int, smoothing: float, dtype: torch.dtype
) -> tuple[SparseLabels, Tensor]:
    """Every token has the folder class and weighs 1."""
    shape = (classes.shape[0], grid[0] * grid[1])
    weight = torch.ones(shape, dtype=dtype, device=classes.device)
    ids = classes.int()[:, None, None].expand(*shape, 1)
    return SparseLabels(weight * (smoothing / num_classes), ids, (weight * (1 - smoothing))[..., None]), weight


@dataclass(frozen=True)
class _Crops:
    """Label maps, and how crops show their images: arguments of `make_targets`."""

    labels: LabelBatch
    affine: Tensor
    visible: Tensor
    grid: tuple[int, int]
    uncovered: str

    def select(self, rows: slice) -> _Crops:
        return _Crops(self.labels.select(rows), self.affine[rows], self.visible[rows], self.grid, self.uncovered)


def _crop_labels(crops: _Crops, truth: Tensor, smoothing: float) -> Tensor:
    """(B, C) soft labels of the crops; `truth` where no point counts."""
    result = torch.empty_like(truth)
    per_image = crops.grid[0] * crops.grid[1] * entries_per_token(crops.labels, crops.grid)
    for rows in image_chunks(len(truth), per_image, truth.device):
        logits, total = _crop_logits(_sample(crops.select(rows), truth.shape[1]), truth.shape[1])
        result[rows] = torch.where(total > 0, smooth(logits.softmax(-1), smoothing), truth[rows])
    return result


def _token_labels(crops: _Crops, num_classes: int, smoothing: float, window: Area) -> tuple[SparseLabels, Tensor]:
    """Soft labels of every token, and (B, N) how much it counts."""
    affine, grid = crops.affine, crops.grid
    shape = (affine.shape[0], grid[0] * grid[1], entries_per_token(crops.labels, grid))
    weight, base, excess = affine.new_empty(shape[:2]), affine.new_empty(shape[:2]), affine.new_empty(shape)
    ids = torch.empty(shape, dtype=torch.int32, device=affine.device)
    for rows in image_chunks(shape[0], shape[1] * shape[2], affine.device):
        sample = _sample(crops.select(rows), num_classes, window)
        weight[rows] = sample.counted.mean(-1)
        base[rows], ids[rows], excess[rows] = _soft_labels(*_token_logits(sample), num_classes, smoothing)
    return SparseLabels(base, ids, excess), weight


@dataclass(frozen=True)
class _Sample:
    """Where a group of label maps is read.

    Attributes:
        ids, values: (B, h * w, k), the classes of every cell; see `_listed_once`.
        area: (B, 4) of the maps.
        map_size: (h, w).
        points: (B, N, n * n, 2) source points of every token.
        inside: (B, N, n * n), 1 where a point is covered, 0 where it is not.
        counted: (B, N, n * n), 1 where a point is in the mean; one that isn't covered adds nothing to it.
    """

    ids: Tensor
    values: Tensor
    area: Tensor
    map_size: tuple[int, int]
    points: Tensor
    inside: Tensor
    counted: Tensor


def _sample(crops: _Crops, num_classes: int, window: Area = FULL_AREA) -> _Sample:
    labels, affine, visible = crops.labels, crops.affine, crops.visible
    _, _, h, w = labels.values.shape
    n = points_per_token((h, w), crops.grid)
    offsets = [((index // n + 0.5) / n, (index % n + 0.5) / n) for index in range(n * n)]
    read = [_source_points(affine, crops.grid, offset, window) for offset in offsets]
    points, shown = torch.stack([each for each, _ in read], 2), torch.stack([each for _, each in read], 1)
    area = labels.area.to(affine.dtype)
    low = torch.maximum(area[:, :2], visible[:, :2])[:, None, None]
    high = torch.minimum(area[:, 2:], visible[:, 2:])[:, None, None]
    # Strict, so that an empty area covers nothing.
    inside = (shown & ((points > low) & (points < high)).all(-1)).to(affine.dtype)
    counted = inside if crops.uncovered == "ignore" else known(labels).to(inside)[:, None, None].expand_as(inside)
    return _Sample(*_listed_once(labels, num_classes, affine.dtype), area, (h, w), points, inside, counted)


def _source_points(
    affine: Tensor, grid: tuple[int, int], offset: tuple[float, float], window: Area = FULL_AREA
) -> tuple[Tensor, Tensor]:
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


def _listed_once(labels: LabelBatch, num_classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, h * w, k) class ids and values of every cell. Where a cell lists a class again, all but the larger value
    become an entry of no class: id C, value 0."""
    ids = labels.ids.flatten(2).transpose(1, 2).contiguous()
    values = labels.values.flatten(2).transpose(1, 2).to(dtype)
    position = torch.arange(ids.shape[2], device=ids.device)
    lost = torch.zeros_like(ids, dtype=torch.bool)
    for j in range(ids.shape[2]):
        other = values[..., j : j + 1]
        wins = (other > values) | ((other == values) & (position > j))
        lost |= wins & (ids == ids[..., j : j + 1])
    return ids.masked_fill(lost, num_classes), values.masked_fill(lost, 0)


def _crop_logits(sample: _Sample, num_classes: int) -> tuple[Tensor, Tensor]:
    """(B, C) mean label logits over the points of the whole crop that count, and (B, 1) their number."""
    inside = sample.inside.flatten(1)  # (B, P)
    total = sample.counted.flatten(1).sum(1, keepdim=True)
    across, down = _hat_weights(sample.points.flatten(1, 2), sample.area, sample.map_size)  # (B, P, w), (B, P, h)
    cells = torch.bmm((down * inside[..., None]).transpose(1, 2), across).flatten(1) / total.clamp(min=1)  # (B, h * w)
    ids, sums, _ = _merge_equal(sample.ids.flatten(1), (sample.values * cells[..., None]).flatten(1), cells.shape[1])
    logits = sums.new_zeros(ids.shape[0], num_classes + 1).scatter_add_(1, ids.long(), sums)
    return logits[:, :num_classes], total


def _hat_weights(point: Tensor, area: Tensor, map_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Bilinear weights of the map's columns (B, N, w) and rows (B, N, h) at (B, N, 2) source points."""
    h, w = map_size
    extent = (area[:, 2:] - area[:, :2]).clamp(min=torch.finfo(area.dtype).eps)[:, None]  # (B, 1, 2)
    share = (point - area[:, None, :2]) / extent  # (B, N, 2) of the map
    return _hat(share[..., 0], w), _hat(share[..., 1], h)


def _hat(share: Tensor, size: int) -> Tensor:
    """(...) positions along an axis of `size` cells, as shares of it -> (..., size) bilinear weights."""
    position = (share * size - 0.5).clamp(0, size - 1)[..., None]
    cells = torch.arange(size, dtype=share.dtype, device=share.device)
    return (1 - (position - cells).abs()).clamp(min=0)


def _token_logits(sample: _Sample) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, M) class ids, label logits and the mask of one entry per class, as `_merge_equal` gives them."""
    cells, weights = _corners(sample.points, sample.area, sample.map_size)  # (B, N, n * n, 4)
    weights = weights * (sample.inside / sample.counted.sum(-1, keepdim=True).clamp(min=1))[..., None]
    index = cells.flatten(1)[..., None].expand(-1, -1, sample.ids.shape[2])  # (B, N * n * n * 4, k)
    entries = sample.values.gather(1, index) * weights.flatten(1)[..., None]
    shape = (*weights.shape[:2], -1)
    return _merge_equal(sample.ids.gather(1, index).view(shape), entries.view(shape), 4 * weights.shape[2])


def _corners(points: Tensor, area: Tensor, map_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(B, N, P, 2) source points -> int64 numbers and bilinear weights of the four cells around each, (B, N, P, 4)."""
    extent = (area[:, 2:] - area[:, :2]).clamp(min=torch.finfo(area.dtype).eps)[:, None, None]
    share = (points - area[:, None, None, :2]) / extent
    cols, across = _neighbours(share[..., 0], map_size[1])
    rows, down = _neighbours(share[..., 1], map_size[0])
    cells = rows[..., :, None] * map_size[1] + cols[..., None, :]  # (B, N, P, 2, 2)
    return cells.flatten(-2), (down[..., :, None] * across[..., None, :]).flatten(-2)


def _neighbours(share: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(...) positions along an axis of `size` cells, as shares of it -> the two nearest cells and their weights,
    (..., 2); the edge cells continue to the edge."""
    position = (share * size - 0.5).clamp(0, size - 1)
    low = position.floor()
    part = position - low
    cell = low.long()
    return torch.stack([cell, (cell + 1).clamp(max=size - 1)], -1), torch.stack([1 - part, part], -1)


def _merge_equal(ids: Tensor, values: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the values of equal ids along the last axis.

    The sums double their reach in every step, in an order that depends on nothing but the shape; cumulative sums and
    their differences would lose digits.

    Args:
        ids: (..., M) integers.
        values: (..., M).
        longest: How often an id occurs at most. Ids that occur more often must have values of 0.

    Returns:
        Sorted ids (..., M); (..., M) the sum of an id's values at its last place, 0 elsewhere; that mask.
    """
    ids, order = torch.sort(ids, dim=-1, stable=True)
    sums = values.gather(-1, order)
    for reach in (2**power for power in range(math.ceil(math.log2(longest)))):
        if reach < ids.shape[-1]:
            same = (ids[..., reach:] == ids[..., :-reach]).to(sums.dtype)
            added = torch.addcmul(sums[..., reach:], sums[..., :-reach], same)
            sums = torch.cat([sums[..., :reach], added], -1)
    last = torch.ones_like(ids, dtype=torch.bool)
    last[..., :-1] = ids[..., 1:] != ids[..., :-1]
    return ids, sums * last, last


def _soft_labels(
    ids: Tensor, logits: Tensor, last: Tensor, num_classes: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors of `SparseLabels`: smoothed softmax over C classes of logits that are 0 but for one entry per
    class, where `last` holds.

    Every term of the denominator is positive, so nothing cancels, and the largest exponent is 0.
    """
    last = last & (ids < num_classes)
    top = logits.amax(-1, keepdim=True).clamp(min=0)
    zero = torch.exp(-top)  # (B, N, 1), of a class with logit 0
    powers = torch.exp(logits - top)
    total = (powers * last).sum(-1, keepdim=True) + (num_classes - last.sum(-1, keepdim=True)) * zero
    scale = (1 - smoothing) / total
    base = (zero * scale)[..., 0] + smoothing / num_classes
    return base, ids.clamp(max=num_classes - 1).int(), (powers - zero) * (last * scale)

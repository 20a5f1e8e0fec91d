"""Computes the target of every token from the label maps and the geometry of the augmentation.

A token's target is the label of the image content that the token shows. One affine map per sample takes each point of
the crop to a point of the source image. We read the label map there by bilinear interpolation, at n x n evenly spaced
points per token, and average. Outside the outermost cell centres of a map, the values of the edge cells continue to its
edge. Nothing is resampled twice, and the same code serves crops, flips, shears, rotations and translations, on every
device. For a plain crop the result is `torchvision.ops.roi_align(..., sampling_ratio=n, aligned=True)` of the dense map
with the true box, followed by the softmax.

Points outside the map's area, outside the crop, or outside the part of the source that the crop shows, do not count
(with `uncovered="uniform"` they count with logit 0 for all classes). A class that a cell does not list has logit 0
there (this defines the published targets). If a cell lists a class twice, only the larger value counts. The class label
is the softmax of the mean over all counted points of the crop, as `roi_align` to 1 x 1 would give it; a sample without
such a point gets its folder class. A map with an empty area has no counted points.

The logits of a token are zero except for the classes of the map cells that it shows: four cells per point and k classes
per cell are at most M = 4 n n k entries, 80 for 18 x 18 maps of 5 classes on 14 x 14 tokens. So a soft label is one
number for all classes plus an excess at M entries; targets (B, N, C) and label maps (B, h * w, C) are never built. The
result is deterministic on CUDA too: entries are sorted and added in a fixed order, and atomic additions never change
one entry twice.

All this is of maps of logits; `tlt.shares` reads those of shares, which masks give.

Shapes: B images, a token grid of `rows x cols` with N = rows * cols tokens, C classes, maps of `h x w` cells with k
classes each.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.errors import UserError, in_range, in_range_all, one_of, size_of
from tlt.io.chunks import image_chunks
from tlt.label_map import FULL_AREA, Area, LabelBatch, check_class_id, has_area, on_host
from tlt.shares import cells_across, crop_shares, stretch_of, token_shares
from tlt.sparse_labels import Reading, SparseLabels, Sums, merge_equal, smooth

UNCOVERED = ("ignore", "uniform")
_ROUNDING = 1e-5  # bound of the relative rounding error of a label's probabilities


class TokenPlaces:
    """What losses of tokens have in common: grid and window of the tokens, for images of each size in `places`."""

    grid: tuple[int, int]
    window: Area
    places: Mapping[tuple[int, int], tuple[tuple[int, int], Area]]

    def place(self, images: Tensor) -> tuple[tuple[int, int], Area]:
        """Return grid and window of the tokens in images (B, 3, H, W). Raise UserError if their size is not known."""
        size = (images.shape[-2], images.shape[-1])
        if self.places and size not in self.places:
            of = f"{type(self).__name__}.of(model, img_size, sizes)"
            raise UserError(f"the loss is for images of {[*self.places]}, not {size}: name all (H, W) in {of}")
        return self.places.get(size, (self.grid, self.window))


@dataclass(frozen=True)
class Targets:
    """The targets of a batch, which the loss compares with the model's outputs.

    Attributes:
        cls: (B, C), the soft label of the whole crop.
        tokens: Soft labels of the tokens; None if the model learns the crop's label only.
        truth: (B, C), the one-hot folder class of each image, smoothed like the other labels.
        grid: Token grid, (rows, cols); N = rows * cols.
        window: The part of the crop that the grid covers, `(x0, y0, x1, y1)` in shares of the crop
            (`tlt.models.spatial`). It may reach beyond the crop.
    """

    cls: Tensor
    tokens: SparseLabels | None
    truth: Tensor
    grid: tuple[int, int]
    window: Area = FULL_AREA


def make_targets(
    labels: LabelBatch | None,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    dense: bool = True,
    uncovered: str = "ignore",
    window: Area = FULL_AREA,
) -> Targets:
    """Return the targets of one batch, on the device of its labels and without synchronising with the host. Raise
    UserError if `uncovered` is unknown, a number is out of range, the tensors are of unequal numbers of images, or a
    class id is too large, where that is known without waiting for the device.

    Args:
        labels: Label maps. None gives every token the class of its image.
        affine: (B, 2, 3), maps `(x, y, 1)` in the unit square of the crop to the unit square of the source image. The
            results have its dtype, at least float32.
        visible: (B, 4) `(x0, y0, x1, y1)`, the part of the source image that the crop shows. Where a rotation or shift
            moves content from beyond it into the crop, the crop shows the fill colour.
        classes: (B,) folder class ids.
        grid: Token grid of the model, (rows, cols).
        num_classes: C.
        smoothing: Label smoothing in [0, 1), applied to the soft labels too, as published.
        dense: False makes only the soft label of the crop (ReLabel).
        uncovered: How to treat points that the map does not cover or the crop does not show. "ignore": they are left
            out of the mean. "uniform": they have logit 0 for all classes and every token has weight 1, as published.
            So is void, where a map has shares.
        window: See `Targets`.
    """
    one_of("--uncovered", uncovered, UNCOVERED)
    in_range("--smoothing", smoothing, 0, 1)
    grid = size_of("grid", grid)
    dtype = torch.promote_types(affine.dtype, torch.float32)
    truth = one_hot(classes, num_classes, smoothing, dtype)
    if labels is None:
        named = _truth_tokens(classes, grid, num_classes, smoothing, dtype) if dense else None
        return Targets(truth, named, truth, grid, window)
    labels.check_ids(num_classes)
    if {len(labels), len(affine), len(visible)} != {len(classes)}:
        shapes = [tuple(part.shape) for part in (labels.ids, affine, visible, classes)]
        raise UserError(f"make_targets: labels, affine, visible and classes {shapes} are of unequal numbers of images")
    affine, visible = (part.to(dtype) for part in (affine, visible))
    shares = labels.void is not None
    how = Reading(grid, window, num_classes, smoothing, uncovered, stretch_of(labels, affine) if shares else 1.0)
    of_crop, of_tokens = (crop_shares, token_shares) if shares else (_crop_logits, _token_logits)
    parts = []
    # In lower precision the weights of a token's points would not sum to one.
    with torch.autocast(affine.device.type, enabled=False):
        for rows in image_chunks(len(truth), _entries(labels, how), affine.device):
            group = _prepared(labels[rows], num_classes, dtype)
            places = (affine[rows], visible[rows])
            crop, counted = of_crop(group, *places, how)
            of_group = [torch.where(counted > 0, crop, truth[rows])]
            parts.append([*of_group, *(of_tokens(group, *places, how) if dense else ())])
    cls, *of_all = (torch.cat(part) for part in zip(*parts, strict=True))
    return Targets(cls, SparseLabels(*of_all) if dense else None, truth, grid, window)


def is_best(labels: SparseLabels, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Check whether one class of each token, (B, N) or (B, 1), is the likeliest of the C classes by the labels.

    Returns (B, N) whether no other class is likelier, up to rounding, and (B, N) whether the token counts: its map
    covers some of it and does not find all classes equally likely.
    """
    named = labels.excess != 0
    best = labels.excess.masked_fill(~named, -math.inf).amax(-1)
    best = torch.where(named.sum(-1) < num_classes, best.clamp(min=0), best)  # an unnamed class has excess 0
    share_of_class = (labels.excess * (labels.ids == classes[..., None])).sum(-1)
    counts = (labels.weight > 0) & named.any(-1)
    return counts & (labels.base + share_of_class >= (labels.base + best) * (1 - _ROUNDING)), counts


def one_hot(classes: Tensor, num_classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
    """Turn (B,) class ids into (B, C) smoothed one-hot rows that sum to 1. Raise UserError for ids out of range, where
    that is known without waiting for the device."""
    in_range_all(1, num_classes=num_classes)
    for class_id in classes.aminmax() if on_host(classes) else ():
        check_class_id(int(class_id), num_classes, "the images")
    rows = torch.zeros(classes.shape[0], num_classes, dtype=dtype, device=classes.device)
    return smooth(rows.scatter_(1, classes.long()[:, None], 1.0), smoothing)


def points_per_token(map_size: tuple[int, int], grid: tuple[int, int]) -> int:
    """Return how many points per axis are read for one token: enough that a crop of the full image skips no map cell,
    and at least 2 so that a token never depends on one point."""
    return max(2, *(math.ceil(cells / tokens) for cells, tokens in zip(map_size, grid, strict=True)))


def _truth_tokens(
    classes: Tensor, grid: tuple[int, int], num_classes: int, smoothing: float, dtype: torch.dtype
) -> SparseLabels:
    """Return labels that give every token the folder class and weight 1."""
    shape = (classes.shape[0], math.prod(grid))
    weight = torch.ones(shape, dtype=dtype, device=classes.device)
    ids = classes.int()[:, None, None].expand(*shape, 1)
    return SparseLabels(weight, weight * (smoothing / num_classes), ids, (weight * (1 - smoothing))[..., None])


def _entries(labels: LabelBatch, how: Reading) -> int:
    """Return how many entries all tokens of an image have before equal classes are joined."""
    _, k, h, w = labels.values.shape
    if labels.void is None:
        return math.prod(how.grid) * 4 * points_per_token((h, w), how.grid) ** 2 * k
    return max(math.prod(how.grid) * math.prod(cells_across((h, w), how)), h * w) * k


def _prepared(labels: LabelBatch, num_classes: int, dtype: torch.dtype) -> LabelBatch:
    """Return the labels in `dtype`; logits with each class at most once per cell. If a cell lists a class again, all
    its entries but the largest get value 0 and the id C, which is no class."""
    ids = labels.ids
    values = labels.values.to(dtype)
    if labels.void is not None:
        return LabelBatch(values, ids, labels.area.to(dtype), labels.largest_id, labels.void.to(dtype))
    position = torch.arange(ids.shape[1], device=ids.device)[:, None, None]
    duplicate = torch.zeros_like(ids, dtype=torch.bool)
    for j in range(ids.shape[1]):
        other = values[:, j : j + 1]
        wins = (other > values) | ((other == values) & (position > j))
        duplicate |= wins & (ids == ids[:, j : j + 1])
    return LabelBatch(values.masked_fill(duplicate, 0), ids.masked_fill(duplicate, num_classes), labels.area.to(dtype))


class _Points(NamedTuple):
    """The places where label maps are read: P points in each of N tokens."""

    x: Tensor  # (B, N, P) in cells of the map: 0 is the centre of the first cell, w - 1 or h - 1 that of the last
    y: Tensor  # (B, N, P)
    inside: Tensor  # (B, N, P), 1 if the map covers the point and the crop shows it, else 0
    # (B, N, P), 1 if the point counts in the mean. A counted point that is not inside adds 0 to the sum.
    counted: Tensor


def _points(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> _Points:
    """Return the points of every token of a grid that covers `window` of the crop."""
    h, w = labels.values.shape[2:]
    n = points_per_token((h, w), how.grid)
    source, visible_points = token_points(affine, visible, how.grid, how.window, n)
    area = labels.area[..., None, None]
    # The comparisons are strict, so that an empty area covers nothing.
    inside = (visible_points & ((source > area[:, :2]) & (source < area[:, 2:])).all(1)).to(affine.dtype)
    counted = inside if how.uncovered == "ignore" else has_area(labels).to(inside)[:, None, None].expand_as(inside)
    share = (source - area[:, :2]) / (area[:, 2:] - area[:, :2]).clamp(min=torch.finfo(area.dtype).eps)
    x, y = ((share[:, axis] * size - 0.5).clamp(0, size - 1) for axis, size in enumerate((w, h)))
    return _Points(x, y, inside, counted)


def token_points(affine: Tensor, visible: Tensor, grid: tuple[int, int], window: Area, n: int) -> tuple[Tensor, Tensor]:
    """Return the n x n = P points of each token of a grid that covers `window` of the crop: (B, 2, N, P) x and y in
    shares of the source image, and (B, N, P) whether the crop shows them."""

    def along(count: int, low: float, high: float) -> Tensor:
        """Return the points of `count` tokens along one axis, (count, n), in shares of the crop."""
        tokens, points = (torch.arange(length, dtype=affine.dtype, device=affine.device) for length in (count, n))
        return low + (tokens[:, None] + (points + 0.5) / n) / count * (high - low)

    x = along(grid[1], window[0], window[2])[:, None, :]  # (cols, 1, n)
    y = along(grid[0], window[1], window[3])[:, None, :, None]  # (rows, 1, n, 1)
    matrix = affine[..., None, None, None, None]
    # We multiply elementwise rather than by a matrix product: TF32 would move the points.
    source = matrix[:, :, 0] * x + matrix[:, :, 1] * y + matrix[:, :, 2]  # (B, 2, rows, cols, n, n)
    source = source.flatten(4).flatten(2, 3)  # (B, 2, N, P)
    in_output = ((x > 0) & (x < 1) & (y > 0) & (y < 1)).flatten(2).flatten(0, 1)  # (N, P)
    low, high = visible[:, :2, None, None], visible[:, 2:, None, None]
    return source, in_output & ((source > low) & (source < high)).all(1)


def _crop_logits(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> tuple[Tensor, Tensor]:
    """Return (B, C) the smoothed softmax of the mean label logits over the counted points of the whole crop, and (B, 1)
    the number of these points."""
    h, w = labels.values.shape[2:]
    points = _points(labels, affine, visible, how._replace(window=FULL_AREA))
    x, y, inside, counted = (part.flatten(1) for part in points)  # (B, N * P)
    total = counted.sum(1, keepdim=True)
    across, down = linear_weights(x, w), linear_weights(y, h)
    cells = torch.bmm((down * inside[..., None]).transpose(1, 2), across).flatten(1) / total.clamp(min=1)  # (B, h * w)
    cell_ids, cell_values = (part.flatten(2).transpose(1, 2) for part in (labels.ids, labels.values))  # (B, h * w, k)
    merged = merge_equal(cell_ids.flatten(1), (cell_values * cells[..., None]).flatten(1), h * w)
    logits = total.new_zeros(len(total), how.num_classes + 1).scatter_add_(1, merged.ids.long(), merged.sums)
    return smooth(logits[:, : how.num_classes].softmax(-1), how.smoothing), total


def linear_weights(position: Tensor, size: int) -> Tensor:
    """Turn (...) positions in cells into (..., size) linear interpolation weights of the cells along an axis. Beyond
    the centre of an outermost cell they extrapolate from the two outermost cells: so are teachers' maps read. Positions
    on label maps do not lie there, because `_points` clamps them."""
    return position.new_zeros(*position.shape, size).scatter_add_(-1, *_neighbours(position, size))


def _token_logits(labels: LabelBatch, affine: Tensor, visible: Tensor, how: Reading) -> SparseLabels:
    """Return the labels of all tokens, from the mean logits of the classes that each shows."""
    h, w = labels.values.shape[2:]
    points = _points(labels, affine, visible, how)
    (cols, across), (rows, down) = _neighbours(points.x, w), _neighbours(points.y, h)
    cells = (rows[..., :, None] * w + cols[..., None, :]).flatten(1)  # (B, N * P * 4)
    weights = (down[..., :, None] * across[..., None, :]).flatten(-2)  # (B, N, P, 4)
    weights = weights * (points.inside / points.counted.sum(-1, keepdim=True).clamp(min=1))[..., None]
    index = cells[..., None].expand(-1, -1, labels.ids.shape[1])
    ids, values = (part.flatten(2).transpose(1, 2).gather(1, index) for part in (labels.ids, labels.values))
    values = values * weights.flatten(1)[..., None]
    shape = (*weights.shape[:2], -1)
    merged = merge_equal(ids.view(shape), values.view(shape), 4 * weights.shape[2])
    return _soft_labels(points, merged, how.num_classes, how.smoothing)


def _neighbours(position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Turn (...) positions in cells into the indices (..., 2) of the two nearest of `size` cells and their weights."""
    low = position.floor().clamp(0, max(size - 2, 0))
    part = position - low if size > 1 else torch.zeros_like(low)
    cell = low.long()
    return torch.stack([cell, (cell + 1).clamp(max=size - 1)], -1), torch.stack([1 - part, part], -1)


def _soft_labels(points: _Points, logits: Sums, num_classes: int, smoothing: float) -> SparseLabels:
    """Return the smoothed softmax over C classes; a class without an entry has logit 0.

    Every term of the denominator is positive, so nothing cancels, and the largest exponent is 0.
    """
    last = logits.last & (logits.ids < num_classes)
    top = logits.sums.amax(-1, keepdim=True).clamp(min=0)
    zero = torch.exp(-top)  # (B, N, 1), the power of a class with logit 0
    powers = torch.exp(logits.sums - top)
    total = (powers * last).sum(-1, keepdim=True) + (num_classes - last.sum(-1, keepdim=True)) * zero
    scale = (1 - smoothing) / total
    base = (zero * scale)[..., 0] + smoothing / num_classes
    excess = (powers - zero) * (last * scale)
    return SparseLabels(points.counted.mean(-1), base, logits.ids.clamp(max=num_classes - 1).int(), excess)

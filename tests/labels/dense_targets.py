"""The dense definition of token targets, with a number for every token and class: what `tlt.targets` is held against.

Shapes: B images, a token grid of `rows x cols` with N = rows * cols tokens, C classes, maps of `h x w` cells with k
classes each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tlt.label_map import FULL_AREA, Area, LabelBatch
from tlt.targets import hat_weights, known, one_hot, points_per_token, smooth, source_points


class DenseTargets(NamedTuple):
    """Soft labels of the crops (B, C) and of the tokens (B, N, C), and how much each token counts (B, N)."""

    cls: Tensor
    tokens: Tensor
    weight: Tensor


def dense_targets(
    labels: LabelBatch,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    uncovered: str = "ignore",
    window: Area = FULL_AREA,
) -> DenseTargets:
    """Arguments as `tlt.targets.make_targets`."""
    truth = one_hot(classes, num_classes, smoothing, affine.dtype)
    logits, weight = _counted(labels, affine, grid, visible, num_classes, uncovered, FULL_AREA)
    total = weight.sum(1, keepdim=True)  # (B, 1)
    mean = (weight[..., None] * logits).sum(1) / total.clamp(min=torch.finfo(weight.dtype).tiny)
    cls = torch.where(total > 0, smooth(mean.softmax(-1), smoothing), truth)
    logits, weight = _counted(labels, affine, grid, visible, num_classes, uncovered, window)
    return DenseTargets(cls, smooth(logits.softmax(-1), smoothing), weight)


def _counted(
    labels: LabelBatch,
    affine: Tensor,
    grid: tuple[int, int],
    visible: Tensor,
    num_classes: int,
    uncovered: str,
    window: Area,
) -> tuple[Tensor, Tensor]:
    logits, weight = sample_tokens(labels, affine, grid, visible, num_classes, window)
    if uncovered == "uniform":
        return logits * weight[..., None], known(labels).to(weight)[:, None].expand_as(weight)
    return logits, weight


def sample_tokens(
    labels: LabelBatch,
    affine: Tensor,
    grid: tuple[int, int],
    visible: Tensor,
    num_classes: int,
    window: Area = FULL_AREA,
) -> tuple[Tensor, Tensor]:
    """Label logits (B, N, C) of every token, 0 where nothing is covered, and the share of its points that is (B, N)."""
    n, (h, w) = points_per_token((labels.values.shape[2], labels.values.shape[3]), grid), labels.values.shape[2:]
    shape = (affine.shape[0], grid[0] * grid[1], h, w)
    weights, count = affine.new_zeros(shape), affine.new_zeros(shape[:2])
    area = labels.area.to(affine.dtype)
    low, high = torch.maximum(area[:, :2], visible[:, :2]), torch.minimum(area[:, 2:], visible[:, 2:])  # (B, 2)
    for index in range(n * n):
        point, shown = source_points(affine, grid, ((index // n + 0.5) / n, (index % n + 0.5) / n), window)  # (B, N, 2)
        inside = (shown & ((point > low[:, None]) & (point < high[:, None])).all(-1)).to(affine.dtype)  # (B, N)
        across, down = hat_weights(point, area, (h, w))
        weights += (down * inside[..., None])[..., None] * across[..., None, :]
        count += inside
    weights = (weights / count.clamp(min=1)[..., None, None]).flatten(2)
    ids, values = labels.ids.long().flatten(2), labels.values.to(affine.dtype).flatten(2)  # (B, k, h * w)
    maps = values.new_zeros(len(ids), num_classes, h * w).scatter_reduce_(1, ids, values, "amax", include_self=False)
    return weights @ maps.transpose(1, 2), count / (n * n)

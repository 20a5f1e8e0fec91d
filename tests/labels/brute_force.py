"""Token targets by their definition, in float64, one token, point and class after the other; and what takes memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlt.label_map import FULL_AREA, Area, LabelBatch


class Expected(NamedTuple):
    """Soft labels of the crops (B, C) and of the tokens (B, N, C), and how much each token counts (B, N)."""

    cls: Tensor
    tokens: Tensor
    weight: Tensor


def brute_force(
    labels: LabelBatch,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    uncovered: str = "ignore",
    window: Area = FULL_AREA,
) -> Expected:
    """Arguments as `tlt.targets.make_targets`."""

    def soft(points: list[np.ndarray], nothing: np.ndarray) -> np.ndarray:
        powers = np.exp(np.mean(points, 0)) if points else nothing
        return (1 - smoothing) * powers / powers.sum() + smoothing / num_classes

    cls, tokens, weight = [], [], []
    for b in range(len(labels)):
        maps = _dense_map(labels, b, num_classes)
        of_crop = _points(maps, labels, affine, visible, b, grid, FULL_AREA, uncovered)
        of_tokens = _points(maps, labels, affine, visible, b, grid, window, uncovered)
        cls.append(soft([p for token in of_crop for p in token if p is not None], np.eye(num_classes)[int(classes[b])]))
        counted = [[p for p in token if p is not None] for token in of_tokens]
        tokens.append([soft(points, np.ones(num_classes)) for points in counted])
        weight.append([len(points) / len(token) for points, token in zip(counted, of_tokens, strict=True)])
    return Expected(*(torch.tensor(np.array(part)) for part in (cls, tokens, weight)))


def _dense_map(labels: LabelBatch, b: int, num_classes: int) -> np.ndarray:
    """(C, h, w): 0 for classes that a cell does not list, the larger value of one that it lists twice."""
    k, h, w = labels.values.shape[1:]
    dense = np.full((num_classes, h, w), -math.inf)
    for j, r, c in np.ndindex(k, h, w):
        place = int(labels.ids[b, j, r, c]), r, c
        dense[place] = max(dense[place], float(labels.values[b, j, r, c]))
    return np.where(np.isinf(dense), 0, dense)


def _points(
    maps: np.ndarray,
    labels: LabelBatch,
    affine: Tensor,
    visible: Tensor,
    b: int,
    grid: tuple[int, int],
    window: Area,
    uncovered: str,
) -> list[list[np.ndarray | None]]:
    """Logits (C,) at the n x n points of every token, None at those that do not count."""
    (h, w), area = maps.shape[1:], labels.area[b].double().tolist()
    n = max(2, math.ceil(h / grid[0]), math.ceil(w / grid[1]))
    found: list[list[np.ndarray | None]] = [[] for _ in range(grid[0] * grid[1])]
    for row, col, i, j in np.ndindex(*grid, n, n):
        u = window[0] + (col + (j + 0.5) / n) / grid[1] * (window[2] - window[0])
        v = window[1] + (row + (i + 0.5) / n) / grid[0] * (window[3] - window[1])
        x, y = affine[b].double().numpy() @ [u, v, 1]
        parts = (area, visible[b].tolist())
        logits: np.ndarray | None = None
        if 0 < u < 1 and 0 < v < 1 and all(a[0] < x < a[2] and a[1] < y < a[3] for a in parts):
            across = np.clip((x - area[0]) / (area[2] - area[0]) * w - 0.5, 0, w - 1) - np.arange(w)
            down = np.clip((y - area[1]) / (area[3] - area[1]) * h - 0.5, 0, h - 1) - np.arange(h)
            logits = np.maximum(0, 1 - abs(down)) @ maps @ np.maximum(0, 1 - abs(across))
        elif uncovered == "uniform" and area[2] > area[0]:
            logits = np.zeros(len(maps))
        found[row * grid[1] + col].append(logits)
    return found


class Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that each operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.made[str(func)] = max(self.made.get(str(func), 0), tensor.numel())
        return result

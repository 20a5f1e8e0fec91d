"""Token targets by their definition, in float64, one token, point and class after the other; and what takes memory."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlt.label_map import FULL_AREA, LabelBatch


class Expected(NamedTuple):
    """Soft labels of the crops (B, C) and of the tokens (B, N, C), and how much each token counts (B, N)."""

    cls: Tensor
    tokens: Tensor
    weight: Tensor


def brute_force(
    labels, affine, visible, classes, grid, num_classes, smoothing=0.1, uncovered="ignore", window=FULL_AREA
) -> Expected:
    """Arguments as `tlt.targets.make_targets`."""

    h, w = labels.values.shape[2:]
    n = max(2, math.ceil(h / grid[0]), math.ceil(w / grid[1]))

    def point(b: int, maps: np.ndarray, u: float, v: float) -> np.ndarray | None:
        """Logits (C,) at a point of a crop, None where it does not count."""
        (x, y), area = affine[b].double().numpy() @ [u, v, 1], labels.area[b].double().tolist()
        if 0 < u < 1 and 0 < v < 1 and all(a[0] < x < a[2] and a[1] < y < a[3] for a in (area, visible[b].tolist())):
            across = np.clip((x - area[0]) / (area[2] - area[0]) * w - 0.5, 0, w - 1) - np.arange(w)
            down = np.clip((y - area[1]) / (area[3] - area[1]) * h - 0.5, 0, h - 1) - np.arange(h)
            return np.maximum(0, 1 - abs(down)) @ maps @ np.maximum(0, 1 - abs(across))
        return np.zeros(len(maps)) if uncovered == "uniform" and area[2] > area[0] else None

    def points(b: int, maps: np.ndarray, x0: float, y0: float, x1: float, y1: float) -> list[list[np.ndarray]]:
        """Those of the n x n points of every token that count."""
        return [
            [
                logits
                for i, j in np.ndindex(n, n)
                for u in [x0 + (col + (j + 0.5) / n) / grid[1] * (x1 - x0)]
                for v in [y0 + (row + (i + 0.5) / n) / grid[0] * (y1 - y0)]
                if (logits := point(b, maps, u, v)) is not None
            ]
            for row, col in np.ndindex(*grid)
        ]

    def soft(points: list[np.ndarray], nothing: np.ndarray) -> np.ndarray:
        powers = np.exp(np.mean(points, 0)) if points else nothing
        return (1 - smoothing) * powers / powers.sum() + smoothing / num_classes

    cls, tokens, weight = [], [], []
    for b in range(len(labels)):
        maps = _dense_map(labels, b, num_classes)
        cls.append(soft(sum(points(b, maps, *FULL_AREA), []), np.eye(num_classes)[int(classes[b])]))
        counted = points(b, maps, *window)
        tokens.append([soft(token, np.ones(num_classes)) for token in counted])
        weight.append([len(token) / n**2 for token in counted])
    return Expected(*(torch.tensor(np.array(part)) for part in (cls, tokens, weight)))


def _dense_map(labels: LabelBatch, b: int, num_classes: int) -> np.ndarray:
    """(C, h, w): 0 for classes that a cell does not list, the larger value of one that it lists twice."""
    k, h, w = labels.values.shape[1:]
    dense = np.full((num_classes, h, w), -math.inf)
    for j, r, c in np.ndindex(k, h, w):
        place = int(labels.ids[b, j, r, c]), r, c
        dense[place] = max(dense[place], float(labels.values[b, j, r, c]))
    return np.where(np.isinf(dense), 0, dense)


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

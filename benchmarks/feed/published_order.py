"""The published augmentation as it was: flip, RandAugment on the full image with the label map moved along, then crop.

Only for comparison: the published steps on timm's and Pillow's operations, with their errors (half a cell, square
grids, the crop's window stored and not applied). The product's own form of this order is `--aug-order published`.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import RandAugment, rand_augment_transform
from timm.data.transforms import RandomResizedCropAndInterpolation, ToNumpy, str_to_pil_interp
from torch import Tensor
from torchvision.transforms import functional

from tlt.data.augment.plan import TRANSLATE_SHARE, AugmentConfig
from tlt.label_map import LabelMap

Matrix = tuple[tuple[float, float, float], tuple[float, float, float]]  # output (row, column) -> input

# The effect of timm's operations on cells, given their argument and the map's (rows, columns); in index coordinates.
_MOVES: dict[str, Callable[[float, int, int], Matrix]] = {
    "ShearX": lambda factor, rows, columns: ((1, 0, 0), (factor, 1, 0)),
    "ShearY": lambda factor, rows, columns: ((1, factor, 0), (0, 1, 0)),
    "TranslateXRel": lambda share, rows, columns: ((1, 0, 0), (0, 1, share * columns)),
    "TranslateYRel": lambda share, rows, columns: ((1, 0, share * rows), (0, 1, 0)),
    "Rotate": lambda degrees, rows, columns: _turned(math.radians(degrees), rows / 2, columns / 2),
}


def _turned(angle: float, row: float, column: float) -> Matrix:
    """Return the counter-clockwise rotation around a point."""
    cosine, sine = math.cos(angle), math.sin(angle)
    return (
        (cosine, sine, row - cosine * row - sine * column),
        (-sine, cosine, column + sine * row - cosine * column),
    )


def keep_a_bit(policy: RandAugment) -> None:
    """Let timm's Posterize keep one bit at least: Pillow 13 refuses 0 bits, for which older versions returned black."""
    for operation in policy.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = functools.partial(_posterize, operation.aug_fn)


def _posterize(change: Callable[..., Any], image: Image.Image, bits: int, **rest: Any) -> Any:
    return change(image, max(1, bits), **rest)


class PublishedOrder:
    """A training image and its label map, augmented in the published order.

    Draws from the global state of `random` and numpy, as the published code does.
    """

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config
        self.crop = RandomResizedCropAndInterpolation(config.size, config.scale, config.ratio, config.interpolation)
        self.policy = None
        if config.policy is not None:
            options: dict[str, Any] = {"translate_const": int(min(config.size) * TRANSLATE_SHARE)}
            options["img_mean"] = config.fill
            if config.interpolation != "random":
                options["interpolation"] = str_to_pil_interp(config.interpolation)
            self.policy = rand_augment_transform(config.auto_augment, options)
            keep_a_bit(self.policy)
            for operation in self.policy.ops:
                if operation.name in _MOVES:
                    operation.aug_fn = self._with_label(operation.aug_fn, _MOVES[operation.name])
        self._label: np.ndarray = np.empty(0)  # (2, k, h, w) values and class ids, of the image in hand

    def __call__(self, image: Image.Image, label_map: LabelMap) -> tuple[Tensor, Tensor]:
        """Return the crop (3, H, W) uint8, and (3, k, h, w) float16: moved values and ids, and a plane with the crop's
        window as shares of the image."""
        self._label = np.stack([label_map.values, label_map.ids.astype(np.float16)])
        if random.random() < self.config.hflip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            self._label = self._label[..., ::-1]
        if self.policy is not None:
            image = self.policy(image)
        top, left, height, width = self.crop.get_params(image, self.config.scale, self.config.ratio)
        filters: Any = self.crop.interpolation
        chosen = random.choice(filters) if isinstance(filters, tuple | list) else filters
        window = np.zeros((1, *self._label.shape[1:]), np.float16)
        window.reshape(-1)[:4] = [top / image.height, left / image.width, height / image.height, width / image.width]
        cut = functional.resized_crop(image, top, left, height, width, self.config.size, chosen)
        pixels: np.ndarray = ToNumpy()(cut)
        return torch.from_numpy(pixels), torch.from_numpy(np.concatenate([self._label, window]))

    def _with_label(self, change: Callable[..., Any], move: Callable[[float, int, int], Matrix]) -> Callable[..., Any]:
        def both(image: Image.Image, argument: float, **rest: Any) -> Any:
            rows, columns = self._label.shape[2:]
            self._label = moved(self._label, move(argument, rows, columns))
            return change(image, argument, **rest)

        return both


def moved(label: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Move a label (2, k, h, w): each cell is the one nearest to its place under the matrix; outside, values are 0 and
    ids those of the border."""
    rows, columns = label.shape[2:]
    row, column = np.indices((rows, columns))
    row, column = (np.rint(a * row + b * column + c).astype(int) for a, b, c in matrix)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    taken: np.ndarray = label[..., row.clip(0, rows - 1), column.clip(0, columns - 1)]
    taken[0] *= inside
    return taken

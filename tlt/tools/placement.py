"""Tells whether stored features lie where they belong, without the network that made them (`tlt check`).

A map of features tells much of the colours at each place, whatever the network was trained for, or if it was not
trained at all. So the colours of each cell are predicted linearly from its features, in each half of the images by the
other half. The same is done with the features moved as mistakes would move them. The mean at each place is taken away
before, so that position embeddings and what all images share predict nothing.

Shapes: n images, maps of h x w cells with D channels.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from tlt.data.backends.decode import TorchvisionBackend
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.labels.features import FeatureStore, principal_directions

_IMAGES = 256  # that are read, at most
_LEAST = 16  # images from which something can be told
_NUMBERS = 2**26  # features in memory, at most
_DIRECTIONS = 64  # of the features, by which colours are predicted
_RIDGE = 1e-2
_CLEAR = 5.0  # standard errors beyond which a difference is no chance
_SHARE = 0.01  # of the colours' variance, below which nothing is explained; maps that are all alike differ by rounding
# How features lie -> what undoes it.
_MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "as they lie": lambda maps: maps,
    "mirrored": lambda maps: maps.flip(2),
    "upside down": lambda maps: maps.flip(1),
    "turned by 180 degrees": lambda maps: maps.flip(1, 2),
    "transposed": lambda maps: maps.transpose(1, 2),
    "of other images": lambda maps: maps.roll(len(maps) // 2, 0),
}


def check_placement(folder: ImageSource, store: FeatureStore, rows: Sequence[int]) -> tuple[bool, str]:
    """Compare the features of some of these images, which can be used, with the images' colours. Return False if they
    fit clearly better when they are moved; and a line that reports the result."""
    wanted = max(_LEAST, min(_IMAGES, _NUMBERS // (math.prod(store.info.grid) * store.info.channels)))
    if len(rows) < _LEAST:
        return True, f"where features lie: {len(rows)} images are too few to tell"
    maps, colours = (part - part.mean(0) for part in _read(folder, store, rows[:: math.ceil(len(rows) / wanted)]))
    tokens = maps.flatten(0, 2)
    maps = maps @ principal_directions(tokens.mT @ tokens, min(_DIRECTIONS, maps.shape[-1])).directions
    maps = maps / maps.std().clamp(min=torch.finfo(maps.dtype).tiny)
    names = [name for name, move in _MOVES.items() if move(maps).shape == maps.shape]
    errors = torch.stack([_errors(_MOVES[name](maps), colours) for name in names])  # (moves, n)
    shares = (1 - errors.mean(1) / colours.double().square().mean().clamp(min=1e-12)).clamp(min=0)
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(names, shares.tolist(), strict=True))
    line = f"where features lie: of the colours there they explain, in {errors.shape[1]} images, {told}"
    off = errors[1:] - errors[0]
    excess = off.mean(1) / (off.std(1) / off.shape[1] ** 0.5).clamp(min=1e-12)  # in standard errors
    excess[~off.any(1)] = math.inf  # a map of one row is the same upside down
    best = 1 + int(excess.argmin())
    if excess.min() < -_CLEAR and shares[best] > _SHARE:
        return False, f"{line}: they seem to be {names[best]}"
    sure = excess.min() > _CLEAR and shares[0] > _SHARE
    return True, line + ("" if sure else f"; not clearly more than {names[best]}: too little to tell")


def _read(folder: ImageSource, store: FeatureStore, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the maps (n, h, w, D) of images, and the mean colours (n, h, w, 3) in [0, 1] of what their cells cover.
    An image that can't be read is grey."""
    backend = TorchvisionBackend(dct_scaling=True)
    colours = torch.full((len(rows), *store.info.grid, 3), 0.5)
    for number, row in enumerate(rows):
        with suppress(BadImage):
            encoded = backend.open(folder.path(row), folder.read(row))
            ends = np.clip(store.info.area, 0, 1) * ((encoded.width, encoded.height) * 2)
            x0, y0, x1, y1 = ends.round().astype(int).tolist()
            pixels = backend.decode(encoded, (x0, y0, x1 - x0, y1 - y0), store.info.grid, "bilinear")
            colours[number] = pixels.permute(1, 2, 0) / 255
    return torch.stack([torch.from_numpy(store.read(row)) for row in rows]), colours


def _errors(maps: Tensor, colours: Tensor) -> Tensor:
    """Return (n,), the mean squared error of the colours that each half of the images predicts for the other."""
    errors = torch.empty(len(maps), dtype=torch.float64)
    for half in (0, 1):
        tested = torch.arange(len(maps)) % 2 == half
        inputs, outputs = (part[~tested].flatten(0, 2).double() for part in (maps, colours))
        ridge = _RIDGE * len(inputs) * torch.eye(inputs.shape[1], dtype=torch.float64)
        weights = torch.linalg.solve(inputs.mT @ inputs + ridge, inputs.mT @ outputs)
        errors[tested] = (maps[tested].double() @ weights - colours[tested]).square().mean((1, 2, 3))
    return errors

"""Tells whether stored features lie where they belong, without the network that made them (`tlt check`).

A map of features tells much of the colours at each place, whatever the network was trained for, or if it was not
trained at all. So the colours of each cell are predicted linearly from its features, in each half of the images by the
other half. The same is done with the features moved as mistakes would move them. The mean at each place is taken away
before, so that position embeddings and what all images share predict nothing.

Shapes: n images, maps of h x w cells with D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tlt.data.backends.decode import TorchvisionBackend
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import MachineFault, UserError
from tlt.labels.features import FeatureStore, principal_directions

_IMAGES = 256  # that are read, at most
_LEAST = 16  # images from which something can be told
_NUMBERS = 2**26  # features in memory, at most
_DIRECTIONS = 64  # of the features, by which colours are predicted
_RIDGE = 1e-2
_CLEAR = 5.0  # standard errors beyond which a difference is no chance
# Name of a mistake -> what it makes of maps (n, h, w, D).
_MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "mirrored": lambda maps: maps.flip(2),
    "upside down": lambda maps: maps.flip(1),
    "turned by 180 degrees": lambda maps: maps.flip(1, 2),
    "transposed": lambda maps: maps.transpose(1, 2),  # where h = w
    "of other images": lambda maps: maps.roll(len(maps) // 2, 0),
}


def check_placement(folder: ImageSource, store: FeatureStore) -> tuple[bool, str]:
    """Compare the features of a sample of images with the images' colours. Return False if they fit clearly better
    when they are moved; and a line that reports the result."""
    maps, colours = _sample(folder, store)
    if len(maps) < _LEAST:
        return True, f"where features lie: {len(maps)} images are too few to tell"
    maps, colours = (part - part.mean(0) for part in (maps, colours))
    tokens = maps.flatten(0, 2)
    maps = maps @ principal_directions(tokens.mT @ tokens, min(_DIRECTIONS, maps.shape[-1])).directions
    maps = maps / maps.std().clamp(min=torch.finfo(maps.dtype).tiny)
    errors = {"as they lie": _errors(maps, colours)}
    for name, move in _MOVED.items():
        moved = move(maps)
        if moved.shape == maps.shape and not torch.equal(moved, maps):
            errors[name] = _errors(moved, colours)
    return _verdict(errors, float(colours.double().square().mean()))


def _sample(folder: ImageSource, store: FeatureStore) -> tuple[Tensor, Tensor]:
    """Return the maps (n, h, w, D) of images spread over the folder, and the mean colours (n, h, w, 3) in [0, 1] of
    what their cells cover."""
    info = store.info
    wanted = min(_IMAGES, len(folder), max(_LEAST, _NUMBERS // (math.prod(info.grid) * info.channels)))
    backend = TorchvisionBackend(dct_scaling=True)
    maps, colours = [], []
    for row in sorted({number * len(folder) // wanted for number in range(wanted)} - store.missing):
        try:
            features = torch.from_numpy(store.read(row))
            encoded = backend.open(folder.path(row), folder.read(row))
            ends = (encoded.width, encoded.height) * 2
            left, top, right, bottom = (round(min(max(s, 0), 1) * n) for s, n in zip(info.area, ends, strict=True))
            pixels = backend.decode(encoded, (left, top, right - left, bottom - top), info.grid, "bilinear")
        except MachineFault:
            raise
        except (UserError, BadImage):  # which is another check's matter
            continue
        if features.isfinite().all():
            maps.append(features)
            colours.append(pixels.permute(1, 2, 0) / 255)
    return (torch.stack(maps), torch.stack(colours)) if maps else (torch.empty(0), torch.empty(0))


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


def _verdict(errors: dict[str, Tensor], variance: float) -> tuple[bool, str]:
    """Return what `check_placement` does, from the errors (n,) of each arrangement, the true one first."""
    own = errors["as they lie"]
    shares = {name: 100 * max(0.0, 1 - float(each.mean()) / max(variance, 1e-12)) for name, each in errors.items()}
    told = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
    line = f"where features lie: of the colours there they explain, in {len(own)} images, {told}"
    off = {name: each - own for name, each in errors.items() if each is not own}
    excess = {name: float(each.mean() * len(own) ** 0.5 / each.std().clamp(min=1e-12)) for name, each in off.items()}
    best = min(excess, key=lambda name: excess[name], default="")
    if best and excess[best] < -_CLEAR:
        return False, f"{line}: they seem to be {best}"
    sure = best and excess[best] > _CLEAR
    return True, line + ("" if sure else "; too little to tell whether they lie where they belong")

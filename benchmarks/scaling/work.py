"""The work of a rank that wasn't measured: a model's gradients, computed evenly, twice as long backward as forward."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import timm
import torch

from benchmarks.scaling.model import Gradient, Work
from tlt.errors import UserError
from volo import models as models  # registers them with timm

_BACKWARD = 2 / 3  # of the computing: two of three operations are the backward pass's


def gradients_of(name: str) -> tuple[Gradient, ...]:
    """A model's gradients in float32, from its last parameter to its first; nothing is allocated."""
    check_model(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    return even_gradients([4.0 * parameter.numel() for parameter in reversed(list(model.parameters()))])


def check_model(name: str) -> None:
    """Refuse a model that timm doesn't know.

    Raises:
        UserError: The nearest names are shown.
    """
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"--model {name}: no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))


def even_gradients(sizes: Sequence[float]) -> tuple[Gradient, ...]:
    """Gradients of a model that wasn't measured: as much of the backward pass per byte everywhere.

    Args:
        sizes: Bytes, in the order in which they become ready.
    """
    total, done, gradients = sum(sizes), 0.0, []
    for size in sizes:
        done += size
        gradients.append(Gradient(size, done / total))
    return tuple(gradients)


def computing(seconds: float, images: int, gradients: Sequence[Gradient]) -> Work:
    """The work of a rank that takes so long forward and backward."""
    return Work(images, seconds * (1 - _BACKWARD), seconds * _BACKWARD, tuple(gradients))

"""Adds methods to a model in place, by replacing its class with a subclass: a dense head, a student's projectors."""

import functools
from typing import Any

from torch import nn


class Extension(nn.Module):
    """A base class of methods that `extend` adds to a model; copies and pickles of the model keep them."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, _parts_of(type(self)), self.__dict__


def extend(model: nn.Module, extension: type[Extension], outermost: bool = False) -> None:
    """Add an extension to a model in place, unless it has it already. Its methods come after those of earlier
    extensions, or before them if it is `outermost`. The model's class is replaced by a subclass of both. A wrapper
    module would change the names of all parameters: in checkpoints, in timm's rules for weight decay and layer-wise
    rates, and for code that looks for layers."""
    plain, *before = _parts_of(type(model))
    if extension not in before:
        model.__class__ = _extended(plain, *([extension, *before] if outermost else [*before, extension]))


def _parts_of(kind: type[nn.Module]) -> tuple[Any, ...]:
    """Return a model's original class, and its extensions from the outermost on."""
    return kind.__dict__.get("_parts", (kind,))


@functools.cache
def _extended(plain: Any, *extensions: Any) -> type[nn.Module]:
    parts = {"_parts": (plain, *extensions)}
    return type(plain.__name__, (*extensions, plain), {"__doc__": plain.__doc__, "__module__": __name__, **parts})


def _blank(plain: Any, *extensions: Any) -> nn.Module:
    kind = _extended(plain, *extensions) if extensions else plain
    return kind.__new__(kind)

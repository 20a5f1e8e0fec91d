"""The types of flags' values: each converts the text of a command line, or says what is wrong with it."""

import argparse
import ast
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from tlt.io.text import leads_out


@dataclass(frozen=True)
class Number:
    """A type of values: an int or a finite float in [low, high]; with `positive` it must also be above 0. Raises
    argparse.ArgumentTypeError: the text is no such number. argparse puts the flag's name before the message."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    positive: bool = False

    @property
    def metavar(self) -> str:
        """The word for a value in `--help`."""
        return "N" if self.kind is int else "X"

    def __call__(self, text: str) -> int | float:
        try:
            value = self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {self.kind.__name__} value: {text!r}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not self.low <= value <= self.high or (self.positive and value <= 0):
            raise argparse.ArgumentTypeError(f"{text} is out of range: {self.range_text}")
        return value

    @property
    def range_text(self) -> str:
        """The allowed range in words."""
        if self.positive:
            return "it must be above 0"
        return f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, eq=False)
class Text:
    """A type of values: any text."""

    metavar: str

    def __call__(self, text: str) -> str:
        return text


@dataclass(frozen=True, eq=False)
class Place(Text):
    """A type of values: a file, folder or model. `~` at the beginning or after `local-dir:` is the home folder. Raises
    argparse.ArgumentTypeError: no file can have such a name."""

    def __call__(self, text: str) -> str:
        prefix = "local-dir:" * text.startswith("local-dir:")
        return prefix + possible_name(os.path.expanduser(text.removeprefix(prefix)))


def possible_name(path: str) -> str:
    """Return `path`. Raises argparse.ArgumentTypeError if no file can have this name."""
    if "\0" in path or any(len(name.encode(errors="replace")) > 255 for name in path.split("/")):
        raise argparse.ArgumentTypeError(f"{path[:40]!r}... is no name of a file: it has more than 255 bytes, or NUL")
    return path


def name_below(text: str) -> str:
    """A type of values: the name of a folder inside another one. Raises argparse.ArgumentTypeError if it leads out."""
    if leads_out(text):
        raise argparse.ArgumentTypeError(f"{text!r} leads out of the folder that it is to be in: give a name alone")
    return possible_name(text)


def key_value(text: str) -> tuple[str, Any]:
    """A type of values: KEY=VALUE as a pair; VALUE is a Python literal, or else text. Raises
    argparse.ArgumentTypeError: the key or "=" is missing."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two if it is nested too deeply
        return key, value


def count_or_auto(text: str) -> int | str:
    """A type of values: a whole number from 1 on, or `auto`. Raises argparse.ArgumentTypeError for other text."""
    return text if text == "auto" else int(Number(int, low=1)(text))


def device_name(text: str) -> str:
    """A type of values: a device as torch names it; a number is that of a GPU. Raises argparse.ArgumentTypeError if it
    names several."""
    name = text.strip().lower()
    gpu = re.fullmatch(r"(?:(?:cuda|gpu):?)?(\d+)", name)
    if gpu is None and re.search(r"\d\s*,\s*\S*\d", name):
        raise argparse.ArgumentTypeError(
            f"{text!r} names several: CUDA_VISIBLE_DEVICES chooses GPUs, volo launch N starts a process for each"
        )
    return f"cuda:{int(gpu[1])}" if gpu else {"gpu": "cuda"}.get(name, name)


# What an annotation says of a value: its type, and how the text of a command line becomes one.
Positive: TypeAlias = Annotated[int, Number(int, low=1)]
Count: TypeAlias = Annotated[int, Number(int, low=0)]
Epochs: TypeAlias = Annotated[int, Number(int, low=0, high=10**6)]
Seed: TypeAlias = Annotated[int, Number(int, low=0, high=2**63 - 1)]
Amount: TypeAlias = Annotated[float, Number(float, low=0)]
AboveZero: TypeAlias = Annotated[float, Number(float, positive=True)]
Share: TypeAlias = Annotated[float, Number(float, low=0, high=1)]
CountOrAuto: TypeAlias = Annotated[int | str, count_or_auto]
Name: TypeAlias = Annotated[str, Text("NAME")]
NameBelow: TypeAlias = Annotated[str, name_below]
Device: TypeAlias = Annotated[str, device_name]
Path: TypeAlias = Annotated[str, Place("PATH")]
File: TypeAlias = Annotated[str, Place("FILE")]
Dir: TypeAlias = Annotated[str, Place("DIR")]
Source: TypeAlias = Annotated[str, Place("NAME")]
WEIGHTS = Place("PATH")  # path of a checkpoint; `check_flags` replaces a folder by `single_checkpoint`
Weights: TypeAlias = Annotated[str, WEIGHTS]
TEACHER = Place("PATH")  # the same, or the folder of an archive of a teacher's features
Teacher: TypeAlias = Annotated[str, TEACHER]
# What a plain annotation says.
PLAIN: dict[type, Callable[[str], Any]] = {int: Number(int), float: Number(float), str: Text("TEXT"), dict: key_value}

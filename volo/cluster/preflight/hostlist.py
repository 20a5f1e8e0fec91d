"""Slurm's short form of node names, as `scontrol show hostnames` writes it out; containers have no scontrol."""

from __future__ import annotations

import re
from itertools import product

from tlt.errors import UserError

# One name: plain text and [lists of numbers and ranges]; commas inside brackets belong to it.
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 65536  # as many as Slurm writes out


def expand(text: str) -> list[str]:
    """Return the names that `n[1-3,08-10],login1` stands for, in that order.

    Names are divided by commas or spaces. Numbers keep the zeros that the start of their range has. With several
    brackets, as in `r[1-2]n[1-2]`, the last one counts first.

    Raises:
        UserError: It is no such list.
    """
    names = []
    for name in _NAME.findall(text):
        parts = [_numbers(numbers) if numbers else [plain] for numbers, plain in _PART.findall(name)]
        names += ["".join(choice) for choice in product(*parts)]
    if re.sub(r"[\s,]", "", _NAME.sub("", text)) or not names:
        raise UserError(f"node list {text!r}: expected names such as n[1-3,5],gpu7 (SLURM_JOB_NODELIST, NODES)")
    return names


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        found = _RANGE.fullmatch(item)
        low, high = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(high) - int(low) < _MOST:
            raise UserError(f"node list: [{text}] holds {item!r}, which is no number and no range such as 01-16")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers

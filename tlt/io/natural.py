"""Natural order, as timm has it: runs of digits are compared as numbers (`n2` before `n10`), and case is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable

_DIGITS = re.compile(r"\d+")
_COUNTS = 0xE000  # the first character for private use


def natural_key(text: str) -> str:
    """Text that sorts in natural order.

    A number becomes NUL, which comes before all that may stand in its place and is in no file's name, then the count of
    its digits without leading zeros, then these. The count is a character that is no part of a path, such as a slash.
    """
    return _DIGITS.sub(_number, text.lower())


def natural_sorted(names: Iterable[str]) -> list[str]:
    """The names in natural order, equal ones by themselves."""
    return sorted(sorted(names), key=natural_key)


def _number(found: re.Match[str]) -> str:
    digits = str(int(found[0]))
    return f"\0{chr(_COUNTS + len(digits))}{digits}"

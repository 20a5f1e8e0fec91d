"""Text for people: names, tables, and escapes for what a terminal would take for a command. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Control characters but for those that lay out lines; of escapes, the progress bar's step up a line.
_COMMANDS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[A)")


def safe_text(text: str) -> str:
    """Escape what a terminal would take for a command: names of files and folders may hold anything."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


NAMES_SHOWN = 5  # in a message


def printable(name: str) -> str:
    """The name on one line and safe for any terminal: line breaks and bytes that are not UTF-8 are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def some_names(names: Sequence[str]) -> str:
    """The first few names of a list for a message."""
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(printable(name)) if " " in name else printable(name) for name in names[:NAMES_SHOWN]) + more


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Align the columns of rows of equal length, the first of which is the heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""Names and text: their natural order, tables, and escapes for what a terminal would take for a command.

Imports nothing heavy: the command line is checked with it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from unicodedata import normalize

# Control characters but for those that lay out lines; of escapes, the progress bar's step up a line.
_COMMANDS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[A)")
_DIGITS = re.compile(r"\d+")
_COUNTS = 0xE000  # the first character for private use
NAMES_SHOWN = 5  # in a message


def natural_key(text: str) -> str:
    """Text that sorts in natural order, as timm has it: runs of digits count as numbers, and case is ignored.

    A number becomes NUL, which comes before all that may stand in its place and is in no file's name, then the count of
    its digits without leading zeros, then these. The count is a character that is no part of a path, such as a slash.
    """

    def number(match: re.Match[str]) -> str:
        digits = str(int(match[0]))
        return f"\0{chr(_COUNTS + len(digits))}{digits}"

    return _DIGITS.sub(number, text.lower())


def natural_sorted(names: Iterable[str]) -> list[str]:
    """The names in natural order (`n2` before `n10`), equal ones by themselves."""
    return sorted(sorted(names), key=natural_key)


def leads_out(name: str) -> bool:
    """Whether the path of a file, with slashes, is absolute or has `..` in it: it may lie outside of a folder."""
    return os.path.isabs(name) or ".." in name.split("/")


def safe_text(text: str) -> str:
    """Escape what a terminal would take for a command: names of files and folders may hold anything."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def open_streams() -> None:
    """Let standard output and errors take any text: what their encoding lacks is escaped, and closed ones lead nowhere.

    The next file that is opened would get the number of a closed stream, and with it what libraries print there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (it stays open)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(name: str) -> str:
    """The name on one line and safe for any terminal: line breaks and bytes that are not UTF-8 are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def some_names(names: Sequence[str]) -> str:
    """The first few names of a list for a message."""
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(printable(name)) if " " in name else printable(name) for name in names[:NAMES_SHOWN]) + more


def look_of(name: str) -> str:
    """The name without what nobody sees: spaces around it, and which of Unicode's forms it is in."""
    return normalize("NFC", name).strip()


def lookalikes(names: Iterable[str], others: Iterable[str]) -> str:
    """A remark for a message that some of the names look like others, but are not the same; "" where none do."""
    same = {*map(look_of, names)} & {*map(look_of, others)}
    return "; names that look the same differ in their Unicode form (NFC, NFD) or in spaces" if same else ""


def first_difference(there: Sequence[str], here: Sequence[str]) -> str:
    """What tells two lists of classes apart, for a message: the first class that differs, else their lengths."""
    for number, (one, other) in enumerate(zip(there, here, strict=False)):
        if one != other:
            difference = f"class {number} is {printable(one)} there, {printable(other)} here"
            return difference + lookalikes([one], [other])
    return f"{len(there)} classes there, {len(here)} here"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Align the columns of rows of equal length, the first of which is the heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""Functions for names and text: natural order, tables, and escapes for characters that a terminal would obey.

It imports nothing large, because the command line is checked with it.
"""

import os
import re
import sys
import textwrap
from argparse import HelpFormatter
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from string import digits
from unicodedata import normalize

# Control characters except those of line layout, and ESC except in the progress bar's "one line up".
_COMMANDS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[A)")
_DIGITS = re.compile(r"\d+")
_COUNTS = 0xE000  # the first private-use character
NAMES_SHOWN = 5  # number of names that a message shows


def natural_key(text: str) -> str:
    """Return a key that sorts in timm's natural order: runs of digits count as numbers, and case is ignored.

    A number becomes NUL, a character for its count of digits without leading zeros, then these digits. NUL sorts before
    any other character and is in no file name. The second character is a private-use one, so it can't be a slash.
    """

    def number(match: re.Match[str]) -> str:
        digits = str(int(match[0]))
        return f"\0{chr(_COUNTS + len(digits))}{digits}"

    return _DIGITS.sub(number, text.lower())


def natural_sorted(names: Iterable[str]) -> list[str]:
    """Sort names in natural order (`n2` before `n10`); names with equal keys in plain order."""
    plain = sorted(names)
    return sorted(plain, key=len if _are_numbered(plain) else natural_key)


def _are_numbered(names: Sequence[str]) -> bool:
    """Return whether sorted names differ in one number alone, without leading zeros: then a longer name has a larger
    number. A key for each of a million names would take longer than to list them."""
    if len(names) < 2:
        return True
    prefix = os.path.commonprefix([names[0], names[-1]]).rstrip(digits)
    suffix = names[0][len(prefix) :].lstrip(digits)
    end = -len(suffix) or None
    numbers = [name[len(prefix) : end] for name in names if name.endswith(suffix)]
    plain = all(number.isdecimal() and number.isascii() and number[0] != "0" for number in numbers)
    return plain and len(numbers) == len(names)


def leads_out(name: str) -> bool:
    """Return whether a file's path (with slashes) is absolute or has `..`, so that it may lead out of a folder."""
    return os.path.isabs(name) or ".." in name.split("/")


def safe_text(text: str) -> str:
    """Escape characters that a terminal would obey: names of files and folders may contain anything."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def open_streams() -> None:
    """Make stdout and stderr accept any text: escape what their encoding lacks, and discard text to closed ones.

    Otherwise the next opened file would get the number of a closed stream, and libraries would print into it.
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
    """Return the name on one line, safe for any terminal: escape line breaks and bytes that are not UTF-8."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def some_names(names: Sequence[str]) -> str:
    """Return the first few names of a list, for a message."""
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(printable(name)) if " " in name else printable(name) for name in names[:NAMES_SHOWN]) + more


def look_of(name: str) -> str:
    """Return the name without invisible differences: surrounding spaces, and Unicode's normal form."""
    return normalize("NFC", name).strip()


def lookalikes(names: Iterable[str], others: Iterable[str]) -> str:
    """Return a hint if some names look like others without being equal, else ""."""
    same = {look_of(name).casefold() for name in names} & {look_of(name).casefold() for name in others}
    return "; names that look the same differ in their Unicode form (NFC, NFD), in case or in spaces" if same else ""


def first_difference(there: Sequence[str], here: Sequence[str]) -> str:
    """Return the difference of two class lists for a message: the first class that differs, else the lengths."""
    for number, (one, other) in enumerate(zip(there, here, strict=False)):
        if one != other:
            difference = f"class {number} is {printable(one)} there, {printable(other)} here"
            return difference + lookalikes([one], [other])
    return f"{len(there)} classes there, {len(here)} here"


def fill(text: str, width: int, indent: str = "") -> str:
    """Break each line of a text into lines of `width` columns, all but the first indented; no word is broken, nor a
    name with hyphens, even if it is longer."""
    lines = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(lines.fill, text.split("\n")))


class WholeWords(HelpFormatter):
    """Breaks lines of help only between words."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fill(" ".join(text.split()), width).splitlines()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(" ".join(text.split()), width)


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns; the first row is the heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

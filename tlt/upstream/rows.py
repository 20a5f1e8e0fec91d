"""The rows of `--compat`: differences to the published code that change what is learned (`behaviour.py`).

Imports nothing heavy: the command line is checked with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tlt.errors import UserError

UPSTREAM = "upstream"
ROWS: Mapping[str, str] = {
    "label-crop": "the crop's (y, x, h, w) is read as (x, y, w, h) for the label",
    "label-scale": "both axes of the label window are scaled by the map's width",
    "label-area": "every map is taken to cover the whole image",
    "uncovered": "where nothing is known all classes are equally likely, as --uncovered uniform",
    "target-sum": "smoothed token targets sum to 1 + s / C",
}
# Rows that change which part of a map a token is given.
WINDOW_ROWS = ("label-crop", "label-scale", "label-area")


def resolve(words: Sequence[str]) -> tuple[list[str], bool]:
    """Rows in the table's order, and whether `upstream` was among `words`: it is all rows, `no-ROW` drops one.

    Raises:
        UserError: An unknown row (the nearest one is named), or one taken out of nothing.
    """
    asked = {word for word in words if not word.startswith("no-")}
    removed = {word.removeprefix("no-") for word in words if word.startswith("no-")}
    for word, row in [*((word, word) for word in asked), *((f"no-{row}", row) for row in removed)]:
        if row not in ROWS and word != UPSTREAM:
            near = difflib.get_close_matches(row, [UPSTREAM, *ROWS], n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {UPSTREAM}, {', '.join(ROWS)}"
            raise UserError(f"--compat {word}: unknown row, {hint}")
    everything = UPSTREAM in asked
    if removed and not everything:
        raise UserError(f"--compat no-{sorted(removed)[0]} takes a row out of upstream, which is not there")
    both = removed & asked
    if both:
        raise UserError(f"--compat {sorted(both)[0]} and no-{sorted(both)[0]}: keep one of them")
    chosen = (set(ROWS) if everything else asked) - removed
    return [row for row in ROWS if row in chosen], everything

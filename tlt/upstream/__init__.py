"""The rows of `--compat`: mistakes of the published code that change what is learned (`behaviour.py`).

This file imports nothing large, because the command line is checked with it.
"""

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
# Rows that change which part of a label map a token gets.
WINDOW_ROWS = ("label-crop", "label-scale", "label-area")


def resolve(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the chosen rows in the table's order, and whether `words` has `upstream`, which means all rows. Raise
    UserError if a row is unknown; the message names the nearest one."""
    for word in words:
        if word not in (UPSTREAM, *ROWS):
            near = difflib.get_close_matches(word, [UPSTREAM, *ROWS], n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {UPSTREAM}, {', '.join(ROWS)}"
            raise UserError(f"--compat {word}: unknown row, {hint}")
    everything = UPSTREAM in words
    return [row for row in ROWS if everything or row in words], everything

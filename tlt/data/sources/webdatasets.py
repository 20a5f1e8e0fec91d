"""Tar shards as timm names them (`--dataset wds/NAME`): by `_info.json` in DATA, or by a pattern in place of a split.

    _info.json   {"splits": {"train": {"filenames": ["train-0000.tar", ...], "num_samples": 1281167, "alt_label": ""}}}
    pattern      --train-split 'imagenet-train-{0000..1023}.tar', or '...tar|1281167' with the number of images

NAME says nothing, as in timm. Shards in DATA/SPLIT need none of it: leave --dataset out.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from functools import partial

from tlt.data.sources.folder import split_names
from tlt.data.sources.records import RecordImages, open_records
from tlt.data.sources.source import Found
from tlt.data.sources.tar_shards import LABEL_KEY, scan_tar, write_tar_table
from tlt.errors import MissingSplit, UserError
from tlt.io.text import leads_out, printable, some_names

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_MOST_SHARDS = 1_000_000


def open_webdataset(_name: str, data: str, split: str, found: Found | None) -> RecordImages:
    """The images in the shards of a split.

    Raises:
        UserError: No `_info.json`, no such split in it, or names of shards that are not in DATA.
    """
    if ".tar" in split or ".." in split:
        pattern = split.partition("|")[0]
        name, files, label_key = re.sub(r"[^\w.,-]+", "_", pattern), expand_braces(pattern), LABEL_KEY
    else:
        name, files, label_key = _listed(data, split)
    for each in files:
        if ":" in each or leads_out(each) or not each.endswith(".tar"):
            raise UserError(
                f"shard {printable(each)}: tar files below {printable(data)} alone are read, by relative names; copy "
                "it there, uncompressed"
            )
    paths = [os.path.join(data, each) for each in files]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing or not files:
        raise UserError(f"{len(missing)} of {len(files)} shards are missing: {some_names(missing)}")
    table, scan = os.path.join(data, f"{name}.shards"), partial(scan_tar, label_key=label_key)
    return open_records(paths, table, scan, write_tar_table, found)


def expand_braces(pattern: str) -> list[str]:
    """All names that a pattern stands for: `{000..123}`, with leading zeros as wide as the first number, and `{a,b}`.

    Raises:
        UserError: Braces of another kind, or more than a million names.
    """
    pieces = _BRACES.split(pattern)  # text, what is in braces, text, ...
    choices = [_choices(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if any("{" in text or "}" in text for text in pieces[::2]) or not 0 < math.prod(map(len, choices)) <= _MOST_SHARDS:
        raise UserError(
            f"split {printable(pattern)}: give patterns like train-{{0000..1023}}.tar or {{a,b}}.tar, of a million "
            "names at most"
        )
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(inside: str) -> Sequence[str]:
    """What braces stand for; nothing where that is unknown."""
    if match := _RANGE.fullmatch(inside):
        width = len(match[1]) if match[1].startswith("0") else 0
        return [f"{number:0{width}d}" for number in range(int(match[1]), int(match[2]) + 1)[: _MOST_SHARDS + 1]]
    return inside.split(",") if "," in inside else []


def _listed(data: str, split: str) -> tuple[str, list[str], str]:
    """A split's name in `_info.json`, the shards that are listed there, and the key of their classes."""
    path = next((path for name in ("_info.json", "info.json") if os.path.isfile(path := os.path.join(data, name))), "")
    if not path:
        raise MissingSplit(
            f"no _info.json or info.json in {printable(data)}: give a pattern as the split, such as "
            "'train-{0000..1023}.tar', or leave --dataset out for shards in DATA/SPLIT"
        )
    try:
        with open(path, encoding="utf-8") as file:
            splits = json.load(file)["splits"]
        name = next((each for each in split_names(split) if each in splits), None)
        if name is None:
            raise MissingSplit(f"{printable(path)} has no split {printable(split)}; it has {some_names(list(splits))}")
        files, label_key = [*splits[name]["filenames"]], splits[name].get("alt_label") or LABEL_KEY
        if not all(isinstance(each, str) for each in [*files, label_key]):
            raise TypeError("names that are none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {printable(str(error))}"
        raise UserError(
            f"{printable(path)} lists no shards as timm does ({reason}): mend it, or give a pattern"
        ) from error
    return name, files, label_key

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
from typing import Any

from tlt.data.sources.folder import split_names
from tlt.data.sources.records import RecordFiles
from tlt.data.sources.tar_shards import LABEL_KEY, scan_tar, tar_contents
from tlt.errors import MissingSplit, UserError
from tlt.io.names import leads_out
from tlt.io.text import printable

_INFO = ("_info.json", "info.json")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_MOST_SHARDS = 1_000_000


def find_shards(_name: str, data: str, split: str) -> RecordFiles:
    """The shards of a split.

    Raises:
        UserError: No `_info.json`, no such split in it, or names of shards that are not in DATA.
    """
    if ".tar" in split or ".." in split:
        pattern, _, count = split.partition("|")
        if count and not count.isdigit():
            raise UserError(f"split {printable(split)}: the number of images must follow the |")
        name = re.sub(r"[^\w.,-]+", "_", pattern)
        files = _shards(data, name, expand_braces(pattern), int(count) if count else None)
    else:
        files = _listed(data, split)
    missing = [path for path in files.paths if not os.path.isfile(path)]
    if missing:
        raise UserError(f"{len(missing)} of {len(files.paths)} shards are missing, such as {printable(missing[0])}")
    return files


def expand_braces(pattern: str) -> list[str]:
    """All names that a pattern stands for: `{000..123}`, with leading zeros as wide as the first number, and `{a,b}`.

    Raises:
        UserError: Braces of another kind, or more than a million names.
    """
    pieces = _BRACES.split(pattern)  # text, what is in braces, text, ...
    choices = [_choices(piece, pattern) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > _MOST_SHARDS or any("{" in text or "}" in text for text in pieces[::2]):
        raise UserError(
            f"split {printable(pattern)}: give patterns like train-{{0000..1023}}.tar, of a million at most"
        )
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(inside: str, pattern: str) -> Sequence[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = match.groups()
        if abs(int(last) - int(first)) >= _MOST_SHARDS or int(last) < int(first):
            raise UserError(f"split {printable(pattern)}: {{{inside}}} must count up, to a million names at most")
        width = len(first) if first.startswith("0") else 0
        return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    if "," not in inside:
        raise UserError(f"split {printable(pattern)}: {{{printable(inside)}}} is neither {{000..123}} nor {{a,b}}")
    return inside.split(",")


def _listed(data: str, split: str) -> RecordFiles:
    """The shards that `_info.json` lists."""
    path = next((path for name in _INFO if os.path.isfile(path := os.path.join(data, name))), None)
    if path is None:
        raise MissingSplit(
            f"no {' or '.join(_INFO)} in {printable(data)}: give a pattern as the split, such as "
            "'train-{0000..1023}.tar', or leave --dataset out for shards in DATA/SPLIT"
        )
    try:
        with open(path, encoding="utf-8") as file:
            splits: dict[str, Any] = json.load(file)["splits"]
        name = next((each for each in split_names(split) if each in splits), None)
        known = ", ".join(map(printable, splits))
        listed = splits[name] if name else {"filenames": []}
        filenames, count = [*listed["filenames"]], listed.get("num_samples")
        label_key = listed.get("alt_label") or LABEL_KEY
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MissingSplit(
            f"{printable(path)} can't be read or lists no shards as timm does ({type(error).__name__}: "
            f"{printable(str(error))}): mend it, or give a pattern as the split"
        ) from error
    if name is None:
        raise MissingSplit(f"{printable(path)} has no split {printable(split)}; it has {known}")
    if not all(isinstance(each, str) for each in [*filenames, label_key]) or not isinstance(count, int | None):
        raise UserError(f"{printable(path)}: split {printable(name)} does not name shards and count images: mend it")
    return _shards(data, name, filenames, count, label_key)


def _shards(data: str, name: str, filenames: list[str], count: int | None, label_key: str = LABEL_KEY) -> RecordFiles:
    """The shards with these names; `label_key` as of `scan_tar`. Raises UserError: one is not below DATA, or no local
    file."""
    for each in filenames:
        if ":" in each or leads_out(each) or not each.endswith(".tar"):
            raise UserError(
                f"shard {printable(each)}: tar files below {printable(data)} alone are read, by relative names; copy "
                "it there, uncompressed"
            )
    if not filenames:
        raise UserError(f"no shards of the split {printable(name)} in {printable(data)}")
    paths, table = [os.path.join(data, each) for each in filenames], os.path.join(data, f"{name}.shards")
    return RecordFiles(paths, table, partial(scan_tar, label_key=label_key), tar_contents, count)

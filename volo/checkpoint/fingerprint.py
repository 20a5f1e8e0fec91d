"""Which images and labels a run is trained on, in a few bytes: a checkpoint must not be resumed on others unnoticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from tlt.data.backends.synthetic import ROOT as SYNTHETIC
from tlt.data.dataset import LabelReader
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.labels.store import LabelStore

KEY = "data"
_WHAT = {"images": "the training images (names and classes)", "labels": "the token labels"}


Fingerprint = dict[str, str | int | None]


def fingerprint(folder: ImageSource, labels: LabelReader | None) -> Fingerprint:
    """Return what `check_same_data` compares: names and classes of the images, and how their labels were made.

    The files are not read: a data set may lie elsewhere, and a million of them take long.
    """
    if folder.root == SYNTHETIC:  # as many images as the flags ask for
        return {"images": SYNTHETIC, "labels": SYNTHETIC if labels else None, "count": 0}
    digest = hashlib.sha256("\0".join(folder.class_names).encode(errors="surrogateescape"))
    names = list((folder.paths if isinstance(folder.paths, Names) else Names(folder.paths)).encoded())
    # A line for each image, "\nNAME\0CLASS"; those of one class follow each other and are written at once.
    begins = [0, *(np.flatnonzero(np.diff(folder.classes)) + 1).tolist()]
    for start, end in zip(begins, [*begins[1:], len(names)], strict=True):
        number = b"\0%d" % folder.classes[start]
        digest.update(b"\n" + (number + b"\n").join(names[start:end]) + number)
    return {"images": digest.hexdigest(), "labels": _labels(labels), "count": len(folder)}


def _labels(labels: LabelReader | None) -> str | None:
    if not isinstance(labels, LabelStore):
        return None
    digest = hashlib.sha256(repr((labels.shape, labels.area)).encode())
    digest.update(labels.identity())
    return digest.hexdigest()


def check_same_data(checkpoint: dict[str, Any], now: dict[str, Any], path: str | Path, allow: bool) -> list[str]:
    """Compare the data of a checkpoint with the present; return what a user should know.

    Args:
        checkpoint: One without a fingerprint says nothing.
        now: From `fingerprint`.
        allow: Other data are said, not refused (`--allow-changed-data`).

    Raises:
        UserError: They differ.
    """
    before = checkpoint.get(KEY)
    if not isinstance(before, dict):
        return []
    changed = [text for name, text in _WHAT.items() if name in before and before[name] != now[name]]
    if not changed:
        return []
    counts = f" ({before.get('count')} images then, {now['count']} now)" if before.get("count") != now["count"] else ""
    text = f"{' and '.join(changed)} are not those that {path} was trained on{counts}"
    if not allow:
        raise UserError(f"{text}: resume with the same data, or go on with others by --allow-changed-data")
    return [f"warning: {text} (--allow-changed-data)"]

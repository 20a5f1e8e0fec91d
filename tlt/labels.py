"""Token labels from wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlt.archive import LabelArchive, is_archive
from tlt.label_store import LabelStore
from tlt.store import PublishedTree


def open_labels(
    path: str | Path,
    names: Sequence[str],
    area: str | None = None,
    num_classes: int | None = None,
    bad_label: str = "stop",
    class_names: Sequence[str] | None = None,
    published_names: bool = False,
) -> LabelStore:
    """The labels of a list of images: out of an archive (`tlt pack`), or of a tree of published files.

    Args: see `tlt.label_store.LabelStore`.

    Raises:
        UserError: Whatever can be known now about why the labels can't be used.
    """
    kind = LabelArchive if is_archive(path) else PublishedTree
    return kind(path, names, area, num_classes, bad_label, class_names, published_names)

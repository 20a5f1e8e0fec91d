"""Token labels from wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tlt.errors import UserError
from tlt.io.text import printable
from tlt.labels.archive import LabelArchive, is_archive
from tlt.labels.label_store import LabelStore
from tlt.labels.shard_labels import ShardLabels, shard_folder
from tlt.labels.store import PublishedTree


def open_labels(
    path: str | Path,
    names: Sequence[str],
    area: str | None = None,
    num_classes: int | None = None,
    bad_label: str = "stop",
    class_names: Sequence[str] | None = None,
    published_names: bool = False,
    label_tail: str = "zero",
    found: Callable[[str, int], None] | None = None,
) -> LabelStore:
    """The labels of a list of images: out of an archive (`tlt pack`), of shards (`tlt pack-images`), or of a tree of
    published files.

    Args: see `tlt.labels.label_store.LabelStore`, for `label_tail` `tlt.labels.recorded_labels`, for `found`
    `tlt.data.sources.folder_listing.list_folder`.

    Raises:
        UserError: Whatever can be known now about why the labels can't be used.
    """
    if is_archive(path):
        return LabelArchive(path, names, area, num_classes, bad_label, class_names, published_names, label_tail)
    if (shards := shard_folder(path)) is not None:
        return ShardLabels(shards, names, area, num_classes, bad_label, class_names, published_names, label_tail)
    if label_tail != "zero":
        raise UserError(
            f"--label-tail {label_tail}: {printable(str(path))} is no archive with log-sum-exp, as "
            "`generate_label.py --format archive` makes it"
        )
    return PublishedTree(path, names, area, num_classes, bad_label, class_names, published_names, found)

"""The images of a split, whatever kind of data set they are in: what every program calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from tlt.data.sources.dataset_kinds import TABLE, Kind, needs_folder, parse_kind
from tlt.data.sources.folder import find_split
from tlt.data.sources.shards import IndexedFiles, is_sharded, open_shards
from tlt.data.sources.size_index import open_folder
from tlt.data.sources.source import ImageSource
from tlt.errors import MissingSplit, UserError


def open_images(
    data: str | None,
    split: str,
    dataset: str = "",
    class_names: Sequence[str] | None = None,
    allow_root: bool = False,
    found: Callable[[str, int], None] | None = None,
    split_flag: str = "--split",
) -> ImageSource:
    """Find the images of a split.

    Args:
        data: Folder of the data set; None only where `tlt.data.sources.dataset_kinds.needs_folder` is false.
        split: Such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`); "": image folders or shards, whichever is there.
        class_names: Imposed class list; None: the data set's own.
        allow_root: Take `data` itself where no split of any name is in it.
        found: See `tlt.data.sources.folder_listing.list_folder`.
        split_flag: The program's flag that names the split.

    Raises:
        UserError: No such data set, an unknown kind, or it can't be used as it is; names the flag or file.
    """
    try:
        return _open(data, split, dataset, class_names, allow_root, found)
    except MissingSplit as error:
        held_out = "; --val-fraction 0.1 makes a split" if split_flag in ("--train-split", "--val-split") else ""
        raise UserError(f"{error} ({split_flag}){held_out}") from error


def _open(
    data: str | None,
    split: str,
    dataset: str,
    class_names: Sequence[str] | None,
    allow_root: bool,
    found: Callable[[str, int], None] | None,
) -> ImageSource:
    kind, name = parse_kind(dataset)
    if data is None and needs_folder(dataset):
        raise UserError("DATA is missing: the folder that holds the images")
    if kind and not TABLE[kind].indexed:
        images: ImageSource = _function(TABLE[kind])(name, data, split, class_names)
        return images
    assert data is not None
    if kind:
        return find_files(data, split, dataset).open(class_names)
    folder = find_split(data, split, allow_root)
    return open_shards(folder, class_names) if is_sharded(folder) else open_folder(folder, class_names, found)


def find_files(data: str, split: str, dataset: str) -> IndexedFiles:
    """The files of a split of a kind that is read through an index.

    Raises:
        UserError: They are not there, or `dataset` is of a kind that needs no index.
    """
    kind, name = parse_kind(dataset)
    row = TABLE.get(kind)
    if row is None or not row.indexed:
        raise UserError(f"--dataset {dataset}: its images are read without an index; nothing is to be made")
    files: IndexedFiles = _function(row)(name, data, split)
    return files


def _function(kind: Kind) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"tlt.data.sources.{kind.module}"), kind.function)
    return function

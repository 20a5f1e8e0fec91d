"""The images of a split, whatever kind of data set they are in: what every program calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

from tlt.data.sources.dataset_kinds import OPENERS, needs_folder, parse_kind
from tlt.data.sources.folder import find_split, scan_folder
from tlt.data.sources.source import Found, ImageSource, check_classes
from tlt.data.sources.tar_shards import PACKING, TABLE, open_shards
from tlt.errors import MissingSplit, UserError
from tlt.io.text import printable


def open_images(
    data: str | None,
    split: str,
    dataset: str = "",
    class_names: Sequence[str] | None = None,
    allow_root: bool = False,
    found: Found | None = None,
    split_flag: str = "--split",
    classes: bool = True,
) -> ImageSource:
    """Find the images of a split. Records in large files are read once, every byte of them, and their table is written
    beside them, where there is none yet (`tlt.data.sources.records`).

    Args:
        data: Folder of the data set; None only where `tlt.data.sources.dataset_kinds.needs_folder` is false.
        split: Such as `"train"` or `"validation"`.
        dataset: Kind of data set (`--dataset`); "": image folders or shards, whichever is there.
        class_names: Imposed class list; None: the data set's own.
        allow_root: Take `data` itself where no split of any name is in it.
        found: Called often, with what is done and how many images or files were found; None: lines are printed.
        split_flag: The program's flag that names the split.
        classes: False: images of folders may lie anywhere, and are of one class.

    Raises:
        UserError: No such data set, an unknown kind, or it can't be used as it is; names the flag or file.
    """
    kind, name = parse_kind(dataset)
    if data is None and needs_folder(dataset):
        raise UserError("DATA is missing: the folder that holds the images")
    try:
        if kind:
            module, _, function = OPENERS[kind].partition(".")
            opener = getattr(import_module(f"tlt.data.sources.{module}"), function)
            images: ImageSource = opener(name, data, split, found)
        else:
            folder = find_split(data or "", split, allow_root)
            images = open_shards(folder, found) if _is_sharded(folder) else scan_folder(folder, found, classes)
    except MissingSplit as error:
        held_out = "; --val-fraction 0.1 makes a split" if split_flag in ("--train-split", "--val-split") else ""
        raise UserError(f"{error} ({split_flag}){held_out}") from error
    check_classes(images.classes, images.class_names, printable(images.root))
    if class_names is not None:
        images.number_by(class_names)
    return images


def _is_sharded(folder: str) -> bool:
    """Whether a folder holds shards: with a table, or tar files and no folder. Raises UserError: not all of them."""
    try:
        with os.scandir(folder) as entries:
            folders = {entry.name: entry.is_dir() for entry in entries}
    except OSError:  # which scan_folder tells
        return False
    if f"{TABLE}.json" in folders:
        return True
    if PACKING in folders:
        raise UserError(f"shards in {printable(folder)} are not complete: run `tlt pack-images` again")
    return not any(folders.values()) and any(name.endswith(".tar") and name[0] != "." for name in folders)

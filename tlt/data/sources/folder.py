"""Class folders: which images there are, which class each has, and in which order.

The class of an image is the name of the folder that holds it, as in timm. Classes and images are in natural order
(`n2` before `n10`), as in timm. What timm drops without a word (unreadable folders, empty classes, other suffixes, two
folders of one name) is an error or a warning here, because each of them can shift every label.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from tlt.data.sources.folder_listing import list_folder
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, read_file
from tlt.data.sources.source import Found, ImageSource
from tlt.errors import MissingSplit, UserError
from tlt.io.natural import natural_sorted
from tlt.io.text import printable, some_names

TRAIN_SPLITS = ("train", "training")
VALIDATION_SPLITS = ("val", "valid", "validation", "eval", "evaluation")


class ImageFolder(ImageSource):
    """What `scan_folder` found; `paths` are relative to `root`, in natural order."""

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        return read_file(self.path(index), max_pixels)


def scan_folder(root: str | os.PathLike[str], found: Found | None = None) -> ImageFolder:
    """Find all images under `root`, a folder of class folders, at any depth. The classes are the folders found, in
    natural order, those without images included.

    Raises:
        UserError: Missing or unreadable folder, no images, two class folders of one name.
    """
    listing = list_folder(root, found)
    shown, folders = printable(listing.root), dict[str, str]()
    for folder in listing.leaves:
        first = folders.setdefault(os.path.basename(folder), folder)
        if first != folder:
            raise UserError(
                f"two class folders named {printable(os.path.basename(folder))!r} in {shown}: {printable(first)} and "
                f"{printable(folder)}; the folder's own name is the class, so give each its own"
            )
    names = natural_sorted(folders)
    index = {name: number for number, name in enumerate(names)}
    if not len(listing.names):
        notes = "".join(f"; {line}" for line in listing.warnings)
        raise UserError(
            f"no images in the class folders of {shown} (expected {shown}/CLASS/IMAGE.jpg or another format that "
            f"Pillow reads){notes}"
        )
    classes = np.array([index[os.path.basename(folder)] for folder in listing.leaves], np.int64)[listing.leaf]
    warnings = [*listing.warnings]
    if empty := [names[number] for number in np.flatnonzero(np.bincount(classes, minlength=len(names)) == 0)]:
        warnings.append(f"{shown}: {len(empty)} classes without images keep their number: {some_names(empty)}")
    return ImageFolder(listing.root, listing.names, classes, names, list(folders), warnings)


def split_names(split: str) -> list[str]:
    """The names under which a split is searched: its own, then timm's synonyms of it."""
    synonyms = [name for names in (TRAIN_SPLITS, VALIDATION_SPLITS) if split in names for name in names]
    return [split, *(name for name in synonyms if name != split)]


def find_split(data_dir: str | os.PathLike[str], split: str, allow_root: bool = False) -> str:
    """Folder of a split under `data_dir`: its own name first, then timm's synonyms of it.

    Args:
        data_dir: Folder that holds the splits.
        split: Such as `"train"` or `"validation"`.
        allow_root: Take `data_dir` itself where no split of any name is in it (a program that reads one split only).

    Raises:
        UserError: No such folder; the message shows what was searched. timm takes `data_dir` itself then, which makes
            a run without validation folder validate on the training images.
    """
    data_dir = os.fspath(data_dir)
    if not os.path.isdir(data_dir):
        raise UserError(f"data folder {printable(data_dir)} does not exist or is not a folder")
    searched = split_names(split)
    for name in searched:
        if os.path.isdir(os.path.join(data_dir, name)):
            return os.path.join(data_dir, name)
    any_split = any(os.path.isdir(os.path.join(data_dir, name)) for name in TRAIN_SPLITS + VALIDATION_SPLITS)
    if allow_root and not any_split:
        return data_dir
    raise MissingSplit(
        f"no {printable(split)!r} folder in {printable(data_dir)} (searched {', '.join(map(printable, searched))}; "
        f"it holds {some_names(sorted(os.listdir(data_dir)))}): make it, or name another split"
    )


def compare_classes(train: ImageSource, val: ImageSource) -> None:
    """Check that both splits have the same class folders; one that is empty in training need not be in `val`.

    Raises:
        UserError: A class is in one of them only; names both lists.
    """
    trained = [train.class_names[index] for index in np.unique(train.classes).tolist()]
    known, validated = set(train.class_names), set(val.folder_names)
    only_train = [name for name in trained if name not in validated]
    only_val = [name for name in val.folder_names if name not in known]
    if only_train or only_val:
        raise UserError(
            f"classes differ: {len(only_train)} in {printable(train.root)} only ({some_names(only_train)}), "
            f"{len(only_val)} in {printable(val.root)} only ({some_names(only_val)}): "
            "make the missing folders (they may be empty) or remove the others"
        )


def check_num_classes(folder: ImageSource, num_classes: int) -> list[str]:
    """Compare `--num-classes` with the folders.

    Returns:
        Warnings: the model has more classes than there are folders.

    Raises:
        UserError: Fewer, so that labels would be out of range.
    """
    found = len(folder.class_names)
    if num_classes < found:
        raise UserError(
            f"--num-classes {num_classes}, but {printable(folder.root)} has {found} class folders: give {found}"
        )
    if num_classes > found:
        return [f"--num-classes {num_classes}, but {printable(folder.root)} has {found} class folders only"]
    return []


def read_class_map(path: str | os.PathLike[str]) -> list[str]:
    """Class list from a text file (`--class-map`): one folder name per line, the line's number is the class index.

    Raises:
        UserError: Not readable, empty, or a name twice.
    """
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            names = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"class map {printable(path)} can't be read as a text file of class names: {error}") from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        problem = f"names {some_names(twice)} more than once" if twice else "is empty"
        raise UserError(f"class map {printable(path)} {problem}: give one class folder per line")
    return names

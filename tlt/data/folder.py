"""Class folders: which images there are, which class each has, and in which order.

The class of an image is the name of the folder that holds it, as in timm. Classes and images are in natural order
(`n2` before `n10`), as in timm. What timm drops without a word (unreadable folders, empty classes, other suffixes, two
folders of one name) is an error or a warning here, because each of them can shift every label.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tlt.data.image_file import DEFAULT_MAX_PIXELS, image_extensions, read_file, read_file_size
from tlt.data.source import ImageSource
from tlt.errors import UserError
from tlt.names import Names

TRAIN_SPLITS = ("train", "training")
VALIDATION_SPLITS = ("val", "valid", "validation", "eval", "evaluation")
_NAMES_SHOWN = 5


class ImageFolder(ImageSource):
    """What `scan_folder` found; `paths` are relative to `root`, in natural order."""

    def read(self, index: int) -> bytearray:
        return read_file(self.path(index))

    def read_size(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
        return read_file_size(self.path(index), max_pixels)


def natural_key(name: str) -> list[str | int]:
    """Sort key that compares runs of digits as numbers and ignores case (timm's order)."""
    parts: list[str | int] = list(re.split(r"(\d+)", name.lower()))
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts


def printable(name: str) -> str:
    """The name on one line and safe for any terminal: line breaks and bytes that are not UTF-8 are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def scan_folder(root: str | os.PathLike[str], class_names: Sequence[str] | None = None) -> ImageFolder:
    """Find all images under `root`.

    Args:
        root: Folder of class folders, at any depth.
        class_names: Imposed class list (the training set's, or a class map's); None: the folders found, in natural
            order, those without images included.

    Raises:
        UserError: Missing or unreadable folder, no images, two class folders of one name, a folder that is not in
            `class_names`.
    """
    walk = _Walk(os.fspath(root))
    walk.run()
    folders = _class_folders(walk)
    names = sorted(folders, key=lambda name: (natural_key(name), name)) if class_names is None else list(class_names)
    _refuse_unknown(walk.root, folders, names)
    if not walk.images:
        raise UserError(_nothing_found(walk))
    index = {name: i for i, name in enumerate(names)}
    rows = [(os.path.join(folder, file), index[_leaf(folder)]) for folder, file in walk.images]
    rows.sort(key=lambda row: (natural_key(row[0]), row[0]))
    classes = np.array([row[1] for row in rows], dtype=np.int64)
    warnings = walk.warnings() + _empty_classes(walk.root, names, folders, classes)
    return ImageFolder(walk.root, Names(row[0] for row in rows), classes, names, list(folders), warnings)


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
    raise UserError(
        f"no {printable(split)!r} folder in {printable(data_dir)} (searched {', '.join(map(printable, searched))}; "
        f"it holds {_shown(sorted(os.listdir(data_dir)))}): make it, or name it with --train-split or --val-split"
    )


def compare_classes(train: ImageSource, val: ImageSource) -> None:
    """Check that both splits have the same class folders; one that is empty in training need not be in `val`.

    Raises:
        UserError: A class is in one of them only; names both lists.
    """
    trained = {train.class_names[index] for index in np.unique(train.classes)}
    only_train = [name for name in train.class_names if name in trained - set(val.folder_names)]
    only_val = [name for name in val.folder_names if name not in set(train.class_names)]
    if only_train or only_val:
        raise UserError(
            f"classes differ: {len(only_train)} in {printable(train.root)} only ({_shown(only_train)}), "
            f"{len(only_val)} in {printable(val.root)} only ({_shown(only_val)}): "
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
        problem = f"names {_shown(twice)} more than once" if twice else "is empty"
        raise UserError(f"class map {printable(path)} {problem}: give one class folder per line")
    return names


class _Walk:
    """One pass over the folders. Images are (folder relative to root, file name)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.extensions = image_extensions()
        self.images: list[tuple[str, str]] = []
        self.leaves: list[str] = []  # folders with images, or without any folder in them
        self.visited: dict[tuple[int, int], str] = {}
        self.other: Counter[str] = Counter()
        self.other_example = ""
        self.hidden: list[str] = []
        self.repeated: list[str] = []
        self.irregular: list[str] = []
        self.stray: list[str] = []

    def run(self) -> None:
        if not os.path.isdir(self.root):
            raise UserError(f"image folder {printable(self.root)} does not exist or is not a folder")
        self._seen("", "")
        pending = [""]
        while pending:
            pending.extend(self._visit(pending.pop()))

    def _visit(self, folder: str) -> list[str]:
        """Sort the entries of one folder; returns its folders that are to be visited, last one first."""
        path = os.path.join(self.root, folder)
        before = len(self.images)
        try:
            with os.scandir(path) as entries:
                subfolders = self._sort(folder, sorted(entries, key=lambda entry: entry.name))
        except OSError as error:
            raise UserError(
                f"{printable(error.filename or path)} can't be read ({error.strerror}): mend its permissions or the "
                "link; leaving it out would change the class numbers"
            ) from error
        if folder and (len(self.images) > before or not subfolders):
            self.leaves.append(folder)
        return subfolders[::-1]

    def _sort(self, folder: str, entries: list[os.DirEntry[str]]) -> list[str]:
        subfolders: list[os.DirEntry[str]] = []
        for entry in entries:
            if entry.name.startswith("."):
                self.hidden.append(os.path.join(folder, entry.name))
            elif entry.is_dir():
                subfolders.append(entry)
            else:
                self._file(folder, entry)
        # Folders before links to folders, so that of two ways to one place the real one names the class.
        unseen = [e.name for e in sorted(subfolders, key=os.DirEntry.is_symlink) if not self._seen(folder, e.name)]
        return [os.path.join(folder, name) for name in sorted(unseen)]

    def _file(self, folder: str, entry: os.DirEntry[str]) -> None:
        relative = os.path.join(folder, entry.name)
        extension = os.path.splitext(entry.name)[1].lower()
        if extension not in self.extensions:
            entry.stat()  # raises for a dangling link: it may have been a class folder
            self.other[extension] += 1
            self.other_example = self.other_example or relative
        elif not entry.is_file():
            self.irregular.append(relative)
        elif not folder:
            self.stray.append(relative)
        else:
            self.images.append((folder, entry.name))

    def _seen(self, folder: str, name: str) -> bool:
        """Whether this folder (by device and inode) was met before: a link to it would count its images twice."""
        relative = os.path.join(folder, name)
        info = os.stat(os.path.join(self.root, relative))
        first = self.visited.setdefault((info.st_dev, info.st_ino), relative)
        if first != relative:
            self.repeated.append(relative)
        return first != relative

    def warnings(self) -> list[str]:
        """What was left out, one line for each reason."""
        suffixes = ", ".join(f"{printable(suffix) or 'no suffix'} {n}" for suffix, n in self.other.most_common())
        other = f"{sum(self.other.values())} files that are not images by their suffix ({suffixes}), such as "
        said = [
            (self.other, other + printable(self.other_example)),
            (self.hidden, f"{len(self.hidden)} hidden entries: {_shown(self.hidden)}"),
            (self.repeated, f"{len(self.repeated)} links to folders already read: {_shown(self.repeated)}"),
            (self.irregular, f"{len(self.irregular)} pipes or dangling links: {_shown(self.irregular)}"),
            (self.stray, f"{len(self.stray)} images outside of any class folder: {_shown(self.stray)}"),
        ]
        return [f"{printable(self.root)}: left out {text}" for there, text in said if there]


def _leaf(folder: str) -> str:
    return os.path.basename(folder)


def _class_folders(walk: _Walk) -> dict[str, str]:
    """Class name -> its folder, each name once."""
    folders: dict[str, str] = {}
    for folder in walk.leaves:
        first = folders.setdefault(_leaf(folder), folder)
        if first != folder:
            raise UserError(
                f"two class folders named {printable(_leaf(folder))!r} in {printable(walk.root)}: {printable(first)} "
                f"and {printable(folder)}; the folder's own name is the class, so give each its own"
            )
    return folders


def _refuse_unknown(root: str, folders: Iterable[str], names: Iterable[str]) -> None:
    known = set(names)
    unknown = [folder for folder in folders if folder not in known]
    if unknown:
        raise UserError(
            f"{printable(root)} has {len(unknown)} class folders that are not in the class list of the training set "
            f"or class map: {_shown(unknown)}"
        )


def _nothing_found(walk: _Walk) -> str:
    notes = "; ".join(walk.warnings())
    return (
        f"no images in the class folders of {printable(walk.root)} (expected {printable(walk.root)}/CLASS/IMAGE.jpg "
        f"or another format that Pillow reads){': ' + notes if notes else ''}"
    )


def _empty_classes(root: str, names: list[str], folders: dict[str, str], classes: np.ndarray) -> list[str]:
    counts = np.bincount(classes, minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if count == 0]
    if not empty:
        return []
    numbers = ", ".join(f"{printable(name)!r} (class {names.index(name)})" for name in empty[:_NAMES_SHOWN])
    more = f" and {len(empty) - _NAMES_SHOWN} more" if len(empty) > _NAMES_SHOWN else ""
    return [f"{printable(root)}: {len(empty)} classes without images keep their number: {numbers}{more}"]


def _shown(names: Sequence[str]) -> str:
    """The first few names of a list for a message."""
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(repr(printable(name)) if " " in name else printable(name) for name in names[:_NAMES_SHOWN]) + more

"""The images in a tree of folders, in natural order of their paths, found in one pass."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tlt.data.sources.image_file import image_extensions
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.io.progress import SearchProgress
from tlt.io.text import printable, some_names


@dataclass(frozen=True)
class FolderListing:
    """The images below `root`.

    Attributes:
        names: (N,) `CLASS/FILE` relative to `root`, in natural order of the whole text.
        leaf: (N,) which of `leaves` holds the image.
        leaves: Folders with images, or without any folder in them.
        warnings: What was left out, one line for each reason.
    """

    root: str
    names: Names
    leaf: np.ndarray
    leaves: list[str]
    warnings: list[str]


def list_folder(
    root: str | os.PathLike[str], found: Callable[[str, int], None] | None = None, classes: bool = True
) -> FolderListing:
    """Find all images below `root`.

    Args:
        found: Called often, with what is done and how many images were found; None: lines are printed if it takes long.
        classes: Folders are classes, so that images in `root` itself belong to none and are left out.

    Raises:
        UserError: A missing or unreadable folder.
    """
    walk = _Walk(os.fspath(root), found or SearchProgress(), classes)
    walk.run()
    leaves = walk.leaves()
    number = {folder: row for row, folder in enumerate(leaves)}
    paths: list[str] = []  # of a folder each
    leaf: list[np.ndarray] = [np.empty(0, np.int64)]
    for folder, names in _in_natural_order(walk.images):
        prefix = os.path.join(folder, "")
        paths.append(prefix + f"\0{prefix}".join(names))
        leaf.append(np.full(len(names), number[folder]))
    return FolderListing(walk.root, Names(paths), np.concatenate(leaf), leaves, walk.warnings())


def _in_natural_order(images: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Folders with the names of their files, in natural order of the paths, equal ones by themselves."""
    prefixes = {folder: natural_key(os.path.join(folder, "")) for folder in images}
    ranges = []  # first and last key of each folder
    for folder in sorted(images, key=lambda folder: (prefixes[folder], folder)):
        names = sorted(images[folder])
        keys = dict(zip(names, natural_key("/".join(names)).split("/"), strict=True))
        images[folder] = sorted(names, key=keys.__getitem__)
        ranges.append([folder, *(prefixes[folder] + keys[images[folder][row]] for row in (0, -1))])
    if all(one[2] < other[1] for one, other in pairwise(ranges)):
        yield from ((folder, images[folder]) for folder, _, _ in ranges)
        return
    # Files of some folders lie between those of others, as of `a` and `a/b`, `n1` and `N01`: each file for itself.
    paths = [os.path.join(folder, name) for folder, names in images.items() for name in names]
    for _, path in sorted((natural_key(path), path) for path in paths):
        folder, name = os.path.split(path)
        yield folder, [name]


class _Walk:
    """One pass over the folders, which are relative to root."""

    def __init__(self, root: str, found: Callable[[str, int], None], classes: bool) -> None:
        self.root, self.found, self.classes, self.count = root, found, classes, 0
        self.extensions = image_extensions()
        self.listing = f"listing {printable(root)}"
        self.images: dict[str, list[str]] = {}  # by folder
        self.folders: list[str] = []
        self.links: list[str] = []  # to folders
        self.other: Counter[str] = Counter()  # by suffix
        self.other_example = ""
        self.hidden: list[str] = []
        self.repeated: list[str] = []
        self.irregular: list[str] = []
        self.stray: list[str] = []

    def run(self) -> None:
        """Visit all folders, then those that links lead to, so that of two ways to one folder the real one counts."""
        if not os.path.isdir(self.root):
            raise UserError(f"image folder {printable(self.root)} does not exist or is not a folder")
        pending = [""]
        while pending:
            pending += self._visit(pending.pop())
        seen = {self._identity(folder) for folder in self.folders if self.links}
        while self.links:
            pending = [self.links.pop(0)]
            while pending:
                folder = pending.pop()
                if (identity := self._identity(folder)) in seen:
                    self.repeated.append(folder)
                else:
                    seen.add(identity)
                    pending += self._visit(folder)

    def leaves(self) -> list[str]:
        """The folders with images, or without any folder in them."""
        parents = {os.path.dirname(folder) for folder in self.folders if folder}
        leaves = [folder for folder in self.folders if folder in self.images or folder not in parents]
        return [folder for folder in leaves if folder or not self.classes]

    def _identity(self, folder: str) -> tuple[int, int]:
        info = os.stat(os.path.join(self.root, folder))
        return info.st_dev, info.st_ino

    def _visit(self, folder: str) -> list[str]:
        """Take the entries of one folder; returns its folders that are to be visited, last one first."""
        self.folders.append(folder)
        path = os.path.join(self.root, folder)
        try:
            with os.scandir(path) as entries:
                images, others = self._images(entries)
            subfolders = [entry for entry in others if self._is_folder(folder, entry)]
        except OSError as error:
            where = printable(error.filename or path)
            raise UserError(
                f"{where} can't be read ({error.strerror}): mend its permissions or the link"
                + ("; leaving it out would change the class numbers" if self.classes else "")
            ) from error
        if self.classes and not folder:
            self.stray = sorted(images)
        elif images:
            self.images[folder] = images
            self.count += len(images)
        self.found(self.listing, self.count)
        self.links += [os.path.join(folder, entry.name) for entry in subfolders if entry.is_symlink()]
        return [os.path.join(folder, entry.name) for entry in subfolders[::-1] if not entry.is_symlink()]

    def _images(self, entries: Iterator[os.DirEntry[str]]) -> tuple[list[str], list[os.DirEntry[str]]]:
        """The names of images, and all other entries in order."""
        images, others = [], []
        for entry in entries:
            name = entry.name
            if name[name.rfind(".") :].lower() in self.extensions and name[0] != "." and entry.is_file():
                images.append(name)
            else:
                others.append(entry)
        return images, sorted(others, key=lambda entry: entry.name)

    def _is_folder(self, folder: str, entry: os.DirEntry[str]) -> bool:
        """Whether an entry that is no image is a folder to visit; notes what else it is."""
        path, suffix = os.path.join(folder, entry.name), os.path.splitext(entry.name)[1].lower()
        if entry.name.startswith("."):
            self.hidden.append(path)
        elif entry.is_dir():
            return True
        elif suffix in self.extensions:
            self.irregular.append(path)
        else:
            entry.stat()  # raises for a dangling link: it may have been a class folder
            self.other[suffix] += 1
            self.other_example = self.other_example or path
        return False

    def warnings(self) -> list[str]:
        """What was left out, one line for each reason."""
        suffixes = ", ".join(f"{printable(suffix) or 'no suffix'} {n}" for suffix, n in self.other.most_common())
        other = f"{sum(self.other.values())} files that are not images by their suffix ({suffixes}), such as "
        said = [
            (self.other, other + printable(self.other_example)),
            (self.hidden, f"{len(self.hidden)} hidden entries: {some_names(self.hidden)}"),
            (self.repeated, f"{len(self.repeated)} links to folders already read: {some_names(self.repeated)}"),
            (self.irregular, f"{len(self.irregular)} pipes or dangling links: {some_names(self.irregular)}"),
            (self.stray, f"{len(self.stray)} images outside of any class folder: {some_names(self.stray)}"),
        ]
        return [f"{printable(self.root)}: left out {text}" for there, text in said if there]

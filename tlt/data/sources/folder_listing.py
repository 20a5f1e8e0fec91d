"""The images in a tree of folders, in natural order of their paths, found in one pass."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tlt.data.sources.image_file import image_extensions
from tlt.data.sources.source import Found, left_out_lines
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.io.progress import SearchProgress
from tlt.io.text import printable

_HIDDEN = re.compile(r"(^|/)\.")


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


def list_folder(root: str | os.PathLike[str], found: Found | None = None, classes: bool = True) -> FolderListing:
    """Find all images below `root`.

    Args:
        found: None: lines are printed if it takes long.
        classes: Folders are classes, so that images in `root` itself belong to none and are left out.

    Raises:
        UserError: A missing or unreadable folder.
    """
    walk = _Walk(os.fspath(root), found or SearchProgress(), classes)
    names = Names(walk.run())
    leaf = np.repeat(np.array(walk.leaf, np.int64), walk.counts)
    return FolderListing(
        walk.root,
        names,
        leaf,
        walk.leaves,
        [f"{printable(walk.root)}: {line}" for line in left_out_lines(walk.left_out)],
    )


class _Walk:
    """One pass over the folders, which are relative to `root`.

    Attributes:
        leaves: Folders that hold images, or no folder.
        left_out: What is not read, by kind.
        leaf, counts: For each run of images in one folder: which of `leaves` it is, and how many they are.
    """

    def __init__(self, root: str, found: Found, classes: bool) -> None:
        self.root, self.found, self.classes = root, found, classes
        self.extensions, self.listing = image_extensions(), f"listing {printable(root)}"
        self.leaves: list[str] = []
        self.leaf: list[int] = []
        self.counts: list[int] = []
        self._real_root = os.path.realpath(root)
        self._linked: set[str] = set()  # real paths of the folders that were reached through links
        self._total = 0
        self.left_out = defaultdict[str, list[str]](list)

    def run(self) -> Iterator[str]:
        """The paths of the images in natural order, several in one text with NUL between them."""
        if not os.path.isdir(self.root):
            raise UserError(f"image folder {printable(self.root)} does not exist or is not a folder")
        yield from self._visit("", linked=False)

    def _visit(self, folder: str, linked: bool) -> Iterator[str]:
        images, links = self._entries(folder)
        if self.classes and not folder:
            self.left_out["images outside of any class folder"] += images
            images = []
        folders = {}  # name -> whether it was reached through a link
        for name, is_link in sorted(links.items()):
            path, through_link = os.path.join(folder, name), linked or is_link
            if through_link and self._is_read_elsewhere(path):
                self.left_out["links to folders already read"].append(path)
            else:
                folders[name] = through_link
        leaf = len(self.leaves)
        if (images or not folders) and (folder or not self.classes):
            self.leaves.append(folder)
        self._total += len(images)
        self.found(self.listing, self._total)
        prefix, run = os.path.join(folder, ""), list[str]()
        for name in _natural_order(images, folders):
            if name not in folders:
                run.append(name)
                continue
            if run:
                yield self._taken(leaf, prefix, run)
                run = []
            yield from self._visit(prefix + name, folders[name])
        if run:
            yield self._taken(leaf, prefix, run)

    def _taken(self, leaf: int, prefix: str, names: list[str]) -> str:
        self.leaf.append(leaf)
        self.counts.append(len(names))
        return prefix + f"\0{prefix}".join(names)

    def _entries(self, folder: str) -> tuple[list[str], dict[str, bool]]:
        """The names of the images in a folder, and of its folders with whether they are links."""
        path = os.path.join(self.root, folder)
        images, links = [], {}
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[name.rfind(".") :].lower() in self.extensions and name[0] != "." and entry.is_file():
                        images.append(name)
                    elif self._is_folder(folder, entry):
                        links[name] = entry.is_symlink()
            return images, links
        except OSError as error:
            where = printable(error.filename or path)
            raise UserError(
                f"{where} can't be read ({error.strerror}): mend its permissions or the link"
                + ("; leaving it out would change the class numbers" if self.classes else "")
            ) from error

    def _is_folder(self, folder: str, entry: os.DirEntry[str]) -> bool:
        """Whether an entry that is no image is a folder to visit; notes what else it is."""
        path = os.path.join(folder, entry.name)
        if entry.name.startswith("."):
            self.left_out["hidden entries"].append(path)
        elif entry.is_dir():
            return True
        elif os.path.splitext(entry.name)[1].lower() in self.extensions:
            self.left_out["pipes or dangling links"].append(path)
        else:
            entry.stat()  # raises for a dangling link: it may have been a class folder
            self.left_out["files that are not images by their suffix"].append(path)
        return False

    def _is_read_elsewhere(self, folder: str) -> bool:
        """Whether a folder that was reached through a link is read where it really is, or through another link."""
        real = os.path.realpath(os.path.join(self.root, folder))
        below = os.path.relpath(real, self._real_root)
        if below == os.curdir or not _HIDDEN.search(below) or real in self._linked:
            return True
        self._linked.add(real)
        return False


def _natural_order(images: list[str], folders: dict[str, bool]) -> list[str]:
    """The names in natural order, equal ones by themselves; those of folders as if a slash followed."""
    names = sorted([*images, *folders])
    keys = dict(zip(names, natural_key("/".join(names)).split("/"), strict=bool(names)))
    for name in folders:
        keys[name] += "/"
    return sorted(names, key=keys.__getitem__)

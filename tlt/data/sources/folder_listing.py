"""What lies in class folders: the names of all images in natural order, found in one pass."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tlt.data.sources.image_file import image_extensions
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key, natural_sorted
from tlt.io.progress import SearchProgress
from tlt.io.text import printable, some_names

_USUAL = ("jpeg", "jpg", "png", "webp")  # looked for first
_SORTED_AT_ONCE = 4096  # names, of folders that may have few each
_SETTLED_NS = 2_000_000_000  # a folder that changed less than this before it was read may change again unnoticed


@dataclass(frozen=True)
class FolderListing:
    """The images below `root`, and when the folders were last changed.

    Attributes:
        names: (N,) `CLASS/FILE` relative to `root`, in natural order of the whole text.
        leaf: (N,) uint32, which of `leaves` holds the image.
        leaves: Folders with images, or without any folder in them.
        warnings: What was left out, one line for each reason.
        visited: All folders that were read, `root` ("") first.
        changed: Their times of change in ns since 1970; 0: not known well enough.
    """

    root: str
    names: Names
    leaf: np.ndarray
    leaves: list[str]
    warnings: list[str]
    visited: list[str]
    changed: np.ndarray

    def unchanged(self) -> bool:
        """Whether no folder has got, lost or renamed an entry since it was read."""
        if not self.changed.all():
            return False
        try:
            pairs = zip(self.visited, self.changed.tolist(), strict=True)
            return all(os.stat(os.path.join(self.root, folder)).st_mtime_ns == then for folder, then in pairs)
        except OSError:
            return False


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
    number = {folder: row for row, folder in enumerate(walk.leaves)}
    blocks: list[bytes] = []
    lengths: list[int] = []
    leaf: list[np.ndarray] = []
    for folder, names in _in_order(walk.images):
        prefix = os.fsencode(os.path.join(folder, ""))
        blocks.append(prefix + prefix.join(names))
        lengths.extend(len(prefix) + len(name) for name in names)
        leaf.append(np.full(len(names), number[folder], np.uint32))
    return FolderListing(
        walk.root,
        Names.packed(b"".join(blocks), np.cumsum(lengths, dtype=np.int64)),
        np.concatenate([np.empty(0, np.uint32), *leaf]),
        walk.leaves,
        walk.warnings(),
        list(walk.changed),
        np.array(list(walk.changed.values()), np.int64),
    )


def _in_order(images: dict[str, list[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Folders with names of their images, which they give up, in natural order of the paths."""
    waiting: list[str] = []
    for group in _intertwined(sorted(images, key=_folder_key)):
        if len(group) == 1:
            waiting += group
            if sum(len(images[folder]) for folder in waiting) < _SORTED_AT_ONCE:
                continue
        yield from _each_in_order(waiting, images)
        waiting = []
        if len(group) > 1:
            paths = [(os.path.join(folder, os.fsdecode(name)), folder) for folder in group for name in images[folder]]
            for path, folder in sorted(paths, key=lambda pair: (natural_key(pair[0]), pair[0])):
                yield folder, [os.fsencode(os.path.basename(path))]
    yield from _each_in_order(waiting, images)


def _each_in_order(folders: list[str], images: dict[str, list[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    return zip(folders, natural_sorted([images.pop(folder) for folder in folders]), strict=True)


def _folder_key(folder: str) -> list[str | int]:
    return natural_key(os.path.join(folder, ""))


def _intertwined(folders: list[str]) -> Iterator[list[str]]:
    """Groups of folders, given in order: only the names of files decide how the images of a group follow each other,
    because the key of its first folder begins the keys of all (`a` and `a/b`, `n1` and `N01`)."""
    group: list[str] = []
    first: list[str | int] = []
    for folder in folders:
        key = _folder_key(folder)
        end = len(first) - 1
        if not group or key[:end] != first[:end] or len(key) <= end or not str(key[end]).startswith(str(first[end])):
            if group:
                yield group
            group, first = [], key
        group.append(folder)
    if group:
        yield group


class _Walk:
    """One pass over the folders, which are relative to root."""

    def __init__(self, root: str, found: Callable[[str, int], None], classes: bool) -> None:
        self.root, self.found, self.classes, self.count = root, found, classes, 0
        self.extensions = image_extensions()
        usual = sorted(self.extensions, key=lambda suffix: suffix[1:] not in _USUAL)
        self.endings = tuple(os.fsencode(each) for suffix in usual for each in (suffix, suffix.upper()))
        self.images: dict[str, list[bytes]] = {}
        self.leaves: list[str] = []
        self.changed: dict[str, int] = {}  # by folder
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
        try:
            with os.scandir(os.fsencode(path)) as scanned:
                entries = list(scanned)
            subfolders = self._sort(folder, entries)
        except OSError as error:
            where = printable(os.fsdecode(error.filename or path))
            raise UserError(
                f"{where} can't be read ({error.strerror}): mend its permissions or the link"
                + ("; leaving it out would change the class numbers" if self.classes else "")
            ) from error
        self.found(f"listing {printable(self.root)}", self.count)
        if (folder or not self.classes) and (folder in self.images or not subfolders):
            self.leaves.append(folder)
        return subfolders[::-1]

    def _sort(self, folder: str, entries: list[os.DirEntry[bytes]]) -> list[str]:
        endings, dot, images = self.endings, ord("."), list[bytes]()
        if folder or not self.classes:
            images = [entry.name for entry in entries if entry.name.endswith(endings) and entry.is_file()]
            images = [name for name in images if name[0] != dot]
        subfolders = []
        if len(images) < len(entries):
            taken = set(images)
            for entry in sorted((e for e in entries if e.name not in taken), key=lambda entry: entry.name):
                name = os.fsdecode(entry.name)
                if name.startswith("."):
                    self.hidden.append(os.path.join(folder, name))
                elif entry.is_dir():
                    subfolders.append(entry)
                elif self._is_image(folder, name, entry):
                    images.append(entry.name)
        if images:
            self.images[folder] = images
            self.count += len(images)
        # Folders before links to folders, so that of two ways to one place the real one names the class.
        ordered = [os.fsdecode(entry.name) for entry in sorted(subfolders, key=os.DirEntry.is_symlink)]
        return [os.path.join(folder, name) for name in sorted(name for name in ordered if not self._seen(folder, name))]

    def _is_image(self, folder: str, name: str, entry: os.DirEntry[bytes]) -> bool:
        relative = os.path.join(folder, name)
        extension = os.path.splitext(name)[1].lower()
        if extension not in self.extensions:
            entry.stat()  # raises for a dangling link: it may have been a class folder
            self.other[extension] += 1
            self.other_example = self.other_example or relative
        elif not entry.is_file():
            self.irregular.append(relative)
        elif self.classes and not folder:
            self.stray.append(relative)
        else:
            return True
        return False

    def _seen(self, folder: str, name: str) -> bool:
        """Whether this folder (by device and inode) was met before: a link to it would count its images twice."""
        relative = os.path.join(folder, name)
        info = os.stat(os.path.join(self.root, relative))
        first = self.visited.setdefault((info.st_dev, info.st_ino), relative)
        if first != relative:
            self.repeated.append(relative)
            return True
        settled = time.time_ns() - info.st_mtime_ns > _SETTLED_NS
        self.changed[relative] = info.st_mtime_ns if settled else 0
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

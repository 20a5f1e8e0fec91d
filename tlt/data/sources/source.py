"""Where encoded images come from: a list of images with classes, whose bytes can be had in any order.

Order, shards and workers are not a source's business: the index stream asks for image i, whatever holds it. Sources
are image folders (`folder.py`), computed images (`synthetic.py`), tar shards, TFRecords and others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, check_size, read_size
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.text import printable

Source = TypeVar("Source", bound="ImageSource")


@dataclass(frozen=True)
class ImageSource:
    """N images with names and classes.

    A source is shared with worker processes: what it holds must be picklable, and small or memory-mapped. It may keep
    files open (`os.pread` only: processes and threads share the position).

    Attributes:
        root: Where the images are, for messages.
        paths: (N,) Name of each image, `CLASS/FILE` with slashes: what labels, logs and checkpoints know it by.
        classes: (N,) int64, class index of each image.
        class_names: Name of every class index; with an imposed list also classes without images.
        folder_names: The classes that are there (a folder may be empty).
        warnings: One line each, for rank 0 to print once.
        sizes: (N, 2) uint16 width and height of each image where they are known without reading it (0, 0: it can't be
            read), else None.
        faults: Why images of size (0, 0) can't be read, by index, where that is known.
    """

    root: str
    paths: Sequence[str]
    classes: np.ndarray
    class_names: list[str]
    folder_names: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sizes: np.ndarray | None = None
    faults: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.classes)

    def path(self, index: int) -> str:
        """Where image `index` is, for messages; a source of files gives what `open` takes."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        """The encoded image `index`. Raises `tlt.data.sources.image_file.BadImage`: it can't be read, or it has more
        bytes than an image of `max_pixels` can have."""
        raise NotImplementedError

    def known_size(self, index: int) -> tuple[int, int] | None:
        """Width and height of image `index` where they are known without reading it."""
        return None if self.sizes is None else (int(self.sizes[index, 0]), int(self.sizes[index, 1]))

    def size(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
        """Width and height of image `index`. Raises `image_file.BadImage`, also where it has more pixels."""
        known = self.known_size(index)
        return self.read_size(index, max_pixels) if known is None else check_size(*known, max_pixels)

    def read_size(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
        """The size that the header of image `index` states. Raises as `size`."""
        return read_size(self.read(index, max_pixels), max_pixels)

    def unreadable(self, max_pixels: int = DEFAULT_MAX_PIXELS) -> dict[str, str]:
        """Path and reason of the images that are known to be unreadable, or to have more than `max_pixels`."""
        if self.sizes is None:
            return {}
        pixels = self.sizes.astype(np.int64).prod(axis=1)
        found = {}
        for row in np.flatnonzero((pixels == 0) | (pixels > max_pixels)).tolist():
            try:
                self.size(row, max_pixels)
            except BadImage as error:
                found[self.path(row)] = f"{self.faults[row]} (tlt index)" if row in self.faults else str(error)
        return found

    def select(self: Source, rows: Sequence[int] | np.ndarray) -> Source:
        """The images `rows` in that order, as a source of their own."""
        rows = np.asarray(rows, np.int64)
        sizes = None if self.sizes is None else self.sizes[rows]
        faults = {new: self.faults[old] for new, old in enumerate(rows.tolist()) if old in self.faults}
        paths = Names(self.paths[row] for row in rows)
        return replace(self, paths=paths, classes=self.classes[rows], sizes=sizes, faults=faults)


def renumber(
    classes: np.ndarray, own: Sequence[str], imposed: Sequence[str] | None, where: str
) -> tuple[np.ndarray, list[str]]:
    """Class of each image and the class list, by the numbers of an imposed list.

    Args:
        classes: (N,) numbers in `own`.
        imposed: Class list of the training set or a class map; None: `own`.
        where: The data set, for messages.

    Returns:
        (N,) int64, and the class list.

    Raises:
        UserError: A number that `own` doesn't have, two classes of one name, or one that `imposed` doesn't have.
    """
    classes = np.asarray(classes, np.int64)
    if len(classes) == 0:
        raise UserError(f"{where} holds no images")
    if classes.min() < 0 or classes.max() >= len(own):
        bad = classes.min() if classes.min() < 0 else classes.max()
        raise UserError(f"{where}: an image is of class {bad}, but there are {len(own)} classes: take a labelled split")
    if len(set(own)) < len(own):
        twice = next(name for name in own if list(own).count(name) > 1)
        raise UserError(f"{where}: two classes are named {printable(twice)!r}: give each a name of its own")
    if imposed is None or list(imposed) == list(own):
        return classes, list(own)
    numbers = {name: number for number, name in enumerate(imposed)}
    unknown = [own[number] for number in np.unique(classes) if own[number] not in numbers]
    if unknown:
        raise UserError(
            f"{where} has {len(unknown)} classes that are not in the class list of the training set or class map, "
            f"such as {printable(unknown[0])}"
        )
    return np.array([numbers.get(name, -1) for name in own], np.int64)[classes], list(imposed)


def class_folder(name: str) -> str:
    """A class's name as a folder's: what would be another folder, a hidden one or none is replaced."""
    name = name.replace("/", "_").replace("\\", "_").replace("\0", "_")
    return f"_{name}" if not name or name.startswith(".") else name


def numbered_names(class_names: Iterable[str], suffix: str = "") -> Names:
    """`CLASS/NUMBER` for images in order, `class_names` theirs: label maps are found by these names."""
    return Names(f"{class_folder(name)}/{row:08d}{suffix}" for row, name in enumerate(class_names))

"""Where encoded images come from: a list of images with classes, whose bytes are read in any order.

Sources are image files (`folder.py`), records in large files (`records.py`), and data sets of Hugging Face and of
torchvision (`libraries.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.text import look_of, lookalikes, printable, some_names

# Called often, with what is done and how many images or files were found by then.
ProgressCallback = Callable[[str, int], None]
MAX_CLASS = 999_999  # by number, where others wrote it
SYNTHETIC = "synthetic"  # the root of images that are computed (`tlt.data.backends.synthetic`)


@dataclass
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
    """

    root: str
    paths: Sequence[str]
    classes: np.ndarray
    class_names: list[str]
    folder_names: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.classes)

    def path(self, index: int) -> str:
        """Where image `index` is, for messages; a source of files gives what `open` takes."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        """The encoded image `index`. Raises `tlt.data.sources.image_file.BadImage`: it can't be read, or it has more
        bytes than an image of `max_pixels` can have."""
        raise NotImplementedError

    def number_by(self, class_names: Sequence[str]) -> None:
        """Number the classes as in another class list: the training set's, or a class map. A class is the one of its
        name. Where the list has no name of them all, 0 to n - 1 stand for its first n. Raises UserError: it lacks a
        class."""
        names, numbers = self.class_names, {name: number for number, name in enumerate(class_names)}
        if numbers.keys().isdisjoint(names) and names == [str(n) for n in range(min(len(names), len(numbers)))]:
            self.folder_names = [class_names[int(name)] for name in self.folder_names]
        else:
            if unknown := [names[number] for number in np.unique(self.classes) if names[number] not in numbers]:
                raise UserError(
                    f"{printable(self.root)} has {len(unknown)} classes that are not in the class list (a class map's, "
                    f"a checkpoint's or other images'): {some_names(unknown)}; the list holds {some_names(class_names)}"
                    + lookalikes(unknown, class_names)
                )
            self.classes = np.array([numbers.get(name, -1) for name in names], np.int64)[self.classes]
        self.class_names = list(class_names)

    def select(self, rows: Sequence[int] | np.ndarray) -> ImageSource:
        """The images `rows` in that order, or those where `rows` (N,) is true, as a source of their own."""
        rows = np.arange(len(self))[rows if len(rows) else []]
        about = self.class_names, self.folder_names, self.warnings
        paths = Names(self.paths[row] for row in rows)
        return SelectedImages(self.root, paths, self.classes[rows], *about, whole=self, rows=rows)


@dataclass
class SelectedImages(ImageSource):
    """Some images of another source: `rows` (N,) int64 of `whole`."""

    whole: ImageSource = field(kw_only=True)
    rows: np.ndarray = field(kw_only=True)

    def path(self, index: int) -> str:
        return self.whole.path(int(self.rows[index]))

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        return self.whole.read(int(self.rows[index]), max_pixels)


def check_classes(classes: np.ndarray, class_names: Sequence[str], where: str) -> None:
    """Raise UserError, which names `where`: no images, a number without a name, or two classes of one name."""
    if len(classes) == 0:
        raise UserError(f"{where} holds no images")
    if outside := [int(number) for number in (classes.min(), classes.max()) if not 0 <= number < len(class_names)]:
        known = len(class_names)
        raise UserError(
            f"{where}: an image is of class {outside[0]}, but there are {known} classes: take a labelled split"
        )
    if twice := [name for name, count in Counter(map(look_of, class_names)).items() if count > 1]:
        raise UserError(f"{where}: two classes are named {printable(twice[0])!r}: give each a name of its own")


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each kind of what was found and is no image."""
    return [f"left out {len(names)} {kind}: {some_names(sorted(names))}" for kind, names in left_out.items() if names]


def class_folder(name: str) -> str:
    """A class's name as a folder's: what would be another folder, a hidden one or none is replaced."""
    name = name.replace("/", "_").replace("\\", "_").replace("\0", "_")
    return f"_{name}" if not name or name.startswith(".") else name


def numbered_names(class_names: Iterable[str], suffix: str = "") -> Names:
    """`CLASS/NUMBER` for images in order, `class_names` theirs: label maps are found by these names."""
    return Names(f"{class_folder(name)}/{row:08d}{suffix}" for row, name in enumerate(class_names))

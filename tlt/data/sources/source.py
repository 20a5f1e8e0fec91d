"""The interface of image sources: a list of images with classes, whose bytes can be read in any order.

Sources are image files (`folder.py`), records in large files (`records.py`), and data sets of Hugging Face and of
torchvision (`libraries.py`).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.text import look_of, lookalikes, printable, some_names

# Called often, with a message and the number of images or files so far.
ProgressCallback = Callable[[str, int], None]
MAX_CLASS = 999_999  # largest class index accepted from files of other programs
SYNTHETIC = "synthetic"  # the root of computed images (`tlt.data.backends.synthetic`)


@dataclass
class ImageSource:
    """N images with names and classes. A source is shared with worker processes. So its contents must be picklable, and
    small or memory-mapped. It may keep files open if it uses only `os.pread`, because processes and threads share the
    position in a file."""

    root: str  # the place of the images, for messages
    paths: Sequence[str]  # (N,) name of each image, `CLASS/FILE` with slashes, which labels, logs and checkpoints use
    classes: np.ndarray  # (N,) int64, class index of each image
    class_names: list[str]  # name of every class index; an imposed list may have classes without images
    folder_names: list[str] = field(default_factory=list)  # the classes of this data set (a class folder may be empty)
    warnings: list[str] = field(default_factory=list)  # warnings of one line each, which rank 0 prints once

    def __len__(self) -> int:
        return len(self.classes)

    def path(self, index: int) -> str:
        """Return the place of image `index`, for messages; for sources of files, the path to open."""
        return os.path.join(self.root, self.paths[index])

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        """Return the encoded image `index`. Raise `tlt.data.sources.image_file.BadImage` if it can't be read, or has
        more bytes than an image of `max_pixels` can have."""
        raise NotImplementedError

    def number_by(self, class_names: Sequence[str]) -> None:
        """Renumber the classes by another class list, that of the training set or a class map, matching names. If the
        list has none of the names and they are numbers, class i becomes entry i of the list. Raise UserError if the
        list lacks a class or has one twice."""
        names = self.class_names
        numbers = {name: number for number, name in enumerate(class_names)}
        if numbers.keys().isdisjoint(names) and names == [str(n) for n in range(min(len(names), len(numbers)))]:
            self.folder_names = [class_names[int(name)] for name in self.folder_names]
        else:
            if unknown := [names[number] for number in np.unique(self.classes) if names[number] not in numbers]:
                raise UserError(
                    f"{printable(self.root)} has {len(unknown)} classes that are not in the class list (a class map's, "
                    f"a checkpoint's or other images'): {some_names(unknown)}; the list holds {some_names(class_names)}"
                    f"{lookalikes(unknown, class_names)}: remove them, or add them to it, with training images"
                )
            self.classes = np.array([numbers.get(name, -1) for name in names], np.int64)[self.classes]
        self.class_names = list(class_names)
        check_classes(self.classes, class_names, f"the class list for {printable(self.root)}")

    def select(self, rows: Sequence[int] | np.ndarray) -> "ImageSource":
        """Return a source of the images `rows`, in that order, or of those for which a mask `rows` (N,) is true."""
        rows = np.arange(len(self))[rows if len(rows) else []]
        details = self.class_names, self.folder_names, self.warnings
        paths = Names(self.paths[row] for row in rows)
        return SelectedImages(self.root, paths, self.classes[rows], *details, whole=self, rows=rows)


@dataclass
class SelectedImages(ImageSource):
    """A selection from another source: images `rows` (N,) int64 of `whole`."""

    whole: ImageSource = field(kw_only=True)
    rows: np.ndarray = field(kw_only=True)

    def path(self, index: int) -> str:
        return self.whole.path(int(self.rows[index]))

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        return self.whole.read(int(self.rows[index]), max_pixels)


def check_classes(classes: np.ndarray, class_names: Sequence[str], where: str) -> None:
    """Raise UserError, which names `where`, if there are no images, class numbers out of range, or names used twice."""
    if len(classes) == 0:
        raise UserError(f"{where} holds no images")
    if outside := [int(number) for number in (classes.min(), classes.max()) if not 0 <= number < len(class_names)]:
        class_count = len(class_names)
        raise UserError(
            f"{where}: an image is of class {outside[0]}, but there are {class_count} classes: take a labelled split"
        )
    if twice := [name for name, count in Counter(map(look_of, class_names)).items() if count > 1]:
        raise UserError(f"{where}: two classes are named {printable(twice[0])!r}: give each a name of its own")


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each kind of entries that were left out because they are no images."""
    return [f"left out {len(names)} {kind}: {some_names(sorted(names))}" for kind, names in left_out.items() if names]


def class_folder(name: str) -> str:
    """Return a class name as a folder name: replace slashes, a leading dot, and an empty name."""
    name = name.replace("/", "_").replace("\\", "_").replace("\0", "_")
    return f"_{name}" if not name or name.startswith(".") else name


def numbered_names(class_names: Iterable[str], suffix: str = "") -> Names:
    """Return names `CLASS/NUMBER` for images in order, given their class names. Label maps are found by these names."""
    return Names(f"{class_folder(name)}/{row:08d}{suffix}" for row, name in enumerate(class_names))

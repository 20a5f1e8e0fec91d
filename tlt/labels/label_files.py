"""Which label belongs to which image: by name, an image has one label of its own.

The published reader cuts the path at its first dot, and so hands one label to all of `a.b.jpg`, `a.c.jpg` and `a.jpg`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence, Set

import numpy as np

from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.natural import natural_key
from tlt.io.text import printable


def label_names(names: Sequence[str]) -> list[str]:
    """Relative label file of every relative image path: `a/x.jpg` -> `a/x.pt`; where `a/x.png` exists as well,
    `a/x.jpg.pt` and `a/x.png.pt`."""
    stems = [os.path.splitext(name)[0] for name in names]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [(name if stem in shared else stem) + ".pt" for name, stem in zip(names, stems, strict=True)]


def usual_label_name(name: str) -> str:
    """The label file of an image that shares its stem with no other: `a/x.jpg` -> `a/x.pt`."""
    return os.path.splitext(name)[0] + ".pt"


def find_labels(names: Sequence[str], files_in: Callable[[str], Set[str]], root: str) -> Names:
    """The label file of every image, `a/x.jpg.pt` or else `a/x.pt`; "" where there is neither.

    Args:
        names: Image paths relative to the image folder.
        files_in: Returns the names of the label files in a folder, which is relative to `root`; called once for each.

    Raises:
        UserError: A label file fits two images, or a folder can't be read.
    """
    by_folder: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_folder.setdefault(os.path.dirname(name), []).append(index)
    labels = [""] * len(names)
    for folder, indices in by_folder.items():
        files, owner = files_in(folder), dict[str, int]()
        for index in indices:
            own = os.path.basename(names[index])
            label = f"{own}.pt" if f"{own}.pt" in files else usual_label_name(own)
            if label in files:
                labels[index] = os.path.join(folder, label)
                if (other := owner.setdefault(label, index)) != index:
                    raise UserError(
                        f"label {printable(os.path.join(root, labels[index]))} fits {printable(names[other])} and "
                        f"{printable(names[index])}; make the labels again with generate_label.py, which tells the two "
                        "apart"
                    )
    return Names(labels)


def rows_of(names: Names, stored: Names) -> np.ndarray:
    """(images,) int64: which of the `stored` names each image has, -1 where none."""
    if names == stored:
        return np.arange(len(names))
    row_of = {name: row for row, name in enumerate(stored)}
    return np.array([row_of.get(name, -1) for name in names], np.int64)


def label_files_below(tree: str) -> list[str]:
    """Label files below a folder, relative to it, in natural order."""
    paths = []
    for folder, _, files in os.walk(tree):
        # A hidden file was left behind by a killed writer.
        names = [name for name in files if name.endswith(".pt") and not name.startswith(".")]
        paths += [os.path.normpath(os.path.join(os.path.relpath(folder, tree), name)) for name in names]
    return sorted(paths, key=lambda path: (natural_key(path), path))

"""Which label file belongs to which image.

One image has one label file, whatever its name: the published reader cuts the path at its first dot, and so hands one
label to all of `a.b.jpg`, `a.c.jpg` and `a.jpg`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from tlt.errors import UserError
from tlt.io.natural import natural_key
from tlt.io.progress import SearchProgress
from tlt.io.text import printable

Listing: TypeAlias = Callable[[str], Set[str]]  # names of the label files in a folder


def label_names(names: Sequence[str]) -> list[str]:
    """Relative label file of every relative image path: `a/x.jpg` -> `a/x.pt`; where `a/x.png` exists as well,
    `a/x.jpg.pt` and `a/x.png.pt`."""
    stems = [os.path.splitext(name)[0] for name in names]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [(name if stem in shared else stem) + ".pt" for name, stem in zip(names, stems, strict=True)]


def usual_label_name(name: str) -> str:
    """The label file of an image that shares its stem with no other: `a/x.jpg` -> `a/x.pt`."""
    return os.path.splitext(name)[0] + ".pt"


def published_label_name(name: str) -> str:
    """The label file that the published reader opens: the last two parts of the path, cut at the first dot."""
    return "/".join(name.split("/")[-2:]).split(".")[0] + ".pt"


@dataclass
class LabelMatches:
    """Which label file belongs to each row of a list of images.

    Attributes:
        other_name: Rows whose label is not called `usual_label_name`, with its path relative to the tree.
        missing: Rows without a label.
    """

    other_name: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)

    def label(self, row: int, name: str) -> str:
        """The label file of the image `name` in `row`, relative to the tree; the usual one if it is missing."""
        return self.other_name.get(row) or usual_label_name(name)

    def packed(self) -> list[list[Any]]:
        """What JSON can hold, and `unpacked` makes an equal object of."""
        return [[*self.other_name.items()], [*self.missing]]

    @classmethod
    def unpacked(cls, plain: Sequence[Sequence[Any]]) -> LabelMatches:
        """The object on which `packed` was called."""
        return cls(dict(plain[0]), set(plain[1]))


def tree_listing(root: str, found: Callable[[str, int], None] | None = None) -> Listing:
    """The label files below a folder; `found` is called with how many there are so far."""
    tell, counts = found or SearchProgress(), [0]

    @lru_cache(maxsize=1)  # names come folder by folder, and those of a million files take much memory
    def files(folder: str) -> frozenset[str]:
        names = _label_files(root, folder)
        counts[0] += len(names)
        tell(f"looking for labels in {printable(root)}", counts[0])
        return names

    return files


def find_labels(listing: Listing, root: str, names: Sequence[str]) -> LabelMatches:
    """Match images with label files, at the cost of one listing per folder.

    An image takes `a/x.jpg.pt`, else `a/x.pt`, else what the published reader would open if that is no other image's.

    Args:
        listing: Names of the label files in a folder, which is relative to `root`.
        names: Image paths relative to the image folder.

    Raises:
        UserError: A label file fits two images, or a folder can't be read.
    """
    by_folder: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_folder.setdefault(os.path.dirname(name), []).append(index)
    found, others = LabelMatches(), []
    for folder, indices in by_folder.items():
        files, owner = listing(folder), dict[str, int]()
        for index in indices:
            own = os.path.basename(names[index])
            if f"{own}.pt" in files:
                found.other_name[index] = os.path.join(folder, f"{own}.pt")
            elif (label := usual_label_name(own)) not in files:
                others.append(index)
            elif owner.setdefault(label, index) != index:
                raise _fits_two(root, os.path.join(folder, label), names, owner[label], index)
    claims: dict[str, int] = {}
    usual = set(map(usual_label_name, names)) if others else set()
    for index in others:
        label = published_label_name(names[index])
        folder, file = os.path.split(label)
        if file not in listing(folder) or label in usual:
            found.missing.add(index)
        elif claims.setdefault(label, index) != index:
            raise _fits_two(root, label, names, claims[label], index)
        else:
            found.other_name[index] = label
    return found


def _fits_two(root: str, label: str, names: Sequence[str], one: int, other: int) -> UserError:
    return UserError(
        f"label {printable(os.path.join(root, label))} fits {printable(names[one])} and {printable(names[other])}; "
        "make the labels again with generate_label.py, which tells the two apart"
    )


def _label_files(root: str, folder: str) -> frozenset[str]:
    try:
        with os.scandir(os.path.join(root, folder)) as entries:
            return frozenset(each.name for each in entries if each.name.endswith(".pt") and each.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        path = printable(os.path.join(root, folder))
        raise UserError(f"label folder {path} can't be read ({error.strerror}): mend its permissions") from error


def label_files_below(tree: str) -> tuple[list[str], list[str]]:
    """Label files and other files below a folder, relative to it, in natural order."""
    labels: list[str] = []
    other: list[str] = []
    for folder, _, files in os.walk(tree):
        relative = os.path.relpath(folder, tree)
        for name in files:
            path = name if relative == "." else os.path.join(relative, name)
            hidden = name.startswith(".")  # left behind by a killed writer
            (labels if name.endswith(".pt") and not hidden else other).append(path)
    labels.sort(key=lambda name: (natural_key(name), name))
    return labels, sorted(other)

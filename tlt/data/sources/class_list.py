"""The class list of a data set that has one of its own, and names for images that have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tlt.errors import UserError
from tlt.io.names import Names, printable


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

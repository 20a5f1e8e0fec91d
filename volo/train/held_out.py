"""Training images that are held out for validation where a data set has no validation images (`--val-fraction`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.text import printable, some_names

LIST = "validation_images.txt"  # in the run directory

Mask = npt.NDArray[np.bool_]


def held_out_counts(images: ImageSource, fraction: float) -> dict[int, int]:
    """Return how many images of each class are `fraction` of them: at least one of two, and never all; 0 for none."""
    counts = zip(*(each.tolist() for each in np.unique(images.classes, return_counts=True)), strict=True)
    return {number: min(n - 1, max(1, round(fraction * n))) if fraction else 0 for number, n in counts}


def draw_held_out(images: ImageSource, fraction: float, seed: int) -> Mask:
    """Choose the images that are held out, of each class so many as `held_out_counts` says.

    Returns:
        (N,) whether each image is held out: a function of the classes, the fraction and the seed.
    """
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(images))
    held = np.zeros(len(images), bool)
    for number, count in held_out_counts(images, fraction).items():
        held[order[images.classes[order] == number][:count]] = True
    return held


def listed_images(images: ImageSource, file: str, missing_allowed: bool = False) -> Mask:
    """Return (N,) whether each image is in a list of names, one a line (`as_list`).

    Args:
        missing_allowed: Some listed images may be gone, but not all.

    Raises:
        UserError: The file can't be read, or names images that are not there.
    """
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as lines:
            names = {line.rstrip("\n") for line in lines if line.strip()}
    except OSError as error:
        raise UserError(f"image list {printable(file)} can't be read ({error.strerror})") from error
    found = np.fromiter((path in names for path in images.paths), bool, len(images))
    gone = names.difference(images.paths) if found.sum() < len(names) else set()
    if not found.any() or (gone and not missing_allowed):
        raise UserError(
            f"image list {printable(file)}: {len(gone)} of its {len(names)} images are not in {printable(images.root)} "
            f"({some_names(sorted(gone))}): name the data set and the split that it was made of"
        )
    return found


def as_list(images: ImageSource) -> bytes:
    """The names of images, one a line."""
    return "".join(f"{path}\n" for path in images.paths).encode(errors="surrogateescape")


def part(images: ImageSource, mask: Mask) -> ImageSource:
    """The images where `mask` is true, without the warnings of the whole."""
    return replace(images.select(np.flatnonzero(mask)), warnings=[])

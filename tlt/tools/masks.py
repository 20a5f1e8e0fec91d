"""Reads masks of classes, and counts the pixels of every class in the cells of a grid.

A mask gives each pixel of an image a number: a PNG file, palette or grey, of up to 16 bits; or the annotations of COCO
(`tlt.tools.coco`). `Numbers` says which class a number is.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tlt.data.sources.folder import FolderListing
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS, BadImage, image_formats, pillow_errors, read_file
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import LabelMap

VOID = -1  # instead of a class id: the pixel counts for nothing
_UNKNOWN = -2
_LEVELS = 2**16  # numbers that a PNG can hold


@dataclass(frozen=True)
class Numbers:
    """What the numbers in masks mean. An archive records it, as `annotator`."""

    ids: dict[int, int]  # class id of each number
    void: list[int]  # numbers of pixels that count for nothing
    # How the names of an image and of its mask end, before the suffix of the file: ("_leftImg8bit", "_gtFine_labelIds")
    endings: tuple[str, str] = ("", "")

    @classmethod
    def recorded(cls, annotator: dict[str, Any]) -> "Numbers":
        """Return what an archive has recorded. JSON has turned numbers into texts. Raise KeyError if it is none."""
        return cls({int(number): i for number, i in annotator["ids"].items()}, annotator["void"], annotator["endings"])


@dataclass
class Masks(ABC):
    """The masks of images. `rows` lists the images that have one, `unused` the masks of no image. Processes share it,
    and anything that it holds must bear a fork."""

    images: ImageSource
    numbers: Numbers
    rows: list[int] = field(init=False)
    unused: list[str] = field(init=False)

    @abstractmethod
    def source(self, row: int) -> str:
        """Return the place of an image's mask, for messages."""

    @abstractmethod
    def decode(self, row: int) -> np.ndarray:
        """Return the class id, or VOID, of every pixel, (H, W) int32. Raise UserError if the mask is unusable."""

    def read(self, row: int) -> np.ndarray:
        """Return the mask of an image as `decode` does. Raise UserError if the image has another size."""
        return of_same_size(self.decode(row), self.source(row), self.images, row)

    def label(self, row: int, grid: tuple[int, int], k: int) -> LabelMap:
        """Return the label map of an image."""
        values, ids, void = count_cells(self.read(row), grid, k)
        return LabelMap(values, ids, source=self.source(row), void=void)


class MaskFiles(Masks):
    """Masks in PNG files below a folder, which mirrors the images' folders, or where they have the images' names."""

    def __init__(self, root: str, images: ImageSource, numbers: Numbers) -> None:
        super().__init__(images, numbers)
        if not os.path.isdir(root):
            raise UserError(f"MASKS {printable(root)} is no folder, nor a JSON file of COCO (.json)")
        inside = os.path.join(root, os.path.basename(images.root))  # MASKS/train of DATA/train
        self._root = inside if os.path.isdir(inside) else root
        listed = FolderListing(self._root, classes=False).names
        files = [name for name in listed if os.path.splitext(name)[0].endswith(numbers.endings[1])]
        files = [name for name in files if name.lower().endswith(".png")]
        if not files:
            raise UserError(f"MASKS {printable(root)} holds no PNG files{' of this --suffix' * any(numbers.endings)}")
        self._of_number = np.full(_LEVELS, _UNKNOWN, np.int32)
        known = {number: i for number, i in numbers.ids.items() if number < _LEVELS}
        self._of_number[[*known]] = [*known.values()]
        self._of_number[[number for number in numbers.void if number < _LEVELS]] = VOID
        found = partners(images.paths, files, numbers.endings)
        self._files = {row: files[mask] for row, mask in enumerate(found) if mask >= 0}
        self.rows = [*self._files]
        self.unused = sorted({*files}.difference(self._files.values()))

    def source(self, row: int) -> str:
        return f"mask {printable(os.path.join(self._root, self._files[row]))}"

    def decode(self, row: int) -> np.ndarray:
        try:
            numbers = read_numbers(os.path.join(self._root, self._files[row]))
        except BadImage as error:
            raise UserError(f"{self.source(row)} can't be used: {error}") from error
        classes = self._of_number[numbers]
        if (strange := classes == _UNKNOWN).any():
            y, x = np.argwhere(strange)[0].tolist()
            number = int(numbers[y, x])
            raise UserError(
                f"{self.source(row)} has number {number} at x {x}, y {y}, which is none of the "
                f"{len(self.numbers.ids)} classes: give --ignore {number} if it is void, or --classes FILE"
            )
        return classes


def read_numbers(path: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> np.ndarray:
    """Return the class numbers in a PNG file, (H, W) of whole numbers. Raise BadImage if it can't be read, UserError if
    it holds colours."""
    data = read_file(path, max_pixels)
    with pillow_errors(max_pixels), Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        numbers = np.asarray(image)
        mode = image.mode
    if mode not in ("1", "L", "P") and not mode.startswith("I"):
        raise UserError(
            f"mask {printable(path)} holds colours ({mode}), not class numbers; write it as a palette or grey PNG, "
            "from the numbers themselves (a palette image that was converted to RGB has lost them)"
        )
    bits = data[24]  # in the PNG's header
    # Pillow spreads grey of 2 and 4 bits over 0 to 255.
    return numbers // (255 // (2**bits - 1)) if mode == "L" and bits < 8 else numbers.astype(np.int64)


def of_same_size(mask: np.ndarray, source: str, images: ImageSource, row: int) -> np.ndarray:
    """Return the mask (H, W) of an image. Raise UserError, which names its `source`, if the image has another size."""
    height, width = mask.shape
    if (size := image_size(images, row)) != (width, height):
        turned = "; EXIF orientation is ignored" if size == (height, width) else ""
        raise UserError(
            f"{source} has {width} x {height} pixels, but its image {printable(images.paths[row])} "
            f"{size[0]} x {size[1]}: is it the mask of this image, not made smaller?{turned}"
        )
    return mask


def image_size(images: ImageSource, row: int) -> tuple[int, int]:
    """Return width and height of an image; of a file only the header is read. Raise UserError if it is unreadable."""
    path = images.path(row)
    try:
        file = path if os.path.isfile(path) else io.BytesIO(images.read(row))
        with pillow_errors(DEFAULT_MAX_PIXELS), Image.open(file, formats=image_formats()) as image:
            return image.size
    except BadImage as error:
        raise UserError(f"{printable(path)} can't be read ({error}): mend or remove it") from error


def partners(images: Sequence[str], others: Sequence[str], endings: tuple[str, str] = ("", "")) -> list[int]:
    """Return for each image the index of its partner among `others`, or -1. Paths are compared without their suffix and
    without the `endings` of both; where none fits, the names of the files alone. Raise UserError if two of one side
    fit one of the other."""

    def whole(path: str, ending: str) -> str:
        return os.path.splitext(path)[0].removesuffix(ending)

    def alone(path: str, ending: str) -> str:
        return os.path.basename(whole(path, ending))

    keys: tuple[Callable[[str, str], str], ...] = (whole, alone)
    for key in keys:
        keyed = [key(path, endings[0]) for path in images]
        wanted = dict(zip(reversed(keyed), reversed(images), strict=True))  # the first image of each key
        found = dict[str, int]()
        for index, other in enumerate(others):
            name = key(other, endings[1])
            if name in wanted and (first := found.setdefault(name, index)) != index:
                pair = printable(others[first]), printable(other)
                raise UserError(f"{pair[0]} and {pair[1]} both fit image {printable(wanted[name])}: keep one of them")
        for path, name in zip(images, keyed, strict=True):
            if name in found and wanted[name] != path:
                pair = printable(wanted[name]), printable(path)
                raise UserError(f"{printable(others[found[name]])} fits two images, {pair[0]} and {pair[1]}")
        if found:
            break
    return [found.get(name, -1) for name in keyed]


def count_cells(classes: np.ndarray, grid: tuple[int, int], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count class ids (H, W) in the cells of a grid (h, w). Return float32 values (k, h, w), the share of each class
    among the cell's pixels that are not VOID, the largest first; their int32 ids; and float32 void (h, w), the share of
    VOID. A pixel on a border counts in each cell by its area there. Of equal shares the smaller id comes first; what no
    class has left is value 0 and id 0."""
    h, w = grid
    height, width = classes.shape
    present = np.flatnonzero(np.bincount(classes.ravel() - VOID, minlength=1))  # class ids + 1, VOID as 0
    present = np.union1d([0], present)
    column = np.zeros(present[-1] + 1, np.int64)
    column[present] = np.arange(len(present))
    x, col, wide = _pieces(width, w)
    counts = np.empty((h, w * len(present)))
    y, row, tall = _pieces(height, h)
    for r, (start, stop) in enumerate(np.searchsorted(row, [(r, r + 1) for r in range(h)])):
        of_class = column[classes[y[start:stop]][:, x] - VOID] + col * len(present)
        area = tall[start:stop, None] * wide
        counts[r] = np.bincount(of_class.ravel(), area.ravel(), counts.shape[1])
    of_cell = counts.reshape(h, w, -1)
    void = of_cell[..., 0] / (height * width)
    listed = of_cell[..., 1:]
    order = np.argsort(-listed, axis=-1, kind="stable")[..., :k]
    total = listed.sum(-1, keepdims=True)
    shares = np.take_along_axis(listed, order, -1) / np.where(total > 0, total, 1)
    values = np.zeros((k, h, w), np.float32)
    ids = np.zeros((k, h, w), np.int32)
    values[: order.shape[-1]] = np.moveaxis(shares, -1, 0)
    ids[: order.shape[-1]] = np.moveaxis(present[1:][order], -1, 0) + VOID
    return values, np.where(values > 0, ids, 0).astype(np.int32), void.astype(np.float32)


def _pieces(length: int, cells: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut an axis of pixels at the borders of pixels and cells. Return pixel, cell and size of each piece, in units of
    which a cell has `length`, so that counts are whole numbers."""
    edges = np.union1d(np.arange(length + 1) * cells, np.arange(cells + 1) * length)
    return edges[:-1] // cells, edges[:-1] // length, np.diff(edges)

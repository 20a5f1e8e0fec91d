"""Reads the masks in COCO's JSON files: polygons, and run-length encoding (RLE), compressed or not.

Where annotations overlap, the smaller one lies on top, a crowd beneath all others, and of equal ones the later on top.
What no annotation covers is void. The files are read as streams, and only the runs of each annotation are kept, in a
temporary file (its folder is that of TMPDIR): they may be larger than the memory.
"""

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tlt.data.sources.source import ImageSource
from tlt.errors import UserError, require
from tlt.io.files import blamed_on, os_errors_as, read_at, regular_only
from tlt.io.jobs import SearchProgress
from tlt.io.text import printable
from tlt.tools.masks import VOID, Masks, Numbers, partners

_EXTRA = "masks"
_BEYOND = 1.0  # pixels by which a polygon may leave its image: tools round
_WRONG = "is no JSON of COCO", "it needs images, annotations with a segmentation, and categories"


def is_coco(paths: Sequence[str]) -> bool:
    """Return whether MASKS are JSON files. Raise UserError if they are several of another kind."""
    coco = [path.lower().endswith(".json") for path in paths]
    if len(paths) > 1 and not all(coco):
        raise UserError("MASKS is one folder of PNG files, or one or more JSON files of COCO")
    return all(coco)


def read_categories(files: Sequence[str]) -> dict[int, str]:
    """Return the name of each category. Raise UserError if there are none, or files differ."""
    names = dict[int, str]()
    for file in files:
        with blamed_on(file, *_WRONG):
            for item in _items(file, "categories"):
                if names.setdefault(item["id"], item["name"].strip()) != item["name"].strip():
                    raise UserError(f"category {item['id']} has another name than in an earlier file")
    if not names:
        raise UserError(f"{printable(files[0])} {_WRONG[0]} (no categories): {_WRONG[1]}")
    return names


class CocoMasks(Masks):
    """The masks of JSON files. `numbers` are ids of categories."""

    def __init__(self, files: Sequence[str], images: ImageSource, numbers: Numbers) -> None:
        super().__init__(images, numbers)
        require("pycocotools.mask", _EXTRA)  # before minutes of reading
        names = list[str]()
        sizes = array("q")
        known = list[dict[Any, int]]()  # for each file, the number of an image by its id
        for file in files:
            known.append({})
            with blamed_on(file, *_WRONG):
                for item in _items(file, "images"):
                    known[-1][item["id"]] = len(names)
                    names.append(item["file_name"])
                    sizes.extend((int(item["height"]), int(item["width"])))
        found = np.array(partners(images.paths, names, numbers.endings), np.int64)
        self.rows = np.flatnonzero(found >= 0).tolist()
        row_of = np.full(len(names), -1)
        row_of[found[self.rows]] = self.rows
        self.unused = [names[number] for number in np.flatnonzero(row_of < 0)]
        self._sizes = np.zeros((len(images), 2), np.int64)
        self._sizes[self.rows] = np.frombuffer(sizes, np.int64).reshape(-1, 2)[found[self.rows]]
        self._files = [os.path.basename(file) for file in files]
        self._runs = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the process)
        row, classes, ends, areas, crowds = self._keep(files, known, row_of)
        order = np.lexsort((-areas, -crowds, row))  # stable
        self._first = np.searchsorted(row[order], np.arange(len(images) + 1))
        self._classes = classes[order]
        self._begins = np.append(0, ends)[order]
        self._ends = ends[order]

    def _keep(self, files: Sequence[str], known: list[dict[Any, int]], row_of: np.ndarray) -> list[np.ndarray]:
        """Write the runs of all annotations of these images. Return, an array each, their image, their class, where
        their runs end, their area and whether they are crowds."""
        kept = [array("q") for _ in range(5)]
        end = 0
        for name, image, item in _annotations(files, known):
            row = int(row_of[image])
            if row < 0 or not item.get("segmentation"):
                continue
            with blamed_on(name, "has no mask", "mend or remove it"):
                runs, area = runs_of(item["segmentation"], *self._sizes[row].tolist())
                category = item["category_id"]
                if category not in self.numbers.ids and category not in self.numbers.void:
                    raise UserError(f"its category {category} is none of the classes: give --ignore {category}")
                class_id = VOID if category in self.numbers.void else self.numbers.ids[category]
                column = row, class_id, end + len(runs), area, item.get("iscrowd", 0)
                for values, value in zip(kept, column if runs else (), strict=False):
                    values.append(value)
            with os_errors_as(lambda e: f"the folder of TMPDIR, {tempfile.gettempdir()}, can't be used: {e.strerror}"):
                end += self._runs.write(runs)
        self._runs.flush()
        if not end:
            raise UserError(f"{printable(files[0])} has no annotation with a mask of these images")
        return [np.frombuffer(values, np.int64) for values in kept]

    def source(self, row: int) -> str:
        return f"mask of {printable(self.images.paths[row])} in {printable(', '.join(self._files))}"

    def decode(self, row: int) -> np.ndarray:
        height, width = self._sizes[row].tolist()
        classes = np.full(height * width, VOID, np.int32)  # column by column, as COCO counts
        for number in range(self._first[row], self._first[row + 1]):
            start = int(self._begins[number])
            end = int(self._ends[number])
            counts = counts_in(read_at(self._runs.fileno(), end - start, start))
            classes[np.repeat(np.arange(len(counts)) % 2 == 1, counts)] = self._classes[number]
        return classes.reshape(width, height).T


def _items(file: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of one of the file's lists."""
    ijson = require("ijson", _EXTRA)
    with open(file, "rb", opener=regular_only) as stream:
        yield from ijson.items(stream, f"{name}.item", use_float=True)


def _annotations(files: Sequence[str], known: list[dict[Any, int]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield every annotation, with a name for messages before it and the number of its image."""
    progress = SearchProgress()
    for file, numbers in zip(files, known, strict=True):
        with blamed_on(file, *_WRONG):
            for count, item in enumerate(_items(file, "annotations")):
                progress(f"reading annotations of {printable(file)}", count)
                name = f"annotation {item.get('id')} of {printable(file)}"
                if item["image_id"] not in numbers:
                    raise UserError(f"{name} is of image {item['image_id']}, which the file does not list")
                yield name, numbers[item["image_id"]], item


def runs_of(segmentation: Any, height: int, width: int) -> tuple[bytes, int]:
    """Return a segmentation, in any form, as COCO's compressed RLE, and its area. Raise an error of any type if it is
    none, or not of this size, or leaves the image."""
    coco = require("pycocotools.mask", _EXTRA)
    if isinstance(segmentation, list):
        for polygon in segmentation:
            points = np.asarray(polygon, np.float64).reshape(-1, 2)
            if not ((points >= -_BEYOND) & (points <= np.add((width, height), _BEYOND))).all():
                x, y = points[np.abs(points - np.divide((width, height), 2)).max(1).argmax()].tolist()
                raise UserError(f"its polygon reaches x {x:g}, y {y:g}, outside of its image of {width} x {height}")
        drawn = [polygon for polygon in segmentation if len(polygon) >= 6]  # fewer points have no area
        if not drawn:
            return b"", 0
        merged = coco.merge(coco.frPyObjects(drawn, height, width))
        return merged["counts"], int(coco.area(merged))
    if [int(side) for side in segmentation["size"]] != [height, width]:
        raise UserError(f"its RLE is of {segmentation['size']} pixels, its image of [{height}, {width}] by the file")
    runs = segmentation["counts"]
    counts = np.asarray(runs) if isinstance(runs, list) else counts_in(runs.encode())
    if (counts < 0).any() or counts.sum() != height * width:  # pycocotools would touch memory that is not its own
        raise UserError(f"its runs do not sum to {height} x {width}")
    runs = coco.frPyObjects(segmentation, height, width)["counts"] if isinstance(runs, list) else runs.encode()
    return runs, int(counts[1::2].sum())


def counts_in(runs: bytes) -> np.ndarray:
    """Return the lengths of the runs in a compressed RLE, pixels outside first. A length is written in 5 bits a byte,
    the lowest first, and from the fourth on as the difference to the last but one."""
    part = np.frombuffer(runs, np.uint8).astype(np.int64) - 48
    last = (part & 32) == 0
    number = np.cumsum(last) - last  # which length a byte is of
    start = np.flatnonzero(np.diff(number, prepend=-1))
    shift = 5 * (np.arange(len(part)) - start[number])
    counts = np.bincount(number, (part & 31) << shift) if len(part) else np.zeros(0)
    counts = counts.astype(np.int64) - np.where(part[last] & 16, 32 << shift[last], 0)
    counts[1::2] = counts[1::2].cumsum()
    counts[2::2] = counts[2::2].cumsum()
    return counts

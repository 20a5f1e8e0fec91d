"""The description that all label maps of a store share, and how well the maps name the classes of their images.

A tree has the description in `labels.json`. Published trees have none.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tlt.io.files import blamed_on, read_json, write_whole
from tlt.label_map import Area, LabelMap

INFO_NAME = "labels.json"
FORMAT = "volo-tlt label tree, version 1"
AREAS = ("full", "center")


@dataclass(frozen=True)
class LabelInfo:
    """The description that all label maps of a store share."""

    k: int  # every map has shape (k, grid[0], grid[1])
    grid: tuple[int, int]  # rows and columns of a map
    num_classes: int | None = None  # class ids are below it; None if it is not known
    # `"full"`, `"center"` (the centred square of each image) or `(x0, y0, x1, y1)` in shares of the image, which may
    # reach beyond it (a network that pads labels such positions).
    area: str | Area = "full"
    annotator: dict[str, Any] = field(default_factory=dict)  # the network that made the labels, with its settings
    # Name of every class id: the class folders, or the annotator's own classes; None if not known.
    class_names: list[str] | None = None
    transfer: bool = False  # whether the ids are the annotator's own classes, which differ from the class folders
    # Unreadable images, which have no map; paths relative to the image folder.
    skipped: list[str] = field(default_factory=list)
    log_sum_exp: bool = False  # whether the maps have the log-sum-exp of all the annotator's logits
    max_id: int | None = None  # the largest class id; None if it is not known
    shares: bool = False  # whether the maps hold shares of classes, from masks, and the void share, instead of logits

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, h, w) of every map."""
        return (self.k, *self.grid)

    def write(self, path: str | Path) -> None:
        """Write `labels.json` to `path` atomically."""
        write_whole(path, (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: str | Path) -> "LabelInfo | None":
        """Read a file of `write`. Return None if it does not exist; raise UserError if it is something else."""
        return cls.from_json(read_json(path, FORMAT), path) if os.path.lexists(path) else None

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | Path) -> "LabelInfo":
        """Return the description in the JSON object of a file `path`; other entries are ignored. Raise UserError."""
        with blamed_on(path):
            info = cls(**{item.name: content[item.name] for item in fields(cls) if item.name in content})
            rows, cols = info.grid
            area = info.area if info.area in AREAS else area_in_shares(info.area)
            info = replace(info, grid=(rows, cols), area=area, annotator=dict(info.annotator))
            counts = [*info.shape, *(item for item in (info.num_classes, info.max_id) if item is not None)]
            if not all(isinstance(item, int) and 0 <= item < 2**31 for item in counts) or 0 in info.shape:
                raise ValueError(f"its counts {counts} can't be those of label maps")
            names = [*(() if info.class_names is None else info.class_names), *info.skipped]
            if not all(isinstance(item, str) for item in names):
                raise ValueError("a name is no text")
            return info


def area_in_shares(area: Any) -> Area:
    """Return an area as four numbers. Raise an error of any type if it is none, or reaches too far beyond the image."""
    x0, y0, x1, y1 = map(float, area)
    if not (-1 < x0 < x1 < 2 and -1 < y0 < y1 < 2):
        raise ValueError(f"area {area} is none of {', '.join(AREAS)} and not (x0, y0, x1, y1) in shares of the image")
    return (x0, y0, x1, y1)


class Agreement:
    """Counts over images how often the labels name the folder's class.

    The class that a cell names is that of its largest logit or share; a void cell names none. The class that an image
    names is that with the largest mean probability over its cells: by the softmax over the k stored logits, or by the
    shares.
    """

    def __init__(self) -> None:
        self.images = self.images_agreeing = self.cells = self.cells_agreeing = 0
        self._named = Counter[int]()
        self._classes = Counter[int]()

    def add(self, truth: int, label_map: LabelMap) -> None:
        """Count one image, whose folder class is `truth`."""
        values = label_map.values.astype(np.float64)
        ids = label_map.ids
        top = np.take_along_axis(ids, values.argmax(axis=0)[None], axis=0)[0]  # (h, w)
        if label_map.void is None:
            shares = np.exp(values - values.max(axis=0))
            shares /= shares.sum(axis=0)
        else:
            shares = values * (1 - label_map.void)
            top = top[values.any(axis=0)]
        classes, position = np.unique(ids, return_inverse=True)
        self.images += 1
        self.images_agreeing += int(classes[np.bincount(position.ravel(), shares.ravel()).argmax()] == truth)
        self.cells += top.size
        self.cells_agreeing += int((top == truth).sum())
        self._classes[truth] += 1
        self._named.update(top.ravel().tolist())

    def summary(self) -> dict[str, Any]:
        """Return the shares and the counts to which they refer; {} without images."""
        if not self.images:
            return {}
        by_chance = sum(count * self._named[class_id] for class_id, count in self._classes.items())
        return {
            "images": self.images,
            "images_naming_their_class": self.images_agreeing / self.images,
            "cells": self.cells,
            "cells_naming_their_class": self.cells_agreeing / self.cells,
            # the expected share if the labels were assigned to the images at random
            "cells_by_chance": by_chance / (self.cells * self.images),
        }


def agreement_text(summary: Mapping[str, Any]) -> str:
    """Return a summary as one line of text."""
    if not summary:
        return "agreement with the folders' classes: not measured"
    return (
        "labels, averaged over their cells, name the folder's class for "
        f"{100 * summary['images_naming_their_class']:.2f} % of {summary['images']} images, a single cell for "
        f"{100 * summary['cells_naming_their_class']:.2f} % of {summary['cells']} cells "
        f"({100 * summary['cells_by_chance']:.2f} % by chance)"
    )

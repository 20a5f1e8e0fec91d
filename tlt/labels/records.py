"""What a reader of label maps gives, wherever they lie: one record per image, and what all records have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tlt.label_map import Area

GRID_FIELDS = ("values", "ids", "log_sum_exp")


class Record(NamedTuple):
    """The label map of an image, as it is stored.

    Attributes:
        values: (k, h, w) float16 logits.
        ids: (k, h, w) whole numbers.
        log_sum_exp: (h, w) float32, of all the annotator's logits; None: it isn't recorded.
        area: (4,) float32 x0, y0, x1, y1: share of the image that the map covers; -1 where it depends on the image's
            size; None where the store says it for all.
        size: (2,) width and height of the image the map was made of; 0: not known.
    """

    values: np.ndarray
    ids: np.ndarray
    log_sum_exp: np.ndarray | None = None
    area: np.ndarray | None = None
    size: np.ndarray | None = None


@dataclass(frozen=True)
class MapForm:
    """What all the records have in common.

    Attributes:
        shape: (k, h, w).
        max_id: The largest class id.
        area: "full", "center" or (x0, y0, x1, y1).
        log_sum_exp: Whether records have it.
        labels_json: How they were made, as text (`tlt.labels.metadata`); None: not known.
    """

    shape: tuple[int, int, int]
    max_id: int
    area: str | Area
    log_sum_exp: bool
    labels_json: str | None


class Reader(Protocol):
    """Label maps of a list of images, where they lie: a tree of files, an archive, or tar shards.

    Attributes:
        missing: Images without a map.
        form: None where nothing is recorded of all maps: a published tree.
    """

    root: str
    missing: set[int]

    @property
    def form(self) -> MapForm | None: ...

    def record(self, index: int) -> Record:
        """The map of image `index`, which is not missing. Raises UserError: it is damaged."""

    def source(self, index: int) -> str:
        """Where the map of image `index` is, for messages."""

    def usual_label(self, name: str) -> str:
        """The label file that is looked for first for an image."""

    def identity(self) -> bytes:
        """What a checkpoint knows these labels by, besides shape and area: the text that describes them. An archive's
        holds checksums of its files; of a tree, some files count too."""

    def extra(self) -> list[str]:
        """Labels that belong to none of the images."""

    def damaged_files(self) -> list[str]:
        """Files whose checksum is wrong; [] where there are none to compare."""

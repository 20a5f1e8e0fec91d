"""The interface of all readers of label maps: one record per image, and what all records have in common.

Of the classes that a cell does not list, published targets take the logits to be 0. With the log-sum-exp of all the
annotator's logits their true share is known: `--label-tail exact` gives each of them the same logit,
t = log((exp(LSE) - sum of exp(listed)) / (C - k)), so that listed classes have the annotator's own probabilities. A
softmax doesn't change if all logits are shifted: with t subtracted from the listed ones (`relative_to_tail`), the
others have 0, as the code that makes targets expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tlt.label_map import Area

GRID_FIELDS = ("values", "ids", "log_sum_exp")


class Record(NamedTuple):
    """The stored label map of an image.

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
        log_sum_exp: Whether records have a log-sum-exp.
        labels_json: How the maps were made, as text (`tlt.labels.metadata`); None: not known.
    """

    shape: tuple[int, int, int]
    max_id: int
    area: str | Area
    log_sum_exp: bool
    labels_json: str | None


class Reader(Protocol):
    """Reads the label maps of a list of images from a tree of files, an archive, or tar shards.

    Attributes:
        missing: Images without a map.
        form: None for a published tree, which records nothing about its maps.
    """

    root: str
    missing: set[int]

    @property
    def form(self) -> MapForm | None: ...

    def record(self, index: int) -> Record:
        """The map of image `index`, which is not missing. Raises UserError if it is damaged."""

    def source(self, index: int) -> str:
        """Where the map of image `index` is, for messages."""

    def usual_label(self, name: str) -> str:
        """The label file that is looked for first for an image."""

    def identity(self) -> bytes:
        """What a checkpoint compares to recognise these labels, besides shape and area: the text that describes them.
        An archive's text holds checksums of its files; a tree adds the contents of some of its files."""

    def extra(self) -> list[str]:
        """Labels that belong to none of the images."""

    def damaged_files(self) -> list[str]:
        """Files whose checksum is wrong; [] where no checksums are recorded."""


def relative_to_tail(values: Tensor, log_sum_exp: Tensor, num_classes: int) -> Tensor:
    """Listed logits less the mean logit t of those that are not listed.

    A tail share too small for float32 (rounding may even make it negative) counts as half the last digit
    of the log-sum-exp: probabilities are right to about 1e-7 times that, and logits stay finite.

    Args:
        values: (..., k, h, w), of different classes in a cell.
        log_sum_exp: (..., h, w) float32.
        num_classes: C.

    Returns:
        (..., k, h, w) float32. Where all classes are listed there is no tail, and the values are as they were.
    """
    k = values.shape[-3]
    if k >= num_classes:
        return values.float()
    total = log_sum_exp.double()
    last_digit = 2.0**-24 * total.abs().clamp(min=1)
    share = torch.maximum(-torch.expm1(values.double().logsumexp(-3) - total), last_digit)
    tail = total + torch.log(share / (num_classes - k))
    return (values.double() - tail.unsqueeze(-3)).float()

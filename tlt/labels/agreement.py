"""How well token labels name the class of their image's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tlt.label_map import LabelMap


class Agreement:
    """Counts, over images, how often labels name the folder's class.

    A cell names its class by its largest logit, an image by the mean of its cells' shares: those of the softmax over
    the k stored logits.
    """

    def __init__(self) -> None:
        self.images = self.images_agreeing = self.cells = self.cells_agreeing = 0
        self._named, self._classes = Counter[int](), Counter[int]()

    def add(self, truth: int, label_map: LabelMap) -> None:
        """Count an image, given the class of its folder."""
        values, ids = label_map.values.astype(np.float64), label_map.ids
        top = np.take_along_axis(ids, values.argmax(axis=0)[None], axis=0)[0]  # (h, w)
        shares = np.exp(values - values.max(axis=0))
        shares /= shares.sum(axis=0)
        found, position = np.unique(ids, return_inverse=True)
        self.images += 1
        self.images_agreeing += int(found[np.bincount(position.ravel(), shares.ravel()).argmax()] == truth)
        self.cells += top.size
        self.cells_agreeing += int((top == truth).sum())
        self._classes[truth] += 1
        self._named.update(top.ravel().tolist())

    def summary(self) -> dict[str, Any]:
        """Shares with what they are shares of; {} without images."""
        if not self.images:
            return {}
        by_chance = sum(count * self._named[each] for each, count in self._classes.items())
        return {
            "images": self.images,
            "images_naming_their_class": self.images_agreeing / self.images,
            "cells": self.cells,
            "cells_naming_their_class": self.cells_agreeing / self.cells,
            # if the same labels were dealt to the images at random
            "cells_by_chance": by_chance / (self.cells * self.images),
        }


def agreement_text(summary: Mapping[str, Any]) -> str:
    """A summary as one line of text."""
    if not summary:
        return "agreement with the folders' classes: not measured"
    return (
        "the mean of the cells' shares names the folder's class for "
        f"{100 * summary['images_naming_their_class']:.2f} % of {summary['images']} images, a single cell for "
        f"{100 * summary['cells_naming_their_class']:.2f} % of {summary['cells']} cells "
        f"({100 * summary['cells_by_chance']:.2f} % by chance)"
    )

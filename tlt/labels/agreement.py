"""How well token labels name the class of their image's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tlt.label_map import LabelMap


def _class_shares(label_map: LabelMap) -> tuple[np.ndarray, np.ndarray]:
    """The class ids of a map, (c,), and the share of each in every cell, (h * w, c).

    Shares are the softmax over the k stored logits of a cell.
    """
    ids, position = np.unique(label_map.ids, return_inverse=True)
    k = label_map.ids.shape[0]
    values = label_map.values.reshape(k, -1).astype(np.float32)
    weights = np.exp(values - values.max(axis=0))
    weights /= weights.sum(axis=0)
    shares = np.zeros((values.shape[1], len(ids)), np.float32)
    cells = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    np.add.at(shares, (cells, position.reshape(k, -1)), weights)
    return ids, shares


class Agreement:
    """Counts, over images, how often labels name the folder's class.

    A cell names its class by its largest logit, an image by the mean of its cells' shares.
    """

    def __init__(self) -> None:
        self.images = self.images_agreeing = self.cells = self.cells_agreeing = 0
        self._named: dict[int, int] = {}
        self._classes: dict[int, int] = {}

    def add(self, truth: int, label_map: LabelMap) -> None:
        """Count an image, given the class of its folder."""
        values, ids = label_map.values, label_map.ids
        top = np.take_along_axis(ids, values.argmax(axis=0)[None], axis=0)[0]  # (h, w)
        found, shares = _class_shares(label_map)
        self.images += 1
        self.images_agreeing += int(found[shares.mean(axis=0).argmax()] == truth)
        self.cells += top.size
        self.cells_agreeing += int((top == truth).sum())
        self._classes[truth] = self._classes.get(truth, 0) + 1
        for class_id, count in zip(*np.unique(top, return_counts=True), strict=True):
            self._named[int(class_id)] = self._named.get(int(class_id), 0) + int(count)

    def chance(self) -> float:
        """Share of cells that would agree if the same labels were dealt to the images at random."""
        total = max(self.cells * self.images, 1)
        return sum(count * self._named.get(each, 0) for each, count in self._classes.items()) / total

    def summary(self) -> dict[str, Any]:
        """Shares with what they are shares of; {} without images."""
        if not self.images:
            return {}
        return {
            "images": self.images,
            "images_naming_their_class": self.images_agreeing / self.images,
            "cells": self.cells,
            "cells_naming_their_class": self.cells_agreeing / self.cells,
            "cells_by_chance": self.chance(),
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

"""Repeats mistakes of the published code that change what is learned, to measure their effect (`--compat`).

They change the window of a label map that `tlt.targets` samples, or the sampled targets. `__init__.py` lists the rows,
which follow TokenLabeling (9dbfd59).

Legend: B images, maps of h x w cells, C classes.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tlt import geometry
from tlt.data.augment.plan import Plan
from tlt.data.dataset import LabelView
from tlt.label_map import FULL_AREA, LabelBatch, has_area
from tlt.targets import Targets
from tlt.upstream import WINDOW_ROWS


def label_view(rows: Collection[str]) -> LabelView | None:
    """Return `published_window` for those rows, for `tlt.data.dataset.TrainDataset`; None if no row changes windows."""
    chosen = frozenset(WINDOW_ROWS).intersection(rows)
    return partial(published_window, chosen) if chosen else None


def published_window(rows: Collection[str], plan: Plan, labels: LabelBatch) -> tuple[LabelBatch, Tensor, Tensor]:
    """Return the label maps of a batch, and the affine (B, 2, 3) and visible part (B, 4) that make
    `tlt.targets.make_targets` read them as the published data set does. `rows` are from WINDOW_ROWS."""
    affine = plan.normalised_affine()
    visible = plan.visible()
    if "label-area" in rows:
        full = torch.tensor(FULL_AREA).expand_as(labels.area)
        labels = replace(labels, area=torch.where(has_area(labels)[:, None], full, labels.area))
    if "label-crop" in rows:
        # The published transform stores (y, x, h, w), and its target maker passes this to roi_align, which expects x
        # first. `plan.crop` is (x, y, w, h), so x and y are exchanged here on purpose.
        y, x, h, w = (plan.crop / np.tile(plan.image_sizes, 2)).T
        moves = geometry.normalise(plan.warp, plan.size, plan.size)
        affine = geometry.compose(moves, geometry.crop(x, y, w, h, 1, 1))
        visible = np.stack([x, y, x + w, y + h], axis=1)
    if "label-scale" in rows:
        # y in cells is (share of the map) * w instead of * h.
        height, width = labels.values.shape[2:]
        top = labels.area[:, 1].double().numpy()
        scale = width / height
        affine = affine.copy()
        visible = visible.copy()
        affine[:, 1, 2] -= top
        affine[:, 1] *= scale
        affine[:, 1, 2] += top
        visible[:, 1::2] = (visible[:, 1::2] - top[:, None]) * scale + top[:, None]
    return labels, torch.from_numpy(affine).float(), torch.from_numpy(visible).float()


def summing_to_more(targets: Targets, labels: LabelBatch, smoothing: float) -> Targets:
    """Change targets from `p (1 - s) + s / C` to `p (1 - s + s / C) + s / C`, with smoothing s. The published code
    applies the on value of one-hot targets to soft ones. The class target of an image without a map is one-hot;
    it stays."""
    floor = smoothing / targets.cls.shape[1]
    factor = (1 - smoothing + floor) / (1 - smoothing)
    cls = torch.where(has_area(labels)[:, None], (targets.cls - floor) * factor + floor, targets.cls)
    tokens = targets.tokens
    if tokens is not None:
        tokens = tokens._replace(base=(tokens.base - floor) * factor + floor, excess=tokens.excess * factor)
    return replace(targets, cls=cls, tokens=tokens)

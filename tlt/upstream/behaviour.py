"""The published code's mistakes that change what is learned, so that their effect can be measured (`--compat`).

They change the window of a label map that the sampler of `tlt.targets` reads, or what it made of it. The rows stand in
`__init__.py`; they retrace TokenLabeling (9dbfd59).

Legend: B images, maps of h x w cells, C classes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tlt import geometry
from tlt.data.augment.plan import Plan
from tlt.data.dataset import LabelView
from tlt.label_map import FULL_AREA, LabelBatch
from tlt.targets import Targets, known
from tlt.upstream import WINDOW_ROWS


def label_view(rows: Collection[str]) -> LabelView | None:
    """`published_window` of those rows, for `tlt.data.dataset.TrainDataset`; None where none of them concerns it."""
    chosen = frozenset(WINDOW_ROWS).intersection(rows)
    return partial(published_window, chosen) if chosen else None


def published_window(rows: Collection[str], plan: Plan, labels: LabelBatch) -> tuple[LabelBatch, Tensor, Tensor]:
    """The label maps of a batch, and the affine (B, 2, 3) and visible part (B, 4) with which `tlt.targets.make_targets`
    reads them, as the published data set would have them. `rows` are of WINDOW_ROWS."""
    affine, visible = plan.normalised_affine(), plan.visible()
    if "label-area" in rows:
        full = torch.tensor(FULL_AREA).expand_as(labels.area)
        labels = replace(labels, area=torch.where(known(labels)[:, None], full, labels.area))
    if "label-crop" in rows:
        # The transform stores (y, x, h, w), and the target maker hands them to roi_align, which takes x first.
        y, x, h, w = (plan.crop / np.tile(plan.source, 2)).T
        moves = geometry.normalise(plan.warp, plan.size, plan.size)
        affine = geometry.compose(moves, geometry.crop(x, y, w, h, 1, 1))
        visible = np.stack([x, y, x + w, y + h], axis=1)
    if "label-scale" in rows:
        # y in cells is (share of the map) * w in place of * h.
        height, width = labels.values.shape[2:]
        top, scale = labels.area[:, 1].double().numpy(), width / height
        affine, visible = affine.copy(), visible.copy()
        affine[:, 1, 2] -= top
        affine[:, 1] *= scale
        affine[:, 1, 2] += top
        visible[:, 1::2] = (visible[:, 1::2] - top[:, None]) * scale + top[:, None]
    return labels, torch.from_numpy(affine).float(), torch.from_numpy(visible).float()


def summing_to_more(targets: Targets, labels: LabelBatch, smoothing: float) -> Targets:
    """The same targets with `p (1 - s + s / C) + s / C` in place of `p (1 - s) + s / C`, of a smoothing s: the
    published on value is that of one-hot targets, put on soft ones. The truth, which stands in for an image without a
    map, is one-hot."""
    floor = smoothing / targets.cls.shape[1]
    factor = (1 - smoothing + floor) / (1 - smoothing)
    cls = torch.where(known(labels)[:, None], (targets.cls - floor) * factor + floor, targets.cls)
    tokens = targets.tokens
    if tokens is not None:
        tokens = tokens._replace(base=(tokens.base - floor) * factor + floor, excess=tokens.excess * factor)
    return replace(targets, cls=cls, tokens=tokens)

"""The behaviour of the published code, where ours differs and `--compat` asks for it (`tlt.upstream.rows`).

Each function retraces one mistake or habit of TokenLabeling (9dbfd59) or VOLO (cf35775). They change the geometry or
the map that the sampler of `tlt.targets` is given, or what it made of them, so that nothing else knows of them.

Legend: B images, maps of h x w cells with k classes each, N = rows * cols tokens, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.ops import roi_align

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, Plan, Steps, flips_and_operations
from tlt.data.augment.rand_augment import Kernel
from tlt.data.dataset import LabelView
from tlt.errors import UserError
from tlt.label_map import FULL_AREA, Area, LabelBatch
from tlt.targets import SparseLabels, Targets, check_size, known, one_hot, smooth
from tlt.upstream.rows import LABEL_ROWS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TargetMaker = Callable[..., Targets]  # with the arguments and results of `tlt.targets.make_targets`


def views(rows: Collection[str]) -> LabelView | None:
    """`label_view` of those rows, for `tlt.data.dataset.TrainDataset`; None where none of them concerns it."""
    chosen = frozenset(LABEL_ROWS).intersection(rows)
    return partial(label_view, chosen) if chosen else None


def label_view(
    rows: Collection[str], config: AugmentConfig, steps: Steps, plan: Plan, labels: LabelBatch
) -> tuple[LabelBatch, Tensor, Tensor]:
    """The label maps of a batch, the affine (B, 2, 3) and the visible part (B, 4) with which they are read (see
    `tlt.targets.make_targets`), as the published data set would have them.

    Args:
        rows: Of `tlt.upstream.rows.LABEL_ROWS`; others are left to others.
        steps: What the plan was composed of.
    """
    if "half-ids" in rows:
        labels = replace(labels, ids=labels.ids.half().int())
    if "label-area" in rows:
        full = torch.tensor(FULL_AREA).expand_as(labels.area)
        labels = replace(labels, area=torch.where(known(labels)[:, None], full, labels.area))
    affine, visible = plan.normalised_affine(), plan.visible()
    if "label-affine" in rows:
        labels = moved_maps(labels, steps)
        affine, visible = _crop_shares(steps, plan.source, "label-crop" in rows), np.tile(FULL_AREA, (len(plan), 1))
    elif "label-crop" in rows:
        affine, visible = _with_transposed_crop(config, steps, plan)
    if "label-scale" in rows:
        affine, visible = _scaled_by_width(affine, visible, labels)
    return labels, torch.from_numpy(affine).float(), torch.from_numpy(visible).float()


def _crop_shares(steps: Steps, source: Ints, transposed: bool) -> geometry.Affine:
    """(B, 2, 3) unit square -> crop, in shares of the image.

    The published transform stores (y, x, h, w) and the target maker hands them to roi_align, which takes x first.
    """
    x, y, w, h = (steps.crop / np.tile(source, 2)).T
    return geometry.crop(y, x, h, w, 1, 1) if transposed else geometry.crop(x, y, w, h, 1, 1)


def _with_transposed_crop(config: AugmentConfig, steps: Steps, plan: Plan) -> tuple[geometry.Affine, Floats]:
    """The plan's affine in shares and the visible part, with another window in place of the crop."""
    crop = _crop_shares(steps, plan.source, transposed=True)
    if config.aug_order == "published":
        before = flips_and_operations(config, steps, plan.source)
        height, width = plan.source[:, 1], plan.source[:, 0]
        moved = geometry.normalise(before, (height, width), (height, width))
        return geometry.compose(crop, moved), np.tile(FULL_AREA, (len(plan), 1))
    window = geometry.apply(crop, [[0.0, 0.0], [1.0, 1.0]]).reshape(-1, 4)
    return geometry.compose(geometry.normalise(plan.warp, plan.size, plan.size), crop), window


def _scaled_by_width(affine: geometry.Affine, visible: Floats, labels: LabelBatch) -> tuple[geometry.Affine, Floats]:
    """The affine with y in the map's cells equal to (share of the map) * w rather than * h."""
    height, width = labels.values.shape[2:]
    top = labels.area[:, 1].double().numpy()
    affine, visible = affine.copy(), visible.copy()
    affine[:, 1, 2] -= top
    affine[:, 1] *= width / height
    affine[:, 1, 2] += top
    visible[:, 1::2] = (visible[:, 1::2] - top[:, None]) * (width / height) + top[:, None]
    return affine, visible


def moved_maps(labels: LabelBatch, steps: Steps) -> LabelBatch:
    """The maps after flips and geometric operations, moved cell by cell in their own grid.

    One operation after the other, with scipy's `affine_transform(order=0)` on index coordinates: values from outside
    are 0, ids those of the edge. Absolute translations move nothing: they have no counterpart for labels.
    """
    values, ids = labels.values, labels.ids
    for axis, flags in ((3, steps.mirrored[:, 0]), (2, steps.mirrored[:, 1])):
        chosen = torch.from_numpy(flags)[:, None, None, None]
        values, ids = torch.where(chosen, values.flip(axis), values), torch.where(chosen, ids.flip(axis), ids)
    for layer in range(steps.kernels.shape[1]):
        maps = _index_maps(steps.kernels[:, layer], steps.values[:, layer], values.shape[2], values.shape[3])
        values, ids = _move(values, ids, maps)
    return replace(labels, values=values, ids=ids)


def _index_maps(kernels: Ints, values: Floats, h: int, w: int) -> geometry.Affine:
    """(B, 2, 3) maps from (row, column, 1) of a cell of the result to the (row, column) of its source."""
    cos, sin = (np.round(f(np.radians(values)), 15) for f in (np.cos, np.sin))
    turned = [[cos, sin, h / 2 - cos * h / 2 - sin * w / 2], [-sin, cos, w / 2 + sin * h / 2 - cos * w / 2]]
    one, none = np.ones_like(values), np.zeros_like(values)
    forms: dict[Kernel, list[list[Any]]] = {
        Kernel.ROTATE: turned,
        Kernel.SHEAR_X: [[one, none, none], [values, one, none]],
        Kernel.SHEAR_Y: [[one, values, none], [none, one, none]],
        Kernel.TRANSLATE_X: [[one, none, none], [none, one, values * w]],
        Kernel.TRANSLATE_Y: [[one, none, values * h], [none, one, none]],
    }
    maps = geometry.identity(len(values))
    for kernel, form in forms.items():
        rows = kernels == kernel
        maps[rows] = np.array(form).transpose(2, 0, 1)[rows]
    return maps


def _move(values: Tensor, ids: Tensor, maps: geometry.Affine) -> tuple[Tensor, Tensor]:
    """Values and ids (B, k, h, w) of the cells that `maps` leads to."""
    batch, k, h, w = values.shape
    places = geometry.apply(maps, np.indices((h, w)).reshape(2, -1).T)  # (B, h * w, 2) row, column
    last = np.array([h, w]) - 1
    outside = torch.from_numpy(((places < 0) | (places > last)).any(2))
    row, column = np.floor(places.clip(0, last) + 0.5).astype(np.int64).transpose(2, 0, 1)
    cells = torch.from_numpy(row * w + column)[:, None].expand(-1, k, -1)
    kept = values.flatten(2).gather(2, cells).masked_fill(outside[:, None], 0)
    return kept.view_as(values), ids.flatten(2).gather(2, cells).view_as(ids)


def target_maker(rows: Collection[str], usual: TargetMaker) -> TargetMaker:
    """The function that makes targets under `--compat`: `usual`, changed by the rows roi-align and target-sum."""
    make = make_roi_targets if "roi-align" in rows else usual
    if "target-sum" not in rows:
        return make

    def make_more(labels: LabelBatch, *arguments: Any) -> Targets:
        return summing_to_more(make(labels, *arguments), labels)

    return make_more


def make_roi_targets(
    labels: LabelBatch,
    affine: Tensor,
    visible: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.1,
    token_label_size: int | None = None,
    uncovered: str = "uniform",
    window: Area = FULL_AREA,
) -> Targets:
    """Like `tlt.targets.make_targets` for plain windows, with `torchvision.ops.roi_align` called as published.

    Not aligned, of boxes moved by half a cell, with as many points as a token has cells, and the crop's label of its
    own points. Nothing is uncovered: what lies more than a cell outside of the map is 0.
    """
    check_size(token_label_size, grid)
    covers = known(labels)
    # An empty map would be read at points without number.
    low, high = labels.area.to(affine).masked_fill(~covers[:, None], 0).split(2, 1)  # (B, 2) x, y
    extent = (high - low).masked_fill(~covers[:, None], 1)
    cells = affine.new_tensor(labels.values.shape[:1:-1])  # w, h
    scale = affine[:, :, :2].diagonal(dim1=1, dim2=2)

    def rois(part: Area) -> Tensor:
        corners = [affine[:, :, 2] + scale * affine.new_tensor(corner) for corner in (part[:2], part[2:])]
        number = torch.arange(len(covers), device=affine.device, dtype=affine.dtype)[:, None]
        return torch.cat([number, *((corner - low) / extent * cells - 0.5 for corner in corners)], 1)

    truth = one_hot(classes.long(), num_classes, smoothing, affine.dtype)
    with torch.autocast(affine.device.type, enabled=False):
        maps = dense_maps(labels, num_classes, affine.dtype)  # (B, C, h, w)
        crop = smooth(roi_align(maps, rois(FULL_AREA), (1, 1)).flatten(1).softmax(-1), smoothing)
        tokens = None
        if token_label_size != 1:
            tokens = smooth(roi_align(maps, rois(window), grid).flatten(2).transpose(1, 2).softmax(-1), smoothing)
    cls = torch.where(covers[:, None], crop, truth)
    weight = None if tokens is None else covers.to(cls)[:, None].expand(tokens.shape[:2])
    return Targets(cls, None if tokens is None else SparseLabels.of(tokens), weight, classes.long(), smoothing, grid)


def summing_to_more(targets: Targets, labels: LabelBatch) -> Targets:
    """The same targets with `p (1 - s + s / C) + s / C` in place of `p (1 - s) + s / C`: the published on value is that
    of one-hot targets, put on soft ones. The truth, which stands in for an image without a map, is one-hot."""
    classes, s = targets.cls.shape[1], targets.smoothing
    floor, factor = s / classes, (1 - s + s / classes) / (1 - s)
    cls = torch.where(known(labels)[:, None], (targets.cls - floor) * factor + floor, targets.cls)
    tokens = targets.tokens
    if tokens is not None:
        tokens = SparseLabels((tokens.base - floor) * factor + floor, tokens.ids, tokens.excess * factor)
    return replace(targets, cls=cls, tokens=tokens)


def dense_maps(labels: LabelBatch, num_classes: int, dtype: torch.dtype) -> Tensor:
    """(B, C, h, w) logits of every cell, 0 for classes it does not list."""
    ids, values = labels.ids.long(), labels.values.to(dtype)  # (B, k, h, w)
    dense = values.new_zeros(len(ids), num_classes, *ids.shape[2:])
    return dense.scatter_reduce_(1, ids, values, "amax", include_self=False)


def check_half_ids(num_classes: int) -> None:
    """Raise UserError where a class id rounded to half precision is none of the classes any more."""
    with np.errstate(over="ignore"):
        last = float(np.float16(num_classes - 1))
    if last >= num_classes:
        raise UserError(
            f"--compat half-ids: class {num_classes - 1} of {num_classes} becomes {last:g}, which is none: "
            "leave the row out (no-half-ids)"
        )


class UpstreamBoxes:
    """MixToken's boxes as published: from numpy's legacy generator, seeded with seed + rank, one after the other.

    The published code draws from numpy's global state. Here box k is found by drawing the k before it, in a generator
    of its own, so that it is a function of k and a resumed run goes on with the same boxes.

    Raises:
        UserError: numpy's legacy generator takes no such seed.
    """

    def __init__(self, seed: int, rank: int, grid: tuple[int, int]) -> None:
        if seed + rank >= 2**32:
            raise UserError(f"--compat mixtoken-rng: --seed {seed} is too large for numpy's legacy generator (2^32)")
        self._seed, self._grid = seed + rank, grid
        self._restart()

    def _restart(self) -> None:
        self._generator, self._drawn = np.random.RandomState(self._seed), 0

    def __call__(self, k: int) -> tuple[int, int, int, int]:
        """Box k (0, 1, ...): row0, col0, row1, col1. The box after the last one costs one draw, an earlier one all."""
        if k < self._drawn:
            self._restart()
        while True:
            box = self._draw()
            self._drawn += 1
            if self._drawn > k:
                return box

    def _draw(self) -> tuple[int, int, int, int]:
        share = math.sqrt(1.0 - self._generator.beta(1.0, 1.0))
        centres = [int(self._generator.randint(side)) for side in self._grid]
        halves = [int(side * share) // 2 for side in self._grid]
        ends = [(max(c - half, 0), min(c + half, s)) for c, half, s in zip(centres, halves, self._grid, strict=True)]
        (row0, row1), (col0, col1) = ends
        return row0, col0, row1, col1

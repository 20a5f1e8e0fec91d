"""Token targets, and the dense definition that other tests hold them against (`tests.labels.dense_targets`), against
roi_align. test_sparse_targets.py has the plain float64 loop for any affine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align

from tests.labels.dense_targets import sample_tokens
from tlt.label_map import FULL_AREA, NO_AREA, LabelBatch, LabelMap
from tlt.targets import make_targets, points_per_token

CLASSES = 11


def random_labels(batch: int, k: int, h: int, w: int, classes: int = CLASSES, seed: int = 0) -> LabelBatch:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((batch, classes, h, w)), axis=1)[:, :k].astype(np.int32)
    values = (rng.standard_normal((batch, k, h, w)) * 4).astype(np.float16)
    return LabelBatch.stack([LabelMap(v, i) for v, i in zip(values, ids, strict=True)])


def dense_map(labels: LabelBatch, classes: int = CLASSES) -> Tensor:
    """(B, C, h, w) float64, written cell by cell."""
    batch, k, h, w = labels.values.shape
    dense = torch.zeros(batch, classes, h, w, dtype=torch.float64)
    for b, j, r, c in np.ndindex(batch, k, h, w):
        dense[b, labels.ids[b, j, r, c], r, c] = labels.values[b, j, r, c].double()
    return dense


def random_boxes(batch: int, seed: int = 1) -> Tensor:
    """(B, 4) x0, y0, x1, y1 float64 in the unit square, off the diagonal."""
    rng = np.random.default_rng(seed)
    size = 0.2 + 0.5 * rng.random((batch, 2))
    start = rng.random((batch, 2)) * (1 - size)
    return torch.from_numpy(np.concatenate([start, start + size], axis=1))


def crop_affine(boxes: Tensor) -> Tensor:
    x0, y0, x1, y1 = boxes.unbind(1)
    none = torch.zeros_like(x0)
    return torch.stack([x1 - x0, none, x0, none, y1 - y0, y0], 1).view(-1, 2, 3)


def everything(batch: int) -> Tensor:
    return torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64).repeat(batch, 1)


def roi_reference(labels: LabelBatch, boxes: Tensor, size: tuple[int, int], points: int) -> Tensor:
    """(B, N, C) by torchvision, boxes scaled to cells per axis."""
    h, w = labels.values.shape[2:]
    cells = boxes * torch.tensor([w, h, w, h], dtype=torch.float64)
    rois = torch.cat([torch.arange(len(boxes), dtype=torch.float64)[:, None], cells], 1)
    pooled = roi_align(dense_map(labels), rois, size, sampling_ratio=points, aligned=True)
    return pooled.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("cells", [(18, 18), (10, 20), (32, 24), (1, 7)])
@pytest.mark.parametrize("grid", [(14, 14), (8, 6)])
def test_plain_crops_equal_roi_align_with_the_true_box(cells: tuple[int, int], grid: tuple[int, int]) -> None:
    labels, boxes = random_labels(3, 5, *cells), random_boxes(3)
    n = points_per_token(cells, grid)
    expected = roi_reference(labels, boxes, grid, n)
    logits, coverage = sample_tokens(labels, crop_affine(boxes), grid, boxes, CLASSES)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert (coverage == 1).all()
    single, _ = sample_tokens(labels, crop_affine(boxes).float(), grid, boxes.float(), CLASSES)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=5e-5)


def test_transposed_and_square_boxes_are_something_else() -> None:
    """The two published mistakes would be seen: (y, x) order, and both axes scaled by the map's width."""
    labels, boxes = random_labels(3, 5, 10, 20), random_boxes(3)
    logits, _ = sample_tokens(labels, crop_affine(boxes), (5, 5), boxes, CLASSES)
    n = points_per_token((10, 20), (5, 5))
    for wrong in (boxes[:, [1, 0, 3, 2]], boxes * torch.tensor([1.0, 2.0, 1.0, 2.0])):
        assert (roi_reference(labels, wrong, (5, 5), n) - logits).abs().max() > 1


def test_token_sees_the_label_of_the_flipped_cell() -> None:
    """Class = column, no interpolation to blur it: a mirrored crop has the classes in reverse order."""
    ids = np.tile(np.arange(4, dtype=np.int32), (1, 4, 1))
    labels = LabelBatch.stack([LabelMap(np.full((1, 4, 4), 8, np.float16), ids)])
    mirror = torch.tensor([[[-1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    logits, _ = sample_tokens(labels, mirror, (4, 4), everything(1).float(), 4)
    assert logits.argmax(-1).view(4, 4).tolist() == [[3, 2, 1, 0]] * 4


def test_points_per_token_leave_no_cell_out() -> None:
    assert points_per_token((18, 18), (14, 14)) == points_per_token((7, 7), (28, 28)) == 2
    assert points_per_token((32, 24), (8, 8)) == 4
    assert points_per_token((7, 60), (14, 14)) == math.ceil(60 / 14)


def test_class_ids_above_2048_are_exact() -> None:
    ids = np.array([[2049, 4097], [9998, 9999]], np.int32)[None]
    labels = LabelBatch.stack([LabelMap(np.full((1, 2, 2), 9, np.float16), ids)])
    whole = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    logits, _ = sample_tokens(labels, whole, (2, 2), everything(1).float(), 10_000)
    assert logits.argmax(-1).tolist() == [[2049, 4097, 9998, 9999]]


def test_targets_are_the_published_softmax_with_smoothing_that_sums_to_one() -> None:
    labels, boxes, classes = random_labels(3, 5, 18, 18), random_boxes(3), torch.tensor([4, 0, 10])
    made = make_targets(labels, crop_affine(boxes), boxes, classes, (6, 6), CLASSES, smoothing=0.1)
    tokens = roi_reference(labels, boxes, (6, 6), 3).softmax(-1)
    crop = roi_reference(labels, boxes, (1, 1), 3 * 6)[:, 0].softmax(-1)
    assert made.tokens is not None and made.weight is not None
    found = made.tokens.dense(CLASSES)
    torch.testing.assert_close(found, 0.9 * tokens + 0.1 / CLASSES, rtol=0, atol=1e-12)
    torch.testing.assert_close(made.cls, 0.9 * crop + 0.1 / CLASSES, rtol=0, atol=1e-12)
    for target in (found, made.cls, made.truth_target()):
        torch.testing.assert_close(target.sum(-1), torch.ones(target.shape[:-1], dtype=torch.float64))
    assert made.truth_target()[0].tolist() == pytest.approx([0.1 / 11] * 4 + [0.9 + 0.1 / 11] + [0.1 / 11] * 6)


def test_nothing_covered_means_the_folder_class_and_no_token_weight() -> None:
    labels = LabelBatch.stack([LabelMap.unknown((2, 4, 4)), LabelMap.unknown((2, 4, 4), FULL_AREA)])
    assert tuple(labels.area[0].tolist()) == NO_AREA
    whole = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]).repeat(2, 1, 1)
    made = make_targets(labels, whole, everything(2).float(), torch.tensor([2, 2]), (2, 2), 4, smoothing=0.1)
    assert made.weight is not None and made.weight.tolist() == [[0.0] * 4, [1.0] * 4]
    assert made.cls[0].tolist() == pytest.approx([0.025, 0.025, 0.925, 0.025])
    assert made.cls[1].tolist() == pytest.approx([0.25] * 4)
    assert made.tokens is not None and torch.isfinite(made.tokens.dense(4)).all()

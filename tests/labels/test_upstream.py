"""The rows of `--compat` against what they retrace: torchvision's roi_align, called with the published coordinates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import roi_align

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.label_map import NO_AREA, LabelBatch, LabelMap
from tlt.targets import make_targets, points_per_token
from tlt.upstream import WINDOW_ROWS
from tlt.upstream.behaviour import label_view, published_window, summing_to_more

CLASSES, GRID, SMOOTHING = 8, (4, 4), 0.1
CROPS = AugmentConfig((56, 56), hflip=0.0, auto_augment=None, color_jitter=None)


def some_labels(cells: tuple[int, int], k: int = 3, count: int = 60) -> LabelBatch:
    rng = np.random.default_rng(7)
    values = (rng.standard_normal((count, k, *cells)) * 4).astype(np.float16)
    ids = np.argsort(rng.random((count, CLASSES, *cells)), axis=1)[:, :k].astype(np.int32)
    return LabelBatch.stack([LabelMap(v, i) for v, i in zip(values, ids, strict=True)])


def planned(config: AugmentConfig, count: int = 60, source: tuple[int, int] = (500, 375)):
    return make_plan(config, 3, 5, np.arange(count), *source)


@pytest.mark.parametrize("cells", [(10, 20), (18, 18)])
def test_all_rows_together_are_roi_align_of_the_published_box(cells):
    labels, plan = some_labels(cells, count=200), planned(replace(CROPS, scale=(0.02, 0.2)), 200)
    labels.area[:] = torch.tensor([0.125, 0.0, 0.875, 1.0])  # which the published code does not know of
    x, y, w, h = (torch.from_numpy(plan.crop) / torch.tensor([500, 375, 500, 375])).unbind(1)
    boxes = torch.stack([y, x, y + h, x + w], 1) * cells[1]  # in cells; roi_align takes them for x, y, x, y
    inside = (boxes <= torch.tensor([cells[1], cells[0]] * 2)).all(1)
    assert inside.sum() > 10
    ids, values = labels.ids.long(), labels.values.double()
    dense = torch.zeros(len(labels), CLASSES, *cells, dtype=torch.float64).scatter_(1, ids, values)
    boxes = torch.cat([torch.arange(len(labels))[:, None], boxes], 1).double()
    points = points_per_token(cells, GRID)
    soft = roi_align(dense, boxes, GRID, 1.0, points, aligned=True).flatten(2).softmax(1).transpose(1, 2)
    expected = soft * (1 - SMOOTHING + SMOOTHING / CLASSES) + SMOOTHING / CLASSES

    view = published_window(WINDOW_ROWS, plan, labels)
    made = make_targets(*view, torch.zeros(len(labels)), GRID, CLASSES, SMOOTHING, uncovered="uniform")
    made = summing_to_more(made, labels, SMOOTHING)
    assert made.tokens is not None and (made.tokens.weight == 1).all()
    torch.testing.assert_close(made.tokens.dense(CLASSES)[inside].double(), expected[inside], rtol=1e-4, atol=1e-5)


def test_label_crop_mirrors_the_window_and_nothing_else():
    """The label of a point is that of the point as far into the mirrored window, through the same operations."""
    labels, plan = some_labels((10, 20)), planned(AugmentConfig((56, 80), vflip=0.3))
    same, affine, visible = published_window(["label-crop"], plan, labels)
    assert torch.equal(same.values, labels.values) and torch.equal(same.area, labels.area)
    x, y, w, h = (plan.crop / [500, 375, 500, 375]).T
    to_window = geometry.crop(-x / w, -y / h, 1 / w, 1 / h, 1, 1)
    expected = geometry.compose(geometry.compose(plan.normalised_affine(), to_window), geometry.crop(y, x, h, w, 1, 1))
    assert np.allclose(affine.numpy(), expected, atol=1e-5)
    assert np.allclose(visible.numpy(), np.stack([y, x, y + h, x + w], 1), atol=1e-6)
    assert label_view(["uncovered", "target-sum"]) is None  # which have no window


def test_label_scale_stretches_the_window_and_nothing_else():
    labels, plan = some_labels((10, 20)), planned(CROPS)
    labels.area[:] = torch.tensor([0.125, 0.25, 0.875, 0.75])
    _, affine, visible = published_window(["label-scale"], plan, labels)
    corners = np.array([[0.0, 0.0], [1.0, 1.0]])  # of the output: without a warp it shows just what is visible
    assert np.allclose(geometry.apply(affine.numpy(), corners).reshape(-1, 4), visible.numpy(), atol=1e-5)
    x0, y0, x1, y1 = plan.visible().T
    assert np.allclose(visible.numpy(), np.stack([x0, 2 * y0 - 0.25, x1, 2 * y1 - 0.25], 1), atol=1e-5)


def test_target_sum_leaves_the_class_of_an_image_without_a_map():
    labels, plan = some_labels((10, 20), count=4), planned(CROPS, 4)
    labels.area[3] = torch.tensor(NO_AREA)
    window = torch.from_numpy(plan.normalised_affine()), torch.from_numpy(plan.visible())
    made = summing_to_more(make_targets(labels, *window, torch.arange(4), GRID, CLASSES, SMOOTHING), labels, SMOOTHING)
    more = 1 + SMOOTHING / CLASSES
    assert made.cls.sum(1).tolist() == pytest.approx([more, more, more, 1])
    assert made.tokens.dense(CLASSES).sum(-1).flatten().tolist() == pytest.approx([more] * 4 * 16)

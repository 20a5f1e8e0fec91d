"""Targets from masks: against polygons clipped in float64, and against counting pixels."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tlt.data.augment.plan import AugmentConfig, make_plan
from tlt.label_map import FULL_AREA, NO_AREA, LabelBatch, LabelMap
from tlt.targets import make_targets

CLASSES = 6


def random_case(cells: tuple[int, int], k: int = 3) -> tuple[LabelBatch, Tensor, Tensor, Tensor]:
    """Shares with an unlisted rest and void, one map that covers a part, one that covers nothing; turned crops that
    leave the image, one mirrored and one that shows a part of the source alone."""
    rng = np.random.default_rng(0)
    maps = []
    for _ in range(4):
        values = rng.dirichlet(np.ones(k + 1), cells).transpose(2, 0, 1)[:k].astype(np.float32)
        values[-1][rng.random(cells) < 0.3] = 0
        ids = rng.permuted(np.tile(np.arange(CLASSES), (*cells, 1)), axis=-1)[..., :k].transpose(2, 0, 1)
        void = rng.random(cells).astype(np.float32) * (rng.random(cells) < 0.5)
        void[0] = 1
        maps.append(LabelMap(values * (void < 1), ids.astype(np.int32), void=void).validate(CLASSES))
    stacked = LabelBatch.stack(maps)
    area = torch.tensor([FULL_AREA, (0.1, 0.0, 0.8, 1.0), NO_AREA, FULL_AREA])
    labels = LabelBatch(stacked.values, stacked.ids, area, void=stacked.void)
    affine = torch.tensor([[0.5, 0.2, 0.2], [-0.1, 0.7, 0.3]]).repeat(4, 1, 1).double()
    affine[1] = torch.tensor([[-0.9, 0.0, 0.95], [0.0, 0.8, 0.15]])
    affine[3] = torch.tensor([[0.2, -0.9, 0.8], [1.2, 0.3, -0.2]])
    visible = torch.tensor(FULL_AREA).repeat(4, 1).double()
    visible[3] = torch.tensor([0.2, 0.1, 0.9, 0.7])
    return labels, affine, visible, torch.arange(4)


def clipped(polygon: list[np.ndarray], axis: int, limit: float, sign: int) -> list[np.ndarray]:
    """Cut off a polygon's part beyond a line (Sutherland and Hodgman, 1974)."""
    kept = []
    for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        inside_a, inside_b = (sign * (p[axis] - limit) <= 0 for p in (a, b))
        if inside_a:
            kept.append(a)
        if inside_a != inside_b:
            kept.append(a + (b - a) * (limit - a[axis]) / (b[axis] - a[axis]))
    return kept


def area_of(polygon: list[np.ndarray]) -> float:
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(a[0] * b[1] - a[1] * b[0] for a, b in pairs)) / 2


def label_of(labels, b, affine, visible, box, uncovered) -> tuple[np.ndarray, float]:
    """The shares of classes in a part `box` of a crop, and how much of it is known; by definition."""
    x0, y0, x1, y1 = box
    turned = affine[b].double().numpy()
    corners = [turned @ [*np.clip(p, 0, 1), 1] for p in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))]
    size = abs(np.linalg.det(turned[:, :2])) * (x1 - x0) * (y1 - y0)
    for sign, ends in ((-1, visible[b].tolist()[:2]), (1, visible[b].tolist()[2:])):
        for axis in (0, 1):
            corners = clipped(corners, axis, ends[axis], sign)
    (_, k, h, w), found, known = labels.values.shape, np.zeros(CLASSES), 0.0
    left, top, right, bottom = labels.area[b].double().tolist()
    for row, col in np.ndindex(h, w):
        cell = corners
        for axis, at, n, low, high in ((0, col, w, left, right), (1, row, h, top, bottom)):
            cell = clipped(cell, axis, low + (high - low) * at / n, -1)
            cell = clipped(cell, axis, low + (high - low) * (at + 1) / n, 1)
        counts = area_of(cell) * (1 - float(labels.void[b, row, col]))
        shares = np.zeros(CLASSES)
        for j in range(k):
            shares[labels.ids[b, j, row, col]] += float(labels.values[b, j, row, col])
        shares[shares == 0] = (1 - shares.sum()) / (shares == 0).sum()
        found, known = found + counts * shares, known + counts
    share, known = known / size, known if known > 1e-12 else 0  # cutting has rounded
    if uncovered == "uniform":
        return share * (found / known if known else 0 * found) + (1 - share) / CLASSES, float(right > left)
    return (found / known if known else np.full(CLASSES, 1 / CLASSES)), share


@pytest.mark.parametrize("uncovered", ["ignore", "uniform"])
@pytest.mark.parametrize(
    ("cells", "grid", "window"),
    [((5, 7), (3, 4), FULL_AREA), ((9, 4), (2, 2), (-0.2, -0.1, 0.9, 0.8)), ((1, 1), (3, 2), FULL_AREA)],
)
def test_every_number_is_that_of_clipped_polygons(cells, grid, window, uncovered):
    labels, affine, visible, classes = random_case(cells)
    x0, y0, x1, y1 = window
    boxes = [
        (x0 + c / grid[1] * (x1 - x0), y0 + r / grid[0] * (y1 - y0), x0 + (c + 1) / grid[1] * (x1 - x0))
        + (y0 + (r + 1) / grid[0] * (y1 - y0),)
        for r, c in np.ndindex(*grid)
    ]
    where = (labels, affine, visible)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        inputs = (labels, affine.to(dtype), visible.to(dtype), classes)
        targets = make_targets(*inputs, grid, CLASSES, 0.1, uncovered=uncovered, window=window)
        tokens = targets.tokens.dense(CLASSES).double().numpy()
        for b in range(4):
            expected = [label_of(where[0], b, *where[1:], box, uncovered) for box in boxes]
            np.testing.assert_allclose(targets.tokens.weight[b].double(), [w for _, w in expected], atol=tolerance)
            smoothed = [0.9 * label + 0.1 / CLASSES for label, _ in expected]
            np.testing.assert_allclose(tokens[b], smoothed, atol=tolerance)
            label, known = label_of(where[0], b, *where[1:], FULL_AREA, uncovered)
            folder = np.eye(CLASSES)[b]
            crop = 0.9 * (label if known else folder) + 0.1 / CLASSES
            np.testing.assert_allclose(targets.cls[b].double(), crop, atol=tolerance)


@pytest.mark.parametrize("size", [(48, 32), (64, 64)])
def test_a_cell_a_pixel_is_counting_pixels(size):
    """Crops, flips and warps of training, at two sizes of a schedule."""
    height, width, images = 14, 19, 6
    rng = np.random.default_rng(1)
    masks = rng.integers(0, CLASSES + 1, (images, height, width))  # the last number is void
    void = (masks == CLASSES).astype(np.float32)
    maps = [LabelMap(1 - v[None], m[None] % CLASSES, void=v) for m, v in zip(masks, void, strict=True)]
    labels = LabelBatch.stack(maps)
    config = AugmentConfig(size, scale=(0.2, 1.0), vflip=0.5, auto_augment="rand-m9-n3-mstd0.5")
    plan = make_plan(config, 0, 0, [*range(images)], np.full(images, width), np.full(images, height))
    affine, visible = (torch.from_numpy(part).float() for part in (plan.normalised_affine(), plan.visible()))
    assert (affine[:, 0, 1] != 0).any() and (affine[:, 0, 0] < 0).any()  # some are turned, some mirrored
    rows, cols = size[0] // 16, size[1] // 16
    targets = make_targets(labels, affine, visible, torch.zeros(images).long(), (rows, cols), CLASSES, 0)
    for b in range(images):
        for n, label in enumerate(targets.tokens.dense(CLASSES)[b].double().numpy()):
            row, col = divmod(n, cols)
            box = (col / cols, row / rows, (col + 1) / cols, (row + 1) / rows)
            expected, known = label_of(labels, b, affine, visible, box, "ignore")
            np.testing.assert_allclose(targets.tokens.weight[b, n], known, atol=1e-5)
            np.testing.assert_allclose(label, expected, atol=1e-4)

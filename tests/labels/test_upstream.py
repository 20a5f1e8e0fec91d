"""Every row of `--compat` against what it retraces, done again with scipy, roi_align and numpy's global generator."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor
from torchvision.ops import roi_align

from tlt import geometry
from tlt.data.augment.plan import AugmentConfig, Plan, Steps, draw_steps, make_plan
from tlt.data.augment.rand_augment import Kernel
from tlt.errors import UserError
from tlt.label_map import FULL_AREA, NO_AREA, LabelBatch, LabelMap
from tlt.labels.store import open_labels
from tlt.labels.tree import write_map
from tlt.targets import make_targets
from tlt.tools.pack import pack
from tlt.upstream.behaviour import UpstreamBoxes, check_half_ids, label_view, moved_maps, summing_to_more, target_maker

CLASSES, SMOOTHING, GRID = 30, 0.1, (7, 7)
COUNT = 12
PUBLISHED = AugmentConfig((56, 56), vflip=0.3, aug_order="published", auto_augment="rand-n3-m9-mstd0.5-inc1-p1")
TIMM = AugmentConfig((56, 56), vflip=0.3, auto_augment="rand-n3-m9-mstd0.5-inc1-p1")
BOTH = pytest.mark.parametrize("config", [TIMM, PUBLISHED], ids=["timm", "published"])


def some_labels(cells: tuple[int, int] = (10, 20), k: int = 4, count: int = COUNT, seed: int = 0) -> LabelBatch:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((count, k, *cells)) * 4).astype(np.float16)
    ids = np.argsort(rng.random((count, CLASSES, *cells)), axis=1)[:, :k].astype(np.int32)
    return LabelBatch.stack([LabelMap(v, i) for v, i in zip(values, ids, strict=True)])


def drawn(config: AugmentConfig, count: int = COUNT, source: tuple[int, int] = (500, 375)) -> tuple[Steps, Plan]:
    plan = make_plan(config, 3, 5, np.arange(count), *source)
    return draw_steps(config, 3, 5, np.arange(count), plan.source), plan


def view(rows: set[str], config: AugmentConfig, labels: LabelBatch) -> tuple[LabelBatch, Tensor, Tensor]:
    return label_view(rows, config, *drawn(config, len(labels)), labels)


def as_scipy(label: np.ndarray, kernel: int, amount: float) -> np.ndarray:
    """One published label operation on (2, k, h, w) logits and ids."""
    _, _, h, w = label.shape
    cos, sin = math.cos(math.radians(amount)), math.sin(math.radians(amount))
    row0, column0 = h / 2, w / 2
    matrix = {
        Kernel.ROTATE: [
            [cos, sin, row0 - cos * row0 - sin * column0],
            [-sin, cos, column0 + sin * row0 - cos * column0],
        ],
        Kernel.SHEAR_X: [[1, 0, 0], [amount, 1, 0]],
        Kernel.SHEAR_Y: [[1, amount, 0], [0, 1, 0]],
        Kernel.TRANSLATE_X: [[1, 0, 0], [0, 1, amount * w]],
        Kernel.TRANSLATE_Y: [[1, 0, amount * h], [0, 1, 0]],
    }.get(Kernel(kernel))
    if matrix is None:
        return label
    whole = np.array([[1, 0, 0, 0], [0, *matrix[0]], [0, *matrix[1]]], float)
    values = ndimage.affine_transform(label[0], whole, order=0, mode="constant")
    return np.stack([values, ndimage.affine_transform(label[1], whole, order=0, mode="nearest")])


def published_label(labels: LabelBatch, steps: Steps, row: int) -> np.ndarray:
    """(2, k, h, w) of one image after flips and operations, step by step."""
    label = np.stack([labels.values[row].float().numpy(), labels.ids[row].float().numpy()])
    label = label[..., ::-1] if steps.mirrored[row, 0] else label
    label = label[:, :, ::-1] if steps.mirrored[row, 1] else label
    for kernel, amount in zip(steps.kernels[row], steps.values[row], strict=True):
        label = as_scipy(label, int(kernel), float(amount))
    return label


@pytest.mark.parametrize("cells", [(18, 18), (10, 20), (7, 5)])
def test_moved_maps_are_scipys(cells: tuple[int, int]) -> None:
    geometric = [Kernel.ROTATE, Kernel.SHEAR_X, Kernel.SHEAR_Y, Kernel.TRANSLATE_X, Kernel.TRANSLATE_Y]
    kinds = [*geometric, Kernel.NONE, Kernel.INVERT, Kernel.TRANSLATE_X_CONST]
    rng, count = np.random.default_rng(1), 80
    kernels = rng.choice(kinds, (count, 3))
    values = np.where(kernels == Kernel.ROTATE, 27.0, 0.3) * rng.uniform(-1, 1, kernels.shape)
    steps = Steps(np.zeros((count, 4), np.int64), rng.random((count, 2)) < 0.5, kernels, values)
    labels = some_labels(cells, count=count)
    moved = moved_maps(labels, steps)
    assert moved.values.dtype == torch.float16 and (moved.values == 0).float().mean() > 0.05
    for row in range(count):
        expected = published_label(labels, steps, row)
        assert np.array_equal(moved.values[row].numpy(), expected[0]), row
        assert np.array_equal(moved.ids[row].numpy(), expected[1]), row


def published_targets(labels: LabelBatch, steps: Steps, plan: Plan) -> Tensor:
    """(B, 1 + N, C) crop and token targets, as the published data set and target maker give them."""
    h, w = labels.values.shape[2:]
    dense, coords = torch.zeros(len(labels), CLASSES, h, w), torch.zeros(len(labels), 4)
    for row in range(len(labels)):
        label = torch.from_numpy(published_label(labels, steps, row).copy())
        dense[row].scatter_(0, label[1].long(), label[0])
        (x, y, width, height), (full_w, full_h) = steps.crop[row], plan.source[row]
        coords[row] = torch.tensor([y / full_h, x / full_w, height / full_h, width / full_w])
    coords[:, 2:] += coords[:, :2]
    boxes = torch.cat([torch.arange(len(labels))[:, None], coords * dense.size(3) - 0.5], 1)
    crop, tokens = roi_align(dense, boxes, (1, 1)), roi_align(dense, boxes, GRID)
    soft = torch.cat([crop.flatten(2), tokens.flatten(2)], 2).softmax(1)
    off = SMOOTHING / CLASSES
    return (soft * (1 - SMOOTHING + off) + off).transpose(1, 2)


@pytest.mark.parametrize("cells", [(10, 20), (18, 18)])
def test_all_rows_together_are_the_published_targets(cells: tuple[int, int]) -> None:
    labels, (steps, plan) = some_labels(cells), drawn(PUBLISHED)
    rows = {"label-crop", "label-scale", "label-area", "label-affine", "roi-align", "target-sum", "uncovered"}
    view_of = label_view(rows, PUBLISHED, steps, plan, labels)
    make = target_maker(rows, make_targets)
    made = make(*view_of, torch.arange(COUNT), GRID, CLASSES, SMOOTHING, None, "uniform")
    expected = published_targets(labels, steps, plan)
    torch.testing.assert_close(made.cls, expected[:, 0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.tokens.dense(CLASSES), expected[:, 1:], rtol=1e-4, atol=1e-6)
    assert (made.weight == 1).all()
    only_crop = make(*view_of, torch.arange(COUNT), GRID, CLASSES, SMOOTHING, 1, "uniform")
    assert only_crop.tokens is None and torch.equal(only_crop.cls, made.cls)


def test_an_image_without_a_map_keeps_its_class_in_roi_targets() -> None:
    labels = some_labels(count=2)
    labels.area[1] = torch.tensor(NO_AREA)
    moved = view({"label-affine", "label-area"}, PUBLISHED, labels)
    make = target_maker({"roi-align", "target-sum"}, make_targets)
    made = make(*moved, torch.tensor([4, 4]), GRID, CLASSES, SMOOTHING, None, "uniform")
    assert made.weight.mean(1).tolist() == [1, 0]
    assert made.cls[1, 4] == pytest.approx(0.9 + 0.1 / CLASSES) and made.cls[1].sum() == pytest.approx(1)


@pytest.mark.gpu
def test_roi_targets_on_cuda_agree_and_do_not_synchronise() -> None:
    view_of = view({"label-crop", "label-affine"}, PUBLISHED, some_labels())
    make = target_maker({"roi-align", "target-sum"}, make_targets)
    expected = make(*view_of, torch.arange(COUNT), GRID, CLASSES, SMOOTHING, None, "uniform")
    on_gpu = (*(part.to("cuda") for part in view_of), torch.arange(COUNT, device="cuda"))
    make(*on_gpu, GRID, CLASSES, SMOOTHING, None, "uniform")
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = make(*on_gpu, GRID, CLASSES, SMOOTHING, None, "uniform")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made.tokens.dense(CLASSES).cpu(), expected.tokens.dense(CLASSES), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.cls.cpu(), expected.cls, rtol=1e-4, atol=1e-6)


@BOTH
def test_label_crop_alone_moves_the_window_across_the_diagonal(config: AugmentConfig) -> None:
    """The label of a point is that of the point as far into the mirrored window, through the same operations."""
    labels, (steps, plan) = some_labels(), drawn(config)
    same, affine, visible = label_view({"label-crop"}, config, steps, plan, labels)
    assert torch.equal(same.values, labels.values) and torch.equal(same.area, labels.area)
    x, y, w, h = (steps.crop / [500, 375, 500, 375]).T
    crop, mirrored = geometry.crop(x, y, w, h, 1, 1), geometry.crop(y, x, h, w, 1, 1)
    whole = plan.normalised_affine()
    if config is TIMM:
        expected = geometry.compose(geometry.compose(whole, geometry.invert(crop)), mirrored)
        assert np.allclose(visible.numpy(), np.stack([y, x, y + h, x + w], 1), atol=1e-6)
    else:
        expected = geometry.compose(mirrored, geometry.compose(geometry.invert(crop), whole))
        assert (visible == torch.tensor(FULL_AREA)).all()
    assert np.allclose(affine.numpy(), expected, atol=1e-5)
    assert abs(expected - whole).max() > 0.1


@BOTH
def test_label_scale_alone_takes_both_axes_times_the_width(config: AugmentConfig) -> None:
    labels, (steps, plan) = some_labels(), drawn(config)
    labels.area[1] = torch.tensor([0.1, 0.2, 0.9, 0.8])
    _, affine, visible = label_view({"label-scale"}, config, steps, plan, labels)
    points = np.random.default_rng(0).random((9, 2))
    ours = geometry.apply(affine.double().numpy(), points)
    true = geometry.apply(plan.normalised_affine(), points)
    assert np.allclose(ours[..., 0], true[..., 0], atol=1e-5)
    low, high = labels.area[:, 1::2].double().numpy().T[..., None]
    in_cells = (ours[..., 1] - low) / (high - low) * 10
    assert np.allclose(in_cells, (true[..., 1] - low) / (high - low) * 20, atol=1e-4)
    seen, visible = plan.visible(), visible.numpy()
    assert np.allclose(visible[:, 1] - low[:, 0], 2 * (seen[:, 1] - low[:, 0]), atol=1e-5)
    assert np.allclose(visible[:, 0::2], seen[:, 0::2], atol=1e-6)
    square = some_labels((18, 18))
    assert torch.equal(label_view({"label-scale"}, config, steps, plan, square)[1], torch.from_numpy(
        plan.normalised_affine()).float())  # fmt: skip


@BOTH
def test_label_area_and_half_ids_alone_change_the_map_alone(config: AugmentConfig) -> None:
    labels, (steps, plan) = some_labels(), drawn(config)
    labels.area[:2] = torch.tensor([(0.1, 0.0, 0.9, 1.0), NO_AREA])
    labels.ids[0, 0, 0, :4] = torch.tensor([2047, 2048, 2049, 4099])
    for rows in ({"label-area"}, {"half-ids"}):
        made, affine, visible = label_view(rows, config, steps, plan, labels)
        assert np.allclose(affine, plan.normalised_affine(), atol=1e-5) and np.allclose(visible, plan.visible())
        whole = labels.area.clone()
        whole[0] = torch.tensor(FULL_AREA)
        assert torch.equal(made.area, whole if rows == {"label-area"} else labels.area)
        ids = made.ids[0, 0, 0, :4].tolist()
        assert ids == ([2047, 2048, 2048, 4100] if rows == {"half-ids"} else [2047, 2048, 2049, 4099])
        assert made.ids.dtype == torch.int32 and torch.equal(made.values, labels.values)


def test_half_ids_that_leave_the_classes_are_refused() -> None:
    for fine in (1000, 2049, 21_841):
        check_half_ids(fine)
    for wrong in (2052, 70_000):
        with pytest.raises(UserError, match="--compat half-ids: class"):
            check_half_ids(wrong)


@pytest.mark.parametrize(("source", "overlap"), [((500, 375), 0.47), ((448, 448), 0.54)])
def test_the_published_windows_overlap_as_published(source: tuple[int, int], overlap: float) -> None:
    config = AugmentConfig((224, 224), hflip=0.0, auto_augment=None, color_jitter=None)
    steps, plan = drawn(config, 4000, source)
    labels = some_labels((2, 2), 1, 4000)
    _, true, _ = label_view(set(), config, steps, plan, labels)
    _, wrong, _ = label_view({"label-crop"}, config, steps, plan, labels)
    corners = [[0.0, 0.0], [1.0, 1.0]]
    one, other = (geometry.apply(a.double().numpy(), corners) for a in (true, wrong))
    sides = (np.minimum(one[:, 1], other[:, 1]) - np.maximum(one[:, 0], other[:, 0])).clip(0)
    shared = sides.prod(1)
    union = (one[:, 1] - one[:, 0]).prod(1) + (other[:, 1] - other[:, 0]).prod(1) - shared
    assert (shared / union).mean() == pytest.approx(overlap, abs=0.02)


def test_target_sum_alone_is_the_published_smoothing_in_both_forms() -> None:
    labels, (_, plan) = some_labels(), drawn(TIMM)
    labels.area[3] = torch.tensor(NO_AREA)
    shape = (torch.from_numpy(plan.normalised_affine()), torch.from_numpy(plan.visible()), torch.arange(COUNT), GRID)
    plain = make_targets(labels, *shape, CLASSES, 0.0)
    sharp = [SMOOTHING / CLASSES, 1 - SMOOTHING + SMOOTHING / CLASSES]
    assert plain.tokens is not None
    make = target_maker({"target-sum"}, make_targets)
    made = make(labels, *shape, CLASSES, SMOOTHING)
    assert made.tokens is not None
    tokens = made.tokens.dense(CLASSES)
    assert torch.allclose(tokens, plain.tokens.dense(CLASSES) * sharp[1] + sharp[0], atol=1e-12)
    assert torch.allclose(tokens.sum(-1), torch.tensor(1 + SMOOTHING / CLASSES, dtype=torch.float64))
    has_map = torch.arange(COUNT) != 3
    assert torch.allclose(made.cls[has_map], (plain.cls * sharp[1] + sharp[0])[has_map], atol=1e-12)
    assert made.cls[3].sum() == pytest.approx(1)
    only_crop = make(labels, *shape, CLASSES, SMOOTHING, 1)
    assert only_crop.tokens is None and torch.equal(only_crop.cls, made.cls)
    assert target_maker(set(), make_targets) is make_targets
    assert summing_to_more(make_targets(labels, *shape, CLASSES, 0.5), labels).smoothing == 0.5


def published_box(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The published forward pass and rand_bbox, with numpy's global generator."""
    cut = np.sqrt(1.0 - np.random.beta(1.0, 1.0))
    height, width = int(size[0] * cut), int(size[1] * cut)
    row, column = np.random.randint(size[0]), np.random.randint(size[1])
    first = np.clip([row - height // 2, column - width // 2], 0, size)
    last = np.clip([row + height // 2, column + width // 2], 0, size)
    return int(first[0]), int(first[1]), int(last[0]), int(last[1])


def test_upstream_boxes_are_those_of_numpys_global_generator() -> None:
    before = np.random.get_state()
    try:
        np.random.seed(42 + 3)
        expected = [published_box((14, 12)) for _ in range(60)]
        np.random.seed(7)
        global_state = np.random.get_state()[1].copy()
        boxes = UpstreamBoxes(42, 3, (14, 12))
        assert [boxes(k) for k in range(60)] == expected
        assert [boxes(k) for k in (31, 32, 5, 5, 59, 0)] == [expected[k] for k in (31, 32, 5, 5, 59, 0)]
        assert np.array_equal(np.random.get_state()[1], global_state)
    finally:
        np.random.set_state(before)
    with pytest.raises(UserError, match="mixtoken-rng: --seed 4294967295"):
        UpstreamBoxes(2**32 - 1, 1, (14, 12))


def test_label_names_are_cut_at_the_first_dot(tmp_path: Path) -> None:
    """Also where that gives one file to several images, and where a better name is there."""
    ids = np.arange(4, dtype=np.int32).reshape(1, 2, 2)
    for number, name in enumerate(["a/img.pt", "a/img.v1.pt", "001.pt", "b/plain.pt"]):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        write_map(tmp_path / "tree" / name, LabelMap(np.full((1, 2, 2), number, np.float16), ids), 4)
    names = ["a/img.v1.jpg", "a/img.v2.jpg", "001.Albatross/x.jpg", "deep/b/plain.jpg"]
    for name in names:
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / name)
    pack(str(tmp_path / "tree"), str(tmp_path / "archive"), str(tmp_path / "images"))
    for path in (tmp_path / "tree", tmp_path / "archive"):
        found = open_labels(path, names, published_names=True)
        assert [found.read(index).values[0, 0, 0] for index in range(4)] == [0, 0, 2, 3]
        with pytest.raises(UserError, match=r"the first is a/other\.x\.jpg \(looked for a/other\.pt\)"):
            open_labels(path, ["a/other.x.jpg", *names], published_names=True)


def test_rows_of_the_labels_are_known() -> None:
    from tlt.upstream.rows import LABEL_ROWS, ROWS

    assert set(ROWS) > set(LABEL_ROWS)

"""Token targets against a plain float64 loop over points and classes, and against their dense definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.labels.dense_targets import dense_targets
from tlt.errors import UserError
from tlt.io import chunks
from tlt.label_map import FULL_AREA, NO_AREA, LabelBatch, LabelMap
from tlt.targets import Targets, entries_per_token, make_targets, merge_equal, points_per_token

CLASSES, SMOOTHING = 9, 0.1


def random_case(
    seed: int, cells: tuple[int, int] = (5, 7), k: int = 3, batch: int = 4
) -> tuple[LabelBatch, Tensor, Tensor]:
    """Maps whose cells share classes and list some twice; turned and shifted crops that leave image and map."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((batch, k, *cells)) * 4).astype(np.float16)
    maps = [LabelMap(v, rng.integers(0, CLASSES, v.shape).astype(np.int32)) for v in values]
    area = torch.tensor([FULL_AREA, (0.144, 0.0, 0.852, 1.0), (0.0, 0.2, 1.0, 0.7), (0.4, 0.4, 0.6, 0.6)])
    affine = torch.from_numpy(rng.standard_normal((batch, 2, 3)) * 0.6)
    affine[:, :, 2] = 0.5 - affine[:, :, :2].sum(2) / 2 + torch.from_numpy(rng.standard_normal((batch, 2)) * 0.1)
    low = rng.random((batch, 2)) * 0.3
    visible = torch.from_numpy(np.concatenate([low, low + 0.6], 1))
    labels = LabelBatch.stack(maps)
    return LabelBatch(labels.values, labels.ids, area[torch.arange(batch) % 4]), affine, visible


def point_logits(labels: LabelBatch, b: int, x: float, y: float) -> np.ndarray:
    """(C,) bilinear label logits at one point of the source image, one cell and class after the other."""
    (h, w), (x0, y0, x1, y1) = labels.values.shape[2:], labels.area[b].double().tolist()
    cx, cy = np.clip((x - x0) / (x1 - x0) * w - 0.5, 0, w - 1), np.clip((y - y0) / (y1 - y0) * h - 0.5, 0, h - 1)
    total = np.zeros(CLASSES)
    for r, c in np.ndindex(h, w):
        cell: dict[int, float] = {}
        for i, v in zip(labels.ids[b, :, r, c].tolist(), labels.values[b, :, r, c].tolist(), strict=True):
            cell[i] = max(v, cell.get(i, -math.inf))
        for i, v in cell.items():
            total[i] += max(0, 1 - abs(cx - c)) * max(0, 1 - abs(cy - r)) * v
    return total


def brute_force(
    labels: LabelBatch,
    affine: Tensor,
    visible: Tensor,
    grid: tuple[int, int],
    truth: list[int],
    uncovered: str = "ignore",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Crop labels (B, C), token labels (B, N, C) and weights (B, N)."""
    n, batch = points_per_token(tuple(labels.values.shape[2:]), grid), len(truth)
    seen: dict[tuple[int, int], list[np.ndarray]] = {}
    for b, row, col, i, j in np.ndindex(batch, *grid, n, n):
        x, y = affine[b].numpy() @ [(col + (j + 0.5) / n) / grid[1], (row + (i + 0.5) / n) / grid[0], 1]
        token = seen.setdefault((b, row * grid[1] + col), [])
        if all(a[0] < x < a[2] and a[1] < y < a[3] for a in (labels.area[b].tolist(), visible[b].tolist())):
            token.append(point_logits(labels, b, x, y))
        elif uncovered == "uniform" and labels.area[b].any():
            token.append(np.zeros(CLASSES))

    def soft(points: list[np.ndarray], nothing: np.ndarray) -> np.ndarray:
        powers = np.exp(np.mean(points, 0)) if points else nothing
        return (1 - SMOOTHING) * powers / powers.sum() + SMOOTHING / CLASSES

    count = grid[0] * grid[1]
    tokens = [[soft(seen[b, t], np.ones(CLASSES)) for t in range(count)] for b in range(batch)]
    crops = [sum((seen[b, t] for t in range(count)), []) for b in range(batch)]
    cls = [soft(points, np.eye(CLASSES)[t]) for points, t in zip(crops, truth, strict=True)]
    coverage = [[len(seen[b, t]) / n**2 for t in range(count)] for b in range(batch)]
    return np.array(cls), np.array(tokens), np.array(coverage)


def made(case: tuple[LabelBatch, Tensor, Tensor], grid: tuple[int, int], dtype: torch.dtype) -> Targets:
    labels, affine, visible = case
    truth = torch.arange(len(labels)) + 1
    return make_targets(labels, affine.to(dtype), visible.to(dtype), truth, grid, CLASSES, SMOOTHING)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("grid", [(3, 4), (2, 2)])
def test_every_number_equals_the_loop(seed: int, grid: tuple[int, int]) -> None:
    case = random_case(seed)
    cls, tokens, coverage = brute_force(*case, grid, [1, 2, 3, 4])
    assert 0 < coverage.mean() < 1 and coverage.min() == 0
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = made(case, grid, dtype)
        assert found.tokens is not None and found.weight is not None and found.cls.dtype == dtype
        np.testing.assert_allclose(found.cls.numpy(), cls, rtol=tolerance)
        np.testing.assert_allclose(found.tokens.dense(CLASSES).numpy(), tokens, rtol=tolerance)
        np.testing.assert_allclose(found.weight.numpy(), coverage, atol=1e-7)


@pytest.mark.parametrize("grid", [(3, 4), (2, 2)])
def test_what_is_not_covered_counts_as_uniform(grid: tuple[int, int]) -> None:
    """But for an image of which nothing is known."""
    labels, affine, visible = random_case(5)
    labels.area[2] = torch.tensor(NO_AREA)
    cls, tokens, weight = brute_force(labels, affine, visible, grid, [1, 2, 3, 4], "uniform")
    ignored, _, coverage = brute_force(labels, affine, visible, grid, [1, 2, 3, 4])
    assert weight.tolist() == [[float(b != 2)] * (grid[0] * grid[1]) for b in range(4)]
    assert 0 < coverage[0].mean() < 1 and abs(ignored - cls)[[0, 1, 3]].max() > 0.05
    arguments = (labels, affine, visible, torch.arange(4) + 1, grid, CLASSES, SMOOTHING, None, "uniform")
    found = make_targets(*arguments)
    assert found.tokens is not None and found.weight is not None
    np.testing.assert_allclose(found.cls.numpy(), cls, rtol=1e-12)
    np.testing.assert_allclose(found.tokens.dense(CLASSES).numpy(), tokens, rtol=1e-12)
    np.testing.assert_allclose(found.weight.numpy(), weight, atol=0)
    crop_only = make_targets(*arguments[:7], 1, "uniform")
    np.testing.assert_allclose(crop_only.cls.numpy(), cls, rtol=1e-12)
    with pytest.raises(UserError, match="--uncovered zero is none of ignore, uniform"):
        make_targets(*arguments[:8], "zero")


@pytest.mark.parametrize("cells,grid,k", [((18, 18), (14, 14), 5), ((1, 6), (3, 2), 1), ((8, 6), (2, 2), 2)])
def test_equals_the_dense_definition_for_other_maps(cells: tuple[int, int], grid: tuple[int, int], k: int) -> None:
    labels, affine, visible = random_case(3, cells, k)
    dense = dense_targets(labels, affine, visible, torch.arange(4), grid, CLASSES, SMOOTHING)
    found = make_targets(labels, affine, visible, torch.arange(4), grid, CLASSES, SMOOTHING)
    assert found.tokens is not None and found.weight is not None
    assert found.tokens.ids.shape[2] == entries_per_token(labels, grid) == 4 * points_per_token(cells, grid) ** 2 * k
    torch.testing.assert_close(found.tokens.dense(CLASSES), dense.tokens, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.cls, dense.cls, rtol=1e-12, atol=0)
    assert torch.equal(found.weight, dense.weight)


def test_each_class_has_one_entry_that_is_not_zero() -> None:
    found = made(random_case(0), (3, 4), torch.float64)
    assert found.tokens is not None
    for ids, excess in zip(found.tokens.ids.flatten(0, 1), found.tokens.excess.flatten(0, 1), strict=True):
        named = ids[excess != 0].tolist()
        assert len(named) == len(set(named))


@pytest.mark.parametrize("value", [60_000.0, -60_000.0])
def test_the_largest_half_precision_logits_do_not_overflow(value: float) -> None:
    ids = np.array([0, 1], np.int32).reshape(2, 1, 1)
    labels = LabelBatch.stack([LabelMap(np.array([value, 3], np.float16).reshape(2, 1, 1), ids)])
    whole, all_of_it = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    found = make_targets(labels, whole, all_of_it, torch.tensor([0]), (1, 1), 4, 0.0)
    assert found.tokens is not None
    expected = [1.0, 0, 0, 0] if value > 0 else [0, math.exp(3) / (math.exp(3) + 2)] + [1 / (math.exp(3) + 2)] * 2
    assert found.tokens.dense(4)[0, 0].tolist() == pytest.approx(expected)
    assert found.cls[0].tolist() == pytest.approx(expected)


def test_merging_equals_a_dictionary_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (50, 23), generator=generator)
    values = torch.randn(50, 23, dtype=torch.float64, generator=generator)
    for row_ids, row_values, found_ids, sums, last in zip(ids, values, *merge_equal(ids, values, 23), strict=True):
        expected: dict[int, float] = {}
        for i, v in zip(row_ids.tolist(), row_values.tolist(), strict=True):
            expected[i] = expected.get(i, 0) + v
        assert dict(zip(found_ids[last].tolist(), sums[last].tolist(), strict=True)) == pytest.approx(expected)
        assert (sums[~last] == 0).all()


def test_without_maps_and_with_one_label_per_crop() -> None:
    labels, affine, visible = random_case(0)
    plain = make_targets(None, affine, visible, torch.tensor([1, 0, 2, 8]), (2, 3), CLASSES, 0.2)
    assert plain.tokens is not None and plain.weight is not None and (plain.weight == 1).all()
    expected = torch.full((4, CLASSES), 0.2 / CLASSES, dtype=torch.float64)
    expected[range(4), [1, 0, 2, 8]] += 0.8
    torch.testing.assert_close(plain.tokens.dense(CLASSES), expected[:, None].expand(-1, 6, -1))
    torch.testing.assert_close(plain.cls, expected)
    for given in (None, labels):
        arguments = (given, affine, visible, torch.arange(4), (2, 3), CLASSES, 0.2)
        single = make_targets(*arguments, token_label_size=1)
        assert single.tokens is None and single.weight is None
        assert torch.equal(single.cls, make_targets(*arguments).cls)
    assert make_targets(*arguments[:4], (2, 2), CLASSES, token_label_size=2).grid == (2, 2)
    with pytest.raises(UserError, match="--token-label-size 24 does not fit the model's 2 x 3"):
        make_targets(*arguments, token_label_size=24)


def test_groups_of_images_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(2)
    at_once = made(case, (3, 4), torch.float64)
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)
    one_by_one = made(case, (3, 4), torch.float64)
    assert at_once.tokens is not None and one_by_one.tokens is not None
    assert torch.equal(at_once.tokens.ids, one_by_one.tokens.ids)
    torch.testing.assert_close(at_once.tokens.excess, one_by_one.tokens.excess, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(at_once.cls, one_by_one.cls, rtol=1e-13, atol=0)


@pytest.mark.parametrize("images,numbers", [(7, 2**17), (5, 2**30), (1, 1), (3, 0)])
def test_groups_cover_every_image_once(images: int, numbers: int) -> None:
    parts = chunks.image_chunks(images, numbers, torch.device("cpu"))
    assert [i for part in parts for i in range(images)[part]] == list(range(images))
    assert all((part.stop - part.start) * numbers <= 2**18 or part.stop - part.start == 1 for part in parts)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.numel = max([self.numel, *(t.numel() for t in tensors if isinstance(t, Tensor))])
        return result


def test_no_tensor_has_a_number_for_every_token_and_class() -> None:
    labels, affine, visible = random_case(0, batch=2)
    labels = LabelBatch(labels.values, labels.ids * 1000, labels.area)
    with LargestTensor() as largest:
        make_targets(labels, affine, visible, torch.arange(2), (3, 4), 10_000, SMOOTHING)
    assert 0 < largest.numel <= 2 * 10_001  # the crops' labels; 12 tokens would be 240,000


def test_autocast_does_not_reach_the_targets() -> None:
    case = random_case(0)
    plain = made(case, (3, 4), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = made(case, (3, 4), torch.float32)
    assert plain.tokens is not None and mixed.tokens is not None
    assert torch.equal(plain.tokens.excess, mixed.tokens.excess) and torch.equal(plain.cls, mixed.cls)


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu_repeats_itself_and_does_not_synchronise() -> None:
    labels, affine, visible = random_case(0)
    expected = made((labels, affine, visible), (3, 4), torch.float32)
    arguments = (affine.float().cuda(), visible.float().cuda(), torch.arange(4).cuda() + 1, (3, 4), CLASSES, SMOOTHING)
    labels = labels.to("cuda")
    make_targets(labels, *arguments)  # loads kernels, which synchronises
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = (make_targets(labels, *arguments) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.tokens is not None and second.tokens is not None and expected.tokens is not None
    assert torch.equal(first.tokens.excess, second.tokens.excess) and torch.equal(first.cls, second.cls)
    found = first.tokens.dense(CLASSES).cpu()
    torch.testing.assert_close(found, expected.tokens.dense(CLASSES), rtol=0, atol=1e-5)
    torch.testing.assert_close(first.cls.cpu(), expected.cls, rtol=0, atol=1e-5)

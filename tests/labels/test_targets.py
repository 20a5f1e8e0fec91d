"""Token targets against a plain float64 loop over points and classes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.labels.brute_force import Sizes, brute_force
from tlt.errors import UserError
from tlt.io import chunks
from tlt.label_map import FULL_AREA, NO_AREA, LabelBatch, LabelMap
from tlt.targets import is_best, make_targets

CLASSES, SMOOTHING = 9, 0.1
WHOLE = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
Case = tuple[LabelBatch, Tensor, Tensor, Tensor]
Size = tuple[int, int]


def random_case(seed: int, cells: Size = (5, 7), k: int = 3, batch: int = 4) -> Case:
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
    labels = LabelBatch(labels.values, labels.ids, area[torch.arange(batch) % 4])
    return labels, affine, visible, torch.arange(batch) + 1


def single(case: Case) -> Case:
    labels, affine, visible, classes = case
    return labels, affine.float(), visible.float(), classes


@pytest.mark.parametrize("uncovered", ["ignore", "uniform"])
@pytest.mark.parametrize("window", [FULL_AREA, (-0.2, -0.1, 0.9, 0.8)], ids=["full", "window"])
@pytest.mark.parametrize(("cells", "grid", "k"), [((5, 7), (3, 4), 3), ((5, 7), (2, 2), 3), ((1, 6), (3, 2), 1)])
def test_every_number_equals_the_loop(cells, grid, k, uncovered, window):
    """The class is that of the whole crop, whatever window the tokens cover."""
    case = random_case(0, cells, k)
    case[0].area[2] = torch.tensor(NO_AREA)
    expected = brute_force(*case, grid, CLASSES, SMOOTHING, uncovered, window)
    counts = expected.weight.mean(1).tolist()
    assert counts[2] == 0 and (0 < counts[0] < 1 if uncovered == "ignore" else counts[0] == 1)
    for inputs, tolerance in ((case, 1e-12), (single(case), 1e-5)):
        targets = make_targets(*inputs, grid, CLASSES, SMOOTHING, uncovered=uncovered, window=window)
        assert targets.tokens is not None and targets.cls.dtype == inputs[1].dtype and targets.window == window
        for ids, excess in zip(targets.tokens.ids.flatten(0, 1), targets.tokens.excess.flatten(0, 1), strict=True):
            named = ids[excess != 0].tolist()
            assert len(named) == len(set(named))  # the loss's gradient depends on it on CUDA
        torch.testing.assert_close(targets.cls.double(), expected.cls, rtol=tolerance, atol=0)
        torch.testing.assert_close(targets.tokens.dense(CLASSES).double(), expected.tokens, rtol=tolerance, atol=0)
        torch.testing.assert_close(targets.tokens.weight.double(), expected.weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("cells", "grid", "k"), [((5, 7), (3, 4), 3), ((4, 3), (2, 5), CLASSES), ((1, 1), (3, 2), 1)])
def test_the_best_classes_are_those_of_the_loop(cells, grid, k):
    """A label's best class may be one that it doesn't list, and several where these are likelier than the listed."""
    case = random_case(1, cells, k)
    if k == CLASSES:  # all are listed, and all are less likely than one that is not would be
        case[0].values.abs_().neg_()
        case[0].ids.copy_(torch.arange(k)[:, None, None])
    case[0].values[3] = 0
    expected = brute_force(*case, grid, CLASSES, smoothing=0)
    tokens = make_targets(*single(case), grid, CLASSES, smoothing=0).tokens
    for predicted in range(CLASSES):
        right, counts = is_best(tokens, torch.full((4, 1), predicted), CLASSES)
        for b, n in np.ndindex(*counts.shape):
            label = expected.tokens[b, n]
            covered = bool(expected.weight[b, n] > 0 and label.max() > label.min() + 1e-9)
            best = covered and label[predicted] >= label.max() - 1e-9
            assert counts[b, n] == covered and right[b, n] == best, (b, n)
    assert counts[:3].any() and not counts[3].any()


@pytest.mark.parametrize("value", [60_000.0, -60_000.0])
def test_the_largest_half_precision_logits_do_not_overflow(value):
    ids = np.array([0, 1], np.int32).reshape(2, 1, 1)
    labels = LabelBatch.stack([LabelMap(np.array([value, 3], np.float16).reshape(2, 1, 1), ids)])
    targets = make_targets(labels, WHOLE, torch.tensor([FULL_AREA]), torch.tensor([0]), (1, 1), 4, 0.0)
    expected = [1.0, 0, 0, 0] if value > 0 else [0, math.exp(3) / (math.exp(3) + 2)] + [1 / (math.exp(3) + 2)] * 2
    assert targets.tokens.dense(4)[0, 0].tolist() == pytest.approx(expected)
    assert targets.cls[0].tolist() == pytest.approx(expected)


def test_without_maps_and_with_one_label_per_crop():
    labels, affine, visible, _ = random_case(0)
    arguments = (affine, visible, torch.tensor([1, 0, 2, 8]), (2, 3), CLASSES, 0.2)
    plain = make_targets(None, *arguments)
    expected = torch.full((4, CLASSES), 0.2 / CLASSES, dtype=torch.float64)
    expected[range(4), [1, 0, 2, 8]] += 0.8
    assert plain.tokens is not None and (plain.tokens.weight == 1).all()
    torch.testing.assert_close(plain.tokens.dense(CLASSES), expected[:, None].expand(-1, 6, -1))
    torch.testing.assert_close((plain.cls, plain.truth), (expected, expected))
    for maps in (None, labels):
        crop_only = make_targets(maps, *arguments, dense=False)
        assert crop_only.tokens is None and torch.equal(crop_only.cls, make_targets(maps, *arguments).cls)
    with pytest.raises(UserError, match="--uncovered zero: choose from ignore, uniform"):
        make_targets(labels, *arguments, uncovered="zero")


def test_groups_of_images_and_autocast_change_nothing(monkeypatch):
    def made(case: Case) -> list[Tensor]:
        targets = make_targets(*case, (3, 4), CLASSES)
        return [targets.cls, *targets.tokens]

    at_once, plain = made(random_case(2)), made(single(random_case(2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, made(single(random_case(2))), plain))
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)
    torch.testing.assert_close(made(random_case(2)), at_once, rtol=1e-13, atol=1e-15)


def test_no_tensor_is_tokens_by_classes_and_large_ids_are_exact():
    labels, *geometry = random_case(0, batch=2)
    many = LabelBatch(labels.values, labels.ids * 1111, labels.area)
    with Sizes() as sizes:
        targets = make_targets(many, *geometry, (3, 4), 10_000)
    expected = make_targets(labels, *geometry, (3, 4), CLASSES)
    assert (targets.cls.argmax(-1) == expected.cls.argmax(-1) * 1111).all()  # ids above 2,048 are exact
    assert 0 < max(sizes.made.values()) <= 2 * 10_001  # the crops' labels; 12 tokens would be 240,000

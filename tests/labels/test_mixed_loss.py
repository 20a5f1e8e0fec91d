"""Mixup and CutMix of token labels against mixed dense labels, built pixel by pixel in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tlt.loss import token_label_loss
from tlt.mix import Mixup
from tlt.targets import SparseLabels, Targets

SETTINGS: list[dict[str, Any]] = [
    {"mixup_alpha": 0.8},
    {"mixup_alpha": 0.0, "cutmix_alpha": 1.0},
    {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.7},
    {"mixup_alpha": 0.0, "cutmix_minmax": (0.3, 0.8)},
]
GRID, SIZE, CLASSES = (2, 3), (8, 12), 5


def problem(batch: int) -> tuple[torch.Tensor, torch.Tensor, Targets]:
    generator = torch.Generator().manual_seed(batch)
    cls, tokens = (torch.randn(batch, *shape, CLASSES, generator=generator).double() for shape in ((), (6,)))
    soft = [3 * torch.randn(batch, *shape, CLASSES, generator=generator).double() for shape in ((), (6,))]
    weight = torch.rand(batch, 6, generator=generator).double() * (torch.rand(batch, 6, generator=generator) > 0.3)
    truth = torch.randint(CLASSES, (batch,), generator=generator)
    return cls, tokens, Targets(soft[0].softmax(-1), SparseLabels.of(soft[1].softmax(-1)), weight, truth, 0.1, GRID)


def cross_entropy(logits: np.ndarray, label: np.ndarray) -> float:
    scores = logits - np.log(np.exp(logits).sum())
    return float(-(label * scores).sum())


def expected(cls: Any, tokens: Any, targets: Targets, stays: Any) -> tuple[float, float]:
    """By its meaning: `stays` (B, H, W) of each pixel, token by token."""
    batch, (rows, cols), (height, width) = len(cls), GRID, SIZE
    assert targets.tokens is not None and targets.weight is not None
    label, labels, cover = targets.cls.numpy(), targets.tokens.excess.numpy(), targets.weight.numpy()
    cls_loss = dense_loss = 0.0
    for i in range(batch):
        j = batch - 1 - i
        share = stays[i].mean()
        cls_loss += cross_entropy(cls[i].numpy(), share * label[i] + (1 - share) * label[j]) / batch
        for n in range(rows * cols):
            r, c = n // cols * (height // rows), n % cols * (width // cols)
            w = stays[i, r : r + height // rows, c : c + width // cols].mean()
            mass = w * cover[i, n] + (1 - w) * cover[j, n]
            if mass:
                mixed = (w * cover[i, n] * labels[i, n] + (1 - w) * cover[j, n] * labels[j, n]) / mass
                dense_loss += mass * cross_entropy(tokens[i, n].numpy(), mixed) / (batch * rows * cols)
    return cls_loss, dense_loss


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize("settings", SETTINGS)
def test_token_targets_are_mixed_as_the_images_are(mode: str, batch: int, settings: dict[str, Any]) -> None:
    cls, tokens, targets = problem(batch)
    mixup = Mixup(**settings, mode=mode, num_classes=CLASSES)
    for seed in range(3):
        # What stays of each pixel is read off the mixed images: each image is 1 and its partner 0, one after another.
        ratios = mixup.draw(torch.zeros(batch, 3, *SIZE, dtype=torch.float64), np.random.default_rng(seed))
        stays = np.ones((batch, *SIZE))
        for i in range(batch):
            if i != batch - 1 - i:
                lone = torch.zeros(batch, 3, *SIZE, dtype=torch.float64)
                lone[i] = 1.0
                stays[i] = ratios.blend_images(lone)[i, 0].numpy()
        terms = token_label_loss(cls, tokens, targets, ratios=ratios, cls_weight=0.7, dense_weight=0.3)
        want = expected(cls, tokens, targets, stays)
        assert (terms.cls.item(), terms.dense.item()) == pytest.approx(want, rel=1e-9)
        assert terms.total.item() == pytest.approx(0.7 * want[0] + 0.3 * want[1], rel=1e-9)


def test_the_class_label_is_the_one_that_plain_mixup_gives() -> None:
    cls, tokens, targets = problem(6)
    images, classes = torch.randn(6, 3, *SIZE).double(), torch.arange(6) % CLASSES
    mixup = Mixup(0.8, 1.0, mode="elem", num_classes=CLASSES)
    mixed, labels = mixup(images, classes, np.random.default_rng(4))
    ratios = mixup.draw(images, np.random.default_rng(4))
    assert torch.equal(ratios.blend_images(images), mixed)
    one_hot = F.one_hot(classes, CLASSES).double() * 0.9 + 0.1 / CLASSES
    hard = replace(targets, cls=one_hot, tokens=None, weight=None)
    got = token_label_loss(cls, None, hard, ratios=ratios)
    torch.testing.assert_close(got.total, F.cross_entropy(cls, labels))


def test_mixtoken_mixes_the_mixtures() -> None:
    """A token of the box shows the partner's mixture; its logits come back un-mixed: only the class label changes."""
    cls, tokens, targets = problem(4)
    ratios = Mixup(0.8, mode="elem", num_classes=CLASSES).draw(
        torch.zeros(4, 3, *SIZE).double(), np.random.default_rng(0)
    )
    plain = token_label_loss(cls, tokens, targets, ratios=ratios)
    boxed = token_label_loss(cls, tokens, targets, (0, 0, 2, 1), ratios=ratios)
    mixture = ratios.blend_labels(targets.cls)
    want = F.cross_entropy(cls, mixture * (1 - 2 / 6) + mixture.flip(0) * (2 / 6))
    torch.testing.assert_close(boxed.cls, want)
    torch.testing.assert_close(boxed.dense, plain.dense)


@pytest.mark.parametrize("ground_truth", [False, True])
def test_unmixed_batches_have_the_ordinary_loss(ground_truth: bool) -> None:
    cls, tokens, targets = problem(4)
    want = token_label_loss(cls, tokens, targets, (0, 0, 1, 2), ground_truth=ground_truth)
    never = Mixup(0.8, prob=0.0, num_classes=CLASSES).draw(torch.zeros(4, 3, *SIZE).double(), np.random.default_rng(0))
    for ratios in (None, never):
        got = token_label_loss(cls, tokens, targets, (0, 0, 1, 2), ratios=ratios, ground_truth=ground_truth)
        torch.testing.assert_close(tuple(got), tuple(want))

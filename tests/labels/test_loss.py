"""Token-label losses against the published implementation's numbers and against autograd in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tlt.loss import (
    TokenLabelCrossEntropy,
    TokenLabelGTCrossEntropy,
    TokenLabelSoftTargetCrossEntropy,
    token_label_loss,
)
from tlt.targets import SparseLabels, Targets, one_hot

GOLDEN = Path(__file__).parents[1] / "golden" / "upstream.npz"
BOX = (3, 2, 9, 10)


def golden_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Class logits, token logits and target (B, C, N + 2) of the golden file's loss entries."""
    batch, tokens, classes = 4, 196, 1000
    g = np.random.RandomState(7)
    cls = g.standard_normal((batch, classes)).astype(np.float32)
    aux = g.standard_normal((batch, tokens, classes)).astype(np.float32)
    t = g.standard_normal((batch, classes, tokens + 2)).astype(np.float64) * 2
    t = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    t[:, :, 0] = 0
    t[np.arange(batch), g.randint(0, classes, batch), 0] = 1
    t[0, :, 1] = 0.5 * t[0, :, 1] + 0.5 * t[0, :, 0]
    return (
        torch.from_numpy(cls).requires_grad_(),
        torch.from_numpy(aux).requires_grad_(),
        torch.from_numpy(t.astype(np.float32)),
    )


def as_targets(target: Tensor, grid: tuple[int, int] = (14, 14), weight: Tensor | None = None) -> Targets:
    tokens = target[:, :, 2:].transpose(1, 2)
    weight = torch.ones(tokens.shape[:2]) if weight is None else weight
    return Targets(target[:, :, 1], SparseLabels.of(tokens), weight, target[:, :, 0].argmax(1), 0.0, grid)


def assert_golden(entry: str, loss: Tensor, cls: Tensor, aux: Tensor) -> None:
    loss.backward()
    assert cls.grad is not None and aux.grad is not None
    found = {"value": loss.detach(), "grad_cls": cls.grad[:, ::37], "grad_aux": aux.grad[:, ::13, ::37]}
    with np.load(GOLDEN) as golden:
        for name, value in found.items():
            expected = golden[f"loss/{entry}/{name}"]
            assert np.abs(value.numpy() - expected).max() <= 1e-5 * np.abs(expected).max(), name


@pytest.mark.parametrize("box", [BOX, torch.tensor(BOX)])
@pytest.mark.parametrize("entry,ground_truth", [("token", False), ("token_gt", True)])
def test_golden(entry: str, ground_truth: bool, box: tuple[int, int, int, int] | Tensor) -> None:
    cls, aux, target = golden_inputs()
    loss = token_label_loss(cls, aux, as_targets(target), box, ground_truth=ground_truth)
    assert loss.total.item() == pytest.approx((loss.cls + 0.5 * loss.dense).item())
    assert_golden(entry, loss.total, cls, aux)


@pytest.mark.parametrize("entry,loss", [("token", TokenLabelCrossEntropy), ("token_gt", TokenLabelGTCrossEntropy)])
def test_golden_by_the_published_names(entry: str, loss: type[TokenLabelCrossEntropy]) -> None:
    cls, aux, target = golden_inputs()
    assert_golden(entry, loss(dense_weight=0.5)((cls, aux, BOX), target), cls, aux)


def small_case(batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Targets]:
    """float64 logits, soft targets on a 2 x 3 grid with 5 classes, and coverages between 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    double = {"dtype": torch.float64, "generator": g}
    cls, aux = torch.randn(batch, 5, **double), torch.randn(batch, 6, 5, **double)
    tokens, crop = torch.randn(batch, 6, 5, **double).softmax(-1), torch.randn(batch, 5, **double).softmax(-1)
    weight = torch.rand(batch, 6, **double).round(decimals=1)
    weight[0, :3] = 0
    truth = torch.randint(0, 5, (batch,), generator=g)
    return (
        cls.requires_grad_(),
        aux.requires_grad_(),
        Targets(crop, SparseLabels.of(tokens), weight, truth, 0.1, (2, 3)),
    )


def test_micro_batches_add_up_to_the_large_batch() -> None:
    cls, aux, targets = small_case(batch=5)
    whole = token_label_loss(cls, aux, targets)
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        assert targets.tokens is not None and targets.weight is not None
        tokens = SparseLabels.of(targets.tokens.excess[rows])
        part = Targets(targets.cls[rows], tokens, targets.weight[rows], targets.truth[rows], 0.1, targets.grid)
        total = total + token_label_loss(cls[rows], aux[rows], part).total * len(part.truth) / 5
    torch.testing.assert_close(total, whole.total, rtol=1e-12, atol=0)


def test_odd_batch_mixes_the_middle_sample_with_itself() -> None:
    cls, aux, targets = small_case(batch=3)
    everything = token_label_loss(cls, aux, targets, (0, 0, 2, 3))
    flipped = Targets(targets.cls.flip(0), targets.tokens, targets.weight, targets.truth, 0.1, targets.grid)
    torch.testing.assert_close(everything.cls, token_label_loss(cls, aux, flipped).cls)


def test_size_one_has_a_class_loss_only_and_still_mixes() -> None:
    cls, _, targets = small_case(batch=4)
    single = Targets(targets.cls, None, None, targets.truth, 0.1, targets.grid)
    loss = token_label_loss(cls, None, single, torch.tensor([0, 0, 1, 3]))
    expected = -(targets.cls / 2 + targets.cls.flip(0) / 2) * cls.log_softmax(-1)
    torch.testing.assert_close(loss.cls, expected.sum(-1).mean())
    assert loss.dense.item() == 0 and torch.equal(loss.total, loss.cls)


def test_ground_truth_weights_default_to_the_published_numbers() -> None:
    """Published: the truth gets 0.5 where the map agrees with the folder, 0.1 where it does not."""
    cls, aux, targets = small_case(batch=4)
    targets = Targets(
        torch.eye(5).double()[:4], targets.tokens, targets.weight, torch.tensor([0, 1, 0, 0]), 0.1, (2, 3)
    )
    found = token_label_loss(cls, aux, targets, ground_truth=True).cls
    published = {"gt_weight_agree": 0.5, "gt_weight_disagree": 0.1}
    assert torch.equal(found, token_label_loss(cls, aux, targets, ground_truth=True, **published).cls)


def published_reference(cls: Tensor, aux: Tensor, target_cls: Tensor, target_aux: Tensor, lam: float) -> Tensor:
    mixed = lam * target_cls + (1 - lam) * target_cls.flip(0)
    first = -(mixed * cls.log_softmax(-1)).sum(-1).mean()
    return first + 0.25 * -(target_aux * aux.log_softmax(-1)).sum(-1).mean()


def test_published_classes_take_all_target_shapes() -> None:
    cls, aux, targets = small_case(batch=4)
    truth = one_hot(targets.truth, 5, 0.0, torch.float64)
    crop = torch.stack([truth, targets.cls], 2)  # (B, C, 2)
    repeated = targets.cls[:, None].expand(-1, 6, -1)
    expected = published_reference(cls, aux, targets.cls, repeated, 1 - 2 / 6)
    for target in (targets.cls, crop):
        found = TokenLabelCrossEntropy(dense_weight=0.25)((cls, aux, (0, 0, 1, 2)), target)
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="7 token labels for 6 tokens"):
        TokenLabelCrossEntropy()((cls, aux, (0, 0, 1, 2)), torch.rand(4, 5, 9))
    single = TokenLabelSoftTargetCrossEntropy()
    torch.testing.assert_close(single(cls, crop), -(targets.cls * cls.log_softmax(-1)).sum(-1).mean())
    torch.testing.assert_close(single(cls.repeat(2, 1), targets.cls), single(cls, targets.cls))
    torch.testing.assert_close(single(cls, truth), torch.nn.functional.cross_entropy(cls, targets.truth))

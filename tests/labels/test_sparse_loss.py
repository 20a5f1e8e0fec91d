"""The token-label loss on sparse targets: against the float64 definition written out, gradcheck, and torch.compile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tlt.io import chunks
from tlt.label_map import LabelBatch
from tlt.loss import LossTerms, sparse_cross_entropy, token_label_loss
from tlt.targets import SparseLabels, Targets, make_targets

BATCH, GRID, CLASSES, SMOOTHING = 4, (2, 3), 7, 0.1
BOX, SHARE = (0, 1, 2, 2), 2 / 6
FLAGS = {"cls_weight": 0.7, "dense_weight": 1.5, "gt_weight_agree": 0.3, "gt_weight_disagree": 0.8}


def raw_case(seed: int = 0, batch: int = BATCH) -> tuple[LabelBatch, Tensor, Tensor, Tensor]:
    """Maps of 4 x 5 cells, an affine that reaches outside, the visible part, and the folder classes."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(batch, 3, 4, 5, generator=g) * 3).half()
    labels = LabelBatch(values, torch.randint(0, CLASSES, values.shape, generator=g).int(), torch.empty(0))
    area = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.2, 0.0, 0.8, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    affine = torch.tensor([[0.9, 0.3, -0.2], [-0.2, 0.8, 0.1]], dtype=torch.float64).repeat(batch, 1, 1)
    visible = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64).repeat(batch, 1)
    rows = torch.arange(batch) % 4
    return dataclasses.replace(labels, area=area[rows]), affine, visible, torch.tensor([3, 1, 0, 6])[rows]


def small_case(seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor, Targets]:
    g = torch.Generator().manual_seed(seed)
    cls = torch.randn(batch, CLASSES, dtype=torch.float64, generator=g).requires_grad_()
    aux = torch.randn(batch, 6, CLASSES, dtype=torch.float64, generator=g).requires_grad_()
    return cls, aux, make_targets(*raw_case(seed, batch), GRID, CLASSES, SMOOTHING)


def written_out(cls: Tensor, aux: Tensor, targets: Targets, share: float, blend: bool) -> tuple[Tensor, Tensor]:
    """Class and dense loss in float64: every label is filled in class by class, then minus sum of t log softmax."""
    assert targets.tokens is not None and targets.weight is not None
    rows, dense_loss, batch = targets.cls.double().clone(), torch.zeros((), dtype=torch.float64), len(cls)
    for b in range(batch if blend else 0):
        truth = torch.full((CLASSES,), SMOOTHING / CLASSES, dtype=torch.float64)
        truth[targets.truth[b]] += 1 - SMOOTHING
        part = 0.3 if rows[b].argmax() == targets.truth[b] else 0.8
        rows[b] = (1 - part) * rows[b] + part * truth
    cls_loss = -(((1 - share) * rows + share * rows.flip(0)) * cls.log_softmax(-1)).sum() / batch
    for b in range(batch):
        for n in range(6):
            label = [targets.tokens.base[b, n].item()] * CLASSES
            for c, more in zip(targets.tokens.ids[b, n].tolist(), targets.tokens.excess[b, n].tolist(), strict=True):
                label[c] += more
            one = -(torch.tensor(label, dtype=torch.float64) * aux[b, n].log_softmax(-1)).sum()
            dense_loss = dense_loss + targets.weight[b, n].double() * one / (batch * 6)
    return cls_loss, dense_loss


@pytest.mark.parametrize("box", [None, BOX, torch.tensor(BOX)], ids=["no box", "ints", "tensor"])
@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 5])
def test_values_and_gradients_equal_the_sum_written_out(
    box: tuple[int, ...] | Tensor | None, blend: bool, batch: int
) -> None:
    cls, aux, targets = small_case(batch=batch)
    assert targets.weight is not None and (batch == 1 or len(targets.weight.unique()) > 2)
    assert batch < 4 or (targets.weight[3] == 0).all()
    loss = token_label_loss(cls, aux, targets, box, ground_truth=blend, **FLAGS)
    expected = written_out(cls, aux, targets, 0.0 if box is None else SHARE, blend)
    # A share from a box tensor is float32.
    torch.testing.assert_close((loss.cls, loss.dense), expected, rtol=1e-7, atol=0)
    found = torch.autograd.grad(loss.total, (cls, aux))
    reference = torch.autograd.grad(0.7 * expected[0] + 1.5 * expected[1], (cls, aux))
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-9)


def test_float32_is_within_a_hundred_thousandth_of_float64() -> None:
    cls, aux, exact = small_case()
    labels, affine, visible, truth = raw_case()
    targets = make_targets(labels, affine.float(), visible.float(), truth, GRID, CLASSES, SMOOTHING)
    single = [x.detach().float().requires_grad_() for x in (cls, aux)]
    loss = token_label_loss(*single, targets, BOX, ground_truth=True, **FLAGS).total
    expected = token_label_loss(cls, aux, exact, BOX, ground_truth=True, **FLAGS).total
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(loss, single), torch.autograd.grad(expected, (cls, aux)), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_gradcheck_also_for_labels_that_do_not_sum_to_one() -> None:
    _, aux, targets = small_case()
    assert targets.tokens is not None
    doubled = SparseLabels(targets.tokens.base * 2, targets.tokens.ids, targets.tokens.excess * 3)
    for labels in (targets.tokens, doubled):
        assert torch.autograd.gradcheck(lambda x, labels=labels: sparse_cross_entropy(x, labels), (aux,))


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_a_term_of_weight_zero_cannot_spoil_the_total(weights: tuple[float, float]) -> None:
    cls, aux, targets = small_case()
    spoilt = torch.full_like(cls if weights[0] == 0 else aux, float("inf"))
    logits = (spoilt, aux) if weights[0] == 0 else (cls, spoilt)
    loss = token_label_loss(*logits, targets, cls_weight=weights[0], dense_weight=weights[1])
    expected = written_out(cls, aux, targets, 0.0, False)[0 if weights[0] else 1]
    torch.testing.assert_close(loss.total, expected)


def test_without_a_dense_head_there_is_the_class_loss_alone() -> None:
    cls, aux, targets = small_case()
    single = dataclasses.replace(targets, tokens=None, weight=None)
    for loss in (token_label_loss(cls, None, targets), token_label_loss(cls, aux, single)):
        assert loss.dense.item() == 0 and torch.equal(loss.total, loss.cls)


def test_bfloat16_logits_are_compared_in_float32() -> None:
    cls, aux, _ = small_case()
    labels, affine, visible, truth = raw_case()
    targets = make_targets(labels, affine.float(), visible.float(), truth, GRID, CLASSES, SMOOTHING)
    half = [x.detach().bfloat16().requires_grad_() for x in (cls, aux)]
    exact = [x.detach().float().requires_grad_() for x in half]
    one, other = token_label_loss(*half, targets), token_label_loss(*exact, targets)
    assert one.total.dtype == torch.float32 and torch.equal(one.total, other.total)
    for grad, reference in zip(
        torch.autograd.grad(one.total, half), torch.autograd.grad(other.total, exact), strict=True
    ):
        assert grad.dtype == torch.bfloat16 and torch.equal(grad, reference.bfloat16())


def test_groups_and_memory_layout_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, aux, targets = small_case()
    expected = torch.autograd.grad(token_label_loss(cls, aux, targets).total, (cls, aux))
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)
    padded = torch.cat([aux.detach()[:, :1], aux.detach()], 1).requires_grad_()  # a class token before the others
    loss = token_label_loss(cls, padded[:, 1:], targets).total
    found = torch.autograd.grad(loss, (cls, padded))
    torch.testing.assert_close((found[0], found[1][:, 1:]), expected, rtol=1e-13, atol=1e-16)


class Sizes(TorchDispatchMode):
    """Counts the operations that make a tensor as large as all logits."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.made = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.numel:
            self.made.append(str(func))
        return result


def test_nothing_but_the_gradient_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)
    targets = make_targets(*raw_case(), GRID, 200, SMOOTHING)  # 48 entries a token
    cls, aux = torch.randn(BATCH, 200).requires_grad_(), torch.randn(BATCH, 6, 200).requires_grad_()
    with Sizes(aux.numel()) as sizes:
        loss = token_label_loss(cls, aux, targets).total
        assert sizes.made == []
        torch.autograd.grad(loss, (cls, aux))
    assert sizes.made == ["aten.empty_like.default"]


def loss_from_maps(case: tuple[LabelBatch, Tensor, Tensor, Tensor], cls: Tensor, aux: Tensor, box: Tensor) -> LossTerms:
    targets = make_targets(*case, GRID, CLASSES, SMOOTHING)
    return token_label_loss(cls, aux, targets, box, ground_truth=True, **FLAGS)


def test_targets_and_loss_compile_in_one_graph_for_all_boxes() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_from_maps, fullgraph=True, backend=counter)
    cls, aux, _ = small_case()
    for seed, box in enumerate([BOX, (0, 0, 2, 3), (1, 1, 1, 1)]):
        arguments = (raw_case(seed), cls, aux, torch.tensor(box))
        found, expected = compiled(*arguments), loss_from_maps(*arguments)
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=0)
        grads = [torch.autograd.grad(loss.total, (cls, aux)) for loss in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.gpu
def test_cuda_repeats_itself_bit_for_bit() -> None:
    labels, affine, visible, truth = raw_case()
    targets = make_targets(
        labels.to("cuda"), affine.float().cuda(), visible.float().cuda(), truth.cuda(), GRID, CLASSES, SMOOTHING
    )
    cls, aux, exact = small_case()
    single = [x.detach().float().cuda().requires_grad_() for x in (cls, aux)]
    runs = []
    for _ in range(2):
        loss = token_label_loss(*single, targets, BOX).total
        runs.append((loss, *torch.autograd.grad(loss, single)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert runs[0][0].item() == pytest.approx(token_label_loss(cls, aux, exact, BOX).total.item(), rel=1e-5)

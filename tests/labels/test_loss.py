"""The token-label loss against the published implementation's numbers, and written out in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.labels.brute_force import Sizes
from tlt.io import chunks
from tlt.label_map import LabelBatch
from tlt.loss import LossTerms, TokenLabelLoss, sparse_cross_entropy
from tlt.mix import MixRatios, Mixup
from tlt.targets import SparseLabels, Targets, make_targets

GOLDEN = Path(__file__).parents[1] / "golden" / "upstream.npz"
GRID, CLASSES, SMOOTHING, IMAGE = (2, 3), 7, 0.1, (8, 12)
BOX, SHARE = (0, 1, 2, 2), 2 / 6
PLAIN = TokenLabelLoss(GRID, CLASSES)
LOSS = replace(PLAIN, cls_weight=0.7, dense_weight=1.5, gt_weight_agree=0.3, gt_weight_disagree=0.8)
BLENDED = replace(LOSS, ground_truth=True)
Case = tuple[LabelBatch, Tensor, Tensor, Tensor]


@pytest.mark.parametrize("box", [(3, 2, 9, 10), torch.tensor((3, 2, 9, 10))])
@pytest.mark.parametrize("entry", ["token", "token_gt"])
def test_golden(entry, box):
    batch, tokens, classes = 4, 196, 1000
    g = np.random.RandomState(7)
    cls = torch.from_numpy(g.standard_normal((batch, classes)).astype(np.float32)).requires_grad_()
    aux = torch.from_numpy(g.standard_normal((batch, tokens, classes)).astype(np.float32)).requires_grad_()
    t = g.standard_normal((batch, classes, tokens + 2)) * 2
    t = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    t[:, :, 0] = np.eye(classes)[g.randint(0, classes, batch)]
    t[0, :, 1] = 0.5 * t[0, :, 1] + 0.5 * t[0, :, 0]
    target = torch.from_numpy(t.astype(np.float32))
    labels = target[:, :, 2:].transpose(1, 2)
    ids = torch.arange(classes, dtype=torch.int32).expand(labels.shape)
    sparse = SparseLabels(torch.ones(batch, tokens), torch.zeros(batch, tokens), ids, labels)
    loss = TokenLabelLoss((14, 14), classes, ground_truth=entry == "token_gt")  # with the published weights
    total = loss((cls, aux), Targets(target[:, :, 1], sparse, target[:, :, 0], (14, 14)), box).total
    total.backward()
    assert cls.grad is not None and aux.grad is not None
    results = {"value": total.detach(), "grad_cls": cls.grad[:, ::37], "grad_aux": aux.grad[:, ::13, ::37]}
    with np.load(GOLDEN) as golden:
        for name, value in results.items():
            expected = golden[f"loss/{entry}/{name}"]
            assert np.abs(value.numpy() - expected).max() <= 1e-5 * np.abs(expected).max(), name


def raw_case(seed: int = 0, batch: int = 4) -> Case:
    """Maps of 4 x 5 cells, an affine that reaches outside, the visible part, and the folder classes."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(batch, 3, 4, 5, generator=g) * 3).half()
    ids = torch.randint(0, CLASSES, values.shape, generator=g).int()
    area = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.2, 0.0, 0.8, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    affine = torch.tensor([[0.9, 0.3, -0.2], [-0.2, 0.8, 0.1]], dtype=torch.float64).repeat(batch, 1, 1)
    visible = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64).repeat(batch, 1)
    rows = torch.arange(batch) % 4
    return LabelBatch(values, ids, area[rows]), affine, visible, torch.tensor([3, 1, 0, 6])[rows]


def small_case(seed: int = 0, batch: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Targets]:
    g = torch.Generator().manual_seed(seed)
    cls = torch.randn(batch, CLASSES, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    aux = torch.randn(batch, 6, CLASSES, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    labels, affine, visible, classes = raw_case(seed, batch)
    return cls, aux, make_targets(labels, affine.to(dtype), visible.to(dtype), classes, GRID, CLASSES, SMOOTHING)


def written_out(
    cls: Tensor, aux: Tensor, targets: Targets, loss: TokenLabelLoss, share: float = 0.0, stays: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Class and dense loss: every label is written out, then minus sum of t log softmax. `stays` (B, H, W): what of
    each pixel is its own image's."""
    batch, labels, weight = len(cls), targets.tokens.dense(CLASSES), targets.tokens.weight
    rows = targets.cls.clone()
    for b in range(batch if loss.ground_truth else 0):
        part = loss.gt_weight_agree if rows[b].argmax() == targets.truth[b].argmax() else loss.gt_weight_disagree
        rows[b] = (1 - part) * rows[b] + part * targets.truth[b]
    stays = torch.ones(batch, *IMAGE, dtype=torch.float64) if stays is None else stays
    own = stays.mean((1, 2))[:, None]
    rows = own * rows + (1 - own) * rows.flip(0)
    cls_loss = -(((1 - share) * rows + share * rows.flip(0)) * cls.log_softmax(-1)).sum() / batch
    dense_loss = torch.zeros((), dtype=torch.float64)
    for b in range(batch):
        for n in range(6):
            (r, c), partner = (n // 3 * 4, n % 3 * 4), batch - 1 - b
            kept = stays[b, r : r + 4, c : c + 4].mean()
            label = kept * weight[b, n] * labels[b, n] + (1 - kept) * weight[partner, n] * labels[partner, n]
            dense_loss = dense_loss - (label * aux[b, n].log_softmax(-1)).sum() / (batch * 6)
    return cls_loss, dense_loss


def assert_equal(terms: LossTerms, expected: tuple[Tensor, Tensor], loss: TokenLabelLoss, *logits: Tensor) -> None:
    torch.testing.assert_close((terms.cls, terms.dense), expected, rtol=1e-12, atol=0)
    total = loss.cls_weight * expected[0] + loss.dense_weight * expected[1]
    torch.testing.assert_close(terms.total, total, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(loss_total, logits) for loss_total in (terms.total, total)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize("loss", [LOSS, BLENDED], ids=["plain", "ground truth"])
def test_values_and_gradients_equal_the_sum_written_out(loss, batch):
    cls, aux, targets = small_case(batch=batch)
    assert targets.tokens is not None and (batch < 4 or len(targets.tokens.weight.unique()) > 2)
    for box, share in ((None, 0.0), (BOX, SHARE)):
        assert_equal(loss((cls, aux), targets, box), written_out(cls, aux, targets, loss, share), loss, cls, aux)
    boxed = loss((cls, aux), targets, torch.tensor(BOX))  # whose share is float32
    torch.testing.assert_close(tuple(boxed), tuple(loss((cls, aux), targets, BOX)), rtol=1e-7, atol=0)


MIXES: list[dict[str, Any]] = [
    {"mixup_alpha": 0.8, "mode": "batch"},
    {"mixup_alpha": 0.0, "cutmix_alpha": 1.0, "mode": "pair"},
    {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.7, "mode": "elem"},
    {"mixup_alpha": 0.0, "cutmix_minmax": (0.3, 0.8), "mode": "batch"},
]


def draw(mix: Mixup, batch: int, seed: int) -> tuple[MixRatios, Tensor]:
    """What was drawn, and what stays of each pixel, read off mixed images: each is 1 and its partner 0, one by one."""
    ratios = mix.draw(torch.zeros(batch, 3, *IMAGE, dtype=torch.float64), np.random.default_rng(seed))
    stays = torch.ones(batch, *IMAGE, dtype=torch.float64)
    for i in range(batch):
        if i != batch - 1 - i:
            lone = torch.zeros(batch, 3, *IMAGE, dtype=torch.float64)
            lone[i] = 1.0
            stays[i] = ratios.blend_images(lone)[i, 0]
    return ratios, stays


@pytest.mark.parametrize("settings", MIXES, ids=["mixup", "cutmix", "both", "minmax"])
def test_labels_mix_as_images_do_and_mixtoken_mixes_mixtures(settings):
    for batch, seed in ((4, 0), (5, 1), (5, 2)):
        cls, aux, targets = small_case(batch=batch)
        ratios, stays = draw(Mixup(**settings, num_classes=CLASSES), batch, seed)
        terms = BLENDED((cls, aux), targets, BOX, ratios)
        assert_equal(terms, written_out(cls, aux, targets, BLENDED, SHARE, stays), BLENDED, cls, aux)


def test_without_dense_head_mixtoken_mixes_the_class_loss():
    cls, aux, targets = small_case()
    expected = F.cross_entropy(cls, targets.cls * (1 - SHARE) + targets.cls.flip(0) * SHARE)
    for loss in (PLAIN((cls, None), targets, BOX), PLAIN((cls, aux), replace(targets, tokens=None), BOX)):
        assert loss.dense.item() == 0 and torch.equal(loss.total, loss.cls)
        torch.testing.assert_close(loss.cls, expected)


def test_gradcheck_for_labels_that_do_not_sum_to_one():
    _, aux, targets = small_case()
    more = targets.tokens._replace(base=targets.tokens.base * 2, excess=targets.tokens.excess * 3)
    assert torch.autograd.gradcheck(lambda x: sparse_cross_entropy(x, more), (aux,))


def test_bfloat16_logits_are_compared_in_float32():
    cls, aux, _ = small_case()
    targets = small_case(dtype=torch.float32)[2]
    half = [x.detach().bfloat16().requires_grad_() for x in (cls, aux)]
    wide = [x.detach().float().requires_grad_() for x in half]
    low, high = PLAIN((half[0], half[1]), targets).total, PLAIN((wide[0], wide[1]), targets).total
    assert low.dtype == torch.float32 and torch.equal(low, high)
    for grad, reference in zip(torch.autograd.grad(low, half), torch.autograd.grad(high, wide), strict=True):
        assert grad.dtype == torch.bfloat16 and torch.equal(grad, reference.bfloat16())


def test_loss_in_groups_is_equal_and_holds_one_large_gradient(monkeypatch):
    cls, aux, targets = small_case()
    expected = torch.autograd.grad(PLAIN((cls, aux), targets).total, (cls, aux))
    monkeypatch.setattr(chunks, "_CPU_NUMBERS", 1)
    gradients = torch.autograd.grad(PLAIN((cls, aux), targets).total, (cls, aux))
    torch.testing.assert_close(gradients, expected, rtol=1e-13, atol=1e-16)
    targets = make_targets(*raw_case(), GRID, 200, SMOOTHING)  # 48 entries a token
    cls, aux = torch.randn(4, 200).requires_grad_(), torch.randn(4, 6, 200).requires_grad_()
    with Sizes() as sizes:
        loss = PLAIN((cls, aux), targets).total
        assert max(sizes.made.values()) < aux.numel()
        torch.autograd.grad(loss, (cls, aux))
    assert [name for name, numel in sizes.made.items() if numel >= aux.numel()] == ["aten.empty_like.default"]


def loss_from_maps(case: Case, cls: Tensor, aux: Tensor, box: Tensor) -> LossTerms:
    return BLENDED((cls, aux), make_targets(*case, GRID, CLASSES, SMOOTHING), box)


def test_targets_and_loss_compile_in_one_graph_for_all_boxes():
    torch.compiler.reset()
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_from_maps, fullgraph=True, backend=counter)
    cls, aux, _ = small_case()
    for seed, box in enumerate([BOX, (0, 0, 2, 3), (1, 1, 1, 1)]):
        arguments = (raw_case(seed), cls, aux, torch.tensor(box))
        terms, expected = compiled(*arguments), loss_from_maps(*arguments)
        torch.testing.assert_close(tuple(terms), tuple(expected), rtol=1e-12, atol=0)
        grads = [torch.autograd.grad(loss.total, (cls, aux)) for loss in (terms, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.gpu
def test_cuda_repeats_itself_bit_for_bit():
    labels, affine, visible, truth = raw_case()
    crops = labels.to("cuda"), affine.float().cuda(), visible.float().cuda(), truth.cuda()
    cls, aux, exact = small_case()
    single = [x.detach().float().cuda().requires_grad_() for x in (cls, aux)]
    runs = []
    for _ in range(2):
        loss = PLAIN((single[0], single[1]), make_targets(*crops, GRID, CLASSES, SMOOTHING), BOX).total
        runs.append((loss, *torch.autograd.grad(loss, single)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert runs[0][0].item() == pytest.approx(PLAIN((cls, aux), exact, BOX).total.item(), rel=1e-5)

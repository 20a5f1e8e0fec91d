"""The token-label objective: which form of the targets it takes, and that the form changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tlt.data.loader import Batch
from tlt.label_map import LabelBatch
from tlt.loss import token_label_loss
from tlt.mixtoken import Box
from tlt.sparse_targets import SparseTargets
from tlt.targets import Targets, make_targets
from volo.train.objective import StepKey, TokenLabelObjective

GRID = (3, 3)
OBJECTIVE = TokenLabelObjective(GRID, 200, ground_truth=True, dense_weight=1.5)


def labelled_batch(num_classes: int) -> Batch:
    """Three images with maps of 4 x 4 cells and 3 classes: 48 entries a token."""
    g = torch.Generator().manual_seed(0)
    values = (torch.randn(3, 3, 4, 4, generator=g) * 4).half()
    ids = torch.randint(0, num_classes, values.shape, generator=g).int()
    everything = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(3, 1)
    return Batch(
        images=torch.randn(3, 3, 8, 8, generator=g),
        classes=torch.tensor([1, 0, 2]),
        indices=torch.arange(3),
        labels=LabelBatch(values, ids, everything),
        affine=torch.tensor([[[0.6, 0.0, 0.3], [0.0, 0.7, 0.1]]]).repeat(3, 1, 1),
        visible=everything,
        skipped=[],
        bad_labels=[],
        size=3,
    )


class TwoHeads(nn.Module):
    """Gives fixed logits of both heads and keeps the box."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.cls = nn.Parameter(torch.randn(3, num_classes, generator=g))
        self.aux = nn.Parameter(torch.randn(3, 9, num_classes, generator=g))
        self.box: Box | None = None

    def forward(self, x: Tensor, dense: bool, mix_box: Box | None) -> tuple[Tensor, Tensor]:
        self.box = mix_box
        return self.cls, self.aux


@pytest.mark.parametrize("num_classes", [200, 47])
def test_what_is_not_covered_is_left_out_or_uniform(num_classes: int) -> None:
    batch, objective = labelled_batch(num_classes), replace(OBJECTIVE, num_classes=num_classes)
    batch = replace(batch, visible=torch.tensor([[0.0, 0.0, 0.5, 1.0]]).repeat(3, 1))
    left_out, uniform = (replace(objective, uncovered=way).targets(batch) for way in ("ignore", "uniform"))
    assert left_out.weight is not None and left_out.weight[:, 2::3].eq(0).all() and left_out.weight[:, 0::3].eq(1).all()
    assert uniform.weight is not None and uniform.weight.eq(1).all()


@pytest.mark.parametrize("num_classes,form", [(200, SparseTargets), (48, SparseTargets), (47, Targets)])
def test_loss_and_gradients_are_those_of_the_dense_definition(num_classes: int, form: type) -> None:
    batch, model = labelled_batch(num_classes), TwoHeads(num_classes)
    objective = replace(OBJECTIVE, num_classes=num_classes)
    assert isinstance(objective.targets(batch), form)
    found = objective(model, batch, StepKey(0, 0, 0, 0))
    dense = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, GRID, num_classes, 0.1)
    expected = token_label_loss(model.cls, model.aux, dense, model.box, ground_truth=True, dense_weight=1.5)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=0)
    grads = [torch.autograd.grad(loss.total, (model.cls, model.aux)) for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_images_without_maps_and_labels_of_the_crop_are_sparse_too() -> None:
    batch = labelled_batch(5)
    without = replace(OBJECTIVE, num_classes=5).targets(replace(batch, labels=None))
    assert isinstance(without, SparseTargets) and without.tokens is not None and without.tokens.ids.shape == (3, 9, 1)
    crop = replace(OBJECTIVE, token_label_size=1).targets(batch)
    assert isinstance(crop, SparseTargets) and crop.tokens is None

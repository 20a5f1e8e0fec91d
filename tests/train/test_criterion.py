"""The token-label criterion: its loss is that of the dense definition, whatever the number of classes."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import volo  # noqa: F401  registers the models
from tests.labels.brute_force import brute_force
from tests.train.small_run import arguments
from tlt.api import StepKey, draw_box
from tlt.data.batch import Batch
from tlt.label_map import LabelBatch
from tlt.loss import LossTerms, blend_truth
from tlt.mix import Mixup
from tlt.mixtoken import Box, mix_tokens, mixed_share
from tlt.targets import one_hot
from volo.config.train import TRAIN
from volo.train.criterion import ClassCriterion, TokenLabelCriterion, make_criterion, step_loss
from volo.train.meter import mixed_images

GRID = (3, 3)
CRITERION = TokenLabelCriterion(GRID, 200, ground_truth=True, dense_weight=1.5)


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


@pytest.mark.parametrize("num_classes", [200, 47, 5])  # more, and fewer classes than the 48 entries of a token
def test_loss_and_gradients_are_those_of_the_dense_definition(num_classes):
    batch, model = labelled_batch(num_classes), TwoHeads(num_classes)
    criterion = replace(CRITERION, num_classes=num_classes)
    found = step_loss(criterion, None, model, batch, criterion.draw(batch, StepKey(0, 0, 0, 0)))
    assert batch.labels is not None and model.box is not None
    dense = brute_force(batch.labels, batch.affine, batch.visible, batch.classes, GRID, num_classes)
    cls = blend_truth(dense.cls, one_hot(batch.classes, num_classes, 0.1, torch.float64), 0.5, 0.1)
    share = mixed_share(model.box, GRID)
    cls_loss = F.cross_entropy(model.cls, (cls * (1 - share) + cls.flip(0) * share).float())
    dense_loss = -((dense.tokens * model.aux.log_softmax(-1)).sum(-1) * dense.weight).mean()
    expected = LossTerms(cls_loss + 1.5 * dense_loss, cls_loss, dense_loss)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=0, check_dtype=False)
    grads = [torch.autograd.grad(loss.total, (model.cls, model.aux)) for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_targets_that_mixup_has_smoothed_are_not_smoothed_again():
    batch, logits, step = labelled_batch(5), torch.randn(3, 5), StepKey(0, 0, 0, 0)
    mix = Mixup(0.8, 0.0, label_smoothing=0.1, num_classes=5)
    criterion = ClassCriterion(0.1, mix)
    drawn = criterion.draw(batch, step)
    targets = mix.soft_targets(batch.classes, drawn.ratios, torch.float32)
    found = step_loss(criterion, None, lambda images: logits, batch, drawn)
    torch.testing.assert_close(found.total, -(targets * logits.log_softmax(-1)).sum(-1).mean())


def test_flag_sets_the_loss_setting_of_its_name():
    model = timm.create_model("volo_test", num_classes=3, img_size=64)
    given: dict[str, Any] = {"smoothing": 0.2, "cls_weight": 0.7, "dense_weight": 0.4, "uncovered": "uniform"}
    given |= {"ground_truth": True, "gt_weight_agree": 0.3, "gt_weight_disagree": 0.05}
    line = " ".join(TRAIN.parser().words_of(given))
    args = arguments(f"--token-label --token-label-data l {line}")
    assert make_criterion(args, model, (64, 64)) == TokenLabelCriterion.of(model, (64, 64), **given)
    bare = make_criterion(arguments("--token-label --token-label-data l"), model, (64, 64))
    assert bare == TokenLabelCriterion.of(model, (64, 64), smoothing=0.1)


def test_first_batch_shows_what_the_step_mixes():
    batch = replace(labelled_batch(5), images=torch.randn(3, 3, 32, 48))
    boxes = set()
    for update in range(9):
        key = StepKey(7, update)
        row0, col0, row1, col1 = draw_box(key, (4, 6))
        boxes.add(box := (8 * col0, 8 * row0, 8 * col1, 8 * row1))
        for mix in (None, Mixup(1.0, 0.0, num_classes=5)):
            mixed = mixed_images(TokenLabelCriterion((4, 6), 5, mix=mix), batch, key)
            drawn = TokenLabelCriterion((4, 6), 5, mix=mix).draw(batch, key)
            images = batch.images if mix is None else drawn.ratios.blend_images(batch.images)
            tokens = mix_tokens(images.permute(0, 2, 3, 1), (row0, col0, row1, col1), scale=8)
            assert mixed is not None and mixed[1] == box
            assert torch.equal(mixed[0], tokens.permute(0, 3, 1, 2))
            alone = mixed_images(ClassCriterion(mix=mix), batch, key)
            assert alone is None if mix is None else alone is not None and torch.equal(alone[0], images)
        left_half = TokenLabelCriterion((4, 6), 5, window=(0.0, 0.0, 0.5, 1.0))  # where the tokens are
        assert mixed_images(left_half, batch, key)[1] == (4 * col0, 8 * row0, 4 * col1, 8 * row1)
    assert len(boxes) > 5 and mixed_images(TokenLabelCriterion((4, 6), 5, mix_token=False), batch, key) is None

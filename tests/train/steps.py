"""A step as `volo.train.loop` does it, up to the loss."""

from __future__ import annotations

from torch import nn

from tlt.data.batch import Batch
from tlt.loss import LossTerms
from volo.train.criterion import Criterion, StepKey


def loss_of_step(criterion: Criterion, model: nn.Module, batch: Batch, step: StepKey) -> LossTerms:
    targets, mixed = criterion.targets(batch), criterion.draw(batch, step)
    return criterion(model(mixed.images, **criterion.arguments(mixed)), targets, mixed)

"""A training step of one arm, as `volo.train.loop.train_epoch` does it, with marks between its parts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

from benchmarks.memory import peak_of
from benchmarks.phases import Phases
from tlt.data.loader import Batch, TrainLoader
from tlt.loss import LossTerms
from volo.cluster.distributed import World
from volo.train.compilation import begin_step
from volo.train.criterion import Criterion, StepKey
from volo.train.data import open_folders, open_labels, train_loader
from volo.train.model import TimmModel, heads_of
from volo.train.optim import create_optimizer, set_lr
from volo.train.precision import Precision, WorkingCopy, compute_dtype

_SEED = 0
_LR = 1e-5


class TrainStep:
    """Optimizer, precision and batches of one model.

    Args:
        bare: The model whose parameters are trained, on its device.
        compiled: Makes of a model what is called.
        flags: train.py's.
        batches: Endless.
    """

    def __init__(
        self,
        bare: TimmModel,
        compiled: Callable[[TimmModel], Callable[..., Any]],
        flags: Namespace,
        criterion: Criterion,
        batches: Iterator[Batch],
        device: torch.device,
    ) -> None:
        self.criterion, self.batches, self.device = criterion, batches, device
        bare.train()
        working_copy = WorkingCopy(bare) if flags.model_dtype == "bfloat16" else None
        dtype = compute_dtype(flags, device)
        self.precision = Precision(
            device, dtype, flags.clip_grad, flags.clip_mode, working_copy=working_copy, heads=heads_of(bare)
        )
        self.called = compiled(bare if working_copy is None else working_copy.module)
        self.optimizer = create_optimizer(flags, bare, device)
        set_lr(self.optimizer, _LR)
        self.parameters = [p for p in bare.parameters() if p.requires_grad]
        self.phases = Phases(device)
        self.loss = torch.zeros(())
        self._updates = count()

    def run(self, steps: int) -> int:
        """Do so many steps and return how many images they had; `phases` has their parts."""
        images = 0
        for _ in range(steps):
            self.phases.start()
            batch = next(self.batches)
            self.phases.mark("data")
            self.update(batch)
            images += batch.size
        return images

    def update(self, batch: Batch) -> None:
        """The step itself."""
        terms = self.forward(batch)
        self.phases.mark("forward")
        self.precision.backward(terms.total)
        self.phases.mark("backward")
        self.precision.step(self.optimizer, self.parameters)
        self.phases.mark("optimizer")
        self.loss = terms.total.detach()

    def forward(self, batch: Batch) -> LossTerms:
        """Targets, forward pass and loss."""
        step = StepKey(_SEED, next(self._updates), 0, 0)
        step.seed_torch()
        begin_step()
        targets, mixed = self.criterion.targets(batch), self.criterion.draw(batch, step)
        with self.precision.autocast():
            outputs = self.called(mixed.images, **self.criterion.arguments(mixed))
            return self.criterion(outputs, targets, mixed)

    def memory(self) -> dict[str, float]:
        """Bytes per image above what the model and its optimizer hold: at the peak of the forward pass with the loss,
        and at that of the whole step, which has the gradients too. To be measured after a few steps."""
        batch = next(self.batches)
        forward = peak_of(lambda: self.forward(batch), self.device)[1]
        step = peak_of(lambda: self.update(batch), self.device)[1]
        self.phases.take()
        return {"forward": forward / batch.size, "step": step / batch.size}

    def check(self) -> None:
        """Raises NonFiniteError: the steps since the last call were none."""
        self.precision.take_broken()
        self.precision.check()


def load_batches(flags: Namespace, settings: dict[str, Any], device: torch.device) -> Iterator[Batch]:
    """Endless batches of train.py's loader, augmented and on the device."""
    world = World(0, 0, 1, device)
    folder = open_folders(flags, 1).train
    labels, _ = open_labels(flags, folder, flags.num_classes or 1000)
    loader: TrainLoader = train_loader(flags, folder, labels, settings, world)
    for epoch in count():
        for _, _, batch in loader.epoch(epoch):
            yield batch


def losses_of(criterion: Criterion, models: list[nn.Module], batch: Batch) -> list[float]:
    """The loss of each model in evaluation, on one batch and in float32."""
    found = []
    targets, mixed = criterion.targets(batch), criterion.draw(batch, StepKey(_SEED, 0, 0, 0))
    for model in models:
        training = model.training
        with torch.no_grad():
            outputs = model.eval()(mixed.images, **criterion.arguments(mixed))
            found.append(criterion(outputs, targets, mixed).total.item())
        model.train(training)
    return found

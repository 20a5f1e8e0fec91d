"""A training step that the host launches operation by operation; `volo.train.step_graph` makes it one CUDA graph."""

from typing import NamedTuple

from torch import Tensor

from tlt.api import StepKey
from tlt.data.batch import Batch
from tlt.loss import LossTerms
from volo.checkpoint.state import optimizer_state_of
from volo.cluster.shard import synchronised
from volo.train.compilation import begin_step
from volo.train.criterion import Drawn, step_loss
from volo.train.optimizer import set_lr
from volo.train.run import Run, Training

_LR_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # exponent of (images in an update / mean images per update)


class StepResult(NamedTuple):
    """The results of a micro-batch, on the device: its losses, detached; for the last micro-batch of an update also
    what `Precision.step` returns."""

    terms: LossTerms
    norm: Tensor | None = None
    broken: Tensor | None = None


class Step:
    """`step(batch, key)` trains on a micro-batch. After the last one of an update it changes the weights."""

    def __init__(self, run: Run, training: Training) -> None:
        self.forward_model = training.forward_model
        self.criterion = training.criterion
        self.teachers = training.distillation
        self.state = training.state
        self.precision = training.precision
        self.replicas = training.replicas
        self.parameters = [p for p in self.state.model.parameters() if p.requires_grad]
        self.watched = False  # whether gradients are looked at in the backward pass, so that no graph may replace it
        self.several_ranks = run.world.size > 1
        ema = self.state.ema
        # Whether `compute` updates the moving average: it can't if that needs a counter or is on the CPU.
        self.averages = ema is not None and not ema.use_warmup and ema.device is None

    def __call__(self, batch: Batch, key: StepKey) -> StepResult:
        key.seed_torch()
        if key.micro_batch == 0:
            begin_step()
        # The loss is weighted by the number of images, so that accumulation equals one large batch.
        share = batch.size / batch.key.update_samples
        return self.done(self.compute(batch, self.criterion.draw(batch, key), share, batch.key.last))

    def compute(self, batch: Batch, drawn: Drawn, share: float | Tensor, last: bool) -> StepResult:
        """Do the device's part of a step. Numbers that change between steps are tensors: a graph repeats others.
        `share` is that of this batch's images in those of the update; `last` tells its last micro-batch."""
        state, precision = self.state, self.precision
        with synchronised(self.forward_model, last):
            with precision.autocast():  # targets, both heads with MixToken, loss
                loss = step_loss(self.criterion, self.teachers, self.forward_model, batch, drawn)
            precision.backward(loss.total * share, reduced=last and self.several_ranks)
        terms = loss.map(Tensor.detach)
        if not last:
            return StepResult(terms)
        self.replicas.note()
        with optimizer_state_of(state.unproven):
            norm, broken = precision.step(state.optimizer, self.parameters, lambda: self.replicas.note(gradients=True))
        if self.averages and state.ema is not None:
            # Without the argument `step`, the decay is constant from the first update on, as published.
            state.ema.update(state.model)
        return StepResult(terms, norm, broken)

    def done(self, result: StepResult) -> StepResult:
        """Do the host's part of a step, after `compute`."""
        ema = self.state.ema
        if result.broken is not None:
            self.precision.skipped.note(result.broken)
            if ema is not None and not self.averages:
                ema.update(self.state.model, step=self.state.update + 1 if ema.use_warmup else None)
        return result

    def release_memory(self) -> None:
        """Release memory that the steps hold if other work may need it. A launched step holds none between steps."""


def train_on(run: Run, training: Training, step: Step, batch: Batch, micro_batch: int) -> tuple[StepResult, float]:
    """Train on a micro-batch of the current update. Return its results and the learning rate of the update."""
    state = training.state
    ratio = batch.key.update_samples * run.world.data_size / training.loader.index_stream.global_batch
    lr = training.schedule(state.update) * ratio ** _LR_POWER[run.settings.sizes.variable_batch_loss_scale]
    set_lr(state.optimizer, lr)
    return step(batch, StepKey(run.settings.run.seed, state.update, micro_batch, run.world.data_rank)), lr

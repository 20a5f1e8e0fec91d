"""One epoch of training, and the one evaluation that all programs use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.data.batch import Batch
from tlt.data.loader import EvalLoader, TrainLoader
from tlt.errors import UserError
from volo.checkpoint.saver import Saver
from volo.checkpoint.train_state import TrainState
from volo.cluster.distributed import World
from volo.cluster.shard import synchronised, whole_weights
from volo.cluster.stopping import StopGuard
from volo.record.machine_use import Arithmetic
from volo.record.metrics import EpochTotals, Evaluation, Sums, correct_in_top
from volo.train.compilation import begin_step
from volo.train.criterion import Criterion, StepKey
from volo.train.meter import Meter
from volo.train.optim import set_lr
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready for the first step.

    Attributes:
        state: Model, optimizer, scaler, moving average and the position in the run.
        model: The module that the loop calls: the state's model or its working copy, possibly compiled or distributed.
        average: The module that validation calls for the moving average; None without a moving average.
        lr_formula: How the peak learning rate was computed, for the log.
        seed: Seed of everything random in a step.
        arithmetic: The arithmetic of a step; None where it can't be counted, and on ranks that write no records.
        freeze_bn: Keep BatchNorm in evaluation mode (running statistics).
    """

    state: TrainState
    model: nn.Module
    average: nn.Module | None
    loader: TrainLoader
    validation: EvalLoader
    criterion: Criterion
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    arithmetic: Arithmetic | None = None
    seed: int = 0
    freeze_bn: bool = False


def train_epoch(
    training: Training,
    criterion: Criterion,
    world: World,
    meter: Meter,
    watch: Callable[[int, Batch], None],
    saver: Saver,
    guard: StopGuard,
) -> EpochTotals:
    """Train the epoch `state.epoch`; `state.update` advances by one per optimizer step.

    Args:
        criterion: The criterion of this epoch.
        watch: Called with (update, batch) before the batch is used.

    Raises:
        NonFiniteError: Too many steps in a row were skipped.
        Stopped: A signal arrived, or loading failed; the state is as it was between two updates.
    """
    state, model, loader, precision = training.state, training.model, training.loader, training.precision
    precision.begin()
    set_train_mode(model, training.freeze_bn)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    micro_batch = 0
    meter.begin()
    batches = loader.epoch(state.epoch, state.update - state.epoch * len(loader))
    for is_last, update_size, batch in guard.updates(batches):
        watch(state.update, batch)
        step = StepKey(training.seed, state.update, micro_batch, world.data_rank)
        step.seed_torch()
        if micro_batch == 0:
            begin_step()
        with synchronised(model, is_last):
            with meter.own_work():
                targets = criterion.targets(batch)
                mixed = criterion.draw(batch, step)
                with precision.autocast():
                    # The outputs are not assigned to a name, which would keep their memory into the next step.
                    loss = criterion(model(mixed.images, **criterion.arguments(mixed)), targets, mixed)
            # Micro-batches are weighted by their images, so that accumulation equals one large batch of any size.
            precision.backward(loss.total * (batch.size / update_size), reduced=is_last and world.size > 1)
        meter.add(loss, batch)
        micro_batch += 1
        if not is_last:
            continue

        lr = training.schedule(state.update)
        set_lr(state.optimizer, lr)
        grad_norm = precision.step(state.optimizer, parameters)
        state.update += 1
        if state.ema is not None:
            # Without a step the decay is constant from the first update on, as published.
            state.ema.update(state.model, step=state.update if state.ema.use_warmup else None)
        micro_batch = 0
        meter.update_done(lr, grad_norm)
        if meter.done < len(loader):
            saver.after_update()
    return meter.end()


def set_train_mode(model: nn.Module, freeze_bn: bool) -> None:
    """Put `model` in training mode, its BatchNorm layers in evaluation mode if `freeze_bn`."""
    model.train()
    for module in model.modules() if freeze_bn else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    precision: Precision,
    world: World,
    on_outputs: Callable[[Tensor, Batch], None] | None = None,
    guard: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Evaluation:
    """Evaluate `model` on every image of `loader`, on all ranks together.

    Args:
        on_outputs: Called with the logits (B, C) and the batch, for further metrics.
        guard: Wraps the iteration over batches (`volo.cluster.stopping`).

    Raises:
        UserError: Not every image was seen exactly once, or none could be read.
    """
    model.eval()
    sums = Sums(("images", "top1", "top5", "loss", "unreadable"), world)
    began = time.perf_counter()
    with whole_weights(model), torch.inference_mode():
        for batch in guard(loader):
            begin_step()
            with precision.autocast():
                logits = model(batch.images).float()  # (B, C)
            if on_outputs is not None:
                on_outputs(logits, batch)
            loss = F.cross_entropy(logits, batch.classes, reduction="sum")
            sums.add(batch.size, *correct_in_top(logits, batch.classes), loss, 0)
    sums.add(0, 0, 0, 0, loader.left_out)
    totals = sums.totals()
    images, unreadable = int(totals["images"]), int(totals["unreadable"])
    if images + unreadable != len(loader.dataset):
        raise UserError(
            f"validation saw {images + unreadable} images of {len(loader.dataset)}: restart the run, this is a defect"
        )
    if images == 0:
        raise UserError(f"none of the {len(loader.dataset)} validation images can be read")
    seconds = time.perf_counter() - began
    percent = 100.0 / images
    return Evaluation(
        totals["top1"] * percent, totals["top5"] * percent, totals["loss"] / images, images, unreadable, seconds
    )

"""One epoch of training, and the one evaluation that all programs use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.data.loader import Batch, EvalLoader, TrainLoader
from tlt.errors import UserError
from tlt.loss import LossTerms
from volo.checkpoint.train_state import TrainState
from volo.cluster.distributed import World
from volo.record.metrics import EpochTotals, Evaluation, Interval, Sums, correct_in_top
from volo.train.compilation import begin_step
from volo.train.objective import Objective, StepKey
from volo.train.optim import set_lr
from volo.train.precision import Precision

T = TypeVar("T")
MicroBatch = tuple[bool, int, Batch]  # is the last of its update, images of this rank in the update, batch


class Reporter(Protocol):
    """Who is told how training goes; `update` is called after each optimizer step, on every rank."""

    def update(self) -> None: ...

    def interval(self, interval: Interval) -> None: ...

    def pace(self, own_seconds: float, interval: Interval) -> None: ...


@dataclass(frozen=True)
class LoopSettings:
    """What an epoch needs besides the state.

    Args:
        seed: Of everything random in a step.
        log_interval: Updates between two reports; each report synchronises host and device once.
        freeze_bn: Keep BatchNorm in evaluation mode (running statistics).
        on_batch: Called with (update, batch) before each forward pass.
        on_update: Called after each optimizer step that is not the epoch's last.
        on_nonfinite: Called with the updates (from 0) that an interval skipped because gradients were not finite, and
            whether this rank's loss was not finite there.
        guard: The micro-batches go through it (`volo.cluster.stopping`).
    """

    seed: int
    log_interval: int = 50
    freeze_bn: bool = False
    on_batch: Callable[[int, Batch], None] | None = None
    on_update: Callable[[], None] | None = None
    guard: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]] = iter
    on_nonfinite: Callable[[dict[int, bool]], None] | None = None


def train_epoch(
    model: nn.Module,
    state: TrainState,
    loader: TrainLoader,
    objective: Objective,
    precision: Precision,
    lr_at: Callable[[int], float],
    world: World,
    settings: LoopSettings,
    reporter: Reporter,
) -> EpochTotals:
    """Train for the epoch `state.epoch`; `state.update` advances by one per optimizer step.

    Args:
        model: What is called: the bare model of `state` or its working copy, compiled or distributed as may be.

    Raises:
        NonFiniteError: Too many steps in a row were skipped.
    """
    precision.begin()
    set_train_mode(model, settings.freeze_bn)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    meter = _Meter(state, len(loader), world, precision, settings, reporter)
    no_sync = getattr(model, "no_sync", nullcontext)  # of DistributedDataParallel, compiled or not
    micro_batch = 0
    batches = meter.timed(loader.epoch(state.epoch, state.update - state.epoch * len(loader)))
    for is_last, update_size, batch in settings.guard(batches):
        if settings.on_batch is not None:
            settings.on_batch(state.update, batch)
        step = StepKey(settings.seed, state.update, micro_batch, world.rank)
        step.seed_torch()
        if micro_batch == 0:
            begin_step()
        with nullcontext() if is_last else no_sync():
            began = time.perf_counter()
            with precision.autocast():
                terms = objective(model, batch, step)
            meter.forward += time.perf_counter() - began
            # Micro-batches weigh by their images, so that accumulation equals one large batch, ragged tail included.
            precision.backward(terms.total * (batch.size / update_size), reduced=is_last and world.size > 1)
        meter.add(terms, batch)
        micro_batch += 1
        if not is_last:
            continue

        lr = lr_at(state.update)
        set_lr(state.optimizer, lr)
        grad_norm = precision.step(state.optimizer, parameters)
        state.update += 1
        if state.ema is not None:
            # Without a step the decay is constant from the first update on, as published.
            state.ema.update(state.model, step=state.update if state.ema.use_warmup else None)
        micro_batch = 0
        meter.update_done(lr, grad_norm)
        if settings.on_update is not None and meter.done < meter.updates:
            settings.on_update()
    return meter.epoch_totals()


def set_train_mode(model: nn.Module, freeze_bn: bool) -> None:
    """Put `model` in training mode, its BatchNorm layers in evaluation mode if `freeze_bn`."""
    model.train()
    for module in model.modules() if freeze_bn else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


class _Meter:
    """Adds up losses and times, reports each interval, and sums the epoch."""

    def __init__(
        self,
        state: TrainState,
        updates: int,
        world: World,
        precision: Precision,
        settings: LoopSettings,
        reporter: Reporter,
    ) -> None:
        self.state, self.updates, self.world, self.precision = state, updates, world, precision
        self.log_interval, self.on_nonfinite, self.reporter = settings.log_interval, settings.on_nonfinite, reporter
        self.sums = Sums(("images", "unreadable", "loss", "cls", "dense"), world.device)
        self.epoch = dict.fromkeys(self.sums.names, 0.0)
        self.done = self.reported = (
            state.update - state.epoch * updates
        )  # not 0 where a resumed run stopped in the epoch
        self.lr = 0.0
        self.lap_start, self.waited, self.epoch_seconds = time.perf_counter(), 0.0, 0.0
        self.forward = 0.0  # seconds; with the wait for data, what a rank does before it waits for the others
        if state.progress:
            self.restore(state.progress)
        state.progress, state.collect_progress = {}, self.progress

    def progress(self) -> dict[str, Any]:
        """What a run that stops here needs to report as if it had not; every rank must call it."""
        return {
            "done": self.done,
            "reported": self.reported,
            "interval": self.sums.by_rank(),
            "epoch": [self.epoch[name] for name in self.sums.names],
            "seconds": [time.perf_counter() - self.lap_start, self.waited, self.epoch_seconds],
            "lr": self.lr,
            "skipped_steps": self.precision.counts(),
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on from `progress`; of one that was made elsewhere in an epoch only the skipped steps are counted on.

        Raises:
            UserError: It can't be read.
        """
        try:
            self.precision.restore_counts(*progress["skipped_steps"])
            if not self.done or progress["done"] != self.done:
                return
            self.sums.restore(progress["interval"], self.world)
            self.epoch = {n: float(v) for n, v in zip(self.sums.names, progress["epoch"], strict=True)}
            self.reported, self.lr = int(progress["reported"]), float(progress["lr"])
            seconds, self.waited, self.epoch_seconds = map(float, progress["seconds"])
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint's sums of the epoch under way can't be read ({type(error).__name__}: {error}): "
                "resume another checkpoint"
            ) from error
        self.lap_start = time.perf_counter() - seconds

    def timed(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate and count the time spent waiting."""
        iterator = iter(iterable)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self.waited += time.perf_counter() - began
            yield item

    def add(self, terms: LossTerms, batch: Batch) -> None:
        """Count a micro-batch, without synchronising."""
        losses = (term.detach() * batch.size for term in (terms.total, terms.cls, terms.dense))
        self.sums.add(batch.size, len(batch.skipped), *losses)

    def update_done(self, lr: float, grad_norm: Tensor) -> None:
        """Count an optimizer step and report if it ends an interval."""
        self.done += 1
        self.lr = lr
        self.reporter.update()
        if self.done % self.log_interval and self.done != self.updates:
            return
        broken = {self.state.update + ago: own for ago, own in self.precision.take_broken().items()}
        if broken and self.on_nonfinite is not None:
            self.on_nonfinite(broken)
        skipped = self.precision.check()  # host synchronisation, once per interval
        totals = self.sums.totals()
        self.sums.reset()
        now = time.perf_counter()
        seconds, wait_seconds = now - self.lap_start, self.waited
        self.lap_start, self.waited = now, 0.0
        self.epoch_seconds += seconds
        self.epoch = {name: self.epoch[name] + value for name, value in totals.items()}
        interval = Interval(
            epoch=self.state.epoch,
            update=self.state.update,
            update_in_epoch=self.done,
            updates_per_epoch=self.updates,
            updates=self.done - self.reported,
            images=int(totals["images"]),
            **_mean_losses(totals),
            lr=lr,
            grad_norm=float(grad_norm),
            seconds=seconds,
            wait_seconds=wait_seconds,
            skipped_steps=skipped,
        )
        self.reporter.interval(interval)
        self.reporter.pace(self.forward + wait_seconds, interval)
        self.reported, self.forward = self.done, 0.0

    def epoch_totals(self) -> EpochTotals:
        """Return the sums over the whole epoch, and leave the position to be saved behind."""
        self.state.progress = self.progress()
        images, unreadable = int(self.epoch["images"]), int(self.epoch["unreadable"])
        return EpochTotals(images, unreadable, self.epoch_seconds, **_mean_losses(self.epoch), lr=self.lr)


def _mean_losses(totals: dict[str, float]) -> dict[str, float]:
    images = max(totals["images"], 1.0)
    return {"loss": totals["loss"] / images, "cls_loss": totals["cls"] / images, "dense_loss": totals["dense"] / images}


@torch.inference_mode()
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
        guard: The batches go through it (`volo.cluster.stopping`).

    Raises:
        UserError: Not every image was seen exactly once, or none could be read.
    """
    model.eval()
    sums = Sums(("images", "top1", "top5", "loss", "unreadable"), world.device)
    began = time.perf_counter()
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

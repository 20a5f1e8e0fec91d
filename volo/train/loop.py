"""The training loop: epochs, the steps of an epoch, and the evaluation that all programs use."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from timm.utils import distribute_bn
from torch import Tensor, nn

from tlt.data.batch import Batch
from tlt.data.loader import EvalLoader
from tlt.errors import UserError
from volo.checkpoint.checkpoint import best_of, rank_epochs
from volo.checkpoint.replicas import WrongRank
from volo.checkpoint.saver import Saver
from volo.checkpoint.state import TrainState, ranked_by
from volo.cluster.distributed import World, from_all
from volo.cluster.shard import whole_weights
from volo.record.confusion import Answers, keep_answers
from volo.record.metrics import EpochTotals, Evaluation, Sums, correct_in_top
from volo.train.audit import Audit
from volo.train.compilation import begin_step
from volo.train.dense_score import DenseScore
from volo.train.judge import judge_epoch
from volo.train.meter import Meter
from volo.train.precision import Precision
from volo.train.run import Run, Training
from volo.train.step import Step, train_on
from volo.train.step_graph import step_of

_COLLECT = 200  # updates between two garbage collections


def train_epochs(run: Run, training: Training, saver: Saver) -> None:
    """Train from the state's position to the end of the schedule, or to `--stop-epoch`. Raise Stopped if the run stops
    between two updates; the state is consistent then. An epoch counts only when validated."""
    settings = run.settings
    logger = run.logger
    state = training.state
    schedule = training.schedule
    last, epochs = schedule.last_epoch, schedule.total_epochs
    ranking_metric = ranked_by(settings.values())
    meter = Meter(run, training)
    step = step_of(run, training)
    if settings.network.finetune and state.update == 0 and not settings.teachers.kd_only:
        logger.line(f"before fine-tuning: {_evaluated(run, training, state.model)}")
    patience = settings.checkpoints.patience
    audit = Audit(run, training, step)
    for epoch in range(state.epoch, last):
        if patience and best_so_far(state, ranking_metric)[1] >= patience:
            logger.line(f"--patience {patience}: no better epoch for {patience} epochs; the run ends here")
            break
        if (now := in_epoch(run, training, epoch)) is not training:
            training = now
            step = step_of(run, training)
            audit = Audit(run, training, step)
        logger.start_epoch(epoch, epochs, state.updates_per_epoch)
        if training.loader.index_stream.sizes is not None:
            counts = sorted(Counter(training.loader.index_stream.sizes_of(epoch)).items())
            listed = ", ".join(f"{updates} of {size[0]} px" for size, updates in counts if size is not None)
            logger.detail(f"epoch {epoch + 1}: updates on images {listed}")
        gc.collect()
        totals = train_epoch(run, training, step, meter, saver, audit)
        if training.distillation is not None and training.distillation.computes:
            logger.detail(training.distillation.summary_line(totals.seconds))
        evaluations = validate_epoch(run, training, epoch)
        state.scores[epoch] = scores_of(evaluations)
        state.epoch += 1
        logger.set_position(state.epoch, state.update)
        best_score, epochs_since = best_so_far(state, ranking_metric)
        logger.epoch(epoch, totals, evaluations, best_score, epochs_since)
        if evaluations and run.world.is_primary:
            *_, ranked = evaluations.values()  # the average, if that is validated
            keep_answers(run.directory, ranked.answers, epoch, best=not epochs_since)
        judge_epoch(run, training, epoch)
        logger.curve(last=state.epoch >= last)
        if best := saver.after_epoch():
            logger.detail(f"best {ranking_metric} {best.metric:.4f} (epoch {best.epoch + 1}, {best.file})")
    if last < epochs and state.epoch >= last:
        logger.line(f"--stop-epoch {last} of {epochs}: --resume auto without it goes on with the same schedule")


def in_epoch(run: Run, training: Training, epoch: int) -> Training:
    """Return what an epoch trains with: from `--mixup-off-epoch` on, without Mixup and CutMix."""
    mixup_off = run.settings.regular.mixup_off_epoch
    if not mixup_off or epoch < mixup_off or training.criterion.mix is None:
        return training
    return replace(training, criterion=replace(training.criterion, mix=None))


def train_epoch(run: Run, training: Training, step: Step, meter: Meter, saver: Saver, audit: Audit) -> EpochTotals:
    """Train the epoch `state.epoch`. `state.update` advances by one per optimizer step.

    Raises:
        NonFiniteError: Too many steps in a row were skipped.
        Stopped: A signal came, or loading failed; the state is that between two updates.
        UserError: Loading failed between the micro-batches of an update, whose gradients are incomplete.
    """
    state = training.state
    model = training.forward_model
    set_train_mode(model, run.settings.norms.freeze_bn or run.settings.network.freeze)
    training.precision.begin(model)
    micro_batch = 0
    meter.begin()
    training.replicas.agree()
    for batch in run.guard.iterate_until_stopped(training.batches(audit.again)):
        if batch.key.again:
            audit.begin(batch)
            continue
        meter.look_at(batch)
        result, lr = train_on(run, training, step, batch, micro_batch)
        meter.add(result.terms, batch)
        micro_batch += 1
        if result.norm is None:  # another micro-batch of this update follows
            continue

        state.unproven = None
        state.update += 1
        micro_batch = 0
        meter.update_done(lr, result.norm)
        audit.end(result.terms.total)
        if meter.done < state.updates_per_epoch:
            saver.after_update()
        if state.update % _COLLECT == 0:
            gc.collect()
    step.release_memory()  # for the validation
    return meter.end()


def named(run: Run, training: Training, wrong: WrongRank) -> WrongRank:
    """Return which rank is wrong. If two differ, do the updates since they agreed last once more, up to the first one
    that differs, and see which of them gets something else than before. The state is none to go on from afterwards."""
    replicas = training.replicas
    state = training.state
    if not (wrong.doubt and wrong.values and replicas.every):
        return wrong
    run.logger.line(f"warning: {wrong.what} differ between ranks: the updates since they agreed are done again")
    updates = min(wrong.row // 2 + 1, int(replicas.noted) // 2)
    replicas.put()
    last = state.update + updates
    training = in_epoch(run, training, state.epoch)
    set_train_mode(training.forward_model, run.settings.norms.freeze_bn or run.settings.network.freeze)
    training.precision.begin(training.forward_model)
    step = Step(run, training)
    micro_batch = 0
    batches = training.batches()
    while state.update < last:
        run.guard.watchdog.enter_phase("data")
        batch = next(batches)
        run.guard.watchdog.enter_phase("step", batch.size)
        result, _ = train_on(run, training, step, batch, micro_batch)
        micro_batch = 0 if batch.key.last else micro_batch + 1
        state.update += batch.key.last
    now = [tuple(row) for row in from_all(replicas.row(wrong.row))]
    others = [rank for rank in wrong.ranks if now[rank] != wrong.values[rank]]
    alike = len({now[rank] for rank in wrong.ranks}) == 1
    return WrongRank(wrong.what, others) if alike and 0 < len(others) < len(wrong.ranks) else wrong


@contextmanager
def garbage_collected_by_the_loop() -> Iterator[None]:
    """Disable Python's automatic garbage collection: the loop collects on all ranks at once, and never within a step.
    Objects that exist already are never examined again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def set_train_mode(model: nn.Module, freeze_bn: bool) -> None:
    """Put `model` into training mode; if `freeze_bn`, put its BatchNorm layers into evaluation mode."""
    model.train()
    for module in model.modules() if freeze_bn else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def validate_epoch(run: Run, training: Training, epoch: int) -> dict[str, Evaluation]:
    """Validate the model, and its moving average unless that is on the CPU. Do so in every `--val-interval`-th epoch,
    in the last one, and in those of milestones."""
    state = training.state
    # With a working copy, the master weights are validated, because they are the ones that are saved.
    own = training.forward_model if training.precision.working_copy is None else state.model
    models = {"model": (state.model, own)}
    if state.ema is not None and training.average is not None:
        models["ema"] = (state.ema.module, training.average)
    if run.world.size > 1:
        for bare, _ in models.values():
            # Ranks have seen different images, so all of them validate with the statistics that rank 0 saves.
            distribute_bn(bare, run.world.size, reduce=run.settings.norms.dist_bn == "reduce")
    flags = run.settings.checkpoints
    always = (training.schedule.last_epoch, *(flags.save_epochs or ()))
    if run.settings.teachers.kd_only or ((epoch + 1) % flags.val_interval and epoch + 1 not in always):
        return {}
    evaluations = {}
    for name, (_, forward_model) in models.items():
        evaluations[name] = _evaluated(run, training, forward_model)
        run.logger.skipped("skipped-image", training.validation.skips.take_new())
        run.logger.skipped("bad-label", training.validation.bad_labels.take_new())
        run.logger.detail(f"epoch {epoch + 1} {'validation' if name == 'model' else name.upper()}: {evaluations[name]}")
    return evaluations


def _evaluated(run: Run, training: Training, model: nn.Module) -> Evaluation:
    guard = run.guard.iterate_validation
    return evaluate(model, training.validation, training.precision, run.world, None, guard, training.dense_score)


def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    precision: Precision,
    world: World,
    on_outputs: Callable[[Tensor, Batch], None] | None = None,
    guard: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
    dense: DenseScore | None = None,
) -> Evaluation:
    """Evaluate `model` on every image of `loader`, on all ranks together. `on_outputs` gets the logits (B, C) and the
    batch, for further metrics; `guard` wraps the iteration over batches (`volo.cluster.watchdog`); `dense` compares the
    tokens' predictions with label maps. Raise UserError if an image was not seen exactly once, or none was readable."""
    model.eval()
    sums = Sums(("images", "top1", "top5", "loss", "unreadable"), world)
    answers = Answers(len(loader.dataset), world)
    began = time.perf_counter()
    with whole_weights(model), torch.inference_mode():
        for batch in guard(loader):
            begin_step()
            with precision.autocast():
                logits = (model(batch.images) if dense is None else dense.logits(model, batch)).float()  # (B, C)
            if on_outputs is not None:
                on_outputs(logits, batch)
            answers.add(logits, batch.indices)
            loss = F.cross_entropy(logits, batch.classes, reduction="sum")
            sums.add(batch.size, *correct_in_top(logits, batch.classes), loss, 0)
    sums.add(0, 0, 0, 0, loader.left_out)
    totals = sums.totals()
    images = int(totals["images"])
    unreadable = int(totals["unreadable"])
    if images + unreadable != len(loader.dataset):
        seen = f"validation saw {images + unreadable} images of {len(loader.dataset)}"
        raise UserError(f"{seen}: restart the run, this is a defect")
    if images == 0:
        raise UserError(f"none of the {len(loader.dataset)} validation images can be read")
    seconds = time.perf_counter() - began
    percent = 100.0 / images
    scores = (totals["top1"] * percent, totals["top5"] * percent, totals["loss"] / images, images, unreadable, seconds)
    return Evaluation(*scores, answers=answers.of_all_ranks(), **(dense.take() if dense else {}))


def scores_of(evaluations: dict[str, Evaluation]) -> dict[str, float]:
    """Return all scores that can rank an epoch, named as in summary.csv: `top1`, `top1_ema` of the average, ..."""
    return {
        name if model == "model" else f"{name}_{model}": getattr(evaluation, name)
        for model, evaluation in evaluations.items()
        for name in ("top1", "top5", "loss")
    }


def best_so_far(state: TrainState, ranking_metric: str) -> tuple[float | None, int]:
    """Return the best score so far, or None if none is finite, and the number of epochs from the first epoch with that
    score to the last validated one."""
    scores = {n: row for n, row in state.scores.items() if n < state.epoch and ranking_metric in row}
    ranked = rank_epochs(scores, ranking_metric)
    if not ranked:
        return None, 0
    first = best_of(ranked) or ranked[-1]  # without finite scores, the newest epoch comes first
    return first.metric, max(entry.epoch for entry in ranked) - first.epoch


@contextmanager
def out_of_memory_explained(batch_size: int, checkpointing: bool) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a UserError with the remedy."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):  # also in CUDA errors of Triton and other libraries
            raise
        remedy = "a smaller --img-size" if checkpointing else "--grad-checkpointing"
        raise UserError(
            f"out of memory with -b {batch_size} ({str(error).splitlines()[0].split('. ')[0]}): use a smaller -b "
            f"(--grad-accum-steps keeps the global batch), or {remedy}"
        ) from error

"""Train a vision transformer, with token labels or without.

    python train.py DATA --model volo_d1 --token-label --token-label-data LABELS     one process
    ./distributed_train.sh 8 DATA --model volo_d1 ...                                one process per GPU

Reading order: `train` and `build` below -> volo/train/data.py (data) -> volo/train/model.py (model) ->
volo/train/criterion.py (loss) -> volo/train/loop.py (step). How a run goes on from a checkpoint and opens its
directory is in volo/commands/run_start.py.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3, distribute_bn
from torch import nn

from tlt.data.dataset import LabelReader
from tlt.data.loader import EvalLoader, TrainLoader
from tlt.data.sources.folder import check_num_classes
from tlt.data.sources.source import ImageSource
from tlt.io.progress import SearchProgress
from tlt.labels.label_files import LabelMatches
from tlt.labels.store import LabelStore
from tlt.labels.tree import TreeReader
from volo.checkpoint.checkpoint import LAST, load_finetune, load_weights
from volo.checkpoint.checkpoint_file import the_checkpoint
from volo.checkpoint.resume import (
    BATCH_KEY,
    DATA_KEY,
    Fingerprint,
    Resume,
    batch_record,
    fingerprint,
    steps_to_keep,
)
from volo.checkpoint.saver import Saver
from volo.checkpoint.train_state import TrainState, ranked_by
from volo.cluster.distributed import (
    World,
    init_world,
    lost_rank_explained,
    max_over_ranks,
    primary_first,
)
from volo.cluster.per_host import OncePerHost, Packed
from volo.cluster.shard import ShardedEma
from volo.cluster.stopping import STOP, StopGuard, Stopped, ask_for_requeue, tell_batch_script
from volo.cluster.tensor_parallel import TensorParallelParams, in_groups
from volo.cluster.watchdog import Watchdog, collective_timeout, leave_together
from volo.commands.run_start import (
    arithmetic,
    chosen_run,
    describe,
    find_checkpoint,
    go_on_from,
    note_start,
    open_run,
    tell_memory,
)
from volo.config.args import FrozenArgs, TrainArgs
from volo.config.flag_rules import divides_weights
from volo.memory.prediction import out_of_memory_explained
from volo.record.logger import Logger
from volo.record.metrics import Evaluation
from volo.record.run_directory import check_writable, settings_of
from volo.record.run_lock import RunLock
from volo.train.batch_watch import batch_watcher
from volo.train.compilation import compile_errors_told
from volo.train.convolutions import check_convolutions
from volo.train.criterion import ClassCriterion, Criterion, TokenLabelCriterion, make_criterion
from volo.train.data import Folders, hold_out, open_folders, open_labels, train_loader, validation_loader
from volo.train.fit_to_data import fit_to_data, settings_from_checkpoint
from volo.train.held_out import held_out_counts
from volo.train.loop import Training, evaluate, train_epoch
from volo.train.meter import Meter
from volo.train.model import (
    TimmModel,
    add_dense_head,
    build_model,
    eval_settings,
    freeze_backbone,
    heads_of,
    init_heads,
    meshes_of,
    model_config,
    prepare_model,
    wrap_average,
    wrap_model,
)
from volo.train.optim import create_optimizer
from volo.train.precision import Precision, WorkingCopy, compute_dtype
from volo.train.schedule import LrSchedule, resolve_lr

if TYPE_CHECKING:
    from volo.train.teacher import Teacher

FoundLabels = tuple[LabelReader | None, list[str], Fingerprint]


def run(args: TrainArgs) -> int:
    """Entry point, after the arguments are parsed."""
    timeout = collective_timeout(args.dist_timeout, args.loader_timeout)
    world = init_world(args.device, args.local_rank, timeout)
    logger = Logger(world)
    note = partial(logger.event, "fault")
    watchdog = Watchdog(world.rank, args.dist_timeout, args.loader_timeout, note)
    watchdog.start()
    try:
        with logger.end_noted(), lost_rank_explained(), compile_errors_told(args):
            train(args, world, logger, StopGuard(STOP, watchdog, max_over_ranks))
            leave_together(watchdog)
        if world.is_primary:
            tell_batch_script("done")
    finally:
        # A rank that fails keeps its connections until its process ends, so that the launcher sees its failure before
        # the ranks that lose the connection do. It does not wait for them.
        watchdog.end()
    logger.wait_for_trackers()
    return 0


def train(args: TrainArgs, world: World, logger: Logger, guard: StopGuard) -> None:
    """Build everything, then train in a directory that no other job writes to."""
    # The logger's, too: sums over ranks count the images of a group once.
    logger.world = world = in_groups(world, 1 if args.dry_run else args.tensor_parallel)
    note_start(args, world, logger)
    for note in args.notes:
        logger.line(note)
    alive = partial(guard.watchdog.at, "start")
    once_per_host, found = OncePerHost(alive), SearchProgress(logger.line, alive)
    folders = once_per_host(lambda: open_folders(args, world.data_size, found), Folders.packed, Folders.unpacked)
    args = fitted_to(folders, args, world, logger)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = build_model(args)
    settings = eval_settings(args, model)
    chosen = chosen_run(args, settings["input_size"][1:], world, logger)
    with chosen as (directory, spec), RunLock(directory, logger.line) as lock:
        resume = find_checkpoint(args, spec, directory, lock, world)
        args, batch = apply_checkpoint_settings(resume, FrozenArgs(args, resume=spec), world, logger)
        if args.num_classes not in (None, model.num_classes):  # the checkpoint's
            model.reset_classifier(args.num_classes)
        folders = hold_out(args, folders, *([resume.path.parent] if resume.path else []), directory)
        training = build(args, folders, model, settings, batch, world, logger, found, once_per_host)
        go_on_from(resume, args, training, world, logger)
        resumed = resume.path
        del resume  # the checkpoint takes as much memory as the state
        train_in(directory, lock, resumed, args, training, world, logger, guard)


def fitted_to(folders: Folders, args: TrainArgs, world: World, logger: Logger) -> TrainArgs:
    """Return the arguments with defaults that fit the data, and tell of them."""
    images = len(folders.train) - sum(held_out_counts(folders.train, args.val_fraction).values())
    fitted, line = fit_to_data(args, images, len(folders.train.class_names), world.data_size)
    if line:
        logger.line(line)
    return FrozenArgs(args, **fitted)


def apply_checkpoint_settings(
    resume: Resume, args: TrainArgs, world: World, logger: Logger
) -> tuple[TrainArgs, dict[str, int]]:
    """Settle what a checkpoint decides before anything is built: fitted defaults, and the accumulation steps that keep
    its global batch.

    Returns the arguments with these steps, and the record of the batch that the run writes into its own checkpoints.
    """
    args = FrozenArgs(args, **settings_from_checkpoint(resume.checkpoint, args, world.data_size))
    asked = args.grad_accum_steps
    steps, message = steps_to_keep(resume.checkpoint or {}, args.batch_size, asked, world.data_size)
    if message is not None:
        logger.line(message)
    batch = batch_record(args.batch_size, steps, world.data_size, asked)
    return FrozenArgs(args, grad_accum_steps=steps), batch


def build(
    args: Namespace,
    folders: Folders,
    model: TimmModel,
    settings: dict[str, Any],
    batch: dict[str, int],
    world: World,
    logger: Logger,
    found: SearchProgress,
    once_per_host: OncePerHost,
) -> Training:
    """Build what trains the model, in this order: labels, criterion, data, optimizer, schedule.

    Args:
        settings: How images are prepared: input_size (C, H, W), mean, std and others.
        batch: The record of the global batch for checkpoints.
    """
    input_size = settings["input_size"]
    model = add_dense_head(model, args, input_size[1:])
    find = partial(find_labels, args, folders.train, model.num_classes, found)
    labels, warnings, data = once_per_host(find, matches_of, lambda _, plain: find(LabelMatches.unpacked(plain)))
    for warning in folders.warnings + check_num_classes(folders.train, model.num_classes) + warnings:
        logger.line(f"warning: {warning}")
    load_start(model, args, logger)
    teacher = find_teacher(args, model, settings, folders.train.class_names, world)
    if teacher is not None:
        parameters = sum(p.numel() for p in teacher.annotator.model.parameters())
        logger.line(f"teacher {teacher.name}: {parameters / 1e6:.2f} M parameters")
    criterion = make_criterion(args, model, input_size[1:], teacher)
    model = prepare_model(model, args, world)
    dtype = compute_dtype(args, world.device)
    if args.freeze:
        freeze_backbone(model)
    for each in (model,) if teacher is None else (model, teacher.annotator.model):
        for line in check_convolutions(each, input_size, dtype, world.device):
            logger.line(line)

    loader, validation = make_loaders(args, folders, labels, settings, world)
    work = arithmetic(args, model, criterion, input_size, world)  # before ranks divide the model among them
    meshes = meshes_of(args, world)
    working_copy = WorkingCopy(model) if args.model_dtype == "bfloat16" and meshes is None else None
    lr, formula = resolve_lr(args, loader.index_stream.global_batch)
    config = model_config(model, args, settings, folders.train.class_names)
    metadata = {"arch": config["name"], "args": settings_of(args), "model_config": config}
    metadata |= {DATA_KEY: data, BATCH_KEY: batch}
    ema = create_ema(model, args)
    called = wrap_model(model if working_copy is None else working_copy.module, args, world, meshes)
    average = None if ema is None or args.model_ema_force_cpu else wrap_average(ema.module, args, world, meshes)
    clipping = (args.clip_grad, args.clip_mode, args.max_nonfinite, working_copy, heads_of(model))
    precision = Precision(world.device, dtype, *clipping, TensorParallelParams(model).total_norm)
    optimizer = create_optimizer(args, model, world.device)
    state = TrainState(model, optimizer, precision.scaler, ema, metadata=metadata, updates_per_epoch=len(loader))
    schedule = LrSchedule(args, lr, len(loader))
    return Training(
        *(state, called, average, loader, validation, criterion, precision, schedule, formula),
        arithmetic=work,
        seed=args.seed,
        freeze_bn=args.freeze_bn or args.freeze,
    )


def make_loaders(
    args: Namespace,
    folders: Folders,
    labels: LabelReader | None,
    settings: dict[str, Any],
    world: World,
) -> tuple[TrainLoader, EvalLoader]:
    """Return the loaders of this rank for training and for validation."""
    loader = train_loader(args, folders.train, labels, settings, world)
    batch_size = args.validation_batch_size or args.batch_size * args.validation_batch_size_multiplier
    return loader, validation_loader(args, folders.validation, batch_size, settings, world)


def find_labels(
    args: Namespace, folder: ImageSource, num_classes: int, found: SearchProgress, matches: LabelMatches | None = None
) -> FoundLabels:
    """Open the token labels; return them, warnings, and the fingerprint of images and labels for checkpoints."""
    labels, warnings = open_labels(args, folder, num_classes, found, matches)
    return labels, warnings, fingerprint(folder, labels)


def matches_of(found: FoundLabels) -> Packed | None:
    """Return what takes long to find, for the other ranks: which file of a tree is whose label; None without a tree."""
    labels = found[0]
    tree = labels.reader if isinstance(labels, LabelStore) else None
    return ({}, tree.matches.packed()) if isinstance(tree, TreeReader) else None


def find_teacher(
    args: Namespace, student: TimmModel, settings: dict[str, Any], class_names: list[str], world: World
) -> Teacher | None:
    """Load the annotator of `--token-label-teacher`, which few runs have; None without one."""
    if not args.token_label_teacher:
        return None
    from volo.train.teacher import load_teacher

    return load_teacher(args, student, settings, class_names, world)


def load_start(model: TimmModel, args: Namespace, logger: Logger) -> None:
    """Load `--initial-checkpoint` or `--finetune`, and initialise the heads as the flags say."""
    if args.initial_checkpoint:
        logger.line(str(load_weights(model, the_checkpoint(args.initial_checkpoint, "--initial-checkpoint"))))
    if args.finetune:
        logger.line(str(load_finetune(model, the_checkpoint(args.finetune, "--finetune"))))
    if args.head_init_scale is not None or args.head_init_bias is not None:
        init_heads(model, args.head_init_scale, args.head_init_bias)


def create_ema(model: nn.Module, args: Namespace) -> ModelEmaV3 | None:
    """Return the moving average of the weights, or None without `--model-ema`."""
    if not args.model_ema:
        return None
    device = "cpu" if args.model_ema_force_cpu else None
    kind = ShardedEma if divides_weights(args) else ModelEmaV3
    return kind(model, args.model_ema_decay, use_warmup=args.model_ema_warmup, device=device)


def train_in(
    directory: Path,
    lock: RunLock,
    resumed: Path | None,
    args: Namespace,
    training: Training,
    world: World,
    logger: Logger,
    guard: StopGuard,
) -> None:
    """Train in `directory` from the position of the state; save when a signal or a fault stops the run."""
    state = training.state
    describe(args, training, world, logger)
    if args.dry_run:
        with primary_first():
            if world.is_primary:
                check_writable(directory, "--output")
        tell_memory(args, training, world, logger)
        logger.line("--dry-run: flags, data and model are fine; nothing was trained or written")
        return

    if state.epoch >= training.schedule.total_epochs:
        logger.line(f"this run was finished before: all of its {state.epoch} epochs are done; nothing is trained")
    meter = Meter(state, training.precision, training.loader, logger, lambda: guard.waited, args.log_interval)
    on_save = partial(guard.watchdog.at, "saving")
    opened = open_run(args, training, directory, lock, resumed, world, logger, on_save)
    guard.stop.only_noted()
    with opened as saver:
        begun = state.update
        if world.is_primary:
            tell_batch_script("begun")
        try:
            with out_of_memory_explained(args):
                train_epochs(args, training, meter, saver, world, logger, guard)
        except Stopped as stop:
            logger.event("fault" if stop.__cause__ else "signal", reason=str(stop), exit_code=stop.exit_code)
            guard.watchdog.at("saving")
            if state.update > begun:
                saver.save_now(str(stop))
            if world.is_primary:
                # Before any rank leaves: where one node's processes have ended, others may be killed.
                ask_for_requeue(stop, state.update, directory / LAST)
            leave_together(guard.watchdog)
            raise
    logger.line(f"done: {state.update} updates; results in {logger.directory.path if logger.directory else None}")


def train_epochs(
    args: Namespace,
    training: Training,
    meter: Meter,
    saver: Saver,
    world: World,
    logger: Logger,
    guard: StopGuard,
) -> None:
    """Train from the position of the state to the end of the schedule.

    Raises:
        Stopped: The state is as it was between two updates; an epoch counts as finished only after its validation.
    """
    state, epochs = training.state, training.schedule.total_epochs
    save_every = args.log_interval if args.save_images else 0
    config = state.metadata["model_config"]
    watch = batch_watcher(training.loader, training.criterion, config, save_every, logger)
    if args.finetune and state.update == 0:
        before = evaluate(state.model, training.validation, training.precision, world, guard=guard.batches)
        logger.line(f"before fine-tuning: {before}")
    for epoch in range(state.epoch, epochs):
        if args.patience and epochs_since_best(state, ranked_by(vars(args))) >= args.patience:
            logger.line(f"--patience {args.patience}: no epoch was better than one so long ago; the run ends here")
            break
        logger.start_epoch(epoch, epochs, len(training.loader))
        criterion = criterion_of_epoch(training.criterion, args, epoch)
        totals = train_epoch(training, criterion, world, meter, watch, saver, guard)
        evaluations = validate_epoch(args, training, epoch, world, logger, guard)
        state.scores[epoch] = scores_of(evaluations)
        state.epoch += 1
        logger.at(state.epoch, state.update)
        by = ranked_by(vars(args))
        logger.epoch(epoch, totals, evaluations, best_score(state, by))
        if best := saver.after_epoch():
            logger.line(f"best {by} {best.metric:.4f} (epoch {best.epoch + 1}, {best.file})")
        logger.curve()


def criterion_of_epoch(criterion: Criterion, args: Namespace, epoch: int) -> Criterion:
    """Return the criterion of an epoch: without Mixup and CutMix from `--mixup-off-epoch` on."""
    if not args.mixup_off_epoch or epoch < args.mixup_off_epoch:
        return criterion
    assert isinstance(criterion, ClassCriterion | TokenLabelCriterion)
    return replace(criterion, mix=None)


def validate_epoch(
    args: Namespace, training: Training, epoch: int, world: World, logger: Logger, guard: StopGuard
) -> dict[str, Evaluation]:
    """Validate the model, and its moving average unless that is on the CPU, in every `--val-interval`-th epoch."""
    state = training.state
    # The master weights where a copy of them computes: what is validated is what is saved.
    models = {"model": (state.model, training.model if training.precision.working_copy is None else state.model)}
    if state.ema is not None and training.average is not None:
        models["ema"] = (state.ema.module, training.average)
    if world.size > 1:
        for bare, _ in models.values():
            # Every rank has seen other images: all validate with the statistics that rank 0 saves.
            distribute_bn(bare, world.size, reduce=args.dist_bn == "reduce")
    if (epoch + 1) % args.val_interval and epoch + 1 != training.schedule.total_epochs:
        return {}
    evaluations = {}
    for name, (_, called) in models.items():
        evaluations[name] = evaluate(called, training.validation, training.precision, world, guard=guard.batches)
        logger.skipped("skipped-image", training.validation.skips.take_new())
        logger.line(f"epoch {epoch + 1} {'validation' if name == 'model' else name.upper()}: {evaluations[name]}")
    return evaluations


def scores_of(evaluations: dict[str, Evaluation]) -> dict[str, float]:
    """Return all that can rank an epoch, named as in summary.csv: `top1`, of the average `top1_ema`, ..."""
    return {
        name if model == "model" else f"{name}_{model}": getattr(evaluation, name)
        for model, evaluation in evaluations.items()
        for name in ("top1", "top5", "loss")
    }


def epochs_since_best(state: TrainState, by: str) -> int:
    """Return how many epochs have followed the first one with the best score; 0 before any was validated."""
    scores = {epoch: found[by] for epoch, found in state.scores.items() if by in found and epoch < state.epoch}
    sign = 1 if by.startswith("loss") else -1
    ranked = [(sign * score if math.isfinite(score) else math.inf, epoch) for epoch, score in scores.items()]
    return max(scores) - min(ranked)[1] if scores else 0


def best_score(state: TrainState, by: str) -> float | None:
    """Return the best score of all epochs done; None where none is finite."""
    scores = [found.get(by, math.nan) for epoch, found in state.scores.items() if epoch < state.epoch]
    return (min if by.startswith("loss") else max)(filter(math.isfinite, scores), default=None)

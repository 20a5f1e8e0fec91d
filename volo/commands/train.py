"""Train a vision transformer, with token labels or without.

    python train.py DATA --model volo_d1 --token-label --token-label-data LABELS     one process
    ./distributed_train.sh 8 DATA --model volo_d1 ...                                one process per GPU

Reading order: `start` and `build` below -> volo/train/data.py (data) -> volo/train/model.py (model) ->
volo/train/criterion.py (loss) -> volo/train/step.py (step) -> volo/train/loop.py (epochs). volo/checkpoint/start.py
decides what a run begins as; volo/commands/run_start.py restores a checkpoint and opens the records.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import to_2tuple
from timm.utils import ModelEmaV3
from torch import nn

from tlt.data.dataset import LabelReader
from tlt.data.loader import EvalLoader
from tlt.data.sources.folder import check_num_classes
from tlt.data.sources.source import ImageSource
from tlt.io.jobs import SearchProgress
from volo.checkpoint.checkpoint import LAST, NotWrittenError
from volo.checkpoint.finetune import load_finetune, load_weights
from volo.checkpoint.replicas import Replicas, WrongRank
from volo.checkpoint.resume import DATA_KEY, fingerprint
from volo.checkpoint.state import ORDER_KEY, TrainState, ranked_by
from volo.cluster.distributed import (
    JOIN_S,
    World,
    init_world,
    leave_together,
    lost_rank_explained,
    max_over_ranks,
    primary_first,
    wait_for_hosts,
)
from volo.cluster.launch import launch_of
from volo.cluster.shard import ShardedEma
from volo.cluster.stopping import PREEMPTED, STOP, Stopped, ask_for_requeue, tell_batch_script
from volo.cluster.tensor_parallel import TensorParallelParams, in_groups
from volo.cluster.watchdog import StopGuard, Watchdog
from volo.commands.run_start import (
    check_smallest_batch,
    describe,
    note_start,
    open_run,
    open_start,
    outcome,
    restore_state,
    step_arithmetic,
)
from volo.config.rules import other_sizes, sharding_flag
from volo.config.settings_train import Average, Network, TrainSettings
from volo.memory.prediction import report_dry_run
from volo.record.confusion import ANSWERS, show_answers
from volo.record.history import epochs_of
from volo.record.logger import Logger
from volo.record.records import duration, settings_of
from volo.train.architecture import architecture_of, requested_by
from volo.train.compilation import compile_errors_told
from volo.train.criterion import make_criterion
from volo.train.data import (
    Folders,
    hold_out,
    label_agreement,
    open_folders,
    open_labels,
    train_loader,
    validation_loader,
)
from volo.train.dense_score import DenseScore
from volo.train.loop import best_so_far, garbage_collected_by_the_loop, named, out_of_memory_explained, train_epochs
from volo.train.model import (
    TimmModel,
    add_dense_head,
    build_named_model,
    compiler_of,
    data_config_of,
    heads_of,
    init_heads,
    meshes_of,
    model_config,
    prepare_model,
    wrap_model,
)
from volo.train.optimizer import create_optimizer
from volo.train.precision import Clipping, Precision, WorkingCopy, check_convolutions, compute_dtype
from volo.train.run import BATCH_KEY, Run, Training, recipe_from_nothing, resolve_args
from volo.train.schedule import LrSchedule, resolve_lr
from volo.train.step_graph import use_own_stream

if TYPE_CHECKING:  # imported only by runs that use them
    from volo.train.distillation import Distillation
    from volo.train.online_annotator import OnlineAnnotator


@dataclass(frozen=True)
class TrainResult:
    """What has come of a run.

    Attributes:
        best: Best value of `--eval-metric`, top-1 in percent by default; None if nothing was validated.
        path: Directory of the run, with checkpoints, log and pictures. Programs take it as `--checkpoint`: the best.
        classes: Names of the classes, in the order of the model's outputs.
        curve: A row of each epoch, such as {"epoch": 0, "train_loss": 2.3, "eval_top1": 25.0, ...}.
    """

    best: float | None
    path: Path
    classes: list[str]
    curve: list[dict[str, Any]]


def run(settings: TrainSettings) -> int:
    """Train on all ranks, and return the exit code."""
    train_on_ranks(settings)
    return 0


def train_on_ranks(settings: TrainSettings) -> TrainResult:
    """Train on all ranks."""
    # Collectives time out later than the watchdog, so that the watchdog reports the cause first.
    hangs, loads = settings.distributed.dist_timeout, settings.images.loading.loader_timeout
    timeout = max(hangs, Watchdog.START_S, loads or 7 * 24 * 3600) + 120
    launch = launch_of(os.environ, settings.distributed.local_rank)
    logger = Logger(World(launch.rank, launch.local_rank, launch.size, torch.device("cpu")))  # until the ranks have met
    watchdog = Watchdog(launch.rank, hangs, loads, partial(logger.event, "fault"), logger.stopwatch.enter)
    watchdog.start()
    try:
        compiles = settings.precision.compilation.torchcompile
        counted = logger.stopwatch.compiling_counted() if compiles else nullcontext()
        with logger.end_noted(), lost_rank_explained(), compile_errors_told(compiles), counted:
            logger.stopwatch.enter("connecting")
            world = init_world(settings.run.device, settings.distributed.local_rank, timeout, JOIN_S)
            use_own_stream(world.device)
            result = start(settings, world, logger, StopGuard(STOP, watchdog, max_over_ranks))
            leave_together(watchdog)
        if world.is_primary:
            tell_batch_script("done")
    finally:
        # A rank that fails keeps its connections until its process ends. So the launcher sees its failure before those
        # of the ranks that lose the connection.
        watchdog.end()
    if logger.trackers is not None:
        logger.trackers.wait()
    return result


def start(settings: TrainSettings, world: World, logger: Logger, guard: StopGuard) -> TrainResult:
    """Find data and checkpoint, complete the arguments from them, build everything, then train."""
    # The logger gets the same world, because sums over ranks must count the images of a group once.
    logger.world = world = in_groups(world, 1 if settings.run.dry_run else settings.distributed.tensor_parallel)
    with primary_first():  # the architecture may have to be fetched
        architecture_of(settings.network.model)  # report a misspelt name before a long search for images
    on_progress = SearchProgress(logger.line, partial(guard.watchdog.enter_phase, "start"))
    logger.stopwatch.enter("listing")
    folders = open_folders(settings, world.data_size, on_progress)
    settings = recipe_from_nothing(settings, len(folders.train), world.data_size)
    note_start(settings, world, logger)
    logger.line(*settings.notes)
    logger.stopwatch.enter("checkpoint")
    with open_start(settings, world, logger) as (begun, lock):
        logger.stopwatch.enter("building")
        fraction, seed = settings.images.val_fraction, settings.run.seed
        folders = hold_out(fraction, seed, folders, *([begun.file.parent] if begun.file else []), begun.directory)
        images = len(folders.train)
        classes = len(folders.train.class_names)
        resolved, batch, messages = resolve_args(settings, begun.checkpoint, images, classes, world.data_size)
        logger.line(*messages)
        run = Run(resolved, world, logger, guard, begun, lock)
        torch.manual_seed(run.settings.run.seed)  # the same initial weights on every rank
        model, notes = build_named_model(run.settings, folders.train.class_names)
        logger.line(*notes)
        flags = run.settings.labels
        synthetic = run.settings.images.loading.data_backend == "synthetic"
        logger.stopwatch.enter("labels")
        labels, warnings = open_labels(
            flags.token_label_data, flags.maps, folders.train, model.num_classes, on_progress, synthetic=synthetic
        )
        beyond = [] if run.settings.teachers.kd_only else check_num_classes(folders.train, model.num_classes)
        logger.line(*(f"warning: {warning}" for warning in folders.warnings + beyond + warnings))
        if world.is_primary and (agreement := label_agreement(labels, folders.train)):
            logger.line(agreement)
        logger.stopwatch.enter("building")
        training = build(run, folders, labels, model, batch)
        logger.stopwatch.enter("checkpoint")
        restore_state(run, training)
        logger.stopwatch.enter("building")
        describe(run, training)
        (report_dry_run if run.settings.run.dry_run else train)(run, training)
        best, _ = best_so_far(training.state, ranked_by(run.settings.values()))
        names = training.state.metadata["model_config"]["class_names"]
        return TrainResult(best, run.directory, names, epochs_of(run.directory))


def build(run: Run, folders: Folders, labels: LabelReader | None, model: TimmModel, batch: dict[str, int]) -> Training:
    """Build what trains the model, in the order of the numbers. Each change of the model is what a call returns.

    Args:
        model: From `build_named_model`, on the CPU.
        batch: The description of the global batch, for checkpoints.
    """
    settings, world = run.settings, run.world
    data_config = data_config_of(requested_by(settings), model)
    input_size = data_config["input_size"]
    dtype = compute_dtype(settings.precision.mixed, world.device)
    # 1. The model gets what token labels need, and its first weights.
    model = add_dense_head(model, settings.labels, input_size[1:])
    class_names = [] if settings.teachers.kd_only else folders.train.class_names
    model = load_start(model, settings.network, run.logger, class_names)
    # 2. Teachers. A student of features gets a projector to each of them.
    online = load_annotator(run, folders.train, model, data_config)
    model, distillation = load_teachers(run, folders.train, model, data_config)
    # 3. The loss. It switches off a dense head whose loss has the weight 0.
    criterion = make_criterion(settings, model, input_size[1:], online)
    # 4. Data.
    features = distillation.stores if distillation else ()
    loader = train_loader(settings, folders.train, labels, data_config, world, features)
    stream = loader.index_stream
    check_smallest_batch(settings, model, input_size, stream)
    validation, dense_score = build_validation(run, folders.validation, model, data_config)
    # 5. The model goes to its device. Its operations are counted before, because SyncBatchNorm refuses meta tensors.
    arithmetic = step_arithmetic(run, model, criterion, input_size)
    model = prepare_model(model, settings, world)
    for network in (model,) if online is None else (model, online.annotator.model):
        for size in (input_size[1:], *other_sizes(settings.sizes)):
            run.logger.line(*check_convolutions(network, (input_size[0], *size), dtype, world.device))
    # 6. What the loop calls: the model or its copy, compiled and distributed. `--shard` divides the model in place.
    ema = create_ema(model, settings.ema, bool(sharding_flag(settings.distributed)))
    working_copy, forward_model, average = wrap_models(settings, model, ema, world)
    # 7. The step: precision, optimizer, learning rate.
    precision = create_precision(settings, model, world.device, dtype, working_copy)
    lr, lr_formula = resolve_lr(settings.schedule, stream.global_batch)
    optimizer = create_optimizer(model, settings.optim, settings.distributed, lr, world.device)
    # 8. What checkpoints tell.
    metadata = metadata_of(settings, model, data_config, folders.train, labels, distillation)
    metadata |= {BATCH_KEY: batch, ORDER_KEY: repr(replace(stream, world_size=1, rank=0, micro_batches=1))}
    per_epoch = stream.updates_per_epoch
    state = TrainState(model, optimizer, precision.scaler, ema, metadata=metadata, updates_per_epoch=per_epoch)
    return Training(
        state=state,
        replicas=Replicas(state, settings.distributed, world),
        forward_model=forward_model,
        average=average,
        loader=loader,
        validation=validation,
        criterion=criterion,
        precision=precision,
        schedule=LrSchedule(settings.schedule, settings.checkpoints, settings.run.seed, lr, per_epoch),
        lr_formula=lr_formula,
        arithmetic=arithmetic,
        distillation=distillation,
        dense_score=dense_score,
    )


def metadata_of(
    settings: TrainSettings,
    model: TimmModel,
    data_config: dict[str, Any],
    images: ImageSource,
    labels: LabelReader | None,
    distillation: "Distillation | None",
) -> dict[str, Any]:
    """Return what checkpoints tell about the model, the arguments and the data."""
    names = distillation.class_names if distillation and settings.teachers.kd_only else images.class_names
    config = model_config(model, settings, data_config, names)
    data = fingerprint(images, labels, None if distillation is None else distillation.checksum)
    return {"arch": config["name"], "args": settings_of(settings), "model_config": config, DATA_KEY: data}


def load_annotator(
    run: Run, images: ImageSource, model: TimmModel, data_config: dict[str, Any]
) -> "OnlineAnnotator | None":
    """Return the annotator of `--token-label-teacher`; None without the flag."""
    if not run.settings.labels.token_label_teacher:
        return None
    from volo.train.online_annotator import load_online_annotator

    online = load_online_annotator(run.settings, model, data_config, images.class_names, run.world)
    size = sum(p.numel() for p in online.annotator.model.parameters())
    notes = (f"{size / 1e6:.2f} M parameters", *online.notes)
    run.logger.line(*(f"annotator {online.name}: {note}" for note in notes))
    return online


def load_teachers(
    run: Run, images: ImageSource, model: TimmModel, data_config: dict[str, Any]
) -> "tuple[TimmModel, Distillation | None]":
    """Return the model, with projectors if it learns features, and its teachers of `--kd-model-name`; None without."""
    if not run.settings.teachers.kd_model_name:
        return model, None
    from volo.train.distillation import load_distillation

    return model, load_distillation(run.settings, model, data_config, images, run.world, run.logger)


def build_validation(
    run: Run, images: ImageSource, model: TimmModel, data_config: dict[str, Any]
) -> tuple[EvalLoader, DenseScore | None]:
    """Return the loader of validation images, and the score of their tokens against `--val-label-data` or None."""
    settings, (channels, *size) = run.settings, data_config["input_size"]
    data_config = data_config | {"input_size": (channels, *to_2tuple(settings.sizes.val_img_size or size))}
    score = None
    if settings.labels.val_label_data:
        place = settings.labels.val_label_data, settings.labels.maps, "--val-label-data"
        score = DenseScore(*place, model, data_config, images, run.world)
    flags = settings.images
    batch_size = flags.validation_batch_size or flags.batch_size * flags.validation_batch_size_multiplier
    maps = score.labels if score else None
    keep = flags.loading.use_multi_epochs_loader
    loader = validation_loader(flags.loading, images, batch_size, data_config, run.world, maps, keep_workers=keep)
    return loader, score


def wrap_models(
    settings: TrainSettings, model: nn.Module, ema: ModelEmaV3 | None, world: World
) -> tuple[WorkingCopy | None, nn.Module, nn.Module | None]:
    """Compile and distribute the modules that a run calls.

    Returns:
        The copy of the weights that computes in place of `model` (`--model-dtype`) or None, the module that the loop
        calls in training, and the module that validates the moving average, or None.
    """
    meshes = meshes_of(settings, world)
    working_copy = WorkingCopy(model) if settings.precision.mixed.model_dtype == "bfloat16" and meshes is None else None
    forward_model = wrap_model(model if working_copy is None else working_copy.module, settings, world, meshes)
    if ema is None or settings.ema.model_ema_force_cpu:
        return working_copy, forward_model, None
    if meshes is None:  # the average has no gradients, so DistributedDataParallel is not needed
        return working_copy, forward_model, compiler_of(settings).model(ema.module)
    return working_copy, forward_model, wrap_model(ema.module, settings, world, meshes)


def load_start(model: TimmModel, network: Network, logger: Logger, class_names: list[str]) -> TimmModel:
    """Return the model with the weights of `--initial-checkpoint` or `--finetune`, heads initialised and the backbone
    frozen, as the flags say."""
    if network.initial_checkpoint:
        logger.line(str(load_weights(model, network.initial_checkpoint, class_names=class_names)))
    if network.finetune:
        logger.line(str(load_finetune(model, network.finetune, class_names=class_names)))
    if network.head_init_scale is not None or network.head_init_bias is not None:
        init_heads(model, network.head_init_scale, network.head_init_bias)
    if network.freeze:
        model.requires_grad_(False)
        for head in heads_of(model):
            head.requires_grad_(True)
    return model


def create_precision(
    settings: TrainSettings,
    model: TimmModel,
    device: torch.device,
    dtype: torch.dtype | None,
    working_copy: WorkingCopy | None,
) -> Precision:
    """Return how steps compute, and clip gradients."""
    limit = settings.optim.clip_grad
    clip = None if limit is None else Clipping(limit, settings.optim.clip_mode, heads_of(model))
    norm_of = TensorParallelParams(model).total_norm
    return Precision(device, dtype, clip, settings.checkpoints.max_nonfinite, working_copy, norm_of)


def create_ema(model: nn.Module, ema: Average, divided: bool) -> ModelEmaV3 | None:
    """Return the moving average of the weights, or None without `--model-ema`."""
    if not ema.model_ema:
        return None
    device = "cpu" if ema.model_ema_force_cpu else None
    kind = ShardedEma if divided else ModelEmaV3
    return kind(model, ema.model_ema_decay, use_warmup=ema.model_ema_warmup, device=device)


@contextmanager
def wrong_rank_named(run: Run, training: Training) -> Iterator[None]:
    """Find out which rank is wrong if WrongRank is raised, record it, and ask for other machines."""
    try:
        yield
    except WrongRank as error:
        update = training.state.update
        wrong = named(run, training, error)
        if run.world.is_primary:
            found = {"ranks": wrong.ranks, "nodes": wrong.nodes, "exit_code": wrong.exit_code}
            run.logger.event("fault", fault="wrong-rank", reason=str(wrong), **found)
            if not wrong.doubt:
                ask_for_requeue(str(wrong), update, run.directory / LAST, wrong.nodes)
        wait_for_hosts()
        raise wrong from None


def train(run: Run, training: Training) -> None:
    """Train from the state's position. If a signal or a fault stops the run, save first."""
    state = training.state
    logger = run.logger
    guard = run.guard
    if state.epoch >= training.schedule.last_epoch:
        logger.line(f"this run was finished before: all of its {state.epoch} epochs are done; nothing is trained")
    began = time.monotonic()
    opened = open_run(run, training)
    guard.stop.only_noted()
    with wrong_rank_named(run, training), opened as saver:
        if run.world.is_primary:
            tell_batch_script("begun")
        try:
            checkpointing = run.settings.precision.grad_checkpointing
            memory = out_of_memory_explained(run.settings.images.batch_size, checkpointing)
            with memory, garbage_collected_by_the_loop():
                train_epochs(run, training, saver)
        except Stopped as stop:
            logger.event("fault" if stop.__cause__ else "signal", reason=str(stop), exit_code=stop.exit_code)
            guard.watchdog.enter_phase("saving")
            failure: NotWrittenError | None = None
            try:
                saver.save_now(str(stop))
            except NotWrittenError as error:
                failure = error
            saved = failure is None or (run.directory / LAST).is_file()
            if run.world.is_primary and stop.exit_code == PREEMPTED and saved:
                # Write this before any rank leaves: when one node's processes have ended, others may be killed.
                ask_for_requeue(str(stop), saver.saved_at[1], run.directory / LAST)
            wait_for_hosts()  # don't leave the process group, which the model holds: `run_program` ends the process
            if failure is not None:
                raise failure from stop
            raise
    spent = f"{duration(time.monotonic() - began)} since this start"
    logger.stopwatch.enter("validation")  # its pictures
    logger.line(f"done: {state.update} updates, {spent}; results in {run.directory}")
    if run.world.is_primary and (run.directory / ANSWERS).is_file():
        classes = state.metadata["model_config"]["num_classes"]
        logger.line(*show_answers(run.directory, training.validation.dataset, classes))
    best, verdict = outcome(run, training)
    if best:
        logger.line(best)
        logger.verdict(verdict)

"""Train a vision transformer, with token labels or without.

    python train.py DATA --model volo_d1 --token-label --token-label-data LABELS     one process
    ./distributed_train.sh 8 DATA --model volo_d1 ...                                one process per GPU

Reading order: `train` below -> volo/engine/data.py (data) -> volo/engine/model.py (model) -> volo/engine/objective.py
(loss) -> volo/engine/loop.py (step).
"""

from __future__ import annotations

import importlib.util
import math
import socket
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3, distribute_bn
from torch import nn
from torchvision.utils import save_image

import volo as volo  # registers the models
from tlt.data.folder import check_num_classes
from tlt.data.loader import Batch, EvalLoader, TrainLoader
from tlt.data.workers import kill_workers
from tlt.errors import UserError
from volo.engine import fingerprint, global_batch
from volo.engine.checkpoint import CheckpointDir, load_finetune, load_weights
from volo.engine.data import open_folders, open_labels, train_loader, validation_loader
from volo.engine.distributed import (
    World,
    from_all,
    from_primary,
    init_world,
    lost_rank_explained,
    primary_first,
    shut_down,
    wait_for_all,
)
from volo.engine.first_batch import first_batch_drawer
from volo.engine.logger import Logger
from volo.engine.loop import EpochTotals, Evaluation, LoopSettings, evaluate, train_epoch
from volo.engine.model import (
    TimmModel,
    add_dense_head,
    build_model,
    eval_settings,
    init_heads,
    model_config,
    prepare_model,
    wrap_model,
)
from volo.engine.nonfinite import NonFiniteRecorder
from volo.engine.objective import ClassObjective, Objective, TokenLabelObjective, make_objective
from volo.engine.optim import create_optimizer
from volo.engine.pace import Pace
from volo.engine.precision import Precision, resolve_amp_dtype
from volo.engine.preempt import STOP, Stopped
from volo.engine.restart import Continued, continued_run, launch_id
from volo.engine.resume import Resume, changed_args, find_resume
from volo.engine.run_directory import SUPERSEDED, RunDirectory, choose_directory, settings_of, versions
from volo.engine.run_lock import RunLock
from volo.engine.saver import SavePolicy, Saver
from volo.engine.schedule import LrSchedule, resolve_lr
from volo.engine.stopping import StopGuard
from volo.engine.teacher import Teacher, load_teacher
from volo.engine.train_state import TrainState
from volo.engine.watchdog import Watchdog, collective_timeout


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    world = init_world(args.device, args.local_rank, collective_timeout(args.dist_timeout, args.loader_timeout))
    logger = Logger(world)
    note = partial(logger.event, "fault")
    watchdog = Watchdog(world.rank, world.size, args.dist_timeout, args.loader_timeout, STOP, note)
    watchdog.start()
    try:
        with logger.end_noted(), lost_rank_explained():
            train(args, world, logger, StopGuard(STOP, watchdog))
    finally:
        watchdog.end()
        shut_down()
    return 0


@dataclass(frozen=True)
class Setup:
    """Everything a run consists of, built and ready for the first step."""

    state: TrainState  # model, optimizer, scaler, EMA and the position in the run
    model: nn.Module  # what the loop calls: the state's model, or its distributed or compiled wrapper
    loader: TrainLoader
    validation: EvalLoader
    objective: Objective
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    teacher: Teacher | None = None


def train(args: Namespace, world: World, logger: Logger, guard: StopGuard) -> None:
    """Build everything, then train in a directory that no other job writes to."""
    note_start(args, world, logger)
    for note in args.notes:
        logger.line(note)
    setup = build(args, world, logger)
    state = logger.position = setup.state
    image_size = state.metadata["model_config"]["img_size"]
    directory, args.resume = from_primary(
        continued_run(args) or Continued(choose_directory(args, image_size), args.resume)
    )
    with RunLock(directory, partial(note_lock, logger)) as lock:
        train_in(directory, lock, args, setup, world, logger, guard)


def train_in(
    directory: Path, lock: RunLock, args: Namespace, setup: Setup, world: World, logger: Logger, guard: StopGuard
) -> None:
    """Resume the run in `directory`, if asked to; train, and save where a signal or a fault stops it."""
    setup, resumed = resume_run(args, setup, directory, lock, world, logger)
    state = setup.state
    describe(args, setup, world, logger)
    if args.dry_run:
        logger.line("--dry-run: flags, data and model are fine; nothing was trained or written")
        return

    with guard.stop.deferred(), open_run(args, setup, directory, lock, resumed, world, logger) as saver:
        begun = state.update
        try:
            train_epochs(args, setup, directory, saver, world, logger, guard)
        except Stopped as stop:
            logger.event("fault" if stop.__cause__ else "signal", reason=str(stop), exit_code=stop.exit_code)
            guard.watchdog.at("saving")
            if state.update > begun:
                saver.save_now(str(stop))
            wait_for_all()  # torchrun ends the others as soon as one has left
            kill_workers()
            raise
    logger.line(f"done: {state.update} updates; results in {logger.directory.path if logger.directory else None}")


def train_epochs(
    args: Namespace,
    setup: Setup,
    directory: Path,
    saver: Saver,
    world: World,
    logger: Logger,
    guard: StopGuard,
) -> None:
    """From where the state stands to the end of the schedule.

    Raises:
        Stopped: The state is as it was between two updates; an epoch that wasn't validated to its end has not ended.
    """
    state = setup.state
    logger.watch_pace = Pace(world, args.workers, logger)
    settings = LoopSettings(
        args.seed,
        args.log_interval,
        args.freeze_bn,
        on_batch=batch_watcher(args, setup, logger),
        on_update=saver.after_update,
        guard=guard.updates,
        on_nonfinite=NonFiniteRecorder(
            args, state, setup.loader, setup.precision, setup.schedule, world, directory, logger.event
        ),
    )
    if args.finetune and state.update == 0:
        before = evaluate(state.model, setup.validation, setup.precision, world, guard=guard.batches)
        logger.line(f"before fine-tuning: {before}")
    for epoch in range(state.epoch, setup.schedule.total_epochs):
        logger.start_epoch(epoch, setup.schedule.total_epochs, len(setup.loader))
        objective = objective_of_epoch(setup.objective, args, epoch)
        totals = train_epoch(
            setup.model, state, setup.loader, objective, setup.precision, setup.schedule, world, settings, logger
        )
        costs = teacher_costs(setup, totals, logger)
        evaluations = validate_epoch(args, setup, epoch, world, logger, guard)
        state.end_epoch()
        guard.watchdog.at("saving")
        logger.epoch(epoch, totals, evaluations, best_metric(args, state, evaluations), costs)
        if best := saver.after_epoch(metric_of(args, evaluations)):
            logger.line(f"best {args.eval_metric} {best.metric:.4f} (epoch {best.epoch + 1}, {best.file})")
        logger.curve()


def note_lock(logger: Logger, text: str) -> None:
    """Tell what became of another job's lock."""
    logger.line(text)
    logger.event("lock", reason=text)


def note_start(args: Namespace, world: World, logger: Logger) -> None:
    """The event with which a start begins: what was asked for, and where it runs."""
    hosts = Counter(from_all(socket.gethostname()))
    if world.is_primary:
        logger.event(
            "start",
            command=sys.argv,
            args=settings_of(args),
            versions=versions(),
            world_size=world.size,
            hosts=hosts,
            device=str(world.device),
        )


def build(args: Namespace, world: World, logger: Logger) -> Setup:
    """Construct data, model, loss, optimizer and schedule, in this order."""
    folders = open_folders(args, world.size)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = build_model(args)
    settings = eval_settings(args, model)
    model = add_dense_head(model, args, settings["input_size"][1:])
    labels, warnings = open_labels(args, folders.train, model.num_classes)
    for warning in folders.warnings + check_num_classes(folders.train, model.num_classes) + warnings:
        logger.line(f"warning: {warning}")
    load_start(model, args, logger)
    objective = make_objective(args, model, settings["input_size"][1:], world.rank)
    teacher = load_teacher(args, model, settings, folders.train.class_names, world)
    if teacher is not None:
        assert isinstance(objective, TokenLabelObjective)
        objective = replace(objective, teacher=teacher)
    model = prepare_model(model, args, world)

    loader = train_loader(args, folders.train, labels, settings, world)
    batch_size = args.validation_batch_size or args.batch_size * args.validation_batch_size_multiplier
    validation = validation_loader(args, folders.validation, batch_size, settings, world)

    amp_dtype = resolve_amp_dtype(args.amp, args.amp_dtype, world.device)
    precision = Precision(world.device, amp_dtype, args.clip_grad, args.clip_mode, args.max_nonfinite)
    lr, formula = resolve_lr(args, loader.index_stream.global_batch)
    state = TrainState(
        model,
        create_optimizer(args, model, world.device),
        precision.scaler,
        create_ema(model, args),
        metadata={
            "arch": args.model,
            "args": settings_of(args),
            "model_config": model_config(
                model, args, settings, folders.train.class_names, teacher.record if teacher else None
            ),
            fingerprint.KEY: fingerprint.fingerprint(folders.train, labels),
            global_batch.KEY: global_batch.batch_record(args.batch_size, args.grad_accum_steps, world.size),
        },
        updates_per_epoch=len(loader),
    )
    schedule = LrSchedule(args, lr, len(loader))
    called = wrap_model(model, args, world)
    return Setup(state, called, loader, validation, objective, precision, schedule, formula, teacher)


def load_start(model: TimmModel, args: Namespace, logger: Logger) -> None:
    """Load `--initial-checkpoint` or `--finetune`, and initialise the heads as the flags say."""
    if args.initial_checkpoint:
        logger.line(str(load_weights(model, args.initial_checkpoint)))
    if args.finetune:
        logger.line(str(load_finetune(model, args.finetune)))
    if args.head_init_scale is not None or args.head_init_bias is not None:
        init_heads(model, args.head_init_scale, args.head_init_bias)


def create_ema(model: nn.Module, args: Namespace) -> ModelEmaV3 | None:
    """The moving average of the weights, None without `--model-ema`."""
    if not args.model_ema:
        return None
    device = "cpu" if args.model_ema_force_cpu else None
    return ModelEmaV3(model, args.model_ema_decay, use_warmup=args.model_ema_warmup, device=device)


def objective_of_epoch(objective: Objective, args: Namespace, epoch: int) -> Objective:
    """The objective, without Mixup and CutMix from `--mixup-off-epoch` on."""
    if not args.mixup_off_epoch or epoch < args.mixup_off_epoch:
        return objective
    assert isinstance(objective, ClassObjective | TokenLabelObjective)
    return replace(objective, mix=None)


def describe(args: Namespace, setup: Setup, world: World, logger: Logger) -> None:
    """Say what is about to happen, each number with its unit."""
    stream, model = setup.loader.index_stream, setup.state.model
    parameters = sum(p.numel() for p in model.parameters())
    config = setup.state.metadata["model_config"]
    height, width = config["img_size"]
    left_out = stream.length - stream.images_per_epoch
    logger.line(
        f"model {args.model}: {parameters / 1e6:.2f} M parameters, {model.num_classes} classes, {height}x{width} px"
    )
    logger.line(
        f"data: {stream.length} training images"
        + (f" ({left_out} left out per epoch, other ones each time)" if left_out else "")
        + f", {len(setup.validation.dataset)} validation images, {len(config['class_names'])} class folders"
    )
    logger.line(
        f"global batch {stream.global_batch} = {args.batch_size} per device x {world.size} x {args.grad_accum_steps} "
        f"accumulation steps; {len(setup.loader)} updates an epoch, {setup.schedule.total_epochs} epochs"
    )
    if setup.teacher is not None and world.is_primary:
        dense = isinstance(setup.objective, TokenLabelObjective) and setup.objective.dense
        logger.line(setup.teacher.describe(model, (config["in_chans"], height, width), dense))
    dtype = setup.precision.amp_dtype
    logger.line(
        f"learning rate {setup.lr_formula}; {args.opt} on {world.size} x {world.device.type}, "
        f"{str(dtype).removeprefix('torch.') + ' autocast' if dtype else 'float32'}, {torch.get_num_threads()} threads"
    )


def resume_run(
    args: Namespace, setup: Setup, directory: Path, lock: RunLock, world: World, logger: Logger
) -> tuple[Setup, Path | None]:
    """Go back to the checkpoint that `--resume` means, the same one on every rank.

    Returns what the run goes on with, whose updates have the images of the checkpoint's where possible, and its path.
    """
    state, resume = setup.state, Resume(None, None, [])
    with primary_first():
        if args.resume and world.is_primary:
            if directory.is_dir() and not args.dry_run:
                lock.acquire()  # first, so that nobody saves anything newer
            resume = find_resume(args.resume, directory)
    path = from_primary(resume.path)
    messages = resume.messages
    if path is not None:
        if not world.is_primary:
            resume = find_resume(str(path), directory)
        assert resume.checkpoint is not None
        data = state.metadata[fingerprint.KEY]
        messages = messages + fingerprint.check_same_data(resume.checkpoint, data, path, args.allow_changed_data)
        setup, kept = keep_global_batch(args, setup, resume.checkpoint, world)
        messages += kept
        messages += state.load(resume.checkpoint, path, not args.no_resume_opt)
        messages += changed_args(resume.checkpoint, settings_of(args))
        messages += changed_labels(resume.checkpoint, state)
        messages.append(f"resumed {path}: {state.epoch} epochs, {state.update} updates done")
    for message in messages:
        logger.line(message)
    if args.start_epoch is not None:
        last = setup.schedule.total_epochs - 1
        if args.start_epoch > last:
            raise UserError(f"--start-epoch {args.start_epoch}: the run has epochs 0 to {last} (--epochs)")
        state.epoch, state.update = args.start_epoch, args.start_epoch * len(setup.loader)
    if world.is_primary and (args.resume or args.start_epoch is not None):
        passed_over = [m.removeprefix("skipped: ") for m in resume.messages if m.startswith("skipped: ")]
        logger.event("resume", path=path, skipped=passed_over)
    return setup, path


def keep_global_batch(
    args: Namespace, setup: Setup, checkpoint: dict[str, Any], world: World
) -> tuple[Setup, list[str]]:
    """Accumulate as many batches as give the checkpoint's global batch; return what a user should know, too."""
    steps, message = global_batch.steps_to_keep(checkpoint, args.batch_size, args.grad_accum_steps, world.size)
    messages = [message] if message else []
    if steps == args.grad_accum_steps:
        return setup, messages
    args.grad_accum_steps = steps
    loader, state = setup.loader, setup.state
    batch = args.batch_size * steps * world.size
    loader.index_stream = replace(loader.index_stream, global_batch=batch, micro_batches=steps)
    state.updates_per_epoch = len(loader)
    state.metadata["args"] = settings_of(args)
    state.metadata[global_batch.KEY]["global"] = batch
    lr, formula = resolve_lr(args, batch)
    return replace(setup, schedule=LrSchedule(args, lr, len(loader)), lr_formula=formula), messages


def changed_labels(checkpoint: dict[str, Any], state: TrainState) -> list[str]:
    """A line if the teacher was another one, or had other weights."""
    configs = [(each.get("model_config") or {}).get("labels") or {} for each in (checkpoint, state.metadata)]
    was, now = ({key: config.get(key) for key in ("teacher", "sha256")} for config in configs)
    return [f"labels: {was} in the checkpoint, {now} now"] if was != now else []


def teacher_costs(setup: Setup, totals: EpochTotals, logger: Logger) -> dict[str, float]:
    """Tell what the teacher took in an epoch, on this rank; the columns of its summary."""
    if setup.teacher is None:
        return {}
    seconds, images = setup.teacher.take_cost()
    costs = {
        "teacher_ms_per_image": 1000 * seconds / max(images, 1),
        "teacher_share": seconds / max(totals.seconds, 1e-9),
    }
    logger.line(
        f"teacher: {costs['teacher_ms_per_image']:.3g} ms an image on a {setup.teacher.device.type} device, "
        f"{100 * costs['teacher_share']:.0f} % of the training time"
    )
    return costs


def open_run(
    args: Namespace,
    setup: Setup,
    directory: Path,
    lock: RunLock,
    resumed: Path | None,
    world: World,
    logger: Logger,
) -> Saver:
    """Open the run directory, on rank 0, and return what saves into it."""
    checkpoints = None
    wait_for_all()  # all ranks have read the checkpoint before rank 0 touches the directory
    with primary_first():
        if world.is_primary:
            run_directory = RunDirectory(directory)
            logger.open_events(directory)  # where the run that has the lock tells of this one, too
            lock.acquire()
            run_directory.record_start(args, world.size, str(world.device), launch_id())
            logger.open(run_directory)
            if dropped := run_directory.rewind(setup.state.epoch, setup.state.update):
                logger.line(f"{dropped} records of what is done again now: moved to {SUPERSEDED}")
            checkpoints = CheckpointDir(directory, args.checkpoint_hist, args.eval_metric != "loss")
    logger.open_events(directory)
    if checkpoints is not None and resumed is not None:
        for message in checkpoints.restore(setup.state, resumed):
            logger.line(message)
    logger.total_updates = setup.schedule.total_updates
    logger.line(f"run directory: {directory}")
    if importlib.util.find_spec("matplotlib") is None:
        logger.line("neither learning curves nor the first batch will be drawn: pip install 'volo-tlt[plot]'")
    policy = SavePolicy(
        args.recovery_interval, args.checkpoint_minutes, args.log_interval, args.checkpoint_sync, args.max_failed_saves
    )
    return Saver(setup.state, checkpoints, logger, policy, from_primary, lock.check)


def batch_watcher(args: Namespace, setup: Setup, logger: Logger) -> Callable[[int, Batch], None]:
    """Look at every batch before it is used: tell unreadable images and labels, draw the first batch, write pictures
    for `--save-images`."""
    known: set[str] = set()
    draw = first_batch_drawer(setup.loader.dataset, setup.objective, setup.state.metadata["model_config"], logger)

    def watch(update: int, batch: Batch) -> None:
        for death in setup.loader.take_deaths():
            logger.event("worker-died", reason=death)
            logger.warning(f"{death}; the workers were started anew")
        bad = [label for label in batch.bad_labels if label.path not in known]
        known.update(label.path for label in bad)
        logger.skipped("skipped-image", setup.loader.skips.take_new())
        logger.skipped("bad-label", bad)
        draw(update, batch)
        if args.save_images and logger.directory is not None and update % args.log_interval == 0:
            save_image(batch.images, logger.directory.path / f"train-batch-{update}.jpg", padding=0, normalize=True)

    return watch


def validate_epoch(
    args: Namespace, setup: Setup, epoch: int, world: World, logger: Logger, guard: StopGuard
) -> dict[str, Evaluation]:
    """Validate the model, and its moving average unless that is kept on the CPU; nothing between `--val-interval`s."""
    state = setup.state
    models = {"model": (state.model, setup.model)}
    if state.ema is not None and not args.model_ema_force_cpu:
        models["ema"] = (state.ema.module, state.ema.module)
    if world.size > 1:
        for bare, _ in models.values():
            # Every rank has seen other images: all validate with the statistics that rank 0 saves.
            distribute_bn(bare, world.size, reduce=args.dist_bn == "reduce")
    if (epoch + 1) % args.val_interval and epoch + 1 != setup.schedule.total_epochs:
        return {}
    evaluations = {}
    for name, (_, called) in models.items():
        evaluations[name] = evaluate(called, setup.validation, setup.precision, world, guard=guard.batches)
        logger.skipped("skipped-image", setup.validation.skips.take_new())
        logger.line(f"epoch {epoch + 1} {'validation' if name == 'model' else name.upper()}: {evaluations[name]}")
    return evaluations


def metric_of(args: Namespace, evaluations: dict[str, Evaluation]) -> float | None:
    """By which an epoch is ranked: the average's where it is validated; None without a validation."""
    result = evaluations.get("ema", evaluations.get("model"))
    return None if result is None else getattr(result, args.eval_metric)


def best_metric(args: Namespace, state: TrainState, evaluations: dict[str, Evaluation]) -> float | None:
    """The best one up to this epoch, which is not saved yet; None where none is finite."""
    metrics = [metric_of(args, evaluations), *(entry.metric for entry in state.best[:1])]
    finite = [metric for metric in metrics if metric is not None and math.isfinite(metric)]
    return (min if args.eval_metric == "loss" else max)(finite, default=None)

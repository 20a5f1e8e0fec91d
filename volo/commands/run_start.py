"""How a run starts: it opens its directory, restores a checkpoint if asked to, and prints what it is about to do."""

import importlib.util
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tlt.api import EMPTY_BOXES
from tlt.data.batch import IndexStream
from tlt.errors import UserError, install_command, reason_of
from tlt.io.files import blamed_on
from tlt.io.text import first_difference
from tlt.models.fit_weights import rows_by_name
from tlt.models.flops import flops_per_image, run_on_meta
from volo.checkpoint.checkpoint import CheckpointDir
from volo.checkpoint.model_config import model_config_of, own_names
from volo.checkpoint.resume import DATA_KEY, check_behaviour, check_same_data
from volo.checkpoint.saver import SavePolicy, Saver
from volo.checkpoint.start import Kind, Start, asked_by, decide_start, on_every_rank
from volo.checkpoint.state import TrainState, ranked_by
from volo.cluster.distributed import World, from_all, primary_first, wait_for_hosts
from volo.cluster.tensor_parallel import TensorParallelParams
from volo.config.checkpoint_files import BEST
from volo.config.rules import trackers_of
from volo.config.settings_train import TrainSettings
from volo.record.history import EVENTS
from volo.record.logger import Logger
from volo.record.metrics import Arithmetic, peak_flops
from volo.record.profile import WARM_UP
from volo.record.records import RunRecords, settings_of, slurm_job, versions
from volo.record.run_directory import RunLock, changed_settings, remove_unused
from volo.train.architecture import image_size_by_name
from volo.train.criterion import Criterion, TokenLabelCriterion
from volo.train.data import HELD_OUT_FILE, as_list
from volo.train.judge import WARM, chance_line
from volo.train.loop import best_so_far, set_train_mode
from volo.train.precision import compute_dtype
from volo.train.run import Run, Training
from volo.train.schedule import LrSchedule

_FEW_UPDATES = 200
_JUMP = 1.05  # factor from which on a step of the learning rate at a resume is told


def note_start(settings: TrainSettings, world: World, logger: Logger) -> None:
    """Record the start as an event with the command, the arguments and the machines."""
    hosts = Counter(from_all(socket.gethostname()))
    if world.is_primary:
        details = {"command": sys.argv, "args": settings_of(settings), "versions": versions(), "job": slurm_job()}
        logger.event("start", **details, world_size=world.size, hosts=hosts, device=str(world.device))


@contextmanager
def open_start(settings: TrainSettings, world: World, logger: Logger) -> Iterator[tuple[Start, RunLock]]:
    """Yield what the run begins as, which rank 0 decides, with the checkpoint that every rank has read, and the lock of
    its directory.

    Rank 0 takes the lock before it looks for a checkpoint, so that no other job saves a newer one. If nothing was
    written to a directory that was created for the run, it is removed at the end. Raises UserError if the checkpoint
    that a flag names can't be read, or another job uses the directory.
    """
    decided: Start | None = None
    try:
        with RunLock(logger.line) as lock:
            with primary_first():
                if world.is_primary:
                    asked = asked_by(settings, image_size_by_name(settings.network, settings.images.pixels))
                    decided = decide_start(asked, logger.line, None if settings.run.dry_run else lock.acquire)
            start = on_every_rank(decided)
            (logger.line if settings.run.dry_run else logger.detail)(str(start))
            if decided is not None and not settings.run.dry_run and (start.directory / EVENTS).exists():
                logger.open_events(start.directory)  # a run that is killed while it is built has told how far it came
            yield start, lock
    finally:
        if decided is not None and not settings.run.experiment:
            remove_unused(decided.directory)


def restore_state(run: Run, training: Training) -> None:
    """Restore the state from the checkpoint, free the checkpoint's memory, and apply `--start-epoch`. Raises UserError
    if the checkpoint is of another model, other data or a longer run, or the ranks read different files."""
    settings = run.settings
    flags = settings.checkpoints
    logger = run.logger
    state = training.state
    start = run.start
    path = start.file
    checkpoint = start.checkpoint
    messages = list(start.messages)
    if path is not None:
        with blamed_on(path):
            check_behaviour(checkpoint, path)
            messages += check_same_data(checkpoint, state.metadata[DATA_KEY], path, flags.allow_changed_data)
            count, ours = (state.metadata["model_config"][key] for key in ("num_classes", "class_names"))
            theirs = own_names(model_config_of(checkpoint, path) or {}, ours)
            if rows_by_name(theirs, ours, (count, count)) is not None:
                raise UserError(f"it has other classes ({first_difference(theirs, ours)}): --finetune goes by names")
            # A run that is started again, or a branch that goes on from its own, has passed --no-resume-opt already.
            passed = start.kind is Kind.RESTARTED or (flags.branch != "" and start.kind is not Kind.BRANCH)
            messages += state.load(checkpoint, path, load_optimizer=passed or not flags.no_resume_opt)
            messages += changed_settings(checkpoint.get("args"), settings_of(settings))
        messages.append(f"resumed {path}: {state.epoch} epochs, {state.update} updates done")
        checkpoint.clear()  # it occupies as much memory as the state
    check_same_position(state, path)
    logger.line(*messages)
    first = settings.schedule.start_epoch
    if first is not None:
        _start_epoch(run, training, first)
    if path is not None:
        _check_way(path, run, training)
    logger.set_position(state.epoch, state.update)
    if run.world.is_primary and (path is not None or start.messages or first is not None):
        skipped = [m.removeprefix("skipped: ") for m in start.messages if m.startswith("skipped: ")]
        logger.event("resume", path=path, skipped=skipped)


def _check_way(path: Path, run: Run, training: Training) -> None:
    """Check that something is left to train, unless the run itself has finished. Report a branch, which continues from
    another run's checkpoint. Raises UserError if no epoch is left."""
    settings = run.settings
    state = training.state
    schedule = training.schedule
    own = run.start.kind is not Kind.BRANCH
    last = schedule.total_epochs if own else schedule.last_epoch
    if state.update + (not own) > last * state.updates_per_epoch:
        stops = last == settings.checkpoints.stop_epoch
        limit = f"--stop-epoch {last}" if stops else f"--epochs {settings.schedule.epochs}"
        raise UserError(
            f"{limit}: {path} is of {state.epoch} epochs, the run has {last}: nothing is left to train; name a larger "
            "number, or an earlier checkpoint"
        )
    before = state.loaded_progress.get("lr")
    there = min(schedule(state.update - 1), schedule(state.update))
    as_it_was = settings.schedule.start_epoch is None and settings.sizes.variable_batch_loss_scale == "none"
    if as_it_was and isinstance(before, float) and there > _JUMP * before > 0:
        run.logger.line(
            f"warning: the learning rate jumps from {before:.3g}, the last of {path}, to {schedule(state.update):.3g}: "
            "a checkpoint from before that decay, such as a milestone (--save-epochs), goes on without a jump"
        )
    if own:
        return
    state.scores = {}  # on every rank, because --patience uses them
    span = f"epochs {state.epoch + 1} to {schedule.last_epoch} of {schedule.total_epochs}"
    run.logger.line(f"a branch of {path}: {span} go to {run.directory}, ranked anew; what is there stays")
    if schedule.decay_begins < state.update:
        epoch = schedule.decay_begins / state.updates_per_epoch
        rate = schedule(state.update)
        run.logger.line(f"warning: the decay begins at epoch {epoch:g}, before the branch: the rate is {rate:.3g}")


def _start_epoch(run: Run, training: Training, first: int) -> None:
    state = training.state
    last = training.schedule.last_epoch - 1
    if first > last:
        flag = "--stop-epoch" if run.settings.checkpoints.stop_epoch else "--epochs"
        raise UserError(f"--start-epoch {first}: the run has epochs 0 to {last} ({flag})")
    # A job that was requeued has passed --start-epoch already.
    kind = run.start.kind
    goes_on = kind is Kind.RESTARTED or (kind is Kind.CONTINUE and run.settings.checkpoints.resume == "auto")
    if goes_on and state.epoch >= first:
        run.logger.line(
            f"--start-epoch {first}: the run has begun there and goes on from epoch {state.epoch}; "
            "to go back, name a checkpoint with --resume FILE"
        )
    else:
        state.epoch = first
        state.update = first * state.updates_per_epoch


def check_same_position(state: TrainState, path: Path | None) -> None:
    """Raise UserError unless all ranks are at the same update; otherwise they would wait for each other for ever."""
    positions = sorted(set(map(tuple, from_all([state.epoch, state.update]))))
    if len(positions) > 1:
        updates = " and ".join(str(update) for _, update in positions)
        raise UserError(
            f"{path}: ranks read it at updates {updates}: it is being written to; end the job that does so, then start "
            "again"
        )


def open_run(run: Run, training: Training) -> Saver:
    """Open the run directory on rank 0, and return the saver for it."""
    settings = run.settings
    logger = run.logger
    state = training.state
    flags = settings.checkpoints
    checkpoints = None
    wait_for_hosts()  # rank 0 must not change the directory before all ranks have read the checkpoint
    with primary_first():
        if run.world.is_primary:
            records = RunRecords(run.directory)
            logger.open_events(run.directory)  # before the lock: if another run holds it, its events tell of this one
            run.lock.acquire(run.directory)
            files = {HELD_OUT_FILE: as_list(training.validation.dataset.source)} if settings.images.val_fraction else {}
            records.record_start(settings, run.world.size, str(run.world.device), files)
            work = training.loader.index_stream.work(training.schedule.last_epoch)
            logger.open(records, work, training.arithmetic)
            if dropped := records.rewind(state.epoch, state.update):
                logger.line(f"{dropped} records of what is done again now are removed")
            tracking = settings.tracking
            logger.track(trackers_of(tracking), tracking.tracker_project, tracking.wandb_tags or [])
            metric = ranked_by(settings.values())
            checkpoints = CheckpointDir(run.directory, flags.checkpoint_hist, metric, flags.save_epochs)
    logger.open_events(run.directory)
    if checkpoints is not None and run.start.file is not None and run.start.kind is not Kind.BRANCH:
        logger.line(*checkpoints.restore(state, run.start.file))
    logger.line(f"run directory: {run.directory}")
    if importlib.util.find_spec("matplotlib") is None:
        logger.line(f"no pictures will be drawn (curves, first batch, confusion): {install_command('plot')}")
    policy = SavePolicy(
        flags.recovery_interval,
        flags.checkpoint_minutes,
        flags.log_interval,
        flags.checkpoint_sync,
        flags.max_failed_saves,
    )

    def on_save() -> None:
        run.guard.watchdog.enter_phase("saving")
        training.replicas.compare()

    return Saver(state, checkpoints, logger, policy, run.lock.check, on_save)


def describe(run: Run, training: Training) -> None:
    """Print what the run is about to do; each number has its unit."""
    settings = run.settings
    world = run.world
    logger = run.logger
    steps = settings.optim.grad_accum_steps
    stream, model = training.loader.index_stream, training.state.model
    parameters = TensorParallelParams(model).count()
    config = training.state.metadata["model_config"]
    height, width = config["img_size"]
    left_out = stream.length - stream.images_per_epoch if stream.sizes is None else 0
    logger.line(
        f"model {settings.network.model}: {parameters / 1e6:.2f} M parameters, {model.num_classes} classes, "
        f"{height}x{width} px"
    )
    logger.line(
        f"data: {stream.length} training images"
        + (f" ({left_out} left out per epoch, other ones each time)" if left_out else "")
        + f", {len(training.validation.dataset)} validation images, {len(config['class_names'])} class folders"
    )
    logger.line(
        f"global batch {stream.global_batch} = {stream.global_batch / (world.data_size * steps):g} per "
        f"{'device' if world.tensor_parallel == 1 else f'{world.tensor_parallel} devices'} x {world.data_size} x "
        f"{steps} accumulation steps; {stream.updates_per_epoch} updates an epoch, "
        f"{training.schedule.total_epochs} epochs"
    )
    if stream.sizes is not None:
        batches = zip(stream.sizes.batch_sizes, stream.sizes.sizes, strict=True)
        listed = ", ".join(f"{batch} images of {side} px" for batch, (side, _) in batches)
        scale = settings.sizes.variable_batch_loss_scale.replace("none", "constant")
        logger.line(
            f"image sizes ({settings.sizes.train_size_schedule}), per device: {listed}; the learning rate is that of "
            f"the mean global batch, and {scale} in an update's images"
        )
    criterion = training.criterion
    if isinstance(criterion, TokenLabelCriterion):
        size, (rows, columns) = settings.labels.token_label_size, criterion.grid
        if criterion.mix_token and min(rows, columns) < 3:
            logger.line(EMPTY_BOXES)
        if criterion.dense and size and (rows, columns) != (size, size):  # so was D5 at 512 px published
            logger.line(
                f"warning: --token-label-size {size} is not used: at {height} x {width} px each of the "
                f"{rows} x {columns} tokens gets a label of its own"
            )
    if settings.norms.sync_bn and world.size == 1:
        logger.line("--sync-bn changes nothing with one process")
    dtype = training.precision.amp_dtype
    float32 = "float32 by TF32" if world.device.type == "cuda" else "float32"
    precision = float32 if dtype is None else f"{str(dtype).removeprefix('torch.')} autocast"
    if training.precision.working_copy is not None:
        precision = "bfloat16, float32 master weights"
    threads = torch.get_num_threads()
    logger.line(
        f"learning rate {training.lr_formula}; {settings.optim.opt} on {world.size} x {world.device.type}, "
        f"{precision}, {threads} thread{'s' * (threads > 1)}"
    )
    missing = training.dense_score.warnings if training.dense_score else []
    warnings = missing + surprises(settings, training.schedule, training.loader.dataset.classes)
    logger.line(*(f"warning: {text}" for text in warnings))


def surprises(settings: TrainSettings, schedule: LrSchedule, classes: np.ndarray) -> list[str]:
    """Return warnings about a run that will learn less than its numbers suggest; `classes` (N,) are its images'."""
    lines = []
    largest = schedule.largest
    if not settings.teachers.kd_only and classes.min() == classes.max():
        lines.append("all training images are of one class, so that any model comes to a loss of 0 and 100 %")
    flags = settings.schedule
    if largest < WARM * schedule.peak or 0 < flags.epochs <= flags.warmup_epochs * (not flags.warmup_prefix):
        fitted = "the fitted " * (not settings.set_by_user("warmup_epochs"))
        lines.append(
            f"the learning rate never gets beyond {largest:.3g} of {schedule.peak:.3g}: {fitted}--warmup-epochs "
            f"{flags.warmup_epochs} is long for --epochs {flags.epochs}"
        )
    elif missed := schedule.missed_end:
        nearer = "--cooldown-epochs 1" if flags.sched_on_updates else "--sched-on-updates or --cooldown-epochs 1"
        remedies = {"step": "fewer --decay-epochs", "multistep": f"--decay-milestones up to {flags.epochs}"}
        lines.append(
            f"the learning rate ends at {missed[0]:.3g}, the {flags.sched} curve at {missed[1]:.3g}: "
            f"{remedies.get(flags.sched, nearer)} would take it there"
        )
    saved = sorted(settings.checkpoints.save_epochs or ())
    if never := [str(epoch) for epoch in saved if epoch > schedule.total_epochs]:
        lines.append(f"--save-epochs {' '.join(never)}: the run has {schedule.total_epochs} epochs")
    if schedule.total_updates < _FEW_UPDATES:
        lines.append(f"{schedule.total_updates} updates are few: more --epochs or a smaller --batch-size give more")
    profile = settings.checkpoints.profile
    if profile and min(schedule.updates_per_epoch, schedule.total_updates - WARM_UP) < profile:
        lines.append(f"--profile {profile}: no epoch has so many updates after the first {WARM_UP}: no profile")
    return lines


def outcome(run: Run, training: Training) -> tuple[str, str]:
    """Return a line about the best epoch of a finished run, and a verdict: that it may have learnt nothing, or that it
    was still learning. Either may be ""."""
    metric = ranked_by(run.settings.values())
    state = training.state
    best, since = best_so_far(state, metric)
    if best is None:
        return "", ""
    epoch = next(n for n, scores in state.scores.items() if scores.get(metric) == best)
    unit = "" if metric.startswith("loss") else " %"
    validations = sum(metric in row for row in state.scores.values())
    line = f"best {metric}: {best:.2f}{unit} (epoch {epoch + 1}, {run.directory / BEST})"
    if verdict := chance_line(run, training, epoch, validations):
        return line, f"warning: {verdict}"
    if since or validations == 1 or best == 100:
        return line, ""
    more = ": more --epochs may give more" if state.epoch >= training.schedule.total_epochs else ""
    return line, f"the best epoch is the last: it was still {'rising' if unit else 'falling'}{more}"


def check_smallest_batch(
    settings: TrainSettings, model: nn.Module, size: tuple[int, int, int], stream: IndexStream
) -> None:
    """Check that the model can be trained on a batch of one image, if an epoch has such a batch. Raises UserError if
    BatchNorm would normalise a single value, at which torch would fail in the middle of the epoch.

    Args:
        size: (channels, H, W); if the run has several image sizes, the smallest is checked instead.
    """
    if stream.smallest_batch > 1 or (settings.norms.sync_bn and stream.world_size > 1):  # covers all ranks' images
        return
    set_train_mode(model, settings.norms.freeze_bn or settings.network.freeze)
    size = size if stream.sizes is None else (size[0], *min(stream.sizes.sizes))
    try:
        run_on_meta(model, size, images=1)
    except Exception as error:  # layers raise errors of any type
        if "more than 1 value per channel" not in str(error):
            return  # another reason, such as an operation that needs a tensor's contents
        last = f"the last batch of an epoch of {stream.length} images has one: --drop-last leaves it out"
        raise UserError(
            f"--model {settings.network.model}: BatchNorm can't be trained on one image of {size[1]} x {size[2]} px; "
            + ("-b 2, or more" if settings.images.batch_size == 1 else last)
        ) from error


def step_arithmetic(
    run: Run, model: nn.Module, criterion: Criterion, input_size: tuple[int, int, int]
) -> Arithmetic | None:
    """Count a step's operations without computing anything or drawing random numbers. Return None if torch can't count
    them, which is said, if images have several sizes, or if this rank writes no records. `input_size` is (channels, H,
    W)."""
    settings, device = run.settings, run.world.device
    if settings.run.dry_run or settings.sizes.train_img_sizes or not run.world.is_primary:
        return None
    options = {"dense": True} if isinstance(criterion, TokenLabelCriterion) and criterion.dense else {}
    # Training mode, so that `--drop-path-mode subset` leaves out what it drops.
    set_train_mode(model, settings.norms.freeze_bn or settings.network.freeze)
    try:
        forward = flops_per_image(model, input_size, images=settings.images.batch_size, **options)
    except Exception as error:  # layers raise errors of any type without a tensor's contents
        run.logger.line(f"operations of a step: unknown ({reason_of(error)})")
        return None
    # Each product of the forward pass has two in the backward pass, unless its parameters are frozen.
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Arithmetic((1 + 2 * trained) * forward, peak_flops(name, compute_dtype(settings.precision.mixed, device)))

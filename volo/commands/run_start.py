"""How a run starts: it tells what it is, goes back to a checkpoint if asked to, and opens its directory."""

from __future__ import annotations

import importlib.util
import socket
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from volo.checkpoint import fingerprint, global_batch
from volo.checkpoint.checkpoint import CheckpointDir
from volo.checkpoint.resume import Resume, changed_labels, find_resume
from volo.checkpoint.saver import SavePolicy, Saver
from volo.checkpoint.train_state import TrainState, ranked_by
from volo.cluster.distributed import World, from_all, from_primary, primary_first, wait_for_all
from volo.cluster.ranks import launch_id
from volo.commands.setup import Setup
from volo.record.logger import Logger
from volo.record.run_directory import SUPERSEDED, RunDirectory, changed_settings, settings_of, versions
from volo.record.run_lock import RunLock
from volo.train.schedule import LrSchedule, resolve_lr


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


def note_lock(logger: Logger, text: str) -> None:
    """Tell what became of another job's lock."""
    logger.line(text)
    logger.event("lock", reason=text)


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
    found = from_primary(str(resume.path or ""))
    path = Path(found) if found else None
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
        messages += changed_settings(resume.checkpoint.get("args"), settings_of(args))
        messages += changed_labels(resume.checkpoint, state.metadata)
        messages.append(f"resumed {path}: {state.epoch} epochs, {state.update} updates done")
    check_same_position(state, path)
    for message in messages:
        logger.line(message)
    if args.start_epoch is not None:
        last = setup.schedule.total_epochs - 1
        if args.start_epoch > last:
            raise UserError(f"--start-epoch {args.start_epoch}: the run has epochs 0 to {last} (--epochs)")
        if args.resume == "auto" and path is not None and state.epoch >= args.start_epoch:  # a job that was requeued
            logger.line(
                f"--start-epoch {args.start_epoch}: the run has begun there and goes on from epoch {state.epoch}; "
                "to go back, name a checkpoint with --resume FILE"
            )
        else:
            state.epoch, state.update = args.start_epoch, args.start_epoch * len(setup.loader)
    if world.is_primary and (args.resume or args.start_epoch is not None):
        passed_over = [m.removeprefix("skipped: ") for m in resume.messages if m.startswith("skipped: ")]
        logger.event("resume", path=path, skipped=passed_over)
    return setup, path


def check_same_position(state: TrainState, path: Path | None) -> None:
    """Raise UserError unless all ranks have come to the same update: from different ones they would wait for each other
    for ever."""
    found = sorted({(epoch, update) for epoch, update in from_all([state.epoch, state.update])})
    if len(found) > 1:
        updates = " and ".join(str(update) for _, update in found)
        raise UserError(
            f"{path}: ranks read it at updates {updates}: it is being written to; end the job that does so, then start "
            "again"
        )


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
            checkpoints = CheckpointDir(directory, args.checkpoint_hist, ranked_by(vars(args)))
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

"""What a run consists of, once it is built."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import nn

from tlt.data.loader import EvalLoader, TrainLoader
from volo.checkpoint.train_state import TrainState
from volo.cluster.distributed import World
from volo.memory.memory_budget import step_shape
from volo.memory.memory_report import memory_report
from volo.record.logger import Logger
from volo.train.objective import Objective, TokenLabelObjective
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule
from volo.train.teacher import Teacher


@dataclass(frozen=True)
class Setup:
    """Everything a run consists of, built and ready for the first step."""

    state: TrainState  # model, optimizer, scaler, EMA and the position in the run
    model: nn.Module  # what the loop calls: the state's model, or its distributed or compiled wrapper
    average: nn.Module | None  # what validation calls for the moving average, likewise; None: there is none
    loader: TrainLoader
    validation: EvalLoader
    objective: Objective
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    teacher: Teacher | None = None


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
    if isinstance(setup.objective, TokenLabelObjective) and setup.objective.dense and args.token_label_size:
        rows, columns = setup.objective.grid
        if (rows, columns) != (args.token_label_size, args.token_label_size):  # as published for D5 at 512 px
            logger.line(
                f"warning: --token-label-size {args.token_label_size} is not used: at {height} x {width} px each of "
                f"the {rows} x {columns} tokens gets a label of its own"
            )
    if args.sync_bn and world.size == 1:
        logger.line("--sync-bn changes nothing with one process")
    if setup.teacher is not None and world.is_primary:
        dense = isinstance(setup.objective, TokenLabelObjective) and setup.objective.dense
        logger.line(setup.teacher.describe(model, (config["in_chans"], height, width), dense))
    dtype = setup.precision.amp_dtype
    precision = "float32" if dtype is None else f"{str(dtype).removeprefix('torch.')} autocast"
    if setup.precision.working_copy is not None:
        precision = "bfloat16, float32 master weights"
    logger.line(
        f"learning rate {setup.lr_formula}; {args.opt} on {world.size} x {world.device.type}, "
        f"{precision}, {torch.get_num_threads()} threads"
    )


def tell_memory(args: Namespace, setup: Setup, world: World, logger: Logger) -> None:
    """Say how much work and memory the run takes, and what batches would fit."""
    if not world.is_primary:
        return
    config = setup.state.metadata["model_config"]
    size = (config["in_chans"], *config["img_size"])
    shape = step_shape(setup.objective, size, world.device, setup.precision.amp_dtype)
    copy = setup.precision.working_copy
    computing = setup.state.model if copy is None else copy.module
    for line in memory_report(args, setup.state.model, computing, shape, world.device):
        logger.line(line)

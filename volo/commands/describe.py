"""What a run says of itself before its first step."""

from __future__ import annotations

from argparse import Namespace

import torch

from volo.cluster.distributed import World
from volo.memory.memory_budget import step_shape
from volo.memory.memory_report import memory_report
from volo.record.logger import Logger
from volo.train.criterion import TokenLabelCriterion
from volo.train.loop import Training


def describe(args: Namespace, training: Training, world: World, logger: Logger) -> None:
    """Say what is about to happen, each number with its unit."""
    stream, model = training.loader.index_stream, training.state.model
    parameters = sum(p.numel() for p in model.parameters())
    config = training.state.metadata["model_config"]
    height, width = config["img_size"]
    left_out = stream.length - stream.images_per_epoch
    logger.line(
        f"model {args.model}: {parameters / 1e6:.2f} M parameters, {model.num_classes} classes, {height}x{width} px"
    )
    logger.line(
        f"data: {stream.length} training images"
        + (f" ({left_out} left out per epoch, other ones each time)" if left_out else "")
        + f", {len(training.validation.dataset)} validation images, {len(config['class_names'])} class folders"
    )
    logger.line(
        f"global batch {stream.global_batch} = {args.batch_size} per device x {world.size} x {args.grad_accum_steps} "
        f"accumulation steps; {len(training.loader)} updates an epoch, {training.schedule.total_epochs} epochs"
    )
    if isinstance(training.criterion, TokenLabelCriterion) and training.criterion.dense and args.token_label_size:
        rows, columns = training.criterion.grid
        if (rows, columns) != (args.token_label_size, args.token_label_size):  # as published for D5 at 512 px
            logger.line(
                f"warning: --token-label-size {args.token_label_size} is not used: at {height} x {width} px each of "
                f"the {rows} x {columns} tokens gets a label of its own"
            )
    if args.sync_bn and world.size == 1:
        logger.line("--sync-bn changes nothing with one process")
    if training.teacher is not None and world.is_primary:
        dense = isinstance(training.criterion, TokenLabelCriterion) and training.criterion.dense
        logger.line(training.teacher.describe(model, (config["in_chans"], height, width), dense))
    dtype = training.precision.amp_dtype
    precision = "float32" if dtype is None else f"{str(dtype).removeprefix('torch.')} autocast"
    if training.precision.working_copy is not None:
        precision = "bfloat16, float32 master weights"
    logger.line(
        f"learning rate {training.lr_formula}; {args.opt} on {world.size} x {world.device.type}, "
        f"{precision}, {torch.get_num_threads()} threads"
    )


def tell_memory(args: Namespace, training: Training, world: World, logger: Logger) -> None:
    """Say how much work and memory the run takes, and what batches would fit."""
    if not world.is_primary:
        return
    config = training.state.metadata["model_config"]
    size = (config["in_chans"], *config["img_size"])
    shape = step_shape(training.criterion, size, world.device, training.precision.amp_dtype)
    copy = training.precision.working_copy
    computing = training.state.model if copy is None else copy.module
    for line in memory_report(args, training.state.model, computing, shape, world.device):
        logger.line(line)

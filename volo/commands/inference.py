"""The steps that programs with a trained model share: they connect their ranks, load the model, and place it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from volo.cluster.distributed import World, choose_device, init_world, limit_threads, lost_rank_explained, shut_down
from volo.cluster.launch import launch_of
from volo.commands.console import say
from volo.train.compilation import compile_errors_told
from volo.train.model import place_model
from volo.train.precision import Precision, check_convolutions, compute_dtype
from volo.train.trained_model import TrainedModel, load_model


def run_on_ranks(
    args: Namespace, work: Callable[[Namespace, World], None], timeout_s: float = 600.0, join_s: float | None = None
) -> int:
    """Connect the ranks (see `init_world`), let each do its `work(args, world)`, and return the exit code."""
    world = init_world(args.device, timeout_s=timeout_s, join_s=join_s)
    with lost_rank_explained(), compile_errors_told(args):
        work(args, world)
    shut_down()  # not after a failure: connections then end with the process, so that its own error comes first
    return 0


def world_of_one(args: Namespace) -> World:
    """Return the world of a program that uses one process, and limit the threads of its device."""
    world = World(0, 0, 1, choose_device(args.device, 0))
    limit_threads(world.device, launch_of(os.environ))
    return world


def load(
    args: Namespace, path: str | Path | None = None, dense: bool | None = None, on_this_rank: bool = True
) -> TrainedModel:
    """Load the model of `path`, `--checkpoint` or `--pretrained` (see `load_model`), and print which weights it got."""
    trained = load_model(args, path or args.checkpoint or None, dense)
    say(trained.notes, on_this_rank)
    return trained


def place(trained: TrainedModel, world: World) -> Precision:
    """Put the model on its device, and return the precision in which the flags let it compute."""
    trained.model = place_model(trained.model, trained.args, world)
    dtype = compute_dtype(trained.args, world.device)
    say(check_convolutions(trained.model, trained.settings["input_size"], dtype, world.device), world.is_primary)
    return Precision(world.device, dtype)

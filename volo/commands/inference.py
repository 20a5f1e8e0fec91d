"""The steps that programs with a trained model share: they connect their ranks, load the model, and place it."""

import os
from collections.abc import Callable
from pathlib import Path

from volo.cluster.distributed import World, choose_device, init_world, limit_threads, lost_rank_explained, shut_down
from volo.cluster.launch import launch_of
from volo.commands.console import say
from volo.config.settings_shared import Compilation, MixedPrecision, Pixels, TrainedNetwork
from volo.train.architecture import ModelRequest, image_size_of, preparation_of
from volo.train.compilation import compile_errors_told
from volo.train.model import place_model
from volo.train.precision import Precision, check_convolutions, compute_dtype
from volo.train.trained_model import TrainedModel, load_model


def run_on_ranks(
    work: Callable[[World], None],
    device: str | None,
    compilation: Compilation,
    timeout_s: float = 600.0,
    join_s: float | None = None,
) -> int:
    """Connect the ranks (see `init_world`), let each do its `work(world)`, and return the exit code."""
    world = init_world(device, timeout_s=timeout_s, join_s=join_s)
    with lost_rank_explained(), compile_errors_told(compilation.torchcompile):
        work(world)
    shut_down()  # not after a failure: connections then end with the process, so that its own error comes first
    return 0


def world_of_one(device: str | None) -> World:
    """Return the world of a program that uses one process, and limit the threads of its device."""
    world = World(0, 0, 1, choose_device(device, 0))
    limit_threads(world.device, launch_of(os.environ))
    return world


def load(
    network: TrainedNetwork,
    pixels: Pixels,
    path: str | Path | None = None,
    *,
    dense: bool | None = None,
    outlook_kernel: str = "auto",
    crop_mode: str = "",
    on_this_rank: bool = True,
) -> TrainedModel:
    """Load the model of `path`, `--checkpoint` or `--pretrained` (see `load_model`), and print which weights it got."""
    request = ModelRequest(
        name=network.model or "",
        pretrained=network.pretrained,
        num_classes=network.num_classes,
        image_size=image_size_of(pixels, network.model_kwargs),
        in_chans=pixels.input_size[0] if pixels.input_size else None,
        preparation=preparation_of(pixels, crop_mode),
        global_pool=network.gp,
        outlook_kernel=outlook_kernel,
        kwargs=network.model_kwargs,
        file_flag="--checkpoint",
    )
    use_ema = network.use_ema if network.use_ema or network.no_use_ema else None
    trained = load_model(request, path or network.checkpoint or None, dense, use_ema=use_ema)
    say(trained.notes, on_this_rank)
    return trained


def place(trained: TrainedModel, world: World, mixed: MixedPrecision, channels_last: bool) -> Precision:
    """Put the model on its device, and return the precision in which the flags let it compute."""
    trained.model = place_model(trained.model, channels_last, world)
    dtype = compute_dtype(mixed, world.device)
    say(check_convolutions(trained.model, trained.data_config["input_size"], dtype, world.device), world.is_primary)
    return Precision(world.device, dtype)

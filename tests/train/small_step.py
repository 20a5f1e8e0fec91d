"""Steps of a small run on a GPU or its stand-in, without files and records."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from tlt.data.backends.synthetic import SyntheticLabels, synthetic_folder
from tlt.data.batch import Batch
from tlt.labels.store import open_labels
from volo.cluster.distributed import World
from volo.commands.train import build
from volo.config.train import TRAIN
from volo.train.architecture import requested_by
from volo.train.audit import Audit
from volo.train.data import Folders
from volo.train.loop import train_epoch
from volo.train.model import build_model
from volo.train.run import Run, Training, resolve_args
from volo.train.step import Step
from volo.train.step_graph import use_own_stream

FLAGS = (
    "--model volo_test --img-size 64 --num-classes 4 -b 4 -j 0 --drop-path 0.5 --lr 1e-3 --warmup-epochs 0 --epochs 9 "
    "--sched-on-updates --data-backend synthetic --scale 0.5 1 --clip-grad 5 --dry-run"
)
LABELLED = "--token-label --token-label-data synthetic"


def small_run(flags: str, images: int = 27, seen: int = 0, world: World | None = None) -> tuple[Any, Training]:
    """What runs have that steps look at, and what is trained. `seen`: batches that a resumed one has had."""
    world = world or World(0, 0, 1, torch.device("cuda", 0))
    use_own_stream(world.device)
    few_blocks = "" if "--model" in flags else " --model-kwargs layers=[1,1,0,0]"  # of each kind one
    args = TRAIN.parse(f"{FLAGS}{few_blocks} {flags}".split())
    args, batch, _ = resolve_args(args, {}, images, 4, world.data_size)
    logger = Mock(lines=[])
    logger.line = lambda *texts: logger.lines.extend(texts)
    guard = SimpleNamespace(iterate_until_stopped=partial(_spoilt, count(seen)), watchdog=Mock())
    run: Any = Run(args, world, logger, guard, Mock(), Mock())
    torch.manual_seed(args.run.seed)
    folder = synthetic_folder(images, 4)
    labels = SyntheticLabels(folder, (3, 6, 6)) if (maps := args.labels.token_label_data) == "synthetic" else None
    if labels is None and maps:
        labels = open_labels(maps, folder.paths, num_classes=4)
    return run, build(run, Folders(folder, folder, []), labels, build_model(requested_by(args)), batch)


def _spoilt(number: Iterator[int], batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same; the fourth of a run has images that are no numbers."""
    for batch in batches:
        if next(number) == 3:
            batch.images.fill_(float("nan"))
        yield batch


def train(run: Any, training: Training, step: Step, epochs: int = 1) -> list[float]:
    """Train some epochs more; return losses and norms."""
    told: list[Any] = []
    meter = Mock(done=0)
    meter.add = lambda terms, batch: told.append(terms.total)
    meter.update_done = lambda lr, norm: told.append(norm)
    for _ in range(epochs):
        train_epoch(run, training, step, meter, Mock(), Audit(run, training, step))
        training.state.epoch += 1
    return [float(value) for value in told]


def weights(*models: Any) -> list[torch.Tensor]:
    return [value.cpu() for model in models if model is not None for value in model.state_dict().values()]

"""What is looked at in each batch before it is trained on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from torchvision.utils import save_image

from tlt.data.loader import Batch
from volo.commands.setup import Setup
from volo.record.logger import Logger
from volo.train.first_batch import first_batch_drawer


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

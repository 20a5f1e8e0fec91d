"""What is looked at in each batch before it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchvision.utils import save_image

from tlt.data.loader import Batch, TrainLoader
from volo.record.logger import Logger
from volo.train.criterion import Criterion
from volo.train.first_batch import first_batch_drawer


def batch_watcher(
    loader: TrainLoader, criterion: Criterion, config: Mapping[str, Any], save_every: int, logger: Logger
) -> Callable[[int, Batch], None]:
    """Look at every batch before it is used: tell unreadable images and labels, draw the first batch, write pictures
    for `--save-images`.

    Args:
        config: The model's.
        save_every: Updates from one picture of a batch to the next; 0: none are written.
    """
    known: set[str] = set()
    draw = first_batch_drawer(loader.dataset, criterion, config, logger)

    def watch(update: int, batch: Batch) -> None:
        for death in loader.take_deaths():
            logger.event("worker-died", reason=death)
            logger.warning(f"{death}; the workers were started anew")
        bad = [label for label in batch.bad_labels if label.path not in known]
        known.update(label.path for label in bad)
        logger.skipped("skipped-image", loader.skips.take_new())
        logger.skipped("bad-label", bad)
        draw(update, batch)
        if save_every and logger.directory is not None and update % save_every == 0:
            save_image(batch.images, logger.directory.path / f"train-batch-{update}.jpg", padding=0, normalize=True)

    return watch

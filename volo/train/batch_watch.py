"""Checks of each batch before it is trained on, and the picture of the first batch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchvision.utils import save_image

from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.data.loader import TrainLoader
from tlt.tools.drawing import save_figure
from tlt.tools.label_page import draw_page, read_examples
from volo.record.logger import Logger
from volo.train.criterion import Criterion, TokenLabelCriterion


def batch_watcher(
    loader: TrainLoader, criterion: Criterion, config: Mapping[str, Any], save_every: int, logger: Logger
) -> Callable[[int, Batch], None]:
    """Return a function to call with each (update, batch).

    It reports unreadable images and labels, draws the first batch, and writes the pictures of `--save-images`.

    Args:
        config: The `model_config` of the run.
        save_every: Updates from one picture of a batch to the next; 0: no pictures.
    """
    known: set[str] = set()
    draw = first_batch_drawer(loader.dataset, criterion, config, logger)

    def watch(update: int, batch: Batch) -> None:
        bad = [label for label in batch.bad_labels if label.path not in known]
        known.update(label.path for label in bad)
        logger.skipped("skipped-image", loader.skips.take_new())
        logger.skipped("bad-label", bad)
        draw(update, batch)
        if save_every and logger.directory is not None and update % save_every == 0:
            save_image(batch.images, logger.directory.path / f"train-batch-{update}.jpg", padding=0, normalize=True)

    return watch


FILE = "first_batch.png"
_IMAGES = 8


def first_batch_drawer(
    dataset: TrainDataset, criterion: Criterion, config: Mapping[str, Any], logger: Logger
) -> Callable[[int, Batch], None]:
    """Return a function to call with each (update, batch); it draws the first batch on rank 0, then does nothing.

    A resumed run keeps an existing picture. A picture that can't be drawn is a warning.

    Args:
        config: The `model_config` of the run, for `mean`, `std` and `class_names`.
    """
    waiting = True

    def draw(update: int, batch: Batch) -> None:
        nonlocal waiting
        if not waiting or logger.directory is None:
            return
        waiting = False
        file = logger.directory.path / FILE
        if (update and file.exists()) or importlib.util.find_spec("matplotlib") is None:
            return
        began = time.perf_counter()
        try:
            few = batch.select(slice(_IMAGES))
            targets = criterion.targets(few) if isinstance(criterion, TokenLabelCriterion) else None
            examples = read_examples(dataset, few, targets, config["mean"], config["std"])  # host synchronisation
            title = f"the first {len(examples)} images of update {update}, as the model sees them"
            if dataset.label_view is not None:
                title += "\n(--compat: the window is where the labels are read, not where the image is cut)"
            save_figure(draw_page(examples, config["class_names"], title, "smoothed probability of the class"), file)
        except Exception as error:  # whatever happens: no run may end because of a picture
            logger.line(f"warning: {FILE} could not be drawn: {type(error).__name__}: {error}")
        else:
            logger.line(f"drew {FILE} in {1000 * (time.perf_counter() - began):.0f} ms")

    return draw

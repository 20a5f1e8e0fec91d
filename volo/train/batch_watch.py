"""Looks at each batch before it is trained on: tells of unreadable images and labels, and draws the first batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tlt.data.batch import Batch
from volo.train.criterion import TokenLabelCriterion
from volo.train.run import Run, Training

FILE = "first_batch.png"
_IMAGES = 8


def batch_watcher(run: Run, training: Training) -> Callable[[int, Batch], None]:
    """Return a function to call with each (update, batch).

    It tells of unreadable images and labels, draws the first batch, and writes the pictures of `--save-images`.
    """
    known: set[str] = set()
    logger, interval = run.logger, run.args.log_interval
    draws = logger.records is not None and importlib.util.find_spec("matplotlib") is not None

    def watch(update: int, batch: Batch) -> None:
        nonlocal draws
        bad = [label for label in batch.bad_labels if label.path not in known]
        known.update(label.path for label in bad)
        logger.skipped("skipped-image", training.loader.skips.take_new())
        logger.skipped("bad-label", bad)
        # Before the first step, for which other ranks wait longer (`--dist-timeout`) than for later ones.
        if draws and not (update and (run.directory / FILE).exists()):
            _draw(run, training, update, batch.select(slice(_IMAGES)))
        draws = False
        if logger.records is not None and run.args.save_images and update % interval == 0:
            from torchvision.utils import save_image

            save_image(batch.images, run.directory / f"train-batch-{update}.jpg", padding=0, normalize=True)

    return watch


def _draw(run: Run, training: Training, update: int, few: Batch) -> None:
    """Draw a batch with its targets. A picture that can't be drawn is a warning."""
    config = training.state.metadata["model_config"]
    try:
        from tlt.tools.drawing import draw_page, read_examples, save_figure

        criterion = training.criterion
        targets = criterion.targets(few) if isinstance(criterion, TokenLabelCriterion) else None
        # Synchronises with the device.
        examples = read_examples(training.loader.dataset, few, targets, config["mean"], config["std"])
        title = f"the first {len(examples)} images of update {update}, as the model sees them"
        if training.loader.dataset.label_view is not None:
            title += "\n(--compat: the window is where the labels are read, not where the image is cut)"
        page = draw_page(examples, config["class_names"], title, "smoothed probability of the class")
        save_figure(page, run.directory / FILE)
        run.logger.line(f"drew {FILE}")
    except Exception as error:  # whatever happens: no run may end because of a picture
        run.logger.line(f"warning: {FILE} could not be drawn: {type(error).__name__}: {error}")

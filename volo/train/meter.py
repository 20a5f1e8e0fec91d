"""Measures and reports a run's steps: unreadable files, the first batch, and losses and times once per interval."""

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tlt.api import StepKey
from tlt.data.batch import Batch
from tlt.io.files import blamed_on
from tlt.label_map import Area
from tlt.loss import LossTerms
from volo.record.metrics import EpochTotals, Interval, Sums
from volo.record.profile import StepProfiler
from volo.record.records import KD_LOSS, duration
from volo.train.criterion import Criterion, TokenLabelCriterion
from volo.train.run import Run, Training

_SHORT = 0.1  # share of an interval's time: a shorter wait for data doesn't explain an idle GPU
_JUDGED_S = 5.0  # from so many seconds of updates, or from a report, follows how long the run will take
_SAVED_S = 0.5  # seconds that an epoch's checkpoint and curve take
_FIRST_BATCH = "first_batch.png"
_IMAGES = 4


class Meter:
    """Counts over one epoch after another, each from `begin` to `end`. A report, once per `--log-interval`, waits for
    the device; so does drawing a picture."""

    def __init__(self, run: Run, training: Training) -> None:
        self.run = run
        self.training = training
        self.state = training.state
        self.precision = training.precision
        self.loader = training.loader
        self.logger = run.logger
        self.guard = run.guard
        self.log_interval = run.settings.checkpoints.log_interval
        self._bad_labels: set[str] = set()  # paths of the bad labels that are reported
        self._draws = self.logger.records is not None and importlib.util.find_spec("matplotlib") is not None
        self._teachers = () if training.distillation is None else training.distillation.names
        taught = [KD_LOSS + name for name in self._teachers]
        self.sums = Sums(("images", "unreadable", "loss", "cls", "dense", *taught), run.world)
        self.state.current_progress = self.progress
        self._profiler: StepProfiler | None = None
        if (updates := run.settings.checkpoints.profile) and self.logger.records is not None:
            self._profiler = StepProfiler(updates, run.world.device, run.directory, self.logger.line)
        self._slow_host_told = self._expected = False

    def begin(self) -> None:
        """Start an epoch, or continue it where a resumed run stopped."""
        self.sums.reset()
        self.epoch = dict.fromkeys(self.sums.names, 0.0)
        self.done = self.reported = self.state.update - self.state.epoch * self.state.updates_per_epoch
        self.lr = self.epoch_seconds = 0.0
        self._start_interval()
        # When the first update here was done, its number, and how long its data took.
        self._first_update: tuple[float, int, float] | None = None
        self._update_end: torch.cuda.Event | None = None
        self._late = 0  # updates of the interval before which the GPU had run out of work
        if self.state.loaded_progress:
            with blamed_on(self.run.start.file, "does not tell how far its epoch was"):
                self._restore(self.state.loaded_progress)
        self.state.loaded_progress = {}

    def _start_interval(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        """Start measuring an interval, or continue one that has taken so many seconds already."""
        self._began = time.perf_counter() - seconds
        self._waited_before = self.guard.waited - waited

    @property
    def waited(self) -> float:
        """Seconds of this interval for which this rank has waited for data."""
        return self.guard.waited - self._waited_before

    def progress(self) -> dict[str, Any]:
        """Return what a run needs to make the same reports after a resume, and to end after as many skipped steps.
        Every rank must call this."""
        return {
            "done": self.done,
            "reported": self.reported,
            "interval": self.sums.by_rank(),
            "epoch": [self.epoch[name] for name in self.sums.names],
            "seconds": [time.perf_counter() - self._began, self.waited, self.epoch_seconds],
            "lr": self.lr,
            "skipped_steps": self.precision.skipped.counts(),
        }

    def _restore(self, progress: dict[str, Any]) -> None:
        """Continue from `progress`. If that is of another update of the epoch, restore only the skipped steps."""
        self.precision.skipped.restore_counts(*map(int, progress["skipped_steps"]))
        other_losses = len(progress["epoch"]) != len(self.sums.names)  # versions before did not record teachers' losses
        if not self.done or progress["done"] != self.done or other_losses:
            return
        self.sums.restore(progress["interval"])
        self.epoch = dict(zip(self.sums.names, map(float, progress["epoch"]), strict=True))
        self.reported = int(progress["reported"])
        self.lr = float(progress["lr"])
        seconds, waited, self.epoch_seconds = map(float, progress["seconds"])
        self._start_interval(seconds, waited)

    def look_at(self, batch: Batch) -> None:
        """Report unreadable images and labels, draw the first batch, and write the pictures of `--save-images`. Call
        this before the batch is used."""
        if self._update_end is not None:
            self._late += self._update_end.query()
            self._update_end = None
        bad = [label for label in batch.bad_labels if label.path not in self._bad_labels]
        self._bad_labels.update(label.path for label in bad)
        self.logger.skipped("skipped-image", self.loader.skips.take_new())
        self.logger.skipped("bad-label", bad)
        update, directory = self.state.update, self.run.directory
        # Before the first step, because other ranks wait longer for that than for later ones (`--dist-timeout`).
        if self._draws and not (update and (directory / _FIRST_BATCH).exists()):
            _draw(self.run, self.training, update, batch)
        self._draws = False
        if self.logger.records is not None and self.run.settings.images.save_images and update % self.log_interval == 0:
            from torchvision.utils import save_image

            save_image(batch.images, directory / f"train-batch-{update}.jpg", padding=0, normalize=True)

    def add(self, terms: LossTerms, batch: Batch) -> None:
        """Count a micro-batch. This does not synchronise with the device."""
        losses = (*terms[:3], *(terms.teachers[name] for name in self._teachers))
        self.sums.add(batch.size, len(batch.skipped), *(loss.detach() * batch.size for loss in losses))

    def update_done(self, lr: float, grad_norm: Tensor) -> None:
        """Count an optimizer step, and report if it ends an interval."""
        self.done += 1
        if self._profiler is not None:
            self._profiler.update_done(self.state.updates_per_epoch - self.done)
        self.lr = lr
        self.logger.update(self.state.epoch, self.state.update)
        self._first_update = self._first_update or (time.perf_counter(), self.done, self.waited)
        if self.run.world.device.type == "cuda":
            self._update_end = torch.cuda.current_stream().record_event()
        elif time.perf_counter() - self._first_update[0] > _JUDGED_S:
            self._expect(*self._first_update)
        if self.done % self.log_interval and self.done != self.state.updates_per_epoch:
            return
        for ago, in_loss in self.precision.skipped.pop().items():
            self._record_skipped(self.state.update + ago, in_loss)
        skipped = self.precision.skipped.check()  # synchronises the host with the device, once per interval
        totals = self.sums.totals()
        self._expect(*(self._first_update if self.done > self._first_update[1] else (self._began, self.reported, 0.0)))
        self.sums.reset()
        seconds = time.perf_counter() - self._began
        wait_seconds = self.waited
        self._start_interval()
        self.epoch_seconds += seconds
        self.epoch = {name: self.epoch[name] + value for name, value in totals.items()}
        interval = Interval(
            epoch=self.state.epoch,
            update=self.state.update,
            update_in_epoch=self.done,
            updates_per_epoch=self.state.updates_per_epoch,
            updates=self.done - self.reported,
            images=int(totals["images"]),
            **_mean_losses(totals),
            lr=lr,
            grad_norm=float(grad_norm),
            seconds=seconds,
            wait_seconds=wait_seconds,
            skipped_steps=skipped,
        )
        self.logger.interval(interval)
        self._tell_of_slow_host(interval)
        self.reported = self.done

    def _expect(self, began: float, update: int, waited: float) -> None:
        """Tell once how long the run will take, from the updates after `update` of this epoch, done at `began`: the
        first one compiles, and `waited` for workers to start. Host and device are synchronised."""
        if self._expected or self.logger.records is None:
            return
        self._expected = True
        seconds = time.perf_counter() - began
        work = self.logger.work
        done = work[self.state.update] - work[self.state.update - self.done + update]
        left = duration(seconds_left(self.run, self.training, work, seconds / done, waited))
        self.logger.line(f"the run takes about {left}: {self.done - update} of its updates took {seconds:.1f} s")

    def _tell_of_slow_host(self, interval: Interval) -> None:
        """Log once if the GPU had run out of work before most updates although their data were ready."""
        late = self._late
        self._late = 0
        if self._slow_host_told or 2 * late <= interval.updates or interval.wait_seconds > _SHORT * interval.seconds:
            return
        self._slow_host_told = True
        self.logger.line(
            f"the GPU had nothing left to do before {late} of {interval.updates} updates: the host is slower than it. "
            "A CUDA graph of the step, --torchcompile, or a larger -b help; --profile 10 shows both"
        )

    def _record_skipped(self, update: int, in_loss: bool) -> None:
        """Record a skipped step and this rank's images in it, on rank 0 and on ranks whose loss was not finite."""
        if not (in_loss or self.logger.world.is_primary):
            return
        epoch, within = divmod(update, self.state.updates_per_epoch)
        micro_batches = next(self.loader.index_stream.epoch(epoch, within))
        images = [self.loader.dataset.path(int(index)) for indices in micro_batches for index in indices]
        parts = ["loss", "gradients"] if in_loss else ["gradients"]
        self.logger.event("nonfinite", epoch=epoch, update=update, not_finite=parts, images=images)

    def end(self) -> EpochTotals:
        """Return the totals of the whole epoch."""
        images = int(self.epoch["images"])
        unreadable = int(self.epoch["unreadable"])
        return EpochTotals(images, unreadable, self.epoch_seconds, **_mean_losses(self.epoch), lr=self.lr)


def seconds_left(run: Run, training: Training, work: Sequence[float], per_unit: float, first_batch: float) -> float:
    """Return about how long the rest of a run takes, if a unit of `work` (`IndexStream.work`) takes so long, and each
    pass over images waits so long for its first batch. A validated image takes a third of the time of training on it.
    """
    state, stream = training.state, training.loader.index_stream
    size = state.metadata["model_config"]["img_size"]
    image = per_unit * (1 / stream.global_batch if stream.sizes is None else math.prod(size))
    models = 0 if run.settings.teachers.kd_only else 1 + (training.average is not None)
    passes = models / run.settings.checkpoints.val_interval
    pause = first_batch + passes * (first_batch + len(training.validation.dataset) * image / 3) + _SAVED_S
    return (work[-1] - work[state.update]) * per_unit + (training.schedule.last_epoch - state.epoch) * pause


def _mean_losses(totals: dict[str, float]) -> dict[str, Any]:
    """Return the means over the images, as fields of `Interval` and `EpochTotals`."""
    means = {name: total / max(totals["images"], 1.0) for name, total in totals.items()}
    teachers = {name.removeprefix(KD_LOSS): mean for name, mean in means.items() if name.startswith(KD_LOSS)}
    return {"loss": means["loss"], "cls_loss": means["cls"], "dense_loss": means["dense"], "teacher_losses": teachers}


def mixed_images(criterion: Criterion, batch: Batch, key: StepKey) -> tuple[Tensor, Area | None] | None:
    """Return the images (B, 3, H, W) as a step mixes them, and MixToken's box in pixels; None if it mixes nothing.
    MixToken mixes embeddings of tokens: what is returned has the pixels at their places."""
    drawn = criterion.draw(batch, key)
    images = drawn.mix(batch.images)
    box = drawn.box
    if box is None or not isinstance(criterion, TokenLabelCriterion):
        return None if drawn.ratios is None else (images, None)
    grid, (left, top, right, bottom) = criterion.place(images)
    start = (top, left)
    length = (bottom - top, right - left)
    y0, x0, y1, x1 = (
        max(0, round(images.shape[2 + axis] * (start[axis] + length[axis] * edge / grid[axis])))
        for edge, axis in zip(box.tolist(), (0, 1, 0, 1), strict=True)
    )
    mixed = images.clone()
    inside = (..., slice(y0, y1), slice(x0, x1))
    mixed[inside] = images.flip(0)[inside]
    return mixed, (x0, y0, x1, y1)


def _draw(run: Run, training: Training, update: int, batch: Batch) -> None:
    """Draw the first images of a batch with their targets. If that fails, log a warning."""
    config = training.state.metadata["model_config"]
    try:
        from tlt.tools.drawing import draw_page, pixels_of, read_examples, save_figure

        criterion = training.criterion
        few = batch.select(slice(_IMAGES))
        targets = criterion.targets(few) if isinstance(criterion, TokenLabelCriterion) else None
        # This synchronises with the device.
        examples = read_examples(training.loader.dataset, few, targets, config["mean"], config["std"])
        if mixed := mixed_images(criterion, batch, StepKey(run.settings.run.seed, update, 0, run.world.data_rank)):
            pixels = pixels_of(mixed[0][:_IMAGES], config["mean"], config["std"])
            pairs = zip(examples, pixels, strict=True)
            examples = [replace(example, mixed=shown, mix_box=mixed[1]) for example, shown in pairs]
        title = f"the first {len(examples)} images of update {update}, as the model sees them"
        if training.loader.dataset.label_view is not None:
            title += "\n(--compat: the window is where the labels are read, not where the image is cut)"
        page = draw_page(examples, config["class_names"], title, "smoothed probability of the class")
        save_figure(page, run.directory / _FIRST_BATCH)
        run.logger.line(f"drew {_FIRST_BATCH}")
    except Exception as error:  # a failed picture must never end a run
        run.logger.line(f"warning: {_FIRST_BATCH} could not be drawn: {type(error).__name__}: {error}")

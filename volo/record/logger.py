"""Output of a training run: a progress bar on a terminal, lines in a log, records in the run directory."""

import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from tlt.data.batch import Skipped
from tlt.io.jobs import progress_bar
from tlt.io.text import fill, printable, safe_text
from volo.cluster.distributed import World
from volo.record.goodput import Stopwatch
from volo.record.history import EVENTS
from volo.record.metrics import Arithmetic, EpochTotals, Evaluation, Interval, gpu_use
from volo.record.records import KD_LOSS, LineFile, RunRecords, duration, strict_json, utc_now

if TYPE_CHECKING:
    from volo.record.trackers import Trackers

# A run warns once if it has waited for data for more than this share of its time, and for more than so many seconds.
WAIT_SHARE = 0.2
WAIT_SECONDS = 30.0
ADVICE = (
    "raise --workers up to the CPUs of this rank, pack the images smaller on a disk of this machine (tlt pack-images "
    "DATA OUT --max-side N), or decode on the GPU (--data-backend dali-gpu)"
)


def outcome(error: BaseException | None) -> tuple[int, str]:
    """Return the exit code of a program that ends with `error` (None: success), as `volo.commands.console` does, and
    one line that says why it ends."""
    if error is None:
        return 0, "done"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted from the keyboard"
    if hasattr(error, "exit_code"):
        return error.exit_code, str(error)
    return 141 if isinstance(error, BrokenPipeError) else 1, f"{type(error).__name__}: {error}".splitlines()[0]


class Logger:
    """Writes to the console and the run directory on rank 0; other ranks write only events and warnings."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopwatch = Stopwatch()  # of what this process does
        self.records: RunRecords | None = None  # None before `open`, and on ranks other than 0
        self._events = LineFile()  # events.jsonl; it keeps events in memory until `open_events`
        self.trackers: Trackers | None = None  # None unless trackers are used
        self._arithmetic: Arithmetic | None = None
        self._position: dict[str, int] = {}  # current epoch and update once they are known; part of every event
        self.work: Sequence[float] = (0,)  # amount of work done before each update of the run, and at its end
        self._bar: tqdm | None = None
        self._bar_text = ""  # text beside the bar: loss and speed of the last interval, even of the previous epoch
        self._lines = LineFile()  # log.txt; it keeps lines in memory until `open`
        self._seconds = 0.0
        self._waited = 0.0
        self._work_done = 0.0  # totals since this start
        self._epochs = 0
        self._shows_bar = False
        self._advised = False
        self._told_at = 0.0  # seconds of the stopwatch that the last event told
        self._next_curve = 0.0  # when learning curves are drawn again, on the monotonic clock

    def open(self, records: RunRecords, work: Sequence[float], arithmetic: Arithmetic | None = None) -> None:
        """Write to `records` from now on, and earlier lines to its log.txt. `work` is how much was done before each
        update of the whole run, and after the last, in any unit; `arithmetic` describes a step, None if its operations
        can't be counted."""
        self.records = records
        self.work = work
        self._arithmetic = arithmetic
        self._lines.open(records.path / "log.txt")

    def track(self, names: Sequence[str], project: str, tags: Sequence[str]) -> None:
        """Also send the records to these experiment trackers; a failure is a warning. Call `open` before."""
        if self.records is not None and names:
            from volo.record.trackers import FOLDER, Trackers

            self.line(f"trackers: {', '.join(names)}; what they print is in {self.records.path / FOLDER}")
            self.trackers = Trackers(self.warning)
            self.trackers.start(self.records.path, names, project, tags)

    def open_events(self, directory: Path) -> None:
        """Write events to the existing `directory` from now on, on every rank that can reach it."""
        self._events.open(directory / EVENTS)

    def event(self, kind: str, **fields: Any) -> None:
        """Add an event to events.jsonl, if possible, on any rank; `fields` may override `epoch` and `update`."""
        where: dict[str, Any] = {"rank": self.world.rank, "node": socket.gethostname(), "pid": os.getpid()}
        if self.world.is_primary:
            where["spent"] = self.stopwatch.spent()
            self._told_at = sum(where["spent"].values())
        self._events.append(strict_json({"time": utc_now(), "kind": kind, **where, **self._position, **fields}))

    def set_position(self, epoch: int, update: int) -> None:
        """Set the number of finished epochs and updates, which every event records."""
        self._position = {"epoch": epoch, "update": update}

    @contextmanager
    def end_noted(self) -> Iterator[None]:
        """After the block, add an `end` event with exit code and reason, on rank 0 and on every rank that fails. Pass
        the exit code to the trackers as well. In the block, rank 0 tells now and then that it is alive."""
        failure: BaseException | None = None
        ended = threading.Event()
        if self.world.is_primary:
            threading.Thread(target=self._tell_time, args=(ended,), daemon=True).start()
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            ended.set()
            code, reason = outcome(failure)
            if self.world.is_primary or failure is not None:
                self.event("end", exit_code=code, reason=reason)
            if self.trackers is not None:
                self.trackers.close(code)

    def _tell_time(self, ended: threading.Event) -> None:
        """Add an event `time` whenever the process has become 1 % older since the last event, once these are written.
        It is a thread of its own, because a file system that hangs must not keep the watchdog from its work."""
        while not ended.wait(1.0):
            age = sum(self.stopwatch.spent().values())
            if self._events.path is not None and age > 1.01 * self._told_at:
                self.event("time")

    def line(self, *texts: str) -> None:
        """Print each text as a line on rank 0, and add it to log.txt."""
        for text in texts if self.world.is_primary else ():
            shown = fill(text, get_terminal_size().columns - 1, "  ") if sys.stdout.isatty() else text
            if self._bar is None:
                print(shown, flush=True)
            else:
                tqdm.write(shown, file=sys.stdout)
            self._log(text)

    def detail(self, text: str) -> None:
        """Add a line to log.txt on rank 0, and print it unless a bar and one line an epoch are shown."""
        if not (self._shows_bar or sys.stdout.isatty()):
            self.line(text)
        elif self.world.is_primary:
            self._log(text)

    def _log(self, text: str) -> None:
        self._lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {safe_text(text)}")

    def skipped(self, kind: Literal["skipped-image", "bad-label"], skipped: Iterable[Skipped]) -> None:
        """Print and record what this rank could not read. Every rank calls this, because each reads other images."""
        for path, why in skipped:
            name = printable(path)
            self.event(kind, path=name, reason=why)
            self.warning(f"left out {name}: {why}" if kind == "skipped-image" else f"label of {name}: {why}")

    def warning(self, text: str) -> None:
        """Print a warning on any rank."""
        if self.world.is_primary:
            self.line(f"warning: {text}")
        else:
            print(f"[rank {self.world.rank}] warning: {text}", file=sys.stderr, flush=True)

    def verdict(self, text: str) -> None:
        """Print how the run goes, and record it for its report; "" takes back what was said before."""
        if self.world.is_primary:
            self.event("verdict", text=text)
        if text:
            self.line(text)

    def start_epoch(self, epoch: int, epochs: int, updates: int) -> None:
        """Show a progress bar for the epoch on a terminal or in a notebook."""
        self._epochs = epochs
        if self.records is not None:
            # The bar fits 80 columns.
            form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            title = f"epoch {epoch + 1}/{epochs}"
            self._bar = progress_bar(total=updates, desc=title, bar_format=form)
            self._shows_bar = self._bar is not None
        if self._bar is not None:
            self._bar.set_postfix_str(self._bar_text)

    def update(self, epoch: int, update: int) -> None:
        """Count an optimizer step; `update` is its number in the whole run."""
        self.set_position(epoch, update)
        if self._bar is not None:
            self._bar.update()

    def interval(self, interval: Interval) -> None:
        """Print and record an interval of training."""
        if self.records is None:
            return
        self._seconds += interval.seconds
        self._waited += interval.wait_seconds
        self._work_done += self.work[interval.update] - self.work[interval.update - interval.updates]
        remaining = (self.work[-1] - self.work[interval.update]) * self._seconds / max(self._work_done, 1)
        per_device = interval.images_per_second / self.world.size
        wait_share = interval.wait_seconds / max(interval.seconds, 1e-9)
        skipped = f" | skipped steps {interval.skipped_steps}" if interval.skipped_steps else ""
        parts = {"class": interval.cls_loss, "dense": interval.dense_loss} if interval.dense_loss else {}
        if interval.teacher_losses:
            parts = (parts or ({"class": interval.cls_loss} if interval.cls_loss else {})) | interval.teacher_losses
        losses = f"loss {interval.loss:.4f}"
        losses += f" ({', '.join(f'{name} {loss:.4f}' for name, loss in parts.items())})" if parts else ""
        rate = f"{interval.images_per_second:.0f} images/s"
        of_device = f" ({per_device:.0f} per device)" if self.world.size > 1 else ""
        text = (
            f"epoch {interval.epoch + 1} [{interval.update_in_epoch}/{interval.updates_per_epoch}] "
            f"{losses} | lr {interval.lr:.3e} | grad norm {interval.grad_norm:.3f} | "
            f"{rate}{of_device} | data wait {100 * wait_share:.0f} % | ETA {duration(remaining)}{skipped}"
        )
        if self._bar is not None:
            self._bar_text = f"loss {interval.loss:.3f}, {rate}, ETA {duration(remaining)}"
            self._bar.set_postfix_str(self._bar_text)
        self.detail(text)
        use = gpu_use(self.world.device) | (self._arithmetic.use(per_device) if self._arithmetic else {})
        measurements = {"images_per_second": interval.images_per_second, **use, "time": utc_now()}
        record = asdict(interval)
        record |= {f"{KD_LOSS}{name}": loss for name, loss in record.pop("teacher_losses").items()}
        self.records.metrics({"event": "train", **record, **measurements})
        if self.trackers is not None:
            self.trackers.check()
        if not self._advised and self._waited > max(WAIT_SHARE * self._seconds, WAIT_SECONDS):
            self._advised = True
            share = self._waited / self._seconds
            self.event("data-wait", share=round(share, 3))
            self.warning(f"data wait {100 * share:.0f} % of the time so far: {ADVICE}")

    def _epoch_line(self, epoch: int, totals: EpochTotals, evaluations: dict[str, Evaluation], is_best: bool) -> str:
        """Return an epoch's line of at most 79 columns; of longer ones the last accuracies are left out."""
        parts = [f"epoch {epoch + 1}/{self._epochs}: loss {totals.loss:.4g}"]
        for name, result in evaluations.items():
            if name == "model":
                parts[0] += f" (validation {result.loss:.4g})"
            parts.append(f"{'top-1' if name == 'model' else name.upper()} {result.top1:.2f} %")
        while len(line := ", ".join(parts) + ", best" * is_best) > 79:
            parts.pop()
        return line

    def epoch(
        self, epoch: int, totals: EpochTotals, evaluations: dict[str, Evaluation], best: float | None, since: int = 0
    ) -> None:
        """Print an epoch's line, write its record, and its row in summary.csv; `best` is the best score so far, `since`
        so many epochs. Call this before the epoch's checkpoint is saved: a run killed in between repeats the epoch."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.records is None:
            return
        self.line(self._epoch_line(epoch, totals, evaluations, bool(evaluations) and not since and best is not None))
        row: dict[str, float | int] = {
            "epoch": epoch,
            "train_loss": totals.loss,
            "train_cls_loss": totals.cls_loss,
            "train_dense_loss": totals.dense_loss,
            **{f"train_{KD_LOSS}{name}": loss for name, loss in totals.teacher_losses.items()},
            "lr": totals.lr,
            "images": totals.images,
            "unreadable_images": totals.unreadable,
            "images_per_second": totals.images / max(totals.seconds, 1e-9),
        }
        for name, result in evaluations.items():
            suffix = "" if name == "model" else f"_{name}"
            row |= {f"eval_{key}{suffix}": getattr(result, key) for key in ("top1", "top5", "loss", "images")}
            row |= {} if result.dense_top1 is None else {f"dense_top1{suffix}": result.dense_top1}
            row |= {} if result.annotator_top1 is None else {"annotator_top1": result.annotator_top1}
        if best is not None:
            row["best"] = best
        self.records.epoch(row)

    def sync(self) -> None:
        """Write the records to the disk. Call this before a checkpoint is saved, which must not outlive them."""
        if self.records is not None:
            self.records.sync()

    def curve(self, last: bool = False) -> None:
        """Draw the learning curves if matplotlib is installed; print a warning if that fails. Of short epochs only some
        and the `last` are drawn, so that pictures take a few percent of the run's time."""
        began = time.monotonic()
        if self.records is None or importlib.util.find_spec("matplotlib") is None:
            return
        if not last and began < self._next_curve:
            return
        try:
            self.records.draw_curve()
            now = time.monotonic()
            self._next_curve = now + 30 * (now - began)
        except Exception as error:  # a failed picture must never end a run
            self.line(f"warning: curve.png could not be drawn: {type(error).__name__}: {error}")

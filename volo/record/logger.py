"""What people look at for days: a progress bar with ETA on a terminal, plain lines in a log."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from tlt.data.dataset import Skipped
from tlt.io.text import printable, safe_text
from volo.cluster.distributed import World
from volo.record.events import EventLog, Kind, duration, exit_code, reason, utc_now
from volo.record.metrics import EpochTotals, Evaluation, Interval
from volo.record.run_directory import RunDirectory


class Logger:
    """Console and run directory of rank 0; of the other ranks only events and faults are kept.

    Attributes:
        directory: The run's records; None before `open`, and on other ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.directory: RunDirectory | None = None
        self.events = EventLog(world.rank)
        self._at: dict[str, int] = {}  # where the run stands, once that is known: noted with every event
        self._total_updates = 0
        self._bar: tqdm | None = None
        self._curve_failed = False
        self._before: list[str] = []  # lines for log.txt from before there was one
        self._seconds, self._updates = 0.0, 0

    def open(self, directory: RunDirectory, total_updates: int) -> None:
        """Keep records in `directory` from now on; what was printed before goes to its log.txt, too.

        Args:
            total_updates: Of the whole run, for the ETA.
        """
        self.directory, self._total_updates = directory, total_updates
        for text in self._before:
            directory.log(text)
        self._before.clear()

    def open_events(self, directory: Path) -> None:
        """Write events to `directory`, which exists, from now on; every rank calls it."""
        self.events.open(directory)

    def event(self, kind: Kind, **fields: Any) -> None:
        """Add to events.jsonl, on the rank that calls; `epoch` and `update` are added unless given."""
        self.events.add(kind, **self._at | fields)

    def at(self, epoch: int, update: int) -> None:
        """Where the run stands: epochs and updates done."""
        self._at = {"epoch": epoch, "update": update}

    @contextmanager
    def end_noted(self) -> Iterator[None]:
        """Add an `end` event with exit code and reason when the block is left, on rank 0 and where it failed."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if self.world.is_primary or failure is not None:
                self.event("end", exit_code=exit_code(failure), reason=reason(failure))

    def line(self, text: str) -> None:
        """Print one line and keep it in log.txt."""
        if not self.world.is_primary:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)
        stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {safe_text(text)}"
        if self.directory is not None:
            self.directory.log(stamped)
        else:
            self._before.append(stamped)

    def skipped(self, kind: Literal["skipped-image", "bad-label"], skipped: Iterable[Skipped]) -> None:
        """Print and note what this rank could not read; every rank speaks, because each reads other images."""
        for path, why in skipped:
            name = printable(path)
            self.event(kind, path=name, reason=why)
            text = f"left out {name}: {why}" if kind == "skipped-image" else f"label of {name}: {why}"
            self.warning(text)

    def warning(self, text: str) -> None:
        """Print a warning of any rank's."""
        if self.world.is_primary:
            self.line(f"warning: {text}")
        else:
            print(f"[rank {self.world.rank}] warning: {text}", file=sys.stderr, flush=True)

    def start_epoch(self, epoch: int, epochs: int, updates: int) -> None:
        """Show a progress bar for the epoch if somebody watches."""
        if self.directory is not None and sys.stderr.isatty():
            self._bar = tqdm(
                total=updates, desc=f"epoch {epoch + 1}/{epochs}", unit="update", leave=False, dynamic_ncols=True
            )

    def update(self, epoch: int, update: int) -> None:
        """One optimizer step is under way: the `update`-th of the run."""
        self.at(epoch, update)
        if self._bar is not None:
            self._bar.update()

    def interval(self, interval: Interval) -> None:
        """Report a stretch of training."""
        if self.directory is None:
            return
        self._seconds += interval.seconds
        self._updates += interval.updates
        remaining = (self._total_updates - interval.update) * self._seconds / max(self._updates, 1)
        per_device = interval.images_per_second / self.world.size
        skipped = f" | skipped steps {interval.skipped_steps}" if interval.skipped_steps else ""
        self.line(
            f"epoch {interval.epoch + 1} [{interval.update_in_epoch}/{interval.updates_per_epoch}] "
            f"loss {interval.loss:.4f} (class {interval.cls_loss:.4f}, dense {interval.dense_loss:.4f}) | "
            f"lr {interval.lr:.3e} | grad norm {interval.grad_norm:.3f} | "
            f"{interval.images_per_second:.0f} images/s ({per_device:.0f} per device) | "
            f"data wait {100 * interval.wait_share:.0f} % | ETA {duration(remaining)}{skipped}"
        )
        rate = {"images_per_second": interval.images_per_second, "time": utc_now()}
        self.directory.metrics({"event": "train", **asdict(interval), **rate})

    def epoch(
        self,
        epoch: int,
        totals: EpochTotals,
        evaluations: dict[str, Evaluation],
        best: float | None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Close the epoch: its row in summary.csv, with `more` columns, and its record.

        Call it before the epoch's checkpoint is saved: a run that is killed in between does the epoch again.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.directory is None:
            return
        row: dict[str, float | int] = {
            "epoch": epoch,
            "train_loss": totals.loss,
            "train_cls_loss": totals.cls_loss,
            "train_dense_loss": totals.dense_loss,
            "lr": totals.lr,
            "images": totals.images,
            "unreadable_images": totals.unreadable,
            "images_per_second": totals.images / max(totals.seconds, 1e-9),
        }
        for name, result in evaluations.items():
            suffix = "" if name == "model" else f"_{name}"
            row |= {
                f"eval_top1{suffix}": result.top1,
                f"eval_top5{suffix}": result.top5,
                f"eval_loss{suffix}": result.loss,
                f"eval_images{suffix}": result.images,
            }
        if best is not None:
            row["best"] = best
        row |= more or {}
        self.directory.summary(row)
        self.directory.metrics({"event": "epoch", **row, "time": utc_now()})

    def sync(self) -> None:
        """Put the records on the disk; call it before a checkpoint is saved, which must not outlive them."""
        if self.directory is not None:
            self.directory.sync()

    def curve(self) -> None:
        """Draw the learning curve, where matplotlib is installed and works; say once if it does not."""
        if self.directory is None or importlib.util.find_spec("matplotlib") is None:
            return
        try:
            self.directory.draw_curve()
        except Exception as error:  # whatever it is: no run may end because of a picture
            if not self._curve_failed:
                self.line(f"warning: curve.png could not be drawn: {type(error).__name__}: {error}")
            self._curve_failed = True

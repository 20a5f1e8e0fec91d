"""What people look at for days: a progress bar with ETA on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from tqdm import tqdm

from volo.engine.distributed import World
from volo.engine.loop import EpochTotals, Evaluation, Interval
from volo.engine.run_directory import RunDirectory


def duration(seconds: float) -> str:
    """Format seconds as `1d 02:03:04`, `02:03:04` or `03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}" if hours or days else f"{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


class Logger:
    """Console and run directory of rank 0; on the other ranks every method does nothing.

    Attributes:
        directory: The run's records; None before `open`, and on other ranks.
        total_updates: Of the whole run, for the ETA.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.directory: RunDirectory | None = None
        self.total_updates = 0
        self._bar: tqdm | None = None
        self._before: list[str] = []  # lines for log.txt from before there was one
        self._seconds, self._updates = 0.0, 0

    def open(self, directory: RunDirectory) -> None:
        """Keep records in `directory` from now on; what was printed before goes to its log.txt, too."""
        self.directory = directory
        for text in self._before:
            directory.log(text)
        self._before.clear()

    def line(self, text: str) -> None:
        """Print one line and keep it in log.txt."""
        if not self.world.is_primary:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)
        stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"
        if self.directory is not None:
            self.directory.log(stamped)
        else:
            self._before.append(stamped)

    def faults(self, lines: Iterable[str]) -> None:
        """Print what went wrong with this rank's data; every rank speaks, because each reads other images."""
        for text in lines:
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

    def update(self) -> None:
        """One optimizer step is under way."""
        if self._bar is not None:
            self._bar.update()

    def interval(self, interval: Interval) -> None:
        """Report a stretch of training."""
        if self.directory is None:
            return
        self._seconds += interval.seconds
        self._updates += interval.updates
        remaining = (self.total_updates - interval.update) * self._seconds / max(self._updates, 1)
        per_device = interval.images_per_second / self.world.size
        skipped = f" | skipped steps {interval.skipped_steps}" if interval.skipped_steps else ""
        self.line(
            f"epoch {interval.epoch + 1} [{interval.update_in_epoch}/{interval.updates_per_epoch}] "
            f"loss {interval.loss:.4f} (class {interval.cls_loss:.4f}, dense {interval.dense_loss:.4f}) | "
            f"lr {interval.lr:.3e} | grad norm {interval.grad_norm:.3f} | "
            f"{interval.images_per_second:.0f} images/s ({per_device:.0f} per device) | "
            f"data wait {100 * interval.wait_share:.0f} % | ETA {duration(remaining)}{skipped}"
        )
        self.directory.metrics({"event": "train", **asdict(interval), "images_per_second": interval.images_per_second})

    def epoch(
        self,
        epoch: int,
        totals: EpochTotals,
        evaluations: dict[str, Evaluation],
        best: float | None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Close the epoch: its row in summary.csv, with `more` columns, its record, the learning curve."""
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
        self.directory.metrics({"event": "epoch", **row})
        self.directory.draw_curve()

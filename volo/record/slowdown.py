"""Warnings about a slow run, each once: it waits for data, or for one slow rank, or torch compiles again and again."""

from __future__ import annotations

import socket
import statistics
import sys

from volo.cluster.distributed import from_all
from volo.record.logger import Logger
from volo.record.metrics import Interval

WAIT_SHARE = 0.2  # of an interval, waiting for data
WAIT_SECONDS = 3.0  # of an epoch: in short epochs, workers that begin would be most of it
STRAGGLER_FACTOR = 1.5  # over the median of the other ranks
STRAGGLER_SHARE = 0.1  # of an interval, that the median rank loses
ADVICE = (
    "raise --workers up to the CPUs of this rank, pack the images smaller on a disk of this machine (tlt pack-images "
    "DATA OUT --max-side N), or decode on the GPU (--data-backend dali-gpu)"
)


def straggler(own_seconds: list[float], interval: float) -> int | None:
    """Return the rank that took much longer than the others for its own work (loading, forward pass), or None."""
    slowest = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = own_seconds[:slowest] + own_seconds[slowest + 1 :]
    if not others:
        return None
    usual, most = statistics.median(others), own_seconds[slowest]
    slow = most > STRAGGLER_FACTOR * usual and most - usual > STRAGGLER_SHARE * interval
    return slowest if slow else None


class SlowdownWatch:
    """Warns, once per run each, of waiting for data and of a slow rank; ranks exchange one number per interval."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._warned: set[str] = set()
        self._waited = (-1, 0.0)  # epoch, and its seconds so far

    def interval(self, interval: Interval, own_seconds: float) -> None:
        """Check an interval, of which this rank spent `own_seconds` on loading and forward passes."""
        before = self._waited[1] if self._waited[0] == interval.epoch else 0.0
        self._waited = (interval.epoch, before + interval.wait_seconds)
        share = interval.wait_share
        if share > WAIT_SHARE and self._waited[1] > WAIT_SECONDS and self._is_first("data-wait"):
            self.logger.event("data-wait", share=round(share, 3))
            self.logger.warning(f"data wait {100 * share:.0f} % of the step: {ADVICE}")
        world = self.logger.world
        if world.size == 1:
            return
        ranks = from_all(own_seconds)
        if straggler(ranks, interval.seconds) == world.rank and self._is_first("straggler"):
            usual = statistics.median(ranks)
            self.logger.event("straggler", seconds=own_seconds, median_seconds=usual, interval_seconds=interval.seconds)
            self.logger.warning(
                f"the others wait for rank {world.rank} on {socket.gethostname()}: {own_seconds:.2f} s for "
                f"loading and forward passes, usual are {usual:.2f} s"
            )

    def _is_first(self, kind: str) -> bool:
        is_first = kind not in self._warned
        self._warned.add(kind)
        return is_first


class CompileWatch:
    """Reports what torch compiles in each interval of training; compilation in the first interval is expected."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.started = False
        self._graphs, self._seconds = _compiled_so_far()

    def skip(self) -> None:
        """Ignore what was compiled since the last interval."""
        self._graphs, self._seconds = _compiled_so_far()

    def interval(self, first: int, last: int) -> None:
        """Check the updates from `first` to `last`."""
        graphs, seconds = _compiled_so_far()
        new, taken = graphs - self._graphs, seconds - self._seconds
        if new and not self.started:
            self.logger.line(f"torch.compile: {new} graphs in {taken:.0f} s")
        elif new:
            self.logger.line(
                f"warning: torch compiled {new} graphs anew in updates {first} to {last}, {taken:.0f} s ({graphs} so "
                "far): an epoch's last, smaller batch does it once; TORCH_LOGS=recompiles shows others"
            )
        self.started = True
        self._graphs, self._seconds = graphs, seconds


def _compiled_so_far() -> tuple[int, float]:
    """Return the number of graphs that torch has compiled in this process, and the seconds that it took."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:  # nothing is compiled
        return 0, 0.0
    return dynamo.counters["stats"]["unique_graphs"], dynamo.calculate_time_spent().get("total_wall_time", 0.0)

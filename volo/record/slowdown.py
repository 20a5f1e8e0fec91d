"""Warnings about a run that is slower than it need be: too little data, one rank that all others wait for, code that is
compiled again and again."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch

from volo.cluster.distributed import World, from_all

WAIT_SHARE = 0.2  # of an interval, waiting for data
STRAGGLER_FACTOR = 1.5  # over the median of the ranks
STRAGGLER_SHARE = 0.1  # of an interval, that the median rank loses


class Reporter(Protocol):
    """Receives warnings."""

    def event(self, kind: Any, **fields: Any) -> None: ...

    def warning(self, text: str) -> None: ...


class DataAdvisor(Protocol):
    """Says what to do about waiting for data (`volo.record.data_wait`)."""

    def look(self) -> None: ...

    def advice(self) -> str: ...


def straggler(own_seconds: list[float], interval: float) -> int | None:
    """The rank that took much longer than the others for what each does on its own (loading, forward pass), if any."""
    slowest = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = own_seconds[:slowest] + own_seconds[slowest + 1 :]
    if not others:
        return None
    usual, most = statistics.median(others), own_seconds[slowest]
    slow = most > STRAGGLER_FACTOR * usual and most - usual > STRAGGLER_SHARE * interval
    return slowest if slow else None


class Pace:
    """Warns once an epoch of each; the ranks exchange one number per interval.

    Args:
        advisor: Says what to do about waiting for data.
        gather: Returns every rank's value.
    """

    def __init__(
        self, world: World, advisor: DataAdvisor, reporter: Reporter, gather: Callable[[float], list[float]] = from_all
    ) -> None:
        self.world, self.advisor, self.reporter, self.gather = world, advisor, reporter, gather
        self._warned: dict[str, int] = {}  # epoch of the newest warning

    def interval(self, epoch: int, own_seconds: float, wait_seconds: float, seconds: float) -> None:
        """Look at an interval of `seconds`, in which this rank waited `wait_seconds` for data."""
        self.advisor.look()
        share = wait_seconds / max(seconds, 1e-9)
        if share > WAIT_SHARE and self._first("data-wait", epoch):
            advice = self.advisor.advice()
            self.reporter.event("data-wait", share=round(share, 3), advice=advice)
            self.reporter.warning(f"data wait {100 * share:.0f} % of the step: {advice}")
        if self.world.size == 1:
            return
        ranks = self.gather(own_seconds)
        if straggler(ranks, seconds) == self.world.rank and self._first("straggler", epoch):
            usual = statistics.median(ranks)
            self.reporter.event("straggler", seconds=own_seconds, median_seconds=usual, interval_seconds=seconds)
            self.reporter.warning(
                f"the others wait for rank {self.world.rank} on {socket.gethostname()}: {own_seconds:.2f} s for "
                f"loading and forward passes, usual are {usual:.2f} s"
            )

    def _first(self, kind: str, epoch: int) -> bool:
        if self._warned.get(kind) == epoch:
            return False
        self._warned[kind] = epoch
        return True


class CompileWatch:
    """Counts what torch compiles from interval to interval of training; the first one's is what it takes to start."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.started = False
        self._graphs, self._seconds = _compiled_so_far()

    def skip(self) -> None:
        """What was compiled since the last interval was for something else."""
        self._graphs, self._seconds = _compiled_so_far()

    def interval(self, first: int, last: int) -> None:
        """Look at the updates from `first` to `last`."""
        graphs, seconds = _compiled_so_far()
        new = graphs - self._graphs
        if new and not self.started:
            self.tell(f"torch.compile: {new} graphs in {seconds - self._seconds:.0f} s")
        elif new:
            self.tell(
                f"warning: torch compiled {new} graphs anew in updates {first} to {last}, "
                f"{seconds - self._seconds:.0f} s ({graphs} so far): an epoch's last, smaller batch does it once; "
                "TORCH_LOGS=recompiles shows others"
            )
        self.started = True
        self._graphs, self._seconds = graphs, seconds


def _compiled_so_far() -> tuple[int, float]:
    """Graphs that torch has compiled in this process, and the seconds that it took."""
    dynamo = torch._dynamo.utils
    return dynamo.counters["stats"]["unique_graphs"], dynamo.calculate_time_spent()["total_wall_time"]

"""Stops a run between two updates or inside a validation, on all ranks at the same place.

Before each update, and once more after an epoch's last, the ranks agree by an all-reduce of one int on the hosts. That
costs a fraction of a millisecond, waits for no GPU, and finds every rank with the same weights: none has begun the
update. A rank whose data fails or hangs takes part, too, because an update begins only when its batch is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from tlt.errors import UserError
from volo.cluster.distributed import max_over_ranks
from volo.cluster.preempt import Stopped, StopSignal
from volo.cluster.watchdog import Watchdog

T = TypeVar("T")
MicroBatch = tuple[bool, int, T]  # is the last of its update, images in the update, batch


class StopGuard:
    """Yields batches until the run has to stop, and reports progress to the watchdog.

    Attributes:
        waited: Seconds spent waiting for batches.
    """

    def __init__(self, stop: StopSignal, watchdog: Watchdog) -> None:
        self.stop, self.watchdog = stop, watchdog
        self.waited = 0.0

    def updates(self, micro_batches: Iterable[MicroBatch[T]]) -> Iterator[MicroBatch[T]]:
        """Yield training batches.

        Raises:
            Stopped: Between two updates, on all ranks: one of them received a signal, or its data failed (then that
                UserError is the cause, on that rank).
        """
        iterator, between = iter(micro_batches), True
        while True:
            item, failure = self._next(iterator, between)
            if between:
                self._agree(failure)
            if item is None:
                return
            between = item[0]
            yield item

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield validation batches; at the end the ranks agree whether each has had all of its batches.

        Raises:
            Stopped: As `updates`.
        """
        iterator, failure = iter(loader), None
        while True:
            item, failure = self._next(iterator, True)
            if item is None or self.stop.number is not None:
                break
            self.watchdog.at("validation")
            yield item
        self._agree(failure)

    def _next(self, iterator: Iterator[T], interruptible: bool) -> tuple[T | None, UserError | Stopped | None]:
        self.watchdog.at("data")
        began = time.perf_counter()
        try:
            with self.stop.interruptible(patient=True) if interruptible else nullcontext():
                return next(iterator, None), None
        except (UserError, Stopped) as error:
            if not interruptible:
                raise
            return None, error
        finally:
            self.waited += time.perf_counter() - began

    def _agree(self, failure: UserError | Stopped | None) -> None:
        own = self.stop.exit_code if failure is None else failure.exit_code
        self.watchdog.at("others")
        code = max_over_ranks(own)
        self.watchdog.at("step")
        if isinstance(failure, UserError):
            raise Stopped(failure.exit_code, str(failure)) from failure
        if code:
            self.stop.follow(code)
            raise Stopped(code, self.stop.reason)

"""train.py, in which one rank meets a fault in the second epoch: `python failing_rank.py FAULT RANK FLAGS`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.commands.conftest import UPDATES
from tlt.api import Loader
from tlt.data.batch import Batch
from tlt.errors import UserError
from volo import cli
from volo.train import loop as program

FAULTS: dict[str, Callable[[Batch], object]] = {  # from the second update of the epoch on
    "nan": lambda batch: batch.images.fill_(float("nan")),
    "hang": lambda batch: time.sleep(9999),
}


def inject(fault: str) -> None:
    """Let `fault` happen in this process."""
    if fault == "data at the end":
        _break_data(batches=2 * UPDATES)
        return
    watcher = program.batch_watcher

    def failing(*args: Any) -> Callable[[int, Batch], None]:
        watch = watcher(*args)

        def look(update: int, batch: Batch) -> None:
            watch(update, batch)
            if update > UPDATES:
                FAULTS[fault](batch)

        return look

    program.batch_watcher = failing


def _break_data(batches: int) -> None:
    epoch = Loader.epoch

    def breaking(loader: Loader, *position: int) -> Iterator[Any]:
        nonlocal batches
        for item in epoch(loader, *position):
            if not batches:
                break
            batches -= 1
            yield item
        if not batches:
            raise UserError("the storage is gone")

    Loader.epoch = breaking  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if sys.argv[2] == os.environ["RANK"]:
        inject(sys.argv[1])
    sys.exit(cli.run("train", sys.argv[3:]))

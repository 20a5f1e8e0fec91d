"""The two objects that every part of training gets: `Run`, what surrounds it, and `Training`, what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from tlt.api import Loader
from tlt.data.loader import EvalLoader
from volo.checkpoint.state import TrainState
from volo.cluster.distributed import World
from volo.cluster.stopping import StopGuard
from volo.config.args import TrainArgs
from volo.record.logger import Logger
from volo.record.metrics import Arithmetic
from volo.record.run_directory import RunLock
from volo.train.criterion import Criterion
from volo.train.precision import Precision
from volo.train.schedule import LrSchedule

if TYPE_CHECKING:
    from volo.train.distillation import Distillation


@dataclass(frozen=True)
class Run:
    """What surrounds the training.

    Attributes:
        args: Settled: by command line and recipe, then by the data, then by the checkpoint.
        guard: Yields batches until the run has to stop.
        directory: Of records and checkpoints.
        lock: Keeps other jobs out of the directory.
        resumed: The checkpoint that the run goes on from; None for a fresh start.
    """

    args: TrainArgs
    world: World
    logger: Logger
    guard: StopGuard
    directory: Path
    lock: RunLock
    resumed: Path | None = None


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready for the first step.

    Attributes:
        state: Model, optimizer, scaler, moving average and the position in the run.
        model: The module that the loop calls: the state's model or its working copy, possibly compiled or distributed.
        average: The module that validation calls for the moving average; None without a moving average.
        lr_formula: How the peak learning rate was computed, for the log.
        arithmetic: The arithmetic of a step; None where it can't be counted, and on ranks that write no records.
        distillation: What a teacher adds to the loss; None without one.
    """

    state: TrainState
    model: nn.Module
    average: nn.Module | None
    loader: Loader
    validation: EvalLoader
    criterion: Criterion
    precision: Precision
    schedule: LrSchedule
    lr_formula: str
    arithmetic: Arithmetic | None = None
    distillation: Distillation | None = None

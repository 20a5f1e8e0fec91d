"""Arms that take turns: what `benchmark.py train` and `infer` share, from the first batch to the table's rows."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tlt.errors import UserError
from volo.benchmarks.arms import OURS, Arm
from volo.benchmarks.peak_flops import measured_peak, shown_peak
from volo.benchmarks.phases import Phases
from volo.benchmarks.rounds import Timing, by_clocks, cpu_seconds
from volo.engine.compilation import compile_errors_told
from volo.engine.precision import compute_dtype


class Runner(Protocol):
    """What is timed of an arm."""

    phases: Phases

    def run(self, steps: int) -> int:
        """Do so many batches; returns how many images they had. `phases` has their parts."""

    def memory(self) -> dict[str, float]:
        """Bytes per image at a peak, by what the peak is of."""


class NoPeerError(UserError):
    """A peer that computes something else."""


@dataclass(frozen=True)
class Row:
    """An arm in the table. Times are seconds per image.

    Attributes:
        dtype: In which matrix products are computed.
        flops: Floating-point operations per image that the model takes, what is recomputed left out.
        start: Seconds of the batches before the first round, in which torch compiles.
        memory: Bytes per image at a peak, by what the peak is of.
        missing: Why the arm was not timed.
    """

    name: str
    dtype: torch.dtype
    flops: float = 0.0
    start: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    wall: Timing | None = None
    cpu: Timing | None = None
    parts: dict[str, float] = field(default_factory=dict)
    missing: str | None = None


@dataclass(frozen=True)
class Found:
    """All rows, ours first.

    Attributes:
        what: Was timed, in words.
        peaks: FLOP/s that the device reaches, by type, and `shown_peaks` the same in words.
    """

    device: str
    what: str
    rows: list[Row]
    peaks: dict[torch.dtype, float]
    shown_peaks: list[str]

    def row(self, name: str) -> Row:
        """The row of an arm."""
        return next(row for row in self.rows if row.name == name)

    def ratio(self, peer: str) -> float | None:
        """How many times as many images/s ours are; None where either was not timed."""
        ours, other = self.row(OURS).wall, self.row(peer).wall
        return other.median / ours.median if ours and other else None

    def utilisation(self, row: Row) -> float | None:
        """Model FLOPs utilisation: FLOPs of the model per second over the peak."""
        return row.flops / row.wall.median / self.peaks[row.dtype] if row.wall else None


def hold(
    args: Namespace,
    what: str,
    arms: Sequence[Arm],
    device: torch.device,
    make: Callable[[Arm], Runner],
    flops: Callable[[Arm], float],
) -> Found:
    """Make and warm up what is to be timed of each arm, measure its memory, and time all of them.

    Args:
        what: The work, in words.
        make: Raises NoPeerError where an arm would compute something else than the first.
        flops: Of an image, what is recomputed left out.

    Raises:
        UserError: The first arm can't run here. Others that can't are told in their row.
    """
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    for arm in arms:
        row = Row(arm.name, compute_dtype(arm.flags, device) or torch.float32, flops(arm))
        try:
            runner = make(arm)
            began = time.perf_counter()
            with compile_errors_told(arm.flags):
                runner.run(args.warm_up)
                runner.phases.take()  # waits for the device
            rows[arm.name] = replace(row, start=time.perf_counter() - began, memory=runner.memory())
            runners[arm.name] = runner
        except NoPeerError:
            raise
        except (RuntimeError, UserError) as error:  # out of memory is a RuntimeError
            if not rows:
                raise UserError(f"--model {args.model} can't be measured here: {reason_of(error)}") from error
            rows[arm.name] = replace(row, missing=reason_of(error))
    peaks = {dtype: measured_peak(device, dtype) for dtype in {row.dtype for row in rows.values()}}
    rows = take_turns(args, rows, runners)
    shown = [shown_peak(peak, device, dtype) for dtype, peak in peaks.items()]
    return Found(described(device), what, list(rows.values()), peaks, shown)


def described(device: torch.device) -> str:
    """The device in words."""
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s'[: threads > 1]}" if device.type == "cpu" else torch.cuda.get_device_name(device)


def take_turns(args: Namespace, rows: dict[str, Row], runners: dict[str, Runner]) -> dict[str, Row]:
    """Time all runners, round by round, and complete their rows."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in runners}

    def arm(name: str) -> Callable[[int], int]:
        def work(number: int) -> int:
            images = runners[name].run(args.steps)
            found = runners[name].phases.take()  # waits for the device
            parts[name].append({part: seconds / images for part, seconds in found.items()})
            return images

        return work

    clocks = {"wall": time.perf_counter, "cpu": cpu_seconds}
    found = by_clocks({name: arm(name) for name in runners}, args.rounds, clocks)
    timed = {
        name: replace(rows[name], wall=found["wall"][name], cpu=found["cpu"][name], parts=_medians(parts[name][1:]))
        for name in runners
    }
    return rows | timed


def reason_of(error: Exception) -> str:
    """The first line of what went wrong, in a few words."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(found[part] for found in rounds) for part in rounds[0]}

"""Arms that take turns: what `benchmark.py train` and `infer` share, from the first batch to the table's rows."""

from __future__ import annotations

import statistics
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.arms import OURS, Arm
from benchmarks.peak_flops import measured_peak, shown_peak
from benchmarks.phases import Runner
from benchmarks.profile import profile_of
from benchmarks.timing import Timing, by_clocks, cpu_seconds
from tlt.errors import UserError
from volo.train.compilation import compile_errors_told
from volo.train.precision import compute_dtype


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
        rounds: In turns; 0: the arms have not taken turns yet, and one round of each by itself is what there is.
        profile: Of ours (`benchmarks.profile`), empty where it was not asked for.
    """

    device: str
    what: str
    rows: list[Row]
    peaks: dict[torch.dtype, float]
    shown_peaks: list[str]
    rounds: int = 0
    profile: dict[str, Any] = field(default_factory=dict)

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
    tell: Callable[[Found], None],
) -> Found:
    """Make and warm up what is to be timed of each arm, measure its memory, time it by itself; then time all in turns.

    An arm that can't run here is told in its row.

    Args:
        what: The work, in words.
        make: Raises NoPeerError where an arm would compute something else than the first.
        flops: Of an image, what is recomputed left out.
        tell: Gets what has been found after each arm, and after the turns.

    Raises:
        UserError: No arm can run here.
    """
    types = {arm.name: compute_dtype(arm.flags, device) or torch.float32 for arm in arms}
    peaks = {dtype: measured_peak(device, dtype) for dtype in set(types.values())}
    shown = [shown_peak(peak, device, dtype) for dtype, peak in peaks.items()]
    found = Found(described(device), what, [], peaks, shown)
    runners: dict[str, Runner] = {}
    for arm in arms:
        row = Row(arm.name, types[arm.name], flops(arm))
        try:
            row, runners[arm.name] = _by_itself(args, arm, row, make)
            found.rows.append(row)
        except NoPeerError:
            raise
        except Exception as error:  # compilers raise their own kinds
            found.rows.append(replace(row, missing=reason_of(error)))
        tell(found)
    if not runners:
        raise UserError(f"--model {args.model} can't be measured here: {found.rows[0].missing}")
    found = replace(found, rows=take_turns(args.steps, args.rounds, found.rows, runners), rounds=args.rounds)
    if args.profile and OURS in runners:
        tell(found)
        found = replace(found, profile=profile_of(runners[OURS], device))
    return found


def _by_itself(args: Namespace, arm: Arm, row: Row, make: Callable[[Arm], Runner]) -> tuple[Row, Runner]:
    """Make an arm, warm it up, measure its memory and time one round, which stands should the turns never come."""
    runner = make(arm)
    began = time.perf_counter()
    with compile_errors_told(arm.flags):
        runner.run(args.warm_up)
        runner.phases.take()  # waits for the device
    row = replace(row, start=time.perf_counter() - began, memory=runner.memory())
    return take_turns(args.steps, 1, [row], {arm.name: runner})[0], runner


def described(device: torch.device) -> str:
    """The device in words."""
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s'[: threads > 1]}" if device.type == "cpu" else torch.cuda.get_device_name(device)


def take_turns(steps: int, rounds: int, rows: Sequence[Row], runners: dict[str, Runner]) -> list[Row]:
    """Time all runners, round by round, and complete their rows."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in runners}

    def arm(name: str) -> Callable[[int], int]:
        def work(number: int) -> int:
            images = runners[name].run(steps)
            found = runners[name].phases.take()  # waits for the device
            parts[name].append({part: seconds / images for part, seconds in found.items()})
            return images

        return work

    clocks = {"wall": time.perf_counter, "cpu": cpu_seconds}
    found = by_clocks({name: arm(name) for name in runners}, rounds, clocks)
    wall, cpu = found["wall"], found["cpu"]
    return [
        replace(row, wall=wall[row.name], cpu=cpu[row.name], parts=_medians(parts[row.name][1:]))
        if row.name in runners
        else row
        for row in rows
    ]


def reason_of(error: Exception) -> str:
    """What went wrong, in a few words; the traceback of what is no plain refusal goes to stderr."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RuntimeError | UserError):
        return (lines[0] if lines else type(error).__name__)[:160]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]  # Triton quotes its source first


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(found[part] for found in rounds) for part in rounds[0]}

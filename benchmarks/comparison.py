"""Time candidates in turns: what `benchmark.py train` and `infer` share, from the first batch to table and JSON."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.candidates import OURS, Candidate
from benchmarks.conditions import conditions, heading
from benchmarks.profile import lines as profile_lines
from benchmarks.profile import profile_of
from benchmarks.timing import Runner, Timing, by_clocks, cpu_seconds, seconds_of
from tlt.errors import UserError
from tlt.models.linear import linear
from volo.train.compilation import compile_errors_told
from volo.train.precision import compute_dtype

_SIDE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 6


@torch.no_grad()
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of a few products of square matrices, by torch's matmul and by the models'
    linear layers, which may use another library."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    layer = nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    ways: tuple[Callable[[], Tensor], ...] = (lambda: left @ right, lambda: linear(layer, left))
    return 2 * side**3 / min(seconds_of(way, device) for way in ways for _ in range(_REPEATS))


def shown_peak(peak: float, device: torch.device, dtype: torch.dtype) -> str:
    """Return the peak in words."""
    side, name = _SIDE[device.type], str(dtype).removeprefix("torch.")
    return f"{peak / 1e12:.2f} TFLOP/s, measured: product of two {side} x {side} matrices of {name}"


class NoPeerError(UserError):
    """A peer does not compute the same as ours."""


@dataclass(frozen=True)
class CandidateRow:
    """A candidate in the table. Times are seconds per image.

    Attributes:
        dtype: Type of the matrix products.
        flops: Floating-point operations of the model per image, without what is recomputed.
        start: Seconds of the warm-up batches, in which torch compiles.
        memory: Peak bytes per image, by the part of the work.
        missing: Why the candidate was not timed.
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
class Results:
    """The results of all candidates, ours first.

    Attributes:
        what: The work that was timed, in words.
        peaks: FLOP/s that the device reaches, by type; `shown_peaks` is the same in words.
        rounds: Rounds in turns; 0 while each candidate has only run one round by itself.
        profile: The profile of ours (`benchmarks.profile`), empty unless it was asked for.
    """

    device: str
    what: str
    rows: list[CandidateRow]
    peaks: dict[torch.dtype, float]
    shown_peaks: list[str]
    rounds: int = 0
    profile: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> CandidateRow:
        """Return the row of a candidate."""
        return next(row for row in self.rows if row.name == name)

    def ratio(self, peer: str) -> float | None:
        """Return images/s of ours over those of `peer`; None if either was not timed."""
        ours, other = self.row(OURS).wall, self.row(peer).wall
        return other.median / ours.median if ours and other else None

    def ratios(self, peer: str) -> tuple[float, float] | None:
        """Return the lowest and the highest ratio of two turns of one round; None without several rounds."""
        ours, other = self.row(OURS).wall, self.row(peer).wall
        if not ours or not other or len(ours.rounds) < 2:
            return None
        found = [theirs / own for own, theirs in zip(ours.rounds, other.rounds, strict=True)]
        return min(found), max(found)

    def utilisation(self, row: CandidateRow) -> float | None:
        """Return the model FLOPs utilisation: FLOPs of the model per second over the peak."""
        return row.flops / row.wall.median / self.peaks[row.dtype] if row.wall else None


def run_candidates(
    args: Namespace,
    what: str,
    candidates: Sequence[Candidate],
    device: torch.device,
    make: Callable[[Candidate], Runner],
    flops: Callable[[Candidate], float],
    tell: Callable[[Results], None],
) -> Results:
    """Build and warm up each candidate, measure its memory and time it by itself; then time all of them in turns.

    The row of a candidate that can't run here gives the reason.

    Args:
        what: The work, in words.
        make: Raises NoPeerError if a candidate would compute something else than the first.
        flops: Gives the operations of an image, without what is recomputed.
        tell: Is called with the results so far after each candidate and after the turns.

    Raises:
        UserError: No candidate can run here.
    """
    types = {candidate.name: compute_dtype(candidate.flags, device) or torch.float32 for candidate in candidates}
    peaks = {dtype: measured_peak(device, dtype) for dtype in set(types.values())}
    shown = [shown_peak(peak, device, dtype) for dtype, peak in peaks.items()]
    found = Results(described(device), what, [], peaks, shown)
    runners: dict[str, Runner] = {}
    for candidate in candidates:
        row = CandidateRow(candidate.name, types[candidate.name], flops(candidate))
        try:
            row, runners[candidate.name] = _by_itself(args, candidate, row, make)
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


def _by_itself(
    args: Namespace, candidate: Candidate, row: CandidateRow, make: Callable[[Candidate], Runner]
) -> tuple[CandidateRow, Runner]:
    """Build and warm up a candidate, measure its memory and time one round, which is reported until the turns end."""
    runner = make(candidate)
    began = time.perf_counter()
    with compile_errors_told(candidate.flags):
        runner.run(args.warm_up)
        runner.phases.take()  # waits for the device
    row = replace(row, start=time.perf_counter() - began, memory=runner.memory())
    return take_turns(args.steps, 1, [row], {candidate.name: runner})[0], runner


def described(device: torch.device) -> str:
    """Return the name of the device."""
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s'[: threads > 1]}" if device.type == "cpu" else torch.cuda.get_device_name(device)


def take_turns(steps: int, rounds: int, rows: Sequence[CandidateRow], runners: dict[str, Runner]) -> list[CandidateRow]:
    """Time all runners in turns and return the rows with their times."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in runners}

    def timed(name: str) -> Callable[[int], int]:
        def work(number: int) -> int:
            images = runners[name].run(steps)
            found = runners[name].phases.take()  # waits for the device
            parts[name].append({part: seconds / images for part, seconds in found.items()})
            return images

        return work

    clocks = {"wall": time.perf_counter, "cpu": cpu_seconds}
    found = by_clocks({name: timed(name) for name in runners}, rounds, clocks)
    wall, cpu = found["wall"], found["cpu"]
    return [
        replace(row, wall=wall[row.name], cpu=cpu[row.name], parts=_medians(parts[row.name][1:]))
        if row.name in runners
        else row
        for row in rows
    ]


def reason_of(error: Exception) -> str:
    """Return the error in a few words; print the traceback to stderr unless it is a UserError."""
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


_MIB = 2**20
_BUSY = 1.4  # a ratio that differs by more between rounds is not told


def show(args: Namespace, found: Results) -> str:
    """Return the table, or one line of JSON."""
    facts = as_json(args, found)
    if args.json:
        return json.dumps(conditions(args.command_line) | facts)
    return "\n".join([*heading(args.command_line), *table(facts)])


def tell(args: Namespace, found: Results) -> None:
    """With `--json` print one line with the results so far."""
    if args.json:
        print(show(args, found), flush=True)


def as_json(args: Namespace, found: Results) -> dict[str, Any]:
    """Return the case and the rows, ours first."""
    rows = [
        {
            "arm": row.name,
            "dtype": str(row.dtype).removeprefix("torch."),
            "images/s": 1 / row.wall.median if row.wall else None,
            "wall_seconds_per_image": asdict(row.wall) if row.wall else None,
            "cpu_seconds_per_image": asdict(row.cpu) if row.cpu else None,
            "ours/arm": found.ratio(row.name),
            "ours/arm_by_round": found.ratios(row.name),
            "start_seconds": row.start,
            "mfu": found.utilisation(row),
            "flops_per_image": row.flops,
            "peak_bytes_per_image": row.memory,
            "seconds_per_image_of": row.parts,
            "not_measured": row.missing,
        }
        for row in found.rows
    ]
    case = {name: getattr(args, name) for name in ("model", "batch_size", "steps", "warm_up")}
    case |= {"rounds": found.rounds, "what": found.what, "device": found.device, "peaks": found.shown_peaks}
    return case | {"arms": rows, "profile": found.profile}


def table(facts: Mapping[str, Any]) -> list[str]:
    """Return the result of `as_json` as lines of Markdown."""
    batch = facts["batch_size"]
    timed = next((row for row in facts["arms"] if not row["not_measured"]), facts["arms"][0])
    memory, parts = list(timed["peak_bytes_per_image"]), list(timed["seconds_per_image_of"])
    rounds = f"medians (lowest-highest) of {facts['rounds']} rounds in turns"
    columns = ["arm", "images/s", "ms a batch", "ours is", "CPU ms an image", "MFU", "start, s"]
    columns += [f"MiB an image, {name}" for name in memory] + [f"{name}, ms" for name in parts]
    lines = [
        f"{facts['model']}, {facts['what']}, {batch} images a batch on {facts['device']}; "
        f"{rounds if facts['rounds'] else 'one round of each arm by itself'}, {facts['steps']} batches "
        f"each, after {facts['warm_up']}; MFU against {'; '.join(facts['peaks'])}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in facts["arms"]:
        cells = _cells(row, 1e3 * batch, memory, parts)
        lines.append(f"| {' | '.join([*cells, *[''] * (len(columns) - len(cells))])} |")
    return lines + (profile_lines(facts["profile"]) if facts["profile"] else [])


def _cells(row: Mapping[str, Any], scale: float, memory: list[str], parts: list[str]) -> list[str]:
    if row["not_measured"]:
        return [row["arm"], f"not measured: {row['not_measured']}"]
    wall = row["wall_seconds_per_image"]
    return [
        row["arm"],
        f"{row['images/s']:.4g}",
        f"{wall['median'] * scale:.1f} ({wall['low'] * scale:.1f}-{wall['high'] * scale:.1f})",
        _shown_ratio(row),
        f"{row['cpu_seconds_per_image']['median'] * 1e3:.1f}",
        f"{row['mfu']:.1%}",
        f"{row['start_seconds']:.1f}",
        *(f"{row['peak_bytes_per_image'][name] / _MIB:.1f}" for name in memory),
        *(f"{row['seconds_per_image_of'][name] * scale:.1f}" for name in parts),
    ]


def _shown_ratio(row: Mapping[str, Any]) -> str:
    """Return the ratio with its range over the rounds, or that other work on the machine makes it say nothing."""
    if row["arm"] == OURS or row["ours/arm"] is None:
        return ""
    if row["ours/arm_by_round"] is None:
        return f"{row['ours/arm']:.2f}x"
    low, high = row["ours/arm_by_round"]
    told = "machine busy" if high > _BUSY * low else f"{row['ours/arm']:.2f}x"
    return f"{told} ({low:.2f}-{high:.2f})"

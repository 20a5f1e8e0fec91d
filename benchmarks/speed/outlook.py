"""`benchmark.py outlook`: outlook attention, each kernel that this project has against timm's unfold and fold.

What is timed is what lies between the projections, values and logits in, mixed values out; with `--layer`, the whole
layer. timm's arm is its own layer, of which only the projections are taken out. Before anything is timed, output and
gradients of every arm are compared with the reference kernel's in float64. bfloat16 and float16 are autocast's.

The floor is the time of a copy of as many bytes as have to move: values, logits and the output's gradient read, the
output and both gradients written, values and logits read again in the backward pass.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import described, reason_of
from benchmarks.conditions import conditions, heading
from benchmarks.phases import synchronize
from benchmarks.speed.outlook_arms import BOTH, FORWARD, PASSES, TIMM, Arm, Case, error_of, inputs, modules, truth
from benchmarks.timing import Timing, Work, by_clocks, cpu_seconds
from tlt.errors import UserError
from volo.cluster.distributed import choose_device

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of norms
_WRONG = " is no peer: it is off by"
_COPIED_BYTES = 2**27
_MS = 1e3


@dataclass(frozen=True)
class Row:
    """An arm in the table. Timings are seconds by pass; `error` is the largest of output and gradients, relative."""

    name: str
    wall: Mapping[str, Timing] | None = None
    cpu: Mapping[str, Timing] | None = None
    error: float | None = None
    missing: str | None = None


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    device = choose_device(args.device, 0)
    cases = [Case.parse(shape, args.batch_size, dtype, args.layer) for shape in args.shapes for dtype in args.dtypes]
    bandwidth = copy_bandwidth(device)
    facts = {"device": described(device), "copy_bytes_per_s": bandwidth}
    found: list[dict[str, Any]] = []
    for case in cases:
        told: dict[str, Any] = {}
        for rounds, rows in measure(args, case, device):
            told = as_json(case, rows, bandwidth) | {"rounds": rounds}
            if args.json:
                print(json.dumps(conditions(args.command_line) | facts | {"cases": [*found, told]}), flush=True)
        found.append(told)
    if not args.json:
        print("\n".join([*heading(args.command_line), *table(facts | {"cases": found})]), flush=True)
    wrong = [arm["not_measured"] for case in found for arm in case["arms"] if _WRONG in (arm["not_measured"] or "")]
    if wrong:
        raise UserError(wrong[0])
    return 0


def measure(args: Namespace, case: Case, device: torch.device) -> Iterator[tuple[int, list[Row]]]:
    """Compare all arms of a case and time each by itself, then all in turns: rounds in turns and rows after each."""
    torch.compiler.reset()  # else the shapes of earlier cases count among the compilations that are allowed
    rows: list[Row] = []
    arms: dict[str, Arm] = {}
    expected = truth(case, device)
    for name, build in modules(case, device, compiled=not args.no_compile).items():
        try:
            arm = Arm(build(), *inputs(case, device), case.dtype)
            error = error_of(arm.results(), expected)
            if error > _TOLERANCE[case.dtype]:
                raise UserError(f"{name}{_WRONG} {error:.1e}")
            rows.append(_timed(args, 1, [Row(name, error=error)], {name: arm}, device)[0])
            arms[name] = arm
        except Exception as problem:  # a kernel that doesn't fit; compilers raise their own kinds
            rows.append(Row(name, missing=reason_of(problem)))
        yield 0, rows
    yield args.rounds, _timed(args, args.rounds, rows, arms, device)


def _timed(
    args: Namespace, rounds: int, rows: Sequence[Row], arms: Mapping[str, Arm], device: torch.device
) -> list[Row]:
    works: dict[tuple[str, str], Work] = {}
    for name, arm in arms.items():
        works[name, FORWARD] = _repeated(torch.no_grad()(arm.forward), args.calls, device)
        works[name, BOTH] = _repeated(arm.both, args.calls, device)
    found = by_clocks(works, rounds, {"wall": time.perf_counter, "cpu": cpu_seconds})

    def timed(row: Row) -> Row:
        wall, cpu = ({part: found[clock][row.name, part] for part in PASSES} for clock in ("wall", "cpu"))
        return replace(row, wall=wall, cpu=cpu)

    return [timed(row) if row.name in arms else row for row in rows]


def _repeated(work: Callable[[], Tensor], calls: int, device: torch.device) -> Work:
    def repeated(_: int) -> int:
        for _ in range(calls):
            work()
        synchronize(device)
        return calls

    return repeated


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of much reads and writes, the quickest of a few."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    quickest = float("inf")
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        quickest = min(quickest, time.perf_counter() - began)
    return 2 * _COPIED_BYTES / quickest


def as_json(case: Case, rows: list[Row], bandwidth: float) -> dict[str, Any]:
    """The case and its arms. `timm/arm` tells how many times as fast as timm's an arm is, by pass."""
    peer = next((row for row in rows if row.name == TIMM), Row(TIMM))
    return {
        "shape": [case.images, case.height, case.width, case.channels],
        "heads": case.heads,
        "dtype": str(case.dtype).removeprefix("torch."),
        "layer": case.layer,
        "floor_bytes": {name: case.floor_bytes(name) for name in PASSES},
        "floor_seconds": {name: case.floor_bytes(name) / bandwidth for name in PASSES},
        "arms": [_arm_json(row, peer) for row in rows],
    }


def _arm_json(row: Row, peer: Row) -> dict[str, Any]:
    if row.wall is None or row.cpu is None:
        return {"arm": row.name, "not_measured": row.missing}
    return {
        "arm": row.name,
        "wall_seconds": {name: asdict(row.wall[name]) for name in PASSES},
        "cpu_seconds": {name: asdict(row.cpu[name]) for name in PASSES},
        "timm/arm": {name: peer.wall[name].median / row.wall[name].median for name in PASSES} if peer.wall else None,
        "error": row.error,
        "not_measured": None,
    }


def table(facts: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown for what `--json` prints."""
    lines = [
        f"{facts['device']}, {facts['copy_bytes_per_s'] / 1e9:.1f} GB/s in a large copy; x: times as fast as timm; "
        "error: the largest of output and gradients against float64, relative",
    ]
    for case in facts["cases"]:
        lines += ["", *_case_table(case)]
    return lines


def _case_table(case: Mapping[str, Any]) -> Iterator[str]:
    what = "the layer with its projections" if case["layer"] else "between the projections"
    floors = ", ".join(
        f"{name} {case['floor_bytes'][name] / 1e6:.1f} MB, {case['floor_seconds'][name] * _MS:.3g} ms"
        for name in PASSES
    )
    turns = f"medians (lowest-highest) of {case['rounds']} rounds in turns"
    yield (
        f"{' x '.join(map(str, case['shape']))}, {case['heads']} heads, {case['dtype']}, {what}; "
        f"{turns if case['rounds'] else 'one round of each arm by itself'}; floor: {floors}"
    )
    yield ""
    yield f"| arm | {' | '.join(f'{name}, ms | x' for name in PASSES)} | CPU ms | share of the floor | error |"
    yield "|---" * 8 + "|"
    for arm in case["arms"]:
        yield f"| {arm['arm']} | {_cells(case, arm)} |"


def _cells(case: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    if arm["not_measured"] is not None:
        return f"not measured: {arm['not_measured']}" + " |" * 6
    cells = []
    for name in PASSES:
        wall = arm["wall_seconds"][name]
        ratio = arm["timm/arm"] and f"{arm['timm/arm'][name]:.2f}x"
        cells += [f"{wall['median'] * _MS:.3g} ({wall['low'] * _MS:.3g}-{wall['high'] * _MS:.3g})", ratio or ""]
    share = case["floor_seconds"][BOTH] / arm["wall_seconds"][BOTH]["median"]
    return " | ".join(
        [*cells, f"{arm['cpu_seconds'][BOTH]['median'] * _MS:.3g}", f"{share:.1%}", f"{arm['error']:.1e}"]
    )

"""What `benchmark.py data` found, as Markdown or JSON, with the machine and versions that the numbers depend on."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.conditions import conditions, heading
from benchmarks.feed.data_memory import PACKED, Measured
from benchmarks.timing import Timing

CROPS, BATCHES = "crops", "batches"
TIMM = "timm"


class Arm(NamedTuple):
    """A loader, and how much of its work."""

    loader: str
    part: str


@dataclass
class Timed:
    """What was timed with one augmentation and number of workers.

    Attributes:
        wall, cpu: Seconds per image.
        missing: Why a backend was not measured.
    """

    recipe: str
    workers: int
    wall: dict[Arm, Timing]
    cpu: dict[Arm, Timing]
    missing: dict[str, str] = field(default_factory=dict)

    def ratio(self, arm: Arm) -> float:
        """CPU time of timm's loader over this one's, of the same part."""
        return self.cpu[Arm(TIMM, arm.part)].median / self.cpu[arm].median


def show_times(args: Namespace, parts: Sequence[Timed], images: str, device: torch.device) -> str:
    """All that was timed, with `images` in words."""
    if args.json:
        found = {"images": images, "size": args.img_size, "batch_size": args.batch_size}
        return json.dumps(
            conditions(args.command_line) | found | {"device": str(device), "parts": [_as_json(p) for p in parts]}
        )
    lines = [
        *heading(args.command_line),
        f"{images}, in the page cache, to {args.img_size} x {args.img_size} in batches of {args.batch_size}; device "
        f"{device}. Medians of {args.rounds} rounds in turns; one thread in the main process and in each worker. "
        "Crops: uint8, with ours their plans and labels of an archive. Batches: warped, coloured, normalised, erased "
        "on the device. x timm: CPU time of timm's `create_loader` over this one's, same part.",
    ]
    for part in parts:
        lines += ["", f"### {part.recipe}, {_who(part.workers)}", "", *_rows(part)]
    return "\n".join(lines)


def show_memory(args: Namespace, found: Sequence[Measured]) -> str:
    """All memory that was measured."""
    if args.json:
        rows = [asdict(row) | {"anonymous_per_worker": _each(row, found)} for row in found]
        return json.dumps(conditions(args.command_line) | {"memory": rows})
    lines = [
        *heading(args.command_line),
        "Memory in MB of the main process and its data workers together, after loading from all over a data set of so "
        "many made-up images with a label archive (smaps_rollup). PSS counts a page that n processes share 1/n in each "
        "one, so that a sum has it once; files are libraries, which other programs share too, and labels.",
        "",
        "| images | names | workers | PSS | of that, no file's | private | no file's, per worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        each = _each(row, found)
        sums = " | ".join(f"{size / 1e6:.0f}" for size in (row.pss, row.anonymous, row.private))
        last = "" if each is None else f"{each / 1e6:.1f}"
        lines.append(f"| {row.entries:,} | {row.names} | {row.workers} | {sums} | {last} |")
    return "\n".join(lines)


def _each(row: Measured, found: Sequence[Measured]) -> float | None:
    """Bytes that a worker adds to the anonymous memory of the main process alone."""
    alone = {other.entries: other.anonymous for other in found if not other.workers}
    return (row.anonymous - alone[row.entries]) / row.workers if row.workers and row.names == PACKED else None


def _who(workers: int) -> str:
    return f"{workers} workers" if workers else "one process"


def _arms(part: Timed) -> list[Arm]:
    """Crops first."""
    return [arm for name in (CROPS, BATCHES) for arm in part.wall if arm.part == name]


def _rows(part: Timed) -> Iterator[str]:
    yield "| loader | part | images/s | CPU ms per image | lowest-highest | x timm |"
    yield "|---|---|---|---|---|---|"
    for arm in _arms(part):
        cpu = part.cpu[arm]
        yield (
            f"| {arm.loader} | {arm.part} | {1 / part.wall[arm].median:.0f} | {cpu.median * 1e3:.2f} | "
            f"{cpu.low * 1e3:.2f}-{cpu.high * 1e3:.2f} | {part.ratio(arm):.2f} |"
        )
    for name, reason in part.missing.items():
        yield f"| {name} | not measured: {reason} | | | | |"


def _as_json(part: Timed) -> dict[str, Any]:
    rows = [
        {
            **arm._asdict(),
            "images/s": 1 / part.wall[arm].median,
            "wall_seconds": asdict(part.wall[arm]),
            "cpu_seconds": asdict(part.cpu[arm]),
            "timm_cpu/cpu": part.ratio(arm),
        }
        for arm in _arms(part)
    ]
    return {"recipe": part.recipe, "workers": part.workers, "loaders": rows, "not_measured": part.missing}

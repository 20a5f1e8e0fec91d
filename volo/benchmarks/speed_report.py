"""What `benchmark.py train` and `infer` found, as Markdown or JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from volo.benchmarks.arms import OURS
from volo.benchmarks.conditions import conditions, heading
from volo.benchmarks.contest import Found, Row

_MIB = 2**20


def show(args: Namespace, found: Found) -> str:
    """The table, or one line of JSON."""
    if args.json:
        return json.dumps(conditions(args.command_line) | as_json(args, found))
    return "\n".join([*heading(args.command_line), *table(args, found)])


def as_json(args: Namespace, found: Found) -> dict[str, Any]:
    """The case and the rows."""
    rows = [
        {
            "arm": row.name,
            "dtype": str(row.dtype).removeprefix("torch."),
            "images/s": 1 / row.wall.median if row.wall else None,
            "wall_seconds_per_image": asdict(row.wall) if row.wall else None,
            "cpu_seconds_per_image": asdict(row.cpu) if row.cpu else None,
            "ours/arm": found.ratio(row.name),
            "mfu": found.utilisation(row),
            "flops_per_image": row.flops,
            "peak_bytes_per_image": row.memory,
            "seconds_per_image_of": row.parts,
            "not_measured": row.missing,
        }
        for row in found.rows
    ]
    case = {"model": args.model, "img_size": args.img_size, "batch_size": args.batch_size, "rounds": args.rounds}
    return case | {"what": found.what, "device": found.device, "peaks": found.shown_peaks, "arms": rows}


def table(args: Namespace, found: Found) -> list[str]:
    """Lines of Markdown."""
    memory, parts = list(found.row(OURS).memory), list(found.row(OURS).parts)
    columns = ["arm", "images/s", "ms a batch", "ours is", "CPU ms an image", "MFU"]
    columns += [f"MiB an image, {name}" for name in memory] + [f"{name}, ms" for name in parts]
    lines = [
        f"{args.model}, {found.what}, {args.batch_size} images at {args.img_size or 'its own'} px on {found.device}; "
        f"medians (lowest-highest) of {args.rounds} rounds in turns, {args.steps} batches each, after {args.warm_up}; "
        f"MFU against {'; '.join(found.shown_peaks)}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in found.rows:
        cells = _cells(args, found, row, memory, parts)
        lines.append(f"| {' | '.join([*cells, *[''] * (len(columns) - len(cells))])} |")
    return lines


def _cells(args: Namespace, found: Found, row: Row, memory: list[str], parts: list[str]) -> list[str]:
    if row.wall is None or row.cpu is None:
        return [row.name, f"not measured: {row.missing}"]
    ratio, used, batch = found.ratio(row.name), found.utilisation(row), 1e3 * args.batch_size
    return [
        row.name,
        f"{1 / row.wall.median:.4g}",
        f"{row.wall.median * batch:.1f} ({row.wall.spread(batch)})",
        "" if ratio is None or row.name == OURS else f"{ratio:.2f}x",
        f"{row.cpu.median * 1e3:.1f}",
        "" if used is None else f"{used:.1%}",
        *(f"{row.memory[name] / _MIB:.1f}" for name in memory),
        *(f"{row.parts[name] * batch:.1f}" for name in parts),
    ]

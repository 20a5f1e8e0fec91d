"""What `benchmark.py train` and `infer` found, as JSON and as Markdown."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.arms import OURS
from benchmarks.comparison import Found
from benchmarks.conditions import conditions, heading
from benchmarks.profile import lines as profile_lines

_MIB = 2**20


def show(args: Namespace, found: Found) -> str:
    """The table, or one line of JSON."""
    facts = as_json(args, found)
    if args.json:
        return json.dumps(conditions(args.command_line) | facts)
    return "\n".join([*heading(args.command_line), *table(facts)])


def tell(args: Namespace, found: Found) -> None:
    """With `--json` one line of what there is so far."""
    if args.json:
        print(show(args, found), flush=True)


def as_json(args: Namespace, found: Found) -> dict[str, Any]:
    """The case and the rows, ours first."""
    rows = [
        {
            "arm": row.name,
            "dtype": str(row.dtype).removeprefix("torch."),
            "images/s": 1 / row.wall.median if row.wall else None,
            "wall_seconds_per_image": asdict(row.wall) if row.wall else None,
            "cpu_seconds_per_image": asdict(row.cpu) if row.cpu else None,
            "ours/arm": found.ratio(row.name),
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
    """Lines of Markdown for what `as_json` returned."""
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
        "" if row["arm"] == OURS or row["ours/arm"] is None else f"{row['ours/arm']:.2f}x",
        f"{row['cpu_seconds_per_image']['median'] * 1e3:.1f}",
        f"{row['mfu']:.1%}",
        f"{row['start_seconds']:.1f}",
        *(f"{row['peak_bytes_per_image'][name] / _MIB:.1f}" for name in memory),
        *(f"{row['seconds_per_image_of'][name] * scale:.1f}" for name in parts),
    ]

"""`benchmark.py data`: every loader backend and timm's loader over the same images, in one run.

    crops       uint8 crops with their plans, and labels out of an archive: what loading is, without the device's part
    batches     the same, then on the device what training does there: warp, colours, normalisation, erasing
    timm        `timm.data.create_loader` without labels. Its prefetching loader has the same two parts: crops, which
                its workers augment, and batches, which are normalised and erased on the device. Without prefetcher
                workers do all of it.

Loaders take turns, so that their ratios hold on a machine with other work too. A ratio is of CPU time, of all
threads and of all data workers, and compares equal parts: crops with crops, batches with batches.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import conditions, heading
from benchmarks.feed.data_memory import PACKED, LoadingMemory, memory
from benchmarks.feed.image_sizes import show_sizes
from benchmarks.feed.images import choose_images, described, make_labels
from benchmarks.feed.loaders import BATCHES, CROPS, LoaderCase, LoaderPart, Timed, chosen, measure, recipes
from tlt.errors import UserError
from volo.cluster.distributed import choose_device


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.entries:
        print(show_memory(args, memory(args.entries)), flush=True)
        return 0
    if args.images < args.batch_size and not args.sizes:
        raise UserError(f"--images {args.images} are fewer than one --batch-size {args.batch_size}")
    device, threads = choose_device(args.device, 0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if args.sizes:
            for line in show_sizes(args, device):
                print(line, flush=True)
            return 0
        with tempfile.TemporaryDirectory(prefix="benchmark-data-") as root:
            folder = choose_images(args, Path(root))
            labels = make_labels(Path(root) / "labels", folder)
            cases = [
                (name, LoaderCase(folder, labels, config, args.batch_size, workers, device))
                for name, config in recipes(args.img_size, args.aa).items()
                for workers in dict.fromkeys((0, args.workers))
            ]
            parts = [measure(name, case, chosen(args.backend), args.rounds) for name, case in cases]
            print(show_times(args, parts, described(folder), device), flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def show_times(args: Namespace, parts: Sequence[Timed], images: str, device: torch.device) -> str:
    """Return the table or JSON of the times; `images` describes the images in words."""
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


def show_memory(args: Namespace, found: Sequence[LoadingMemory]) -> str:
    """Return the table or JSON of the measured memory."""
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


def _each(row: LoadingMemory, found: Sequence[LoadingMemory]) -> float | None:
    """Return the bytes that each worker adds to the anonymous memory of the main process."""
    alone = {other.entries: other.anonymous for other in found if not other.workers}
    return (row.anonymous - alone[row.entries]) / row.workers if row.workers and row.names == PACKED else None


def _who(workers: int) -> str:
    return f"{workers} workers" if workers else "one process"


def _crops_first(part: Timed) -> list[LoaderPart]:
    return [loader for name in (CROPS, BATCHES) for loader in part.wall if loader.part == name]


def _rows(part: Timed) -> Iterator[str]:
    yield "| loader | part | images/s | CPU ms per image | lowest-highest | x timm |"
    yield "|---|---|---|---|---|---|"
    for loader in _crops_first(part):
        cpu = part.cpu[loader]
        yield (
            f"| {loader.loader} | {loader.part} | {1 / part.wall[loader].median:.0f} | {cpu.median * 1e3:.2f} | "
            f"{cpu.low * 1e3:.2f}-{cpu.high * 1e3:.2f} | {part.ratio(loader):.2f} |"
        )
    for name, reason in part.missing.items():
        yield f"| {name} | not measured: {reason} | | | | |"


def _as_json(part: Timed) -> dict[str, Any]:
    rows = [
        {
            **loader._asdict(),
            "images/s": 1 / part.wall[loader].median,
            "wall_seconds": asdict(part.wall[loader]),
            "cpu_seconds": asdict(part.cpu[loader]),
            "timm_cpu/cpu": part.ratio(loader),
        }
        for loader in _crops_first(part)
    ]
    return {"recipe": part.recipe, "workers": part.workers, "loaders": rows, "not_measured": part.missing}

"""`benchmark.py data --sizes`: how many images a second are loaded from square JPEG files of each size.

Crops of timm's loader and of ours, in one process and on one thread, from warm files. A training crop needs a small
part of a large image, but a JPEG file has to be decoded whole, so the cost of an image is that of its pixels.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image

from benchmarks.conditions import conditions, heading
from benchmarks.feed.images import choose_images, make_labels
from benchmarks.feed.loaders import CROP_AND_FLIP, CROPS, TIMM, LoaderCase, chosen, measure, recipes
from benchmarks.timing import Timing

_MOST_PIXELS = 2**31  # of all images of a size together


@dataclass
class SizeTimes:
    """Seconds of CPU time per image of `side` x `side` pixels, by loader; the reason of those that are missing."""

    side: int
    images: int
    megabytes: float  # a file
    seconds: dict[str, Timing]
    missing: dict[str, str]


def measure_sizes(args: Namespace, device: torch.device) -> Iterator[SizeTimes]:
    """Make images of each of `args.sizes`, and measure the loaders on them."""
    for side in args.sizes:
        count = max(1, min(args.images, _MOST_PIXELS // side**2))
        with (
            tempfile.TemporaryDirectory(prefix="benchmark-data-") as root,
            patch.object(Image, "MAX_IMAGE_PIXELS", None),
        ):
            made = Namespace(data_dir="", images=count, image_size=[side, side])
            folder = choose_images(made, Path(root))
            labels = make_labels(Path(root) / "labels", folder)
            config = recipes(args.img_size, "none")[CROP_AND_FLIP]
            case = LoaderCase(folder, labels, config, min(args.batch_size, count), 0, device)
            backends = [name for name in chosen(args.backend) if name != "synthetic"]  # it decodes nothing
            found = measure(CROP_AND_FLIP, case, backends, args.rounds, (CROPS,))
            size = sum(os.path.getsize(folder.path(index)) for index in range(count)) / count
            yield SizeTimes(
                side, count, size / 1e6, {each.loader: found.cpu[each] for each in found.cpu}, found.missing
            )


def show_sizes(args: Namespace, device: torch.device) -> Iterator[str]:
    """Return the lines of the table, each when it is measured, or the JSON."""
    if args.json:
        rows = [asdict(row) for row in measure_sizes(args, device)]
        yield json.dumps(conditions(args.command_line) | {"sizes": rows})
        return
    yield from heading(args.command_line)
    yield (
        f"Crops of {args.img_size} x {args.img_size} px, one process, one thread, files in the page cache; medians of "
        f"{args.rounds} rounds in turns. x timm: CPU time of timm's loader over this one's."
    )
    yield "\n| image | MB a file | loader | images per s of CPU | CPU ms per image | lowest-highest | x timm |"
    yield "|---|---|---|---|---|---|---|"
    for row in measure_sizes(args, device):
        image = f"{row.side} x {row.side}"
        for name, cpu in row.seconds.items():
            yield (
                f"| {image} | {row.megabytes:.2f} | {name} | {1 / cpu.median:.3g} | {_ms(cpu.median)} | "
                f"{_ms(cpu.low)}-{_ms(cpu.high)} | {row.seconds[TIMM].median / cpu.median:.2f} |"
            )
        for name, reason in row.missing.items():
            yield f"| {image} | | {name} | not measured: {reason} | | | |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{2 if seconds < 0.1 else 0}f}"

"""`benchmark.py alignment`: the distance between the place that a token shows and that of its label, by operation.

Images and maps that encode positions go as files through the training loader, the device stage and the target maker
(`benchmarks.feed.position_code`), once as this project does it and once under `--compat upstream`.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.feed import families
from benchmarks.feed.position_code import (
    Comparison,
    Size,
    compare,
    grid_points,
    position_classes,
    position_map,
    read_images,
)
from benchmarks.feed.position_data import GEOMETRIC, GeometryOnly, load_batch, write_images, write_maps
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.labels.store import open_labels
from tlt.targets import make_targets
from tlt.upstream.behaviour import target_maker
from tlt.upstream.rows import ROWS

OPERATIONS: dict[str, dict[str, Any]] = {
    "crop": {},
    "horizontal flip": {"hflip": 1.0},
    "vertical flip": {"vflip": 1.0},
    **{name: {"operations": (name,)} for name in GEOMETRIC},
    "everything": {"hflip": 0.5, "vflip": 0.5, "operations": GEOMETRIC, "layers": 2},
    "no augmentation": {"no_aug": True},
}
PATCH = 16
# order of augmentation, rows of --compat
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours": ("timm", ()),
    "ours, published order": ("published", ()),
    "published": ("published", tuple(ROWS)),
    "published no-label-crop": ("published", tuple(row for row in ROWS if row != "label-crop")),
}


@dataclass(frozen=True)
class AlignmentRow:
    """Mean and largest distance in output pixels over the tokens that show only image, and the share of these tokens
    that has no label for half of its content or more."""

    mean: float
    largest: float
    lost: float


@dataclass(frozen=True)
class Files:
    """Images of one size with their maps."""

    shots: list[ImageFolder]
    tree: Path
    size: Size
    cells: Size

    @classmethod
    def write(cls, root: Path, size: Size, cells: Size, count: int, shots: int) -> Files:
        folders = write_images(root / "images", [size], count, shots)
        write_maps(root / "labels", folders[0].paths, position_map(*cells), position_classes(*cells))
        return cls(folders, root / "labels", size, cells)

    def compare(self, config: GeometryOnly, grid: Size, area: str, rows: Collection[str]) -> Comparison:
        """Compare the places that the augmented images show with those of their targets."""
        classes = position_classes(*self.cells)
        labels = open_labels(self.tree, self.shots[0].paths, area, classes)
        images, batch = load_batch(self.shots, labels, config, rows=tuple(rows))
        make = target_maker(rows, make_targets)
        targets = make(batch.labels, batch.affine, batch.visible, batch.classes, grid, classes, 0.0)
        source = torch.tensor([self.size]).expand(batch.size, 2).double()
        spare = (1 - source.amin(1, keepdim=True) / source) / 2 * (area == "center")
        assert targets.tokens is not None
        areas = torch.cat([spare, 1 - spare], 1)
        return compare(read_images(images), targets.tokens.dense(classes), grid, self.cells, areas, source)


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.families is not None:
        families.run(args)
        return 0
    size = (args.size[0], args.size[1])
    if any(side % PATCH for side in size):
        raise UserError(f"--size {size[0]} {size[1]}: tokens are {PATCH} x {PATCH} pixels, give multiples of {PATCH}")
    found, overlaps = {}, {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="alignment-") as folder:
            found[shape] = errors(Path(folder), sides(shape), size, tuple(args.map_size), args.area, args.images)
        with tempfile.TemporaryDirectory(prefix="alignment-") as folder:
            width, height = sides(shape)
            small = max(1, round(width * 112 / max(width, height))), max(1, round(height * 112 / max(width, height)))
            overlaps[shape] = {
                "ours": window_overlap(Path(folder) / "ours", small, args.crops, ()),
                "published": window_overlap(Path(folder) / "published", small, args.crops, ("label-crop",)),
            }
    print(_json(found, overlaps) if args.json else _table(args, found, overlaps), flush=True)
    return 0


def sides(shape: str) -> Size:
    """Parse `500x375` as (500, 375). Raises UserError for any other text."""
    try:
        width, height = map(int, shape.split("x"))
    except ValueError:
        width = height = 0
    if min(width, height) < 32:
        raise UserError(f"--shapes {shape}: give WIDTHxHEIGHT in pixels, 32 or more, such as 500x375")
    return width, height


def errors(
    root: Path, shape: Size, size: Size, cells: Size, area: str, count: int
) -> dict[str, dict[str, AlignmentRow]]:
    """Return operation -> way -> error for `count` images of one shape. Raises UserError if no token is comparable."""
    files = Files.write(root, shape, cells, count, shots=4)
    grid = size[0] // PATCH, size[1] // PATCH
    found: dict[str, dict[str, AlignmentRow]] = {}
    for name, settings in OPERATIONS.items():
        found[name] = {}
        for way, (order, rows) in WAYS.items():
            config = GeometryOnly(size, **({"interpolation": "bilinear", "aug_order": order} | settings))
            found[name][way] = _row(files.compare(config, grid, area, rows))
    return found


def _row(compared: Comparison) -> AlignmentRow:
    lost = compared.told < 0.5
    distance = compared.output_pixels_by_cell()[compared.ramp & ~lost]
    if not len(distance):
        raise UserError("no token shows image alone inside the map: give more --images")
    return AlignmentRow(float(distance.mean()), float(distance.max()), float(lost[compared.ramp].double().mean()))


def window_overlap(root: Path, shape: Size, count: int, rows: Collection[str]) -> float:
    """Return the mean, over random resized crops, of the intersection over union of the part of the image that is shown
    and the part that the labels of the tokens describe."""
    files = Files.write(root, shape, (10, 10), count, shots=1)
    grid = (14, 14)
    compared = files.compare(GeometryOnly((56, 56), interpolation="bilinear"), grid, "full", rows)
    centres = grid_points(grid)
    named = compared.shown.places(centres) + compared.ramp_error
    ones = torch.ones(len(centres), 1, dtype=centres.dtype)
    fit = torch.linalg.lstsq(torch.cat([centres, ones], 1).expand(len(named), -1, -1), named).solution.mT  # (B, 2, 3)
    return float(_overlap(_box(compared.shown.affine), _box(fit)).mean())


def _box(affine: Tensor) -> Tensor:
    """Return the images (B, 4) x0, y0, x1, y1 of the unit square under maps (B, 2, 3) without rotation."""
    start, extent = affine[:, :, 2], affine[:, :, :2].diagonal(dim1=1, dim2=2)
    return torch.cat([start, start + extent], 1)


def _overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return the (B,) intersection over union of boxes (B, 4)."""
    low, high = torch.maximum(first, second)[:, :2], torch.minimum(first, second)[:, 2:]
    common = (high - low).clamp(min=0).prod(1)
    return common / (sum((box[:, 2:] - box[:, :2]).prod(1) for box in (first, second)) - common)


def _json(found: dict[str, dict[str, dict[str, AlignmentRow]]], overlaps: dict[str, dict[str, float]]) -> str:
    rows = {
        shape: {name: {way: asdict(row) for way, row in ways.items()} for name, ways in table.items()}
        for shape, table in found.items()
    }
    return json.dumps({"pixels": rows, "overlap": overlaps})


def _table(
    args: Namespace, found: dict[str, dict[str, dict[str, AlignmentRow]]], overlaps: dict[str, dict[str, float]]
) -> str:
    lines = [
        f"Distance between what a token shows and what its label says, pixels of the {args.size[0]} x {args.size[1]} "
        f"output; {args.images} images of each shape, {args.map_size[0]} x {args.map_size[1]} maps of the "
        + {"full": "whole image", "center": "centred square"}[args.area],
        f"{'':28}" + "".join(f"{way:>32}" for way in WAYS),
        f"{'image':10}{'operation':18}" + f"{'mean':>12}{'max':>10}{'lost':>10}" * len(WAYS),
    ]
    for shape, table in found.items():
        for name, ways in table.items():
            cells = "".join(f"{row.mean:12.3f}{row.largest:10.2f}{row.lost:9.1%} " for row in ways.values())
            lines.append(f"{shape:10}{name:18}{cells}".rstrip())
    for shape, overlap in overlaps.items():
        lines.append(
            f"{shape}: overlap (intersection over union) of the shown window and the label's, mean of {args.crops} "
            f"crops: ours {overlap['ours']:.3f}, published {overlap['published']:.3f}"
        )
    return "\n".join([*lines, "lost: share of the tokens with image that have no label for half of it or more"])

"""Which image stands where in global batch k, with which crop, operations and label, whatever made the batch.

Every backend that runs on a CPU, 1 to 4 ranks, 0 to 4 workers, folder and shards, an epoch from
its beginning and from its middle, all through the programs' own flags. Order, plan and labels are compared with what
is found without a loader: Pillow's sizes, the label files of the images' names. Pixels are compared bit for bit with
those of one rank without workers, DALI's with torchvision's, and all with Pillow's crop and resize.

    python -m pytest tests/data/exactness -s      prints the table
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.data.exactness.conftest import (
    BROKEN,
    FILE_BACKENDS,
    FILTERS,
    GLOBAL_BATCH,
    IMAGES,
    LARGEST,
    PIXELS_OF,
    SEED,
    SETTINGS,
    Way,
    opened,
    parsed,
    require,
    ways_of,
)
from tlt import api
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import Plan, make_plan
from tlt.data.backends.synthetic import SyntheticImages, SyntheticLabels
from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.data.sources.source import ImageSource
from volo.cluster.distributed import World
from volo.train import data as train_data

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs

CPU = torch.device("cpu")
EPOCH = 3
Rows = dict[str, np.ndarray]  # name -> (n, ...), a row for each image of a global batch, or of several

WAYS = [
    Way(),
    Way(workers=1),
    Way(workers=3, start=2),
    Way(ranks=2, workers=2, micro_batches=2),
    Way(ranks=4),
    Way(ranks=4, workers=4, start=1),
    Way(source="shards"),
    Way(ranks=4, workers=2, source="shards", start=2),
    Way(ranks=2, workers=3, source="shards"),
]
CASES = [(backend, way) for backend in (*FILE_BACKENDS, "synthetic") for way in ways_of(backend, WAYS)]


@dataclass(frozen=True)
class Line:
    """What is found of one way to an epoch."""

    images: int
    order: bool  # each is the image that its place in the permutation says
    plan: bool  # crop, filter, flip, warp, colour operations, erased boxes
    labels: bool
    pixels: bool  # uint8, those of one rank without workers (of torchvision, where DALI decodes), bit for bit
    finished: bool  # float32 after the device stage, likewise
    off: float | None  # share of the uint8 values that are more than a grey level from Pillow's; None: computed images
    largest: int | None  # grey levels


# What is expected


class Expected:
    """What the epoch is, found without a loader: all that doesn't depend on the backend, and Pillow's pixels."""

    def __init__(self, args: Namespace, images: ImageSource, root: Path) -> None:
        self.images, self.root = images, root
        self.config = train_data.augment_config(args, SETTINGS)
        self.computed = isinstance(images, SyntheticImages)
        self.indices = self._order(TrainDataset(images, self.config, SEED))
        sizes = [(500, 375) if self.computed else self._image(index).size for index in self.indices]
        self.plan = make_plan(self.config, SEED, EPOCH, self.indices, *np.array(sizes).T)

    def _order(self, dataset: TrainDataset) -> list[int]:
        """The images of the epoch, others in the broken ones' places."""
        order = []
        for updates in IndexStream(IMAGES, GLOBAL_BATCH, SEED).epoch(EPOCH):
            for first in updates[0].tolist():
                candidates = [first, *(dataset.replacement(EPOCH, first, attempt) for attempt in range(9))]
                order.append(next(index for index in candidates if self.images.paths[index] not in BROKEN))
        return order

    def _image(self, index: int) -> Image.Image:
        return Image.open(self.root / "train" / self.images.paths[index]).convert("RGB")

    @cached_property
    def rows(self) -> Rows:
        """What is the same with every backend."""
        names = [self.images.paths[index] for index in self.indices]
        if self.computed:
            maps = [SyntheticLabels(self.images).read(index) for index in self.indices]
            values, ids = [m.values for m in maps], [m.ids for m in maps]
        else:
            values, ids = zip(*(torch.load((self.root / "labels" / n).with_suffix(".pt")) for n in names), strict=True)
        return _plan_rows(self.plan) | {
            "index": np.array(self.indices),
            "class": np.array([int(name.partition("/")[0].strip("clas_")) for name in names]),
            "values": np.stack([np.asarray(each, np.float32) for each in values]),
            "ids": np.stack([np.asarray(each, np.int64) for each in ids]),
            "area": np.tile(np.float32([0, 0, 1, 1]), (len(names), 1)),
            "affine": self.plan.normalised_affine().astype(np.float32),
            "visible": self.plan.visible().astype(np.float32),
        }

    @cached_property
    def pixels(self) -> np.ndarray:
        """(n, 3, H, W) uint8: cut out and resized by Pillow."""
        cut = []
        for index, (x, y, w, h), kind in zip(
            self.indices, self.plan.crop.tolist(), self.plan.interpolation.tolist(), strict=True
        ):
            cut.append(np.asarray(self._image(index).crop((x, y, x + w, y + h)).resize((32, 32), kind)))
        return np.stack(cut).transpose(0, 3, 1, 2)

    def finished(self, pixels: np.ndarray) -> np.ndarray:
        """The whole epoch through the device stage at once."""
        return DeviceStage(self.config, SETTINGS["mean"], SETTINGS["std"])(torch.from_numpy(pixels), self.plan).numpy()


def _plan_rows(plan: Plan) -> Rows:
    return {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name != "size"}


# What the loaders make of it


class Recorded(DeviceStage):
    """Keeps what the backends hand over."""

    handed: list[tuple[Tensor, Plan]] = []

    def forward(self, images: Tensor, plan: Plan) -> Tensor:
        self.handed.append((images.clone(), plan))
        return super().forward(images, plan)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "DeviceStage", Recorded)


def updates_of_rank(args: Namespace, way: Way, rank: int) -> list[Rows]:
    """What a rank trains on in each update of the epoch."""
    images, labels = opened(args)
    loader = train_data.train_loader(args, images, labels, SETTINGS, World(rank, rank, way.ranks, CPU))
    updates, parts = [], []
    for last, samples, batch in loader.epoch(EPOCH, way.start):
        parts.append(_rows(batch, *Recorded.handed.pop()))
        if last:
            updates.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
            assert len(updates[-1]["index"]) == samples
            parts = []
    assert not parts and not Recorded.handed
    return updates


def _rows(batch: Batch, pixels: Tensor, plan: Plan) -> Rows:
    assert batch.labels is not None
    tensors = {"index": batch.indices, "class": batch.classes, "affine": batch.affine, "visible": batch.visible}
    tensors |= {"values": batch.labels.values, "ids": batch.labels.ids, "area": batch.labels.area}
    tensors |= {"pixels": pixels, "finished": batch.images}
    return _plan_rows(plan) | {name: tensor.numpy() for name, tensor in tensors.items()}


def epoch_of(data: Path, backend: str, way: Way) -> Rows:
    """The epoch from update `way.start` on: global batch after global batch, put together from its ranks."""
    args = parsed(data, backend, way)
    ranks = [updates_of_rank(args, way, rank) for rank in range(way.ranks)]
    batches = [_interleaved(update) for update in zip(*ranks, strict=True)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _interleaved(ranks: tuple[Rows, ...]) -> Rows:
    """One global batch, of which every rank has as many images: rank r every world-th from r on."""
    assert len({len(rows["index"]) for rows in ranks}) == 1
    return {name: np.stack([rows[name] for rows in ranks], axis=1).reshape(-1, *ranks[0][name].shape[1:])
            for name in ranks[0]}  # fmt: skip


@functools.cache
def expected(data: Path, computed: bool) -> Expected:
    args = parsed(data, "synthetic" if computed else "pil", Way())
    return Expected(args, opened(args)[0], data)


@functools.cache
def alone(data: Path, backend: str) -> Rows:
    """The epoch as one rank without workers makes it."""
    return epoch_of(data, backend, Way())


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[object, ...]]]:
    """Lines to print when the module is done."""
    titles = ["backend", *Way._fields, *(field.name for field in fields(Line))]
    lines: list[tuple[object, ...]] = [tuple(titles), ("---",) * len(titles)]
    yield lines
    print("\n")
    for line in lines:
        print("|", " | ".join(_shown(cell) for cell in line), "|")


def _shown(cell: object) -> str:
    if isinstance(cell, bool):
        return "same" if cell else "OTHER"
    return "-" if cell is None else f"{cell:.5f}" if isinstance(cell, float) else str(cell)


# The tests


@pytest.mark.parametrize(
    ("backend", "way"), CASES, ids=lambda part: "-".join(map(str, part)) if isinstance(part, Way) else part
)
def test_global_batches_are_the_same(
    backend: str, way: Way, data: Path, table: list[tuple[object, ...]], request: pytest.FixtureRequest
) -> None:
    require(backend)
    source = data if way.source == "folder" else request.getfixturevalue("shards")
    by_itself = alone(data, PIXELS_OF.get(backend, backend))
    line = compared(epoch_of(source, backend, way), expected(data, backend == "synthetic"), by_itself)
    table.append((backend, *way, *astuple(line)))
    assert line.images == IMAGES - way.start * GLOBAL_BATCH
    assert line.order and line.plan and line.labels and line.pixels and line.finished, line
    if line.off is not None and line.largest is not None:
        assert line.off <= FILTERS[backend] and line.largest <= LARGEST[backend], line


def compared(found: Rows, truth: Expected, alone: Rows) -> Line:
    """A line of the table, of the end of the epoch that was found."""
    images = len(found["index"])

    def same(*names: str) -> bool:
        return all(np.array_equal(found[name], truth.rows[name][-images:]) for name in names)

    off = None if truth.computed else abs(found["pixels"].astype(int) - truth.pixels[-images:])
    return Line(
        images=images,
        order=same("index", "class"),
        plan=same(*_plan_rows(truth.plan), "affine", "visible"),
        labels=same("values", "ids", "area"),
        pixels=np.array_equal(found["pixels"], alone["pixels"][-images:]),
        finished=np.array_equal(found["finished"], truth.finished(alone["pixels"])[-images:]),
        off=None if off is None else float((off > 1).mean()),
        largest=None if off is None else int(off.max()),
    )

"""Which image stands where in global batch k, with which crop, operations and label, whatever made the batch: backends,
ranks, workers, folder and shards, an epoch from its middle, in pairs, through the programs' own flags. The reference
knows no loader; pixels are also compared bit for bit with those of one rank without workers."""

import functools
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.exactness import conftest as made
from tests.data.exactness.conftest import Way, opened, parsed
from tlt.data.augment.plan import Plan, make_plan
from tlt.data.batch import Batch, IndexStream
from tlt.data.dataset import TrainDataset
from volo.cluster.distributed import World
from volo.train import data as train_data

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs

CPU = torch.device("cpu")
EPOCH = 3
Rows = dict[str, np.ndarray]  # name -> (n, ...), a row for each image of a global batch, or of several

CASES = [
    ("torchvision", Way(workers=1)),
    ("torchvision", Way(ranks=4, workers=4, start=1)),
    ("torchvision", Way(ranks=2, workers=3, kind="shards")),
    ("pil", Way(workers=3, start=2)),
    ("pil", Way(ranks=2, workers=2, micro_batches=2)),
    ("pil", Way(ranks=4, kind="shards", start=2)),
    ("dali-cpu", Way(ranks=4, workers=2)),
    ("dali-cpu", Way(kind="shards")),
]


@functools.cache
def expected(data: Path) -> Rows:
    """What the epoch is, found without a loader: all that doesn't depend on the backend, and Pillow's pixels."""
    args = parsed(data, "pil", Way())
    images, config = opened(args)[0], train_data.augment_config(args, made.SETTINGS)
    dataset, indices = TrainDataset(images, config, made.SEED), list[int]()
    for updates in IndexStream(made.IMAGES, made.GLOBAL_BATCH, made.SEED).epoch(EPOCH):
        for first in updates[0].tolist():  # others are in the broken ones' places
            candidates = [first, *(dataset.replacement(EPOCH, first, attempt) for attempt in range(9))]
            indices.append(next(index for index in candidates if images.paths[index] not in made.BROKEN))
    names = [images.paths[index] for index in indices]
    pictures = [Image.open(data / "train" / name).convert("RGB") for name in names]
    plan = make_plan(config, made.SEED, EPOCH, indices, *np.array([picture.size for picture in pictures]).T)
    values, ids = zip(*(torch.load((data / "labels" / name).with_suffix(".pt")) for name in names), strict=True)
    resized = [
        np.asarray(picture.crop((x, y, x + w, y + h)).resize((32, 32), kind))
        for picture, (x, y, w, h), kind in zip(pictures, plan.crop.tolist(), plan.interpolation.tolist(), strict=True)
    ]
    return _plan_rows(plan) | {
        "index": np.array(indices),
        "class": np.array([int(name[1]) for name in names]),
        "values": np.stack([np.asarray(each, np.float32) for each in values]),
        "ids": np.stack([np.asarray(each, np.int64) for each in ids]),
        "area": np.tile(np.float32([0, 0, 1, 1]), (len(names), 1)),
        "affine": plan.normalised_affine().astype(np.float32),
        "visible": plan.visible().astype(np.float32),
        "pixels": np.stack(resized).transpose(0, 3, 1, 2),
    }


def _plan_rows(plan: Plan) -> Rows:
    return {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name != "size"}


def updates_of_rank(args: Namespace, way: Way, rank: int) -> list[Rows]:
    """What a rank trains on in each update of the epoch."""
    images, labels = opened(args)
    loader = train_data.train_loader(args, images, labels, made.SETTINGS, World(rank, rank, way.ranks, CPU))
    loader.device_stage = lambda images, plan: images  # uint8, as the backend hands them over
    updates, parts = [], []
    for batch in loader.epoch(EPOCH, way.start):
        parts.append(_rows(batch))
        if batch.key.last:
            updates.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
            assert len(updates[-1]["index"]) == batch.key.update_samples
            parts = []
    assert not parts
    return updates


def _rows(batch: Batch) -> Rows:
    assert batch.labels is not None and batch.plan is not None
    tensors = {"index": batch.indices, "class": batch.classes, "affine": batch.affine, "visible": batch.visible}
    tensors |= {"values": batch.labels.values, "ids": batch.labels.ids, "area": batch.labels.area}
    tensors |= {"pixels": batch.images}
    return _plan_rows(batch.plan) | {name: tensor.numpy() for name, tensor in tensors.items()}


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
def alone(data: Path, backend: str) -> Rows:
    """The epoch as one rank without workers makes it."""
    return epoch_of(data, backend, Way())


@pytest.mark.parametrize(("backend", "way"), CASES, **made.WAYS)
def test_global_batches_are_the_same(backend: str, way: Way, data: Path, root: Path) -> None:
    epoch, truth = epoch_of(root, backend, way), expected(data)
    images = made.IMAGES - way.start * made.GLOBAL_BATCH
    assert epoch.keys() == truth.keys() and len(epoch["index"]) == images
    for name in epoch.keys() - {"pixels"}:
        assert np.array_equal(epoch[name], truth[name][-images:]), name
    by_itself = alone(data, "torchvision" if backend == "dali-cpu" else backend)["pixels"]  # bit for bit
    assert np.array_equal(epoch["pixels"], by_itself[-images:])
    made.check_levels(abs(epoch["pixels"].astype(int) - truth["pixels"][-images:]), backend)

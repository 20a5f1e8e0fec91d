"""`benchmark.py augmentation`: from JPEG files to batches of uint8 crops and label crops.

All candidates have the same images, crop sizes and policy. None makes dense targets, the published code's next step:

    ours            what a training worker does: file, plan, crop, labels out of an archive, batch
    ours + stage    the same, then on the same core the part that training does on its device
    timm            timm's loader without labels: `create_transform(is_training=True)` and the collate function that its
                    prefetching loader uses; crops come out augmented, neither normalised nor erased
    published       flip, RandAugment on the full image and the label map, crop; collated as timm's

Every candidate with labels reads them from an archive, so that candidates differ in the augmentation alone.
"""

from __future__ import annotations

import json
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from benchmarks.feed.images import MEAN, STD, TimmImages, choose_images, described, make_labels, timm_options
from benchmarks.feed.published_order import PublishedOrder
from benchmarks.timing import Timing, Work, interleaved, machine
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import TrainDataset
from tlt.data.loader import TrainLoader
from tlt.data.sources.folder import ImageFolder
from tlt.data.workers import PREFETCH_FACTOR
from tlt.labels.store import LabelStore

OURS, STAGED, TIMM, PUBLISHED = "ours", "ours + stage", "timm, no labels", "published"
RATIOS = ((OURS, PUBLISHED), (STAGED, PUBLISHED), (OURS, TIMM))


class AugmentationCase(NamedTuple):
    """Images, their labels, their augmentation and the batch size."""

    folder: ImageFolder
    labels: LabelStore
    config: AugmentConfig
    batch_size: int

    def batches(self, number: int) -> Iterator[BatchKey]:
        """Yield all images in batches, in a new order and as a new epoch in each round."""
        order = np.random.default_rng(number).permutation(len(self.folder)).tolist()
        for start in range(0, len(order), self.batch_size):
            yield BatchKey(number, tuple(order[start : start + self.batch_size]))


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    config = AugmentConfig((args.img_size, args.img_size), auto_augment=args.aa or None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-augmentation-") as root:
            folder = choose_images(args, Path(root))
            case = AugmentationCase(folder, make_labels(Path(root) / "labels", folder), config, args.batch_size)
            alone = interleaved(candidates(case), args.rounds)
            together = interleaved(worker_candidates(case, args.workers), args.rounds) if args.workers else {}
            show = _json if args.json else _table
            print(show(args, case, alone, together), flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def candidates(case: AugmentationCase) -> dict[str, Work]:
    """Return what is timed in one process, by name: every image once a round, in batches."""
    return {
        name: _Pass(case, make(case))
        for name, make in ((OURS, _ours), (STAGED, _staged), (TIMM, _timm), (PUBLISHED, _published))
    }


class _Pass:
    """Loads all images once."""

    def __init__(self, case: AugmentationCase, load: Callable[[BatchKey], Any]) -> None:
        self.case, self.load = case, load

    def __call__(self, number: int) -> int:
        random.seed(number)  # timm and the published code draw from the global states
        np.random.seed(number)
        return sum(len(images_of(self.load(key))) for key in self.case.batches(number))


def images_of(batch: Batch | tuple[Tensor, Any] | Tensor) -> Tensor:
    """Return the images (B, 3, H, W) of a candidate's batch."""
    if isinstance(batch, Batch):
        return batch.images
    return batch if isinstance(batch, Tensor) else batch[0]


def _train_dataset(case: AugmentationCase) -> TrainDataset:
    return TrainDataset(case.folder, case.config, 0, case.labels)


def _ours(case: AugmentationCase) -> Callable[[BatchKey], Batch]:
    return _train_dataset(case).load


def _staged(case: AugmentationCase) -> Callable[[BatchKey], Tensor]:
    dataset, stage = _train_dataset(case), DeviceStage(case.config, MEAN, STD)

    def load(key: BatchKey) -> Tensor:
        batch = dataset.load(key)
        assert batch.plan is not None
        finished: Tensor = stage(batch.images, batch.plan)
        return finished

    return load


def _timm(case: AugmentationCase) -> Callable[[BatchKey], tuple[Tensor, Tensor]]:
    dataset = _timm_images(case)
    return lambda key: fast_collate([dataset[index] for index in key.indices])


def _timm_images(case: AugmentationCase) -> TimmImages:
    dataset = TimmImages(case.folder)
    dataset.transform = create_transform(case.config.size, use_prefetcher=True, **timm_options(case.config))
    dataset.keep_a_bit()
    return dataset


def _published(case: AugmentationCase) -> Callable[[BatchKey], tuple[Tensor, Tensor]]:
    order = PublishedOrder(case.config)

    def item(index: int) -> tuple[Tensor, Tensor]:
        with Image.open(case.folder.path(index)) as image:
            return order(image.convert("RGB"), case.labels.read(index))

    return lambda key: default_collate([item(index) for index in key.indices])


def worker_candidates(case: AugmentationCase, workers: int) -> dict[str, Work]:
    """Return the same with worker processes, until the batch is in the main process."""
    stream = IndexStream(len(case.folder), case.batch_size, 0)
    ours = TrainLoader(_train_dataset(case), stream, lambda images, plan: images, workers=workers)
    other = DataLoader(
        _timm_images(case),
        case.batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=fast_collate,
        prefetch_factor=PREFETCH_FACTOR,
        persistent_workers=True,
    )
    return {
        OURS: lambda number: sum(batch.size for _, _, batch in ours.epoch(number)),
        TIMM: lambda number: sum(len(images) for images, _ in other),
    }


def _ratios(times: dict[str, Timing]) -> dict[str, float]:
    """Return images/s of one candidate over those of another."""
    return {f"{one}/{other}": times[other].median / times[one].median for one, other in RATIOS if other in times}


def _json(args: Namespace, case: AugmentationCase, alone: dict[str, Timing], together: dict[str, Timing]) -> str:
    parts = {"one process": (alone, 0), "workers": (together, args.workers)}
    results = {
        name: {
            "workers": workers,
            "seconds": {candidate: asdict(timing) for candidate, timing in times.items()},
            "images/s ratios": _ratios(times),
        }
        for name, (times, workers) in parts.items()
        if times
    }
    return json.dumps({"images": described(case.folder), "size": case.config.size, "machine": machine(), **results})


def _table(args: Namespace, case: AugmentationCase, alone: dict[str, Timing], together: dict[str, Timing]) -> str:
    (height, width), policy = case.config.size, case.config.auto_augment or "no RandAugment"
    lines = [
        f"augmentation: {described(case.folder)}, in the page cache; to {height} x {width}, {policy}, "
        f"batches of {case.batch_size}",
        f"{machine()}; torchvision {torchvision.__version__}, timm {timm.__version__}, Pillow {PIL.__version__}",
        f"one process, one thread{'':9}{'images/s':>10}{'per image':>12}{'rounds':>16}",
        *_rows(alone),
    ]
    if together:
        lines += [f"{args.workers} workers, batch in the main process{'':3}", *_rows(together)]
    return "\n".join(lines)


def _rows(times: dict[str, Timing]) -> Iterator[str]:
    for name, timing in times.items():
        yield f"{name:32}{1 / timing.median:10.1f}{timing.median * 1e3:9.2f} ms{timing.spread(1e3):>16}"
    for pair, ratio in _ratios(times).items():
        yield f"{'images/s ' + pair:36}{ratio:5.2f}x"

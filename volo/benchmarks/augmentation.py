"""`benchmark.py augmentation`: from JPEG files to batches of uint8 crops and what token targets are made of.

Same images, same crop sizes, same policy in every arm; dense targets, which the published code makes next, in none:

    ours            what a training worker does: file, plan, crop, labels out of an archive, batch
    ours + stage    the same, then on the same core the part that training does on its device
    timm            timm's loader without labels: `create_transform(is_training=True)` and the collate function that its
                    prefetching loader uses; crops come out augmented, neither normalised nor erased
    published       flip, RandAugment on the full image and the label map, crop; collated as timm's

Labels are read out of an archive in every arm that has them, so that the arms differ in the augmentation alone.
"""

from __future__ import annotations

import json
import os
import random
import statistics
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
from timm.data.auto_augment import RandAugment
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tlt.archive import LabelArchive
from tlt.archive_writer import ArchiveWriter, make_header
from tlt.data.dataset import BatchKey, HostBatch, TrainDataset
from tlt.data.device_stage import DeviceStage
from tlt.data.folder import ImageFolder, find_split, scan_folder
from tlt.data.index_stream import IndexStream
from tlt.data.loader import TrainLoader
from tlt.data.plan import AugmentConfig
from tlt.data.workers import PREFETCH_FACTOR
from tlt.errors import UserError
from volo.benchmarks.labels import Sizes, random_maps
from volo.benchmarks.published_order import PublishedOrder, keep_a_bit
from volo.benchmarks.rounds import Timing, Work, interleaved, machine

OURS, STAGED, TIMM, PUBLISHED = "ours", "ours + stage", "timm, no labels", "published"
RATIOS = ((OURS, PUBLISHED), (STAGED, PUBLISHED), (OURS, TIMM))
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_QUALITY = 90
_CLASSES = 1000


class Case(NamedTuple):
    """What is measured: images, their labels, how they are augmented, how many make a batch."""

    folder: ImageFolder
    labels: LabelArchive
    config: AugmentConfig
    batch_size: int

    def batches(self, number: int) -> Iterator[BatchKey]:
        """All images, in an order of its own each round; the epoch changes with it."""
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
            case = Case(folder, make_labels(Path(root) / "labels", folder), config, args.batch_size)
            alone = interleaved(arms(case), args.rounds)
            together = interleaved(worker_arms(case, args.workers), args.rounds) if args.workers else {}
            show = _json if args.json else _table
            print(show(args, case, alone, together), flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def choose_images(args: Namespace, root: Path) -> ImageFolder:
    """`--images` of the images in `--data-dir`, evenly spread, or so many made for this purpose."""
    if not args.data_dir:
        make_images(root / "images", args.images, tuple(args.image_size))
        return scan_folder(str(root / "images"))
    folder = scan_folder(find_split(args.data_dir, "train", allow_root=True))
    if len(folder) < args.images:
        raise UserError(f"--images {args.images}: --data-dir {args.data_dir} holds {len(folder)}; ask for no more")
    rows = np.linspace(0, len(folder) - 1, args.images).round().astype(int)
    return folder.select(rows)


def make_images(root: Path, count: int, size: tuple[int, int]) -> None:
    """JPEG files of `size` (width, height) with gradients, soft shapes and noise, as large as photographs': 95 kB at
    500 x 375."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        fine = generator.integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
        layers = [np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC), float) for x in (coarse, fine)]
        noise = generator.normal(0, 14, (size[1], size[0], 1))
        pixels = 0.75 * layers[0] + 0.25 * layers[1] + noise
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=_QUALITY)


def make_labels(root: Path, folder: ImageFolder) -> LabelArchive:
    """Random labels of the published kind (5 of 1000 classes, 18 x 18 cells) for the images, in an archive."""
    sizes = Sizes(len(folder), 5, (18, 18), _CLASSES)
    files = [f"{name}.pt" for name in folder.paths]
    header = make_header((sizes.top_k, *sizes.map_size), _CLASSES, folder.paths, files)
    writer = ArchiveWriter(root, header, folder.paths, files)
    for row, label_map in enumerate(random_maps(sizes)):
        writer.write(row, label_map)
    writer.finish()
    return LabelArchive(root, folder.paths, num_classes=_CLASSES)


def arms(case: Case) -> dict[str, Work]:
    """What is timed in one process, by name: every image once a round, in batches."""
    return {
        name: _Pass(case, make(case))
        for name, make in ((OURS, _ours), (STAGED, _staged), (TIMM, _timm), (PUBLISHED, _published))
    }


class _Pass:
    """All images once."""

    def __init__(self, case: Case, load: Callable[[BatchKey], Any]) -> None:
        self.case, self.load = case, load

    def __call__(self, number: int) -> int:
        random.seed(number)  # timm and the published code draw from the global states
        np.random.seed(number)
        return sum(len(images_of(self.load(key))) for key in self.case.batches(number))


def images_of(batch: HostBatch | tuple[Tensor, Any] | Tensor) -> Tensor:
    """(B, 3, H, W) of what an arm makes."""
    if isinstance(batch, HostBatch):
        return batch.images
    return batch if isinstance(batch, Tensor) else batch[0]


def _train_dataset(case: Case) -> TrainDataset:
    return TrainDataset(case.folder, case.config, 0, case.labels)


def _ours(case: Case) -> Callable[[BatchKey], HostBatch]:
    return _train_dataset(case).load


def _staged(case: Case) -> Callable[[BatchKey], Tensor]:
    dataset, stage = _train_dataset(case), DeviceStage(case.config, _MEAN, _STD)

    def load(key: BatchKey) -> Tensor:
        batch = dataset.load(key)
        assert batch.plan is not None
        finished: Tensor = stage(batch.images, batch.plan)
        return finished

    return load


def _timm(case: Case) -> Callable[[BatchKey], tuple[Tensor, Tensor]]:
    dataset = TimmImages(case)
    return lambda key: fast_collate([dataset[index] for index in key.indices])


def _published(case: Case) -> Callable[[BatchKey], tuple[Tensor, Tensor]]:
    order = PublishedOrder(case.config)

    def item(index: int) -> tuple[Tensor, Tensor]:
        with Image.open(case.folder.path(index)) as image:
            return order(image.convert("RGB"), case.labels.read(index))

    return lambda key: fast_collate([item(index) for index in key.indices])


class TimmImages(Dataset[tuple[np.ndarray, int]]):
    """The images as timm's `ImageDataset` reads them, under timm's training transform for its prefetching loader."""

    def __init__(self, case: Case) -> None:
        config = case.config
        self.folder = case.folder
        self.transform = create_transform(
            config.size,
            is_training=True,
            use_prefetcher=True,
            scale=config.scale,
            ratio=config.ratio,
            hflip=config.hflip,
            auto_augment=config.auto_augment,
            interpolation=config.interpolation,
            color_jitter=config.color_jitter,
            mean=_MEAN,
            std=_STD,
        )
        for step in self.transform.transforms:
            if isinstance(step, RandAugment):
                keep_a_bit(step)

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with Image.open(self.folder.path(index)) as image:
            return self.transform(image.convert("RGB")), int(self.folder.classes[index])


def worker_arms(case: Case, workers: int) -> dict[str, Work]:
    """The same with worker processes, up to the batch in the main process: every image once a round."""
    stream = IndexStream(len(case.folder), case.batch_size, 0)
    ours = TrainLoader(_train_dataset(case), stream, lambda images, plan: images, workers=workers)
    other = DataLoader(
        TimmImages(case),
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
    """Images/s of one arm over those of another."""
    return {f"{one}/{other}": times[other].median / times[one].median for one, other in RATIOS if other in times}


def _described(case: Case) -> str:
    sizes = [os.path.getsize(case.folder.path(index)) for index in range(len(case.folder))]
    with Image.open(case.folder.path(0)) as first:
        shape = f"{first.width} x {first.height}"
    return f"{len(sizes)} images (the first {shape}), {statistics.mean(sizes) / 1e3:.0f} kB each"


def _json(args: Namespace, case: Case, alone: dict[str, Timing], together: dict[str, Timing]) -> str:
    parts = {"one process": (alone, 0), "workers": (together, args.workers)}
    results = {
        name: {
            "workers": workers,
            "seconds": {arm: asdict(timing) for arm, timing in times.items()},
            "images/s ratios": _ratios(times),
        }
        for name, (times, workers) in parts.items()
        if times
    }
    return json.dumps({"images": _described(case), "size": case.config.size, "machine": machine(), **results})


def _table(args: Namespace, case: Case, alone: dict[str, Timing], together: dict[str, Timing]) -> str:
    (height, width), policy = case.config.size, case.config.auto_augment or "no RandAugment"
    lines = [
        f"augmentation: {_described(case)}, in the page cache; to {height} x {width}, {policy}, "
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

"""The images and labels that loaders are measured on, and timm's dataset of them."""

from __future__ import annotations

import itertools
import os
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data.auto_augment import RandAugment
from torch.utils.data import Dataset

from benchmarks.feed.labels import Sizes, random_maps, write_archive
from benchmarks.feed.published_order import keep_a_bit
from tlt.data.augment.plan import AugmentConfig
from tlt.data.sources.folder import ImageFolder, find_split, scan_folder
from tlt.errors import UserError
from tlt.labels.store import LabelStore, open_labels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_QUALITY = 93
_LARGEST = 2048  # pixels of a side that are made at a time
_CLASSES = 1000


def choose_images(args: Namespace, root: Path) -> ImageFolder:
    """Return `--images` images, evenly spread over those in `--data-dir`, or made for this purpose."""
    if not args.data_dir:
        make_images(root / "images", args.images, tuple(args.image_size))
        return scan_folder(str(root / "images"))
    folder = scan_folder(find_split(args.data_dir, "train", allow_root=True))
    if len(folder) < args.images:
        raise UserError(f"--images {args.images}: --data-dir {args.data_dir} holds {len(folder)}; ask for no more")
    rows = np.linspace(0, len(folder) - 1, args.images).round().astype(int)
    return folder.select(rows)


def make_images(root: Path, count: int, size: tuple[int, int]) -> None:
    """Write JPEG files of `size` (width, height) with gradients, soft shapes and noise, as large as photographs: 110 kB
    at 500 x 375. From 2,048 pixels a side on, the same part is repeated."""
    part = min(size[0], _LARGEST), min(size[1], _LARGEST)
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        fine = generator.integers(0, 256, (part[1] // 8 + 1, part[0] // 8 + 1, 3), dtype=np.uint8)
        layers = [np.asarray(Image.fromarray(x).resize(part, Image.Resampling.BICUBIC), float) for x in (coarse, fine)]
        noise = generator.normal(0, 14, (part[1], part[0], 1))
        pixels = 0.75 * layers[0] + 0.25 * layers[1] + noise
        once, image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.new("RGB", size)
        for top, left in itertools.product(range(0, size[1], part[1]), range(0, size[0], part[0])):
            image.paste(once, (left, top))
        image.save(path, quality=_QUALITY)


def make_labels(root: Path, folder: ImageFolder) -> LabelStore:
    """Write random labels of the published kind (5 of 1000 classes, 18 x 18 cells) for the images as an archive."""
    sizes = Sizes(len(folder), 5, (18, 18), _CLASSES)
    write_archive(root, folder.paths, sizes, random_maps(sizes))
    return open_labels(root, folder.paths, num_classes=_CLASSES)


class TimmImages(Dataset[tuple[Any, int]]):
    """The images as timm's `ImageDataset` reads them; `transform` is set by timm's `create_loader` or by the caller."""

    transform: Callable[[Image.Image], Any]

    def __init__(self, folder: ImageFolder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.folder.path(index)) as image:
            return self.transform(image.convert("RGB")), int(self.folder.classes[index])

    def keep_a_bit(self) -> None:
        """Prevent the crash of timm's Posterize with Pillow 13."""
        for step in getattr(self.transform, "transforms", []):
            if isinstance(step, RandAugment):
                keep_a_bit(step)


def timm_options(config: AugmentConfig) -> dict[str, Any]:
    """Return the augmentation as arguments of timm's `create_transform` and `create_loader`."""
    return {
        "is_training": True,
        "scale": config.scale,
        "ratio": config.ratio,
        "hflip": config.hflip,
        "vflip": config.vflip,
        "auto_augment": config.auto_augment,
        "interpolation": config.interpolation,
        "color_jitter": config.color_jitter,
        "mean": MEAN,
        "std": STD,
    }


def described(folder: ImageFolder) -> str:
    """Return the number of images and their size in words."""
    sizes = [os.path.getsize(folder.path(index)) for index in range(len(folder))]
    with Image.open(folder.path(0)) as first:
        shape = f"{first.width} x {first.height}"
    return f"{len(sizes)} images (the first {shape}), {statistics.mean(sizes) / 1e3:.0f} kB each"

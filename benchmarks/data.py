"""Images/s and CPU time from image files to augmented batches: ours with each decoder, against timm's loader.

    python benchmark.py data                                  # made images of 500 x 375 px
    python benchmark.py data --data-dir DATA --workers 8      # yours

All loaders read the same files, in the page cache, with the same augmentation; ours read token labels out of an archive
beside them. `crops` are what workers make: uint8 crops with their plans, and in timm's case the augmentation. `batches`
are finished on the device: ours warped, coloured, normalised, erased; timm's normalised and erased. Equal parts are
compared, by CPU time of all threads and workers, with one thread in the main process and in each worker.
"""

import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset, create_loader
from timm.data.auto_augment import RandAugment
from torch import Tensor

import tlt
from benchmarks import rounds
from benchmarks.rounds import BenchmarkSettings, Range, Rows, in_turns, speedup, synchronize
from tlt.data.loader import DEFAULT_TIMEOUT
from volo.cluster.distributed import choose_device
from volo.config import value_types as t
from volo.config.fields import Group, flag, group
from volo.config.settings_shared import FILE_BACKENDS

CROPS = "crops"
BATCHES = "batches"
TIMM = "timm"
STD = (0.229, 0.224, 0.225)
CLASSES = 1000
TOP_K = 5
CELLS = 18  # of the label maps, as the published ones
Epochs = Callable[[], Iterable[Tensor]]  # the images of the batches of an epoch
_COLUMNS = ("augmentation", "workers", "part", "loader", "images/s", "CPU ms an image", "x timm", "note")

IMAGE_SIZE = partial(flag, [500, 375], "width and height if made", nargs=2)
IMG_SIZE = partial(flag, 224, "height and width of the crops")


class Images(Group):
    """Images"""

    data_dir: t.Dir = flag("", "image folders with a split train (else some are made)")
    images: t.Positive = flag(256, "how many")
    image_size: list[t.Positive] = IMAGE_SIZE()
    img_size: t.Positive = IMG_SIZE()
    aa: str = flag("rand-m9-mstd0.5-inc1", "RandAugment in timm's grammar", metavar="POLICY")
    batch_size: t.Positive = flag(32, "images per batch", also="-b")


class Measuring(rounds.Measuring):
    """Measuring"""

    backend: list[str] = flag(["torchvision"], ", ".join(FILE_BACKENDS), FILE_BACKENDS, metavar="NAME")
    workers: t.Count = flag(2, "processes, measured after none; 0: none alone")


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py data`."""

    images: Images = group(Images)
    measuring: Measuring = group(Measuring)


def run(settings: Flags) -> None:
    """Measure both augmentations without and with workers."""
    asked, measuring = settings.images, settings.measuring
    device = choose_device(measuring.device, 0)
    torch.set_num_threads(1)
    rows = Rows(settings, _COLUMNS)
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as folder:
        if asked.data_dir:
            link_images(Path(folder) / "train", asked.images, tlt.open_images(asked.data_dir, "train"))
        else:
            make_images(Path(folder) / "train", asked.images, asked.image_size)
        images = tlt.open_images(folder, "train")
        labels = make_labels(Path(folder), images.paths)
        size = (asked.img_size, asked.img_size)
        nothing: dict[str, Any] = {"auto_augment": None, "color_jitter": None, "reprob": 0.0}
        recipes = {"crop + flip": nothing, f"{asked.aa}, erasing": {"auto_augment": asked.aa}}
        for (name, changes), workers in itertools.product(recipes.items(), dict.fromkeys((0, measuring.workers))):
            loading = Loading(images, labels, tlt.AugmentConfig(size, **changes), asked.batch_size, workers, device)
            measure(measuring, rows, {"augmentation": name, "workers": workers}, loading)


def link_images(root: Path, count: int, images: Any) -> None:
    """Make links to `count` images, evenly spread over all."""
    for row in np.linspace(0, len(images) - 1, min(count, len(images))).astype(int):
        link = root / images.paths[row]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(images.root, images.paths[row]).resolve())


def make_images(root: Path, count: int, size: tuple[int, int] | list[int]) -> None:
    """Write JPEG files of `size` (width, height) with gradients, soft shapes and noise, as large as photographs: 110 kB
    at 500 x 375."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        fine = generator.integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
        layers = [np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC), float) for x in (coarse, fine)]
        pixels = 0.75 * layers[0] + 0.25 * layers[1] + generator.normal(0, 14, (size[1], size[0], 1))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=93)


def make_labels(root: Path, names: Sequence[str]) -> Any:
    """Write random label maps as the published code does, pack them, and open the archive."""
    generator = np.random.default_rng(0)
    size = (TOP_K, CELLS, CELLS)
    for name in names:
        file = (root / "tree" / name).with_suffix(".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        first = generator.integers(CLASSES, size=size[1:])
        ids = (first + np.arange(0, CLASSES, CLASSES // TOP_K)[:, None, None]) % CLASSES
        values = np.sort(generator.normal(5, 2, size), axis=0)[::-1]
        torch.save(torch.from_numpy(np.stack([values, ids])).half(), file)
    command = [sys.executable, "-m", "tlt", "pack", str(root / "tree"), str(root / "labels")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return tlt.open_labels(str(root / "labels"), names, num_classes=CLASSES)


def measure(measuring: Measuring, rows: Rows, facts: dict[str, Any], loading: "Loading") -> None:
    """Time timm's loader and ours with each decoder in turns, and write their rows."""
    loaders: dict[tuple[str, str], Epochs] = {(part, TIMM): loading.timm(part) for part in (CROPS, BATCHES)}
    for backend in dict.fromkeys(measuring.backend):
        with rows.measuring(facts | {"loader": backend}):
            loaders |= {(part, backend): loading.ours(part, backend) for part in (CROPS, BATCHES)}
    works = {name: partial(_load, epochs, loading.device) for name, epochs in loaders.items()}
    timings = in_turns(works, measuring.rounds)
    for (part, name), timing in sorted(timings.items()):
        times = {"images/s": 1 / Range.of(timing.wall).median, "CPU ms an image": Range.of(timing.cpu, 1e3)}
        if name != TIMM:
            times["x timm"] = speedup(timing.cpu, timings[part, TIMM].cpu)
        rows.write(facts | {"part": part, "loader": name} | times)


def _load(epochs: Epochs, device: torch.device) -> int:
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # timm draws from the global states
        seed(0)
    images = sum(map(len, epochs()))
    synchronize(device)
    return images


class Loading(NamedTuple):
    """What is loaded, and how: the same for all loaders."""

    images: Any
    labels: Any
    config: tlt.AugmentConfig
    batch_size: int
    workers: int
    device: torch.device

    def ours(self, part: str, backend: str) -> Epochs:
        """Return epochs of our training loader. Raises UserError: the decoder can't be had here."""
        options: dict[str, Any] = {"workers": self.workers, "persistent_workers": self.workers > 0, "backend": backend}
        loader = tlt.Loader(
            self.images, self.labels, self.config, self.batch_size, 0, std=STD, device=self.device, **options
        )
        if part == CROPS:
            loader.device_stage = lambda crops, _: crops
        return lambda: (batch.images for batch in loader.epoch(0))

    def timm(self, part: str) -> Epochs:
        """Return epochs of timm's training loader, or of the loader of crops inside it."""
        classes = {name: row for row, name in enumerate(self.images.class_names)}
        dataset = ImageDataset(self.images.root, class_map=classes)
        equal = ("scale", "ratio", "hflip", "auto_augment", "color_jitter", "interpolation", "mean")
        loader: Any = create_loader(
            dataset,
            (3, *self.config.size),
            self.batch_size,
            is_training=True,
            std=STD,
            re_prob=self.config.reprob,
            re_mode=self.config.remode,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.device.type == "cuda",
            device=self.device,
            **{name: getattr(self.config, name) for name in equal},
        )
        for step in dataset.transform.transforms:
            if isinstance(step, RandAugment):
                keep_a_bit(step)
        loader.loader.timeout = DEFAULT_TIMEOUT if self.workers else 0  # timm waits for ever for a worker that hangs
        batches = loader.loader if part == CROPS else loader
        return lambda: (images for images, _ in batches)


def keep_a_bit(policy: RandAugment) -> None:
    """Let timm's Posterize keep one bit at least: Pillow 13 refuses 0 bits, for which older versions returned black."""
    for operation in policy.ops:
        if operation.name.startswith("Posterize"):
            change = operation.aug_fn
            operation.aug_fn = lambda image, bits, change=change, **rest: change(image, max(1, bits), **rest)

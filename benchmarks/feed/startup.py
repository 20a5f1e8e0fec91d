"""`benchmark.py startup`: the cost of finding the images and labels of a data set before the first step, beside
torchvision's and timm's listing of the same folders.

The images are hard links to a few small JPEGs. Each measurement has a process of its own, whose imports are not timed;
the candidates take turns. Folders are in the kernel's cache: this is the processor's time, to which a file server adds
its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.datasets import ImageFolder as TorchvisionFolder

from benchmarks.feed.labels import one_cell_maps, write_archive
from benchmarks.memory import peak_of
from benchmarks.timing import machine
from tlt.data.sources.folder import ImageFolder, compare_classes, scan_folder
from tlt.data.sources.folder_listing import list_folder
from tlt.data.sources.size_index import SizeIndex, index_file, open_folder, write_index
from tlt.labels.store import open_labels
from volo.checkpoint.resume import fingerprint

_SIZE = (64, 48)  # of the images
_LINKS = 40_000  # to one file; file systems allow 65,000
_MANY_CLASSES = 21_841  # those of ImageNet-21k


@dataclass(frozen=True)
class StartupRow:
    """Medians of a candidate: CPU seconds, seconds, and the MiB by which memory rose at its peak."""

    images: int
    arm: str
    cpu_seconds: float
    seconds: float
    mebibytes: float


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    rows = []
    for images in args.images:
        with tempfile.TemporaryDirectory(prefix="benchmark-startup-", dir=args.directory or None) as root:
            make_data(Path(root), images, args.classes)
            rows += measure(root, images, args.rounds)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
        return 0
    print(f"{machine()}\n")
    print(f"{'images':>9}  {'':58}  {'CPU s':>7}  {'wall s':>7}  {'MiB more':>8}")
    for row in rows:
        print(f"{row.images:9}  {row.arm:58}  {row.cpu_seconds:7.2f}  {row.seconds:7.2f}  {row.mebibytes:8.0f}")
    return 0


def make_data(root: Path, images: int, classes: int) -> None:
    """Make `root/train` with `images` images, their index, and an archive of their labels."""
    train = root / "train"
    for number in range(images):
        folder = train / f"n{number % classes + 1_440_000:08d}"
        if number < classes:
            folder.mkdir(parents=True)
        if number % _LINKS == 0:
            source = root / f"{number}.jpg"
            Image.new("RGB", _SIZE).save(source)
        os.link(source, folder / f"{folder.name}_{number // classes * 7 % 100_003}.JPEG")
    for folder in (train, *train.iterdir()):
        os.utime(folder, (0, 1))  # long ago
    listing = list_folder(train)
    write_index(index_file(str(train)), SizeIndex(np.tile(np.array([_SIZE], np.uint16), (images, 1)), {}, listing))
    write_archive(root / "labels", list(listing.names), *one_cell_maps(images))


def _classes(root: str) -> Callable[[], object]:
    names = [f"n{number:08d}" for number in range(_MANY_CLASSES)]
    folder = ImageFolder(root, [f"{name}/x.jpg" for name in names], np.arange(_MANY_CLASSES), names, names)
    return lambda: compare_classes(folder, folder)


CANDIDATES: dict[str, Callable[[str], Callable[[], object]]] = {
    "listing folders: ours": lambda root: partial(scan_folder, f"{root}/train"),
    "listing folders: ours, with an index (tlt index)": lambda root: partial(open_folder, f"{root}/train"),
    "listing folders: torchvision.datasets.ImageFolder": lambda root: partial(TorchvisionFolder, f"{root}/train"),
    "listing folders: timm's ReaderImageFolder": lambda root: partial(ReaderImageFolder, f"{root}/train"),
    "opening the archive of their token labels": lambda root: partial(
        open_labels, f"{root}/labels", open_folder(f"{root}/train").paths
    ),
    "fingerprint of names and classes for checkpoints": lambda root: partial(
        fingerprint, open_folder(f"{root}/train"), None
    ),
    f"comparing {_MANY_CLASSES} classes of two splits": _classes,
}


def measure(root: str, images: int, rounds: int) -> list[StartupRow]:
    """Measure every candidate once a round."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CANDIDATES}
    for _ in range(rounds):
        for name, results in found.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                results.append(pool.submit(measure_here, name, root).result())
    medians: dict[str, Any] = {name: map(statistics.median, zip(*found[name], strict=True)) for name in CANDIDATES}
    return [StartupRow(images, name, *medians[name]) for name in CANDIDATES]


def measure_here(name: str, root: str) -> tuple[float, float, float]:
    """Return CPU seconds, seconds and MiB of a candidate in this process."""
    work = CANDIDATES[name](root)

    def timed() -> tuple[float, float]:
        cpu, start = time.process_time(), time.perf_counter()
        _ = work()
        return time.process_time() - cpu, time.perf_counter() - start

    (cpu_seconds, seconds), memory = peak_of(timed, torch.device("cpu"))
    return cpu_seconds, seconds, memory / 2**20

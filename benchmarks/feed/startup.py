"""`benchmark.py startup`: the cost of finding the images and labels of a data set before the first step, beside
torchvision's and timm's listing of the same folders; and the time from the start of train.py, and of a program that
does what timm's does, to the end of the first update.

The images are hard links to a few small JPEGs. Each measurement has a process of its own; the candidates take turns.
Imports are timed with the two programs alone. Folders are in the kernel's cache: this is the processor's time, to which
a file server adds its own. `--cold` starts the programs a second time, with nothing in the cache.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
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

from benchmarks.feed import timm_first_update as peer
from benchmarks.feed.labels import one_cell_maps, write_archive
from benchmarks.memory import peak_of
from benchmarks.timing import machine
from tlt.data.sources.folder import ImageFolder, compare_classes, scan_folder
from tlt.data.sources.folder_listing import list_folder
from tlt.data.sources.size_index import SizeIndex, index_file, open_folder, write_index
from tlt.errors import UserError
from tlt.labels.store import open_labels
from volo.checkpoint.resume import fingerprint

_SIZE = (64, 48)  # of the images
_LINKS = 40_000  # to one file; file systems allow 65,000
_MANY_CLASSES = 21_841  # those of ImageNet-21k


@dataclass(frozen=True)
class StartupRow:
    """Medians of a candidate: CPU seconds, seconds, the MiB by which memory rose at its peak. None: not measured."""

    images: int
    arm: str
    cpu_seconds: float | None
    seconds: float
    mebibytes: float | None


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    rows = []
    for images in args.images:
        with tempfile.TemporaryDirectory(prefix="benchmark-startup-", dir=args.directory or None) as root:
            make_data(Path(root), images, args.classes)
            rows += measure(root, images, args.rounds)
            for cold in (False, True) if args.cold else (False,):
                rows += measure_programs(root, images, args.rounds, cold)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
        return 0
    print(f"{machine()}\n")
    print(f"{'images':>9}  {'':58}  {'CPU s':>7}  {'wall s':>7}  {'MiB more':>8}")
    for row in rows:
        cpu = "" if row.cpu_seconds is None else f"{row.cpu_seconds:.2f}"
        more = "" if row.mebibytes is None else f"{row.mebibytes:.0f}"
        print(f"{row.images:9}  {row.arm:58}  {cpu:>7}  {row.seconds:7.2f}  {more:>8}")
    return 0


def make_data(root: Path, images: int, classes: int) -> None:
    """Make `root/train` with `images` images, their index and an archive of their labels, and one of each class in
    `root/val`."""
    train = root / "train"
    for number in range(images):
        folder = train / f"n{number % classes + 1_440_000:08d}"
        if number < classes:
            folder.mkdir(parents=True)
            (root / "val" / folder.name).mkdir(parents=True)
        if number % _LINKS == 0:
            source = root / f"{number}.jpg"
            Image.new("RGB", _SIZE).save(source)
        os.link(source, folder / f"{folder.name}_{number // classes * 7 % 100_003}.JPEG")
        if number < classes:
            os.link(source, root / "val" / folder.name / "0.JPEG")
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


ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: dict[str, Callable[[str], list[str]]] = {
    "train.py to its first update": lambda root: [
        *(sys.executable, str(ROOT / "train.py"), root, "--model", "volo_d1", "--device", "cpu", "--epochs", "1"),
        *("-b", str(peer.BATCH), "--workers", str(peer.WORKERS), "--warmup-epochs", "0", "--log-interval", "1"),
        *("--output", f"{root}/output"),
    ],
    "what timm's train.py does to its first update": lambda root: [sys.executable, str(peer.__file__), root],
}
_FIRST_LOSS = re.compile(r"\bloss \d")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def measure_programs(root: str, images: int, rounds: int, cold: bool) -> list[StartupRow]:
    """Start both programs once a round."""
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, seconds in found.items():
            if cold:
                empty_page_cache()
            seconds.append(seconds_to_first_update(PROGRAMS[name](root)))
    return [
        StartupRow(images, name + (", cold" if cold else ""), None, statistics.median(seconds), None)
        for name, seconds in found.items()
    ]


def seconds_to_first_update(command: list[str]) -> float:
    """Return how long a program takes to print its first loss; it is killed then.

    Raises:
        UserError: It ends before.
    """
    start, last = time.perf_counter(), ""
    environment = os.environ | {"OMP_NUM_THREADS": str(peer.THREADS)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                if _FIRST_LOSS.search(line):
                    return time.perf_counter() - start
                last = line
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    raise UserError(f"{Path(command[1]).name} ended before its first update: {last.strip()}")


def empty_page_cache() -> None:
    """Drop what this machine has of files in its memory. Raises UserError where that is not allowed."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError as error:
        raise UserError(f"--cold writes to {_DROP_CACHES}, which root alone may ({error.strerror})") from None

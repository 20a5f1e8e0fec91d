"""What a start costs: to list the images of a data set, ours against torchvision's and timm's, and to the first update.

    python benchmark.py startup --images 1281167
    python benchmark.py startup --images 87364 --classes 21841

The images are hard links to a few small JPEG files, with their folders in the kernel's cache: this is the processor's
time, to which a file server adds its own. Each listing has a process of its own, and its imports are not counted.
train.py is timed from its start to its first loss, beside the imports that any program with timm's models has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.datasets import ImageFolder

from benchmarks.rounds import OUTPUT, Range, Rows, rounds_flag
from tlt import UserError, open_images
from volo.config.flag_table import DIR, POSITIVE, Group, flag

_LINKS = 40_000  # to one file; file systems allow 65,000

FLAGS = (
    Group(
        "Data set",
        flag("--images", POSITIVE, [100_000, 1_281_167], "sizes to measure", nargs="+"),
        flag("--classes", POSITIVE, 1000, "folders that they are in"),
        flag("--directory", DIR, "", "where they are made and removed (the system's own)"),
    ),
    Group("Measuring", rounds_flag(3), *OUTPUT),
)
LISTINGS: dict[str, Callable[[str], object]] = {
    "tlt.open_images": lambda root: open_images(root, "train"),
    "torchvision.datasets.ImageFolder": lambda root: ImageFolder(f"{root}/train"),
    "timm's ReaderImageFolder": lambda root: ReaderImageFolder(f"{root}/train"),
}
_TRAIN = "--model volo_d1 --device cpu -b 4 --workers 2 --epochs 1 --warmup-epochs 0 --log-interval 1"
PROGRAMS = {
    "import torch, timm": ["-c", "import torch, timm; print('loss 0')"],
    "train.py to its first update": [f"{Path(__file__).parents[1]}/train.py", ".", *_TRAIN.split()],
}


def run(args: Namespace) -> None:
    """Measure one size after the other."""
    rows = Rows(args, ("images", "what", "CPU s", "s"))
    for images in args.images:
        with tempfile.TemporaryDirectory(prefix="benchmark-startup-", dir=args.directory or None) as root:
            make_data(Path(root), images, args.classes)
            works: dict[str, Callable[[], dict[str, float]]] = {
                **{name: partial(in_own_process, name, root) for name in LISTINGS},
                **{name: partial(to_first_loss, words, root) for name, words in PROGRAMS.items()},
            }
            found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
            for _ in range(args.rounds):
                for name, work in works.items():
                    found[name].append(work())
            for name, each in found.items():
                times = {key: Range.of([row[key] for row in each]) for key in each[0]}
                rows.write({"images": images, "what": name} | times)


def make_data(root: Path, images: int, classes: int) -> None:
    """Make `root/train` with `images` images, and `root/val` with one of each class."""
    for number in range(images):
        folder = root / "train" / f"n{number % classes + 1_440_000:08d}"
        if number < classes:
            folder.mkdir(parents=True)
            (root / "val" / folder.name).mkdir(parents=True)
        if number % _LINKS == 0:
            source = root / f"{number}.jpg"
            Image.new("RGB", (64, 48)).save(source)
        os.link(source, folder / f"{folder.name}_{number // classes * 7 % 100_003}.JPEG")
        if number < classes:
            os.link(source, root / "val" / folder.name / "0.JPEG")


def in_own_process(name: str, root: str) -> dict[str, float]:
    """Measure a listing in a process that does nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(listing, name, root).result()


def listing(name: str, root: str) -> dict[str, float]:
    """Return what a listing takes."""
    cpu, start = time.process_time(), time.perf_counter()
    _ = LISTINGS[name](root)  # kept until the clocks are read
    return {"CPU s": time.process_time() - cpu, "s": time.perf_counter() - start}


def to_first_loss(words: list[str], root: str) -> dict[str, float]:
    """Start a program of Python, wait in `root` until it prints a loss, and kill it.

    Raises:
        UserError: It ends before.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    start, last = time.perf_counter(), ""
    with subprocess.Popen([sys.executable, *words], cwd=root, start_new_session=True, **pipes) as program:
        assert program.stdout is not None
        try:
            for last in program.stdout:
                if "loss " in last:
                    return {"s": time.perf_counter() - start}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    raise UserError(f"{words[0]} ended before its first update: {last.strip()}")

"""Memory of data workers against the size of the data set: made-up images in a list of names and a label archive.

Every measurement has a process of its own, which loads batches from all over the data set with as many workers, and
adds up what all of them have in memory at the end. A Python list of strings is measured for comparison: whoever reads
from it changes its reference counts, and so gets pages of its own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.memory import resident
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.synthetic import SyntheticBackend, synthetic_folder
from tlt.data.dataset import BatchKey, TrainDataset
from tlt.data.loader import DEFAULT_TIMEOUT
from tlt.data.sources.source import ImageSource
from tlt.data.workers import Workers
from tlt.errors import UserError
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.store import open_labels

PACKED, LIST = "names in one block", "a list of str instead"
WORKERS = (0, 2, 4)
_CLASSES = 1000
_SMALLER = 100  # one in so many entries, for comparison
_LOADED = 50_000  # images loaded in a measurement
_BATCH = 128


@dataclass(frozen=True)
class Measured:
    """Bytes that the main process and its data workers have in memory together.

    Attributes:
        names: How names are held.
        pss, anonymous, private: Sums of `Resident`.
    """

    names: str
    entries: int
    workers: int
    pss: int
    anonymous: int
    private: int


def memory(entries: int) -> list[Measured]:
    """Measure data sets of `entries` images and of a hundredth of them.

    Raises:
        UserError: The system doesn't tell what processes share.
    """
    if resident() is None:
        raise UserError("--entries: memory that processes share is read from /proc, which only Linux has")
    found = []
    for count in dict.fromkeys((max(_BATCH, entries // _SMALLER), entries)):
        with tempfile.TemporaryDirectory(prefix="benchmark-data-") as root:
            make_labels(Path(root), count)
            found += [_in_own_process(root, count, PACKED, number) for number in WORKERS]
            if count == entries:
                found.append(_in_own_process(root, count, LIST, WORKERS[-1]))
    return found


def _in_own_process(root: str, entries: int, names: str, workers: int) -> Measured:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, root, entries, names, workers).result()


def make_labels(root: Path, entries: int) -> None:
    """The label archive of so many made-up images, with maps of a single cell: labels stay on disk anyway."""
    names = made_up(entries, PACKED).paths
    files = [f"{name}.pt" for name in names]
    writer = ArchiveWriter(root, make_header((1, 1, 1), _CLASSES, names, files), names, files)
    cell = LabelMap(np.ones((1, 1, 1), np.float16), np.zeros((1, 1, 1), np.int32))
    for row in range(entries):
        writer.write(row, cell)
    writer.finish()


def made_up(entries: int, names: str) -> ImageSource:
    """So many images, none of which is there, with their sizes."""
    source = synthetic_folder(entries, _CLASSES)
    sizes = np.tile(np.array([[500, 375]], np.uint16), (entries, 1))
    return replace(source, sizes=sizes, paths=source.paths if names == PACKED else list(source.paths))


def measure(root: str, entries: int, names: str, workers: int) -> Measured:
    """Load with so many workers and add up what this process and they have."""
    source = made_up(entries, names)
    labels = open_labels(root, source.paths, num_classes=_CLASSES)
    dataset = TrainDataset(source, AugmentConfig((32, 32)), 0, labels, SyntheticBackend())
    loading = Workers(dataset, workers, False, True, DEFAULT_TIMEOUT, torch.device("cpu"))
    for _ in loading.run(functools.partial(_everywhere, entries)):
        pass
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    found = [memory for memory in map(resident, pids) if memory is not None]
    return Measured(
        names,
        entries,
        workers,
        sum(memory.pss for memory in found),
        sum(memory.anonymous for memory in found),
        sum(memory.private for memory in found),
    )


def _everywhere(entries: int) -> Iterator[BatchKey]:
    """Batches of images from all over the data set, in random order."""
    rows = np.linspace(0, entries - 1, min(entries, _LOADED)).astype(np.int64)
    order = np.random.default_rng(0).permutation(rows).tolist()
    for start in range(0, len(order), _BATCH):
        yield BatchKey(0, tuple(order[start : start + _BATCH]))

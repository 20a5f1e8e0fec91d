"""Memory of data workers by the size of the data set: synthetic images in a list of names and a label archive.

Every measurement has a process of its own, which loads batches from the whole data set and adds up the memory of all
its workers at the end. A Python list of strings is measured for comparison: a worker that reads from it changes its
reference counts, and so gets pages of its own.
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

from benchmarks.feed.labels import one_cell_maps, write_archive
from benchmarks.memory import resident
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.synthetic import SyntheticBackend, synthetic_folder
from tlt.data.batch import BatchKey
from tlt.data.dataset import TrainDataset
from tlt.data.loader import DEFAULT_TIMEOUT
from tlt.data.sources.source import ImageSource
from tlt.data.workers import Workers
from tlt.errors import UserError
from tlt.labels.store import open_labels

PACKED, LIST = "names in one block", "a list of str instead"
WORKERS = (0, 2, 4)
_CLASSES = 1000
_SMALLER = 100  # the smaller data set has one in 100 entries
_LOADED = 50_000  # images loaded in a measurement
_BATCH = 128


@dataclass(frozen=True)
class LoadingMemory:
    """Bytes that the main process and its data workers have in memory together.

    Attributes:
        names: How names are stored.
        pss, anonymous, private: Sums of `Resident`.
    """

    names: str
    entries: int
    workers: int
    pss: int
    anonymous: int
    private: int


def memory(entries: int) -> list[LoadingMemory]:
    """Measure data sets of `entries` images and of a hundredth of them.

    Raises:
        UserError: The system does not tell which memory processes share.
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


def _in_own_process(root: str, entries: int, names: str, workers: int) -> LoadingMemory:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, root, entries, names, workers).result()


def make_labels(root: Path, entries: int) -> None:
    """Write the label archive of `entries` synthetic images, with maps of a single cell: labels stay on disk anyway."""
    write_archive(root, synthetic_images(entries, PACKED).paths, *one_cell_maps(entries))


def synthetic_images(entries: int, names: str) -> ImageSource:
    """Return a list of `entries` images that do not exist, with their sizes; `names` is `PACKED` or `LIST`."""
    source = synthetic_folder(entries, _CLASSES)
    sizes = np.tile(np.array([[500, 375]], np.uint16), (entries, 1))
    return replace(source, sizes=sizes, paths=source.paths if names == PACKED else list(source.paths))


def measure(root: str, entries: int, names: str, workers: int) -> LoadingMemory:
    """Load with `workers` workers and add up their memory and that of this process."""
    source = synthetic_images(entries, names)
    labels = open_labels(root, source.paths, num_classes=_CLASSES)
    dataset = TrainDataset(source, AugmentConfig((32, 32)), 0, labels, SyntheticBackend())
    loading = Workers(dataset, workers, False, True, DEFAULT_TIMEOUT)
    for _ in loading.run(functools.partial(_everywhere, entries)):
        pass
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    found = [memory for memory in map(resident, pids) if memory is not None]
    return LoadingMemory(
        names,
        entries,
        workers,
        sum(memory.pss for memory in found),
        sum(memory.anonymous for memory in found),
        sum(memory.private for memory in found),
    )


def _everywhere(entries: int) -> Iterator[BatchKey]:
    """Yield batches of images from the whole data set in random order."""
    rows = np.linspace(0, entries - 1, min(entries, _LOADED)).astype(np.int64)
    order = np.random.default_rng(0).permutation(rows).tolist()
    for start in range(0, len(order), _BATCH):
        yield BatchKey(0, tuple(order[start : start + _BATCH]))

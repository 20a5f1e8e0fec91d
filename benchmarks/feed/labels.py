"""`benchmark.py labels`: what reading a token label costs, out of an archive and out of the published tree of files,
and what memory the data workers of a machine share.

The labels are made in a temporary folder, once as an archive and once as a tree, so that all is read from the page
cache: this measures the cost of the formats, not of a disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.memory import Resident, resident
from benchmarks.speed.loss import Case, random_labels
from benchmarks.timing import Timing, Work, interleaved, machine
from tlt.errors import UserError
from tlt.io.processes import START_METHOD
from tlt.label_map import LabelMap
from tlt.labels.archive import ArchiveReader
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import write_map

PUBLISHED = "published: torch.load"
_IMAGE = (500, 375)  # width and height of the images that the labels are said to be of
_CLASS_FOLDERS = 10
_BATCH = 128  # labels that are read in the order of their rows
_PATIENCE = 600.0  # seconds that the workers wait for each other


class Sizes(NamedTuple):
    """What labels are made: how many, of which classes, on how many cells (rows, columns)."""

    records: int
    top_k: int
    map_size: tuple[int, int]
    num_classes: int


class Sample(NamedTuple):
    """The same labels in both formats."""

    names: list[str]  # of the images
    files: list[str]  # paths of the tree's files
    archive: LabelStore
    tree: LabelStore
    archive_bytes: int
    tree_bytes: int  # as the files' lengths add up


@dataclass(frozen=True)
class Sharing:
    """What reading every label added to the workers' memory, in bytes.

    Attributes:
        rss, pss: Sum over the workers.
        private: Of the worker that has most.
    """

    rss: int
    pss: int
    private: int


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.top_k > args.num_classes:
        raise UserError(f"--top-k {args.top_k} is more than --num-classes {args.num_classes}")
    sizes = Sizes(args.records, args.top_k, tuple(args.map_size), args.num_classes)
    with tempfile.TemporaryDirectory(prefix="benchmark-labels-") as root:
        sample = make_sample(Path(root), sizes)
        compare(sample)
        times = interleaved(arms(sample), args.rounds)
        shared = sharing(sample.archive, args.workers) if resident() else {}
    show = _json if args.json else _table
    print(show(sizes, sample, times, shared, args.workers), flush=True)
    return 0


def make_sample(root: Path, sizes: Sizes) -> Sample:
    """Write random labels as an archive and as a tree."""
    names = [f"class{row % _CLASS_FOLDERS}/image{row}.jpg" for row in range(sizes.records)]
    labels = [f"{name[:-4]}.pt" for name in names]
    writer = ArchiveWriter(
        root / "archive",
        make_header((sizes.top_k, *sizes.map_size), sizes.num_classes, names, labels),
        names,
        labels,
    )
    for folder in range(_CLASS_FOLDERS):
        (root / "tree" / f"class{folder}").mkdir(parents=True)
    for row, label_map in enumerate(random_maps(sizes)):
        writer.write(row, label_map, _IMAGE)
        write_map(root / "tree" / labels[row], label_map, sizes.num_classes)
    manifest = writer.finish()
    files = [str(root / "tree" / label) for label in labels]
    return Sample(
        names,
        files,
        open_labels(root / "archive", names, num_classes=sizes.num_classes),
        open_labels(root / "tree", names, num_classes=sizes.num_classes),
        sum(length for length, _ in manifest.files.values()),
        sum(os.path.getsize(file) for file in files),
    )


def random_maps(sizes: Sizes) -> Iterator[LabelMap]:
    """Label maps as a classifier would make them, one per record."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, sizes.records, _BATCH):
        count = min(_BATCH, sizes.records - start)
        batch = random_labels(Case(count, (1, 1), sizes.num_classes, sizes.top_k, sizes.map_size, "float32"), generator)
        for values, ids in zip(batch.values.numpy(), batch.ids.numpy(), strict=True):
            yield LabelMap(values, ids)


def compare(sample: Sample) -> None:
    """Make sure that all ways to read give the same labels.

    Raises:
        RuntimeError: They don't.
    """
    for index in range(len(sample.names)):
        values, ids = torch.load(sample.files[index], weights_only=True).numpy()
        for store in (sample.archive, sample.tree):
            read = store.read(index, *_IMAGE)
            if not (np.array_equal(read.values, values) and np.array_equal(read.ids, ids)):
                raise RuntimeError(f"label {index} out of {store.root} is not that of {sample.files[index]}")


def arms(sample: Sample) -> dict[str, Work]:
    """What is timed, by name. Every arm reads every label once a round; all but one in random order."""
    read, files = sample.archive.read, sample.files
    load = torch.load
    return {
        "archive": _Reader(len(files), lambda index: read(index, *_IMAGE)),
        "archive, sorted batches": _Reader(len(files), lambda index: read(index, *_IMAGE), batch=_BATCH),
        "tree, checked": _Reader(len(files), lambda index: sample.tree.read(index, *_IMAGE)),
        PUBLISHED: _Reader(len(files), lambda index: load(files[index])),
        # What the call above meant when the published code was written: any pickle is run.
        f"{PUBLISHED}, unsafe": _Reader(len(files), lambda index: load(files[index], weights_only=False)),
    }


class _Reader:
    """Read every label once; with `batch`, that many at a time are read in the order of their rows."""

    def __init__(self, count: int, read: Callable[[int], object], batch: int = 1) -> None:
        self.read = read
        generator = np.random.default_rng(0)
        order = generator.permutation(count).tolist()
        self.order = [index for start in range(0, count, batch) for index in sorted(order[start : start + batch])]

    def __call__(self, number: int) -> int:
        read = self.read
        for index in self.order:
            read(index)
        return len(self.order)


def sharing(archive: LabelStore, workers: int) -> dict[str, Sharing]:
    """Memory of `workers` processes that each read all labels: out of the archive, and keeping copies of their own."""
    return {name: _in_workers(keep, archive, workers) for name, keep in (("archive", False), ("private copies", True))}


def _in_workers(keep: bool, archive: LabelStore, workers: int) -> Sharing:
    context: Any = multiprocessing.get_context(START_METHOD)  # as data workers are started
    queue, barrier = context.SimpleQueue(), context.Barrier(workers)
    start = partial(context.Process, target=_worker, args=(archive, keep, barrier, queue), daemon=True)
    processes = [start() for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a worker of the memory measurement ended with exit code {process.exitcode}")
    added = [queue.get() for _ in processes]
    return Sharing(sum(m.rss for m in added), sum(m.pss for m in added), max(m.private for m in added))


def _worker(archive: LabelStore, keep: bool, barrier: Barrier, queue: SimpleQueue[Resident]) -> None:
    archive.read(0, *_IMAGE)
    barrier.wait(_PATIENCE)
    before = resident()
    barrier.wait(_PATIENCE)
    kept = []
    assert isinstance(archive.reader, ArchiveReader)
    for index in range(len(archive)):
        tensors, place = archive.reader.rows.tensors(index)
        kept.append([tensor[place].copy() for tensor in tensors.values()] if keep else None)
    barrier.wait(_PATIENCE)  # a page is shared while the others have it too
    after = resident()
    barrier.wait(_PATIENCE)
    assert before is not None and after is not None
    queue.put(after - before)


def _ratios(times: dict[str, Timing]) -> dict[str, float]:
    return {name: times[PUBLISHED].median / timing.median for name, timing in times.items()}


def _json(sizes: Sizes, sample: Sample, times: dict[str, Timing], shared: dict[str, Sharing], workers: int) -> str:
    return json.dumps(
        {
            "sizes": sizes._asdict(),
            "machine": machine(),
            "bytes": {"archive": sample.archive_bytes, "tree": sample.tree_bytes},
            "seconds": {name: asdict(timing) for name, timing in times.items()},
            f"{PUBLISHED}/arm": _ratios(times),
            "workers": workers,
            "memory": {name: asdict(found) for name, found in shared.items()} or None,
        }
    )


def _table(sizes: Sizes, sample: Sample, times: dict[str, Timing], shared: dict[str, Sharing], workers: int) -> str:
    (h, w), ratios = sizes.map_size, _ratios(times)
    lines = [
        f"label read: {sizes.records} labels, {sizes.top_k} of {sizes.num_classes} classes per cell of {h} x {w}; "
        f"archive {sample.archive_bytes / 1e6:.1f} MB, tree {sample.tree_bytes / 1e6:.1f} MB in {len(sample.files)} "
        "files, all in the page cache",
        machine(),
        f"{'':32}{'median':>12}{'rounds':>18}{'ratio':>10}",
    ]
    for name, timing in times.items():
        lines.append(f"{name:32}{timing.median * 1e6:9.1f} us{timing.spread(1e6):>18}{ratios[name]:9.1f}x")
    lines.append(f"us per label, one process; ratio: {PUBLISHED!r} / this")
    if not shared:
        return "\n".join([*lines, "memory of workers: not measured, only Linux has /proc/PID/smaps_rollup"])
    lines += [
        f"memory that {workers} workers took, each of which read every label (smaps_rollup, before and after)",
        f"{'':32}{'sum of RSS':>14}{'sum of PSS':>14}{'private, each':>16}",
    ]
    for name, found in shared.items():
        lines.append(f"{name:32}{_mb(found.rss):>14}{_mb(found.pss):>14}{_mb(found.private):>16}")
    return "\n".join([*lines, "PSS counts a page that n processes share 1/n in each; RSS counts it n times"])


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"

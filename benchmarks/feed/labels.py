"""`benchmark.py labels`: the cost of reading token labels from an archive and from the published tree of files, and the
memory that the data workers of a machine share.

The labels are made in a temporary folder, as an archive and as a tree, and are read from the page cache: this measures
the cost of the formats, not of a disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.memory import Resident, resident
from benchmarks.speed.loss import LossCase, random_labels
from benchmarks.timing import Timing, Work, interleaved, machine
from tlt.errors import UserError
from tlt.io.processes import START_METHOD
from tlt.label_map import LabelMap
from tlt.labels.archive import ArchiveReader
from tlt.labels.archive_writer import ArchiveWriter, make_header
from tlt.labels.store import LabelStore, open_labels
from tlt.labels.tree import write_map

PUBLISHED = "published: torch.load"
_IMAGE = (500, 375)  # width and height of the labelled images
_CLASS_FOLDERS = 10
_BATCH = 128  # labels that are read in the order of their rows
_PATIENCE = 600.0  # seconds that the workers wait for each other


class Sizes(NamedTuple):
    """Sizes of the labels; `map_size` is (rows, columns)."""

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
    tree_bytes: int  # sum of the files' lengths


@dataclass(frozen=True)
class Sharing:
    """Bytes that reading every label added to the workers' memory.

    Attributes:
        rss, pss: Sum over the workers.
        private: Largest of the workers.
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
        times = interleaved(candidates(sample), args.rounds)
        shared = sharing(sample.archive, args.workers) if resident() else {}
    show = _json if args.json else _table
    print(show(sizes, sample, times, shared, args.workers), flush=True)
    return 0


def make_sample(root: Path, sizes: Sizes) -> Sample:
    """Write random labels as an archive and as a tree."""
    names = [f"class{row % _CLASS_FOLDERS}/image{row}.jpg" for row in range(sizes.records)]
    files = [str((root / "tree" / name).with_suffix(".pt")) for name in names]
    archive_bytes = write_archive(root / "archive", names, sizes, random_maps(sizes), _IMAGE)
    for folder in range(_CLASS_FOLDERS):
        (root / "tree" / f"class{folder}").mkdir(parents=True)
    for file, label_map in zip(files, random_maps(sizes), strict=True):
        write_map(Path(file), label_map, sizes.num_classes)
    return Sample(
        names,
        files,
        open_labels(root / "archive", names, num_classes=sizes.num_classes),
        open_labels(root / "tree", names, num_classes=sizes.num_classes),
        archive_bytes,
        sum(os.path.getsize(file) for file in files),
    )


def write_archive(
    root: Path, names: Sequence[str], sizes: Sizes, maps: Iterable[LabelMap], image: tuple[int, int] = (0, 0)
) -> int:
    """Write label maps of the images `names` as an archive and return its bytes. `image`: their size, if known."""
    files = [f"{name}.pt" for name in names]
    writer = ArchiveWriter(
        root, make_header((sizes.top_k, *sizes.map_size), sizes.num_classes, names, files), names, files
    )
    for row, label_map in enumerate(maps):
        writer.write(row, label_map, image)
    return sum(length for length, _ in writer.finish().files.values())


def one_cell_maps(count: int) -> tuple[Sizes, Iterable[LabelMap]]:
    """Return `count` maps of a single cell, for measurements that read no label, and their sizes for 1000 classes."""
    cell = LabelMap(np.ones((1, 1, 1), np.float16), np.zeros((1, 1, 1), np.int32))
    return Sizes(count, 1, (1, 1), 1000), repeat(cell, count)


def random_maps(sizes: Sizes) -> Iterator[LabelMap]:
    """Yield label maps as a classifier would make them, one per record."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, sizes.records, _BATCH):
        count = min(_BATCH, sizes.records - start)
        batch = random_labels(
            LossCase(count, (1, 1), sizes.num_classes, sizes.top_k, sizes.map_size, "float32"), generator
        )
        for values, ids in zip(batch.values.numpy(), batch.ids.numpy(), strict=True):
            yield LabelMap(values, ids)


def compare(sample: Sample) -> None:
    """Raise RuntimeError unless all ways to read give the same labels."""
    for index in range(len(sample.names)):
        values, ids = torch.load(sample.files[index], weights_only=True).numpy()
        for store in (sample.archive, sample.tree):
            read = store.read(index, *_IMAGE)
            if not (np.array_equal(read.values, values) and np.array_equal(read.ids, ids)):
                raise RuntimeError(f"label {index} out of {store.root} is not that of {sample.files[index]}")


def candidates(sample: Sample) -> dict[str, Work]:
    """Return what is timed, by name. Each candidate reads every label once a round, all but one in random order."""
    read, files = sample.archive.read, sample.files
    load = torch.load
    return {
        "archive": _Reader(len(files), lambda index: read(index, *_IMAGE)),
        "archive, sorted batches": _Reader(len(files), lambda index: read(index, *_IMAGE), batch=_BATCH),
        "tree, checked": _Reader(len(files), lambda index: sample.tree.read(index, *_IMAGE)),
        PUBLISHED: _Reader(len(files), lambda index: load(files[index])),
        # The meaning of the call above when the published code was written: any pickle is run.
        f"{PUBLISHED}, unsafe": _Reader(len(files), lambda index: load(files[index], weights_only=False)),
    }


class _Reader:
    """Reads every label once; each `batch` labels are read in the order of their rows."""

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
    """Measure `workers` processes that each read all labels, from the archive and into private copies."""
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

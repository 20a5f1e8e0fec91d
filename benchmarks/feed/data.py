"""`benchmark.py data`: every loader backend and timm's loader over the same images, in one run.

    crops       uint8 crops with their plans, and labels out of an archive: what loading is, without the device's part
    batches     the same, then on the device what training does there: warp, colours, normalisation, erasing
    timm        `timm.data.create_loader` without labels. Its prefetching loader has the same two parts: crops, which
                its workers augment, and batches, which are normalised and erased on the device. Without prefetcher
                workers do all of it.

Loaders take turns, so that their ratios hold on a machine with other work too. A ratio is of CPU time, of all
threads and of all data workers, and compares equal parts: crops with crops, batches with batches.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_loader
from torch import Tensor

from benchmarks.conditions import conditions, heading
from benchmarks.feed.data_memory import PACKED, LoadingMemory, memory
from benchmarks.feed.images import MEAN, STD, TimmImages, choose_images, described, make_labels, timm_options
from benchmarks.flags_benchmark import DATA_BACKENDS
from benchmarks.timing import Timing, by_clocks, cpu_seconds
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig, Plan
from tlt.data.backends.choice import create_backend
from tlt.data.backends.decode import BACKENDS
from tlt.data.backends.synthetic import SyntheticBackend, SyntheticLabels, synthetic_folder
from tlt.data.dataset import TrainDataset
from tlt.data.loader import TrainLoader
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.labels.store import LabelStore
from volo.cluster.distributed import choose_device

CROPS, BATCHES = "crops", "batches"
TIMM = "timm"


class LoaderPart(NamedTuple):
    """A loader, and the part of its work that is timed: crops, or batches on the device."""

    loader: str
    part: str


@dataclass
class Timed:
    """Times with one augmentation and number of workers.

    Attributes:
        wall, cpu: Seconds per image.
        missing: The reason why a backend was not measured, by its name.
    """

    recipe: str
    workers: int
    wall: dict[LoaderPart, Timing]
    cpu: dict[LoaderPart, Timing]
    missing: dict[str, str] = field(default_factory=dict)

    def ratio(self, loader: LoaderPart) -> float:
        """Return the CPU time of timm's loader over that of `loader`, for the same part."""
        return self.cpu[LoaderPart(TIMM, loader.part)].median / self.cpu[loader].median


def show_times(args: Namespace, parts: Sequence[Timed], images: str, device: torch.device) -> str:
    """Return the table or JSON of the times; `images` describes the images in words."""
    if args.json:
        found = {"images": images, "size": args.img_size, "batch_size": args.batch_size}
        return json.dumps(
            conditions(args.command_line) | found | {"device": str(device), "parts": [_as_json(p) for p in parts]}
        )
    lines = [
        *heading(args.command_line),
        f"{images}, in the page cache, to {args.img_size} x {args.img_size} in batches of {args.batch_size}; device "
        f"{device}. Medians of {args.rounds} rounds in turns; one thread in the main process and in each worker. "
        "Crops: uint8, with ours their plans and labels of an archive. Batches: warped, coloured, normalised, erased "
        "on the device. x timm: CPU time of timm's `create_loader` over this one's, same part.",
    ]
    for part in parts:
        lines += ["", f"### {part.recipe}, {_who(part.workers)}", "", *_rows(part)]
    return "\n".join(lines)


def show_memory(args: Namespace, found: Sequence[LoadingMemory]) -> str:
    """Return the table or JSON of the measured memory."""
    if args.json:
        rows = [asdict(row) | {"anonymous_per_worker": _each(row, found)} for row in found]
        return json.dumps(conditions(args.command_line) | {"memory": rows})
    lines = [
        *heading(args.command_line),
        "Memory in MB of the main process and its data workers together, after loading from all over a data set of so "
        "many made-up images with a label archive (smaps_rollup). PSS counts a page that n processes share 1/n in each "
        "one, so that a sum has it once; files are libraries, which other programs share too, and labels.",
        "",
        "| images | names | workers | PSS | of that, no file's | private | no file's, per worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        each = _each(row, found)
        sums = " | ".join(f"{size / 1e6:.0f}" for size in (row.pss, row.anonymous, row.private))
        last = "" if each is None else f"{each / 1e6:.1f}"
        lines.append(f"| {row.entries:,} | {row.names} | {row.workers} | {sums} | {last} |")
    return "\n".join(lines)


def _each(row: LoadingMemory, found: Sequence[LoadingMemory]) -> float | None:
    """Return the bytes that each worker adds to the anonymous memory of the main process."""
    alone = {other.entries: other.anonymous for other in found if not other.workers}
    return (row.anonymous - alone[row.entries]) / row.workers if row.workers and row.names == PACKED else None


def _who(workers: int) -> str:
    return f"{workers} workers" if workers else "one process"


def _crops_first(part: Timed) -> list[LoaderPart]:
    return [loader for name in (CROPS, BATCHES) for loader in part.wall if loader.part == name]


def _rows(part: Timed) -> Iterator[str]:
    yield "| loader | part | images/s | CPU ms per image | lowest-highest | x timm |"
    yield "|---|---|---|---|---|---|"
    for loader in _crops_first(part):
        cpu = part.cpu[loader]
        yield (
            f"| {loader.loader} | {loader.part} | {1 / part.wall[loader].median:.0f} | {cpu.median * 1e3:.2f} | "
            f"{cpu.low * 1e3:.2f}-{cpu.high * 1e3:.2f} | {part.ratio(loader):.2f} |"
        )
    for name, reason in part.missing.items():
        yield f"| {name} | not measured: {reason} | | | | |"


def _as_json(part: Timed) -> dict[str, Any]:
    rows = [
        {
            **loader._asdict(),
            "images/s": 1 / part.wall[loader].median,
            "wall_seconds": asdict(part.wall[loader]),
            "cpu_seconds": asdict(part.cpu[loader]),
            "timm_cpu/cpu": part.ratio(loader),
        }
        for loader in _crops_first(part)
    ]
    return {"recipe": part.recipe, "workers": part.workers, "loaders": rows, "not_measured": part.missing}


TIMM_WORKERS = "timm, no prefetcher"
CROP_AND_FLIP = "crop + flip"


Epoch = Callable[[int], Iterator[Tensor]]  # number -> the images of its batches


class LoaderCase(NamedTuple):
    """The images that are loaded, and the settings of the loaders."""

    folder: ImageFolder
    labels: LabelStore
    config: AugmentConfig
    batch_size: int
    workers: int
    device: torch.device


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.entries:
        print(show_memory(args, memory(args.entries)), flush=True)
        return 0
    if args.images < args.batch_size:
        raise UserError(f"--images {args.images} are fewer than one --batch-size {args.batch_size}")
    device, threads = choose_device(args.device, 0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-data-") as root:
            folder = choose_images(args, Path(root))
            labels = make_labels(Path(root) / "labels", folder)
            cases = [
                (name, LoaderCase(folder, labels, config, args.batch_size, workers, device))
                for name, config in recipes(args.img_size, args.aa).items()
                for workers in dict.fromkeys((0, args.workers))
            ]
            parts = [measure(name, case, chosen(args.backend), args.rounds) for name, case in cases]
            print(show_times(args, parts, described(folder), device), flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def recipes(side: int, policy: str) -> dict[str, AugmentConfig]:
    """Return augmentations by name: crops and flips alone, and the whole recipe with RandAugment and erasing."""
    size = (side, side)
    found = {CROP_AND_FLIP: AugmentConfig(size, auto_augment=None, color_jitter=None, reprob=0.0)}
    if policy not in ("", "none"):
        found[f"{policy}, erasing"] = AugmentConfig(size, auto_augment=policy)
    return found


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the backends that `--backend` names, each once."""
    return DATA_BACKENDS if "all" in names else tuple(dict.fromkeys(names))


def measure(recipe: str, case: LoaderCase, backends: Sequence[str], rounds: int) -> Timed:
    """Time timm's loaders and the backends that are available here."""
    epochs = {
        LoaderPart(TIMM, CROPS): timm_loader(case, True, CROPS),
        LoaderPart(TIMM, BATCHES): timm_loader(case, True, BATCHES),
        LoaderPart(TIMM_WORKERS, BATCHES): timm_loader(case, False, BATCHES),
    }
    missing = {}
    for name in backends:
        try:
            for kind in worker_types(name, case.workers):
                shown = f"{name}, threads" if kind == "thread" else name
                epochs |= {LoaderPart(shown, part): our_loader(case, name, part, kind) for part in (CROPS, BATCHES)}
        except UserError as error:
            missing[name] = str(error)
    loaders = {loader: _Pass(case.device, epoch) for loader, epoch in epochs.items()}
    found = by_clocks(loaders, rounds, {"wall": time.perf_counter, "cpu": cpu_seconds})
    return Timed(recipe, case.workers, found["wall"], found["cpu"], missing)


def worker_types(name: str, workers: int) -> tuple[str, ...]:
    """Return the kinds of workers to measure a backend with; DALI always has threads."""
    return ("process", "thread") if workers and name in BACKENDS else ("process",)


def our_loader(case: LoaderCase, name: str, part: str, worker_type: str = "process") -> Epoch:
    """Return an epoch of our training loader. Raises UserError if the backend is not available here."""
    dataset, stage = _dataset(case, name), _finish(case, part)
    stream = IndexStream(len(dataset), case.batch_size, 0)
    loader = TrainLoader(dataset, stream, stage, case.device, case.workers, pin_memory=True, worker_type=worker_type)
    return lambda number: (batch.images for _, _, batch in loader.epoch(number))


def _dataset(case: LoaderCase, name: str) -> TrainDataset:
    if name == SyntheticBackend.name:
        images = synthetic_folder(len(case.folder), len(case.folder.class_names))
        return TrainDataset(images, case.config, 0, SyntheticLabels(images), SyntheticBackend())
    backend = create_backend(name, threads=case.workers, device=case.device)
    return TrainDataset(case.folder, case.config, 0, case.labels, backend)


def _finish(case: LoaderCase, part: str) -> Callable[[Tensor, Plan], Tensor]:
    return DeviceStage(case.config, MEAN, STD).to(case.device) if part == BATCHES else _as_they_are


def _as_they_are(images: Tensor, plan: Plan) -> Tensor:
    return images


def timm_loader(case: LoaderCase, prefetcher: bool, part: str) -> Epoch:
    """Return an epoch of timm's training loader, or of the loader of crops inside its prefetcher."""
    dataset, config = TimmImages(case.folder), case.config
    loader: Any = create_loader(
        dataset,
        (3, *config.size),
        case.batch_size,
        re_prob=config.reprob,
        re_mode=config.remode,
        re_count=config.recount,
        num_workers=case.workers,
        pin_memory=case.device.type == "cuda",
        device=case.device,
        use_prefetcher=prefetcher,
        persistent_workers=case.workers > 0,
        **timm_options(config),
    )
    dataset.keep_a_bit()
    batches = loader.loader if part == CROPS else loader
    return lambda number: (images for images, _ in batches)


class _Pass:
    """Loads all images once and waits for the device."""

    def __init__(self, device: torch.device, epoch: Epoch) -> None:
        self.device, self.epoch = device, epoch

    def __call__(self, number: int) -> int:
        random.seed(number)  # timm draws from the global states
        np.random.seed(number)
        torch.manual_seed(number)
        images = sum(map(len, self.epoch(number)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return images

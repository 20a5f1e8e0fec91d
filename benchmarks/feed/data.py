"""`benchmark.py data`: every loader backend and timm's loader over the same images, in one run.

    crops       uint8 crops with their plans, and labels out of an archive: what loading is, without the device's part
    batches     the same, then on the device what training does there: warp, colours, normalisation, erasing
    timm        `timm.data.create_loader` without labels. Its prefetching loader has the same two parts: crops, which
                its workers augment, and batches, which are normalised and erased on the device. Without prefetcher
                workers do all of it.

Loaders take turns, so that their ratios hold on a machine that does other things too. A ratio is of CPU time, of all
threads and of all data workers, and of like with like: crops over crops, batches over batches.
"""

from __future__ import annotations

import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_loader
from torch import Tensor

from benchmarks.feed.data_memory import memory
from benchmarks.feed.data_report import BATCHES, CROPS, TIMM, Arm, Timed, show_memory, show_times
from benchmarks.feed.images import MEAN, STD, TimmImages, choose_images, described, make_labels, timm_options
from benchmarks.flags_benchmark import DATA_BACKENDS
from benchmarks.timing import by_clocks, cpu_seconds
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

TIMM_WORKERS = "timm, no prefetcher"
CROP_AND_FLIP = "crop + flip"


Epoch = Callable[[int], Iterator[Tensor]]  # number -> the images of its batches


class Case(NamedTuple):
    """What is loaded, and how."""

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
                (name, Case(folder, labels, config, args.batch_size, workers, device))
                for name, config in recipes(args.img_size, args.aa).items()
                for workers in dict.fromkeys((0, args.workers))
            ]
            parts = [measure(name, case, chosen(args.backend), args.rounds) for name, case in cases]
            print(show_times(args, parts, described(folder), device), flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def recipes(side: int, policy: str) -> dict[str, AugmentConfig]:
    """Augmentation by name: crops and flips alone, and the whole recipe with RandAugment and erasing."""
    size = (side, side)
    found = {CROP_AND_FLIP: AugmentConfig(size, auto_augment=None, color_jitter=None, reprob=0.0)}
    if policy not in ("", "none"):
        found[f"{policy}, erasing"] = AugmentConfig(size, auto_augment=policy)
    return found


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The backends that `--backend` names, each once."""
    return DATA_BACKENDS if "all" in names else tuple(dict.fromkeys(names))


def measure(recipe: str, case: Case, backends: Sequence[str], rounds: int) -> Timed:
    """Time timm's loaders and the backends that can be had here."""
    epochs = {
        Arm(TIMM, CROPS): timm_loader(case, True, CROPS),
        Arm(TIMM, BATCHES): timm_loader(case, True, BATCHES),
        Arm(TIMM_WORKERS, BATCHES): timm_loader(case, False, BATCHES),
    }
    missing = {}
    for name in backends:
        try:
            for kind in worker_types(name, case.workers):
                shown = f"{name}, threads" if kind == "thread" else name
                epochs |= {Arm(shown, part): our_loader(case, name, part, kind) for part in (CROPS, BATCHES)}
        except UserError as error:
            missing[name] = str(error)
    arms = {arm: _Pass(case.device, epoch) for arm, epoch in epochs.items()}
    found = by_clocks(arms, rounds, {"wall": time.perf_counter, "cpu": cpu_seconds})
    return Timed(recipe, case.workers, found["wall"], found["cpu"], missing)


def worker_types(name: str, workers: int) -> tuple[str, ...]:
    """The kinds of workers to measure a backend with; DALI has threads anyway."""
    return ("process", "thread") if workers and name in BACKENDS else ("process",)


def our_loader(case: Case, name: str, part: str, worker_type: str = "process") -> Epoch:
    """Our training loader. Raises UserError: the backend can't be had here."""
    dataset, stage = _dataset(case, name), _finish(case, part)
    stream = IndexStream(len(dataset), case.batch_size, 0)
    loader = TrainLoader(dataset, stream, stage, case.device, case.workers, pin_memory=True, worker_type=worker_type)
    return lambda number: (batch.images for _, _, batch in loader.epoch(number))


def _dataset(case: Case, name: str) -> TrainDataset:
    if name == SyntheticBackend.name:
        images = synthetic_folder(len(case.folder), len(case.folder.class_names))
        return TrainDataset(images, case.config, 0, SyntheticLabels(images), SyntheticBackend())
    backend = create_backend(name, threads=case.workers, device=case.device)
    return TrainDataset(case.folder, case.config, 0, case.labels, backend)


def _finish(case: Case, part: str) -> Callable[[Tensor, Plan], Tensor]:
    return DeviceStage(case.config, MEAN, STD).to(case.device) if part == BATCHES else _as_they_are


def _as_they_are(images: Tensor, plan: Plan) -> Tensor:
    return images


def timm_loader(case: Case, prefetcher: bool, part: str) -> Epoch:
    """timm's training loader, or the loader of crops that its prefetcher draws from."""
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
    """All images once, to the end of what was asked of the device."""

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

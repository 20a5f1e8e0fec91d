"""Epochs of our loader and of timm's over the same images, and their times in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_loader
from torch import Tensor

from benchmarks.feed.images import MEAN, STD, TimmImages, timm_options
from benchmarks.flags_benchmark import DATA_BACKENDS
from benchmarks.timing import Timing, by_clocks, cpu_seconds
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig, Plan
from tlt.data.augment.warp import Warp
from tlt.data.backends.choice import create_backend
from tlt.data.backends.synthetic import SyntheticBackend, SyntheticLabels, synthetic_folder
from tlt.data.dataset import TrainDataset
from tlt.data.loader import TrainLoader
from tlt.data.sources.folder import ImageFolder
from tlt.data.sources.image_file import UNLIMITED
from tlt.errors import UserError
from tlt.labels.store import LabelStore

CROPS, BATCHES = "crops", "batches"
TIMM, TIMM_WORKERS = "timm", "timm, no prefetcher"
CROP_AND_FLIP = "crop + flip"


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


Epoch = Callable[[int], Iterator[Tensor]]  # number -> the images of its batches


class LoaderCase(NamedTuple):
    """The images that are loaded, and the settings of the loaders."""

    folder: ImageFolder
    labels: LabelStore
    config: AugmentConfig
    batch_size: int
    workers: int
    device: torch.device


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


def measure(
    recipe: str, case: LoaderCase, backends: Sequence[str], rounds: int, parts: Sequence[str] = (CROPS, BATCHES)
) -> Timed:
    """Time timm's loaders and the backends that are available here."""
    epochs = {LoaderPart(TIMM, part): timm_loader(case, True, part) for part in parts}
    if BATCHES in parts:
        epochs[LoaderPart(TIMM_WORKERS, BATCHES)] = timm_loader(case, False, BATCHES)
    missing = {}
    for name in backends:
        try:
            epochs |= {LoaderPart(name, part): our_loader(case, name, part) for part in parts}
        except UserError as error:
            missing[name] = str(error)
    if case.device.type == "cuda" and SyntheticBackend.name in backends and BATCHES in parts:
        arm = LoaderPart(f"{SyntheticBackend.name}, Triton warp", BATCHES)
        try:
            from tlt.data.augment import warp_triton
        except ImportError:
            missing[arm.loader] = "Triton is not installed"
        else:
            epochs[arm] = our_loader(case, SyntheticBackend.name, BATCHES, warp=warp_triton.warp)
    loaders = {loader: _Pass(case.device, epoch) for loader, epoch in epochs.items()}
    found = by_clocks(loaders, rounds, {"wall": time.perf_counter, "cpu": cpu_seconds})
    return Timed(recipe, case.workers, found["wall"], found["cpu"], missing)


def our_loader(case: LoaderCase, name: str, part: str, warp: Warp | None = None) -> Epoch:
    """Return an epoch of our training loader. Raises UserError if the backend is not available here."""
    dataset, stage = _dataset(case, name), _finish(case, part, warp)
    stream = IndexStream(len(dataset), case.batch_size, 0)
    feed = {"device": case.device, "workers": case.workers, "pin_memory": True, "persistent_workers": True}
    loader = TrainLoader(dataset, stream, stage, **feed)
    return lambda number: (batch.images for _, _, batch in loader.epoch(number))


def _dataset(case: LoaderCase, name: str) -> TrainDataset:
    if name == SyntheticBackend.name:
        images = synthetic_folder(len(case.folder), len(case.folder.class_names))
        return TrainDataset(images, case.config, 0, SyntheticLabels(images), SyntheticBackend())
    backend = create_backend(name, threads=case.workers, device=case.device, max_pixels=UNLIMITED)
    return TrainDataset(case.folder, case.config, 0, case.labels, backend)


def _finish(case: LoaderCase, part: str, warp: Warp | None) -> Callable[[Tensor, Plan], Tensor]:
    return DeviceStage(case.config, MEAN, STD, warp).to(case.device) if part == BATCHES else _as_they_are


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

"""The loader of training batches and the random numbers of a step, for training loops of your own.

`volo train` uses the same targets, MixToken boxes and loss (`volo.train.criterion`) and makes the same batches: with
equal seeds both compute equal numbers. docs/python_api.md shows such a loop, examples/ has whole programs.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_STD
from torch import Tensor

from tlt.data.augment.counter import key
from tlt.data.augment.device_stage import DeviceStage, check_first_batch
from tlt.data.augment.plan import AugmentConfig, Plan
from tlt.data.backends import create_backend
from tlt.data.backends.decode import Backend
from tlt.data.batch import Batch, BatchKey, IndexStream, SkipCounter
from tlt.data.dataset import FeatureReader, LabelReader, LabelView, TrainDataset
from tlt.data.loader import DeviceLoader
from tlt.data.size_schedule import SizeSchedule
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.source import ImageSource
from tlt.errors import in_range, in_range_all, size_of
from tlt.io.jobs import default_workers
from tlt.labels.store import check_label_classes
from tlt.mixtoken import sample_box

EMPTY_BOXES = "MixToken mixes nothing: with fewer than 3 tokens in a row or column its boxes are empty"
# Ids of a step's random streams. They differ from each other, from those of the data (tlt.data.augment.plan.Stream),
# and from those that other code takes from `StepKey.generator`.
_TORCH_STREAM = 0x57E9
_MIX_BOX_STREAM = 0x57EA


@dataclass(frozen=True)
class StepKey:
    """Identifies one forward pass of a run. These four numbers determine every random number drawn in it."""

    seed: int
    update: int  # number of optimizer steps before this one
    micro_batch: int = 0  # number of forward passes before this one in the same update
    rank: int = 0

    def __post_init__(self) -> None:
        in_range_all(0, **self.__dict__)

    def seed_torch(self) -> None:
        """Restart torch's generators, which dropout and stochastic depth use, with the seed of this step."""
        torch.manual_seed(self._key(_TORCH_STREAM) >> 1)  # 63 bits

    def generator(self, stream: int) -> np.random.Generator:
        """Return a new generator for one random stream of this step."""
        return np.random.Generator(np.random.Philox(key=self._key(stream)))

    def _key(self, stream: int) -> int:
        return key(self.seed, stream, self.update, self.micro_batch, self.rank)


def draw_box(step: StepKey, grid: tuple[int, int]) -> Sequence[int]:
    """Draw MixToken's box `(row0, col0, row1, col1)` of a step, in tokens of `grid`. Warn if `grid` has fewer than 3
    rows or columns: every box is empty then."""
    grid = size_of("grid", grid)
    if min(grid) < 3:
        warnings.warn(EMPTY_BOXES, stacklevel=2)
    return sample_box(step.generator(_MIX_BOX_STREAM), grid)


class Loader(DeviceLoader):
    """Yields augmented training batches with token labels, the same as `volo train`. Each pass is the next epoch.

    The loader itself divides the images among the ranks: frameworks must not shard it again. To resume, call
    `epoch(number, start_update)`, which yields the batches of an epoch from a given update on. Raises UserError if the
    images do not fill one global batch, the labels are of other images or classes, a number is out of range, or the
    backend is unknown.

    Args:
        images: The images, from `open_images`.
        labels: The label maps, from `open_labels`. None gives every token the class of its image.
        augment: Augmentation, and size of the images.
        batch_size: Images per batch and rank.
        seed: Seed of the order of the images and of their augmentation.
        mean, std: Normalisation of the images in [0, 1]; one number each makes grey images. None: `augment.mean`.
        device: The device that augments the batches and holds them.
        workers: Number of decoding processes; with 0 this process decodes. None: 8, at most the CPUs of this process,
            or its part of them where a launcher sets LOCAL_WORLD_SIZE.
        world_size, rank: Number of training processes, and the number of this one.
        backend: The decoder: "torchvision", "pil", "dali-cpu", "dali-gpu", or a `Backend`.
        max_pixels: Images with more pixels count as unreadable.
        full_decode: Decode huge JPEGs at full size rather than at 1/2 to 1/8.
        max_bad_images: How many images may be unreadable; see `SkipCounter`.
        drop_last: Leave out the last, smaller batch of an epoch.
        micro_batches: Number of batches per update.
        repeats: How often an epoch shows each of its images.
        sizes: A schedule of image sizes and batch sizes. It replaces the one size and `batch_size`.
        label_view: See `TrainDataset`.
        features: Stored features of teachers, from `open_features`.
        loading: `pin_memory`, `prefetch`, `persistent_workers` and `timeout` of `DeviceLoader`.
    """

    def __init__(
        self,
        images: ImageSource,
        labels: LabelReader | None,
        augment: AugmentConfig,
        batch_size: int,
        seed: int = 42,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        world_size: int = 1,
        rank: int = 0,
        backend: str | Backend = "torchvision",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        full_decode: bool = False,
        max_bad_images: int | None = None,
        drop_last: bool = False,
        micro_batches: int = 1,
        repeats: int = 1,
        sizes: SizeSchedule | None = None,
        label_view: LabelView | None = None,
        features: Sequence[FeatureReader] = (),
        **loading: Any,
    ) -> None:
        in_range_all(1, batch_size=batch_size, micro_batches=micro_batches, world_size=world_size)
        in_range_all(0, seed=seed, max_bad_images=max_bad_images or 0, max_pixels=max_pixels)
        if (info := getattr(labels, "info", None)) is not None:
            check_label_classes(info, "the labels", None, images.class_names)
        workers = default_workers(int(os.environ.get("LOCAL_WORLD_SIZE") or 1)) if workers is None else workers
        if isinstance(backend, str):
            backend = create_backend(backend, max_pixels, workers, device, dct_scaling=not full_decode)
        mean_batch = batch_size if sizes is None else sizes.mean_batch
        global_batch = round(mean_batch * micro_batches * world_size)
        self.index_stream = IndexStream(
            len(images), global_batch, seed, world_size, rank, micro_batches, drop_last, repeats, sizes
        )
        self.dataset = TrainDataset(images, augment, seed, labels, backend, label_view, features)
        stage = DeviceStage(augment, augment.mean if mean is None else mean, std)
        if torch.device(device).type == "cuda":
            check_first_batch(stage)
        self.device_stage: Callable[[Tensor, Plan], Tensor] = stage.to(device)
        super().__init__(self.dataset, device, workers, skips=SkipCounter(len(images), max_bad_images), **loading)
        self._next = 0

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return self.index_stream.batches_per_epoch

    @property
    def sampler(self) -> "Loader":
        """The loader itself, because frameworks call `loader.sampler.set_epoch(number)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._next = epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch. Raises what `epoch` raises."""
        # The epoch is counted when the first batch is asked for: Lightning calls `iter` before `set_epoch`.
        epoch = self._next
        self._next = self._next + 1
        yield from self.epoch(epoch)

    def epoch(self, epoch: int, start_update: int = 0, again: tuple[int, int] | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch from an update on. `batch.key.last` marks the last micro-batch of an update.
        `again` (R, N) adds, before every N-th update of the run, rank R's last micro-batch of that update, with
        `batch.key.again`. Raise WorkerDied if a data worker was killed or ran out of memory, and UserError if there are
        too many unreadable images, a label map is bad, reading a file takes too long, or an epoch has no such update.
        """
        in_range_all(0, epoch=epoch)
        in_range("start_update", start_update, 0, self.index_stream.updates_per_epoch, whole=True)
        return self._load(self._keys(epoch, start_update, again))

    def _keys(self, epoch: int, start_update: int, again: tuple[int, int] | None = None) -> Iterator[BatchKey]:
        stream = self.index_stream
        sizes = stream.sizes_of(epoch)[start_update:]
        rank, every = again or (stream.rank, 0)
        others = replace(stream, rank=rank).epoch(epoch, start_update) if every else repeat([])
        updates = zip(stream.epoch(epoch, start_update), others, sizes, strict=False)
        first = epoch * stream.updates_per_epoch + start_update
        for update, (micro_batches, theirs, size) in enumerate(updates, first):
            samples = sum(map(len, micro_batches))
            if every and update % every == 0:
                yield BatchKey(epoch, tuple(theirs[-1].tolist()), True, samples, size, len(theirs))
            for number, indices in enumerate(micro_batches, start=1):
                yield BatchKey(epoch, tuple(indices.tolist()), number == len(micro_batches), samples, size)

    def _finish(self, batch: Batch) -> Tensor:
        assert batch.plan is not None
        return self.device_stage(batch.images, batch.plan)

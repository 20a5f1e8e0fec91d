"""The loader and the steps of a training loop of one's own.

`volo train` uses the same targets, boxes and loss (`volo.train.criterion`) and makes the same batches: equal seeds give
equal numbers. docs/python_api.md has such a loop, examples/ whole programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from tlt.data.dataset import LabelReader, LabelView, TrainDataset
from tlt.data.loader import DeviceLoader
from tlt.data.size_schedule import SizeSchedule
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.source import ImageSource
from tlt.mixtoken import sample_box

EMPTY_BOXES = "MixToken mixes nothing: with fewer than 3 tokens in a row or column its boxes are empty"
# Random streams of one step, different from each other and from those of the data (tlt.data.augment.plan.Stream) and of
# other users of a step's generators.
_TORCH_STREAM, _MIX_BOX_STREAM = 0x57E9, 0x57EA


@dataclass(frozen=True)
class StepKey:
    """Identifies one forward pass of a run: every random number drawn in it is a function of these four numbers.

    Attributes:
        update: Optimizer steps before this one.
        micro_batch: Forward passes before this one in the same update.
    """

    seed: int
    update: int
    micro_batch: int = 0
    rank: int = 0

    def seed_torch(self) -> None:
        """Seed dropout and stochastic depth: torch's generators restart with the seed of this step."""
        torch.manual_seed(self._key(_TORCH_STREAM) >> 1)  # 63 bits

    def generator(self, stream: int) -> np.random.Generator:
        """Return the generator of one random stream of this step."""
        return np.random.Generator(np.random.Philox(key=self._key(stream)))

    def _key(self, stream: int) -> int:
        return key(self.seed, stream, self.update, self.micro_batch, self.rank)


def draw_box(step: StepKey, grid: tuple[int, int]) -> Sequence[int]:
    """Draw MixToken's box `(row0, col0, row1, col1)` of a step, in tokens of `grid`, from its own random stream. Warns
    where it is always empty."""
    if min(grid) < 3:
        warnings.warn(EMPTY_BOXES, stacklevel=2)
    return sample_box(step.generator(_MIX_BOX_STREAM), grid)


class Loader(DeviceLoader):
    """Augmented training batches with token labels, those of `volo train`. Each pass is the next epoch.

    It deals the images to the ranks by itself: frameworks must not shard it again. `epoch(number, start_update)` yields
    the batches of an epoch from any update on, which is all that resuming takes.

    Args:
        images: What `open_images` found.
        labels: What `open_labels` found; None: every token has the class of its image.
        augment: Augmentation and size of the images.
        batch_size: Images of one rank in a batch.
        seed: Of order and augmentation.
        mean, std: By which the images are normalised, in [0, 1]; one of each makes grey images. None: `augment.mean`.
        device: Where the batches are finished and stay.
        workers: Decoding processes; 0 decodes in this one.
        world_size, rank: How many processes train, and which of them this is.
        backend: Decoder: "torchvision", "pil", "dali-cpu", "dali-gpu", or an object.
        max_pixels: Larger images count as unreadable.
        full_decode: Decode huge JPEGs at their full size, not at 1/2 to 1/8.
        max_bad_images: How many images may be unreadable, see `SkipCounter`.
        drop_last: Leave out the last, smaller batch of an epoch.
        micro_batches: Batches of one update.
        repeats: How often an epoch shows each of its images.
        sizes: A schedule of image sizes, with batches of its own, in place of the one size and `batch_size`.
        label_view: See `TrainDataset`.
        loading: `pin_memory`, `prefetch`, `persistent_workers` and `timeout` of `DeviceLoader`.

    Raises:
        UserError: Fewer images than a global batch, or an unknown backend.
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
        workers: int = 8,
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
        **loading: Any,
    ) -> None:
        if isinstance(backend, str):
            backend = create_backend(backend, max_pixels, workers, device, dct_scaling=not full_decode)
        mean_batch = batch_size if sizes is None else sizes.mean_batch
        global_batch = round(mean_batch * micro_batches * world_size)
        self.index_stream = IndexStream(
            len(images), global_batch, seed, world_size, rank, micro_batches, drop_last, repeats, sizes
        )
        self.dataset = TrainDataset(images, augment, seed, labels, backend, label_view)
        stage = DeviceStage(augment, augment.mean if mean is None else mean, std)
        if torch.device(device).type == "cuda":
            check_first_batch(stage)
        self.device_stage: Callable[[Tensor, Plan], Tensor] = stage.to(device)
        super().__init__(self.dataset, device, workers, skips=SkipCounter(len(images), max_bad_images), **loading)
        self._next = 0

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return self.index_stream.batches_per_epoch

    @property
    def sampler(self) -> Loader:
        """Itself: frameworks call `loader.sampler.set_epoch(number)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._next = epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch. Raises as `epoch`."""
        # Counted when the first batch is asked for: Lightning calls `iter` before `set_epoch`.
        epoch, self._next = self._next, self._next + 1
        yield from self.epoch(epoch)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from an update on; `key` says which is the last one of its update.

        Raises:
            WorkerDied: A data worker was killed or has no memory left.
            UserError: Too many unreadable images, a bad label map, a file that can't be read in time.
        """
        return self._load(self._keys(epoch, start_update))

    def _keys(self, epoch: int, start_update: int) -> Iterator[BatchKey]:
        sizes = self.index_stream.sizes_of(epoch)[start_update:]
        for micro_batches, size in zip(self.index_stream.epoch(epoch, start_update), sizes, strict=True):
            samples = sum(map(len, micro_batches))
            for number, indices in enumerate(micro_batches, start=1):
                yield BatchKey(epoch, tuple(indices.tolist()), number == len(micro_batches), samples, size)

    def _finish(self, batch: Batch) -> Tensor:
        assert batch.plan is not None
        return self.device_stage(batch.images, batch.plan)

"""Batches for training and evaluation, finished on the device, and the count of images that can't be read.

What is loaded is a function of (seed, epoch, index stream); workers, pinning and prefetching change nothing. No loader
holds random state, and none touches torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tlt.data.batch import Batch, BatchKey, Skipped
from tlt.data.dataset import BatchDataset, EvalDataset
from tlt.data.workers import Workers
from tlt.errors import UserError
from tlt.io.text import printable

DEFAULT_TIMEOUT = 300.0  # seconds
SKIP_SHARE, SKIP_FLOOR, SKIP_CEILING = 0.001, 10, 100


@dataclass
class SkipCounter:
    """Counts the images that can't be read, each once however often it comes up.

    Attributes:
        images: Size of the data set.
        limit: How many of them may fail (`--max-bad-images`); None: 0.1 % of the images, but no fewer than 10 and no
            more than 100.
        reasons: Path -> reason of those that were met.
    """

    images: int
    limit: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    _new: list[Skipped] = field(default_factory=list, repr=False)

    @property
    def allowed(self) -> int:
        if self.limit is not None:
            return self.limit
        return min(SKIP_CEILING, max(SKIP_FLOOR, math.floor(SKIP_SHARE * self.images)))

    @property
    def total(self) -> int:
        """Images that were met and failed."""
        return len(self.reasons)

    def record(self, skipped: Iterable[Skipped]) -> None:
        """Count. Raises UserError when more than `allowed` images failed."""
        for image in skipped:
            if image.path in self.reasons:
                continue
            self.reasons[image.path] = image.reason
            self._new.append(image)
            if self.total > self.allowed:
                raise UserError(
                    f"{self.total} of {self.images} images can't be read, more than --max-bad-images {self.allowed}; "
                    f"the last one is {printable(image.path)} ({image.reason}): mend them, or raise the limit"
                )

    def take_new(self) -> list[Skipped]:
        """The images that failed for the first time since the last call."""
        new, self._new = self._new, []
        return new

    def take_lines(self) -> list[str]:
        """One line for each of `take_new`, for the log."""
        return [f"left out {printable(path)}: {reason}" for path, reason in self.take_new()]


class DeviceLoader:
    """What the loaders of training and evaluation share: loading, counting images that can't be read, the device stage.

    Args:
        dataset: What to load.
        device: Where the batches are finished and stay.
        workers: Worker processes; 0 loads in this thread. A backend with threads of its own is given one thread.
        pin_memory: Copy through page-locked memory (CUDA only).
        prefetch: On CUDA, copy and finish the next batch on a side stream while this one is used. Also pins: the host
            waits for a copy from memory that isn't page-locked.
        persistent_workers: Keep the workers from epoch to epoch.
        timeout: Seconds to wait for a batch before giving up, naming the file that is being read; 0 waits for ever.
            Without workers nobody watches.
        skips: Counter of unreadable images; None: a new one with the default limit.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        device: torch.device | str = "cpu",
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: bool = True,
        persistent_workers: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        skips: SkipCounter | None = None,
    ) -> None:
        self.skips = skips or SkipCounter(len(dataset))
        self.device = torch.device(device)
        on_cuda = self.device.type == "cuda"
        self.prefetch, pin = prefetch and on_cuda, (pin_memory or prefetch) and on_cuda
        self._workers = Workers(dataset, workers, pin, persistent_workers, timeout)

    def _finish(self, batch: Batch) -> Tensor:
        """The device stage: uint8 images on the device to float32 ones."""
        raise NotImplementedError

    def _load(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        """Yield the batches of the keys. Raises UserError."""
        loaded = self._counted(keys)
        return self._one_ahead(loaded) if self.prefetch else map(self._finished, loaded)

    def _counted(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        for batch in self._workers.run(keys):
            self.skips.record(batch.skipped)
            yield batch

    def _finished(self, batch: Batch) -> Batch:
        if batch.images.is_cuda:
            # Made on a stream of the backend: its memory must not be given away before this stream is done with it.
            batch.images.record_stream(torch.cuda.current_stream(self.device))
        batch = batch.to(self.device, non_blocking=True)
        with torch.no_grad():
            return replace(batch, images=self._finish(batch))

    def _one_ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        stream = _side_stream(self.device)
        waiting: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                begun = self._finished(batch), stream.record_event()
            if waiting is not None:
                yield self._handed_over(*waiting)
            waiting = begun
        if waiting is not None:
            yield self._handed_over(*waiting)

    def _handed_over(self, batch: Batch, done: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for tensor in batch.tensors():
            # Made on the side stream: its memory must not be given away before the current stream is done with it.
            tensor.record_stream(current)
        return batch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all passes and loaders: torch keeps what was freed on a stream for that stream alone."""
    return torch.cuda.Stream(device)


class EvalLoader(DeviceLoader):
    """Every image of this rank once, in order; images that can't be read are left out and counted in `skips`.

    Args:
        batch_size: Images per batch.
        stage: Normalises (images uint8 on the device) to float32.
        loading: `device`, `workers` and the other arguments of `DeviceLoader`.
        world_size, rank: The images are dealt to the ranks in turn.

    Attributes:
        left_out: Images of this rank that the newest pass has left out so far.
    """

    def __init__(
        self,
        dataset: EvalDataset,
        batch_size: int,
        stage: Callable[[Tensor], Tensor],
        world_size: int = 1,
        rank: int = 0,
        **loading: Any,
    ) -> None:
        super().__init__(dataset, **loading)
        self.dataset, self.batch_size, self.stage = dataset, batch_size, stage
        self.left_out = 0
        self._indices = range(rank, len(dataset), world_size)

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self._indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches. Raises UserError: too many unreadable images, or a file that can't be read in time."""
        self.left_out = 0
        for batch in self._load(self._keys()):
            self.left_out += len(batch.skipped)
            if batch.size:
                yield batch

    def _finish(self, batch: Batch) -> Tensor:
        return self.stage(batch.images)

    def _keys(self) -> Iterator[BatchKey]:
        for start in range(0, len(self._indices), self.batch_size):
            yield BatchKey(0, tuple(self._indices[start : start + self.batch_size]))

"""Loaders: workers make host batches, the device stage finishes them, one batch ahead on CUDA.

What is loaded is a function of (seed, epoch, index stream); workers, pinning and prefetching change nothing. No loader
holds random state, and none touches torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt.data.augment.index_stream import IndexStream, eval_indices
from tlt.data.augment.plan import Plan
from tlt.data.dataset import BatchDataset, BatchKey, EvalDataset, HostBatch, Skipped, TrainDataset
from tlt.data.threads import ThreadWorkers
from tlt.data.workers import Workers
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import LabelBatch

DEFAULT_TIMEOUT = 300.0  # seconds
SKIP_SHARE, SKIP_FLOOR, SKIP_CEILING = 0.001, 10, 100

Finish = Callable[[Tensor, HostBatch], Tensor]


@dataclass
class Batch:
    """One micro-batch on the training device; B images of (H, W)."""

    images: Tensor  # (B, 3, H, W) float32, normalised and erased
    classes: Tensor  # (B,) int64
    indices: Tensor  # (B,) int64, of the images shown (a replaced image's is the replacement's)
    affine: Tensor  # (B, 2, 3) float32, unit square of the output -> unit square of the source
    visible: Tensor  # (B, 4) float32 x0, y0, x1, y1: share of the source that the crop shows
    labels: LabelBatch | None
    skipped: list[Skipped]  # images that could not be read
    bad_labels: list[Skipped]  # images whose label map was replaced
    size: int  # B
    sizes: Tensor = field(default_factory=lambda: torch.empty(0, 2))  # (B, 2) width, height of the files; on the CPU

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        found = [self.images, self.classes, self.indices, self.affine, self.visible]
        return found + ([self.labels.values, self.labels.ids, self.labels.area] if self.labels else [])


@dataclass
class SkipCounter:
    """Counts the images that can't be read, each once however often it comes up.

    Attributes:
        images: Size of the data set.
        limit: How many of them may fail (`--max-bad-images`); None: 0.1 % of the images, but no fewer than 10 and no
            more than 100.
        known: Path -> reason of those that are known to be unreadable (`ImageSource.unreadable`): they count from the
            start, and are told there.
        reasons: Path -> reason of those that were met.
        events: How often a place in a batch had to be filled otherwise or left out.
    """

    images: int
    limit: int | None = None
    known: Mapping[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    events: int = 0
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
        met = self.total
        for image in skipped:
            self.events += 1
            if image.path not in self.reasons:
                self.reasons[image.path] = image.reason
                if image.path not in self.known:
                    self._new.append(image)
        if self.total > met:
            self.check()

    def check(self) -> None:
        """Raise UserError when more than `allowed` images are known or were found to be unreadable."""
        failed = {**self.known, **self.reasons}
        if len(failed) > self.allowed:
            path, reason = next(reversed(failed.items()))
            again = ", then run tlt index again" if self.known else ""
            raise UserError(
                f"{len(failed)} of {self.images} images can't be read, more than --max-bad-images {self.allowed}; "
                f"the last one is {printable(path)} ({reason}): mend them{again}, or raise the limit"
            )

    def known_images(self) -> list[Skipped]:
        """Those of `known`."""
        return [Skipped(*each) for each in self.known.items()]

    def take_new(self) -> list[Skipped]:
        """The images that failed for the first time since the last call."""
        new, self._new = self._new, []
        return new

    def take_lines(self) -> list[str]:
        """One line for each of `take_new`, for the log."""
        return [f"left out {printable(path)}: {reason}" for path, reason in self.take_new()]


class TrainLoader:
    """Augmented micro-batches of one rank.

    Args:
        dataset: What to load.
        index_stream: Which images, in which order; cuts them into updates and micro-batches.
        device_stage: Finishes (images uint8 on the device, plan) to float32 images.
        device: Training device.
        workers: Worker processes or threads; 0 loads in this thread.
        pin_memory: Copy through page-locked memory (CUDA only).
        prefetch: On CUDA, copy and finish the next batch on a side stream while this one is trained on. Also pins: the
            host waits for a copy from memory that isn't page-locked.
        persistent_workers: Keep the workers from epoch to epoch.
        timeout: Seconds to wait for a batch before giving up, naming the file in hand; 0 waits for ever. Without
            workers there is nobody to watch.
        skips: Counter of unreadable images; None: a new one with the default limit.
        worker_type: "process", or "thread": threads of this process. A backend that needs threads has them anyway.
    """

    def __init__(
        self,
        dataset: TrainDataset,
        index_stream: IndexStream,
        device_stage: Callable[[Tensor, Plan], Tensor],
        device: torch.device | str = "cpu",
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: bool = True,
        persistent_workers: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        skips: SkipCounter | None = None,
        worker_type: str = "process",
    ) -> None:
        pin_memory = pin_memory or prefetch
        self.dataset = dataset
        self.index_stream = index_stream
        self.skips = skips or SkipCounter(len(dataset))
        self._workers = _workers(dataset, workers, worker_type, pin_memory, persistent_workers, timeout, device)
        self._feed = _Feed(functools.partial(_augmented, device_stage), torch.device(device), prefetch)

    def __len__(self) -> int:
        """Updates per epoch."""
        return self.index_stream.updates_per_epoch

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[tuple[bool, int, Batch]]:
        """Yield `(last, samples, batch)` for each micro-batch from update `start_update` on.

        `last` marks the last micro-batch of its update, `samples` counts this rank's images in the update.

        Raises:
            WorkerDied: Data workers died, for the second time in the epoch.
            UserError: Too many unreadable images, a bad label map, a hung worker.
        """
        for host, batch in self._feed.run(self._workers.run(lambda: self._keys(epoch, start_update)), self.skips):
            yield host.key.last, host.key.update_samples, batch

    def take_deaths(self) -> list[str]:
        """Why workers had to be started anew since the last call."""
        taken = self._workers.deaths.copy()
        self._workers.deaths.clear()
        return taken

    def _keys(self, epoch: int, start_update: int) -> Iterator[BatchKey]:
        for micro_batches in self.index_stream.epoch(epoch, start_update):
            samples = sum(len(indices) for indices in micro_batches)
            for number, indices in enumerate(micro_batches, start=1):
                yield BatchKey(epoch, tuple(indices.tolist()), number == len(micro_batches), samples)


class EvalLoader:
    """Every image of this rank once, in order; images that can't be read are left out and counted in `skips`.

    Args:
        batch_size: Images per batch.
        stage: Normalises (images uint8 on the device) to float32.
        world_size, rank: The images are dealt to the ranks in turn.
        may_be_empty: Not one of the images needs to be readable. The others: as `TrainLoader`.

    Attributes:
        left_out: Images of this rank that the newest pass has left out so far.
    """

    def __init__(
        self,
        dataset: EvalDataset,
        batch_size: int,
        stage: Callable[[Tensor], Tensor],
        device: torch.device | str = "cpu",
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: bool = True,
        persistent_workers: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        skips: SkipCounter | None = None,
        world_size: int = 1,
        rank: int = 0,
        may_be_empty: bool = False,
        worker_type: str = "process",
    ) -> None:
        pin_memory = pin_memory or prefetch
        self.dataset = dataset
        self.batch_size = batch_size
        self.may_be_empty = may_be_empty
        self.skips = skips or SkipCounter(len(dataset))
        self.left_out = 0
        self._indices = eval_indices(len(dataset), world_size, rank).tolist()
        self._workers = _workers(dataset, workers, worker_type, pin_memory, persistent_workers, timeout, device)
        self._feed = _Feed(lambda images, host: stage(images), torch.device(device), prefetch)

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self._indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches. Raises UserError as `TrainLoader.epoch`, and where not one image can be read."""
        shown = self.left_out = 0
        keys = self._keys()
        for host, batch in self._feed.run(self._workers.run(self._keys), self.skips):
            _check_complete(host, next(keys, host.key))
            shown += batch.size
            self.left_out += len(host.skipped)
            if batch.size:
                yield batch
        if self._indices and not shown and not self.may_be_empty:
            path, reason = next(iter(self.skips.reasons.items()))
            where = f" in {printable(self.dataset.root)}" if self.dataset.root else ""
            raise UserError(
                f"not one of {len(self._indices)} images{where} can be read, the first is {printable(path)} ({reason})"
            )

    def _keys(self) -> Iterator[BatchKey]:
        for start in range(0, len(self._indices), self.batch_size):
            yield BatchKey(0, tuple(self._indices[start : start + self.batch_size]))


def _check_complete(host: HostBatch, key: BatchKey) -> None:
    """Raises UserError: the batch doesn't hold each image of the key once, but for those that it names as skipped."""
    shown = host.indices.tolist()
    readable = set(shown).intersection(key.indices)
    if host.key != key or len(readable) != len(shown) or len(shown) + len(host.skipped) != len(key.indices):
        raise UserError(
            f"images {key.indices[0]} to {key.indices[-1]} were to be seen once, {len(key.indices)} in all; there came "
            f"{len(shown)}, and {len(host.skipped)} unreadable ones: start again, this is a defect"
        )


def _workers(
    dataset: BatchDataset,
    workers: int,
    worker_type: str,
    pin_memory: bool,
    persistent: bool,
    timeout: float,
    device: torch.device | str,
) -> Workers | ThreadWorkers:
    if worker_type == "thread" or dataset.backend.in_threads:
        return ThreadWorkers(dataset, workers, pin_memory, timeout, torch.device(device))
    return Workers(dataset, workers, pin_memory, persistent, timeout, torch.device(device))


def _augmented(stage: Callable[[Tensor, Plan], Tensor], images: Tensor, host: HostBatch) -> Tensor:
    assert host.plan is not None
    return stage(images, host.plan)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all passes and loaders: torch keeps what was freed on a stream for that stream alone."""
    return torch.cuda.Stream(device)


class _Feed:
    """From host batches to batches on the device."""

    def __init__(self, finish: Finish, device: torch.device, prefetch: bool) -> None:
        self.finish = finish
        self.device = device
        self.ahead = prefetch and device.type == "cuda"

    def run(self, hosts: Iterator[HostBatch], skips: SkipCounter) -> Iterator[tuple[HostBatch, Batch]]:
        counted = _counted(hosts, skips)
        return self._run_ahead(counted) if self.ahead else ((host, self._move(host)) for host in counted)

    def _run_ahead(self, hosts: Iterator[HostBatch]) -> Iterator[tuple[HostBatch, Batch]]:
        stream = _side_stream(self.device)
        waiting: tuple[HostBatch, Batch, torch.cuda.Event] | None = None
        for host in hosts:
            with torch.cuda.stream(stream):
                batch = self._move(host)
                done = stream.record_event()
            if waiting is not None:
                yield self._handed_over(*waiting)
            waiting = host, batch, done
        if waiting is not None:
            yield self._handed_over(*waiting)

    def _handed_over(self, host: HostBatch, batch: Batch, done: torch.cuda.Event) -> tuple[HostBatch, Batch]:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for tensor in batch.tensors():
            # Made on the side stream: its memory must not be given away before the current stream is done with it.
            tensor.record_stream(current)
        return host, batch

    def _move(self, host: HostBatch) -> Batch:
        move = functools.partial(Tensor.to, device=self.device, non_blocking=True)
        if host.images.is_cuda:
            # Made on a stream of the thread that loaded it: see `_handed_over`.
            host.images.record_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad():
            images = self.finish(move(host.images), host)
        return Batch(
            images=images,
            classes=move(host.classes),
            indices=move(host.indices),
            affine=move(host.affine),
            visible=move(host.visible),
            labels=host.labels.to(self.device, non_blocking=True) if host.labels else None,
            skipped=host.skipped,
            bad_labels=host.bad_labels,
            size=len(host.indices),
            sizes=host.sizes,
        )


def _counted(hosts: Iterator[HostBatch], skips: SkipCounter) -> Iterator[HostBatch]:
    for host in hosts:
        skips.record(host.skipped)
        yield host

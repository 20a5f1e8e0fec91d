"""Datasets whose key is a whole micro-batch, so that one worker makes one batch and the worker count changes nothing.

Training: read every file once, draw the plan for the sizes found, decode the crops. An image that can't be decoded is
replaced by another one that is a function of (seed, epoch, index, attempt), and reported. Evaluation: timm's resize and
centre crop; an image that can't be decoded is left out, and reported.

Legend: B images, (H, W) output size.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tlt import geometry
from tlt.data.augment.counter import uniform
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Plan, Steps, draw_steps, make_plan
from tlt.data.backends.decode import Backend, Decoded, Encoded, PilBackend, Request, Size, TorchvisionBackend
from tlt.data.sources.image_file import BadImage, check_size
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import LabelBatch, LabelMap

MAX_ATTEMPTS = 20  # images tried for one place in a batch before the data set is called unreadable
CROP_MODES = ("center", "squash", "border")
_REPLACEMENT_STREAM = 64  # of counter.uniform, apart from those of tlt.data.augment.plan.Stream
_FILTERS = {BILINEAR: "bilinear", BICUBIC: "bicubic"}


class Skipped(NamedTuple):
    """An image that was left out, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class BatchKey:
    """What a worker is asked for: the images `indices` in their `epoch`; from the number of images on, repetitions.

    `last` tells whether it is the last micro-batch of its update, `update_samples` how many images this rank has in
    that update; both only travel along.
    """

    epoch: int
    indices: tuple[int, ...]
    last: bool = True
    update_samples: int = 0


@dataclass
class HostBatch:
    """What a worker returns. B can be smaller than asked for in evaluation."""

    key: BatchKey
    images: Tensor  # (B, 3, H, W) uint8; on the training device already where the backend decodes there
    classes: Tensor  # (B,) int64
    indices: Tensor  # (B,) int64, of the images that were loaded
    sizes: Tensor  # (B, 2) int64 width, height of the images' files
    affine: Tensor  # (B, 2, 3) float32, unit square of the output -> unit square of the source, as labels take it
    visible: Tensor  # (B, 4) float32 x0, y0, x1, y1: share of the source that the crop shows, as labels take it
    plan: Plan | None  # None in evaluation
    labels: LabelBatch | None
    skipped: list[Skipped]  # images
    bad_labels: list[Skipped]  # images whose label map was replaced (--bad-label skip or uniform)

    def __getstate__(self) -> dict[str, Any]:
        """What goes from a worker to the main process: small tensors as arrays, in the message itself. A tensor takes
        shared memory of its own, a file descriptor and a connection."""
        return self.__dict__ | {name: getattr(self, name).numpy() for name in _SMALL_TENSORS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {name: torch.from_numpy(state[name]) for name in _SMALL_TENSORS}

    def pin_memory(self) -> HostBatch:
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        tensors = {name: part if part.is_cuda else part.pin_memory() for name, part in tensors.items()}
        return replace(self, labels=self.labels.pin_memory() if self.labels else None, **tensors)


_SMALL_TENSORS = ("classes", "indices", "sizes", "affine", "visible")
_TENSORS = ("images", "classes", "indices", "affine", "visible")


_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory")  # what torch says


@dataclass(frozen=True)
class Fault:
    """A user's error met in a worker: it travels as data, because DataLoader would wrap it into a traceback.

    Attributes:
        no_memory: Whether the worker has none left, which may pass.
        kind: Of the error.
    """

    message: str
    no_memory: bool = False
    kind: type[UserError] = UserError


# From the configuration, the steps that a plan was composed of, the plan and the labels of a batch: the labels, and the
# affine (B, 2, 3) and visible part (B, 4) with which they are read in place of the plan's.
LabelView = Callable[[AugmentConfig, Steps, Plan, LabelBatch], tuple[LabelBatch, Tensor, Tensor]]


class LabelReader(Protocol):
    """Token labels by image index (`tlt.labels.store`)."""

    def read(self, index: int, width: int, height: int) -> LabelMap:
        """The label map of image `index`, whose size in pixels is given. Raises UserError naming the file."""

    def take_faults(self) -> list[tuple[str, str]]:
        """(image, reason) of the maps that `read` replaced since the last call."""


class BatchDataset(Dataset[HostBatch | Fault]):
    """What training and evaluation share."""

    def __init__(self, source: ImageSource, backend: Backend) -> None:
        self.source = source
        self.root = source.root
        self.classes = source.classes
        self.backend = backend
        self.board = WorkerStatus(0)

    def __len__(self) -> int:
        return len(self.source)

    def path(self, index: int) -> str:
        """Where image `index` is, for messages."""
        return self.source.path(index % len(self))

    def __getitem__(self, key: BatchKey) -> HostBatch | Fault:
        try:
            return self.load(key)
        except UserError as error:
            return Fault(str(error), kind=type(error))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
                return Fault("a data worker has no memory left", no_memory=True)
            raise
        finally:
            self.board.mark(-1)

    def load(self, key: BatchKey) -> HostBatch:
        """The batch of a key. Raises UserError."""
        raise NotImplementedError

    def _open(self, index: int) -> Encoded:
        index %= len(self)
        self.board.mark(index)
        size, most = self.source.known_size(index), self.backend.max_pixels
        if size is not None:
            check_size(*size, most)  # before its bytes are read
        return self.backend.open(self.path(index), self.source.read(index, most), size)

    def _skip(self, index: int, error: BadImage) -> Skipped:
        return Skipped(self.path(index), str(error))


class TrainDataset(BatchDataset):
    """Augmented training batches, a function of (seed, epoch, indices).

    Args:
        folder: The training images.
        config: Augmentation.
        seed: Of crops, augmentation and replacements.
        labels: Token labels in the folder's order, or None.
        backend: Decoder; None: torchvision's.
        label_view: How the maps of a batch are read in place of the plan's own way (`tlt.upstream.behaviour.views`).
    """

    def __init__(
        self,
        folder: ImageSource,
        config: AugmentConfig,
        seed: int,
        labels: LabelReader | None = None,
        backend: Backend | None = None,
        label_view: LabelView | None = None,
    ) -> None:
        super().__init__(folder, backend or TorchvisionBackend())
        self.config = config
        self.seed = seed
        self.labels = labels
        self.label_view = label_view

    def load(self, key: BatchKey) -> HostBatch:
        slots = _Slots(self, key)
        images = torch.empty(0)
        rounds: list[Plan] = []
        place = [0] * len(key.indices)  # of each row's plan in the concatenated rounds
        rows = list(range(len(key.indices)))
        while rows:
            encoded = [slots.open(row) for row in rows]
            plan = self._plan(key, [slots.indices[row] for row in rows], encoded)
            planned = sum(map(len, rounds))
            for i, row in enumerate(rows):
                place[row] = planned + i
            rounds.append(plan)
            decoded = self._decode(encoded, plan)
            if len(rounds) == 1:
                images = decoded.images
            else:
                images[rows] = decoded.images
            for i, error in decoded.bad.items():
                slots.replace(rows[i], error)
            rows = [rows[i] for i in decoded.bad]
        plan = rounds[0] if len(rounds) == 1 else Plan.concatenate(rounds).select(place)
        return self._batch(key, slots, images, plan)

    def replacement(self, epoch: int, index: int, attempt: int) -> int:
        """Index of the image that stands in for `index` in an epoch, after `attempt` (0, 1, ...) others failed."""
        draws = uniform(self.seed, epoch, [index], _REPLACEMENT_STREAM, MAX_ATTEMPTS)
        return int(draws[0, attempt] * len(self))

    def _plan(self, key: BatchKey, indices: list[int], encoded: list[Encoded]) -> Plan:
        widths, heights = [image.width for image in encoded], [image.height for image in encoded]
        return make_plan(self.config, self.seed, key.epoch, indices, widths, heights)

    def _decode(self, encoded: list[Encoded], plan: Plan) -> Decoded:
        self.board.mark(-1)
        requests = [
            Request(image, (crop[0], crop[1], crop[2], crop[3]), self.config.size, _FILTERS[interpolation])
            for image, crop, interpolation in zip(encoded, plan.crop.tolist(), plan.interpolation.tolist(), strict=True)
        ]
        return self.backend.decode_batch(requests, self.config.size)

    def _batch(self, key: BatchKey, slots: _Slots, images: Tensor, plan: Plan) -> HostBatch:
        shown = [index % len(self) for index in slots.indices]
        labels, bad_labels = self._labels(shown, plan.source.tolist())
        affine, visible = (torch.from_numpy(part).float() for part in (plan.normalised_affine(), plan.visible()))
        if labels is not None and self.label_view is not None:
            steps = draw_steps(self.config, self.seed, key.epoch, np.array(slots.indices), plan.source)
            labels, affine, visible = self.label_view(self.config, steps, plan, labels)
        return HostBatch(
            key=key,
            images=images,
            classes=torch.from_numpy(self.classes[shown]),
            indices=torch.tensor(shown),
            sizes=torch.from_numpy(plan.source),
            affine=affine,
            visible=visible,
            plan=plan,
            labels=labels,
            skipped=slots.skipped,
            bad_labels=bad_labels,
        )

    def _labels(self, indices: list[int], sizes: list[list[int]]) -> tuple[LabelBatch | None, list[Skipped]]:
        if self.labels is None:
            return None, []
        maps = [self.labels.read(index, *size) for index, size in zip(indices, sizes, strict=True)]
        return LabelBatch.stack(maps), [Skipped(*fault) for fault in self.labels.take_faults()]


class _Slots:
    """The places of a batch: which image each has now, and those that had to be replaced."""

    def __init__(self, dataset: TrainDataset, key: BatchKey) -> None:
        self.dataset = dataset
        self.key = key
        self.indices = list(key.indices)
        self.attempts = [0] * len(self.indices)
        self.skipped: list[Skipped] = []

    def open(self, row: int) -> Encoded:
        """The file of a place, or of the first replacement that can be opened."""
        while True:
            try:
                return self.dataset._open(self.indices[row])
            except BadImage as error:
                self.replace(row, error)

    def replace(self, row: int, error: BadImage) -> None:
        self.skipped.append(self.dataset._skip(self.indices[row], error))
        attempt = self.attempts[row]
        if attempt == MAX_ATTEMPTS:
            path, reason = self.skipped[-1]
            raise UserError(
                f"{attempt + 1} images in a row can't be read, the last one {printable(path)} ({reason}): "
                f"check the images in {printable(self.dataset.root)}"
            )
        self.indices[row] = self.dataset.replacement(self.key.epoch, self.key.indices[row], attempt)
        self.attempts[row] += 1


class EvalDataset(BatchDataset):
    """Images for evaluation, as timm's `create_transform(is_training=False)` shows them.

    Args:
        folder: The images.
        size: (H, W) of the output.
        crop_pct: Output size over resized size; above 1 the resized image is padded (black; `fill` for "border").
        crop_mode: "center": shorter side to size / crop_pct, then the centre. "squash": both sides to size / crop_pct.
            "border": longer side to size / crop_pct, padded.
        interpolation: A name of `tlt.data.backends.decode.INTERPOLATIONS`.
        fill: Colour 0..255 of the padding of "border"; timm takes the mean.
        backend: Decoder; None: Pillow's, so that every pixel is timm's.

    Raises:
        UserError: Unknown crop mode, or a crop ratio that is not positive.
    """

    def __init__(
        self,
        folder: ImageSource,
        size: Size,
        crop_pct: float = 0.875,
        crop_mode: str = "center",
        interpolation: str = "bicubic",
        fill: Sequence[int] = (124, 116, 104),
        backend: Backend | None = None,
    ) -> None:
        super().__init__(folder, backend or PilBackend())
        if crop_mode not in CROP_MODES:
            raise UserError(f"crop mode {crop_mode}: choose from {', '.join(CROP_MODES)}")
        if crop_pct <= 0:
            raise UserError(f"--crop-pct {crop_pct}: give a positive ratio")
        self.size = size
        self.crop_pct = crop_pct
        self.crop_mode = crop_mode
        self.interpolation = interpolation
        self.fill = tuple(fill) if crop_mode == "border" else (0, 0, 0)

    def load(self, key: BatchKey) -> HostBatch:
        opened: list[tuple[int, Encoded]] = []
        failed: dict[int, BadImage] = {}
        for index in key.indices:
            try:
                opened.append((index, self._open(index)))
            except BadImage as error:
                failed[index] = error
        self.board.mark(-1)
        decoded = self.backend.decode_batch([self._request(image) for _, image in opened], self.size, self.fill)
        failed |= {opened[row][0]: error for row, error in decoded.bad.items()}
        rows = [row for row in range(len(opened)) if row not in decoded.bad]
        indices, shown = [opened[row][0] for row in rows], [opened[row][1] for row in rows]
        affine, visible = self._geometry(shown)
        return HostBatch(
            key=key,
            images=decoded.images[rows] if decoded.bad else decoded.images,
            classes=torch.from_numpy(self.classes[np.array(indices, np.int64)]),
            indices=torch.tensor(indices, dtype=torch.int64),
            sizes=torch.tensor([(image.width, image.height) for image in shown]).view(-1, 2),
            affine=affine,
            visible=visible,
            plan=None,
            labels=None,
            skipped=[self._skip(index, failed[index]) for index in key.indices if index in failed],
            bad_labels=[],
        )

    def show(self, encoded: Encoded) -> Tensor:
        """(3, H, W) uint8 of one image. Raises BadImage."""
        decoded = self.backend.decode_batch([self._request(encoded)], self.size, self.fill)
        for error in decoded.bad.values():
            raise error
        return decoded.images[0]

    def _request(self, encoded: Encoded) -> Request:
        resized = resized_size(self.size, self.crop_pct, self.crop_mode, encoded.width, encoded.height)
        top, left = (centre_offset(side, crop) for side, crop in zip(resized, self.size, strict=True))
        return Request(encoded, None, resized, self.interpolation, top, left)

    def _geometry(self, images: list[Encoded]) -> tuple[Tensor, Tensor]:
        """(B, 2, 3) and (B, 4): where in the image the shown crop lies, both in shares."""
        if not images:
            return torch.empty(0, 2, 3), torch.empty(0, 4)
        windows = np.zeros((len(images), 4))
        source = np.array([(image.width, image.height) for image in images], np.float64)
        for row, image in enumerate(images):
            resized = resized_size(self.size, self.crop_pct, self.crop_mode, image.width, image.height)
            top, left = (centre_offset(side, crop) for side, crop in zip(resized, self.size, strict=True))
            windows[row] = np.array([left, top, self.size[1], self.size[0]]) / (resized[::-1] * 2)
        x, y, width, height = (windows * np.tile(source, 2)).T
        affine = geometry.crop(x, y, width, height, self.size[1], self.size[0])
        affine = geometry.normalise(affine, (source[:, 1], source[:, 0]), self.size)
        corners = np.concatenate([windows[:, :2], windows[:, :2] + windows[:, 2:]], axis=1).clip(0, 1)
        return torch.from_numpy(affine).float(), torch.from_numpy(corners).float()


def resized_size(size: Size, crop_pct: float, crop_mode: str, width: int, height: int) -> Size:
    """Height and width to which timm resizes an image of width x height before the centre crop of `size`."""
    target = tuple(math.floor(side / crop_pct) for side in size)
    if crop_mode == "squash":
        return target[0], target[1]
    if crop_mode == "center" and target[0] == target[1]:
        # torchvision's Resize: the longer side is cut off, not rounded.
        short, long = target[0], int(target[0] * max(width, height) / min(width, height))
        return (short, long) if height <= width else (long, short)
    ratios = height / target[0], width / target[1]
    ratio = max(ratios) if crop_mode == "border" else min(ratios)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def centre_offset(side: int, crop: int) -> int:
    """Where torchvision's centre crop of `crop` pixels begins on a side; negative: that many pixels of padding."""
    if side < crop:
        return -((crop - side) // 2)
    return round((side - crop) / 2)


_OWN = threading.local()  # .slot: of a worker, be it a process or a thread


class WorkerStatus:
    """Shared between workers and main process: who has begun, which image each worker has in hand, and since when."""

    def __init__(self, workers: int) -> None:
        self._index = torch.full((max(workers, 1),), -1, dtype=torch.int64).share_memory_()
        self._since = torch.zeros(max(workers, 1), dtype=torch.float64).share_memory_()
        self._begun = torch.zeros(workers, dtype=torch.bool).share_memory_()

    def mark(self, index: int) -> None:
        """Note that this worker begins with image `index` (-1: with none)."""
        slot = getattr(_OWN, "slot", 0)
        # monotonic() is one clock for all processes of a machine.
        self._since.numpy()[slot] = time.monotonic()  # in a tenth of the time that torch takes for one number
        self._index.numpy()[slot] = index

    def begin(self, worker: int) -> None:
        """Note, in a worker, that it has begun."""
        _OWN.slot = worker
        self._begun[worker] = True

    def nobody_begun(self) -> None:
        """Note that new workers are about to be started."""
        self._begun.zero_()

    def not_begun(self) -> list[int]:
        """The workers that have not begun yet."""
        return (~self._begun).nonzero().flatten().tolist()

    def longest(self) -> tuple[int, float] | None:
        """Index and seconds of the image that has been in hand for longest, None if no worker has one."""
        busy = [(s, i) for i, s in zip(self._index.tolist(), self._since.tolist(), strict=True) if i >= 0]
        if not busy:
            return None
        since, index = min(busy)
        return index, time.monotonic() - since

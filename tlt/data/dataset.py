"""Data sets whose key is a whole micro-batch: one worker makes one batch, and the number of workers changes nothing.

Training reads every file once, draws the plan for the image sizes, and decodes the crops. Another image, a function of
(seed, epoch, index, attempt), replaces an image that can't be decoded, which is reported. Evaluation applies timm's
resize and centre crop; it skips and reports an image that can't be decoded.

Legend: B images, (H, W) output size.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from tlt import geometry
from tlt.data.augment.counter import uniform
from tlt.data.augment.plan import BICUBIC, BILINEAR, AugmentConfig, Plan, Stream, make_plan
from tlt.data.backends.decode import RESIZE_FILTERS, Backend, Encoded, PilBackend, Request, Size, TorchvisionBackend
from tlt.data.batch import Batch, BatchKey, FeatureBatch, Skipped
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError, WorkerDied, in_range, one_of
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, LabelBatch, LabelMap

MAX_ATTEMPTS = 20  # replacements tried for one image before we call the data set unreadable
LESS_MEMORY = (
    "lower --workers or --batch-size, raise the limit of open files (ulimit -n), and in a container give /dev/shm more "
    "room (docker --shm-size)"
)
CROP_MODES = ("center", "squash", "border")
_FILTERS = {BILINEAR: "bilinear", BICUBIC: "bicubic"}
# Parts of torch's messages when memory, shared memory or file descriptors have run out.
_NO_MEMORY = re.compile("allocate memory|allocate shared memory|No space left on device|[Tt]oo many open files|ancdata")

# Takes the plan and the labels of a batch; returns the labels, and the affine (B, 2, 3) and visible part (B, 4) that
# replace those of the plan for reading them.
LabelView = Callable[[Plan, LabelBatch], tuple[LabelBatch, Tensor, Tensor]]


class LabelReader(Protocol):
    """Reads token labels by image index (`tlt.labels.store`)."""

    def read(self, index: int, width: int, height: int) -> LabelMap:
        """Return the label map of image `index`, whose size is in pixels. Raise UserError, which names the file."""

    def take_faults(self) -> list[tuple[str, str]]:
        """Return (image, reason) for each map that `read` replaced since the last call."""


class FeatureReader(Protocol):
    """Reads stored features of teachers by image index (`tlt.labels.features`)."""

    @property
    def key(self) -> str:
        """The name of these features in `Batch.features`."""

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the features of these images. Raise UserError, which names the archive."""

    def take_faults(self) -> list[tuple[str, str]]:
        """Return (image, reason) for each image that `batch` has left out since the last call."""


class WorkerStatus:
    """Records which image each worker is reading and since when, in memory that all processes share. Raises
    RuntimeError if there are workers, and torch gets no shared memory."""

    def __init__(self, workers: int) -> None:
        # Without workers the only row belongs to the main process.
        rows = np.full((max(workers, 1), 2), -1.0)  # index, time
        self._rows = torch.from_numpy(rows).share_memory_() if workers else torch.from_numpy(rows)

    def mark(self, index: int) -> None:
        """Record that this worker starts to read image `index`, or with -1 that it reads none."""
        worker = get_worker_info()
        self._rows.numpy()[worker.id if worker else 0] = index, time.monotonic()  # one clock for all processes

    def longest(self) -> tuple[int, float] | None:
        """Return the image that a worker has been reading for longest, and for how many seconds, or None."""
        begun = [(since, int(index)) for index, since in self._rows.tolist() if index >= 0]
        return (min(begun)[1], time.monotonic() - min(begun)[0]) if begun else None


def out_of_memory(error: Exception) -> WorkerDied | None:
    """Return WorkerDied if `error` says that memory, shared memory or file descriptors have run out, else None."""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        reason = str(error).split("\n")[0] or "MemoryError"
        return WorkerDied(f"a data worker has no memory left ({reason}): {LESS_MEMORY}")
    return None


class BatchDataset(Dataset[Batch | UserError]):
    """The base class of the data sets for training and evaluation."""

    def __init__(self, images: ImageSource, backend: Backend, labels: LabelReader | None = None) -> None:
        _check_names(images, labels, "labels")
        self.labels = labels
        self.source = images
        self.root = images.root
        self.classes = images.classes
        self.backend = backend
        self.worker_status = WorkerStatus(0)

    def __len__(self) -> int:
        return len(self.source)

    def path(self, index: int) -> str:
        """Return the path of image `index`, for messages."""
        return self.source.path(index % len(self))

    def __getitem__(self, key: BatchKey) -> Batch | UserError:
        """Return the batch of a key, or its UserError: DataLoader would turn a raised error into a traceback."""
        try:
            batch = self.load(key)
            for tensor in batch.large_tensors() if get_worker_info() else ():
                tensor.share_memory_()  # if memory is short, raises RuntimeError here rather than in a thread of torch
            return batch
        except UserError as error:
            return error
        except (MemoryError, RuntimeError) as error:
            if died := out_of_memory(error):
                return died
            raise
        finally:
            self.worker_status.mark(-1)

    def load(self, key: BatchKey) -> Batch:
        """Make the batch of a key. Raise UserError if that fails."""
        raise NotImplementedError

    def _open(self, index: int) -> Encoded:
        index %= len(self)
        self.worker_status.mark(index)
        return self.backend.open(self.path(index), self.source.read(index, self.backend.max_pixels))

    def _read_labels(self, indices: Sequence[int], sizes: Sequence[Any]) -> tuple[LabelBatch | None, list[Skipped]]:
        """Return the maps of images of these (width, height) `sizes`, and the images whose map was replaced."""
        if self.labels is None or not indices:
            return None, []
        maps = [self.labels.read(index, *size) for index, size in zip(indices, sizes, strict=True)]
        return LabelBatch.stack(maps), [Skipped(*fault) for fault in self.labels.take_faults()]

    def _skip(self, index: int, error: BadImage) -> Skipped:
        return Skipped(self.path(index), str(error))


def _check_names(images: ImageSource, reader: Any, of: str) -> None:
    """Raise UserError if a reader of labels or features is of other images."""
    if getattr(reader, "names", images.paths) != images.paths:
        raise UserError(
            f"the {of} are of other images than these of {printable(images.root)}, or in another order: open "
            f"them with tlt.open_{of}(path, images.paths)"
        )


class _Opened(NamedTuple):
    """An image of a batch, or its replacement, before decoding."""

    image: int  # its index
    encoded: Encoded
    attempt: int  # 0 for the image itself, n for the n-th of its replacements


class TrainDataset(BatchDataset):
    """Makes augmented training batches, as a function of (seed, epoch, indices). `seed` is that of crops, augmentation
    and replacements. The `labels` are of the same images, in their order, else a UserError is raised. `label_view`
    replaces the plan's geometry for reading the maps of a batch (see `tlt.upstream.behaviour`). `features` are those of
    stored teachers, of the same images. The default decoder is torchvision's."""

    def __init__(
        self,
        images: ImageSource,
        config: AugmentConfig,
        seed: int,
        labels: LabelReader | None = None,
        backend: Backend | None = None,
        label_view: LabelView | None = None,
        features: Sequence[FeatureReader] = (),
    ) -> None:
        super().__init__(images, backend or TorchvisionBackend(), labels)
        for reader in features:
            _check_names(images, reader, "features")
        self.features = {reader.key: reader for reader in features}
        self.config = config
        self.seed = seed
        self.label_view = label_view

    def load(self, key: BatchKey) -> Batch:
        config = self.config if key.size is None else replace(self.config, size=key.size)
        skipped: list[Skipped] = []
        opened = [self._first_readable(key.epoch, index, 0, skipped) for index in key.indices]
        plan, images, bad = self._decode(config, key.epoch, opened, range(len(opened)))
        while rows := list(bad):  # replace the images that can't be decoded
            skipped += [self._skip(opened[row].image, error) for row, error in bad.items()]
            for row in rows:
                opened[row] = self._first_readable(key.epoch, key.indices[row], opened[row].attempt + 1, skipped)
            plan, images[rows], bad = self._decode(config, key.epoch, opened, rows)
        image_indices = [each.image % len(self) for each in opened]
        affine, visible = (torch.from_numpy(part).float() for part in (plan.normalised_affine(), plan.visible()))
        labels, faults = self._read_labels(image_indices, plan.image_sizes.tolist())
        if labels is not None and self.label_view is not None:
            labels, affine, visible = self.label_view(plan, labels)
        features = {key: reader.batch(image_indices) for key, reader in self.features.items()}
        faults += [Skipped(*fault) for reader in self.features.values() for fault in reader.take_faults()]
        return Batch(
            images,
            classes=torch.from_numpy(self.classes[image_indices]),
            indices=torch.tensor(image_indices),
            affine=affine,
            visible=visible,
            labels=labels,
            features=features,
            skipped=skipped,
            bad_labels=faults,
            plan=plan,
            key=key,
            num_classes=len(self.source.class_names),
        )

    def _decode(
        self, config: AugmentConfig, epoch: int, opened: Sequence[_Opened], rows: Sequence[int]
    ) -> tuple[Plan, Tensor, dict[int, BadImage]]:
        """Draw the plan of a batch, decode the crops of some `rows`, and return both with the errors by row."""
        self.worker_status.mark(-1)
        sizes = np.array([(each.encoded.width, each.encoded.height) for each in opened]).T
        plan = make_plan(config, self.seed, epoch, [each.image for each in opened], *sizes)
        decoded = self.backend.decode_batch([self._request(opened[row].encoded, plan, row) for row in rows], plan.size)
        return plan, decoded.images, {rows[position]: error for position, error in decoded.bad.items()}

    def replacement(self, epoch: int, index: int, attempt: int) -> int:
        """Return the image that replaces `index` in an epoch after `attempt` (0, 1, ...) other replacements failed."""
        draws = uniform(self.seed, epoch, [index], Stream.REPLACEMENT, MAX_ATTEMPTS)
        return int(draws[0, attempt] * len(self))

    def _first_readable(self, epoch: int, index: int, first_attempt: int, skipped: list[Skipped]) -> _Opened:
        """Open the image in attempt 0, or else one of its replacements in the attempts after it: the first that can be
        read from `first_attempt` on. Append the others to `skipped`."""
        for attempt in range(first_attempt, MAX_ATTEMPTS + 1):
            candidate = self.replacement(epoch, index, attempt - 1) if attempt else index
            try:
                return _Opened(candidate, self._open(candidate), attempt)
            except BadImage as error:
                skipped.append(self._skip(candidate, error))
        path, reason = skipped[-1]
        raise UserError(
            f"{MAX_ATTEMPTS + 1} images in a row can't be read, the last one {printable(path)} ({reason}): "
            f"check the images in {printable(self.root)}"
        )

    def _request(self, encoded: Encoded, plan: Plan, row: int) -> Request:
        x, y, w, h = plan.crop[row].tolist()
        return Request(encoded, (x, y, w, h), plan.size, _FILTERS[int(plan.interpolation[row])])


class EvalDataset(BatchDataset):
    """Makes evaluation batches, with the images of timm's `create_transform(is_training=False)`. Raises UserError if
    crop mode or interpolation is unknown, `crop_pct` is not positive, or labels are of other images.

    Args:
        size: (H, W) of the output.
        crop_pct: Output size / resized size. Above 1 the resized image is padded (black; with `fill` for "border").
        crop_mode: "center" resizes the shorter side to size / crop_pct and crops the centre, "squash" resizes both
            sides to it, "border" resizes the longer side to it and pads.
        interpolation: One of `tlt.data.backends.decode.RESIZE_FILTERS`.
        fill: Colour 0..255 of the padding of "border"; timm uses the mean.
        backend: The decoder; None takes Pillow's, which gives exactly timm's pixels.
        labels: Token labels of the same images, in their order.
    """

    def __init__(
        self,
        images: ImageSource,
        size: Size,
        crop_pct: float = 0.875,
        crop_mode: str = "center",
        interpolation: str = "bicubic",
        fill: Sequence[int] = (124, 116, 104),
        backend: Backend | None = None,
        labels: LabelReader | None = None,
    ) -> None:
        super().__init__(images, backend or PilBackend(), labels)
        one_of("crop mode", crop_mode, CROP_MODES)
        one_of("interpolation", interpolation, RESIZE_FILTERS)
        in_range("--crop-pct", crop_pct, 1e-6)
        self.size = size
        self.crop_pct = crop_pct
        self.crop_mode = crop_mode
        self.interpolation = interpolation
        self.fill = tuple(fill) if crop_mode == "border" else (0, 0, 0)

    def load(self, key: BatchKey) -> Batch:
        opened: dict[int, Encoded] = {}
        failed: dict[int, BadImage] = {}
        for index in key.indices:
            try:
                opened[index] = self._open(index)
            except BadImage as error:
                failed[index] = BadImage(str(error))  # the caught one holds its frames, and so this batch
        self.worker_status.mark(-1)
        requests = [self._request(image) for image in opened.values()]
        decoded = self.backend.decode_batch(requests, self.size, self.fill)
        failed |= {list(opened)[row]: error for row, error in decoded.bad.items()}
        rows = [row for row in range(len(opened)) if row not in decoded.bad]
        indices = [index for index in opened if index not in failed]
        labels, faults = self._read_labels(indices, [(opened[i].width, opened[i].height) for i in indices])
        labelled = [requests[row] for row in rows] if labels else []
        return Batch(
            decoded.images[rows] if decoded.bad else decoded.images,
            classes=torch.from_numpy(self.classes[np.array(indices, np.int64)]),
            indices=torch.tensor(indices, dtype=torch.int64),
            affine=self._affine(labelled) if labelled else torch.empty(0, 2, 3),
            visible=torch.tensor(FULL_AREA).repeat(len(labelled), 1),  # beyond the image there is only fill
            labels=labels,
            skipped=[self._skip(index, failed[index]) for index in key.indices if index in failed],
            bad_labels=faults,
            key=key,
        )

    def _affine(self, requests: Sequence[Request]) -> Tensor:
        """Return (B, 2, 3) maps from the unit square of the output to that of the whole image."""
        left, top, h, w = np.array([(request.left, request.top, *request.size) for request in requests]).T
        height, width = self.size
        cut = geometry.crop(left, top, width, height, width, height)
        return torch.from_numpy(geometry.normalise(cut, (h, w), self.size)).float()

    def _request(self, encoded: Encoded) -> Request:
        resized = resized_size(self.size, self.crop_pct, self.crop_mode, encoded.width, encoded.height)
        margins = (side - crop for side, crop in zip(resized, self.size, strict=True))
        # As torchvision's centre crop; -n means n pixels of padding.
        top, left = (-(-margin // 2) if margin < 0 else round(margin / 2) for margin in margins)
        return Request(encoded, None, resized, self.interpolation, top, left)


def resized_size(size: Size, crop_pct: float, crop_mode: str, width: int, height: int) -> Size:
    """Return the (height, width) to which timm resizes an image of width x height before cropping `size`."""
    target = tuple(math.floor(side / crop_pct) for side in size)
    if crop_mode == "squash":
        return target[0], target[1]
    if crop_mode == "center" and target[0] == target[1]:
        # Like torchvision's Resize, truncate the longer side; don't round it.
        short = target[0]
        long = int(target[0] * max(width, height) / min(width, height))
        return (short, long) if height <= width else (long, short)
    ratios = height / target[0], width / target[1]
    ratio = max(ratios) if crop_mode == "border" else min(ratios)
    return max(1, round(height / ratio)), max(1, round(width / ratio))

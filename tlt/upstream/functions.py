"""The names that the published `tlt.data` exports, for scripts that use them: thin wrappers of this package.

Where the published code hides geometry and class in the label tensor, these pass `TokenLabels`; the published tensor
(B, 3, k, H, W) is understood as well. Everything random is drawn from seeds, not from numpy's global state.

Shapes: B images, C classes, N = label_size^2 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from tlt.data.augment.device_stage import DeviceStage, EvalStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.decode import TorchvisionBackend
from tlt.data.batch import Batch
from tlt.data.dataset import EvalDataset, TrainDataset
from tlt.data.loader import EvalLoader, TrainLoader
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.label_map import FULL_AREA, LabelBatch, LabelMap
from tlt.labels.store import LabelStore, open_labels
from tlt.mix import Mixup
from tlt.targets import make_targets, one_hot

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PUBLISHED_CLASS_COLUMN = 5


@dataclass(frozen=True)
class TokenLabels:
    """The labels of a batch and where its crops lie: what `create_token_label_target` makes targets from.

    Attributes:
        labels: Label maps of the whole images.
        affine: (B, 2, 3), see `tlt.targets.make_targets`.
        visible: (B, 4), see there.
        classes: (B,) int64 class by folder.
    """

    labels: LabelBatch
    affine: Tensor
    visible: Tensor
    classes: Tensor

    @classmethod
    def from_published(cls, target: Tensor) -> TokenLabels:
        """Read (B, 3, k, H, W): logits, class ids, and a plane with the crop's (y, x, h, w) as shares of the image at
        [0, 0, :4] and the class at [0, 0, 5]."""
        if target.ndim != 5 or target.shape[1] != 3 or target.shape[4] <= _PUBLISHED_CLASS_COLUMN:
            raise ValueError(f"{tuple(target.shape)} is not (B, 3, k, H, W) with W of at least 6")
        y, x, h, w = target[:, 2, 0, 0, :4].float().unbind(1)
        none = torch.zeros_like(x)
        affine = torch.stack([w, none, x, none, h, y], 1).view(-1, 2, 3)
        area = torch.tensor(FULL_AREA, device=target.device).expand(len(target), 4)
        labels = LabelBatch(target[:, 0], target[:, 1].round().int(), area)
        classes = target[:, 2, 0, 0, _PUBLISHED_CLASS_COLUMN].round().long()
        return cls(labels, affine, torch.stack([x, y, x + w, y + h], 1), classes)

    @property
    def shape(self) -> torch.Size:
        """(B, k, h, w)."""
        return self.labels.values.shape

    def __len__(self) -> int:
        return len(self.classes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenLabels:
        """The labels on another device."""
        tensors = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.affine, self.visible, self.classes))
        return TokenLabels(self.labels.to(device, non_blocking), *tensors)

    def cuda(self) -> TokenLabels:
        """The labels on the GPU."""
        return self.to("cuda")


def create_token_label_target(
    target: Tensor | TokenLabels,
    num_classes: int,
    lam: float | Tensor = 1.0,
    smoothing: float = 0.0,
    device: torch.device | str | None = None,
    label_size: int = 1,
) -> Tensor:
    """Dense targets for the published losses.

    Args:
        target: (B,) class ids, `TokenLabels`, or the published (B, 3, k, H, W).
        lam: Share of each sample that stays when it is mixed with its partner (sample B - 1 - i); a number, or one per
            sample.
        smoothing: Label smoothing in [0, 1).
        device: Where to compute; None: where `target` is (the published default is "cuda").
        label_size: Tokens per side; 1: a label of the crop only.

    Returns:
        (B, C) for class ids; else (B, C, 2) or (B, C, 2 + N): folder class, crop, tokens. Where a label map covers a
        token in part, the token's column is scaled by that part, so that the published losses weigh it.
    """
    target = target if device is None else target.to(device)
    if isinstance(target, Tensor) and target.ndim == 1:
        dense = one_hot(target, num_classes, smoothing, torch.float32)
    else:
        labels = target if isinstance(target, TokenLabels) else TokenLabels.from_published(target)
        dense = _dense_targets(labels, num_classes, smoothing, label_size)
    if isinstance(lam, Tensor):
        lam = lam.to(dense).view(-1, *[1] * (dense.ndim - 1))
    return dense * lam + dense.flip(0) * (1 - lam)


def _dense_targets(labels: TokenLabels, num_classes: int, smoothing: float, label_size: int) -> Tensor:
    grid = (label_size, label_size) if label_size > 1 else (labels.shape[2], labels.shape[3])
    size = 1 if label_size == 1 else None
    targets = make_targets(
        labels.labels, labels.affine, labels.visible, labels.classes, grid, num_classes, smoothing, size
    )
    columns = torch.stack([targets.truth_target(), targets.cls], 2)  # (B, C, 2)
    if targets.tokens is None or targets.weight is None:
        return columns
    return torch.cat([columns, (targets.tokens.dense(num_classes) * targets.weight[..., None]).transpose(1, 2)], 2)


class TokenLabelMixup(Mixup):
    """Mixup and CutMix of images together with their token labels.

    Args:
        correct_lam: Only True: the share is always that of the box as clipped.
        label_size: See `create_token_label_target`.
        seed: Of all draws of this object.
        The others: as `tlt.mix.Mixup`.

    Attributes:
        mixup_enabled: Set to False to stop mixing.
    """

    def __init__(
        self,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: Sequence[float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        correct_lam: bool = True,
        label_smoothing: float = 0.1,
        num_classes: int = 1000,
        label_size: int = 1,
        seed: int = 0,
    ) -> None:
        if not correct_lam:
            raise UserError("correct_lam=False is not supported: the share of a CutMix box is that of the clipped box")
        super().__init__(
            mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode, label_smoothing, num_classes
        )
        self.label_size = label_size
        self.mixup_enabled = True
        self._generator = np.random.default_rng(seed)

    def __call__(self, x: Tensor, target: Tensor | TokenLabels) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Images (B, 3, H, W) and their labels -> mixed images, dense mixed targets."""
        return self.mix(x, target)

    def mix(self, x: Tensor, target: Tensor | TokenLabels) -> tuple[Tensor, Tensor]:
        """Same as calling the object. Any batch size; the middle sample of an odd batch is not changed."""
        lam: float | Tensor = 1.0
        if self.mixup_enabled:
            shares = self.draw(x, self._generator)
            x, lam = shares.blend_images(x), shares.samples[:, 0]
        smoothing = self.label_smoothing
        return x, create_token_label_target(target, self.num_classes, lam, smoothing, label_size=self.label_size)


class FastCollateTokenLabelMixup(TokenLabelMixup):
    """`TokenLabelMixup` as a collate function: a list of (uint8 image (3, H, W), label) to a uint8 batch and dense
    targets. A label is a class id, or a published tensor (3, k, H, W)."""

    def __call__(  # type: ignore[override]
        self, batch: Sequence[tuple[Any, Any]], _: Any = None
    ) -> tuple[Tensor, Tensor]:
        images = torch.stack([torch.as_tensor(image) for image, _ in batch]).float()
        mixed, target = self.mix(images, torch.stack([torch.as_tensor(label) for _, label in batch]))
        return mixed.round_().clamp_(0, 255).byte(), target


class TokenLabelDataset(Dataset[tuple[Tensor, int, LabelMap | None]]):
    """Images of class folders with their label maps; give it to `create_token_label_loader`.

    Item i is (uint8 image (3, H, W) as stored, class, label map or None).
    """

    def __init__(self, folder: ImageSource, labels: LabelStore | None) -> None:
        self.folder, self.labels = folder, labels
        self._backend = TorchvisionBackend()

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int, LabelMap | None]:
        encoded = self._backend.open(self.folder.path(index), self.folder.read(index))
        image = self._backend.decode(encoded, None, (encoded.height, encoded.width), "bilinear")
        label_map = self.labels.read(index, encoded.width, encoded.height) if self.labels else None
        return image, int(self.folder.classes[index]), label_map


def create_token_label_dataset(
    dataset: str = "", root: str = "", label_root: str = "", split: str = "train"
) -> TokenLabelDataset:
    """The images of `root/train` (or of `root`, if there is no split in it), with the labels in `label_root` if given.

    Raises:
        UserError: A kind of `dataset` other than image folders; no images, or images without label.
    """
    if dataset not in ("", "folder"):
        raise UserError(f"dataset {dataset!r}: only image folders have token labels; leave it empty")
    folder = open_images(root, split, allow_root=True)
    return TokenLabelDataset(folder, open_labels(label_root, folder.paths) if label_root else None)


def create_token_label_loader(
    dataset: TokenLabelDataset,
    input_size: int | Sequence[int],
    batch_size: int,
    is_training: bool = False,
    use_prefetcher: bool = True,
    no_aug: bool = False,
    re_prob: float = 0.0,
    re_mode: str = "const",
    re_count: int = 1,
    re_split: bool = False,
    scale: Sequence[float] | None = None,
    ratio: Sequence[float] | None = None,
    hflip: float = 0.5,
    vflip: float = 0.0,
    color_jitter: float = 0.4,
    auto_augment: str | None = None,
    num_aug_splits: int = 0,
    interpolation: str = "bilinear",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    num_workers: int = 1,
    distributed: bool = False,
    crop_pct: float | None = None,
    collate_fn: TokenLabelMixup | None = None,
    pin_memory: bool = False,
    fp16: bool = False,
    tf_preprocessing: bool = False,
    use_multi_epochs_loader: bool = False,
    use_token_label: bool = False,
    seed: int = 42,
) -> TokenLabelLoader:
    """Batches (normalised images (B, 3, H, W), labels); each pass is the next epoch. Arguments as in timm.

    Labels are `TokenLabels` with `use_token_label` in training, dense targets where `collate_fn` mixes (a
    `TokenLabelMixup` or `FastCollateTokenLabelMixup`), else class ids. With `use_prefetcher` all is on the GPU, if
    there is one. `crop_pct` counts in evaluation only. `seed` is that of order and augmentation.

    Raises:
        UserError: An option that token labels rule out, or `use_token_label` without label maps.
    """
    _refuse(
        dataset, use_token_label, re_split=re_split, num_aug_splits=num_aug_splits, tf_preprocessing=tf_preprocessing
    )
    size = (input_size, input_size) if isinstance(input_size, int) else (int(input_size[-2]), int(input_size[-1]))
    device = torch.device("cuda" if use_prefetcher and torch.cuda.is_available() else "cpu")
    feed: dict[str, Any] = {"device": device, "workers": num_workers, "pin_memory": pin_memory}
    feed |= {"prefetch": use_prefetcher, "persistent_workers": use_multi_epochs_loader}
    if not is_training:
        evaluation = EvalDataset(dataset.folder, size, crop_pct or 0.875, interpolation=interpolation)
        return TokenLabelLoader(_loader(evaluation, batch_size, mean, std, distributed, feed), None, fp16, False)
    crop: dict[str, Any] = {"size": size, "hflip": hflip, "vflip": vflip, "interpolation": interpolation}
    crop |= {name: tuple(value) for name, value in (("scale", scale), ("ratio", ratio), ("mean", mean)) if value}
    colour: dict[str, Any] = {"auto_augment": auto_augment, "color_jitter": color_jitter, "no_aug": no_aug}
    config = AugmentConfig(**crop, **colour, reprob=re_prob, remode=re_mode, recount=re_count)
    train = TrainDataset(dataset.folder, config, seed, dataset.labels if use_token_label else None)
    loader = _loader(train, batch_size, mean, std, distributed, feed)
    return TokenLabelLoader(loader, collate_fn, fp16, use_token_label)


def _refuse(dataset: TokenLabelDataset, use_token_label: bool, **ruled_out: Any) -> None:
    for name, value in ruled_out.items():
        if value:
            raise UserError(f"{name}={value} can't be used with token labels: leave it out")
    if use_token_label and dataset.labels is None:
        raise UserError("use_token_label needs a dataset with label_root")


def _loader(
    dataset: TrainDataset | EvalDataset,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    distributed: bool,
    feed: dict[str, Any],
) -> TrainLoader | EvalLoader:
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    if isinstance(dataset, EvalDataset):
        stage = EvalStage(mean, std).to(feed["device"])
        return EvalLoader(dataset, batch_size, stage, **feed, world_size=world, rank=rank)
    # timm's training loader leaves out the last, smaller batch.
    stream = IndexStream(len(dataset), batch_size * world, dataset.seed, world, rank, drop_last=True)
    return TrainLoader(dataset, stream, DeviceStage(dataset.config, mean, std).to(feed["device"]), **feed)


class TokenLabelLoader:
    """What `create_token_label_loader` returns. `loader.sampler.set_epoch(n)` chooses the epoch, as published."""

    def __init__(self, loader: TrainLoader | EvalLoader, mix: TokenLabelMixup | None, fp16: bool, labels: bool) -> None:
        self.loader, self.mix, self.fp16, self.labels = loader, mix, fp16, labels
        self.sampler = self
        self._epoch = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._epoch = epoch

    @property
    def mixup_enabled(self) -> bool:
        """Whether images are mixed; can be set where a mixing `collate_fn` was given."""
        return self.mix is not None and self.mix.mixup_enabled

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        if self.mix is not None:
            self.mix.mixup_enabled = enabled

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | TokenLabels]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if isinstance(self.loader, EvalLoader):
            yield from map(self._pair, self.loader)
        else:
            yield from (self._pair(batch) for _, _, batch in self.loader.epoch(epoch))

    def _pair(self, batch: Batch) -> tuple[Tensor, Tensor | TokenLabels]:
        images = batch.images
        target: Tensor | TokenLabels = batch.classes
        if self.labels and batch.labels is not None:
            target = TokenLabels(batch.labels, batch.affine, batch.visible, batch.classes)
        if self.mix is not None:
            images, target = self.mix.mix(images, target)
        return images.half() if self.fp16 else images, target

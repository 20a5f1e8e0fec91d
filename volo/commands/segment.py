"""Segmentation by a linear layer on frozen tokens: `volo validate SEG --model M --probe seg`.

As for DINOv3 (arXiv:2508.10104), an image's last tokens are normalised over the training set as BatchNorm does. One
linear layer maps them to logits, which are interpolated from the tokens' positions to the pixels of the mask. Whole
images are squashed to the model's size, without augmentation. Tokens and masks stay in memory.

In shapes: h x w tokens of D features, K classes, masks (H, W) of class numbers; pixels with 255 don't count.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.data.batch import Batch, Skipped, permutation
from tlt.data.loader import EvalLoader
from tlt.data.sources import open_images
from tlt.data.sources.folder import find_split
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import Area
from tlt.models.spatial import feature_map
from tlt.models.wrap import find_tokens
from tlt.targets import linear_weights
from tlt.tools.masks import of_same_size, read_numbers
from volo.cluster.distributed import World, max_over_ranks, sum_over_ranks
from volo.commands.console import say, warn
from volo.config.settings_evaluate import Results, ValidateSettings, ValidationImages
from volo.train.data import validation_loader
from volo.train.precision import Precision
from volo.train.trained_model import TrainedModel

_BATCH = 16
_UPDATES = 500
_LEAST_EPOCHS = 10
_WEIGHT_DECAY = 1e-3
_LEFT_OUT = 255
Examples = dict[int, tuple[Tensor, np.ndarray]]  # image number: tokens (h, w, D) and mask (H, W)


def segmentation_row(
    settings: ValidateSettings, trained: TrainedModel, precision: Precision, world: World
) -> dict[str, Any]:
    """Return the result row of `--probe seg`. It is the same for any number of ranks, up to rounding. Raises UserError
    if the model has no spatial tokens, or images, masks or their classes can't be used."""
    size = trained.data_config["input_size"][1:]
    grid, positions, channels, *_ = find_tokens(trained.model, size)
    window = positions.window(grid, size)
    # Load both splits before training, so that a bad mask in either ends the program early.
    train, validation = (
        _examples(settings.images, trained, split, precision, world) for split in ("train", settings.images.split)
    )
    folder = settings.images.data or ""
    images = max_over_ranks(max(train, default=-1)) + 1
    layer = _trained(settings.results, folder, train, images, channels, window, world)
    confusion = torch.zeros(256 * 256, dtype=torch.int64, device=world.device)
    for tokens, mask in validation.values():
        predicted = _at_pixels(F.linear(tokens.to(world.device), *layer), mask.shape, window).argmax(0)
        true = torch.from_numpy(mask).to(predicted)
        confusion += torch.bincount((true * 256 + predicted).flatten(), minlength=256 * 256)
    confusion = sum_over_ranks(confusion).view(256, 256)[:_LEFT_OUT, :_LEFT_OUT]
    percent, classes = mean_iou(confusion)
    if not classes:
        raise UserError(f"--probe seg: no pixel of the validation masks in {printable(folder)} has a class")
    pixels = sum((np.bincount(mask.ravel(), minlength=256) for _, mask in train.values()), np.zeros(256, np.int64))
    learned = sum_over_ranks(torch.from_numpy(pixels))[:_LEFT_OUT].to(confusion)
    if never := ((confusion.sum(1) > 0) & (learned == 0)).nonzero().flatten().tolist():
        warn([f"--probe seg: no training mask has the classes {never} of validation masks: IoU 0"], world.is_primary)
    say([f"mIoU {percent:.2f} %"], world.is_primary)
    counts = sum_over_ranks(torch.tensor([len(validation), len(train)])).tolist()
    row = {"model": trained.name, "probe": settings.results.probe, "miou": round(percent, 4), "classes": classes}
    return row | dict(zip(("images", "train_images"), counts, strict=True))


def features_of(
    run: Callable[[Tensor], Tensor], loader: EvalLoader, precision: Precision, flag: str
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield `run(images)` of each batch in float32, and the batch. Raises UserError if no rank can read any of its
    images."""
    read = 0
    for batch in loader:
        with torch.no_grad(), precision.autocast():
            features = run(batch.images)
        read += batch.size
        yield features.float(), batch
    warn(loader.skips.take_lines())
    if not max_over_ranks(read):
        where = printable(loader.dataset.root)
        raise UserError(f"{flag}: not one of {len(loader.dataset)} images in {where} can be read")


def _examples(
    wanted: ValidationImages, trained: TrainedModel, split: str, precision: Precision, world: World
) -> Examples:
    """Return those of this rank's images of a split that can be read together with their masks."""
    model, size = trained.model, trained.data_config["input_size"][1:]
    folder = find_split(wanted.data or "", split)
    images = open_images(folder, "images", None, classes=False, split_flag="--probe seg")
    masks = [os.path.join(folder, "masks", os.path.splitext(name)[0] + ".png") for name in images.paths]
    if missing := [row for row, mask in enumerate(masks) if not os.path.isfile(mask)]:
        first = f"{printable(images.path(missing[0]))} (looked for {printable(masks[missing[0]])})"
        raise UserError(f"--probe seg: {len(missing)} of {len(masks)} images have no mask, the first is {first}")
    whole = trained.data_config | {"crop_pct": 1.0, "crop_mode": "squash"}
    loader = validation_loader(wanted.loading, images, wanted.batch_size, whole, world)
    examples = Examples()
    maps = features_of(lambda x: feature_map(model, model.forward_features(x), size), loader, precision, "--probe seg")
    for features, batch in maps:
        for index, tokens in zip(batch.indices.tolist(), features.cpu(), strict=True):
            try:
                examples[index] = tokens, _read_mask(masks[index], images, index, wanted.loading.max_pixels)
            except BadImage as error:
                loader.skips.record([Skipped(masks[index], str(error))])
    if not max_over_ranks(len(examples)):
        raise UserError(f"--probe seg: not one of {len(masks)} masks in {printable(folder)} can be read")
    return examples


def _read_mask(path: str, images: ImageSource, row: int, max_pixels: int) -> np.ndarray:
    """Return an image's mask, (H, W) uint8. Raises BadImage if it is damaged, UserError if it is no such mask."""
    source = f"mask {printable(path)}"
    numbers = of_same_size(read_numbers(path, max_pixels), source, images, row)
    if numbers.max() > _LEFT_OUT:
        raise UserError(f"{source} has number {numbers.max()}: classes are up to 254, and 255 is left out")
    return numbers.astype(np.uint8)


def _trained(
    flags: Results, folder: str, train: Examples, images: int, channels: int, window: Area, world: World
) -> tuple[Tensor, Tensor]:
    """Train on `images` examples of all ranks; return weight (K, D) and bias (K,) for tokens before normalisation.

    The gradient of an update is that of the mean over all labelled pixels of 16 images, whichever ranks hold them.
    """
    flat = (tokens.flatten(0, 1).double() for tokens, _ in train.values())
    sums = sum((torch.stack([torch.ones_like(x), x, x * x]).sum(1) for x in flat), torch.zeros(3, channels).double())
    count, total, squares = sum_over_ranks(sums)
    variance = (squares / count - (total / count) ** 2).clamp(min=0)
    shift, scale = (values.float().to(world.device) for values in (total / count, (variance + 1e-5).rsqrt()))
    largest = (int((mask + 1).max()) for _, mask in train.values())  # in uint8, 255 + 1 is 0
    classes = max_over_ranks(max(largest, default=0))
    if not classes:
        raise UserError(f"--probe seg: no pixel of the training masks in {printable(folder)} has a class")
    theta = torch.zeros(classes, channels + 1, device=world.device, requires_grad=True)  # the last column is the bias
    optimizer = torch.optim.AdamW([theta], weight_decay=_WEIGHT_DECAY)
    per_epoch = math.ceil(images / _BATCH)
    updates = per_epoch * (flags.epochs or max(_LEAST_EPOCHS, math.ceil(_UPDATES / per_epoch)))
    for update in range(updates):
        epoch = update // per_epoch
        start = update % per_epoch * _BATCH
        theta.grad = torch.zeros_like(theta)
        pixels = torch.zeros((), device=world.device)
        for index in permutation(images, 0, epoch)[start : start + _BATCH].tolist():
            if index not in train:
                continue  # another rank has this image, or it can't be read
            tokens, mask = train[index]
            x = (tokens.to(world.device) - shift) * scale
            truth = torch.from_numpy(mask).to(world.device).long()
            logits = _at_pixels(F.linear(x, theta[:, :-1], theta[:, -1]), mask.shape, window)
            F.cross_entropy(logits[None], truth[None], ignore_index=_LEFT_OUT, reduction="sum").backward()
            pixels += (truth != _LEFT_OUT).sum()
        theta.grad = sum_over_ranks(theta.grad) / sum_over_ranks(pixels).clamp(min=1)
        optimizer.param_groups[0]["lr"] = flags.lr * (1 + math.cos(math.pi * update / updates)) / 2
        optimizer.step()
    weight = theta.detach()[:, :-1] * scale
    return weight, theta.detach()[:, -1] - weight @ shift


def _at_pixels(logits: Tensor, shape: Sequence[int], window: Area) -> Tensor:
    """Interpolate logits (h, w, K) of tokens that cover `window` of an image bilinearly to its pixels, (K, H, W)."""
    axes = (shape, logits.shape, (window[1], window[0]), (window[3], window[2]))
    down, across = (
        linear_weights((((torch.arange(side) + 0.5) / side - low) / (high - low) * n - 0.5).clamp(0, n - 1), n)
        for side, n, low, high in zip(*axes, strict=False)
    )
    return down.to(logits) @ logits.permute(2, 0, 1) @ across.to(logits).T


def mean_iou(confusion: Tensor) -> tuple[float, int]:
    """Return the mean of intersection / union in percent over the classes that have pixels, and the number of these
    classes. `confusion` (K, K) counts pixels by true class and predicted class."""
    present = confusion.sum(1) > 0
    union = confusion.sum(1) + confusion.sum(0) - confusion.diagonal()
    return 100 * float((confusion.diagonal()[present].double() / union[present]).mean()), int(present.sum())

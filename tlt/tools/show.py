"""Draws images with their labels, before and after augmentation (`tlt show`)."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import TrainDataset
from tlt.data.sources import open_images
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import refuse_existing
from tlt.io.text import printable
from tlt.labels.store import open_labels
from tlt.targets import make_targets
from tlt.tools.drawing import check_format, draw_page, read_examples, save_figure
from tlt.upstream.behaviour import label_view

_IMAGES = 8  # on a page, by default
_MAX_IMAGES = 64  # on a page, at most
_TOKEN_PIXELS = 16


def show(**flags: Any) -> list[str]:
    """Draw the page that the flags of `tlt show` describe. Return lines that report the result. Raise UserError if
    there are no images or labels, an image is missing or unreadable, or matplotlib is not installed."""
    args = Namespace(**flags)
    check_format(args.output)
    refuse_existing(args.output, "-o")
    folder = open_images(args.data, args.split, None, allow_root=True)
    store = open_labels(args.labels, folder.paths, area=args.area, bad_label="skip")
    if args.images and args.n:
        raise UserError(f"-n {args.n} has no effect with --images: keep one of them")
    if args.images:
        rows = find_images(folder, args.images)
    else:  # one random image from each of n equal stretches of the folder
        edges = np.linspace(0, len(folder), min(args.n or _IMAGES, len(folder)) + 1).astype(int)
        rows = np.random.default_rng(args.seed).integers(edges[:-1], edges[1:]).tolist()
    if len(rows) > _MAX_IMAGES:
        raise UserError(f"a page holds {_MAX_IMAGES} images: ask for fewer by -n or --images")
    auto_augment = None if args.aa in ("", "none") else args.aa
    config = AugmentConfig(
        tuple(args.size), tuple(args.scale), hflip=args.hflip, auto_augment=auto_augment, reprob=args.reprob
    )
    dataset = TrainDataset(folder, config, args.seed, store, label_view=label_view(args.compat))
    batch = load_batch(dataset, rows, args.epoch - 1)
    assert batch.labels is not None and batch.plan is not None
    # The window of the images, which with rows of `--compat` differs from that of the labels.
    unmirrored = replace(batch, affine=torch.from_numpy(batch.plan.normalised_affine()))
    num_classes = store.info.num_classes
    names = store.info.class_names or []
    if not num_classes:  # the labels do not record their classes
        num_classes = max(int(batch.labels.ids.max()) + 1, len(folder.class_names))
        names = folder.class_names if num_classes == len(folder.class_names) else []
    grid = tuple(args.grid) if args.grid else tuple(max(1, side // _TOKEN_PIXELS) for side in args.size)
    # No smoothing, so that opacity 1 means certainty.
    # The labels may have fewer classes than there are folders, whose numbers are not drawn.
    label_args = batch.labels, batch.affine, batch.visible, batch.classes.clamp(max=num_classes - 1)
    targets = make_targets(*label_args, grid, num_classes, smoothing=0.0, uncovered=args.uncovered)
    try:
        examples = read_examples(dataset, unmirrored, targets, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    except BadImage as error:
        raise UserError(f"an image in {printable(folder.root)} changed while it was read: {error}") from error
    k, h, w = store.shape
    title = f"{args.labels}: maps of {h} x {w}, {k} classes each, on {grid[0]} x {grid[1]} tokens"
    save_figure(draw_page(examples, names, title, "probability of the class"), args.output)
    notes = [f"{printable(path)}: {reason}" for path, reason in [*batch.skipped, *batch.bad_labels]]
    return [*store.warnings, *notes, f"wrote {printable(args.output)}: {len(examples)} images of {len(folder)}"]


def find_images(folder: ImageSource, wanted: list[str]) -> list[int]:
    """Return the rows of images by path or file name. Raise UserError unless each name fits exactly one image."""
    rows: dict[str, set[int]] = {name: set() for name in wanted}
    for row, path in enumerate(folder.paths):
        for name in {path, os.path.basename(path)} & rows.keys():
            rows[name].add(row)
    for name, matches in rows.items():
        if len(matches) != 1:
            raise UserError(
                f"--images {printable(name)} names {len(matches)} images in {printable(folder.root)}: give the path of "
                "one within it"
            )
    return [min(rows[name]) for name in wanted]


def load_batch(dataset: TrainDataset, rows: list[int], epoch: int) -> Batch:
    """Return these images as a training batch, made as by a worker and the device stage."""
    batch = dataset.load(BatchKey(epoch, tuple(rows)))
    assert batch.plan is not None
    stage = DeviceStage(dataset.config, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return replace(batch, images=stage(batch.images, batch.plan))

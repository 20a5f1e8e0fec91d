"""A picture of images with their labels, before and after augmentation (`tlt show`)."""

from __future__ import annotations

import difflib
from argparse import Namespace
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import TrainDataset
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import refuse_existing
from tlt.io.text import printable
from tlt.labels.store import LabelStore, open_labels
from tlt.targets import make_targets
from tlt.tools.drawing import check_format, save_figure
from tlt.tools.label_page import MAX_IMAGES, draw_page, read_examples
from tlt.upstream.behaviour import label_view

_IMAGES = 8  # where nobody says how many
_TOKEN_PIXELS = 16


def show(args: Namespace) -> list[str]:
    """Draw the page that the flags of `tlt show` describe; return lines of text about it.

    Raises:
        UserError: No images or labels, an image that isn't there or can't be read, or matplotlib is missing.
    """
    check_format(args.output)
    refuse_existing(args.output, "-o")
    folder = open_images(args.data, args.split, allow_root=True)
    store = open_labels(args.labels, folder.paths, area=args.area, bad_label="skip")
    rows = find_images(folder, args.images) if args.images else spread(folder, args.n, args.seed)
    config = AugmentConfig(
        size=tuple(args.size),
        scale=tuple(args.scale),
        hflip=args.hflip,
        auto_augment=None if args.aa in ("", "none") else args.aa,
        reprob=args.reprob,
    )
    dataset = TrainDataset(folder, config, args.seed, store, label_view=label_view(args.compat))
    batch, shown = load_batch(dataset, rows, args.epoch)
    assert batch.labels is not None
    num_classes, names = classes_of(store, folder, int(batch.labels.ids.max()) + 1)
    grid = tuple(args.grid) if args.grid else tuple(max(1, side // _TOKEN_PIXELS) for side in args.size)
    # Without smoothing, so that opacity 1 means certain.
    given = batch.labels, batch.affine, batch.visible, batch.classes
    targets = make_targets(*given, grid, num_classes, smoothing=0.0, uncovered=args.uncovered)
    try:
        examples = read_examples(dataset, shown, targets, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    except BadImage as error:
        raise UserError(f"an image in {printable(folder.root)} changed while it was read: {error}") from error
    k, h, w = store.shape
    title = f"{args.labels}: maps of {h} x {w}, {k} classes each, on {grid[0]} x {grid[1]} tokens"
    save_figure(draw_page(examples, names, title, "probability of the class"), args.output)
    notes = [f"{printable(path)}: {reason}" for path, reason in [*batch.skipped, *batch.bad_labels]]
    return [*store.warnings, *notes, f"wrote {printable(args.output)}: {len(examples)} images of {len(folder)}"]


def spread(folder: ImageSource, count: int | None, seed: int) -> list[int]:
    """One image at random out of each of `count` (None: 8, or fewer) equal stretches of the folder.

    Raises:
        UserError: There are fewer images, or more than fit on a page are asked for.
    """
    count = count or min(_IMAGES, len(folder))
    if count > len(folder):
        raise UserError(f"--n {count}: there are {len(folder)} images in {printable(folder.root)}")
    if count > MAX_IMAGES:
        raise UserError(f"--n {count}: a page holds {MAX_IMAGES} images")
    edges = np.linspace(0, len(folder), count + 1).astype(int)
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:]).tolist()


def find_images(folder: ImageSource, wanted: list[str]) -> list[int]:
    """Row numbers of images by path within the folder, file name, or file name without suffix.

    Raises:
        UserError: No image of that name, or several.
    """
    if len(wanted) > MAX_IMAGES:
        raise UserError(f"--images: a page holds {MAX_IMAGES} images")
    rows: dict[str, set[int]] = {}
    for row, path in enumerate(folder.paths):
        for name in (path, PurePath(path).name, PurePath(path).stem):
            rows.setdefault(name, set()).add(row)
    found = []
    for name in wanted:
        hits = sorted(rows.get(name, ()))
        if not hits:
            near = difflib.get_close_matches(name, folder.paths, n=1, cutoff=0.4)
            hint = f"; did you mean {printable(near[0])}?" if near else ""
            raise UserError(f"--images {printable(name)}: no such image in {printable(folder.root)}{hint}")
        if len(hits) > 1:
            several = ", ".join(printable(folder.paths[row]) for row in hits[:3])
            raise UserError(f"--images {printable(name)} names {len(hits)} images ({several}): give the path")
        found.append(hits[0])
    return found


def load_batch(dataset: TrainDataset, rows: list[int], epoch: int) -> tuple[Batch, Batch]:
    """These images as a training batch, made as a worker and the device stage make it; and the same with the images'
    own geometry, which is another one where the labels follow rows of `--compat`."""
    batch = dataset.load(BatchKey(epoch, tuple(rows)))
    assert (plan := batch.plan) is not None
    stage = DeviceStage(dataset.config, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    batch = replace(batch, images=stage(batch.images, plan))
    affine, visible = (torch.from_numpy(each).float() for each in (plan.normalised_affine(), plan.visible()))
    return batch, replace(batch, affine=affine, visible=visible)


def classes_of(store: LabelStore, folder: ImageSource, seen: int) -> tuple[int, list[str]]:
    """How many classes the labels have, at least `seen`, and the names of those that have one.

    Labels of other classes than the folder's (`generate_label.py --transfer`) have the annotator's names, if known.
    """
    info = store.info
    if not info.num_classes:
        return max(seen, len(folder.class_names)), folder.class_names if seen <= len(folder.class_names) else []
    return max(seen, info.num_classes), info.class_names or []

"""Draws images with their labels or stored features, before and after augmentation (`tlt show`)."""

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.plan import AugmentConfig
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import TrainDataset
from tlt.data.sources import open_images
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.distill import DistillLoss
from tlt.errors import UserError
from tlt.io.files import refuse_existing
from tlt.io.text import printable
from tlt.labels.features import is_feature_archive, open_features, principal_directions
from tlt.labels.store import open_labels
from tlt.targets import make_targets
from tlt.teacher import StoredTeacher
from tlt.tools.drawing import Cells, Example, check_format, draw_page, read_examples, save_figure
from tlt.tools.masks import Numbers
from tlt.tools.pack_masks import open_masks
from tlt.upstream.behaviour import label_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IMAGES = 8  # on a page, by default
_MAX_IMAGES = 64  # on a page, at most
_TOKEN_PIXELS = 16
_MASK_PIXELS = 128  # longer side of a drawn mask, about
_NORMALISATION = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
_OUTLIERS = 0.02  # share of the tokens on either side whose component is beyond the range of the colours


def show(**flags: Any) -> list[str]:
    """Draw the page that the flags of `tlt show` describe. Return lines that report the result. Raise UserError if
    there are no images, labels or features, an image is missing or unreadable, or matplotlib is not installed."""
    args = Namespace(**flags)
    check_format(args.output)
    refuse_existing(args.output, "-o")
    stored = is_feature_archive(args.labels)
    folder = open_images(args.data, args.split, args.dataset, allow_root=True, classes=not stored)
    args.grid = tuple(args.grid) if args.grid else tuple(max(1, side // _TOKEN_PIXELS) for side in args.size)
    auto_augment = None if args.aa in ("", "none") else args.aa
    config = AugmentConfig(
        tuple(args.size), tuple(args.scale), hflip=args.hflip, auto_augment=auto_augment, reprob=args.reprob
    )
    page = feature_page if stored else label_page
    rows = choose_images(folder, args)
    try:
        figure, notes = page(args, folder, rows, config)
    except BadImage as error:
        raise UserError(f"an image in {printable(folder.root)} changed while it was read: {error}") from error
    save_figure(figure, args.output)
    return [*notes, f"wrote {printable(args.output)}: {len(rows)} images of {len(folder)}"]


def label_page(
    args: Namespace, folder: ImageSource, rows: list[int], config: AugmentConfig
) -> "tuple[Figure, list[str]]":
    """Return the page of images with their labels, and lines to print."""
    store = open_labels(args.labels, folder.paths, area=args.area, bad_label="skip")
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
    # No smoothing, so that opacity 1 means certainty.
    # The labels may have fewer classes than there are folders, whose numbers are not drawn.
    label_args = batch.labels, batch.affine, batch.visible, batch.classes.clamp(max=num_classes - 1)
    targets = make_targets(*label_args, args.grid, num_classes, smoothing=0.0, uncovered=args.uncovered)
    examples = read_examples(dataset, unmirrored, targets, *_NORMALISATION)
    if args.masks:
        examples = with_masks(examples, args.masks, folder.select(rows), store.info.annotator)
    k, h, w = store.shape
    title = f"{args.labels}: maps of {h} x {w}, {k} classes each, on {args.grid[0]} x {args.grid[1]} tokens"
    meaning = "share" if store.info.shares else "probability"
    return draw_page(examples, names, title, f"{meaning} of the class"), [*store.warnings, *_notes(batch)]


def feature_page(
    args: Namespace, folder: ImageSource, rows: list[int], config: AugmentConfig
) -> "tuple[Figure, list[str]]":
    """Return the page of images with their stored features, and lines to print. Raise UserError if no image of the page
    has features, or a flag is given that is about labels."""
    given = {
        "--masks": args.masks,
        "--area": args.area,
        "--uncovered": args.uncovered != "ignore",
        "--compat": args.compat,
    }
    if useless := [flag for flag, value in given.items() if value]:
        raise UserError(f"{useless[0]} is for labels, and {printable(args.labels)} holds features: leave it out")
    store = open_features(args.labels, folder.paths, bad_label="skip")
    dataset = TrainDataset(folder, config, args.seed, features=[store])
    batch = load_batch(dataset, rows, args.epoch - 1)
    notes = [*store.warnings, *_notes(batch)]
    stored = batch.features[store.key]
    if not stored.present.any():
        raise UserError(f"not one of these images has features in {printable(args.labels)}: run tlt check")
    maps = stored.tokens().unflatten(1, store.info.grid)
    read, weight = DistillLoss(StoredTeacher(store), grid=args.grid).lesson(batch)
    assert weight is not None
    (map_colours, token_colours), share = component_colours(maps[stored.present], [maps, read.unflatten(1, args.grid)])
    examples = []
    for row, example in enumerate(read_examples(dataset, batch, None, *_NORMALISATION)):
        width, height = example.size
        x0, y0, x1, y1 = store.info.area
        covered = np.full(store.info.grid, float(stored.present[row]))
        tokens = Cells.of_features(token_colours[row], weight[row].double().view(args.grid).numpy())
        area = (x0 * width, y0 * height, x1 * width, y1 * height)
        examples.append(replace(example, label=Cells.of_features(map_colours[row], covered), area=area, tokens=tokens))
    title = f"{args.labels}: {store.info.text}, read by {args.grid[0]} x {args.grid[1]}"
    note = f"principal components 1 to 3 of these features, {100 * share:.0f} % of their variance; pale: partly none"
    return draw_page(examples, [], title, note), notes


def with_masks(
    examples: Sequence[Example], masks: Sequence[str], images: ImageSource, annotator: dict[str, Any]
) -> list[Example]:
    """Return the examples of images with the masks of which their labels were made. Raise UserError if they were made
    otherwise, or a mask is unusable."""
    try:
        read = open_masks(masks, images, Numbers.recorded(annotator))
    except KeyError as error:
        raise UserError("--masks: these labels were not made by tlt pack-masks: leave it out") from error
    result = [*examples]
    for row in read.rows:
        classes = read.read(row)
        step = max(1, max(classes.shape) // _MASK_PIXELS)
        shown = classes[step // 2 :: step, step // 2 :: step].astype(np.int64)
        cells = Cells(shown.clip(0), np.ones(shown.shape), (shown >= 0).astype(np.float64))
        result[row] = replace(examples[row], mask=cells)
    return result


def component_colours(sample: Tensor, maps: Sequence[Tensor]) -> tuple[list[np.ndarray], float]:
    """Return the three principal components (..., 3) of the features of a sample (..., D) in each of some maps
    (..., D), and their share of the sample's variance. The range of a component within the sample, without outliers,
    becomes 0 to 1."""
    tokens = sample.flatten(0, -2)
    mean = tokens.mean(0)
    off = tokens - mean
    directions, kept = principal_directions(off.mT @ off, min(3, off.shape[1]))
    directions = torch.nn.functional.pad(directions, (0, 3 - directions.shape[1]))  # of fewer channels
    low, high = (off @ directions).quantile(torch.tensor([_OUTLIERS, 1 - _OUTLIERS]), dim=0)
    span = (high - low).clamp(min=1e-12)
    colours = [(((each - mean) @ directions - low) / span).clamp(0, 1).double().numpy() for each in maps]
    return colours, float(kept.sum())


def choose_images(folder: ImageSource, args: Namespace) -> list[int]:
    """Return the rows of the images that the flags ask for. Raise UserError if these are too many, or unknown."""
    if args.images and args.n:
        raise UserError(f"-n {args.n} has no effect with --images: keep one of them")
    if args.images:
        rows = find_images(folder, args.images)
    else:  # one random image from each of n equal stretches of the folder
        edges = np.linspace(0, len(folder), min(args.n or _IMAGES, len(folder)) + 1).astype(int)
        rows = np.random.default_rng(args.seed).integers(edges[:-1], edges[1:]).tolist()
    if len(rows) > _MAX_IMAGES:
        raise UserError(f"a page holds {_MAX_IMAGES} images: ask for fewer by -n or --images")
    return rows


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
    stage = DeviceStage(dataset.config, *_NORMALISATION)
    return replace(batch, images=stage(batch.images, batch.plan))


def _notes(batch: Batch) -> list[str]:
    """Return a line for each image that was replaced, or whose label or features can't be used."""
    return [f"{printable(path)}: {reason}" for path, reason in [*batch.skipped, *batch.bad_labels]]

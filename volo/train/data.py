"""Builds the data of a run from its flags: images, labels, augmentation and loaders."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from timm.layers import to_2tuple

from tlt.api import Loader
from tlt.data.augment.device_stage import EvalStage
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends import create_backend
from tlt.data.batch import SkipCounter
from tlt.data.dataset import EvalDataset, LabelReader
from tlt.data.loader import EvalLoader
from tlt.data.size_schedule import SizeSchedule
from tlt.data.sources import open_images
from tlt.data.sources.folder import compare_classes, read_class_map
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import regular_only
from tlt.io.jobs import SearchProgress, default_workers
from tlt.io.text import lookalikes, printable, some_names
from volo.cluster.distributed import World
from volo.cluster.launch import launch_of

HELD_OUT_FILE = "validation_images.txt"  # in the run directory: lists the images that `--val-fraction` holds out
Mask: TypeAlias = npt.NDArray[np.bool_]  # (N,), one value per image
# Number of global batches in an epoch of --data-backend synthetic, and in its validation.
SYNTHETIC_UPDATES, SYNTHETIC_VALIDATION_BATCHES = 100, 10
_SAMPLE, _LOW_AGREEMENT = 256, 0.5  # label maps compared with their images' classes; share below which to warn


class Folders(NamedTuple):
    """Training and validation images, which share one list of classes."""

    train: ImageSource
    validation: ImageSource
    warnings: list[str]


def open_folders(args: Namespace, world_size: int, on_progress: SearchProgress | None = None) -> Folders:
    """Find the images of both splits; report progress of a long search to `on_progress`.

    With `--val-fraction` both are the training images, which `hold_out` splits. With `--kd-only` both are the training
    images as well, but such runs don't validate.

    Raises:
        UserError: A split is missing or empty, or the splits have different classes.
    """
    if args.data_backend == "synthetic":
        from tlt.data.backends.synthetic import synthetic_folder

        classes = args.num_classes or 1000
        batch = args.batch_size * args.grad_accum_steps * world_size
        return Folders(
            synthetic_folder(SYNTHETIC_UPDATES * batch, classes),
            synthetic_folder(SYNTHETIC_VALIDATION_BATCHES * batch, classes),
            [],
        )
    names = read_class_map(args.class_map) if args.class_map else None
    whole, place = args.val_fraction > 0 or args.kd_only, (args.data_dir, args.train_split, args.dataset)
    train = open_images(*place, names, whole, on_progress, "--train-split", not args.kd_only)
    if whole:
        return Folders(train, train, train.warnings)
    place = (args.data_dir, args.val_split, args.dataset)
    validation = open_images(*place, train.class_names, on_progress=on_progress, split_flag="--val-split")
    compare_classes(train, validation)
    return Folders(train, validation, train.warnings + validation.warnings)


def hold_out(args: Namespace, folders: Folders, *directories: Path) -> Folders:
    """Split the training images for `--val-fraction`. If a run directory has a list, the first such list is used.

    Raises:
        UserError: None of the images is in the list, or no class has two images.
    """
    if not args.val_fraction:
        return folders
    lists = [directory / HELD_OUT_FILE for directory in directories if (directory / HELD_OUT_FILE).is_file()]
    if lists:
        held = listed_images(folders.train, str(lists[0]), missing_allowed=True)
    else:
        held = _draw_held_out(folders.train, args.val_fraction, args.seed)
    if not held.any() or held.all():
        raise UserError(f"--val-fraction {args.val_fraction:g}: no class has images for training and for validation")
    return Folders(part(folders.train, ~held), part(folders.train, held), folders.warnings)


def _draw_held_out(images: ImageSource, fraction: float, seed: int) -> Mask:
    """Hold out `fraction` of each class, at least one of two images and never all. Depends on classes and seed only."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(images))
    held = np.zeros(len(images), bool)
    for number, count in zip(*np.unique(images.classes, return_counts=True), strict=True):
        held[order[images.classes[order] == number][: min(count - 1, max(1, round(fraction * int(count))))]] = True
    return held


def listed_images(images: ImageSource, file: str, missing_allowed: bool = False) -> Mask:
    """Return for each image (N,) whether it is in a file that lists one name per line (see `as_list`).

    Args:
        missing_allowed: Whether some listed images, but not all, may be missing.

    Raises:
        UserError: The file can't be read, or lists images that don't exist.
    """
    try:
        with open(file, encoding="utf-8-sig", errors="surrogateescape", opener=regular_only) as lines:
            names = {_unquoted(line.rstrip("\n")) for line in lines if line.strip()}
    except OSError as error:
        raise UserError(f"image list {printable(file)} can't be read ({error.strerror})") from error
    listed = np.fromiter((path in names for path in images.paths), bool, len(images))
    gone = names.difference(images.paths) if listed.sum() < len(names) else set()
    if not listed.any() or (gone and not missing_allowed):
        raise UserError(
            f"image list {printable(file)}: {len(gone)} of its {len(names)} images are not in {printable(images.root)} "
            f"({some_names(sorted(gone))}), which holds {some_names(images.paths)}: name the data set and the split "
            f"that it was made of{lookalikes(gone, images.paths)}"
        )
    return listed


def as_list(images: ImageSource) -> bytes:
    """Return images' names, one per line; a name with a line break or with a quote at its start is written as JSON."""
    lines = (json.dumps(path) if {*path} & {"\n", "\r"} or path[0] == '"' else path for path in images.paths)
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def _unquoted(line: str) -> str:
    with suppress(ValueError):  # a line that `as_list` has not written may begin with a quote without being JSON
        return str(json.loads(line)) if line[0] == '"' else line
    return line


def part(images: ImageSource, mask: Mask) -> ImageSource:
    """Return the images for which `mask` is True, without the warnings about all images."""
    return replace(images.select(mask), warnings=[])


def open_labels(
    args: Namespace,
    folder: ImageSource,
    num_classes: int,
    on_progress: SearchProgress | None = None,
    flag: str = "--token-label-data",
) -> tuple[LabelReader | None, list[str]]:
    """Find the images' token labels. Return (labels or None, warnings). Report progress of a search to `on_progress`.

    Args:
        flag: The flag that names the labels' folder.

    Raises:
        UserError: A label is missing (`--bad-label stop`), or the labels are for other classes.
    """
    path = vars(args)[flag.lstrip("-").replace("-", "_")]
    if not path:
        return None, []
    if args.data_backend == "synthetic":
        from tlt.data.backends.synthetic import SyntheticLabels

        if args.label_tail != "zero":
            raise UserError(f"--label-tail {args.label_tail}: synthetic maps have no log-sum-exp; leave it out")
        return SyntheticLabels(folder), [f"{flag} {path}: synthetic images, synthetic maps"]
    from tlt.labels import store

    try:
        labels = store.open_labels(
            path,
            folder.paths,
            area=args.token_label_area,
            num_classes=num_classes,
            bad_label=args.bad_label,
            class_names=folder.class_names,
            label_tail=args.label_tail,
            on_progress=on_progress,
        )
    except UserError as error:
        raise type(error)(f"{flag}: {error}") from error  # a run may have labels for training and for validation
    return labels, labels.warnings


def label_agreement(labels: LabelReader | None, images: ImageSource) -> str:
    """Return a line about how often token labels in a sample name the class of their image; "" if their classes are not
    those of the folders."""
    from tlt.labels import store

    if not isinstance(labels, store.LabelStore) or labels.info.transfer:
        return ""
    sampled = store.sampled_agreement(labels, images.classes, _SAMPLE)
    share = sampled.images_agreeing / max(sampled.images, 1)
    line = f"the token labels name the class of {100 * share:.1f} % of {sampled.images} sampled images"
    if share >= _LOW_AGREEMENT:
        return line
    return f"warning: {line}: such labels teach little; look at them with `tlt check` and `tlt show`"


def augment_config(args: Namespace, settings: Mapping[str, Any]) -> AugmentConfig:
    """Return the training augmentation that the flags describe."""
    return AugmentConfig(
        size=settings["input_size"][1:],
        scale=tuple(args.scale),
        ratio=tuple(args.ratio),
        hflip=args.hflip,
        vflip=args.vflip,
        auto_augment=None if args.aa in ("", "none") else args.aa,
        color_jitter=args.color_jitter,
        interpolation=args.train_interpolation or "random",
        reprob=args.reprob,
        remode=args.remode,
        recount=args.recount,
        mean=_rgb(settings),
        no_aug=args.no_aug,
    )


def size_schedule(args: Namespace, full: tuple[int, int]) -> SizeSchedule | None:
    """Return the schedule of `--train-img-sizes`, or None without it; `full` is (H, W) of `--img-size`. Raises
    UserError if its flags have contradictory numbers of values."""
    if not args.train_img_sizes:
        return None
    sizes = [to_2tuple(size) for size in args.train_img_sizes]
    batches = args.train_batch_sizes or [args.batch_size] * len(sizes)
    if batches == ["auto"]:  # about the same number of pixels in each batch
        fitting = [args.batch_size * math.prod(full) // math.prod(size) for size in sizes]
        batches = [max(1, batch // 8 * 8 or batch) for batch in fitting]
    epochs = args.epochs if args.train_size_schedule == "progressive" else None
    window = args.train_size_schedule_spread, args.train_size_random_mix
    return SizeSchedule(sizes, batches, args.train_size_probs, epochs, *window)


def train_loader(
    args: Namespace, folder: ImageSource, labels: LabelReader | None, settings: Mapping[str, Any], world: World
) -> Loader:
    """Return the loader of this rank's training batches. Raises UserError if there are fewer images than a batch."""
    view = None
    if args.compat:
        from tlt.upstream.behaviour import label_view

        view = label_view(args.compat)
    return Loader(
        folder,
        labels,
        augment_config(args, settings),
        args.batch_size,
        args.seed,
        mean=settings["mean"],
        std=settings["std"],
        device=world.device,
        workers=workers_of(args),
        world_size=world.data_size,
        rank=world.data_rank,
        backend=args.data_backend,
        max_pixels=args.max_pixels,
        full_decode=args.full_decode,
        max_bad_images=args.max_bad_images,
        drop_last=args.drop_last,
        micro_batches=args.grad_accum_steps,
        repeats=args.aug_repeats or 1,
        sizes=size_schedule(args, settings["input_size"][1:]),
        label_view=view,
        **_loading(args, world),
    )


def validation_loader(
    args: Namespace,
    folder: ImageSource,
    batch_size: int,
    settings: Mapping[str, Any],
    world: World,
    labels: LabelReader | None = None,
    skips: SkipCounter | None = None,
) -> EvalLoader:
    """Return the loader of this rank's validation batches, with label maps if `labels` is given.

    Args:
        skips: Counts unreadable images. None allows as many of them as `--max-bad-images` does.
    """
    # The decoder does not scale here: validation resizes whole images, with the same filters in all backends.
    workers = workers_of(args)
    backend = create_backend(args.data_backend, args.max_pixels, workers, world.device)
    return EvalLoader(
        eval_dataset(folder, settings, backend=backend, labels=labels),
        batch_size,
        EvalStage(settings["mean"], settings["std"]).to(world.device),
        device=world.device,
        workers=min(workers, math.ceil(len(folder) / batch_size)),  # none of them is without a batch
        skips=skips or SkipCounter(len(folder), args.max_bad_images),
        **_loading(args, world),
        world_size=world.data_size,
        rank=world.data_rank,
    )


def eval_dataset(folder: ImageSource, settings: Mapping[str, Any], **more: Any) -> EvalDataset:
    """Return the images as validation shows them to the model; `more` has further arguments of EvalDataset."""
    return EvalDataset(
        folder,
        settings["input_size"][1:],
        settings["crop_pct"],
        settings["crop_mode"],
        settings["interpolation"],
        fill=[min(255, round(255 * value)) for value in _rgb(settings)],
        **more,
    )


def workers_of(args: Namespace) -> int:
    """Return `--workers`; the default is for the ranks of this machine, which share its CPUs."""
    return default_workers(launch_of(os.environ).local_size or 1) if args.workers is None else int(args.workers)


def _rgb(settings: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the images' mean as three channels. Raises UserError if the model takes neither RGB nor grey images."""
    channels, mean = settings["input_size"][0], settings["mean"]
    if channels not in (1, 3):
        raise UserError(f"the model takes images of {channels} channels: they have 3 (RGB), or 1 (grey)")
    return tuple(mean) * (3 // len(mean))


def _loading(args: Namespace, world: World) -> dict[str, Any]:
    """Return the arguments that all loaders share. Several ranks keep their workers: forks beside gloo can hang."""
    keep = getattr(args, "use_multi_epochs_loader", False) or world.size > 1
    feed = {"pin_memory": args.pin_mem, "prefetch": not args.no_prefetcher, "timeout": float(args.loader_timeout)}
    return feed | {"persistent_workers": keep}

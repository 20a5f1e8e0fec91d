"""Builds the data of a run from its flags: images, labels, augmentation and loaders."""

import json
import math
import os
from collections.abc import Mapping, Sequence
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
from tlt.data.dataset import EvalDataset, FeatureReader, LabelReader
from tlt.data.loader import EvalLoader
from tlt.data.size_schedule import SizeSchedule
from tlt.data.sources import open_images
from tlt.data.sources.folder import compare_classes, read_class_map
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import blamed_on, read_lines
from tlt.io.jobs import SearchProgress, default_workers
from tlt.io.text import lookalikes, printable, some_names
from volo.cluster.distributed import World
from volo.cluster.launch import launch_of
from volo.config.settings_data import Augmentation, LabelMaps, Loading
from volo.config.settings_train import TrainSettings

HELD_OUT_FILE = "validation_images.txt"  # in the run directory: lists the images that `--val-fraction` holds out
Mask: TypeAlias = npt.NDArray[np.bool_]  # (N,), one value per image
# Number of global batches in an epoch of --data-backend synthetic, and in its validation.
SYNTHETIC_UPDATES = 100
SYNTHETIC_VALIDATION_BATCHES = 10
_SAMPLE = 256  # label maps compared with their images' classes
_LOW_AGREEMENT = 0.5  # share below which to warn


class Folders(NamedTuple):
    """Training and validation images, which share one list of classes."""

    train: ImageSource
    validation: ImageSource
    warnings: list[str]


def open_folders(settings: TrainSettings, world_size: int, on_progress: SearchProgress | None = None) -> Folders:
    """Find the images of both splits; report progress of a long search to `on_progress`. With `--val-fraction` both are
    the training images, which `hold_out` splits; with `--kd-only` as well, but such runs don't validate. Raise
    UserError if a split is missing or empty, or the splits have different classes."""
    images = settings.images
    if images.loading.data_backend == "synthetic":
        from tlt.data.backends.synthetic import synthetic_folder

        classes = settings.network.num_classes or 1000
        batch = images.batch_size * settings.optim.grad_accum_steps * world_size
        return Folders(
            synthetic_folder(SYNTHETIC_UPDATES * batch, classes),
            synthetic_folder(SYNTHETIC_VALIDATION_BATCHES * batch, classes),
            [],
        )
    names = read_class_map(images.class_map) if images.class_map else None
    labelled = not settings.teachers.kd_only
    whole = images.val_fraction > 0 or not labelled
    place = images.data_dir, images.train_split, images.dataset
    train = open_images(*place, names, whole, on_progress, "--train-split", labelled)
    if whole:
        return Folders(train, train, train.warnings)
    place = images.data_dir, images.val_split, images.dataset
    validation = open_images(*place, train.class_names, on_progress=on_progress, split_flag="--val-split")
    compare_classes(train, validation)
    return Folders(train, validation, train.warnings + validation.warnings)


def hold_out(fraction: float, seed: int, folders: Folders, *directories: Path) -> Folders:
    """Hold out a fraction of the training images for validation (`--val-fraction`); 0 has a split of its own. If a
    run directory has a list, the first such list is used. Raise UserError if either part would be empty."""
    if not fraction:
        return folders
    lists = [directory / HELD_OUT_FILE for directory in directories if (directory / HELD_OUT_FILE).is_file()]
    if lists:
        held = listed_images(folders.train, str(lists[0]), missing_allowed=True)
    else:
        held = _draw_held_out(folders.train, fraction, seed)
    if not held.any() or held.all():
        raise UserError(f"--val-fraction {fraction:g}: no class has images for training and for validation")
    return Folders(part(folders.train, ~held), part(folders.train, held), folders.warnings)


def _draw_held_out(images: ImageSource, fraction: float, seed: int) -> Mask:
    """Hold out `fraction` of each class, at least one of two images and never all. Depends on classes and seed only."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(images))
    held = np.zeros(len(images), bool)
    for number, count in zip(*np.unique(images.classes, return_counts=True), strict=True):
        held[order[images.classes[order] == number][: min(count - 1, max(1, round(fraction * int(count))))]] = True
    return held


def listed_images(images: ImageSource, file: str, missing_allowed: bool = False) -> Mask:
    """Return for each image (N,) whether it is in a file that lists one name per line (see `as_list`). Raise UserError
    if the file can't be read, or no listed image exists; one missing is enough unless `missing_allowed`."""
    names = {*map(_unquoted, read_lines(file, "image list", "surrogateescape"))}
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
    path: str,
    maps: LabelMaps,
    folder: ImageSource,
    num_classes: int,
    on_progress: SearchProgress | None = None,
    *,
    flag: str = "--token-label-data",
    synthetic: bool = False,
) -> tuple[LabelReader | None, list[str]]:
    """Find the images' token labels in the folder `path` that `flag` names; "" has none. Return (labels or None,
    warnings). Synthetic images have `synthetic` maps. Report progress of a search to `on_progress`. Raise UserError if
    a label is missing (`--bad-label stop`), or the labels are for other classes."""
    if not path:
        return None, []
    if synthetic:
        from tlt.data.backends.synthetic import SyntheticLabels

        if maps.label_tail != "zero":
            raise UserError(f"--label-tail {maps.label_tail}: synthetic maps have no log-sum-exp; leave it out")
        return SyntheticLabels(folder), [f"{flag} {path}: synthetic images, synthetic maps"]
    from tlt.labels import store

    with blamed_on(flag, of=UserError):  # a run may have labels for training and for validation
        labels = store.open_labels(
            path,
            folder.paths,
            area=maps.token_label_area,
            num_classes=num_classes,
            bad_label=maps.bad_label,
            class_names=folder.class_names,
            label_tail=maps.label_tail,
            on_progress=on_progress,
        )
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


def augment_config(augment: Augmentation, data_config: Mapping[str, Any]) -> AugmentConfig:
    """Return the training augmentation that the flags describe."""
    same = ("hflip", "vflip", "color_jitter", "reprob", "remode", "recount", "no_aug")
    return AugmentConfig(
        size=data_config["input_size"][1:],
        scale=(augment.scale[0], augment.scale[1]),
        ratio=(augment.ratio[0], augment.ratio[1]),
        auto_augment=None if augment.aa in ("", "none") else augment.aa,
        interpolation=augment.train_interpolation or "random",
        mean=_rgb(data_config),
        **{name: getattr(augment, name) for name in same},
    )


def sizes_of(settings: TrainSettings, full: tuple[int, int]) -> SizeSchedule | None:
    """Return the schedule of `--train-img-sizes`, or None without it; `full` is (H, W) of `--img-size`. Raises
    UserError if its flags have contradictory numbers of values."""
    sizes = settings.sizes
    batch_size = settings.images.batch_size
    if not sizes.train_img_sizes:
        return None
    sides = [to_2tuple(size) for size in sizes.train_img_sizes]
    batches: list[Any] = sizes.train_batch_sizes or [batch_size] * len(sides)
    if batches == ["auto"]:  # about the same number of pixels in each batch
        fitting = [batch_size * math.prod(full) // math.prod(side) for side in sides]
        batches = [max(1, batch // 8 * 8 or batch) for batch in fitting]
    length = settings.schedule.epochs if sizes.train_size_schedule == "progressive" else None
    window = sizes.train_size_schedule_spread, sizes.train_size_random_mix
    return SizeSchedule(sides, batches, sizes.train_size_probs, length, *window)


def train_loader(
    settings: TrainSettings,
    folder: ImageSource,
    labels: LabelReader | None,
    data_config: Mapping[str, Any],
    world: World,
    features: Sequence[FeatureReader] = (),
) -> Loader:
    """Return the loader of this rank's training batches, with labels and stored `features` of teachers. Raises
    UserError if there are fewer images than a batch."""
    view = None
    if settings.labels.compat:
        from tlt.upstream.behaviour import label_view

        view = label_view(settings.labels.compat)
    loading = settings.images.loading
    return Loader(
        folder,
        labels,
        augment_config(settings.augment, data_config),
        settings.images.batch_size,
        settings.run.seed,
        mean=data_config["mean"],
        std=data_config["std"],
        workers=workers_of(loading.workers),
        backend=loading.data_backend,
        max_pixels=loading.max_pixels,
        full_decode=loading.full_decode,
        max_bad_images=loading.max_bad_images,
        drop_last=loading.drop_last,
        micro_batches=settings.optim.grad_accum_steps,
        repeats=settings.augment.aug_repeats or 1,
        sizes=sizes_of(settings, data_config["input_size"][1:]),
        label_view=view,
        features=features,
        **_feeding(loading, world, loading.use_multi_epochs_loader),
    )


def validation_loader(
    loading: Loading,
    folder: ImageSource,
    batch_size: int,
    data_config: Mapping[str, Any],
    world: World,
    labels: LabelReader | None = None,
    *,
    skips: SkipCounter | None = None,
    keep_workers: bool = False,
) -> EvalLoader:
    """Return the loader of this rank's validation batches, with label maps if `labels` is given. `skips` counts
    unreadable images; None allows as many as `--max-bad-images` does. `keep_workers` keeps processes between epochs."""
    # The decoder does not scale here: validation resizes whole images, with the same filters in all backends.
    workers = workers_of(loading.workers)
    backend = create_backend(loading.data_backend, loading.max_pixels, workers, world.device)
    return EvalLoader(
        eval_dataset(folder, data_config, backend=backend, labels=labels),
        batch_size,
        EvalStage(data_config["mean"], data_config["std"]).to(world.device),
        workers=min(workers, math.ceil(len(folder) / batch_size)),  # none of them is without a batch
        skips=skips or SkipCounter(len(folder), loading.max_bad_images),
        **_feeding(loading, world, keep_workers),
    )


def eval_dataset(folder: ImageSource, data_config: Mapping[str, Any], **more: Any) -> EvalDataset:
    """Return the images as validation shows them to the model; `more` has further arguments of EvalDataset."""
    return EvalDataset(
        folder,
        data_config["input_size"][1:],
        data_config["crop_pct"],
        data_config["crop_mode"],
        data_config["interpolation"],
        fill=[min(255, round(255 * value)) for value in _rgb(data_config)],
        **more,
    )


def workers_of(asked: int | None) -> int:
    """Return `--workers`; the default is for the ranks of this machine, which share its CPUs."""
    return default_workers(launch_of(os.environ).local_size or 1) if asked is None else asked


def _rgb(data_config: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the images' mean as three channels. Raises UserError if the model takes neither RGB nor grey images."""
    channels, mean = data_config["input_size"][0], data_config["mean"]
    if channels not in (1, 3):
        raise UserError(f"the model takes images of {channels} channels: they have 3 (RGB), or 1 (grey)")
    return tuple(mean) * (3 // len(mean))


def _feeding(loading: Loading, world: World, keep_workers: bool) -> dict[str, Any]:
    """Return the arguments that all loaders share. Several ranks keep their workers: forks beside gloo can hang."""
    return {
        "device": world.device,
        "world_size": world.data_size,
        "rank": world.data_rank,
        "pin_memory": loading.pin_mem,
        "prefetch": not loading.no_prefetcher,
        "timeout": float(loading.loader_timeout),
        "persistent_workers": keep_workers or world.size > 1,
    }

"""Make token labels: an annotator network finds the classes at every position of every image in a folder.

    python generate_label.py DATA OUT --model dm_nfnet_f6 --pretrained --img-size 576 -b 32
    python generate_label.py DATA OUT --checkpoint output/train/annotator
    ./distributed_generate_label.sh 8 DATA OUT ...                                   one process per GPU

DATA is a folder of class folders, or contains such a folder called `train` (or as `--split` says), which is annotated.
OUT becomes a label archive (docs/token_label_archive.md) with the k largest logits of every position and their classes;
`tlt unpack` converts it to the published files. The annotator sees the whole image, squashed to its input size, so that
every crop has labels. It is a timm ConvNet, Swin or vision transformer with average pooling, or a model with a dense
head: VOLO, LV-ViT, or any model trained with token labels.

After an interruption the same command continues, with any number of processes. The last bits of a network's output
depend on which images share a batch. So batches follow the order of the folder, and an interrupted batch is repeated as
a whole; the labels are then the same as without an interruption.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlt.data.batch import SkipCounter, Skipped
from tlt.data.sources import open_images
from tlt.data.sources.image_file import BadImage
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.jobs import Progress
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, LabelMap
from tlt.labels.annotate import Annotator, check_dense, labelled_area
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo, agreement_text
from volo.checkpoint.model_config import class_names
from volo.cluster.distributed import JOIN_S, World, from_all, from_primary, primary_first, wait_for_hosts
from volo.commands.console import say, warn
from volo.commands.inference import load, place, run_on_ranks
from volo.config.settings_evaluate import LabelSettings
from volo.train.compilation import Compiler
from volo.train.data import validation_loader
from volo.train.trained_model import TrainedModel, take_classes

_RANK_TIMEOUT = 7 * 86400.0  # seconds for which the other ranks wait while rank 0 checks the existing labels


def run(settings: LabelSettings) -> int:
    """Label the images on all ranks, and return the exit code."""
    precision = settings.precision
    work = partial(label_folder, settings)
    return run_on_ranks(work, precision.device, precision.compilation, timeout_s=_RANK_TIMEOUT, join_s=JOIN_S)


def label_folder(settings: LabelSettings, world: World) -> None:
    """Build everything, label the images and finish the archive."""
    root = settings.images.token_label_root
    folder = open_images(settings.images.data, settings.images.split, settings.images.dataset, allow_root=True)
    say(settings.notes, world.is_primary)
    warn(folder.warnings, world.is_primary)
    kernel = settings.precision.outlook_kernel
    trained = load(settings.network, settings.images.pixels, outlook_kernel=kernel, on_this_rank=world.is_primary)
    say(check(settings, trained, folder), world.is_primary)
    annotator = prepare_annotator(settings, trained, world)
    size = trained.data_config["input_size"]
    grid = annotator(torch.zeros(1, *size, device=world.device)).values.shape[2:]
    info = describe(settings, trained, folder, (grid[0], grid[1]))
    with primary_first():
        first = world.is_primary
        # Not the batch size, which decides last bits alone: a job that ran out of memory goes on with a smaller one.
        made_by: dict[str, Any] = {"--model-kwargs": settings.network.model_kwargs}
        with suppress(BadImage):
            made_by["sha256 of the first image"] = hashlib.sha256(folder.read(0)).hexdigest()[:16]
        overwrite = settings.written.overwrite and first
        writer = ArchiveWriter(root, info, folder.paths, overwrite, first, made_by)
    if from_primary(writer.complete):
        writer.close()
        return say([f"{printable(root)} was complete already"], world.is_primary)
    pending = from_primary(writer.pending() if first else [])
    if len(pending) < len(folder):
        say([f"{len(folder) - len(pending)} of {len(folder)} images are labelled already"], first)
    make_labels(settings, trained, folder, writer, pending, annotator, world)


def check(settings: LabelSettings, trained: TrainedModel, folder: ImageSource) -> list[str]:
    """Give the annotator's classes the numbers of the class folders, unless `--transfer` allows other classes. Return
    lines for the user. Raises UserError if the classes differ, the annotator has no classes, or the flags ask for a
    crop."""
    ours = folder.class_names
    crop = settings.images.pixels.crop_pct
    if crop not in (None, 1.0):
        raise UserError(f"--crop-pct {crop:g}: the whole image is labelled: leave it out, or give 1.0")
    if not trained.model.num_classes:
        raise UserError(f"--model {trained.name} has no classes: give --num-classes and weights with a head")
    try:
        whose = f"{printable(folder.root)} has {len(ours)} class folders"
        return [] if settings.written.transfer else take_classes(trained, ours, len(ours), whose)
    except UserError as error:
        raise UserError(f"--model {trained.name}: {error}, or --transfer to label with its own classes") from error


def prepare_annotator(settings: LabelSettings, trained: TrainedModel, world: World) -> Annotator:
    """Put the annotator on its device, with the precision of the flags. Raises UserError if the model can't give exact
    dense logits."""
    precision = place(trained, world, settings.precision.mixed, settings.precision.channels_last)
    images = torch.randn(2, *trained.data_config["input_size"], device=world.device)
    check_dense(trained.model, images, f"--model {trained.name}")
    compiler = Compiler(settings.precision.compilation, trained.name)
    compiler.check_scope(trained.model)
    return Annotator(trained.model, settings.written.top_k, precision.amp_dtype, compiler.features(trained.model))


def describe(settings: LabelSettings, trained: TrainedModel, folder: ImageSource, grid: tuple[int, int]) -> LabelInfo:
    """Return what all label maps have in common: how they are made, and their classes."""
    data_config, count = trained.data_config, trained.model.num_classes
    area = labelled_area(trained.model, data_config["input_size"][1:])
    weights = "published"
    if settings.network.checkpoint:
        digest = hashlib.sha256(Path(settings.network.checkpoint).read_bytes()).hexdigest()
        weights = f"sha256 {digest}, EMA" if trained.ema else f"sha256 {digest}"
    annotator = {"model": trained.name, "weights": weights, "input_size": data_config["input_size"], "resize": "squash"}
    annotator |= {key: data_config[key] for key in ("interpolation", "mean", "std")}
    mixed = settings.precision.mixed
    written = settings.written
    annotator["amp_dtype"] = (mixed.amp_dtype or "default") if mixed.amp else None
    return LabelInfo(
        min(written.top_k, count),
        grid,
        count,
        "full" if area == FULL_AREA else area,
        annotator,
        class_names(trained.config, count) or None if written.transfer else folder.class_names,
        transfer=written.transfer,
        log_sum_exp=not written.no_log_sum_exp,
    )


def make_labels(
    settings: LabelSettings,
    trained: TrainedModel,
    folder: ImageSource,
    writer: ArchiveWriter,
    pending: list[int],
    annotator: Annotator,
    world: World,
) -> None:
    """Label the pending rows and finish the archive. The ranks share the batches that contain a pending row. Raises
    UserError if a logit is NaN or infinite, or the disk is full."""
    size = settings.images.batch_size
    wanted = set(pending)
    starts = sorted({row // size * size for row in pending})[world.rank :: world.size]
    rows = [row for start in starts for row in range(start, min(start + size, len(folder)))]
    # Each rank loads its own rows, as whole images squashed to the annotator's input size. Indices count within `rows`.
    whole = trained.data_config | {"crop_pct": 1.0, "crop_mode": "squash"}
    alone = World(0, 0, 1, world.device)
    skips = SkipCounter(len(folder), settings.images.loading.max_bad_images)
    loader = validation_loader(settings.images.loading, folder.select(rows), size, whole, alone, skips=skips)
    progress = Progress("labelling", len(pending)) if world.is_primary else None
    for batch in loader:
        values, ids, log_sum_exp = (tensor.cpu().numpy() for tensor in annotator(batch.images))
        for position, row in enumerate(rows[index] for index in batch.indices.tolist()):
            if row not in wanted:
                continue
            source = printable(folder.path(row))
            if not np.isfinite(values[position]).all():
                raise UserError(
                    f"the annotator's logits for {source} are NaN or beyond half precision: check its weights, or "
                    "leave out --amp"
                )
            label_map = LabelMap(values[position], ids[position], source=source, log_sum_exp=log_sum_exp[position])
            writer.write(row, label_map)
        if progress is not None:  # assumes that the other ranks have done as much
            progress.step(min(batch.size * world.size, len(pending) - progress.done))
    wait_for_hosts()
    skipped = from_all(skips.reasons)
    if progress is not None:
        progress.step(len(pending) - progress.done)
        progress.close()
        finish(settings, folder, writer, wanted, skipped)


def finish(
    settings: LabelSettings,
    folder: ImageSource,
    writer: ArchiveWriter,
    pending: set[int],
    skipped: list[dict[str, str]],
) -> None:
    """Finish the archive, and print what it contains and how well it agrees with the class folders. Raises UserError if
    more images are unreadable than `--max-bad-images` allows, or all are; or the disk is full.

    Args:
        skipped: For each rank, the images that could not be read: path and reason.
    """
    counter = SkipCounter(len(folder), settings.images.loading.max_bad_images)
    counter.record(Skipped(*item) for of_rank in skipped for item in of_rank.items())
    if len(counter.reasons) == len(folder):
        raise UserError(f"not one of {len(folder)} images in {printable(folder.root)} can be read: check them")
    say(counter.take_lines())
    absent = sorted(row for row in pending if folder.path(row) in counter.reasons)
    for row in absent:
        writer.write_absent(row)
    classes = None if settings.written.transfer else folder.classes
    agreement = writer.finish([folder.paths[row] for row in absent], classes)
    info = writer.info
    print(
        f"{len(pending) - len(absent)} label maps of {info.k} classes on {info.grid[0]} x {info.grid[1]} cells "
        f"made in {settings.images.token_label_root}, for {len(folder)} images",
        flush=True,
    )
    say([agreement_text(agreement)] if agreement else [])

"""Store a teacher's features: its last map for every whole image of a folder, written once.

    volo features DATA FEATURES --model vit_small_patch14_dinov2 --size 448
    volo train DATA --model volo_d1 --kd-model-name FEATURES

FEATURES becomes a feature archive (docs/teachers.md). The teacher sees images as under `volo train --kd-view whole
--kd-size 448`: squashed to its size, without any augmentation, so that its map is the same in every epoch. Training
reads each token's features in this map, where crop, flip and warp say that the token looks.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tlt.data.sources import open_images
from tlt.errors import UserError, in_range
from tlt.io.files import blamed_on
from tlt.io.text import printable
from tlt.labels.features import Basis, FeatureInfo, FeatureWriter, principal_directions, quantised, read_basis
from tlt.teacher import FeatureTeacher
from volo.cluster.distributed import JOIN_S, World, wait_for_hosts
from volo.commands.archive_job import RANK_TIMEOUT, ArchiveJob, described
from volo.commands.console import say, warn
from volo.commands.inference import load, place, run_on_ranks
from volo.config.settings_evaluate import FeaturesSettings
from volo.train.compilation import Compiler
from volo.train.distillation import checksum
from volo.train.trained_model import TrainedModel

_BASIS_IMAGES = 2048  # of which the principal directions are computed
_TIMED_S = 20.0  # at most, of a dry run


def run(settings: FeaturesSettings) -> int:
    """Write the features on all ranks, and return the exit code."""
    precision = settings.precision
    work = partial(store_folder, settings)
    return run_on_ranks(work, precision.device, precision.compilation, timeout_s=RANK_TIMEOUT, join_s=JOIN_S)


def store_folder(settings: FeaturesSettings, world: World) -> None:
    """Build everything, write the features and finish the archive."""
    images, written = settings.images, settings.written
    folder = open_images(images.data, images.split, images.dataset, allow_root=True, classes=False)
    say(settings.notes, world.is_primary)
    warn(folder.warnings, world.is_primary)
    kernel = settings.precision.outlook_kernel
    trained = load(settings.network, images.pixels, dense=False, outlook_kernel=kernel, on_this_rank=world.is_primary)
    digest = checksum(trained.model)
    teacher = prepare_teacher(settings, trained, world)
    info = describe(settings, trained, digest, teacher)
    out = str(written.out)
    job = ArchiveJob(trained, folder, images.loading, images.batch_size, world, out, "features", "stored")
    say([needed_room(info, len(folder), out)], world.is_primary)
    if written.dry_run:
        return say([measured_rate(job, teacher)], world.is_primary)
    make = partial(FeatureWriter, out, info, folder.paths)
    writer = job.open(make, settings.network.model_kwargs, written.overwrite)
    pending = job.pending(writer)
    if pending is None:
        return
    basis = find_basis(job, teacher, writer, pending) if info.teacher_channels else None
    absent = job.write(writer, pending, partial(feature_rows, teacher, basis, info.dtype), writer.write_row)
    if absent is not None:
        writer.finish(absent)
        say([f"features of {len(folder) - len(absent)} images are in {printable(out)}: {info.text}"])


def prepare_teacher(settings: FeaturesSettings, trained: TrainedModel, world: World) -> FeatureTeacher:
    """Put the teacher on its device, with the precision of the flags. Raises UserError if it gives no tokens."""
    precision = place(trained, world, settings.precision.mixed, settings.precision.channels_last)
    config = trained.data_config
    trained.model.pretrained_cfg = trained.model.pretrained_cfg | {key: config[key] for key in ("mean", "std")}
    compiler = Compiler(settings.precision.compilation, trained.name)
    compiler.check_scope(trained.model)
    compiled = compiler.features(trained.model)
    size = config["input_size"][1:]
    teacher = FeatureTeacher(trained.model, size, config["mean"], config["std"], precision.amp_dtype, compiled)
    with blamed_on(f"--model {trained.name}", of=UserError):
        _ = teacher.tokens
    return teacher


def describe(settings: FeaturesSettings, trained: TrainedModel, digest: str, teacher: FeatureTeacher) -> FeatureInfo:
    """Return what all maps have in common. Raises UserError if the teacher has fewer channels than `--channels`."""
    grid, area, channels = teacher.tokens
    kept = settings.written.channels or channels
    in_range("--channels", kept, 1, channels)
    made_by = described(trained, f"sha256 {digest}", settings.precision.mixed)
    all_channels = None if kept == channels else channels
    return FeatureInfo(grid, kept, settings.written.dtype, area, made_by, all_channels)


def needed_room(info: FeatureInfo, images: int, out: str) -> str:
    """Return a line about the room that the rows of so many images need. Raises UserError if the disk has less, beside
    what an interrupted command has written."""
    need = info.row_bytes * images
    existing = next(folder for folder in (Path(out).absolute(), *Path(out).absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    size = f"{need / 1e9:.2f} GB" if need >= 1e9 else f"{need / 1e6:.1f} MB"
    line = f"{images} images need {size} ({info.text}); {free / 1e9:.2f} GB are free"
    written = sum(512 * file.stat().st_blocks for file in Path(out).glob("*.npy"))  # what is not written has no blocks
    if need - written > free:
        raise UserError(f"FEATURES {printable(out)}: {line}: make room, or store less (--channels, --size)")
    return line


def measured_rate(job: ArchiveJob, teacher: FeatureTeacher) -> str:
    """Return a line about the speed of the teacher, measured on the first images, and how long all of them take."""
    began = time.perf_counter()
    first = seen = 0
    for batch in job.loader(range(min(len(job.folder), 64 * job.batch_size))):
        teacher(batch.images).sum().item()
        if not first:  # which starts workers and compiles
            first = batch.size
            began = time.perf_counter()
        else:
            seen += batch.size
        if time.perf_counter() - began > _TIMED_S:
            break
    if not seen:
        return "--dry-run: one batch holds all images, no rate was measured; nothing was written"
    rate = seen / (time.perf_counter() - began) * job.world.size
    minutes = len(job.folder) / rate / 60
    time_text = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
    return f"--dry-run: {rate:.1f} images/s, {time_text} for {len(job.folder)} images; nothing was written"


def find_basis(job: ArchiveJob, teacher: FeatureTeacher, writer: FeatureWriter, pending: Sequence[int]) -> Tensor:
    """Return the principal directions (C, D) on the teacher's device: those of an interrupted command, or of the first
    images, which rank 0 computes and writes."""
    known = len(pending) < len(job.folder)  # a row was written with the basis that is there
    if job.world.is_primary and not known:
        basis = compute_basis(job, teacher, writer.info.channels)
        writer.write_basis(basis)
    wait_for_hosts()
    basis = read_basis(writer.root, writer.info)
    share = 100 * float(basis.kept.sum())
    say([f"{writer.info.channels} directions keep {share:.2f} % of the features' squared sizes"], job.world.is_primary)
    return basis.directions.to(job.world.device)


def compute_basis(job: ArchiveJob, teacher: FeatureTeacher, channels: int) -> Basis:
    """Return the principal directions of the features of the first images."""
    moment = torch.zeros(())
    for batch in job.loader(range(min(len(job.folder), _BASIS_IMAGES))):
        tokens = teacher(batch.images).flatten(0, 1).double()
        moment = moment.to(tokens) + tokens.mT @ tokens
    return principal_directions(moment, channels)


def feature_rows(
    teacher: FeatureTeacher, basis: Tensor | None, dtype: str, images: Tensor, names: Sequence[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of images (B, 3, H, W), which the device has made. Raises UserError if a feature is not finite, or
    too large for float16."""
    tokens = teacher(images)
    if basis is not None:
        tokens = tokens @ basis
    try:
        columns = quantised(tokens.unflatten(1, teacher.tokens[0]), dtype)
    except UserError as error:
        raise UserError(f"{error}; it is one of {names[0]} to {names[-1]}") from error
    for row in range(len(names)):
        yield {name: column[row] for name, column in columns.items()}

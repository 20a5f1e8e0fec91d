"""Make token labels: an annotator network finds the classes at every position of every image in a folder.

    python generate_label.py DATA OUT --model dm_nfnet_f6 --pretrained --img-size 576 -b 32
    python generate_label.py DATA OUT --checkpoint output/train/annotator
    ./distributed_generate_label.sh 8 DATA OUT ...                                   one process per GPU

DATA is a folder of class folders, or contains such a folder called `train` (or as `--split` says), which is annotated.
OUT becomes a label archive (docs/token_label_archive.md) with the k largest logits of every position and their classes;
`tlt unpack` converts it to the published files. The annotator sees the whole image, squashed to its input size, so that
every crop has labels. It is a timm ConvNet, Swin or vision transformer with average pooling, or a model with a dense
head: VOLO, LV-ViT, or any model trained with token labels.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tlt.data.sources import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, LabelMap
from tlt.labels.annotate import Annotator, check_dense, labelled_area
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo, agreement_text
from volo.checkpoint.model_config import class_names
from volo.cluster.distributed import JOIN_S, World
from volo.commands.archive_job import RANK_TIMEOUT, ArchiveJob, described
from volo.commands.console import say, warn
from volo.commands.inference import load, place, run_on_ranks
from volo.config.settings_evaluate import LabelSettings
from volo.train.compilation import Compiler
from volo.train.trained_model import TrainedModel, take_classes


def run(settings: LabelSettings) -> int:
    """Label the images on all ranks, and return the exit code."""
    precision = settings.precision
    work = partial(label_folder, settings)
    return run_on_ranks(work, precision.device, precision.compilation, timeout_s=RANK_TIMEOUT, join_s=JOIN_S)


def label_folder(settings: LabelSettings, world: World) -> None:
    """Build everything, label the images and finish the archive."""
    images, written = settings.images, settings.written
    folder = open_images(images.data, images.split, images.dataset, allow_root=True)
    say(settings.notes, world.is_primary)
    warn(folder.warnings, world.is_primary)
    kernel = settings.precision.outlook_kernel
    trained = load(settings.network, images.pixels, outlook_kernel=kernel, on_this_rank=world.is_primary)
    say(check(settings, trained, folder), world.is_primary)
    annotator = prepare_annotator(settings, trained, world)
    size = trained.data_config["input_size"]
    grid = annotator(torch.zeros(1, *size, device=world.device)).values.shape[2:]
    info = describe(settings, trained, folder, (grid[0], grid[1]))
    out = str(written.out)
    job = ArchiveJob(trained, folder, images.loading, images.batch_size, world, out, "labelling", "labelled")
    make = partial(ArchiveWriter, out, info, folder.paths)
    writer = job.open(make, settings.network.model_kwargs, written.overwrite)
    pending = job.pending(writer)
    if pending is None:
        return
    absent = job.write(writer, pending, partial(label_maps, annotator), writer.write)
    if absent is None:
        return
    agreement = writer.finish(absent, None if written.transfer else folder.classes)
    info = writer.info
    print(
        f"{len(pending) - len(absent)} label maps of {info.k} classes on {info.grid[0]} x {info.grid[1]} cells "
        f"made in {out}, for {len(folder)} images",
        flush=True,
    )
    say([agreement_text(agreement)] if agreement else [])


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
    count = trained.model.num_classes
    area = labelled_area(trained.model, trained.data_config["input_size"][1:])
    weights = "published"
    if settings.network.checkpoint:
        digest = hashlib.sha256(Path(settings.network.checkpoint).read_bytes()).hexdigest()
        weights = f"sha256 {digest}, EMA" if trained.ema else f"sha256 {digest}"
    written = settings.written
    return LabelInfo(
        min(written.top_k, count),
        grid,
        count,
        "full" if area == FULL_AREA else area,
        described(trained, weights, settings.precision.mixed),
        class_names(trained.config, count) or None if written.transfer else folder.class_names,
        transfer=written.transfer,
        log_sum_exp=not written.no_log_sum_exp,
    )


def label_maps(annotator: Annotator, images: Tensor, names: Sequence[str]) -> Iterator[LabelMap]:
    """Yield the maps of images (B, 3, H, W). Raises UserError if a logit is NaN or infinite."""
    annotation = (tensor.cpu().numpy() for tensor in annotator(images))
    for name, values, ids, log_sum_exp in zip(names, *annotation, strict=True):
        if not np.isfinite(values).all():
            raise UserError(
                f"the annotator's logits for {name} are NaN or beyond half precision: check its weights, or "
                "leave out --amp"
            )
        yield LabelMap(values, ids, source=name, log_sum_exp=log_sum_exp)

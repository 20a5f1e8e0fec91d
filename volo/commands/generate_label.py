"""Make token labels: for every place of every image in a folder, the classes that an annotator network finds there.

    python generate_label.py DATA OUT --model dm_nfnet_f6 --pretrained --img-size 576 -b 32
    python generate_label.py DATA OUT --checkpoint runs/annotator/model_best.pth.tar --format archive
    ./distributed_generate_label.sh 8 DATA OUT ...                                   one process per GPU

DATA is a folder of class folders, or holds one called `train` (`--split` names another): then that one is annotated.
OUT receives `<class>/<name>.pt`, [2, k, H, W] half precision: the k largest logits of every place and their classes.
With `--format archive` it becomes one label archive instead (docs/token_label_archive.md). The whole image is shown to
the annotator, squashed to its input size, so that every crop of it has labels. The annotator is a timm ConvNet, Swin or
vision transformer with average pooling, or a model with a dense head: VOLO, LV-ViT, and whatever was trained with token
labels.

The same command continues after any interruption, with any number of processes. The last bits of a network's output
depend on which images share a batch: batches follow the order of the folder, and an interrupted batch is repeated as a
whole, so that the labels are the same as without an interruption.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import nn

from tlt.data.augment.device_stage import EvalStage
from tlt.data.backends.choice import create_backend
from tlt.data.batch import Batch, Skipped
from tlt.data.dataset import EvalDataset
from tlt.data.loader import EvalLoader, SkipCounter
from tlt.data.sources.open_images import open_images
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import sha256_of
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.label_map import FULL_AREA, LabelMap
from tlt.labels.annotate import Annotation, Annotator, check_dense, labelled_area
from tlt.labels.metadata import TreeMetadata
from volo.cluster.distributed import (
    World,
    from_all,
    from_primary,
    init_world,
    lost_rank_explained,
    primary_first,
    shut_down,
    wait_for_hosts,
)
from volo.commands.console import say
from volo.record.metrics import Sums
from volo.train.compilation import check_scope, compile_errors_told, feature_compiler
from volo.train.convolutions import check_convolutions
from volo.train.label_job import ArchiveJob, LabelJob, TreeJob
from volo.train.precision import resolve_amp_dtype
from volo.train.trained_model import load_model

_RANK_TIMEOUT = 7 * 86400.0  # seconds that ranks wait for rank 0 while it checks the existing labels


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    world = init_world(args.device, timeout_s=_RANK_TIMEOUT)
    with lost_rank_explained(), compile_errors_told(args):
        label_folder(args, world)
    shut_down()  # where it fails its connections end with the process, so that its own failure is seen first
    return 0


def label_folder(args: Namespace, world: World) -> None:
    """Build everything, label the images and finish the tree or archive."""
    folder = open_images(args.data, args.split, args.dataset, allow_root=True)
    say([*args.notes, *(f"warning: {warning}" for warning in folder.warnings)], world.is_primary)
    trained = load_model(args, args.checkpoint or None)
    say(trained.notes, world.is_primary)
    model, args, settings = trained.model, trained.args, trained.settings
    check_classes(args, model, folder, trained.config)
    check_settings(args, settings)
    annotator = prepare_annotator(args, model, settings, world)
    grid = annotator(torch.zeros(1, *settings["input_size"], device=world.device)).values.shape[2:]
    with primary_first():
        job = open_job(args, folder, describe(args, settings, folder, model, grid), world)
    pending = from_primary(find_pending(args, job) if world.is_primary else [])
    make_labels(args, job, pending, annotator, settings, world)


def check_classes(args: Namespace, model: nn.Module, folder: ImageSource, recorded: dict[str, Any]) -> None:
    """Compare the annotator's classes with the class folders, unless `--transfer` allows other classes.

    Raises:
        UserError: The classes differ, or the annotator has none.
    """
    if not model.num_classes:
        raise UserError(f"--model {args.model} has no classes: give --num-classes and weights with a head")
    if args.transfer:
        return
    names = recorded.get("class_names")
    if model.num_classes != len(folder.class_names) or (names and list(names) != folder.class_names):
        what = f"{model.num_classes} classes" if model.num_classes != len(folder.class_names) else "other class names"
        raise UserError(
            f"--model {args.model} has {what}, {printable(folder.root)} {len(folder.class_names)} class folders: use "
            "an annotator trained on these, or --transfer to label with its own classes"
        )


def check_settings(args: Namespace, settings: dict[str, Any]) -> None:
    """Raise UserError if the flags ask for a crop ratio other than 1, or for other images than of 3 channels."""
    if args.crop_pct not in (None, 1.0):
        raise UserError(
            f"--crop-pct {args.crop_pct:g}: the whole image is labelled, so it can only be 1.0; leave it out"
        )
    if settings["input_size"][0] != 3:
        raise UserError(f"--input-size {settings['input_size'][0]} ...: images have 3 channels")


def prepare_annotator(args: Namespace, model: nn.Module, settings: dict[str, Any], world: World) -> Annotator:
    """Put the annotator on its device, in the precision that the flags ask for.

    Raises:
        UserError: The model has no exact dense logits.
    """
    memory_format = torch.channels_last if args.channels_last else torch.preserve_format
    model = model.eval().to(world.device).to(memory_format=memory_format)
    check_dense(model, torch.randn(2, *settings["input_size"], device=world.device), f"--model {args.model}")
    dtype = resolve_amp_dtype(args.amp, args.amp_dtype, world.device)
    say(check_convolutions(model, settings["input_size"], dtype, world.device), world.is_primary)
    check_scope(args, model)
    return Annotator(model, args.top_k, dtype, feature_compiler(model, args))


def describe(
    args: Namespace, settings: dict[str, Any], folder: ImageSource, model: Any, grid: torch.Size
) -> TreeMetadata:
    """Return the content of labels.json: how the labels are made."""
    area = labelled_area(model, settings["input_size"][1:])
    weights = "published"
    if args.checkpoint:
        weights = f"sha256 {sha256_of(args.checkpoint)}" + (", EMA" if args.use_ema else "")
    annotator = {
        "model": args.model,
        "weights": weights,
        "input_size": list(settings["input_size"]),
        "resize": "squash",
        "interpolation": settings["interpolation"],
        "mean": list(settings["mean"]),
        "std": list(settings["std"]),
        "amp_dtype": (args.amp_dtype or "default") if args.amp else None,
    }
    names = None if args.transfer else folder.class_names
    return TreeMetadata(
        min(args.top_k, model.num_classes),
        (grid[0], grid[1]),
        model.num_classes,
        "full" if area == FULL_AREA else area,
        annotator,
        names,
    )


def open_job(args: Namespace, folder: ImageSource, metadata: TreeMetadata, world: World) -> LabelJob:
    """Open the tree or the archive that OUT becomes; rank 0 calls this first."""
    overwrite = args.overwrite and world.is_primary
    if args.format == "archive":
        return ArchiveJob(args.token_label_root, folder, metadata, overwrite, not args.no_log_sum_exp)
    return TreeJob(args.token_label_root, folder, metadata, overwrite)


def find_pending(args: Namespace, job: LabelJob) -> list[int]:
    """Return the rows of the folder that have no labels yet, and print how many have."""
    images = len(job.folder)
    if job.origin_unknown:
        print(
            f"warning: {args.token_label_root} has label files of unknown origin; those that fit are kept", flush=True
        )
    if not job.found:
        return list(range(images))
    progress = Progress("checking labels", images)
    pending = job.pending(progress.step)
    progress.close()
    print(f"{images - len(pending)} of {images} images are labelled already", flush=True)
    return pending


def make_labels(
    args: Namespace,
    job: LabelJob,
    pending: list[int],
    annotator: Annotator,
    settings: dict[str, Any],
    world: World,
) -> None:
    """Label the pending rows, each rank its share, then finish the tree or archive."""
    batches = whole_batches(pending, len(job.folder), args.batch_size)[world.rank :: world.size]
    rows = [row for batch in batches for row in batch]
    loader = image_loader(args, job.folder, rows, settings, world.device)
    wanted, sums = set(pending), Sums(("images", "top1", "places", "agreeing"), world)
    progress = Progress("labelling", len(pending)) if world.is_primary else None
    for batch in loader:
        made = write_batch(job, batch, annotator(batch.images), rows, wanted, None if args.transfer else sums)
        if progress is not None:  # the other ranks are about as far
            progress.step(min(made * world.size, progress.total - progress.done))
    wait_for_hosts()
    skips, totals = from_all(loader.skips.reasons), sums.totals()
    if progress is not None:
        progress.step(progress.total - progress.done)
        progress.close()
        close(args, job, wanted, skips, totals)


def whole_batches(pending: list[int], images: int, batch_size: int) -> list[range]:
    """Cut the folder into batches, and return those with a pending row."""
    starts = sorted({row // batch_size * batch_size for row in pending})
    return [range(start, min(start + batch_size, images)) for start in starts]


def write_batch(
    job: LabelJob, batch: Batch, found: Annotation, rows: list[int], wanted: set[int], sums: Sums | None
) -> int:
    """Write the labels of the wanted images in a batch; return how many were written.

    Args:
        rows: Maps an index of the loader to a row of the folder.
        sums: Counts images whose mean dense logits name the folder's class, and places whose top class is that class.
    """
    found = Annotation(*(tensor.cpu() for tensor in found))
    indices, classes = batch.indices.tolist(), batch.classes.cpu()
    places = [place for place, index in enumerate(indices) if rows[index] in wanted]
    area = job.metadata.area if isinstance(job.metadata.area, tuple) else FULL_AREA
    for place in places:
        label_map = LabelMap(found.values[place].numpy(), found.ids[place].numpy(), area)
        width, height = batch.sizes[place].tolist()
        job.write(rows[indices[place]], label_map, found.log_sum_exp[place].numpy(), (width, height))
    if sums is not None:
        top, truth = found.ids[places, 0], classes[places]
        sums.add(len(places), (found.named[places] == truth).sum(), top.numel(), (top == truth[:, None, None]).sum())
    return len(places)


def image_loader(
    args: Namespace, folder: ImageSource, rows: list[int], settings: dict[str, Any], device: torch.device
) -> EvalLoader:
    """Load the whole images of some rows, squashed to the annotator's input size; indices count within `rows`."""
    dataset = EvalDataset(
        folder.select(rows),
        settings["input_size"][1:],
        crop_pct=1.0,
        crop_mode="squash",
        interpolation=settings["interpolation"],
        backend=create_backend(args.data_backend, args.max_pixels, args.workers, device),
    )
    return EvalLoader(
        dataset,
        args.batch_size,
        EvalStage(settings["mean"], settings["std"]).to(device),
        device=device,
        workers=min(args.workers, len(rows)),
        pin_memory=args.pin_mem,
        prefetch=not args.no_prefetcher,
        timeout=float(args.loader_timeout),
        skips=SkipCounter(len(folder), args.max_bad_images),
        may_be_empty=True,  # all images left for this rank may be unreadable
    )


def close(
    args: Namespace, job: LabelJob, pending: set[int], skips: list[dict[str, str]], totals: dict[str, float]
) -> None:
    """Finish the tree or archive, and print what it holds and how well it agrees with the class folders.

    Args:
        skips: For each rank, the reason by path of the images that could not be read.
        totals: The sums of `write_batch` over all ranks.

    Raises:
        UserError: More images are unreadable than `--max-bad-images` allows, or all are, or the disk is full.
    """
    folder, counter = job.folder, SkipCounter(len(job.folder), args.max_bad_images)
    counter.record(Skipped(*each) for skipped in skips for each in skipped.items())
    if counter.total == len(folder):
        raise UserError(f"not one of {len(folder)} images in {printable(folder.root)} can be read: check them")
    say(counter.take_lines())
    row_of = {folder.path(row): row for row in pending}
    skipped = sorted(row_of[path] for path in counter.reasons if path in row_of)
    agreement = job.finish(skipped)
    grid = job.metadata.grid
    made = len(pending) - len(skipped)
    print(
        f"{made} label maps of {job.metadata.k} classes on {grid[0]} x {grid[1]} places made in "
        f"{args.token_label_root}, for {len(folder)} images",
        flush=True,
    )
    if not agreement and totals["images"]:
        agreement = [
            f"mean of the places names the folder's class for {100 * totals['top1'] / totals['images']:.2f} % of "
            f"{totals['images']:.0f} images, a single place for {100 * totals['agreeing'] / totals['places']:.2f} % of "
            f"{totals['places']:.0f} places"
        ]
    say(agreement)

"""Make token labels: for every place of every image in a folder, the classes that an annotator network finds there.

    python generate_label.py DATA OUT --model dm_nfnet_f6 --pretrained --img-size 576 -b 32
    python generate_label.py DATA OUT --checkpoint runs/annotator/model_best.pth.tar --format archive
    ./distributed_generate_label.sh 8 DATA OUT ...                                   one process per GPU

DATA is a folder of class folders, or holds one called `train` (`--split` names another): then that one is annotated.
OUT receives `<class>/<name>.pt`, [2, k, H, W] half precision: the k largest logits of every place and their classes.
With `--format archive` it becomes one label archive instead (docs/token_label_archive.md); a tree is written out of
such an archive at the end, so its disk needs twice the room for a while. The whole image is shown to the annotator,
squashed to its input size, so that every crop of it has labels. The annotator is a timm ConvNet, Swin or
vision transformer with average pooling, or a model with a dense head: VOLO, LV-ViT, and whatever was trained with token
labels.

The same command continues after any interruption, with any number of processes. The last bits of a network's output
depend on which images share a batch: batches follow the order of the folder, and an interrupted batch is repeated as a
whole, so that the labels are the same as without an interruption.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from tlt.labels.agreement import agreement_text
from tlt.labels.annotate import Annotation, Annotator, check_dense, labelled_area
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import INFO_NAME, LabelInfo
from tlt.tools.pack import unpack
from volo.checkpoint.model_config import class_names
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
from volo.train.compilation import check_scope, compile_errors_told, feature_compiler
from volo.train.convolutions import check_convolutions
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
    info = describe(args, settings, folder, model, trained.config, grid)
    if args.format == "tree" and from_primary(world.is_primary and tree_is_complete(args, info)):
        return say([f"{printable(args.token_label_root)} was complete already"], world.is_primary)
    with primary_first():
        overwrite = args.overwrite and world.is_primary
        writer = ArchiveWriter(
            archive_folder(args), info, folder.paths, overwrite, world.is_primary, large_ids=model.num_classes > 2**16
        )
    pending = from_primary(find_pending(writer) if world.is_primary else [])
    make_labels(args, folder, writer, pending, annotator, settings, world)


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
    args: Namespace,
    settings: dict[str, Any],
    folder: ImageSource,
    model: Any,
    recorded: dict[str, Any],
    grid: torch.Size,
) -> LabelInfo:
    """Return what the label maps have in common: how they are made, and of which classes."""
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
    return LabelInfo(
        min(args.top_k, model.num_classes),
        (grid[0], grid[1]),
        model.num_classes,
        "full" if area == FULL_AREA else area,
        annotator,
        class_names(recorded, model.num_classes) or None if args.transfer else folder.class_names,
        transfer=args.transfer,
        log_sum_exp=not args.no_log_sum_exp,
    )


def archive_folder(args: Namespace) -> Path:
    """Return the folder of the archive: OUT, or one in it until the tree is written."""
    root = Path(args.token_label_root)
    return root if args.format == "archive" else root / ".archive"


def tree_is_complete(args: Namespace, info: LabelInfo) -> bool:
    """Return whether OUT is a tree that this command has made.

    Raises:
        UserError: It holds something else.
    """
    root = Path(args.token_label_root)
    found = LabelInfo.read(root / INFO_NAME)
    if found is None and root.is_dir() and any(not path.name.startswith(".") for path in root.iterdir()):
        raise UserError(f"OUT {printable(str(root))} holds other things than such labels: choose another folder")
    if found is None or args.overwrite or archive_folder(args).exists():
        return False
    if replace(found, skipped=[], max_id=None) != replace(info, log_sum_exp=False):
        raise UserError(
            f"OUT {printable(str(root))} holds labels that were made in another way: choose another folder, or "
            "--overwrite"
        )
    return True


def find_pending(writer: ArchiveWriter) -> list[int]:
    """Return the rows of the folder that have no labels yet, and print how many have."""
    images = len(writer.names)
    if writer.complete or not writer.begun:
        return [] if writer.complete else list(range(images))
    progress = Progress("checking labels", images)
    pending = writer.pending(progress.step)
    progress.close()
    print(f"{images - len(pending)} of {images} images are labelled already", flush=True)
    return pending


def make_labels(
    args: Namespace,
    folder: ImageSource,
    writer: ArchiveWriter,
    pending: list[int],
    annotator: Annotator,
    settings: dict[str, Any],
    world: World,
) -> None:
    """Label the pending rows, each rank its share, then finish the archive or tree."""
    batches = whole_batches(pending, len(folder), args.batch_size)[world.rank :: world.size]
    rows = [row for batch in batches for row in batch]
    loader = image_loader(args, folder, rows, settings, world.device)
    wanted = set(pending)
    progress = Progress("labelling", len(pending)) if world.is_primary else None
    for batch in loader:
        made = write_batch(folder, writer, batch, annotator(batch.images), rows, wanted)
        if progress is not None:  # the other ranks are about as far
            progress.step(min(made * world.size, progress.total - progress.done))
    wait_for_hosts()
    skips = from_all(loader.skips.reasons)
    if progress is not None:
        progress.step(progress.total - progress.done)
        progress.close()
        close(args, folder, writer, wanted, skips)


def whole_batches(pending: list[int], images: int, batch_size: int) -> list[range]:
    """Cut the folder into batches, and return those with a pending row."""
    starts = sorted({row // batch_size * batch_size for row in pending})
    return [range(start, min(start + batch_size, images)) for start in starts]


def write_batch(
    folder: ImageSource, writer: ArchiveWriter, batch: Batch, found: Annotation, rows: list[int], wanted: set[int]
) -> int:
    """Write the labels of the wanted images in a batch; return how many were written.

    Args:
        rows: Maps an index of the loader to a row of the folder.

    Raises:
        UserError: A logit is NaN or infinite, or the disk is full.
    """
    values, ids, log_sum_exp = (tensor.cpu().numpy() for tensor in found)
    places = [(place, rows[index]) for place, index in enumerate(batch.indices.tolist()) if rows[index] in wanted]
    for place, row in places:
        source = printable(folder.path(row))
        if not np.isfinite(values[place]).all():
            raise UserError(
                f"the annotator's logits for {source} are NaN or beyond half precision: check its weights, or leave "
                "out --amp"
            )
        writer.write(row, LabelMap(values[place], ids[place], source=source, log_sum_exp=log_sum_exp[place]))
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
    args: Namespace, folder: ImageSource, writer: ArchiveWriter, pending: set[int], skips: list[dict[str, str]]
) -> None:
    """Finish the archive or tree, and print what it holds and how well it agrees with the class folders.

    Args:
        skips: For each rank, the reason by path of the images that could not be read.

    Raises:
        UserError: More images are unreadable than `--max-bad-images` allows, or all are, or the disk is full.
    """
    if writer.complete:
        print(f"{printable(args.token_label_root)} was complete already", flush=True)
    else:
        counter = SkipCounter(len(folder), args.max_bad_images)
        counter.record(Skipped(*each) for skipped in skips for each in skipped.items())
        if counter.total == len(folder):
            raise UserError(f"not one of {len(folder)} images in {printable(folder.root)} can be read: check them")
        say(counter.take_lines())
        row_of = {folder.path(row): row for row in pending}
        skipped = sorted(row_of[path] for path in counter.reasons if path in row_of)
        for row in skipped:
            writer.write_absent(row)
        agreement = {} if args.transfer else writer.agreement(folder.classes)
        writer.finish([folder.paths[row] for row in skipped], agreement)
        info = writer.info
        print(
            f"{len(pending) - len(skipped)} label maps of {info.k} classes on {info.grid[0]} x {info.grid[1]} places "
            f"made in {args.token_label_root}, for {len(folder)} images",
            flush=True,
        )
        say([agreement_text(agreement)] if agreement else [])
    writer.close()
    if args.format == "tree":
        archive = archive_folder(args)
        say(unpack(str(archive), args.token_label_root, overwrite=True))
        shutil.rmtree(archive)

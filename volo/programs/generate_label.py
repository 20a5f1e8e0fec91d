"""Make token labels: for every image of a folder, what an annotator network sees at every place of it.

    python generate_label.py DATA OUT --model dm_nfnet_f6 --pretrained --img-size 576 -b 32
    python generate_label.py DATA OUT --checkpoint runs/annotator/model_best.pth.tar

DATA is a folder of class folders, or holds one called `train` (`--split` names another): then that one is annotated.
OUT receives `<class>/<name>.pt`, [2, k, H, W] half precision: the k largest logits of every place and their classes.
The whole image is shown to the annotator, squashed to its input size, so that every crop of it has labels. The same
command goes on where it was stopped. The annotator is a timm ConvNet, Swin or vision transformer with average pooling,
or a model with a dense head: VOLO, LV-ViT, and whatever was trained with token labels.
"""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import volo  # noqa: F401  (registers the models)
from tlt.annotate import check_dense, dense_logits, top_classes
from tlt.data.dataset import EvalDataset
from tlt.data.decode import create_backend
from tlt.data.device_stage import EvalStage
from tlt.data.folder import ImageFolder, find_split, printable, scan_folder
from tlt.data.loader import EvalLoader, SkipCounter
from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel
from tlt.models.wrap import dense_head_of, with_dense_head
from tlt.progress import Progress
from tlt.store import TreeMetadata
from tlt.weights import read_checkpoint
from volo.engine.distributed import choose_device
from volo.engine.finetune import load_weights
from volo.engine.label_job import LabelJob
from volo.engine.metrics import Sums, correct_in_top
from volo.engine.model import build_model, compile_model, eval_settings, image_size_of
from volo.engine.model_config import model_config_of
from volo.engine.precision import resolve_amp_dtype


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    for note in args.notes:
        print(note, flush=True)
    device = choose_device(args.device, 0)
    folder = scan_folder(find_split(args.data, args.split, allow_root=True))
    for warning in folder.warnings:
        print(f"warning: {warning}", flush=True)
    model, recorded = load_annotator(args)
    check_classes(args, model, folder, recorded)
    settings = label_settings(args, model, recorded)

    memory_format = torch.channels_last if args.channels_last else torch.preserve_format
    model = model.eval().to(device).to(memory_format=memory_format)
    check_dense(model, torch.randn(2, *settings["input_size"], device=device), f"--model {args.model}")
    annotate = annotator(args, model, device)
    with torch.no_grad():
        shape = annotate(torch.zeros(1, *settings["input_size"], device=device)).shape  # (1, h, w, C)
    job = LabelJob(args.token_label_root, folder, describe(args, settings, folder, shape), args.overwrite)
    return make_labels(args, job, annotate, settings, device)


def load_annotator(args: Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The annotator with its weights, and what its checkpoint says about it.

    Raises:
        UserError: No such model or file, or weights that don't fit.
    """
    if not args.checkpoint:
        return build_model(args), {}
    checkpoint = read_checkpoint(args.checkpoint)
    recorded = model_config_of(checkpoint, args.checkpoint) or {}
    args.model = args.model or recorded.get("name")
    if args.model is None:
        raise UserError(f"--checkpoint {args.checkpoint} does not say what model it holds: add --model NAME")
    args.num_classes = args.num_classes or recorded.get("num_classes")
    if args.img_size is None and args.input_size is None:
        args.img_size = recorded.get("img_size")
    model = build_model(args, recorded.get("kwargs") if args.model == recorded.get("name") else None)
    if isinstance(model, TokenLabelModel) and not recorded.get("dense_head", True):
        model.set_dense_head(False)
    if recorded.get("dense_head") and dense_head_of(checkpoint, args.use_ema or None, args.checkpoint):
        model = with_dense_head(model, image_size_of(args))
    load_weights(model, args.checkpoint, args.use_ema or None, checkpoint)
    return model, recorded


def check_classes(args: Namespace, model: nn.Module, folder: ImageFolder, recorded: dict[str, Any]) -> None:
    """Compare the annotator's classes with the folders, unless `--transfer` says that they differ.

    Raises:
        UserError: They differ, or the annotator has no classes.
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


def label_settings(args: Namespace, model: nn.Module, recorded: dict[str, Any]) -> dict[str, Any]:
    """Input size, mean, deviation and filter of the annotator.

    Raises:
        UserError: A crop ratio other than 1 is asked for: the whole image is labelled.
    """
    if args.crop_pct not in (None, 1.0):
        raise UserError(
            f"--crop-pct {args.crop_pct:g}: the whole image is labelled, so it can only be 1.0; leave it out"
        )
    settings = eval_settings(args, model, recorded)
    if settings["input_size"][0] != 3:
        raise UserError(f"--input-size {settings['input_size'][0]} ...: images have 3 channels")
    return settings


def annotator(args: Namespace, model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Images (B, 3, H, W) -> dense logits (B, h, w, C), in the precision that the flags ask for."""
    dtype = resolve_amp_dtype(args.amp, args.amp_dtype, device)

    def annotate(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return dense_logits(model, images)

    return compile_model(annotate, args)


def describe(args: Namespace, settings: dict[str, Any], folder: ImageFolder, shape: torch.Size) -> TreeMetadata:
    """What labels.json will say."""
    weights = "published"
    if args.checkpoint:
        with open(args.checkpoint, "rb") as file:
            weights = f"sha256 {_sha256(file.read)}" + (", EMA" if args.use_ema else "")
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
    classes = shape[3]
    names = None if args.transfer else folder.class_names
    return TreeMetadata(min(args.top_k, classes), (shape[1], shape[2]), classes, "full", annotator, names)


def _sha256(read: Callable[[int], bytes]) -> str:
    digest = hashlib.sha256()
    while block := read(2**20):
        digest.update(block)
    return digest.hexdigest()


def make_labels(
    args: Namespace,
    job: LabelJob,
    annotate: Callable[[Tensor], Tensor],
    settings: dict[str, Any],
    device: torch.device,
) -> int:
    """Label what is not labelled yet, then close the tree. Returns the exit code."""
    folder = job.folder
    if job.origin_unknown:
        print(
            f"warning: {args.token_label_root} has label files of unknown origin; those that fit are kept", flush=True
        )
    pending = list(range(len(folder)))
    if job.found:
        progress = Progress("checking labels", len(folder))
        pending = job.pending(progress.step)
        progress.close()
        print(f"{len(folder) - len(pending)} of {len(folder)} images are labelled already", flush=True)
    loader = image_loader(args, folder, pending, settings, device)
    sums = Sums(("images", "top1", "places", "agreeing"), device)
    progress = Progress("labelling", len(pending))
    for batch in loader:
        dense = annotate(batch.images).float()  # (B, h, w, C)
        values, ids = top_classes(dense, args.top_k)  # (B, k, h, w)
        if not args.transfer:
            tally(sums, dense, ids, batch.classes)
        values, ids = values.cpu(), ids.cpu()
        for place, row in enumerate(batch.indices.tolist()):
            job.write(pending[row], values[place], ids[place])
        progress.step(batch.size)
    progress.close()
    skipped = report_skipped(loader.skips, folder)
    job.finish(skipped)
    print(summary(args, job, len(pending) - len(skipped), sums), flush=True)
    return 0


def image_loader(
    args: Namespace, folder: ImageFolder, rows: list[int], settings: dict[str, Any], device: torch.device
) -> EvalLoader:
    """The whole images of some rows, squashed to the annotator's input size; indices count within `rows`."""
    part = replace(folder, paths=[folder.paths[row] for row in rows], classes=folder.classes[rows])
    dataset = EvalDataset(
        part,
        settings["input_size"][1:],
        crop_pct=1.0,
        crop_mode="squash",
        interpolation=settings["interpolation"],
        backend=create_backend(args.data_backend, args.max_pixels),
    )
    return EvalLoader(
        dataset,
        args.batch_size,
        EvalStage(settings["mean"], settings["std"]).to(device),
        device,
        workers=min(args.workers, len(rows)),
        pin_memory=args.pin_mem,
        prefetch=not args.no_prefetcher,
        timeout=float(args.loader_timeout),
        skips=SkipCounter(len(folder), args.max_bad_images),
    )


def tally(sums: Sums, dense: Tensor, ids: Tensor, classes: Tensor) -> None:
    """Count images whose mean dense logits name the folder's class, and places whose top class is it.

    Args:
        dense: (B, h, w, C).
        ids: (B, k, h, w), the top class first.
        classes: (B,).
    """
    (top1,) = correct_in_top(dense.mean((1, 2)), classes, (1,))
    agreeing = (ids[:, 0] == classes[:, None, None]).sum()
    sums.add(len(classes), top1, ids[:, 0].numel(), agreeing)


def report_skipped(skips: SkipCounter, folder: ImageFolder) -> list[str]:
    """Print the images that could not be read; returns their paths relative to the folder."""
    for path, reason in skips.reasons.items():
        print(f"left out {printable(path)}: {reason}", flush=True)
    return [os.path.relpath(path, folder.root) for path in skips.reasons]


def summary(args: Namespace, job: LabelJob, made: int, sums: Sums) -> str:
    """The last lines: what is where, and how well the labels agree with the folders."""
    grid = job.metadata.grid
    text = (
        f"{made} label maps of {job.metadata.k} classes on {grid[0]} x {grid[1]} places made in "
        f"{args.token_label_root}, for {len(job.folder)} images"
    )
    totals = sums.totals()
    if not totals["images"]:
        return text
    return (
        f"{text}\nmean of the places names the folder's class for {100 * totals['top1'] / totals['images']:.2f} % of "
        f"{totals['images']:.0f} images, a single place for {100 * totals['agreeing'] / totals['places']:.2f} % of "
        f"{totals['places']:.0f} places"
    )

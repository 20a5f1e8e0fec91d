"""Measure the accuracy of a checkpoint, or of every checkpoint in a folder.

    python validate.py DATA --checkpoint output/train/RUN

A checkpoint of this project records its model and the preparation of its images; flags override that. Every image
counts once, for any number of processes (`torchrun --nproc-per-node N validate.py ...`).
"""

from __future__ import annotations

import csv
import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import apply_test_time_pool
from torch import Tensor

from tlt.data.batch import Batch
from tlt.data.dataset import EvalDataset
from tlt.data.loader import EvalLoader
from tlt.data.sources import open_images
from tlt.data.sources.folder import check_num_classes, read_class_map
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.io.files import os_errors_as, read_bytes, refuse_existing
from tlt.io.text import table
from tlt.models.folding import fold_batchnorm
from tlt.models.layers import Constants
from tlt.tools.drawing import shorten
from volo.checkpoint.model_config import check_numbers, own_names
from volo.cluster.distributed import World, primary_first
from volo.commands.console import say, warn
from volo.commands.inference import load, place, run_on_ranks
from volo.commands.segment import features_of, segmentation_row
from volo.config.checkpoint_files import checkpoints_in
from volo.record.confusion import CLASSES, MOST, Confusion, show_answers
from volo.record.metrics import Sums
from volo.record.run_directory import check_writable
from volo.train.compilation import compile_model
from volo.train.data import listed_images, part, validation_loader
from volo.train.dense_score import DenseScore
from volo.train.loop import evaluate
from volo.train.model import TimmModel
from volo.train.precision import Precision
from volo.train.trained_model import TrainedModel

_COSINES = 2**28  # cosines that --knn computes at a time: 1 GiB


def run(args: Namespace) -> int:
    """Evaluate the checkpoints on all ranks, and return the exit code."""
    return run_on_ranks(args, validate)


def validate(args: Namespace, world: World) -> None:
    """Evaluate every checkpoint, print a line for each, and write the results file."""
    say(args.notes, world.is_primary)
    if args.retry and world.size > 1:  # one rank could be out of memory while the others wait for it
        raise UserError(f"--retry works with one process, there are {world.size}: use a smaller -b")
    if args.results_file:
        refuse_existing(args.results_file, "--results-file")
        check_writable(Path(args.results_file).parent, "--results-file")
    if args.confusion:
        for file in Path(args.confusion).glob(f"{'*/' * args.all}{CLASSES}"):
            refuse_existing(file, "--confusion")
        check_writable(Path(args.confusion), "--confusion")
    rows, faults = list[dict[str, Any]](), list[str]()
    row_of: dict[tuple[int, int], dict[str, Any]] = {}
    single = Path(args.checkpoint) if args.checkpoint else None  # None means pretrained weights
    for path in checkpoints_in(args.checkpoint, "--checkpoint") if args.all else [single]:
        inode = (path.stat().st_dev, path.stat().st_ino) if path and path.exists() else (0, len(row_of))
        try:
            if inode not in row_of:  # a file may have several names
                row_of[inode] = evaluate_with_retry(args, path, world)
        except UserError as error:
            if not args.all or str(path) not in str(error):
                raise
            faults.append(str(error))  # the other files may be sound
            warn(faults[-1:], world.is_primary)
            continue
        rows.append({"checkpoint": str(path or "pretrained"), **row_of[inode]})
        if world.is_primary:
            print(json.dumps(rows[-1]), flush=True)
        with primary_first():
            if world.is_primary and args.results_file:  # after each checkpoint, because the command may be stopped
                write_results(Path(args.results_file), rows, args.results_format)
    if faults:
        raise UserError(f"{len(faults)} of {len(faults) + len(rows)} files were not measured (--all): {faults[0]}")


def evaluate_with_retry(args: Namespace, path: Path | None, world: World) -> dict[str, Any]:
    """Evaluate one checkpoint. With `--retry`, halve the batch size until a batch fits into memory."""
    while True:
        try:
            return evaluate_checkpoint(args, path, world)
        except torch.OutOfMemoryError:
            if not args.retry or args.batch_size == 1:
                raise
        torch.cuda.empty_cache()
        args.batch_size //= 2
        say([f"out of memory: again with --batch-size {args.batch_size} (--retry)"], world.is_primary)


def evaluate_checkpoint(args: Namespace, path: Path | None, world: World) -> dict[str, Any]:
    """Evaluate one checkpoint, and return its row of the results."""
    trained = load(args, path, dense=bool(args.token_label_data), on_this_rank=world.is_primary)
    model, args, settings = trained.model, trained.args, trained.settings
    parameters = sum(p.numel() for p in model.parameters())
    fold_batchnorm(model)
    if args.test_pool:
        # timm's wrapper fits only the heads of models that have a pool size.
        pools = (getattr(model, "default_cfg", None) or {}).get("pool_size")
        trained.model, applied = apply_test_time_pool(model, settings) if pools else (model, False)
        if not applied:
            raise UserError(f"--test-pool has no effect on --model {args.model} at this size: leave it out")
    numbers = read_numbers(args.valid_labels) if args.valid_labels else None
    if numbers is not None:
        trained.model = ChosenClasses(model, numbers)
    precision = place(trained, world)

    if args.probe:
        return segmentation_row(trained, precision, world)
    if not model.num_classes and not args.knn:
        raise UserError(f"{path or args.model} has no class head, only features: measure these by --knn")
    folder = open_folder(args, trained.config, numbers or range(model.num_classes), world)
    if args.knn:
        return knn_row(trained, folder, precision, world)
    score = DenseScore(args, "--token-label-data", model, settings, folder, world) if args.token_label_data else None
    warn(score.warnings if score else [], world.is_primary)
    loader = validation_loader(args, folder, args.batch_size, settings, world, score.labels if score else None)
    real = RealLabels(args.real_labels, loader.dataset, world) if args.real_labels else None
    watch = watcher(args, loader, world, real)
    result = evaluate(compile_model(trained.model, args), loader, precision, world, watch, dense=score)
    warn(loader.skips.take_lines() + loader.bad_labels.take_lines())
    say([str(result)], world.is_primary)
    if world.is_primary:
        say_what_is_confused(args, path, loader.dataset, result.answers, len(numbers or range(model.num_classes)))
    row = {
        "model": args.model,
        "ema": args.use_ema,
        "top1": round(result.top1, 4),
        "top5": round(result.top5, 4),
        "loss": round(result.loss, 6),
        "images": result.images,
        "unreadable": result.unreadable,
        **({name: getattr(result, name) for name in ("dense_top1", "annotator_top1", "tokens")} if score else {}),
        "param_count_millions": round(parameters / 1e6, 3),
        "img_size": "x".join(map(str, settings["input_size"][1:])),
        "crop_pct": settings["crop_pct"],
        "interpolation": settings["interpolation"],
        "images_per_second": round(result.images / max(result.seconds, 1e-9), 1),
    }
    return row | (real.accuracy() if real else {})


def say_what_is_confused(args: Namespace, path: Path | None, images: EvalDataset, answers: Any, classes: int) -> None:
    """Print the worst classes, and draw the answers to the images (`--confusion`)."""
    if classes <= MOST:
        heading, *rows = Confusion(images, answers, classes).table()
        worst = [row for row in rows if row[-1] != "0"][:3]
        more = "" if args.confusion else " (--confusion FOLDER draws all)"
        say([f"the worst of {len(rows)} classes{more}:", *table([heading, *worst])] if worst else [])
    if args.confusion:
        folder = Path(args.confusion, path.name if args.all and path else "")
        say(show_answers(folder, images, classes, answers, f"{args.model}, {shorten(str(path or 'pretrained'), 40)}"))


def open_folder(args: Namespace, config: dict[str, Any], numbers: Sequence[int], world: World) -> ImageSource:
    """Open the validation images, with classes numbered as in training.

    Args:
        config: The checkpoint's record or a description, which may have names of classes.
        numbers: Those of the model's classes that are measured.

    Raises:
        UserError: A class folder is not among the checkpoint's classes, there are more classes than outputs, or
            `--class-map` contradicts the checkpoint.
    """
    listed = read_class_map(args.class_map) if args.class_map else None
    folder = open_images(args.data, args.split, args.dataset, listed, allow_root=True)
    known = [] if args.knn else own_names(config, folder.class_names)
    names = [known[number] for number in numbers if number < len(known)]
    if listed:
        check_numbers("--class-map", listed, names)
    elif names:
        folder.number_by(names)
    if args.image_list:
        folder = part(folder, listed_images(folder, args.image_list))
    if args.num_samples is not None and args.num_samples < len(folder):
        folder = folder.select(np.linspace(0, len(folder) - 1, args.num_samples).round().astype(int))
    beyond = [] if args.knn else check_num_classes(folder, len(numbers))
    warn(folder.warnings + beyond, world.is_primary)
    return folder


def write_results(path: Path, rows: list[dict[str, Any]], kind: str) -> None:
    """Write the rows as CSV with a header, or as a JSON list.

    Raises:
        UserError: The file can't be written.
    """
    with os_errors_as(lambda error: f"--results-file {path}: {error.strerror}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            if kind == "json":
                json.dump(rows, file, indent=1)
                return
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def read_numbers(path: str) -> list[int]:
    """Read class numbers from a text file, one per line (`--valid-labels`).

    Raises:
        UserError: The file can't be read, or contains something else.
    """
    try:
        return [int(line) for line in read_bytes(path).decode("utf-8-sig").split()]
    except (OSError, ValueError) as error:
        raise UserError(f"--valid-labels {path}: one class number per line is needed ({error})") from error


class ChosenClasses(Constants):
    """A selection of a model's outputs: class i of the data is class `numbers[i]` of the model."""

    def __init__(self, model: TimmModel, numbers: list[int]) -> None:
        super().__init__()
        if not numbers or max(numbers) >= model.num_classes or min(numbers) < 0:
            raise UserError(f"--valid-labels: the model has classes 0..{model.num_classes - 1}, the file names others")
        self.model = model
        self.hold(numbers=torch.tensor(numbers, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, self.numbers]


class RealLabels:
    """Accuracy on ImageNet's reassessed labels (Beyer et al. 2020, "Are we done with ImageNet?").

    `real.json` is a list: entry i has the classes of ILSVRC2012_val_{i + 1:08d}. Images without a class don't count.
    """

    def __init__(self, path: str, dataset: EvalDataset, world: World) -> None:
        try:
            entries = json.loads(read_bytes(path))
            self.labels = {f"ILSVRC2012_val_{i:08d}": set(map(int, ids)) for i, ids in enumerate(entries, start=1)}
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"--real-labels {path}: a JSON list of class lists is needed ({error})") from error
        self.dataset = dataset
        self.sums = Sums(("images", "top1", "top5"), world)

    def add(self, logits: Tensor, indices: Tensor) -> None:
        """Count a batch. Raises UserError if an image is not in ImageNet's validation set."""
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices.tolist()
        for index, ranked in zip(indices.tolist(), best, strict=True):
            name = Path(self.dataset.path(index)).stem
            if name not in self.labels:
                raise UserError(f"--real-labels knows no image {name}: it is for ImageNet's validation images")
            if true := self.labels[name]:
                self.sums.add(1, ranked[0] in true, not true.isdisjoint(ranked))

    def accuracy(self) -> dict[str, float]:
        """Return percentages over all ranks."""
        totals = self.sums.totals()
        images = max(totals["images"], 1.0)
        return {
            "real_top1": round(100 * totals["top1"] / images, 4),
            "real_top5": round(100 * totals["top5"] / images, 4),
            "real_images": int(totals["images"]),
        }


def watcher(args: Namespace, loader: EvalLoader, world: World, real: RealLabels | None) -> Callable[..., None]:
    """Return a function for each batch's outputs, which feeds `RealLabels` and prints progress now and then."""
    numbers, start = count(1), time.perf_counter()

    def watch(logits: Tensor, batch: Batch) -> None:
        if real is not None:
            real.add(logits, batch.indices)
        done = next(numbers)
        if world.is_primary and done % args.log_freq == 0:
            rate = (time.perf_counter() - start) / done
            seconds_left = (len(loader) - done) * rate
            print(f"[{done}/{len(loader)}] {rate:.3f} s/batch, {seconds_left:.0f} s left", flush=True)

    return watch


@torch.inference_mode()
def knn_row(trained: TrainedModel, images: ImageSource, precision: Precision, world: World) -> dict[str, Any]:
    """Return the result row of `--knn`: top-1 in percent with 10 and 20 neighbours, and the numbers of images.

    As in DINO's evaluation (arXiv:2104.14294), the features before the class head are compared by cosine; each of the k
    nearest training images votes for its class with weight exp(cosine / 0.07).
    """
    if world.size > 1:
        raise UserError(f"--knn works with one process, there are {world.size}")
    args = trained.args
    voters = open_images(args.knn, "train", "", images.class_names, allow_root=True, split_flag="--knn")
    (bank, classes), (features, truth) = (
        _features(trained.model, validation_loader(args, source, args.batch_size, trained.settings, world), precision)
        for source in (voters, images)
    )
    row = {"model": args.model, "images": len(truth), "train_images": len(classes)}
    return row | {f"knn{k}": round(100 * knn_accuracy(bank, classes, features, truth, k), 4) for k in (10, 20)}


def knn_accuracy(bank: Tensor, classes: Tensor, features: Tensor, truth: Tensor, k: int) -> float:
    """Return the share of images that k nearest neighbours classify correctly. The images have features (B, D) and
    classes `truth` (B,); the neighbours are the rows of `bank` (N, D), of classes `classes` (N,)."""
    bank, step, right = F.normalize(bank, dim=1).T, max(1, _COSINES // len(bank)), 0
    for rows, true in zip(features.split(step), truth.split(step), strict=True):
        cosines, nearest = (F.normalize(rows, dim=1) @ bank).topk(min(k, len(classes)))
        votes = rows.new_zeros(len(rows), int(classes.max()) + 1)
        votes.scatter_add_(1, classes[nearest], (cosines / 0.07).exp())
        right += int((votes.argmax(1) == true).sum())
    return right / len(truth)


def _features(model: TimmModel, loader: EvalLoader, precision: Precision) -> tuple[Tensor, Tensor]:
    rows = []
    pooled = partial(model.forward_head, pre_logits=True)
    for features, batch in features_of(lambda x: pooled(model.forward_features(x)), loader, precision, "--knn"):
        if features.ndim != 2:
            raise UserError(f"--knn: {type(model).__name__} doesn't pool its features here: choose a --gp")
        rows.append((features, batch.classes))
    features, classes = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return features, classes

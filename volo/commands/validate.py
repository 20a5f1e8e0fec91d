"""Measure the accuracy of a checkpoint, or of every checkpoint in a folder.

    python validate.py DATA --checkpoint output/train/RUN

A checkpoint of this project records its model and the preparation of its images; flags override that. Every image
counts once, for any number of processes (`torchrun --nproc-per-node N validate.py ...`).
"""

import json
import time
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
from tlt.io.files import blamed_on, os_errors_as, read_bytes, read_lines, refuse_existing, write_csv, write_whole
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
from volo.config.settings_evaluate import ValidateSettings
from volo.record.confusion import CLASSES, MOST, Confusion, show_answers
from volo.record.metrics import Sums, top_classes
from volo.record.run_directory import check_writable
from volo.train.compilation import Compiler
from volo.train.data import listed_images, part, validation_loader
from volo.train.dense_score import DenseScore
from volo.train.loop import evaluate
from volo.train.model import TimmModel
from volo.train.precision import Precision
from volo.train.trained_model import TrainedModel

_COSINES = 2**28  # cosines that --knn computes at a time: 1 GiB


def run(settings: ValidateSettings) -> int:
    """Evaluate the checkpoints on all ranks, and return the exit code."""
    precision = settings.precision
    return run_on_ranks(partial(validate, settings), precision.device, precision.compilation)


def validate(settings: ValidateSettings, world: World) -> None:
    """Evaluate every checkpoint, print a line for each, and write the results file."""
    results = settings.results
    network = settings.network
    say(settings.notes, world.is_primary)
    if results.retry and world.size > 1:  # one rank could be out of memory while the others wait for it
        raise UserError(f"--retry works with one process, there are {world.size}: use a smaller -b")
    if results.results_file:
        refuse_existing(results.results_file, "--results-file")
        check_writable(Path(results.results_file).parent, "--results-file")
    if results.confusion:
        for file in Path(results.confusion).glob(f"{'*/' * network.all}{CLASSES}"):
            refuse_existing(file, "--confusion")
        check_writable(Path(results.confusion), "--confusion")
    rows = list[dict[str, Any]]()
    faults = list[str]()
    row_of: dict[tuple[int, int], dict[str, Any]] = {}
    single = Path(network.checkpoint) if network.checkpoint else None  # None means pretrained weights
    for path in checkpoints_in(network.checkpoint, "--checkpoint") if network.all else [single]:
        inode = (path.stat().st_dev, path.stat().st_ino) if path and path.exists() else (0, len(row_of))
        try:
            if inode not in row_of:  # a file may have several names
                row_of[inode], settings = evaluate_with_retry(settings, path, world)
        except UserError as error:
            if not network.all or str(path) not in str(error):
                raise
            faults.append(str(error))  # the other files may be sound
            warn(faults[-1:], world.is_primary)
            continue
        rows.append({"checkpoint": str(path or "pretrained"), **row_of[inode]})
        if world.is_primary:
            print(json.dumps(rows[-1]), flush=True)
        with primary_first():
            if world.is_primary and results.results_file:  # each time, because the command may be stopped
                write_results(Path(results.results_file), rows, results.results_format)
    if faults:
        raise UserError(f"{len(faults)} of {len(faults) + len(rows)} files were not measured (--all): {faults[0]}")


def evaluate_with_retry(
    settings: ValidateSettings, path: Path | None, world: World
) -> tuple[dict[str, Any], ValidateSettings]:
    """Evaluate one checkpoint. With `--retry`, halve the batch size until a batch fits into memory, and return the
    settings with that size."""
    while True:
        try:
            return evaluate_checkpoint(settings, path, world), settings
        except torch.OutOfMemoryError:
            if not settings.results.retry or settings.images.batch_size == 1:
                raise
        torch.cuda.empty_cache()
        settings = settings.decide("other flags", batch_size=settings.images.batch_size // 2)
        say([f"out of memory: again with --batch-size {settings.images.batch_size} (--retry)"], world.is_primary)


def evaluate_checkpoint(settings: ValidateSettings, path: Path | None, world: World) -> dict[str, Any]:
    """Evaluate one checkpoint, and return its row of the results."""
    results = settings.results
    trained = load(
        settings.network,
        settings.images.pixels,
        path,
        dense=bool(results.token_label_data),
        outlook_kernel=settings.precision.outlook_kernel,
        crop_mode=settings.images.crop_mode,
        on_this_rank=world.is_primary,
    )
    model, data_config = trained.model, trained.data_config
    parameters = sum(p.numel() for p in model.parameters())
    fold_batchnorm(model)
    if settings.network.test_pool:
        pool_at_test_time(trained)
    numbers = read_numbers(results.valid_labels) if results.valid_labels else None
    if numbers is not None:
        trained.model = ChosenClasses(model, numbers)
    precision = place(trained, world, settings.precision.mixed, settings.precision.channels_last)
    if results.probe:
        return segmentation_row(settings, trained, precision, world)
    if not model.num_classes and not results.knn:
        raise UserError(f"{path or trained.name} has no class head, only features: measure these by --knn")
    folder = open_folder(settings, trained.config, numbers or range(model.num_classes), world)
    if results.knn:
        return knn_row(settings, trained, folder, precision, world)
    score = None
    if results.token_label_data:
        labels = results.token_label_data, results.maps, "--token-label-data"
        score = DenseScore(*labels, model, data_config, folder, world)
    warn(score.warnings if score else [], world.is_primary)
    maps = score.labels if score else None
    loader = validation_loader(settings.images.loading, folder, settings.images.batch_size, data_config, world, maps)
    real = RealLabels(results.real_labels, loader.dataset, world) if results.real_labels else None
    watch = watcher(results.log_freq, loader, world, real)
    compiled = Compiler(settings.precision.compilation, trained.name).model(trained.model)
    result = evaluate(compiled, loader, precision, world, watch, dense=score)
    warn(loader.skips.take_lines() + loader.bad_labels.take_lines())
    say([str(result)], world.is_primary)
    if world.is_primary:
        classes = len(numbers or range(model.num_classes))
        say_what_is_confused(settings, trained.name, path, loader.dataset, result.answers, classes)
    row = {
        "model": trained.name,
        "ema": trained.ema,
        "top1": round(result.top1, 4),
        "top5": round(result.top5, 4),
        "loss": round(result.loss, 6),
        "images": result.images,
        "unreadable": result.unreadable,
        **({name: getattr(result, name) for name in ("dense_top1", "annotator_top1", "tokens")} if score else {}),
        "param_count_millions": round(parameters / 1e6, 3),
        "img_size": "x".join(map(str, data_config["input_size"][1:])),
        "crop_pct": data_config["crop_pct"],
        "interpolation": data_config["interpolation"],
        "images_per_second": round(result.images / max(result.seconds, 1e-9), 1),
    }
    return row | (real.accuracy() if real else {})


def pool_at_test_time(trained: TrainedModel) -> None:
    """Apply `--test-pool`. Raise UserError if it has no effect."""
    # timm's wrapper fits only the heads of models that have a pool size.
    applied = False
    if (getattr(trained.model, "default_cfg", None) or {}).get("pool_size"):
        trained.model, applied = apply_test_time_pool(trained.model, trained.data_config)
    if not applied:
        raise UserError(f"--test-pool has no effect on --model {trained.name} at this size: leave it out")


def say_what_is_confused(
    settings: ValidateSettings, name: str, path: Path | None, images: EvalDataset, answers: Any, classes: int
) -> None:
    """Print the worst classes, and draw the answers to the images (`--confusion`)."""
    if classes <= MOST:
        heading, *rows = Confusion(images, answers, classes).table()
        worst = [row for row in rows if row[-1] != "0"][:3]
        more = "" if settings.results.confusion else " (--confusion FOLDER draws all)"
        say([f"the worst of {len(rows)} classes{more}:", *table([heading, *worst])] if worst else [])
    if settings.results.confusion:
        folder = Path(settings.results.confusion, path.name if settings.network.all and path else "")
        say(show_answers(folder, images, classes, answers, f"{name}, {shorten(str(path or 'pretrained'), 40)}"))


def open_folder(
    settings: ValidateSettings, config: dict[str, Any], numbers: Sequence[int], world: World
) -> ImageSource:
    """Open the validation images, with classes numbered as in training. Raises UserError if a class folder is not among
    the checkpoint's classes, there are more classes than outputs, or `--class-map` contradicts the checkpoint.

    Args:
        config: The checkpoint's record or a description, which may have names of classes.
        numbers: Those of the model's classes that are measured.
    """
    wanted = settings.images
    listed = read_class_map(wanted.class_map) if wanted.class_map else None
    folder = open_images(wanted.data, wanted.split, wanted.dataset, listed, allow_root=True)
    known = [] if settings.results.knn else own_names(config, folder.class_names)
    names = [known[number] for number in numbers if number < len(known)]
    if listed:
        check_numbers("--class-map", listed, names)
    elif names:
        folder.number_by(names)
    if wanted.image_list:
        folder = part(folder, listed_images(folder, wanted.image_list))
    if wanted.num_samples is not None and wanted.num_samples < len(folder):
        folder = folder.select(np.linspace(0, len(folder) - 1, wanted.num_samples).round().astype(int))
    beyond = [] if settings.results.knn else check_num_classes(folder, len(numbers))
    warn(folder.warnings + beyond, world.is_primary)
    return folder


def write_results(path: Path, rows: list[dict[str, Any]], kind: str) -> None:
    """Write the rows as CSV with a header, or as a JSON list. Raises UserError if the file can't be written."""
    with os_errors_as(lambda error: f"--results-file {path}: {error.strerror}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "json":
            return write_whole(path, json.dumps(rows, indent=1).encode())
        write_csv(path, [list(rows[0]), *([row.get(name) for name in rows[0]] for row in rows)])


def read_numbers(path: str) -> list[int]:
    """Read class numbers from a text file, one per line (`--valid-labels`). Raises UserError if the file can't be read,
    or contains something else."""
    with blamed_on(f"--valid-labels {path}", "is no list of class numbers", "give one per line"):
        return [int(number) for line in read_lines(path, "--valid-labels") for number in line.split()]


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
        with blamed_on(f"--real-labels {path}", "is no JSON list of class lists"):
            entries = json.loads(read_bytes(path))
            self.labels = {f"ILSVRC2012_val_{i:08d}": set(map(int, ids)) for i, ids in enumerate(entries, start=1)}
        self.dataset = dataset
        self.sums = Sums(("images", "top1", "top5"), world)

    def add(self, logits: Tensor, indices: Tensor) -> None:
        """Count a batch. Raises UserError if an image is not in ImageNet's validation set."""
        best = top_classes(logits).tolist()
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


def watcher(log_freq: int, loader: EvalLoader, world: World, real: RealLabels | None) -> Callable[..., None]:
    """Return a function for each batch's outputs, which feeds `RealLabels` and prints progress now and then."""
    numbers = count(1)
    start = time.perf_counter()

    def watch(logits: Tensor, batch: Batch) -> None:
        if real is not None:
            real.add(logits, batch.indices)
        done = next(numbers)
        if world.is_primary and done % log_freq == 0:
            rate = (time.perf_counter() - start) / done
            seconds_left = (len(loader) - done) * rate
            print(f"[{done}/{len(loader)}] {rate:.3f} s/batch, {seconds_left:.0f} s left", flush=True)

    return watch


@torch.inference_mode()
def knn_row(
    settings: ValidateSettings, trained: TrainedModel, images: ImageSource, precision: Precision, world: World
) -> dict[str, Any]:
    """Return the result row of `--knn`: top-1 in percent with 10 and 20 neighbours, and the numbers of images.

    As in DINO's evaluation (arXiv:2104.14294), the features before the class head are compared by cosine; each of the k
    nearest training images votes for its class with weight exp(cosine / 0.07).
    """
    if world.size > 1:
        raise UserError(f"--knn works with one process, there are {world.size}")
    voters = open_images(settings.results.knn, "train", "", images.class_names, allow_root=True, split_flag="--knn")

    def look(source: ImageSource) -> tuple[Tensor, Tensor]:
        wanted = settings.images
        loader = validation_loader(wanted.loading, source, wanted.batch_size, trained.data_config, world)
        return _features(trained.model, loader, precision)

    bank, classes = look(voters)
    features, truth = look(images)
    row = {"model": trained.name, "images": len(truth), "train_images": len(classes)}
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

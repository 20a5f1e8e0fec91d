"""Predict the classes of images, draw the dense head's classes of their tokens, and write their features.

    volo predict image.jpg --model volo_d1 --pretrained
    volo predict photos/ --checkpoint output/train/RUN --output predictions.csv
    volo predict photos/ --checkpoint output/train/RUN --token-maps maps/ --embeddings features.safetensors

Images are prepared as in validation. Unreadable images are named and left out; files have rows only for the others. The
program uses one process and one device.
"""

import csv
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt.data.batch import SkipCounter
from tlt.data.loader import EvalLoader
from tlt.data.sources.folder import FolderListing, ImageFolder
from tlt.errors import UserError, require
from tlt.io.files import os_errors_as, read_lines, refuse_existing
from tlt.io.jobs import Progress
from tlt.io.text import printable, table
from tlt.labels.annotate import labelled_area
from tlt.models.folding import fold_batchnorm
from tlt.models.spatial import feature_map
from tlt.tools.drawing import Cells, check_format, drawable, pixels_of, save_figure, shorten
from volo.checkpoint.checkpoint import explained, install
from volo.checkpoint.model_config import check_numbers, class_names, own_names
from volo.commands.attention import TOP, View, answers_page
from volo.commands.console import say, warn
from volo.commands.inference import load, place, world_of_one
from volo.config.settings_evaluate import Predictions, PredictSettings
from volo.record.run_directory import check_writable
from volo.train.data import validation_loader
from volo.train.model import TimmModel
from volo.train.precision import Precision
from volo.train.trained_model import TrainedModel

TOKEN_CLASSES = ("token_class", "token_probability")
COLUMNS = ("path", "rank", "class_id", "class_name", "probability")  # columns of prediction files
Rows = Sequence[tuple[str, int, int, str, float]]
_WIDTH = 60  # characters shown of a class name on the terminal
FEW = 20  # for up to so many images, predictions are printed even if they are also written to a file


class InputImages(NamedTuple):
    """The images to predict."""

    paths: list[str]
    names: list[str]  # relative to the given folders; token maps get these names
    warnings: list[str]


class Prediction(NamedTuple):
    """The most probable classes of an image.

    Attributes:
        best: Name of the most probable class; "" if the model has no classes.
        classes: Names and probabilities of the `--topk` most probable classes, the most probable first.
    """

    path: str
    best: str
    classes: list[tuple[str, float]]


def run(settings: PredictSettings) -> int:
    """Predict all images, and write or print the results."""
    predict_all(settings)
    return 0


def predict_all(settings: PredictSettings) -> list[Prediction]:
    """Predict all images, write or print the results, and return those of the images that can be read."""
    say(settings.notes)
    inputs = find_images(settings.images.paths)
    warn(inputs.warnings)
    wanted = settings.predictions
    images = settings.images
    flags = settings.precision
    check_outputs(wanted, inputs)
    world = world_of_one(flags.device)
    dense = bool(wanted.token_maps)
    trained = load(settings.network, images.pixels, dense=dense, outlook_kernel=flags.outlook_kernel)
    check_model(wanted, trained)
    names = names_of_classes(wanted.class_names, trained)
    fold_batchnorm(trained.model)
    precision = place(trained, world, flags.mixed, flags.channels_last)
    # Load them as validation does, but let any number of them be unreadable.
    count = len(inputs.paths)
    folder = ImageFolder("", inputs.paths, np.zeros(count, np.int64), [])
    skips = SkipCounter(count, limit=count)
    loader = validation_loader(images.loading, folder, images.batch_size, trained.data_config, world, skips=skips)
    read, rows = predict(wanted, trained, loader, precision, inputs.names, names)
    print(f"{len(read)} images predicted, {len(loader.skips.reasons)} could not be read", flush=True)
    paths = [inputs.paths[index] for index in read]
    found = report(wanted, paths, names, rows)
    k = len(found) // len(paths)
    classes = [[row[3:] for row in found[k * number : k * (number + 1)]] for number in range(len(paths))]
    return [Prediction(path, of[0][0] if of else "", of) for path, of in zip(paths, classes, strict=True)]


def find_images(paths: list[str]) -> InputImages:
    """Return the given images, and those in the given folders at any depth in natural order. Raises UserError if there
    is no such file or folder, or a folder can't be read or holds no image."""
    inputs = InputImages([], [], [])
    for path in paths:
        if os.path.isdir(path):
            listing = FolderListing(path, classes=False)
            if not listing.names:
                notes = "".join(f"; {line}" for line in listing.warnings)
                raise UserError(f"no images in {printable(path)}, by their suffixes{notes}")
            folder_name = os.path.basename(os.path.abspath(path)) if len(paths) > 1 else ""
            inputs.paths.extend(os.path.join(path, name) for name in listing.names)
            inputs.names.extend(os.path.join(folder_name, name) for name in listing.names)
            inputs.warnings.extend(listing.warnings)
        elif os.path.exists(path):
            inputs.paths.append(path)
            inputs.names.append(os.path.basename(path))
        else:
            raise UserError(f"PATH {printable(path)}: no such file or folder")
    return inputs


def check_outputs(wanted: Predictions, inputs: InputImages) -> None:
    """Check, before the model runs, that its results can be written. Raises UserError if a file exists already, a
    folder is not writable, a package is missing, or two token maps would have the same name."""
    for flag, path in (("--output", wanted.output), ("--embeddings", wanted.embeddings)):
        if path:
            refuse_existing(path, flag)
            check_writable(Path(path).parent, flag)
    if wanted.output.endswith(".parquet"):
        require("pyarrow", extra="parquet")
    if wanted.token_maps:
        check_format("map.png")
        check_writable(Path(wanted.token_maps), "--token-maps")
        name, count = Counter(inputs.names).most_common(1)[0]
        if count > 1:
            raise UserError(f"--token-maps: {count} images share the picture {printable(name)}.png: take them apart")
        for name in inputs.names:
            refuse_existing(os.path.join(wanted.token_maps, f"{name}.png"), "--token-maps:")


def check_model(wanted: Predictions, trained: TrainedModel) -> None:
    """Raise UserError if the model can't compute what the flags ask for."""
    name, model = trained.name, trained.model
    if wanted.token_maps and not getattr(model, "dense_head", False):
        raise UserError(f"--token-maps: {name} has no trained dense head here; leave the flag out")
    if not model.num_classes and (wanted.output or wanted.token_maps or not wanted.embeddings):
        raise UserError(f"--model {name} has no classes: ask for --embeddings alone, or give weights with a head")


def names_of_classes(path: str, trained: TrainedModel) -> list[str]:
    """Return the name of each class from `--class-names`, the checkpoint or ImageNet, or else its number. Raises
    UserError if the file can't be read, its number of names is not the model's number of classes, or it contradicts the
    checkpoint."""
    count = trained.model.num_classes
    if not path:
        known = class_names(trained.config, count)
        return known if len(known) == count else [str(number) for number in range(count)]
    names = read_lines(path, "--class-names")
    if len(names) != count:
        raise UserError(f"--class-names {path} holds {len(names)} lines: give a name for each of {count} classes")
    check_numbers("--class-names", names, own_names(trained.config, names))
    return names


def predict(
    wanted: Predictions,
    trained: TrainedModel,
    loader: EvalLoader,
    precision: Precision,
    files: list[str],
    names: list[str],
) -> tuple[list[int], dict[str, Tensor]]:
    """Run the model on all images, and draw the token maps. Raises UserError if no image can be read, or the model
    doesn't have the requested features.

    Args:
        files: File name of each image's token map.
        names: Names of the classes.

    Returns:
        The indices of the images that could be read, and the results of `look` for them.
    """
    read: list[int] = []
    parts: dict[str, list[Tensor]] = defaultdict(list)
    progress = Progress("predicting", len(files))
    for batch in loader:
        answer = look(trained.model, batch.images, wanted, precision)
        indices = batch.indices.tolist()
        if wanted.token_maps:
            draw_token_maps(wanted.token_maps, batch.images, answer, trained, [files[i] for i in indices], names)
        for name in answer.keys() - {*TOKEN_CLASSES}:
            parts[name].append(answer[name])
        read.extend(indices)
        progress.step(batch.size + tell_unreadable(loader))
    progress.step(tell_unreadable(loader))
    progress.close()
    if not read:
        path, reason = next(iter(loader.skips.reasons.items()))
        raise UserError(f"not one of {len(files)} images can be read, the first is {printable(path)} ({reason})")
    return read, {name: torch.cat(parts.pop(name)) for name in [*parts]}


def tell_unreadable(loader: EvalLoader) -> int:
    """Print which images were left out since the last call, and return how many."""
    lines = loader.skips.take_lines()
    warn(lines)
    return len(lines)


@torch.inference_mode()
def look(model: TimmModel, images: Tensor, wanted: Predictions, precision: Precision) -> dict[str, Tensor]:
    """Run the model on normalised images (B, 3, H, W) and return rows on the CPU: `probability` and `class_id` (B, k)
    of the top classes, the features of `embed`, and for token maps `TOKEN_CLASSES` (B, tokens), each token's top class.
    Raises UserError if the flags ask for features that the model doesn't have."""
    outputs: dict[str, Tensor] = {}
    with precision.autocast():
        if wanted.embeddings:
            last = model.forward_features(images)
            logits = model.forward_head(last)
            outputs = embed(model, last, images, wanted.embeddings_pooled_only)
        else:
            logits = model(images)
        if wanted.token_maps:
            best = model(images, dense=True)[1].float().softmax(-1).max(-1)
            outputs |= {"token_probability": best.values, "token_class": best.indices}
    if model.num_classes:
        first = logits.float().softmax(-1).topk(min(max(wanted.topk, TOP), model.num_classes))
        outputs |= {"probability": first.values, "class_id": first.indices}
    return {name: (rows.float() if rows.is_floating_point() else rows).cpu() for name, rows in outputs.items()}


def embed(model: TimmModel, last: Any, images: Tensor, pooled_only: bool) -> dict[str, Tensor]:
    """Return the features that enter the class head (B, D), and those of the image's tokens (B, T, D), row by row,
    without class token and registers, from `last`, the result of `model.forward_features(images)`. Raises UserError if
    the model doesn't pool its features, or they are not spatial."""
    rows = {"pooled": model.forward_head(last, pre_logits=True)}
    if rows["pooled"].ndim != 2:
        raise UserError(f"--embeddings: {type(model).__name__} doesn't pool its features here: choose a --gp")
    if pooled_only:
        return rows
    try:
        return rows | {"tokens": feature_map(model, last, (images.shape[-2], images.shape[-1])).flatten(1, 2)}
    except UserError as error:
        raise UserError(f"--embeddings: {error}; --embeddings-pooled-only leaves tokens out") from error


def draw_token_maps(
    folder: str, images: Tensor, answer: dict[str, Tensor], trained: TrainedModel, files: list[str], names: list[str]
) -> None:
    """Write FOLDER/FILE.png for each image of a batch (B, 3, H, W): the image, the top class of every token, and the
    top classes of the image."""
    model, data_config = trained.model, trained.data_config
    height, width = data_config["input_size"][1:]
    area = labelled_area(model, (height, width))
    grid = model.token_grid((height, width))
    box = (area[0] * width, area[1] * height, area[2] * width, area[3] * height)
    pixels = pixels_of(images, data_config["mean"], data_config["std"])
    best = (answer[name][:, :TOP].tolist() for name in ("class_id", "probability"))
    for row, (file, ids, probabilities) in enumerate(zip(files, *best, strict=True)):
        classes, probability = (answer[name][row].view(grid) for name in TOKEN_CLASSES)
        cells = Cells(classes.numpy(), probability.double().numpy(), np.ones(grid))
        answers = View(list(zip(ids, probabilities, strict=True)), cells, box, [])
        path = Path(folder, f"{file}.png")
        with os_errors_as(lambda error: f"--token-maps {printable(str(error.filename))}: {error.strerror}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        title = f"{file}: {trained.name}, {height} x {width} px"
        save_figure(answers_page(1, pixels[row], answers, names, drawable(title))[0], path)


def report(wanted: Predictions, paths: list[str], names: list[str], rows: dict[str, Tensor]) -> Rows:
    """Write the files. Print the table if it is short, or if no file is requested. Return the values of `COLUMNS`,
    k rows per image; rank 1 is the most probable class. Raises NotWrittenError if a file can't be written."""
    predictions: Rows = []
    if "class_id" in rows:
        ids, probabilities = (rows.pop(name)[:, : wanted.topk] for name in ("class_id", "probability"))
        predictions = [
            (in_text(path), rank, class_id, names[class_id], round(value, 8))
            for path, own_ids, values in zip(paths, ids.tolist(), probabilities.tolist(), strict=True)
            for rank, (class_id, value) in enumerate(zip(own_ids, values, strict=True), start=1)
        ]
        if len(paths) <= FEW or not (wanted.output or wanted.embeddings or wanted.token_maps):
            rows_of_text = [
                (path if rank == 1 else "", str(class_id), shorten(name, _WIDTH), f"{100 * value:5.1f} %")
                for path, rank, class_id, name, value in predictions
            ]
            print(*table([("image", "id", "class", "probability"), *rows_of_text]), sep="\n")
        if wanted.output:
            write_predictions(Path(wanted.output), predictions)
            print(f"wrote {printable(wanted.output)}")
    if wanted.embeddings:
        write_embeddings(Path(wanted.embeddings), paths, rows)
        shapes = (f"{name} {' x '.join(map(str, values.shape))}" for name, values in rows.items())
        print(f"wrote {printable(wanted.embeddings)}: {', '.join(shapes)}")
    if wanted.token_maps:
        print(f"wrote {len(paths)} pictures to {printable(wanted.token_maps)}")
    return predictions


def write_predictions(path: Path, rows: Rows) -> None:
    """Write the rows as .csv, .json (a list of objects) or .parquet, atomically. Raises NotWrittenError if writing
    fails; the old file is unchanged then."""

    def fill(staged: Path) -> None:
        if path.suffix == ".parquet":
            columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
            arrow = require("pyarrow", extra="parquet").table(columns)
            return require("pyarrow.parquet", extra="parquet").write_table(arrow, staged)
        with staged.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                csv.writer(file).writerows([COLUMNS, *rows])
            else:
                json.dump([dict(zip(COLUMNS, row, strict=True)) for row in rows], file, ensure_ascii=False, indent=0)

    _replace(path, fill, 100 * len(rows))


def write_embeddings(path: Path, paths: Sequence[str], embeddings: dict[str, Tensor]) -> None:
    """Write (N, ...) tensors and the N paths of their rows, atomically.

    The paths are the array `paths` in a .npz, and the JSON list `paths` in the metadata of a .safetensors. Raises
    NotWrittenError if writing fails; the old file is unchanged then.
    """
    texts = list(map(in_text, paths))

    def fill(staged: Path) -> None:
        if path.suffix == ".safetensors":
            return save_file(embeddings, staged, metadata={"paths": json.dumps(texts)})
        with staged.open("wb") as file:
            np.savez(file, **{"paths": np.array(texts)}, **{name: rows.numpy() for name, rows in embeddings.items()})  # type: ignore[arg-type]

    _replace(path, fill, sum(tensor.numel() * tensor.element_size() for tensor in embeddings.values()))


def in_text(path: str) -> str:
    """Return a path as valid UTF-8, with other bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _replace(path: Path, fill: Callable[[Path], None], size: int) -> None:
    with explained(path, lambda: size):
        path.parent.mkdir(parents=True, exist_ok=True)
        install(path, fill)

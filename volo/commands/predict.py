"""Predict the classes of images, draw what the dense head says of their tokens, and write their features.

    volo predict image.jpg --model volo_d1 --pretrained
    volo predict photos/ --checkpoint output/train/RUN --output predictions.csv
    volo predict photos/ --checkpoint output/train/RUN --token-maps maps/ --embeddings features.safetensors

Images are prepared as in validation. One that can't be read is named and left out; files have a row for each of the
others. One process, one device.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.data.loader import EvalLoader
from tlt.data.sources.folder import FolderListing, ImageFolder
from tlt.errors import UserError, require
from tlt.io.files import refuse_existing
from tlt.io.progress import Progress
from tlt.io.text import printable
from tlt.labels.annotate import labelled_area
from tlt.models.folding import fold_batchnorm
from tlt.models.spatial import feature_map
from tlt.models.token_labeling import TokenLabelModel
from tlt.tools.drawing import Cells, check_format, drawable, save_figure
from volo.checkpoint.checkpoint import BEST, LAST
from volo.checkpoint.checkpoint_file import the_checkpoint
from volo.checkpoint.model_config import class_names
from volo.cluster.distributed import World, choose_device, limit_threads
from volo.commands.attention import TOP, View, answers_page
from volo.commands.console import say
from volo.commands.predictions import prediction_rows, prediction_table, write_embeddings, write_predictions
from volo.record.run_directory import check_writable
from volo.train.convolutions import check_convolutions
from volo.train.data import validation_loader
from volo.train.model import TimmModel, place_model
from volo.train.precision import Precision, resolve_amp_dtype
from volo.train.trained_model import TrainedModel, load_model

FEW = 20  # images whose predictions are shown on the terminal even if they are written to a file


class Found(NamedTuple):
    """The images to predict."""

    paths: list[str]
    names: list[str]  # relative to the folders given, for the names of token maps
    warnings: list[str]


class Results(NamedTuple):
    """What was found: `read` are the numbers of the images that could be read, a row of each tensor."""

    read: list[int]
    tensors: dict[str, list[Tensor]]  # by batch: `probability` and `class_id` (N, k), and `Answer.features`


class Answer(NamedTuple):
    """What the model says of a batch of B images, on the CPU."""

    probabilities: Tensor | None  # (B, classes); None for a model without classes
    token_classes: tuple[Tensor, Tensor] | None  # for token maps: probability and id (B, tokens) of the first class
    features: dict[str, Tensor]  # for embeddings: `pooled` (B, D) and `tokens` (B, T, D), float32


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    say(args.notes)
    found = find_images(args.paths)
    say(f"warning: {line}" for line in found.warnings)
    check_outputs(args, found)
    trained = load_model(args, checkpoint_of(args.checkpoint), dense=bool(args.token_maps))
    say(trained.notes)
    check_model(args, trained)
    names = names_of_classes(args.class_names, trained)

    world = World(0, 0, 1, choose_device(args.device, 0))
    limit_threads(world)
    fold_batchnorm(trained.model)
    model = place_model(trained.model, args, world)
    dtype = resolve_amp_dtype(args.amp, args.amp_dtype, world.device)
    say(check_convolutions(model, trained.settings["input_size"], dtype, world.device))
    loader = image_loader(args, found.paths, trained.settings, world)
    results = predict(args, trained, loader, Precision(world.device, dtype), found.names, names)
    print(f"{len(results.read)} images predicted, {loader.skips.total} could not be read", flush=True)
    report(args, [found.paths[index] for index in results.read], names, results)
    return 0


def find_images(paths: list[str]) -> Found:
    """Return the images given, and those in the folders given, at any depth and in natural order.

    Raises:
        UserError: There is no such file or folder, or a folder can't be read or holds no image.
    """
    found = Found([], [], [])
    for path in paths:
        if os.path.isdir(path):
            listing = FolderListing(path, classes=False)
            if not listing.names:
                notes = "".join(f"; {line}" for line in listing.warnings)
                raise UserError(f"no images in {printable(path)}, by their suffixes{notes}")
            own = os.path.basename(os.path.abspath(path)) if len(paths) > 1 else ""
            found.paths.extend(os.path.join(path, name) for name in listing.names)
            found.names.extend(os.path.join(own, name) for name in listing.names)
            found.warnings.extend(listing.warnings)
        elif os.path.exists(path):
            found.paths.append(path)
            found.names.append(os.path.basename(path))
        else:
            raise UserError(f"PATH {printable(path)}: no such file or folder")
    return found


def check_outputs(args: Namespace, found: Found) -> None:
    """Check before the work that its results can be written.

    Raises:
        UserError: A file is there already, a folder is not writable, a package is missing, or two token maps would
            have one name.
    """
    for flag, path in (("--output", args.output), ("--embeddings", args.embeddings)):
        if path:
            refuse_existing(path, flag)
            check_writable(Path(path).parent, flag)
    if args.output.endswith(".parquet"):
        require("pyarrow", extra="parquet")
    if args.token_maps:
        check_format("map.png")
        check_writable(Path(args.token_maps), "--token-maps")
        name, count = Counter(found.names).most_common(1)[0]
        if count > 1:
            raise UserError(
                f"--token-maps: {count} images would share the picture {printable(name)}.png: predict their folders "
                "one after the other"
            )
        pictures = (os.path.join(args.token_maps, f"{name}.png") for name in found.names)
        for picture in pictures:
            refuse_existing(picture, "--token-maps:")


def checkpoint_of(spec: str) -> Path | None:
    """Return the checkpoint that `--checkpoint` names: the file, or in a directory the best or else the last one.

    Raises:
        UserError: The directory is not a run's, and holds no checkpoint or several.
    """
    if not spec:
        return None
    for name in (BEST, LAST):
        if (file := Path(spec, name)).is_file():
            print(f"--checkpoint {printable(spec)}: {name}", flush=True)
            return file
    return the_checkpoint(spec, "--checkpoint")


def check_model(args: Namespace, trained: TrainedModel) -> None:
    """Raise UserError if the model can't give what the flags ask for."""
    name, model = trained.args.model, trained.model
    if args.token_maps and not getattr(model, "dense_head", False):
        raise UserError(f"--token-maps: {name} has no trained dense head here; leave the flag out")
    if not model.num_classes and (args.output or args.token_maps or not args.embeddings):
        raise UserError(f"--model {name} has no classes: ask for --embeddings alone, or give weights with a head")
    if trained.settings["input_size"][0] != 3:
        raise UserError(f"--model {name} takes images of {trained.settings['input_size'][0]} channels: they have 3")


def names_of_classes(path: str, trained: TrainedModel) -> list[str]:
    """Return the name of each class: from `--class-names`, the checkpoint, or ImageNet's; else its number.

    Raises:
        UserError: The file can't be read, or has another number of names than the model has classes.
    """
    count = trained.model.num_classes
    if not path:
        known = class_names(trained.config, count)
        return known if len(known) == count else [str(number) for number in range(count)]
    try:
        text = Path(path).read_text(encoding="utf-8")
        names = json.loads(text) if path.endswith(".json") else text.splitlines()
        if isinstance(names, dict):
            names = [names[str(number)] for number in range(len(names))]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--class-names {path} can't be read as a list of names ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) != count:
        held = f"{len(names)} entries" if isinstance(names, list) else f"a {type(names).__name__}"
        raise UserError(
            f"--class-names {path} holds {held}: give the names of the model's {count} classes, one per line or as a "
            "JSON list"
        )
    return names


def image_loader(args: Namespace, paths: list[str], settings: dict[str, Any], world: World) -> EvalLoader:
    """The images as validation loads them; any number of them may be unreadable."""
    batches = -(-len(paths) // args.batch_size)
    wanted = {"max_bad_images": len(paths), "workers": min(args.workers, batches)}
    folder = ImageFolder("", paths, np.zeros(len(paths), np.int64), [])
    return validation_loader(Namespace(**{**vars(args), **wanted}), folder, args.batch_size, settings, world)


def predict(
    args: Namespace, trained: TrainedModel, loader: EvalLoader, precision: Precision, files: list[str], names: list[str]
) -> Results:
    """Run the model on all images, and draw the token maps.

    Args:
        files: The token map of each image.
        names: Of the classes.

    Raises:
        UserError: Not one image can be read, or the model doesn't have the features asked for.
    """
    found = Results([], defaultdict(list))
    progress = Progress("predicting", len(files))
    try:
        for batch in loader:
            answer, indices = look(trained.model, batch.images, args, precision), batch.indices.tolist()
            if answer.probabilities is not None:
                best = answer.probabilities.topk(min(args.topk, answer.probabilities.shape[1]))
                answer.features.update(probability=best.values, class_id=best.indices)
            for name, rows in answer.features.items():
                found.tensors[name].append(rows)
            if answer.token_classes is not None:
                draw_token_maps(args.token_maps, batch.images, answer, trained, [files[i] for i in indices], names)
            found.read.extend(indices)
            progress.step(batch.size + tell_unreadable(loader))
    finally:
        progress.step(tell_unreadable(loader))
    progress.close()
    if not found.read:
        path, reason = next(iter(loader.skips.reasons.items()))
        raise UserError(f"not one of {len(files)} images can be read, the first is {printable(path)} ({reason})")
    return found


def tell_unreadable(loader: EvalLoader) -> int:
    """Print which images were left out since the last call; return how many."""
    lines = loader.skips.take_lines()
    say(f"warning: {line}" for line in lines)
    return len(lines)


@torch.inference_mode()
def look(model: TimmModel, images: Tensor, args: Namespace, precision: Precision) -> Answer:
    """Run the model on normalised images (B, 3, H, W).

    Raises:
        UserError: Features are asked for that the model doesn't have.
    """
    features: dict[str, Tensor] = {}
    token_classes = None
    with precision.autocast():
        if args.embeddings:
            last = model.forward_features(images)
            logits = model.forward_head(last)
            features = embed(model, last, images, args.embeddings_pooled_only)
        else:
            logits = model(images)
        if args.token_maps:
            probability, ids = model(images, dense=True)[1].float().softmax(-1).max(-1)
            token_classes = probability.cpu(), ids.cpu()
    return Answer(
        logits.float().softmax(-1).cpu() if model.num_classes else None,
        token_classes,
        {name: values.float().cpu() for name, values in features.items()},
    )


def embed(model: TimmModel, last: Any, images: Tensor, pooled_only: bool) -> dict[str, Tensor]:
    """Return the features that go into the class head (B, D), and those of the image's tokens (B, T, D), row by row,
    without class token and registers.

    Args:
        last: `model.forward_features(images)`.

    Raises:
        UserError: The model doesn't pool its features, or they are not spatial.
    """
    found = {"pooled": model.forward_head(last, pre_logits=True)}
    if found["pooled"].ndim != 2:
        raise UserError(f"--embeddings: {type(model).__name__} doesn't pool its features here: choose a --gp")
    if pooled_only:
        return found
    if isinstance(model, TokenLabelModel):
        return found | {"tokens": last[:, 1:]}
    try:
        return found | {"tokens": feature_map(model, last, (images.shape[-2], images.shape[-1])).flatten(1, 2)}
    except UserError as error:
        raise UserError(f"--embeddings: {error}; --embeddings-pooled-only leaves tokens out") from error


def draw_token_maps(
    folder: str, images: Tensor, answer: Answer, trained: TrainedModel, files: list[str], names: list[str]
) -> None:
    """Write FOLDER/FILE.png for each image of a batch (B, 3, H, W): the image, the first class of every token, and
    the first classes of the image."""
    model, settings = trained.model, trained.settings
    assert answer.token_classes is not None and answer.probabilities is not None
    height, width = settings["input_size"][1:]
    area, grid = labelled_area(model, (height, width)), model.token_grid((height, width))
    box = (area[0] * width, area[1] * height, area[2] * width, area[3] * height)
    std, mean = (torch.tensor(settings[name]).view(-1, 1, 1) for name in ("std", "mean"))
    pixels = (images.cpu() * std + mean).mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    best = answer.probabilities.topk(min(TOP, len(names)))
    for row, file in enumerate(files):
        probability, ids = (part[row].view(grid).numpy() for part in answer.token_classes)
        cells = Cells(ids, probability.astype(np.float64), np.ones(grid))
        top = list(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True))
        path = Path(folder, f"{file}.png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--token-maps {printable(str(path.parent))}: {error.strerror}") from error
        title = f"{file}: {trained.args.model}, {height} x {width} px"
        save_figure(answers_page(1, pixels[row], View(top, cells, box, {}), names, drawable(title))[0], path)


def report(args: Namespace, paths: list[str], names: list[str], results: Results) -> None:
    """Write the files; print the table where it is short, or all there is.

    Raises:
        NotWrittenError: A file can't be written.
    """
    features = {name: torch.cat(results.tensors.pop(name)) for name in [*results.tensors]}
    if "class_id" in features:
        rows = prediction_rows(paths, features.pop("class_id"), features.pop("probability"), names)
        if len(paths) <= FEW or not (args.output or args.embeddings or args.token_maps):
            print(*prediction_table(rows), sep="\n")
        if args.output:
            write_predictions(Path(args.output), rows)
            print(f"wrote {printable(args.output)}")
    if args.embeddings:
        write_embeddings(Path(args.embeddings), paths, features)
        shapes = (f"{name} {' x '.join(map(str, values.shape))}" for name, values in features.items())
        print(f"wrote {printable(args.embeddings)}: {', '.join(shapes)}")
    if args.token_maps:
        print(f"wrote {len(paths)} pictures to {printable(args.token_maps)}")

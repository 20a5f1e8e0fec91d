"""The settings of the programs that show many images to a trained model: validate, label, predict.

validate.py has the 33 flags of the published program. `--model` has no default, because a checkpoint of this project
names its model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from tlt.errors import UserError
from volo.config import value_types as t
from volo.config.checkpoint_files import best_or_last
from volo.config.fields import Need, Settings, changed, group, needing, setting
from volo.config.parser import Program
from volo.config.rules import check_folder, check_weights, join_data_dir
from volo.config.settings_data import LabelMaps
from volo.config.settings_shared import (
    BIND,
    CHANNELS_LAST,
    CLASS_MAP,
    DATASET,
    DEBUG,
    DEVICE,
    FILES,
    INDUCTOR,
    OUTLOOK_KERNEL,
    TORCHSCRIPT,
    Compilation,
    LimitedLoading,
    Loading,
    MixedPrecision,
    Pixels,
    TrainedNetwork,
)

FOLDER = Need("a folder as --checkpoint", lambda s: os.path.isdir(s["checkpoint"]))
HEADS = Need("the heads' outputs (--knn and --probe look at features)", lambda s: not (s["knn"] or s["probe"]))
CLASSES = Need("classes of images (--probe has masks)", lambda s: not s["probe"])
OWN_HEADS = Need(
    "the whole heads (no --valid-labels, --test-pool)", lambda s: not (s["valid_labels"] or s["test_pool"])
)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision and speed"""

    device: str | None = DEVICE()
    mixed: MixedPrecision = group(MixedPrecision)
    channels_last: bool = CHANNELS_LAST()
    outlook_kernel: str = OUTLOOK_KERNEL()


@dataclass(frozen=True, kw_only=True)
class CompiledPrecision(Precision):
    """Precision and speed"""

    compilation: Compilation = group(Compilation)
    outlook_kernel: str = OUTLOOK_KERNEL(after="torchcompile_scope")
    torchscript: bool = TORCHSCRIPT()
    legacy_jit: bool = TORCHSCRIPT()


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Distributed"""

    bind: str = BIND()


_of_classes = needing(CLASSES)
_of_heads = needing(HEADS)
_probing = needing("--probe")


@dataclass(frozen=True, kw_only=True)
class ValidationImages:
    """Data"""

    data: str | None = setting(
        None, "dataset: DATA/SPLIT/CLASS/IMAGE, or shards", t.SOURCE, positional=True, nargs="?", metavar="DATA"
    )
    data_dir_option: str | None = setting(None, "the same as a flag", t.DIR, names="--data-dir")
    split: str = setting("validation", "folder of the images (val is found too)", t.NAME)
    dataset: str = DATASET(needs=(CLASSES, FILES))
    class_map: str = CLASS_MAP(needs=(CLASSES, FILES))
    image_list: str = _of_classes("", "these images alone, one CLASS/FILE a line", t.FILE)
    num_samples: int | None = _of_classes(None, "so many images, evenly spaced over the split", t.POSITIVE)
    crop_mode: Literal["", "center", "squash", "border"] = _of_classes("", "(the model's own)")
    batch_size: int = setting(256, "images per device", t.POSITIVE, names="-b --batch-size")
    pixels: Pixels = group(Pixels)
    loading: LimitedLoading = group(LimitedLoading)
    tf_preprocessing: bool = setting(
        False, "refused", refused="TensorFlow's preprocessing is not supported: remove the flag"
    )


@dataclass(frozen=True, kw_only=True)
class ValidatedNetwork(TrainedNetwork):
    """Model"""

    all: bool = setting(False, "every checkpoint in a folder; without it the best, in a run's directory", needs=FOLDER)
    test_pool: bool = _of_heads(False, "test-time pooling")
    no_test_pool: bool = setting(False, "the default", excludes=("test_pool",))


@dataclass(frozen=True, kw_only=True)
class ValidationMaps(LabelMaps):
    """How label maps are read."""

    token_label_area: Literal["full", "center"] | None = changed(
        LabelMaps, "token_label_area", needs="--token-label-data"
    )
    label_tail: Literal["zero", "exact"] = changed(LabelMaps, "label_tail", needs="--token-label-data")
    bad_label: Literal["stop", "skip", "uniform"] = changed(LabelMaps, "bad_label", needs="--token-label-data")


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results"""

    knn: str = setting(
        "", "in place of the heads: accuracy of the nearest of these training images, CLASS/IMAGE", t.DIR
    )
    probe: Literal["", "seg"] = setting(
        "", "DATA/SPLIT/images and masks: mIoU of a linear layer on tokens", excludes=("knn",)
    )
    epochs: int | None = _probing(None, "of its training (500 updates of 16 images, at least 10)", t.POSITIVE)
    lr: float = _probing(1e-3, "its learning rate, which falls to 0 as a cosine does", t.ABOVE_ZERO)
    real_labels: str = _of_heads("", "real.json: accuracy on ImageNet's reassessed labels", t.FILE)
    valid_labels: str = _of_heads("", "class numbers, one per line: rank among these alone", t.FILE)
    token_label_data: str = _of_heads("", "label maps of these images: measure dense_top1", t.DIR, needs=OWN_HEADS)
    maps: ValidationMaps = group(ValidationMaps)
    confusion: str = _of_heads("", "write there what is taken for what: pictures, tables", t.DIR)
    results_file: str = setting("", "write the results there", t.FILE)
    results_format: Literal["csv", "json"] = setting("csv", "format of --results-file", needs="--results-file")
    log_freq: int = _of_heads(50, "batches between lines of the log", t.POSITIVE)
    retry: bool = setting(False, "halve --batch-size where it does not fit into memory (one process)")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class ValidationCompilation(Compilation):
    """What torch.compile does with a model."""

    torchcompile: str | None = changed(Compilation, "torchcompile", needs=HEADS)
    torchcompile_mode: str | None = changed(Compilation, "torchcompile_mode", needs=(HEADS, INDUCTOR))
    torchcompile_scope: Literal["blocks", "model"] | None = changed(
        Compilation, "torchcompile_scope", needs=(HEADS, "--torchcompile")
    )


@dataclass(frozen=True, kw_only=True)
class ValidationPrecision(CompiledPrecision):
    """Precision and speed"""

    compilation: ValidationCompilation = group(ValidationCompilation)


@dataclass(frozen=True, kw_only=True)
class ValidateDistributed:
    """Distributed"""

    num_gpu: int = setting(1, "more are refused", t.COUNT, refused="start one process per GPU with torchrun")
    bind: str = BIND()


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(Settings):
    """The settings of validate.py."""

    images: ValidationImages = group(ValidationImages)
    network: ValidatedNetwork = group(ValidatedNetwork)
    results: Results = group(Results)
    precision: ValidationPrecision = group(ValidationPrecision)
    distributed: ValidateDistributed = group(ValidateDistributed)


def _check_validate(settings: ValidateSettings) -> ValidateSettings:
    if settings.results.probe and settings.images.pixels.crop_pct:
        raise UserError("--probe shows whole images, squashed to the model's size: leave --crop-pct out")
    settings = join_data_dir(settings, "DATA", "data")
    # A folder of checkpoints means all of them, as in the published program.
    if FOLDER.met(settings) and best_or_last(settings.network.checkpoint) is None:
        settings = settings.decide("other flags", all=True)
    images, compilation = settings.images, settings.precision.compilation
    check_folder(images.data, images.dataset, images.loading.data_backend, "DATA")
    return check_weights(settings, settings.network, images.pixels, compilation)


VALIDATE = Program(
    "validate",
    "DATA --checkpoint PATH [flags]",
    "Measure the accuracy of a checkpoint. Of a run's directory it is the best; --all measures all of a folder.",
    ValidateSettings,
    _check_validate,
)


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Data"""

    data: str = setting(
        None, "images: DATA/SPLIT/CLASS/IMAGE, DATA/CLASS/IMAGE or shards", t.SOURCE, positional=True, metavar="DATA"
    )
    token_label_root: str = setting(None, "folder of the label archive", t.SOURCE, positional=True, metavar="OUT")
    dataset: str = DATASET(needs=FILES)
    split: str = setting("train", "folder of the images", t.NAME)
    batch_size: int = setting(32, "images per device", t.POSITIVE, names="-b --batch-size")
    pixels: Pixels = group(Pixels)
    loading: LimitedLoading = group(LimitedLoading)


@dataclass(frozen=True, kw_only=True)
class WrittenLabels:
    """Labels"""

    top_k: int = setting(5, "classes kept per cell of the map", t.POSITIVE)
    no_log_sum_exp: bool = setting(False, "without what --label-tail exact needs, a sixth smaller")
    transfer: bool = setting(False, "the annotator's classes are not the folder's: measure no accuracy")
    overwrite: bool = setting(False, "replace the archive in OUT, and nothing else")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class LabelSettings(Settings):
    """The settings of generate_label.py."""

    images: LabelledImages = group(LabelledImages)
    network: TrainedNetwork = group(TrainedNetwork)
    written: WrittenLabels = group(WrittenLabels)
    precision: CompiledPrecision = group(CompiledPrecision)
    distributed: Binding = group(Binding)


def _check_label(settings: LabelSettings) -> LabelSettings:
    images = settings.images
    check_folder(images.data, images.dataset, images.loading.data_backend, "DATA")
    return check_weights(settings, settings.network, images.pixels, settings.precision.compilation)


GENERATE_LABEL = Program(
    "label",
    "DATA OUT --model NAME [--checkpoint PATH | --pretrained] [flags]",
    "Write a token-label map for every image. OUT gets files CLASS/IMAGE.pt, or is one archive.",
    LabelSettings,
    _check_label,
)

# File endings for predictions and embeddings.
_OUTPUTS = (".csv", ".json", ".parquet")
_EMBEDDING_FILES = (".safetensors", ".npz")


@dataclass(frozen=True, kw_only=True)
class PredictedImages:
    """Images"""

    paths: list[str] = setting(None, "images, and folders with images at any depth", t.PATH, positional=True)
    batch_size: int = setting(64, "images per device", t.POSITIVE, names="-b --batch-size")
    pixels: Pixels = group(Pixels)
    loading: Loading = group(Loading)  # any number of unreadable images is reported and left out


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions"""

    topk: int = setting(5, "most probable classes of an image", t.POSITIVE)
    output: str = setting(
        "", "write them there: .csv, .json or .parquet (a table on the terminal)", t.FILE, names="-o --output"
    )
    class_names: str = setting("", "a name per line (the checkpoint's; ImageNet's for 1000 classes)", t.FILE)
    token_maps: str = setting("", "a picture of what the dense head says of each token", t.DIR)
    embeddings: str = setting("", ".safetensors or .npz: pooled features and those of tokens, kept in memory", t.FILE)
    embeddings_pooled_only: bool = setting(False, "without the features of the tokens", needs="--embeddings")
    debug: bool = DEBUG()


@dataclass(frozen=True, kw_only=True)
class PredictSettings(Settings):
    """The settings of `volo predict`."""

    images: PredictedImages = group(PredictedImages)
    network: TrainedNetwork = group(TrainedNetwork)
    predictions: Predictions = group(Predictions)
    precision: Precision = group(Precision)


def _check_predict(settings: PredictSettings) -> PredictSettings:
    wanted = settings.predictions
    for name, path, endings in (
        ("output", wanted.output, _OUTPUTS),
        ("embeddings", wanted.embeddings, _EMBEDDING_FILES),
    ):
        if path and not path.endswith(endings):
            raise UserError(f"--{name} {path}: end the name in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_weights(settings, settings.network, settings.images.pixels)


PREDICT = Program(
    "predict",
    "PATH [PATH ...] --checkpoint PATH [flags]",
    "Predict the classes of images; write token maps and features.",
    PredictSettings,
    _check_predict,
)

"""The settings of the programs that show many images to a trained model: validate, label, predict.

validate.py has the 33 flags of the published program. `--model` has no default, because a checkpoint of this project
names its model.
"""

import os
from typing import Literal, TypeVar

from tlt.errors import UserError
from volo.config import settings_shared as shared
from volo.config import value_types as t
from volo.config.checkpoint_files import best_or_last
from volo.config.fields import Group, Need, Settings, flag, group, needing, switch
from volo.config.parser import Program
from volo.config.rules import check_folder, check_weights, join_data_dir
from volo.config.settings_data import LabelMaps, Loading

FOLDER = Need("a folder as --checkpoint", lambda s: os.path.isdir(s["checkpoint"]))
# Settings of train.py alone.
TRAINS_LOADING = "use_multi_epochs_loader drop_last full_decode"
TRAINS_COMPILATION = "cuda_graph no_cuda_graph activation_memory_budget"
HEADS = Need("the heads' outputs (--knn and --probe look at features)", lambda s: not (s["knn"] or s["probe"]))
CLASSES = Need("classes of images (--probe has masks)", lambda s: not s["probe"])
OWN_HEADS = Need(
    "the whole heads (no --valid-labels, --test-pool)", lambda s: not (s["valid_labels"] or s["test_pool"])
)


class Precision(Group):
    """Precision and speed"""

    device: t.Device | None = shared.DEVICE()
    mixed: shared.MixedPrecision = group(shared.MixedPrecision, "model_dtype")
    channels_last: bool = shared.CHANNELS_LAST()
    compilation: shared.Compilation = group(shared.Compilation, TRAINS_COMPILATION)
    outlook_kernel: str = shared.OUTLOOK_KERNEL()
    torchscript: bool = shared.TORCHSCRIPT()
    legacy_jit: bool = shared.TORCHSCRIPT()


_of_classes = needing(CLASSES)
_of_heads = needing(HEADS)
_probing = needing("--probe")


class ValidationImages(Group):
    """Data"""

    data: t.Source | None = flag(
        None, "dataset: DATA/SPLIT/CLASS/IMAGE, or shards", positional=True, nargs="?", metavar="DATA"
    )
    data_dir_option: t.Dir | None = flag(None, "the same as a flag", names="--data-dir")
    split: t.Name = flag("validation", "folder of the images (val is found too)")
    dataset: str = shared.DATASET(needs=(CLASSES, shared.FILES))
    class_map: t.File = shared.CLASS_MAP(needs=(CLASSES, shared.FILES))
    image_list: t.File = _of_classes("", "these images alone, one CLASS/FILE a line")
    num_samples: t.Positive | None = _of_classes(None, "so many images, evenly spaced over the split")
    crop_mode: Literal["", "center", "squash", "border"] = _of_classes("", "(the model's own)")
    batch_size: t.Positive = flag(256, "images per device", also="-b")
    pixels: shared.Pixels = group(shared.Pixels)
    loading: Loading = group(Loading, TRAINS_LOADING)
    tf_preprocessing: bool = switch("refused", refused="TensorFlow's preprocessing is not supported: remove the flag")


class ValidatedNetwork(shared.TrainedNetwork):
    """Model"""

    all: bool = switch("every checkpoint in a folder; without it the best, in a run's directory", needs=FOLDER)
    test_pool: bool = _of_heads(False, "test-time pooling")
    no_test_pool: bool = switch("the default", excludes=("test_pool",))


class Results(Group):
    """Results"""

    knn: t.Dir = flag("", "in place of the heads: accuracy of the nearest of these training images, CLASS/IMAGE")
    probe: Literal["", "seg"] = flag(
        "", "DATA/SPLIT/images and masks: mIoU of a linear layer on tokens", excludes=("knn",)
    )
    epochs: t.Positive | None = _probing(None, "of its training (500 updates of 16 images, at least 10)")
    lr: t.AboveZero = _probing(1e-3, "its learning rate, which falls to 0 as a cosine does")
    real_labels: t.File = _of_heads("", "real.json: accuracy on ImageNet's reassessed labels")
    valid_labels: t.File = _of_heads("", "class numbers, one per line: rank among these alone")
    token_label_data: t.Dir = _of_heads("", "label maps of these images: measure dense_top1", needs=OWN_HEADS)
    maps: LabelMaps = group(LabelMaps, "uncovered", needs="--token-label-data", own=False)
    confusion: t.Dir = _of_heads("", "write there what is taken for what: pictures, tables")
    results_file: t.File = flag("", "write the results there")
    results_format: Literal["csv", "json"] = flag("csv", "format of --results-file", needs="--results-file")
    log_freq: t.Positive = _of_heads(50, "batches between lines of the log")
    retry: bool = switch("halve --batch-size where it does not fit into memory (one process)")
    debug: bool = shared.DEBUG()


class ValidationPrecision(Precision):
    """Precision and speed"""

    compilation: shared.Compilation = group(shared.Compilation, TRAINS_COMPILATION, needs=HEADS)


class Distributed(Group):
    """Distributed"""

    num_gpu: t.Count = flag(1, "more are refused", refused="start one process per GPU with torchrun")
    bind: str = shared.BIND()


class ValidateSettings(Settings):
    """Measure the accuracy of a checkpoint. Of a run's directory it is the best; --all measures all of a folder."""

    images: ValidationImages = group(ValidationImages)
    network: ValidatedNetwork = group(ValidatedNetwork)
    results: Results = group(Results)
    precision: ValidationPrecision = group(ValidationPrecision)
    distributed: Distributed = group(Distributed)


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


VALIDATE = Program("validate", "DATA --checkpoint PATH [flags]", ValidateSettings, _check_validate)


class WholeImages(Group):
    """Data"""

    data: t.Source = flag(
        None, "images: DATA/SPLIT/CLASS/IMAGE, DATA/CLASS/IMAGE or shards", positional=True, metavar="DATA"
    )
    dataset: str = shared.DATASET(needs=shared.FILES)
    split: t.Name = flag("train", "folder of the images")
    batch_size: t.Positive = flag(32, "images per device", also="-b")
    pixels: shared.Pixels = group(shared.Pixels)
    loading: Loading = group(Loading, TRAINS_LOADING)


class WrittenLabels(Group):
    """Labels"""

    out: t.Dir = flag(None, "folder of the label archive", positional=True, metavar="OUT")
    top_k: t.Positive = flag(5, "classes kept per cell of the map")
    no_log_sum_exp: bool = switch("without what --label-tail exact needs, a sixth smaller")
    transfer: bool = switch("the annotator's classes are not the folder's: measure no accuracy")
    overwrite: bool = switch("replace the archive in OUT, and nothing else")
    debug: bool = shared.DEBUG()


class LabelSettings(Settings):
    """Write a token-label map for every image. OUT gets files CLASS/IMAGE.pt, or is one archive."""

    images: WholeImages = group(WholeImages)
    network: shared.TrainedNetwork = group(shared.TrainedNetwork)
    written: WrittenLabels = group(WrittenLabels)
    precision: Precision = group(Precision)
    distributed: Distributed = group(Distributed, "num_gpu")


class StoredPixels(shared.Pixels):
    """Size and colours of the images that the teacher sees."""

    img_size: t.Positive | None = flag(
        None, "side of the squashed image, px (the model's own)", also="--size", excludes=("input_size",)
    )


class StoredImages(WholeImages):
    """Data"""

    pixels: StoredPixels = group(StoredPixels, "crop_pct")


class WrittenFeatures(Group):
    """Features"""

    out: t.Dir = flag(None, "folder of the archive", positional=True, metavar="FEATURES")
    dtype: Literal["int8", "float16"] = flag("int8", "int8: with a scale for each token")
    channels: t.Positive | None = flag(None, "keep so many principal directions of the channels (all channels)")
    dry_run: bool = switch("tell size and time, and write nothing")
    overwrite: bool = switch("replace the archive in FEATURES, and nothing else")
    debug: bool = shared.DEBUG()


class FeaturesSettings(Settings):
    """Write a teacher's features of every whole image, for volo train --kd-model-name FEATURES."""

    images: StoredImages = group(StoredImages)
    network: shared.TrainedNetwork = group(shared.TrainedNetwork)
    written: WrittenFeatures = group(WrittenFeatures)
    precision: Precision = group(Precision)
    distributed: Distributed = group(Distributed, "num_gpu")


OfWholeImages = TypeVar("OfWholeImages", LabelSettings, FeaturesSettings)


def _check_whole_images(settings: OfWholeImages) -> OfWholeImages:
    images = settings.images
    check_folder(images.data, images.dataset, images.loading.data_backend, "DATA")
    return check_weights(settings, settings.network, images.pixels, settings.precision.compilation)


GENERATE_LABEL = Program(
    "label", "DATA OUT --model NAME [--checkpoint PATH | --pretrained] [flags]", LabelSettings, _check_whole_images
)
FEATURES = Program(
    "features", "DATA FEATURES --model NAME [--checkpoint PATH] [flags]", FeaturesSettings, _check_whole_images
)

# File endings for predictions and embeddings.
_OUTPUTS = (".csv", ".json", ".parquet")
_EMBEDDING_FILES = (".safetensors", ".npz")


class PredictedImages(Group):
    """Images"""

    paths: list[t.Path] = flag(None, "images, and folders with images at any depth", positional=True)
    batch_size: t.Positive = flag(64, "images per device", also="-b")
    pixels: shared.Pixels = group(shared.Pixels)
    loading: Loading = group(
        Loading, f"{TRAINS_LOADING} max_bad_images"
    )  # any number of unreadable images is reported and left out


class Predictions(Group):
    """Predictions"""

    topk: t.Positive = flag(5, "most probable classes of an image")
    output: t.File = flag("", "write them there: .csv, .json or .parquet (a table on the terminal)", also="-o")
    class_names: t.File = flag("", "a name per line (the checkpoint's; ImageNet's for 1000 classes)")
    token_maps: t.Dir = flag("", "a picture of what the dense head says of each token")
    embeddings: t.File = flag("", ".safetensors or .npz: pooled features and those of tokens, kept in memory")
    embeddings_pooled_only: bool = switch("without the features of the tokens", needs="--embeddings")
    debug: bool = shared.DEBUG()


class PredictSettings(Settings):
    """Predict the classes of images; write token maps and features."""

    images: PredictedImages = group(PredictedImages)
    network: shared.TrainedNetwork = group(shared.TrainedNetwork)
    predictions: Predictions = group(Predictions)
    precision: Precision = group(Precision, "compilation torchscript legacy_jit")


def _check_predict(settings: PredictSettings) -> PredictSettings:
    wanted = settings.predictions
    for name, path, endings in (
        ("output", wanted.output, _OUTPUTS),
        ("embeddings", wanted.embeddings, _EMBEDDING_FILES),
    ):
        if path and not path.endswith(endings):
            raise UserError(f"--{name} {path}: end the name in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_weights(settings, settings.network, settings.images.pixels)


PREDICT = Program("predict", "PATH [PATH ...] --checkpoint PATH [flags]", PredictSettings, _check_predict)

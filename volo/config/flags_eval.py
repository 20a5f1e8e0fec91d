"""The flags of `validate.py`, `generate_label.py` and `volo predict`; what all have stands in one table.

validate.py keeps the 33 flags of the published program. `--model` has no default: a checkpoint of this project says
what it is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from tlt.errors import UserError
from volo.config.flag_rules import check_images, check_weights, join_data_dir
from volo.config.flag_table import (
    COUNT,
    DIR,
    FILE,
    NAME,
    PATH,
    POSITIVE,
    TEXT,
    Flag,
    Group,
    Need,
    Program,
    flag,
    switch,
)
from volo.config.flags_data import (
    CLASS_MAP,
    DATASET,
    DEBUG,
    DEVICE,
    FILE_BACKENDS,
    LIMITS,
    LOADING,
    MODEL_KWARGS,
    POOL,
    PREPROCESSING,
)
from volo.config.flags_train import BIND, CHANNELS_LAST, COMPILE, MIXED_PRECISION, NO_TORCHSCRIPT, OUTLOOK_KERNEL

CHECKPOINT = Need("--checkpoint", lambda a: bool(a.checkpoint))
RESULTS_FILE = Need("--results-file", lambda a: bool(a.results_file))
EMBEDDINGS = Need("--embeddings", lambda a: bool(a.embeddings))
MODEL = (
    flag("-m --model", NAME, None, "model (what the checkpoint says)"),
    flag("--checkpoint", PATH, "", "weights: .pth, .pth.tar or .safetensors", excludes=("pretrained",)),
    switch("--pretrained", "the published weights"),
    switch("--use-ema", "the moving average in the checkpoint (what training selected by)", needs=(CHECKPOINT,)),
    switch("--no-use-ema", "the plain weights, also where training selected by the average", needs=(CHECKPOINT,)),
    flag("--num-classes", POSITIVE, None, "number of classes (the model's own)"),
    POOL,
    MODEL_KWARGS,
)

_IMAGES = (
    *PREPROCESSING,
    flag("-j --workers", COUNT, 4, "decoding processes per rank; dali-*: threads; 0: none"),
    *LOADING,
    flag("--data-backend", FILE_BACKENDS, "torchvision", "what decodes and resizes images"),
    *LIMITS,
)

_DEVICE = (DEVICE, *MIXED_PRECISION, CHANNELS_LAST)
_PRECISION = (
    *_DEVICE,
    *COMPILE,
    OUTLOOK_KERNEL,
    switch("--torchscript", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
    switch("--legacy-jit", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
)


def _batch_size(default: int) -> Flag:
    return flag("-b --batch-size", POSITIVE, default, "images per device")


_VALIDATE = (
    Group(
        "Data",
        flag("data", TEXT, None, "dataset: DATA/SPLIT/CLASS/IMAGE, or shards", nargs="?", metavar="DATA"),
        flag("--data-dir", DIR, None, "the same as a flag", renamed="data_dir_option"),
        DATASET,
        flag("--split", NAME, "validation", "folder of the images (val is found too)"),
        CLASS_MAP,
        flag("--image-list", FILE, "", "these images alone, one CLASS/FILE a line"),
        flag("--num-samples", POSITIVE, None, "so many images, evenly spaced over the split"),
        flag("--crop-mode", ("", "center", "squash", "border"), "", "(the model's own)"),
        _batch_size(256),
        *_IMAGES,
        switch("--tf-preprocessing", "refused", refused="TensorFlow's preprocessing is not supported: remove the flag"),
    ),
    Group("Model", *MODEL, switch("--test-pool", "test-time pooling"), switch("--no-test-pool", "the default")),
    Group(
        "Results",
        flag("--real-labels", FILE, "", "real.json: accuracy on ImageNet's reassessed labels"),
        flag("--knn", DIR, "", "in place of the heads: accuracy of the nearest of these training images, CLASS/IMAGE"),
        flag("--valid-labels", FILE, "", "class numbers, one per line: rank among these alone"),
        flag("--results-file", FILE, "", "write the results there"),
        flag("--results-format", ("csv", "json"), "csv", "format of --results-file", needs=(RESULTS_FILE,)),
        flag("--log-freq", POSITIVE, 50, "batches between lines of the log"),
        switch("--retry", "halve --batch-size where it does not fit into memory (one process)"),
        DEBUG,
    ),
    Group("Precision and speed", *_PRECISION),
    Group(
        "Distributed",
        flag(
            "--num-gpu",
            COUNT,
            1,
            "1; start more with torchrun",
            refused="one process drives one GPU: torchrun --nproc-per-node N validate.py ...",
        ),
        BIND,
    ),
)

_GENERATE_LABEL = (
    Group(
        "Data",
        flag("data", TEXT, None, "images: DATA/SPLIT/CLASS/IMAGE, DATA/CLASS/IMAGE or shards", metavar="DATA"),
        flag("token_label_root", TEXT, None, "folder of the label archive", metavar="OUT"),
        DATASET,
        flag("--split", NAME, "train", "folder of the images"),
        _batch_size(32),
        *_IMAGES,
    ),
    Group("Model", *MODEL),
    Group(
        "Labels",
        flag("--top-k", POSITIVE, 5, "classes kept per cell of the map"),
        switch("--no-log-sum-exp", "without what --label-tail exact needs, a sixth smaller"),
        switch("--transfer", "the annotator's classes are not the folder's: measure no accuracy"),
        switch("--overwrite", "replace the archive in OUT, and nothing else"),
        DEBUG,
    ),
    Group("Precision and speed", *_PRECISION),
    Group("Distributed", BIND),
)

# The endings that files of predictions and of embeddings have.
_OUTPUTS, _EMBEDDING_FILES = (".csv", ".json", ".parquet"), (".safetensors", ".npz")
_PREDICT = (
    Group(
        "Images",
        flag("paths", PATH, None, "images, and folders with images at any depth", nargs="+"),
        _batch_size(64),
        # Any number of unreadable images is told and left out.
        *(row for row in _IMAGES if row.dest != "max_bad_images"),
    ),
    Group(
        "Model", *MODEL, note="--checkpoint also takes the directory of a run: its model_best.pth.tar, or last.pth.tar."
    ),
    Group(
        "Predictions",
        flag("--topk", POSITIVE, 5, "most probable classes of an image"),
        flag("-o --output", FILE, "", "write them there: .csv, .json or .parquet (a table on the terminal)"),
        flag("--class-names", FILE, "", "a name per line (the checkpoint's; ImageNet's for 1000 classes)"),
        flag("--token-maps", DIR, "", "a picture of what the dense head says of each token"),
        flag(
            "--embeddings", FILE, "", ".safetensors or .npz: features, pooled and of every token, which wait in memory"
        ),
        switch("--embeddings-pooled-only", "without the features of the tokens", needs=(EMBEDDINGS,)),
        DEBUG,
    ),
    Group("Precision and speed", *_DEVICE, OUTLOOK_KERNEL),
)


def _check_validate(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    join_data_dir(args, "DATA", "data")
    return check_images(args, flags)


def _check_predict(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    for dest, endings in (("output", _OUTPUTS), ("embeddings", _EMBEDDING_FILES)):
        if (path := getattr(args, dest)) and not path.endswith(endings):
            raise UserError(f"--{dest} {path}: end the name in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_weights(args, flags)


VALIDATE = Program(
    "validate",
    "DATA --checkpoint PATH [flags]",
    "Measure the accuracy of a checkpoint, or of every checkpoint in a folder.",
    _VALIDATE,
    _check_validate,
)
GENERATE_LABEL = Program(
    "label",
    "DATA OUT --model NAME [--checkpoint PATH | --pretrained] [flags]",
    "Write a token-label map for every image of a folder: OUT/CLASS/IMAGE.pt, or one archive.",
    _GENERATE_LABEL,
    check_images,
)
PREDICT = Program(
    "predict",
    "PATH [PATH ...] --checkpoint PATH [flags]",
    "Predict the classes of images; write token maps and features.",
    _PREDICT,
    _check_predict,
)

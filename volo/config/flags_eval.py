"""The flags of `validate.py`, `generate_label.py` and `volo predict`; what all have stands in one table.

validate.py keeps the 33 flags of the published program. `--model` has no default: a checkpoint of this project says
what it is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_rules import check_images, join_data_dir
from volo.config.flag_table import ABOVE_ZERO, COUNT, FLOAT, POSITIVE, Flag, FlagParser, Group, Need, flag, switch
from volo.config.flags_data import CLASS_MAP, DATASET, FILE_BACKENDS, INTERPOLATIONS, LIMITS, LOADING
from volo.config.flags_train import BIND, CHANNELS_LAST, COMPILE, MIXED_PRECISION, NO_TORCHSCRIPT, OUTLOOK_KERNEL, POOLS

CHECKPOINT = Need("--checkpoint", lambda a: bool(a.checkpoint))
RESULTS_FILE = Need("--results-file", lambda a: bool(a.results_file))
EMBEDDINGS = Need("--embeddings", lambda a: bool(a.embeddings))
ARCHIVE = Need("--format archive", lambda a: a.format == "archive")
MODEL = (
    flag("-m", "--model", default=None, metavar="NAME", help="model (what the checkpoint says)"),
    flag("--checkpoint", default="", metavar="PATH", help="weights: .pth, .pth.tar or .safetensors"),
    switch("--pretrained", help="the published weights"),
    switch(
        "--use-ema",
        help="the moving average in the checkpoint, an error where there is none (what training selected by)",
        needs=(CHECKPOINT,),
    ),
    switch("--no-use-ema", help="the plain weights, also where training selected by the average", needs=(CHECKPOINT,)),
    flag("--num-classes", default=None, type=POSITIVE, help="number of classes (the model's own)"),
    flag("--gp", default=None, choices=POOLS, metavar="POOL", help=f"global pooling: {', '.join(POOLS)}"),
    flag("--model-kwargs", default={}, nargs="*", key_values=True, metavar="K=V", help="more arguments for the model"),
)

PREPROCESSING = (
    flag("--img-size", default=None, type=POSITIVE, help="image side in px (the model's own)"),
    flag("--input-size", default=None, type=POSITIVE, nargs=3, help="channels, height and width in px"),
    flag("--crop-pct", default=None, type=ABOVE_ZERO, metavar="R", help="crop / resized side (the model's own)"),
    flag("--mean", default=None, type=FLOAT, nargs="+", metavar="M", help="pixel means in 0..1 (the model's own)"),
    flag("--std", default=None, type=ABOVE_ZERO, nargs="+", metavar="S", help="their deviations (the model's own)"),
    flag("--interpolation", default="", choices=INTERPOLATIONS, help="resize filter (the model's own)"),
)

_IMAGES = (
    *PREPROCESSING,
    flag("-j", "--workers", default=4, type=COUNT, help="decoding processes per rank; dali-*: threads; 0: none"),
    *LOADING,
    flag("--data-backend", default="torchvision", choices=FILE_BACKENDS, help="who decodes and resizes"),
    *LIMITS,
)

_DEVICE = (
    flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
    *MIXED_PRECISION,
    CHANNELS_LAST,
)
_PRECISION = (
    *_DEVICE,
    *COMPILE,
    OUTLOOK_KERNEL,
    switch("--torchscript", help="refused: use --torchcompile", refused=NO_TORCHSCRIPT),
    switch("--legacy-jit", help="refused: use --torchcompile", refused=NO_TORCHSCRIPT),
)

DEBUG = switch("--debug", help="show the traceback of an error that is normally told in one line")


def _batch_size(default: int) -> Flag:
    return flag("-b", "--batch-size", default=default, type=POSITIVE, help="images per device")


_VALIDATE_GROUPS = (
    Group(
        "Data",
        (
            flag("data", default=None, nargs="?", metavar="DATA", help="dataset: DATA/SPLIT/CLASS/IMAGE, or shards"),
            flag("--data-dir", default=None, metavar="DIR", renamed="data_dir_option", help="the same as a flag"),
            DATASET,
            flag("--split", default="validation", metavar="NAME", help="folder of the images (val is found too)"),
            CLASS_MAP,
            flag("--image-list", default="", metavar="FILE", help="these images alone, one CLASS/FILE a line"),
            flag("--num-samples", default=None, type=POSITIVE, help="so many images, evenly spaced over the split"),
            flag("--crop-mode", default="", choices=("", "center", "squash", "border"), help="(the model's own)"),
            _batch_size(256),
            *_IMAGES,
            switch(
                "--tf-preprocessing",
                help="refused",
                refused="TensorFlow's preprocessing is not supported: remove the flag",
            ),
        ),
    ),
    Group(
        "Model", (*MODEL, switch("--test-pool", help="test-time pooling"), switch("--no-test-pool", help="the default"))
    ),
    Group(
        "Results",
        (
            flag(
                "--real-labels", default="", metavar="FILE", help="real.json: accuracy on ImageNet's reassessed labels"
            ),
            flag(
                "--valid-labels", default="", metavar="FILE", help="class numbers, one per line: rank among these alone"
            ),
            flag("--results-file", default="", metavar="FILE", help="write the results there"),
            flag(
                "--results-format",
                default="csv",
                choices=("csv", "json"),
                help="format of --results-file",
                needs=(RESULTS_FILE,),
            ),
            flag("--log-freq", default=50, type=POSITIVE, help="batches between lines of the log"),
            switch("--retry", help="halve --batch-size where it does not fit into memory (one process)"),
            DEBUG,
        ),
    ),
    Group("Precision and speed", _PRECISION),
    Group(
        "Distributed",
        (
            flag(
                "--num-gpu",
                default=1,
                type=COUNT,
                help="1; start more with torchrun",
                refused="one process drives one GPU: torchrun --nproc-per-node N validate.py ...",
            ),
            BIND,
        ),
    ),
)

_GENERATE_LABEL_GROUPS = (
    Group(
        "Data",
        (
            flag(
                "data", default=None, metavar="DATA", help="images: DATA/SPLIT/CLASS/IMAGE, DATA/CLASS/IMAGE or shards"
            ),
            flag("token_label_root", default=None, metavar="OUT", help="folder for the label maps, or archive"),
            DATASET,
            flag("--split", default="train", metavar="NAME", help="folder of the images"),
            _batch_size(32),
            *_IMAGES,
        ),
    ),
    Group("Model", MODEL),
    Group(
        "Labels",
        (
            flag(
                "--format",
                default="tree",
                choices=("tree", "archive"),
                help="one file per image, as published (made of an archive at the end), or a label archive",
            ),
            flag("--top-k", default=5, type=POSITIVE, metavar="K", help="classes kept per place of the map"),
            switch(
                "--no-log-sum-exp",
                help="an archive without what --label-tail exact needs, a sixth smaller",
                needs=(ARCHIVE,),
            ),
            switch("--transfer", help="the annotator's classes are not the folder's: measure no accuracy"),
            switch("--overwrite", help="write label maps that exist already anew"),
            DEBUG,
        ),
    ),
    Group("Precision and speed", _PRECISION),
    Group("Distributed", (BIND,)),
)

# The endings that files of predictions and of embeddings have.
_OUTPUTS, _EMBEDDING_FILES = (".csv", ".json", ".parquet"), (".safetensors", ".npz")
_PREDICT_GROUPS = (
    Group(
        "Images",
        (
            flag("paths", default=None, nargs="+", metavar="PATH", help="images, and folders with images at any depth"),
            _batch_size(64),
            # Any number of unreadable images is told and left out.
            *(row for row in _IMAGES if row.dest != "max_bad_images"),
        ),
    ),
    Group("Model", MODEL, "--checkpoint also takes the directory of a run: its model_best.pth.tar, or last.pth.tar."),
    Group(
        "Predictions",
        (
            flag("--topk", default=5, type=POSITIVE, metavar="K", help="most probable classes of an image"),
            flag(
                "-o",
                "--output",
                default="",
                metavar="FILE",
                help="write them there: .csv, .json or .parquet (a table on the terminal)",
            ),
            flag(
                "--class-names",
                default="",
                metavar="FILE",
                help="a name per line, or JSON (the checkpoint's; ImageNet's for 1000 classes)",
            ),
            flag("--token-maps", default="", metavar="DIR", help="a picture of what the dense head says of each token"),
            flag(
                "--embeddings",
                default="",
                metavar="FILE",
                help=".safetensors or .npz: features, pooled and of every token, which wait in memory",
            ),
            switch("--embeddings-pooled-only", help="without the features of the tokens", needs=(EMBEDDINGS,)),
            DEBUG,
        ),
    ),
    Group("Precision and speed", (*_DEVICE, OUTLOOK_KERNEL)),
)


def validate_parser() -> FlagParser:
    """The parser of validate.py; use `parse_validate`, which also checks."""
    return FlagParser(
        "validate",
        "DATA --checkpoint PATH [flags]",
        "Measure the accuracy of a checkpoint, or of every checkpoint in a folder.",
        _VALIDATE_GROUPS,
    )


def generate_label_parser() -> FlagParser:
    """The parser of generate_label.py."""
    return FlagParser(
        "label",
        "DATA OUT --model NAME [--checkpoint PATH | --pretrained] [flags]",
        "Write a token-label map for every image of a folder: OUT/CLASS/IMAGE.pt, or one archive.",
        _GENERATE_LABEL_GROUPS,
    )


def predict_parser() -> FlagParser:
    """The parser of `volo predict`."""
    return FlagParser(
        "predict",
        "PATH [PATH ...] --checkpoint PATH [flags]",
        "Predict the classes of images; write token maps and features.",
        _PREDICT_GROUPS,
    )


def parse_validate(argv: Sequence[str] | None = None) -> Namespace:
    """Parse validate.py's command line. Returns and raises as `volo.config.args.parse_train` does; the data folder is
    `data`."""
    parser = validate_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    join_data_dir(args, "DATA", "data")
    args.notes = check_images(args, parser.flags)
    return args


def parse_generate_label(argv: Sequence[str] | None = None) -> Namespace:
    """Parse generate_label.py's command line. Returns and raises as `volo.config.args.parse_train` does."""
    parser = generate_label_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    args.notes = check_images(args, parser.flags)
    return args


def parse_predict(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo predict`. Returns and raises as `volo.config.args.parse_train` does."""
    parser = predict_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    for dest, endings in (("output", _OUTPUTS), ("embeddings", _EMBEDDING_FILES)):
        if (path := getattr(args, dest)) and not path.endswith(endings):
            raise UserError(f"--{dest} {path}: end the name in {', '.join(endings[:-1])} or {endings[-1]}")
    args.notes = check_images(args, parser.flags)
    return args

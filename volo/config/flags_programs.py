"""The flags of all programs except train.py.

validate.py has the 33 flags of the published program. `--model` has no default, because a checkpoint of this project
names its model.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlt.errors import UserError
from volo.config import value_types as t
from volo.config.checkpoint_files import best_or_last
from volo.config.flag_rules import check_images, check_weights, join_data_dir
from volo.config.flag_table import Flag, Group, Need, Program, flag, needing, switch
from volo.config.flags_data import (
    BAD_LABEL,
    CLASS_MAP,
    DATASET,
    DEBUG,
    DEVICE,
    FILE_BACKENDS,
    LABEL_AREA,
    LABEL_TAIL,
    LIMITS,
    LOADING,
    MODEL_KWARGS,
    POOL,
    PREPROCESSING,
    WORKERS,
)
from volo.config.flags_train import BIND, CHANNELS_LAST, COMPILE, MIXED_PRECISION, NO_TORCHSCRIPT, OUTLOOK_KERNEL

FOLDER = Need("a folder as --checkpoint", lambda a: os.path.isdir(a.checkpoint))
HEADS = Need("the heads' outputs (--knn and --probe look at features)", lambda a: not (a.knn or a.probe))
CLASSES = Need("classes of images (--probe has masks)", lambda a: not a.probe)
OWN_HEADS = Need("the whole heads (no --valid-labels, --test-pool)", lambda a: not (a.valid_labels or a.test_pool))
MODEL = (
    flag("-m --model", t.SOURCE, None, "model (what the checkpoint says)"),
    flag("--checkpoint", t.WEIGHTS, "", "weights, or the directory of a run: its best", excludes=("pretrained",)),
    switch("--pretrained", "the published weights"),
    switch("--use-ema", "the moving average in the checkpoint (what training selected by)", needs="--checkpoint"),
    switch("--no-use-ema", "the plain weights, also where training selected by the average", needs="--checkpoint"),
    flag("--num-classes", t.POSITIVE, None, "number of classes (the model's own)"),
    POOL,
    MODEL_KWARGS,
)

_IMAGES = (
    *PREPROCESSING,
    WORKERS,
    *LOADING,
    flag("--data-backend", FILE_BACKENDS, "torchvision", "what decodes and resizes images"),
    *LIMITS,
)

_DEVICE = (DEVICE, *MIXED_PRECISION, CHANNELS_LAST)
_NO_TORCHSCRIPT = (
    switch("--torchscript", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
    switch("--legacy-jit", "refused: use --torchcompile", refused=NO_TORCHSCRIPT),
)

_VALIDATE = (
    Group(
        "Data",
        flag("data", t.SOURCE, None, "dataset: DATA/SPLIT/CLASS/IMAGE, or shards", nargs="?", metavar="DATA"),
        flag("--data-dir", t.DIR, None, "the same as a flag", renamed="data_dir_option"),
        flag("--split", t.NAME, "validation", "folder of the images (val is found too)"),
        *needing(
            CLASSES,
            DATASET,
            CLASS_MAP,
            flag("--image-list", t.FILE, "", "these images alone, one CLASS/FILE a line"),
            flag("--num-samples", t.POSITIVE, None, "so many images, evenly spaced over the split"),
            flag("--crop-mode", ("", "center", "squash", "border"), "", "(the model's own)"),
        ),
        flag("-b --batch-size", t.POSITIVE, 256, "images per device"),
        *_IMAGES,
        switch("--tf-preprocessing", "refused", refused="TensorFlow's preprocessing is not supported: remove the flag"),
    ),
    Group(
        "Model",
        *MODEL,
        switch("--all", "every checkpoint in a folder; without it the best, in a run's directory", needs=FOLDER),
        switch("--test-pool", "test-time pooling", needs=HEADS),
        switch("--no-test-pool", "the default", excludes=("test_pool",)),
    ),
    Group(
        "Results",
        flag(
            "--knn", t.DIR, "", "in place of the heads: accuracy of the nearest of these training images, CLASS/IMAGE"
        ),
        flag(
            "--probe",
            ("", "seg"),
            "",
            "DATA/SPLIT/images and masks: mIoU of a linear layer on tokens",
            excludes=("knn",),
        ),
        *needing(
            "--probe",
            flag("--epochs", t.POSITIVE, None, "of its training (500 updates of 16 images, at least 10)"),
            flag("--lr", t.ABOVE_ZERO, 1e-3, "its learning rate, which falls to 0 as a cosine does"),
        ),
        *needing(
            HEADS,
            flag("--real-labels", t.FILE, "", "real.json: accuracy on ImageNet's reassessed labels"),
            flag("--valid-labels", t.FILE, "", "class numbers, one per line: rank among these alone"),
            flag("--token-label-data", t.DIR, "", "label maps of these images: measure dense_top1", needs=OWN_HEADS),
        ),
        *needing("--token-label-data", *(replace(row, needs=()) for row in (LABEL_AREA, LABEL_TAIL, BAD_LABEL))),
        flag("--confusion", t.DIR, "", "write there what is taken for what: pictures, tables", needs=HEADS),
        flag("--results-file", t.FILE, "", "write the results there"),
        flag("--results-format", ("csv", "json"), "csv", "format of --results-file", needs="--results-file"),
        flag("--log-freq", t.POSITIVE, 50, "batches between lines of the log", needs=HEADS),
        switch("--retry", "halve --batch-size where it does not fit into memory (one process)"),
        DEBUG,
    ),
    Group("Precision and speed", *_DEVICE, *needing(HEADS, *COMPILE), OUTLOOK_KERNEL, *_NO_TORCHSCRIPT),
    Group(
        "Distributed",
        flag("--num-gpu", t.COUNT, 1, "more are refused", refused="start one process per GPU with torchrun"),
        BIND,
    ),
)

_GENERATE_LABEL = (
    Group(
        "Data",
        flag("data", t.SOURCE, None, "images: DATA/SPLIT/CLASS/IMAGE, DATA/CLASS/IMAGE or shards", metavar="DATA"),
        flag("token_label_root", t.SOURCE, None, "folder of the label archive", metavar="OUT"),
        DATASET,
        flag("--split", t.NAME, "train", "folder of the images"),
        flag("-b --batch-size", t.POSITIVE, 32, "images per device"),
        *_IMAGES,
    ),
    Group("Model", *MODEL),
    Group(
        "Labels",
        flag("--top-k", t.POSITIVE, 5, "classes kept per cell of the map"),
        switch("--no-log-sum-exp", "without what --label-tail exact needs, a sixth smaller"),
        switch("--transfer", "the annotator's classes are not the folder's: measure no accuracy"),
        switch("--overwrite", "replace the archive in OUT, and nothing else"),
        DEBUG,
    ),
    Group("Precision and speed", *_DEVICE, *COMPILE, OUTLOOK_KERNEL, *_NO_TORCHSCRIPT),
    Group("Distributed", BIND),
)

# File endings for predictions and embeddings.
_OUTPUTS, _EMBEDDING_FILES = (".csv", ".json", ".parquet"), (".safetensors", ".npz")
_PREDICT = (
    Group(
        "Images",
        flag("paths", t.PATH, None, "images, and folders with images at any depth", nargs="+"),
        flag("-b --batch-size", t.POSITIVE, 64, "images per device"),
        # No limit: any number of unreadable images is reported and left out.
        *(row for row in _IMAGES if row.dest != "max_bad_images"),
    ),
    Group("Model", *MODEL),
    Group(
        "Predictions",
        flag("--topk", t.POSITIVE, 5, "most probable classes of an image"),
        flag("-o --output", t.FILE, "", "write them there: .csv, .json or .parquet (a table on the terminal)"),
        flag("--class-names", t.FILE, "", "a name per line (the checkpoint's; ImageNet's for 1000 classes)"),
        flag("--token-maps", t.DIR, "", "a picture of what the dense head says of each token"),
        flag("--embeddings", t.FILE, "", ".safetensors or .npz: pooled features and those of tokens, kept in memory"),
        switch("--embeddings-pooled-only", "without the features of the tokens", needs="--embeddings"),
        DEBUG,
    ),
    Group("Precision and speed", *_DEVICE, OUTLOOK_KERNEL),
)


def _check_validate(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    if args.probe and args.crop_pct:
        raise UserError("--probe shows whole images, squashed to the model's size: leave --crop-pct out")
    join_data_dir(args, "DATA", "data")
    # A folder of checkpoints means all of them, as in the published program.
    args.all = args.all or (FOLDER.met(args) and best_or_last(args.checkpoint) is None)
    return check_images(args, flags)


def _check_predict(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    for dest, endings in (("output", _OUTPUTS), ("embeddings", _EMBEDDING_FILES)):
        if (path := getattr(args, dest)) and not path.endswith(endings):
            raise UserError(f"--{dest} {path}: end the name in {', '.join(endings[:-1])} or {endings[-1]}")
    return check_weights(args, flags)


VALIDATE = Program(
    "validate",
    "DATA --checkpoint PATH [flags]",
    "Measure the accuracy of a checkpoint. Of a run's directory it is the best; --all measures all of a folder.",
    _VALIDATE,
    _check_validate,
)
GENERATE_LABEL = Program(
    "label",
    "DATA OUT --model NAME [--checkpoint PATH | --pretrained] [flags]",
    "Write a token-label map for every image. OUT gets files CLASS/IMAGE.pt, or is one archive.",
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

# File endings by format.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, and so the most widely supported


_EXPORT = (
    Group(
        "File",
        flag("-o --output", t.FILE, "", "file to write; it must not exist"),
        flag("--format", tuple(ENDINGS), None, "ONNX or torch.export's .pt2 (what the file's ending says)"),
        flag("--opset", t.Number(int, low=OPSET), OPSET, "of ONNX"),
        flag("--to-hf", t.DIR, "", "a folder for the Hugging Face Hub in place of a file"),
        flag("--licence --license", t.NAME, "", "for the model card", needs="--to-hf"),
        flag("--origin-url", t.TEXT, "", "for the model card", metavar="URL", needs="--to-hf"),
        switch("--dense", "two outputs: class logits (B, K) and token logits (B, N, K)"),
        flag("--model-dtype", ("float32", "float16", "bfloat16"), "float32", "of weights and arithmetic"),
        DEBUG,
    ),
    Group("Model", *MODEL),
    Group("Images", *PREPROCESSING, note="The size is the file's; the rest is only recorded in it."),
)


def _check_export(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    if args.to_hf and (args.output or args.format or args.dense or args.model_dtype != "float32"):
        raise UserError("--to-hf writes the weights as they are: leave out -o, --format, --dense and --model-dtype")
    args.format = None if args.to_hf else _format(args.output, args.format)
    if args.opset != OPSET and args.format != "onnx":
        raise UserError(f"--opset {args.opset} has no effect without --format onnx")
    if args.model_dtype == "bfloat16" and args.format == "onnx":
        raise UserError("--model-dtype bfloat16: no ONNX runtime has a bfloat16 convolution; use float16, or a .pt2")
    return check_weights(args, flags)


def _format(output: str, asked: str | None) -> str:
    if not output:
        raise UserError("-o FILE is missing: where shall the model go?")
    meant = next((name for name, ending in ENDINGS.items() if output.endswith(ending)), None)
    if asked is None and meant is None:
        raise UserError(f"-o {output}: which format? Let it end in {' or '.join(ENDINGS.values())}, or give --format")
    if asked and meant and asked != meant:
        raise UserError(f"--format {asked} contradicts -o {output}: its files end in {ENDINGS[asked]}")
    return asked or meant or ""


EXPORT = Program(
    "export",
    "-o FILE --checkpoint PATH [flags]",
    "Write a trained model as a file that runs without this project. It is ONNX, or torch.export's .pt2.",
    _EXPORT,
    _check_export,
)


ATTENTION = Program(
    "attention",
    "IMAGE -o FILE --checkpoint PATH [flags]",
    "Draw what the attention layers of VOLO or LV-ViT look at.",
    (
        Group(
            "Pictures",
            flag("image", t.SOURCE, None, "image file", metavar="IMAGE"),
            flag("-o --output", t.FILE, "", "picture", required="where shall the picture go?"),
            flag("--query", t.SHARE, [0.5, 0.5], "place looked from: x, y shares", nargs=2),
        ),
        Group("Model", *MODEL),
        Group("Images and device", *PREPROCESSING, DEVICE, DEBUG),
    ),
    check_weights,
)

REPORT = Program(
    "report",
    "RUN [flags]",
    "Report what happened to a run: starts, speed, checkpoints, faults.",
    (
        Group(
            "Report",
            flag("run", t.SOURCE, None, "directory of a run", metavar="RUN"),
            switch("--quick", "don't read the checkpoints through to verify them"),
            switch("--html", "also write RUN/report.html: these texts, the curves, the first batch, the settings"),
            DEBUG,
        ),
    ),
)

SLURM = Program(
    "slurm",
    "DIR",
    "Write batch scripts for Slurm and recipes into a folder.",
    (Group("Slurm", flag("directory", t.SOURCE, None, "a new folder", metavar="DIR"), DEBUG),),
)

SAMPLE = Program(
    "sample",
    "DIR",
    "Write a folder of images to try everything with: scans of digits.",
    (
        Group(
            "Sample",
            flag("directory", t.SOURCE, None, "a new folder", metavar="DIR"),
            flag("--images", t.POSITIVE, None, "how many, a fifth of them held out (all 1,797)"),
            DEBUG,
        ),
    ),
)


class _Launch(Program):
    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """Parse the first word, and leave the other words to the program that is started.

        Returns:
            `processes`, `command` and its `flags`.

        Raises:
            UserError: The number of processes is missing.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        args = super().parse(words[:1])
        is_program = words[1:2] in (["train"], ["label"], ["validate"], ["preflight"])
        args.command, args.flags = (words[1], words[2:]) if is_program else ("train", words[1:])
        return args


LAUNCH = _Launch(
    "launch",
    "N [train|label|validate|preflight] [DATA] [flags of that command]",
    "Start a command in N processes of this machine. It is train unless another is named, as in distributed_train.sh. "
    "Several machines and other settings: variables of the environment, docs/multinode.md.",
    (Group("Launch", flag("processes", t.POSITIVE, None, "how many, one per GPU")),),
)


PUSH = Program(
    "push",
    "ORG/NAME --from DIR",
    "Upload a model to the Hugging Face Hub.",
    (
        Group(
            "Push",
            flag("repository", t.TEXT, None, "on the Hub; it is made where it is not there", metavar="ORG/NAME"),
            flag(
                "--from",
                t.DIR,
                "",
                "what volo export --to-hf wrote",
                renamed="folder",
                required="the folder that volo export --to-hf wrote",
            ),
            switch("--private", "make the repository private"),
            flag("--revision", t.NAME, "", "branch (main)"),
            flag("--message", t.TEXT, "Upload model", "of the commit"),
            switch("--dry-run", "list the files, send nothing"),
            DEBUG,
        ),
    ),
)

PREFLIGHT = Program(
    "preflight",
    "[flags]   (as many processes as the run will have)",
    "Check that the machines are fit for a run.",
    (
        Group(
            "What the run needs",
            flag("--data", t.PATH, [], "images and labels: readable, equal on all nodes", nargs="+"),
            flag("--output", t.DIR, None, "where checkpoints go: writable, see --free-gb"),
            flag("--free-gb", t.AMOUNT, 20.0, "free space that --output must have", metavar="GB", needs="--output"),
            flag("--shm-gb", t.AMOUNT, 1.0, "free /dev/shm per rank, for data workers", metavar="GB"),
            flag("--min-bandwidth", t.ABOVE_ZERO, None, "bus bandwidth per process, all-reduce", metavar="GB/S"),
        ),
        Group(
            "Ranks and output",
            DEVICE,
            BIND,
            flag("--timeout", t.Number(float, 1, 3600), 120.0, "wait this long for all ranks", metavar="S"),
            DEBUG,
        ),
    ),
)

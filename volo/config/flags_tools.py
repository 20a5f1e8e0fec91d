"""The flags of `volo export`, `attention`, `report`, `launch`, `slurm`, `push` and `preflight`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence

from tlt.errors import UserError
from volo.config.flag_rules import check_weights
from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    DIR,
    FILE,
    NAME,
    PATH,
    POSITIVE,
    SHARE,
    TEXT,
    Flag,
    Group,
    Need,
    Number,
    Program,
    flag,
    switch,
)
from volo.config.flags_data import DEBUG, DEVICE, PREPROCESSING
from volo.config.flags_eval import MODEL
from volo.config.flags_train import BIND

# The endings that files of a format have.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, so the one that most runtimes know

TO_HF = Need("--to-hf", lambda a: bool(a.to_hf))

_EXPORT = (
    Group(
        "File",
        flag("-o --output", FILE, "", "file to write; it must not exist"),
        flag("--format", tuple(ENDINGS), None, "ONNX or torch.export's .pt2 (what the file's ending says)"),
        flag("--opset", Number(int, low=OPSET), OPSET, "of ONNX"),
        flag("--to-hf", DIR, "", "a folder for the Hugging Face Hub in place of a file"),
        flag("--licence --license", NAME, "", "for the model card", needs=(TO_HF,)),
        flag("--origin-url", TEXT, "", "for the model card", metavar="URL", needs=(TO_HF,)),
        switch("--dense", "two outputs: class logits (B, K) and token logits (B, N, K)"),
        flag(
            "--model-dtype",
            ("float32", "float16", "bfloat16"),
            "float32",
            "type of weights and arithmetic; images and logits are float32 in all",
        ),
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
    "Write a trained model as a file that runs without this project: ONNX, or torch.export's .pt2.",
    _EXPORT,
    _check_export,
)


def _check_attention(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    if not args.output:
        raise UserError("-o FILE is missing: where shall the picture go?")
    return check_weights(args, flags)


ATTENTION = Program(
    "attention",
    "IMAGE -o FILE --checkpoint PATH [flags]",
    "Draw what the attention layers of a VOLO or LV-ViT look at in an image.",
    (
        Group(
            "Pictures",
            flag("image", TEXT, None, "image file", metavar="IMAGE"),
            flag("-o --output", FILE, "", "picture"),
            flag("--query", SHARE, [0.5, 0.5], "place looked from: x, y shares", nargs=2),
        ),
        Group("Model", *MODEL),
        Group("Images and device", *PREPROCESSING, DEVICE, DEBUG),
    ),
    _check_attention,
)

REPORT = Program(
    "report",
    "RUN [flags]",
    "Report what happened to a run: starts, speed, checkpoints, faults.",
    (
        Group(
            "Report",
            flag("run", TEXT, None, "directory of a run", metavar="RUN"),
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
    (Group("Slurm", flag("directory", TEXT, None, "a new folder", metavar="DIR"), DEBUG),),
)

# The first word alone; the others belong to the program that is started.
LAUNCH = Program(
    "launch",
    "N [train|label|validate|preflight] [DATA] [flags of that command]",
    "Start a command, train unless another is named, in N processes of this machine, as distributed_train.sh does. "
    "Several machines and other settings: variables of the environment, docs/multinode.md.",
    (Group("Launch", flag("processes", POSITIVE, None, "how many, one per GPU")),),
)


def parse_launch(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo launch`.

    Returns:
        `processes`, `command` and its `flags`.

    Raises:
        UserError: No number of processes.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = LAUNCH.parse(words[:1])
    named = words[1:2] in (["train"], ["label"], ["validate"], ["preflight"])
    args.command, args.flags = (words[1], words[2:]) if named else ("train", words[1:])
    return args


def _check_push(args: Namespace, flags: Mapping[str, Flag]) -> list[str]:
    if not args.folder:
        raise UserError("--from DIR is missing: the folder that volo export --to-hf wrote")
    return []


PUSH = Program(
    "push",
    "ORG/NAME --from DIR",
    "Upload a model to the Hugging Face Hub.",
    (
        Group(
            "Push",
            flag("repository", TEXT, None, "on the Hub; it is made where it is not there", metavar="ORG/NAME"),
            flag("--from", DIR, "", "what volo export --to-hf wrote", renamed="folder"),
            switch("--private", "make the repository private"),
            flag("--revision", NAME, "", "branch (main)"),
            flag("--message", TEXT, "Upload model", "of the commit"),
            switch("--dry-run", "list the files, send nothing"),
            DEBUG,
        ),
    ),
    _check_push,
)

_OUTPUT = Need("--output", lambda a: bool(a.output))
PREFLIGHT = Program(
    "preflight",
    "[flags]   (as many processes as the run will have)",
    "Check that the machines are fit for a run.",
    (
        Group(
            "What the run needs",
            flag("--data", PATH, [], "images and labels: readable, equal on all nodes", nargs="+"),
            flag("--output", DIR, None, "where checkpoints go: writable, see --free-gb"),
            flag("--free-gb", AMOUNT, 20.0, "free space that --output must have", metavar="GB", needs=(_OUTPUT,)),
            flag("--shm-gb", AMOUNT, 1.0, "free /dev/shm per rank, for data workers", metavar="GB"),
            flag(
                "--min-bandwidth",
                ABOVE_ZERO,
                None,
                "of the all-reduce over all ranks, as bus bandwidth per process",
                metavar="GB/S",
            ),
        ),
        Group(
            "Ranks and output",
            DEVICE,
            BIND,
            flag("--timeout", Number(float, 1, 3600), 120.0, "wait this long for all ranks", metavar="S"),
            DEBUG,
        ),
    ),
)

"""The flags of `volo export`, `attention`, `report`, `launch`, `slurm`, `completion`, `push` and `preflight`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_rules import check_pixels, check_weights
from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    POSITIVE,
    SHARE,
    FlagParser,
    Group,
    Need,
    Number,
    check_flags,
    flag,
    switch,
)
from volo.config.flags_eval import DEBUG, MODEL, PREPROCESSING
from volo.config.flags_train import BIND

# The endings that files of a format have.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, so the one that most runtimes know

TO_HF = Need("--to-hf", lambda a: bool(a.to_hf))

_EXPORT_GROUPS = (
    Group(
        "File",
        (
            flag("-o", "--output", default="", metavar="FILE", help="file to write; it must not exist"),
            flag(
                "--format",
                default=None,
                choices=tuple(ENDINGS),
                help="ONNX or torch.export's .pt2 (what the file's ending says)",
            ),
            flag("--opset", default=OPSET, type=Number(int, low=OPSET), metavar="N", help="of ONNX"),
            flag("--to-hf", default="", metavar="DIR", help="a folder for the Hugging Face Hub in place of a file"),
            flag("--licence", "--license", default="", metavar="NAME", help="for the model card", needs=(TO_HF,)),
            flag("--origin-url", default="", metavar="URL", help="for the model card", needs=(TO_HF,)),
            switch("--dense", help="two outputs: class logits (B, K) and token logits (B, N, K)"),
            flag(
                "--model-dtype",
                default="float32",
                choices=("float32", "float16", "bfloat16"),
                help="type of weights and arithmetic; images and logits are float32 in all",
            ),
            DEBUG,
        ),
    ),
    Group("Model", MODEL),
    Group("Images", PREPROCESSING, "The size is the file's; the rest is only recorded in it."),
)


def export_parser() -> FlagParser:
    """The parser of `volo export`; use `parse_export`, which also checks."""
    return FlagParser(
        "export",
        "-o FILE --checkpoint PATH [flags]",
        "Write a trained model as a file that runs without this project: ONNX, or torch.export's .pt2.",
        _EXPORT_GROUPS,
    )


def parse_export(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo export`. Returns one attribute per flag, and `notes`, lines to print.

    Raises:
        UserError: A wrong or unknown flag, no output, format or model, a contradiction, or a flag without effect.
    """
    parser = export_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    if args.to_hf and (args.output or args.format or args.dense or args.model_dtype != "float32"):
        raise UserError("--to-hf writes the weights as they are: leave out -o, --format, --dense and --model-dtype")
    args.format = None if args.to_hf else _format(args.output, args.format)
    if args.opset != OPSET and args.format != "onnx":
        raise UserError(f"--opset {args.opset} has no effect without --format onnx")
    if args.model_dtype == "bfloat16" and args.format == "onnx":
        raise UserError("--model-dtype bfloat16: no ONNX runtime has a bfloat16 convolution; use float16, or a .pt2")
    check_pixels(args)
    args.notes = check_weights(args, parser.flags)
    return args


def _format(output: str, asked: str | None) -> str:
    if not output:
        raise UserError("-o FILE is missing: where shall the model go?")
    meant = next((name for name, ending in ENDINGS.items() if output.endswith(ending)), None)
    if asked is None and meant is None:
        raise UserError(f"-o {output}: which format? Let it end in {' or '.join(ENDINGS.values())}, or give --format")
    if asked and meant and asked != meant:
        raise UserError(f"--format {asked} contradicts -o {output}: its files end in {ENDINGS[asked]}")
    return asked or meant or ""


_ATTENTION_GROUPS = (
    Group(
        "Pictures",
        (
            flag("image", default=None, metavar="IMAGE", help="image file"),
            flag("-o", "--output", default="", metavar="FILE", help="picture"),
            flag(
                "--query", default=[0.5, 0.5], type=SHARE, nargs=2, metavar="R", help="place looked from: x, y shares"
            ),
        ),
    ),
    Group("Model", MODEL),
    Group(
        "Images and device",
        (
            *PREPROCESSING,
            flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
            DEBUG,
        ),
    ),
)


def attention_parser() -> FlagParser:
    """The parser of `volo attention`; use `parse_attention`, which also checks."""
    return FlagParser(
        "attention",
        "IMAGE -o FILE --checkpoint PATH [flags]",
        "Draw what the attention layers of a VOLO or LV-ViT look at in an image.",
        _ATTENTION_GROUPS,
    )


def parse_attention(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo attention`. Returns one attribute per flag, and `notes`, lines to print.

    Raises:
        UserError: An unknown flag, a wrong value, no output, no model, or a flag that would have no effect.
    """
    parser = attention_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    if not args.output:
        raise UserError("-o FILE is missing: where shall the picture go?")
    args.notes = check_weights(args, parser.flags)
    return args


_REPORT_GROUPS = (
    Group(
        "Report",
        (
            flag("run", default=None, metavar="RUN", help="directory of a run"),
            switch("--quick", help="don't read the checkpoints through to verify them"),
            switch("--html", help="also write RUN/report.html: these texts, the curves, the first batch, the settings"),
            DEBUG,
        ),
    ),
)


def report_parser() -> FlagParser:
    """The parser of volo report."""
    return FlagParser(
        "report", "RUN [flags]", "Report what happened to a run: starts, speed, checkpoints, faults.", _REPORT_GROUPS
    )


def parse_report(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo report`.

    Raises:
        UserError: An unknown flag, or no RUN.
    """
    args: Namespace = report_parser().parse_args(argv)
    return args


SHELLS = ("bash", "zsh", "tcsh")
_SLURM_GROUPS = (Group("Slurm", (flag("directory", default=None, metavar="DIR", help="a new folder"), DEBUG)),)
_COMPLETION_GROUPS = (
    Group("Completion", (flag("shell", default=None, choices=SHELLS, help="whose language the script is in"), DEBUG)),
)


def slurm_parser() -> FlagParser:
    """The parser of `volo slurm`."""
    return FlagParser("slurm", "DIR", "Write batch scripts for Slurm and recipes into a folder.", _SLURM_GROUPS)


def parse_slurm(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo slurm`. Raises UserError: no folder, or an unknown flag."""
    args: Namespace = slurm_parser().parse_args(argv)
    return args


def completion_parser() -> FlagParser:
    """The parser of `volo completion`."""
    return FlagParser(
        "completion",
        "SHELL",
        "Print a script that completes volo's commands and flags: source <(volo completion bash).",
        _COMPLETION_GROUPS,
    )


def parse_completion(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo completion`. Raises UserError: no such shell, or an unknown flag."""
    args: Namespace = completion_parser().parse_args(argv)
    return args


def launch_parser() -> FlagParser:
    """The parser of the first word of `volo launch`; the others belong to the program that is started."""
    processes = flag("processes", default=None, type=POSITIVE, help="how many, one per GPU")
    return FlagParser(
        "launch",
        "N [train|label|validate|preflight] [DATA] [flags of that command]",
        "Start a command, train unless another is named, in N processes of this machine, as distributed_train.sh does. "
        "Several machines and other settings: variables of the environment, docs/multinode.md.",
        (Group("Launch", (processes,)),),
    )


def parse_launch(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo launch`.

    Returns:
        `processes`, `command` and its `flags`.

    Raises:
        UserError: No number of processes.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args: Namespace = launch_parser().parse_args(words[:1])
    named = words[1:2] in (["train"], ["label"], ["validate"], ["preflight"])
    args.command, args.flags = (words[1], words[2:]) if named else ("train", words[1:])
    return args


_PUSH_GROUPS = (
    Group(
        "Push",
        (
            flag("repository", default=None, metavar="ORG/NAME", help="on the Hub; it is made where it is not there"),
            flag("--from", default="", metavar="DIR", renamed="folder", help="what volo export --to-hf wrote"),
            switch("--private", help="make the repository private"),
            flag("--revision", default="", metavar="NAME", help="branch (main)"),
            flag("--message", default="Upload model", metavar="TEXT", help="of the commit"),
            switch("--dry-run", help="list the files, send nothing"),
            DEBUG,
        ),
    ),
)


def push_parser() -> FlagParser:
    """The parser of `volo push`."""
    return FlagParser("push", "ORG/NAME --from DIR", "Upload a model to the Hugging Face Hub.", _PUSH_GROUPS)


def parse_push(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo push`. Raises UserError: no repository or no folder."""
    args: Namespace = push_parser().parse_args(argv)
    if not args.folder:
        raise UserError("--from DIR is missing: the folder that volo export --to-hf wrote")
    return args


_WAIT = Number(float, low=1, high=3600)  # s

_PREFLIGHT_GROUPS = (
    Group(
        "What the run needs",
        (
            flag(
                "--data", default=[], nargs="+", metavar="PATH", help="images and labels: readable, equal on all nodes"
            ),
            flag("--output", default=None, metavar="DIR", help="where checkpoints go: writable, see --free-gb"),
            flag(
                "--free-gb",
                default=20.0,
                type=AMOUNT,
                metavar="GB",
                help="free space that --output must have",
                needs=(Need("--output", lambda a: bool(a.output)),),
            ),
            flag("--shm-gb", default=1.0, type=AMOUNT, metavar="GB", help="free /dev/shm per rank, for data workers"),
            flag(
                "--min-bandwidth",
                default=None,
                type=ABOVE_ZERO,
                metavar="GB/S",
                help="of the all-reduce over all ranks, as bus bandwidth per process",
            ),
        ),
    ),
    Group(
        "Ranks and output",
        (
            flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
            BIND,
            flag("--timeout", default=120.0, type=_WAIT, metavar="S", help="wait this long for all ranks"),
            DEBUG,
        ),
    ),
)


def preflight_parser() -> FlagParser:
    """Return the parser of `volo preflight`."""
    usage = "[flags]   (as many processes as the run will have)"
    return FlagParser("preflight", usage, "Check that the machines are fit for a run.", _PREFLIGHT_GROUPS)


def parse_preflight(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of the preflight. Returns one attribute per flag, and `notes`, lines to print.

    Raises:
        UserError: A flag is unknown or has no effect.
    """
    parser = preflight_parser()
    args: Namespace = parser.parse_args(argv)
    check_flags(args, parser.flags)
    args.notes = []
    return args

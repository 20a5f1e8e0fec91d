"""The flags of `volo export`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tlt.errors import UserError
from volo.config.flag_rules import check_pixels, check_weights
from volo.config.flag_table import FlagParser, Group, Number, flag, switch
from volo.config.flags_eval import MODEL, PREPROCESSING

# The endings that files of a format have.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 18  # the lowest that torch's exporter writes, so the one that most runtimes know

GROUPS = (
    Group(
        "File",
        (
            flag("-o", "--output", default="", metavar="FILE", help="file to write; it must not exist"),
            flag(
                "--format",
                default=None,
                choices=tuple(ENDINGS),
                help="ONNX, or torch.export's .pt2 (what the file's ending says)",
            ),
            flag("--opset", default=OPSET, type=Number(int, low=OPSET), metavar="N", help="of ONNX"),
            switch("--dense", help="two outputs: class logits (B, K) and token logits (B, N, K)"),
            flag(
                "--model-dtype",
                default="float32",
                choices=("float32", "float16", "bfloat16"),
                help="type of weights and arithmetic; images and logits are float32 in all",
            ),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
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
        GROUPS,
    )


def parse_export(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line of `volo export`. Returns one attribute per flag, and `notes`, lines to print.

    Raises:
        UserError: A wrong or unknown flag, no output, format or model, a contradiction, or a flag without effect.
    """
    parser = export_parser()
    args = Namespace(**(parser.defaults() | parser.explicit(argv)))
    args.format = _format(args.output, args.format)
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

"""`volo COMMAND`: the table of programs, and how they start.

Flags are parsed before torch is imported, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import NamedTuple

from tlt._version import __version__
from tlt.errors import UserError
from volo.cluster.stopping import STOP
from volo.commands.console import run_program
from volo.config.flag_table import nearest


class Program(NamedTuple):
    """A program: what it does, the function that parses its command line, and the module with its `run(args)`."""

    does: str
    parser: str
    program: str


COMMANDS = {
    "train": Program("train a model (train.py)", "volo.config.args:parse_train", "volo.commands.train"),
    "validate": Program(
        "measure the accuracy of checkpoints (validate.py)",
        "volo.config.flags_eval:parse_validate",
        "volo.commands.validate",
    ),
    "label": Program(
        "write token labels for a folder of images (generate_label.py)",
        "volo.config.flags_eval:parse_generate_label",
        "volo.commands.generate_label",
    ),
    "predict": Program(
        "classes, token maps and features of images", "volo.config.flags_eval:parse_predict", "volo.commands.predict"
    ),
    "export": Program(
        "write a model as ONNX or torch.export", "volo.config.flags_tools:parse_export", "volo.commands.export"
    ),
    "push": Program(
        "upload a model to the Hugging Face Hub", "volo.config.flags_tools:parse_push", "volo.commands.push"
    ),
    "report": Program("what happened to a run", "volo.config.flags_tools:parse_report", "volo.commands.report"),
    "attention": Program(
        "draw what the attention layers look at",
        "volo.config.flags_tools:parse_attention",
        "volo.commands.attention",
    ),
    "launch": Program(
        "start `volo train` in several processes (distributed_train.sh)",
        "volo.config.flags_tools:parse_launch",
        "volo.commands.launch",
    ),
    "slurm": Program(
        "write the batch scripts for Slurm into a folder", "volo.config.flags_tools:parse_slurm", "volo.commands.slurm"
    ),
    "completion": Program(
        "print a script that completes these commands in a shell",
        "volo.config.flags_tools:parse_completion",
        "volo.completion",
    ),
    "preflight": Program(
        "are these machines fit for a run?",
        "volo.config.flags_tools:parse_preflight",
        "volo.cluster.preflight",
    ),
}


def main() -> int:
    """`volo COMMAND [flags]`. Returns the exit code."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: volo COMMAND [flags]      volo COMMAND --help      volo --version\n")
        print("\n".join(f"  {name:<12}{command.does}" for name, command in COMMANDS.items()))
        return 0
    if name == "--version":
        print(f"volo-tlt {__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"error: volo {name}: no such command, {hint} (see volo --help)", file=sys.stderr)
        return UserError.exit_code
    return run(name, flags)


def run(name: str, flags: Sequence[str] | None = None) -> int:
    """Run a program and return its exit code.

    Args:
        name: A key of `COMMANDS`.
        flags: None: those of the command line, after a script such as `python train.py` was started.
    """
    command = COMMANDS[name]
    # A training run handles signals from the start.
    with STOP.handled() if name == "train" else nullcontext():
        return run_program(partial(_parse, command), command.program, flags)


def _parse(command: Program, flags: Sequence[str] | None) -> Namespace:
    module, _, function = command.parser.partition(":")
    parsed: Namespace = getattr(import_module(module), function)(flags)
    return parsed

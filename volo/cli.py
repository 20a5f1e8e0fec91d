"""`volo COMMAND`: the table of programs, and how they start.

Flags are parsed before torch is imported, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from tlt._version import __version__
from tlt.errors import UserError
from volo.cluster.stopping import STOP
from volo.commands.console import run_program
from volo.config.args import TRAIN, parse_train
from volo.config.flag_table import SCRIPTS, Program, nearest
from volo.config.flags_eval import GENERATE_LABEL, PREDICT, VALIDATE
from volo.config.flags_tools import ATTENTION, EXPORT, LAUNCH, PREFLIGHT, PUSH, REPORT, SLURM, parse_launch


class Command(NamedTuple):
    """A program, the function that parses its command line, and the module with its `run(args)`."""

    program: Program
    parse: Callable[[Sequence[str] | None], Namespace]
    module: str


COMMANDS = {
    "train": Command(TRAIN, parse_train, "volo.commands.train"),
    "validate": Command(VALIDATE, VALIDATE.parse, "volo.commands.validate"),
    "label": Command(GENERATE_LABEL, GENERATE_LABEL.parse, "volo.commands.generate_label"),
    "predict": Command(PREDICT, PREDICT.parse, "volo.commands.predict"),
    "export": Command(EXPORT, EXPORT.parse, "volo.commands.export"),
    "push": Command(PUSH, PUSH.parse, "volo.commands.hub"),
    "report": Command(REPORT, REPORT.parse, "volo.commands.report"),
    "attention": Command(ATTENTION, ATTENTION.parse, "volo.commands.attention"),
    "launch": Command(LAUNCH, parse_launch, "volo.commands.launch"),
    "slurm": Command(SLURM, SLURM.parse, "volo.commands.slurm"),
    "preflight": Command(PREFLIGHT, PREFLIGHT.parse, "volo.cluster.preflight"),
}


def main() -> int:
    """`volo COMMAND [flags]`. Returns the exit code."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: volo COMMAND [flags]      volo COMMAND --help      volo --version\n")
        for name, command in COMMANDS.items():
            script = f" ({SCRIPTS[name]})" if name in SCRIPTS else ""
            print(f"  {name:<12}{command.program.does.partition('. ')[0].rstrip('.')}{script}")
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
        return run_program(command.parse, command.module, flags)

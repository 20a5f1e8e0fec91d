"""`volo COMMAND`: the table of programs, and how they start.

Flags are parsed before torch is imported, so that `--help` and error messages come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NamedTuple

from tlt import __version__
from tlt.errors import UserError
from volo.cluster.stopping import STOP
from volo.commands.console import run_program
from volo.config.flag_table import SCRIPTS, Program, nearest


class Command(NamedTuple):
    """Where a program's flags and its module with `run(args)` are found. Both are imported only when they are used."""

    flags: str
    module: str

    @property
    def program(self) -> Program:
        """The program's name, flags and checks."""
        module, _, name = self.flags.partition(":")
        return getattr(import_module(module), name)


_OTHERS = "volo.config.flags_programs"
COMMANDS = {
    "train": Command("volo.config.args:TRAIN", "volo.commands.train"),
    "validate": Command(f"{_OTHERS}:VALIDATE", "volo.commands.validate"),
    "label": Command(f"{_OTHERS}:GENERATE_LABEL", "volo.commands.generate_label"),
    "predict": Command(f"{_OTHERS}:PREDICT", "volo.commands.predict"),
    "export": Command(f"{_OTHERS}:EXPORT", "volo.commands.export"),
    "push": Command(f"{_OTHERS}:PUSH", "volo.commands.hub"),
    "report": Command(f"{_OTHERS}:REPORT", "volo.commands.report"),
    "attention": Command(f"{_OTHERS}:ATTENTION", "volo.commands.attention"),
    "sample": Command(f"{_OTHERS}:SAMPLE", "volo.commands.sample"),
    "launch": Command(f"{_OTHERS}:LAUNCH", "volo.commands.launch"),
    "slurm": Command(f"{_OTHERS}:SLURM", "volo.commands.slurm"),
    "preflight": Command(f"{_OTHERS}:PREFLIGHT", "volo.cluster.preflight"),
}


def main() -> int:
    """Run `volo COMMAND [flags]` and return its exit code."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = ["usage: volo COMMAND [flags]      volo COMMAND --help      volo --version\n"]
        for name, command in COMMANDS.items():
            script = f" ({SCRIPTS[name]})" if name in SCRIPTS else ""
            lines.append(f"  {name:<12}{command.program.does.partition('. ')[0].rstrip('.')}{script}")
        print("\n".join(lines))  # in one write, so that a reader that stops early (`| head`) breaks no pipe
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
        flags: Words of the command line after the program's name; None takes them from sys.argv.
    """
    command = COMMANDS[name]
    # Training handles signals from its very start.
    with STOP.handled() if name == "train" else nullcontext():
        return run_program(command.program.parse, command.module, flags)

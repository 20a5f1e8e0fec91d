"""`volo COMMAND`: the table of programs, and how they start.

Flags are parsed before torch is imported, so that `--help` and error messages come at once.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from tlt import __version__
from tlt.errors import UserError
from volo.cluster.stopping import STOP
from volo.commands.console import run_program
from volo.config import settings_evaluate as evaluate
from volo.config import settings_tools as tools
from volo.config.parser import SCRIPTS, Program, nearest
from volo.config.train import TRAIN


class Command(NamedTuple):
    """A program's name, flags and checks, and its module with `run(settings)`, which is imported only when it runs."""

    program: Program[Any]
    module: str


COMMANDS = {
    command.program.name: command
    for command in (
        Command(TRAIN, "volo.commands.train"),
        Command(evaluate.VALIDATE, "volo.commands.validate"),
        Command(evaluate.GENERATE_LABEL, "volo.commands.generate_label"),
        Command(evaluate.FEATURES, "volo.commands.features"),
        Command(evaluate.PREDICT, "volo.commands.predict"),
        Command(tools.EXPORT, "volo.commands.export"),
        Command(tools.PUSH, "volo.commands.hub"),
        Command(tools.REPORT, "volo.commands.report"),
        Command(tools.ATTENTION, "volo.commands.attention"),
        Command(tools.SAMPLE, "volo.commands.sample"),
        Command(tools.LAUNCH, "volo.commands.launch"),
        Command(tools.SLURM, "volo.commands.slurm"),
        Command(tools.PREFLIGHT, "volo.cluster.preflight"),
    )
}


def main() -> int:
    """Run `volo COMMAND [flags]` and return its exit code."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = ["usage: volo COMMAND [flags]      volo COMMAND --help      volo --version\n"]
        for name, command in COMMANDS.items():
            script = f" ({SCRIPTS[name]})" if name in SCRIPTS else ""
            lines.append(f"  {name:<12}{command.program.description.partition('. ')[0].rstrip('.')}{script}")
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
    return run(name, words)


def run(name: str, words: Sequence[str] | None = None) -> int:
    """Run a program and return its exit code.

    Args:
        name: A key of `COMMANDS`.
        words: Those of the command line after the program's name; None takes them from sys.argv.
    """
    command = COMMANDS[name]
    # Training handles signals from its very start.
    with STOP.handled() if name == "train" else nullcontext():
        return run_program(command.program.parse, command.module, words)

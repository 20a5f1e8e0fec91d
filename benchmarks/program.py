"""`python benchmark.py COMMAND [flags]`: each command is a module of `benchmarks` that answers one question.

    step       training steps: ours, timm's VOLO, and ours with other settings
    infer      inference, likewise
    outlook    outlook attention: each kernel of ours and timm's
    data       from image files to augmented batches: ours and timm's loader
    run        whole programs, from image files: ours and timm's train.py
    ablation   do labels at the right place make a better model? (hours on a CPU)

A module's flags are its FLAGS, and its `run(args)` measures.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from volo.config.flag_table import FlagParser, Group, flag

COMMANDS = ("step", "infer", "outlook", "data", "run", "ablation")


def module_of(command: str) -> Any:
    """Import and return the module of a command."""
    return importlib.import_module(f"benchmarks.{command}")


def benchmark_parser(command: str | None = None) -> FlagParser:
    """The parser of one command, or of the program itself."""
    if command is None:
        row = flag("command", COMMANDS, None, "what to measure")
        return FlagParser("python benchmark.py", "COMMAND [flags]", "Measure this machine.", (Group("Command", row),))
    module = module_of(command)
    description = module.__doc__.partition("\n")[0]
    return FlagParser(f"python benchmark.py {command}", "[flags]", description, module.FLAGS)


def parse_benchmark(argv: Sequence[str] | None = None) -> Namespace:
    """Return one attribute per flag, `command`, and the `command_line` as typed.

    Raises:
        UserError: An unknown command or flag, or a wrong value.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    command = words[0] if words and words[0] in COMMANDS else benchmark_parser().parse_args(words).command
    args = benchmark_parser(command).parse_args(words[1:])
    return Namespace(command=command, command_line=shlex.join(["benchmark.py", *words]), **vars(args))


def run(args: Namespace) -> int:
    """Measure."""
    module_of(args.command).run(args)
    return 0

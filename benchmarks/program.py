"""`python benchmark.py COMMAND [flags]`: each command is a module of `benchmarks` that answers one question.

    step       training steps: ours, timm's VOLO, and ours with other settings
    infer      inference, likewise
    features   what a stored teacher costs: its steps, reading and writing features
    outlook    outlook attention: each kernel of ours and timm's
    data       from image files to augmented batches: ours and timm's loader
    run        whole programs, from image files: ours and timm's train.py
    restart    from the start of train.py's process to its first update
    ablation   do labels of places, or a teacher, make a better model? (hours on a CPU)

A module's flags are the fields of its `Flags`, and its `run(settings)` measures.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rounds import BenchmarkSettings
from volo.config.fields import Settings, flag
from volo.config.parser import Program

COMMANDS = ("step", "infer", "features", "outlook", "data", "run", "restart", "ablation")


class _Command(Settings):
    """Command"""

    command: str = flag(None, "what to measure", COMMANDS, positional=True)


_BENCHMARK = Program("python benchmark.py", "COMMAND [flags]", _Command, does="Measure this machine.")


def program_of(command: str) -> Program[BenchmarkSettings]:
    """Return the program of a command. What its flags need is not checked here: `arms.train_settings` checks it as
    train.py does."""
    module = importlib.import_module(f"benchmarks.{command}")
    does = (module.__doc__ or "").partition("\n")[0]
    return Program(f"python benchmark.py {command}", "[flags]", module.Flags, lambda settings: settings, does)


def parse_benchmark(argv: Sequence[str] | None = None) -> BenchmarkSettings:
    """Return the settings of the command that `argv` (None: sys.argv) names. Raises UserError: an unknown command or
    flag, or a wrong value."""
    words = sys.argv[1:] if argv is None else list(argv)
    command = words[0] if words and words[0] in COMMANDS else _BENCHMARK.parse(words).command
    settings = program_of(command).parse(words[1:])
    return replace(settings, command_line=shlex.join(["benchmark.py", *words]))


def run(settings: BenchmarkSettings) -> int:
    """Measure, by the module that has these flags."""
    sys.modules[type(settings).__module__].run(settings)
    return 0

"""The flags of `benchmark.py`: one table per subcommand."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from volo.engine.flag_table import POSITIVE, FlagParser, Group, flag, switch


@dataclass(frozen=True)
class Command:
    """A subcommand: what it measures, and its flags."""

    description: str
    groups: tuple[Group, ...]


_LOSS = (
    Group(
        "Sizes",
        (
            flag("-b", "--batch-size", default=128, type=POSITIVE, metavar="N", help="images"),
            flag("--grid", default=[14, 14], type=POSITIVE, nargs=2, metavar="N", help="rows and columns of tokens"),
            flag("--num-classes", default=1000, type=POSITIVE, metavar="N", help="classes"),
            flag("--top-k", default=5, type=POSITIVE, metavar="K", help="classes per cell of the label maps"),
            flag("--map-size", default=[18, 18], type=POSITIVE, nargs=2, metavar="N", help="rows and columns of cells"),
            flag("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the logits"),
        ),
    ),
    Group(
        "Measuring",
        (
            flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
            flag("--repeats", default=5, type=POSITIVE, metavar="N", help="timed runs; the median counts"),
            switch("--json", help="one line of JSON instead of the table"),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
        ),
    ),
)

_CHECKPOINT = (
    Group(
        "Run",
        (
            flag("--model", default="volo_d5", metavar="NAME", help="any model of timm or of this project"),
            flag("--output", default=".", metavar="DIR", help="where the file is written, and removed afterwards"),
            switch("--no-ema", help="without a moving average of the weights"),
        ),
    ),
    Group(
        "Measuring",
        (
            flag("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"),
            flag("--repeats", default=3, type=POSITIVE, metavar="N", help="saves of each kind; the median counts"),
            switch("--json", help="one line of JSON instead of the table"),
            switch("--debug", help="show the traceback of an error that is normally told in one line"),
        ),
    ),
)

COMMANDS: dict[str, Command] = {
    "loss": Command("Time and peak memory of the token-label loss: sparse and dense targets, in one run.", _LOSS),
    "checkpoint": Command("How long a save keeps training waiting: synchronous and asynchronous.", _CHECKPOINT),
}


def benchmark_parser(command: str | None = None) -> FlagParser:
    """The parser of one subcommand, or of the program itself."""
    if command is not None:
        chosen = COMMANDS[command]
        prog = f"benchmark.py {command}"
        return FlagParser(prog, f"{prog} [flags]", chosen.description, chosen.groups)
    row = flag("command", default=None, choices=tuple(COMMANDS), help="what to measure; COMMAND --help shows its flags")
    return FlagParser(
        "benchmark.py", "benchmark.py COMMAND [flags]", "Measure this machine.", (Group("Command", (row,)),)
    )


def parse_benchmark(argv: Sequence[str] | None = None) -> Namespace:
    """Parse benchmark.py's command line. Returns one attribute per flag of the subcommand, and `command`.

    Raises:
        UserError: An unknown subcommand or flag, or a wrong value.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    command = words[0] if words and words[0] in COMMANDS else benchmark_parser().parse_args(words).command
    return Namespace(command=command, **vars(benchmark_parser(command).parse_args(words[1:])))

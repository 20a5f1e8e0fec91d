"""Measure this machine.

    python benchmark.py train | infer | loss | outlook | activations            on the device    [--help]
    python benchmark.py labels | augmentation | data | alignment | startup | checkpoint   what feeds it, what saves it
    python benchmark.py scaling --published                                     many of them
    python benchmark.py ablation                                                are models better for what differs
    python benchmark.py tests                                                   what a GPU has to compute right
    python benchmark.py --all --output DIR                                      every number that has a target

Every subcommand is a module of `benchmarks` and compares the alternatives in one run.
"""

from __future__ import annotations

import importlib
from argparse import Namespace

from benchmarks.flags_benchmark import COMMANDS


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    code: int = importlib.import_module(f"benchmarks.{COMMANDS[args.command].module}").run(args)
    return code

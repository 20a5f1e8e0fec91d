"""Measure this machine.

    python benchmark.py loss | labels | augmentation | data | alignment | checkpoint | scaling      [--help]

Every subcommand is a module of `volo.benchmarks` and compares the alternatives in one run.
"""

from __future__ import annotations

import importlib
from argparse import Namespace


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    code: int = importlib.import_module(f"volo.benchmarks.{args.command}").run(args)
    return code

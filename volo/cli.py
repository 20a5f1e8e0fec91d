"""Entry points of the programs: arguments are parsed before torch is imported, so that `--help` answers at once."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from volo.cluster.preempt import STOP
from volo.commands.console import run_program
from volo.config import args, flags_attention, flags_export, flags_preflight, flags_report


def train(argv: Sequence[str] | None = None) -> int:
    """`python train.py`, `volo-train`: train a model (`volo.commands.train`)."""
    with STOP.heeded():
        return run_program(args.parse_train, "volo.commands.train", argv)


def validate(argv: Sequence[str] | None = None) -> int:
    """`python validate.py`, `volo-validate`: evaluate checkpoints (`volo.commands.validate`)."""
    return run_program(args.parse_validate, "volo.commands.validate", argv)


def generate_label(argv: Sequence[str] | None = None) -> int:
    """`python generate_label.py`, `volo-generate-label`: make token labels (`volo.commands.generate_label`)."""
    return run_program(args.parse_generate_label, "volo.commands.generate_label", argv)


def benchmark(argv: Sequence[str] | None = None) -> int:
    """`python benchmark.py`, `volo-benchmark`: measure this machine (`benchmarks.program`)."""
    flags = importlib.import_module("benchmarks.flags_benchmark")
    return run_program(flags.parse_benchmark, "benchmarks.program", argv)


def report(argv: Sequence[str] | None = None) -> int:
    """`python report.py`, `volo-report`: what happened to a run (`volo.commands.report`)."""
    return run_program(flags_report.parse_report, "volo.commands.report", argv)


def show_attention(argv: Sequence[str] | None = None) -> int:
    """`python show_attention.py`, `volo-show-attention`: draw attention maps (`volo.commands.show_attention`)."""
    return run_program(flags_attention.parse_show_attention, "volo.commands.show_attention", argv)


def export(argv: Sequence[str] | None = None) -> int:
    """`python export.py`, `volo-export`: write a model for other programs (`volo.commands.export`)."""
    return run_program(flags_export.parse_export, "volo.commands.export", argv)


def preflight(argv: Sequence[str] | None = None) -> int:
    """`python -m volo.cluster.preflight`, `volo-preflight`: are the machines fit? (`volo.cluster.preflight`)."""
    return run_program(flags_preflight.parse_preflight, "volo.cluster.preflight.program", argv)

"""Entry points of the programs: arguments are parsed before torch is imported, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from volo.engine import args, flags_attention, flags_benchmark, flags_export, flags_preflight, flags_report
from volo.engine.console import run_program
from volo.engine.preempt import STOP


def train(argv: Sequence[str] | None = None) -> int:
    """`python train.py`, `volo-train`: train a model (`volo.programs.train`)."""
    with STOP.heeded():
        return run_program(args.parse_train, "volo.programs.train", argv)


def validate(argv: Sequence[str] | None = None) -> int:
    """`python validate.py`, `volo-validate`: evaluate checkpoints (`volo.programs.validate`)."""
    return run_program(args.parse_validate, "volo.programs.validate", argv)


def generate_label(argv: Sequence[str] | None = None) -> int:
    """`python generate_label.py`, `volo-generate-label`: make token labels (`volo.programs.generate_label`)."""
    return run_program(args.parse_generate_label, "volo.programs.generate_label", argv)


def benchmark(argv: Sequence[str] | None = None) -> int:
    """`python benchmark.py`, `volo-benchmark`: measure this machine (`volo.programs.benchmark`)."""
    return run_program(flags_benchmark.parse_benchmark, "volo.programs.benchmark", argv)


def report(argv: Sequence[str] | None = None) -> int:
    """`python report.py`, `volo-report`: what happened to a run (`volo.engine.report`)."""
    return run_program(flags_report.parse_report, "volo.engine.report", argv)


def show_attention(argv: Sequence[str] | None = None) -> int:
    """`python show_attention.py`, `volo-show-attention`: draw attention maps (`volo.programs.show_attention`)."""
    return run_program(flags_attention.parse_show_attention, "volo.programs.show_attention", argv)


def export(argv: Sequence[str] | None = None) -> int:
    """`python export.py`, `volo-export`: write a model for other programs (`volo.programs.export`)."""
    return run_program(flags_export.parse_export, "volo.programs.export", argv)


def preflight(argv: Sequence[str] | None = None) -> int:
    """`python -m volo.engine.preflight`, `volo-preflight`: are the machines fit? (`volo.engine.preflight`)."""
    return run_program(flags_preflight.parse_preflight, "volo.engine.preflight.program", argv)

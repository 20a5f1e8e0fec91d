"""`benchmark.py --all`: every number with a target, measured on this machine, as Markdown and JSON.

Each experiment is a subcommand in a process of its own, in which ours and its peers take turns. One that fails, or that
finds no time, is told in its rows, and the rest goes on.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.errors import UserError
from volo.benchmarks.conditions import conditions, heading
from volo.benchmarks.speed_report import table
from volo.benchmarks.targets import EXPERIMENTS, Experiment, Target, arm
from volo.engine.distributed import choose_device

_ROOT = str(Path(__file__).resolve().parents[2])
# Under its own name, so that nothing heavy is imported before the flags are checked.
_PROGRAM = "import sys; sys.argv[0] = 'volo-benchmark'; from volo.cli import benchmark; sys.exit(benchmark())"


@dataclass(frozen=True)
class Outcome:
    """What an experiment printed, or why it printed nothing; seconds that it took, its start among them."""

    experiment: Experiment
    command: str  # empty: it can't be had on this device
    seconds: float
    found: dict[str, Any] | None
    reason: str | None = None


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    device = choose_device(args.device, 0)
    output = Path(args.output) if args.output else None
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output {args.output} is a file: name a folder")
    end = time.monotonic() + 60 * args.minutes
    outcomes: list[Outcome] = []
    others = [] if args.only else elsewhere(device.type)
    for experiment in chosen(EXPERIMENTS[device.type], args.only):
        print(f"{experiment.name}: {experiment.line}", file=sys.stderr, flush=True)
        outcomes.append(perform(experiment, args, str(device), end - time.monotonic()))
        if output is not None:
            write(output, args, outcomes + others)  # after each: what is there stays, whatever comes
    print("\n".join(report(args, outcomes + others)), flush=True)
    return 0


def elsewhere(kind: str) -> list[Outcome]:
    """What only another kind of device can measure."""
    reasons = {"cpu": "--device cpu measures it", "cuda": "no GPU here"}
    return [
        Outcome(experiment, "", 0.0, None, reasons[other])
        for other, experiments in EXPERIMENTS.items()
        if other != kind
        for experiment in experiments
    ]


def chosen(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """The experiments that `--only` names, all where it names none. Raises UserError: it names another."""
    names = [experiment.name for experiment in experiments]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name}: on this device there are {', '.join(names)}")
    return [experiment for experiment in experiments if not only or experiment.name in only]


def perform(experiment: Experiment, args: Namespace, device: str, seconds: float) -> Outcome:
    """Run one experiment in the time that is left."""
    peers = [peer for peer in experiment.peers if peer != "timm-compile" or args.peer == "timm-compile"]
    words = [*experiment.line.split(), "--device", device, *(["--peer", *peers] if peers else []), "--json"]
    command = shlex.join(["benchmark.py", *words])
    if seconds <= 0:
        return Outcome(experiment, command, 0.0, None, f"the {args.minutes:g} minutes of --minutes are over")
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *words],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])},
        )
    except subprocess.TimeoutExpired:
        reason = f"it was stopped after {seconds:.0f} s: the {args.minutes:g} minutes of --minutes are over"
        return Outcome(experiment, command, time.monotonic() - began, None, reason)
    took = time.monotonic() - began
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Outcome(experiment, command, took, None, lines[-1] if lines else f"it ended with code {done.returncode}")
    return Outcome(experiment, command, took, json.loads(done.stdout.strip().splitlines()[-1]))


def measured(target: Target, outcome: Outcome) -> tuple[float | None, str]:
    """The number and reached or missed, or None and why there is none."""
    if outcome.found is None:
        return None, f"not measured: {outcome.reason}"
    value = target.read(outcome.found)
    if value is not None:
        return value, target.verdict(value)
    for name in target.arms:
        row = arm(outcome.found, name)
        if not row or row["not_measured"]:
            return None, f"not measured: {name}: {row['not_measured'] if row else 'no such arm in this run'}"
    return None, "not measured"


def write(output: Path, args: Namespace, outcomes: Sequence[Outcome]) -> None:
    """The whole table as benchmark.md and benchmark.json in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "benchmark.md").write_text("\n".join(report(args, outcomes)) + "\n")
    (output / "benchmark.json").write_text(json.dumps(as_json(args, outcomes), indent=1) + "\n")


def as_json(args: Namespace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Targets with what was measured, and everything that the experiments printed."""
    rows = []
    for outcome in outcomes:
        for target in outcome.experiment.targets:
            value, verdict = measured(target, outcome)
            goal = {"at most" if target.most else "at least": target.goal, "unit": target.unit.strip()}
            rows.append({"what": target.what, **goal, "measured": value, "verdict": verdict})
    experiments = {
        outcome.experiment.name: {
            "command": outcome.command,
            "seconds": outcome.seconds,
            "found": outcome.found,
            "not_measured": outcome.reason,
        }
        for outcome in outcomes
        if outcome.command
    }
    return conditions(args.command_line) | {"targets": rows, "experiments": experiments}


def report(args: Namespace, outcomes: Sequence[Outcome]) -> list[str]:
    """Lines of Markdown: the targets, then the table of each experiment."""
    lines = [*heading(args.command_line), "| what | target | measured | |", "|---|---|---|---|"]
    for outcome in outcomes:
        for target in outcome.experiment.targets:
            value, verdict = measured(target, outcome)
            sign = "<=" if target.most else ">="
            shown = "" if value is None else f"{value:.4g}{target.unit}"
            lines.append(f"| {target.what} | {sign} {target.goal:g}{target.unit} | {shown} | {verdict} |")
    for outcome in (each for each in outcomes if each.command):
        lines += ["", f"### {outcome.experiment.name}", "", f"`{outcome.command}` ({outcome.seconds:.0f} s)", ""]
        if outcome.found is None:
            lines.append(f"not measured: {outcome.reason}")
        elif "arms" in outcome.found:
            lines += table(outcome.found)
        else:
            lines.append(f"`{json.dumps(outcome.found)}`")
    return lines

"""`benchmark.py --all`: every number with a target, measured on this machine, as Markdown and JSON.

Each experiment is a subcommand in a process of its own, in which ours and its peers take turns, or a whole program. The
table is rewritten with every line that a process prints, so that no result is lost. If an experiment fails, is stopped
or has no time left, its rows say so, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import IO, Any

from benchmarks import tests
from benchmarks.comparison import table
from benchmarks.conditions import conditions, heading
from benchmarks.speed import outlook
from benchmarks.targets import EXPERIMENTS, Experiment, Target, rehearsed, row_of
from tlt.errors import UserError
from volo.cluster.distributed import choose_device

_ROOT = str(Path(__file__).resolve().parents[1])
# Under its own name, so that nothing heavy is imported before the flags are checked.
_PROGRAM = "import sys; sys.argv[0] = 'volo'; from volo.cli import run; sys.exit(run('benchmark'))"
_MINUTES, _PART_MINUTES = 20.0, 9.0  # a part, its start and its end fit into a command of ten minutes
_KEPT = 12  # last lines of a script
_NOT_BEGUN = "it has not begun"


@dataclass(frozen=True)
class Outcome:
    """The results of an experiment so far, the reason if they are incomplete, and its seconds with its start."""

    experiment: Experiment
    command: str  # empty: this device can't run it
    seconds: float = 0.0
    found: dict[str, Any] | None = None
    reason: str | None = None


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    args.minutes = args.minutes or (_PART_MINUTES if args.part else _MINUTES)
    end = time.monotonic() + 60 * args.minutes
    args.device = str(choose_device(args.device, 0))
    outcomes = plan(args)
    write(args, outcomes)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the experiment ends with us
    try:
        _perform_all(args, outcomes, end)
    finally:
        signal.signal(signal.SIGTERM, before)
    print("\n".join(report(args, outcomes)), flush=True)
    return 0


def _perform_all(args: Namespace, outcomes: list[Outcome], end: float) -> None:
    """Run the experiments one after the other and rewrite the results whenever one prints a line."""
    with _log(args) as log:
        for number, planned in enumerate(outcomes):
            if not planned.command:
                continue
            print(f"{planned.experiment.name}: {planned.command}", file=sys.stderr, flush=True)

            def tell(outcome: Outcome, number: int = number) -> None:
                outcomes[number] = outcome
                write(args, outcomes)

            tell(perform(planned, args.minutes, end - time.monotonic(), log, tell))


def plan(args: Namespace) -> list[Outcome]:
    """Return all experiments, none of them begun. Raises UserError if `--only` names an unknown one."""
    kind = args.device.partition(":")[0]
    experiments = [each for each in EXPERIMENTS["cuda" if args.part else kind] if args.part in (None, each.part)]
    if args.part and kind == "cpu":
        experiments = [rehearsed(each) for each in experiments]
    experiments = chosen(experiments, args.only)
    found = [Outcome(each, command_of(each, args.device, args.peer), reason=_NOT_BEGUN) for each in experiments]
    return found if args.only or args.part else found + elsewhere(kind)


def elsewhere(kind: str) -> list[Outcome]:
    """Return the experiments that need another kind of device."""
    reasons = {"cpu": "--device cpu measures it", "cuda": "no GPU here"}
    return [
        Outcome(experiment, "", reason=reasons[other])
        for other, experiments in EXPERIMENTS.items()
        if other != kind
        for experiment in experiments
    ]


def chosen(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """Return the experiments that `--only` names, or all. Raises UserError for an unknown name."""
    names = [experiment.name for experiment in experiments]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name}: on this device there are {', '.join(names)}")
    return [experiment for experiment in experiments if not only or experiment.name in only]


def command_of(experiment: Experiment, device: str, strongest: str) -> str:
    """Return the command line of an experiment; `strongest` is the `--peer` of `--all`."""
    words = experiment.line.split()
    if words[0].endswith(".py"):
        return shlex.join(["python", *words])
    peers = [peer for peer in experiment.peers if peer != "timm-compile" or strongest == "timm-compile"]
    with_peers = ["--peer", *peers] if words[0] in ("train", "infer") else []
    return shlex.join(["python", "benchmark.py", *words, "--device", device, *with_peers, "--json"])


def perform(
    planned: Outcome, minutes: float, seconds: float, log: IO[bytes], tell: Callable[[Outcome], None]
) -> Outcome:
    """Run one experiment in the `seconds` left of `minutes`; `tell` is called after each line that it prints."""
    if seconds <= 0:
        return replace(planned, reason=f"the {minutes:g} minutes of --minutes are over")
    limit, began, start = min(seconds, planned.experiment.seconds), time.monotonic(), log.seek(0, os.SEEK_END)
    outcome = replace(planned, reason="it was still running when this was written")
    tell(outcome)
    with tempfile.TemporaryDirectory() as folder, _process(planned.command, folder, log) as process:
        timer = Timer(limit, _kill, (process,))
        timer.start()
        try:
            for line in process.stdout or ():
                found = _read(line, outcome, log)
                outcome = replace(outcome, found=found, seconds=time.monotonic() - began)
                tell(outcome)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
    took = time.monotonic() - began
    if code and took >= limit:
        share = "its share" if limit < seconds else "all that was left"
        reason = f"it was stopped after {took:.0f} s, {share} of the {minutes:g} minutes of --minutes"
        return replace(outcome, seconds=took, reason=reason)
    return replace(outcome, seconds=took, reason=_last_line(log, start, code) if code else None)


def _process(command: str, folder: str, log: IO[bytes]) -> subprocess.Popen[str]:
    words = [folder if word == "DIR" else word for word in shlex.split(command)[1:]]
    words = ["-c", _PROGRAM, *words[1:]] if words[0] == "benchmark.py" else [str(Path(_ROOT, words[0])), *words[1:]]
    paths = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-u", *words],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": paths, "PYTHON": sys.executable},
        start_new_session=True,  # what it starts ends with it
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(line: str, outcome: Outcome, log: IO[bytes]) -> dict[str, Any] | None:
    """Return the results after a printed line: the JSON of a subcommand, or the last lines of a script."""
    if line.startswith("{") and line.endswith("}\n"):
        told: dict[str, Any] = json.loads(line)
        return told
    log.write(line.encode())
    if "benchmark.py" in outcome.command:
        return outcome.found
    return {"printed": [*(outcome.found or {"printed": []})["printed"], line.rstrip()][-_KEPT:]}


def _last_line(log: IO[bytes], start: int, code: int) -> str:
    log.seek(start)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with code {code}"


def _log(args: Namespace) -> IO[bytes]:
    """Open the file for the experiments' messages."""
    if not args.output:
        return tempfile.TemporaryFile(buffering=0)
    return _file(args, "log").open("w+b", buffering=0)


def _file(args: Namespace, kind: str) -> Path:
    """Return a file in the folder `--output`, which is created. Raises UserError if it is a file."""
    folder = Path(args.output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {args.output} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{f'part{args.part}' if args.part else 'benchmark'}.{kind}"


def write(args: Namespace, outcomes: Sequence[Outcome]) -> None:
    """Write the whole table as Markdown and JSON to `--output`. Each file is replaced atomically."""
    if not args.output:
        return
    texts = {"md": "\n".join(report(args, outcomes)), "json": json.dumps(as_json(args, outcomes), indent=1)}
    for kind, text in texts.items():
        new = _file(args, f"{kind}.new")
        new.write_text(text + "\n")
        new.replace(_file(args, kind))


def measured(target: Target, outcome: Outcome) -> tuple[float | None, str]:
    """Return the number and its verdict, or None and the reason."""
    value = None if outcome.found is None else target.read(outcome.found)
    if value is not None:
        return value, target.verdict(value) + (f"; but {outcome.reason}" if outcome.reason else "")
    for name in target.candidates:
        row = row_of(outcome.found or {"arms": []}, name)
        if row and row["not_measured"]:
            return None, f"not measured: {name}: {row['not_measured']}"
    return None, f"not measured: {outcome.reason or 'nothing of the kind was run'}"


def as_json(args: Namespace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the targets with their numbers, and all results of the experiments."""
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
    """Return lines of Markdown: the targets, then the table of each experiment."""
    lines = heading(args.command_line)
    if args.part and args.device == "cpu":
        lines += ["**A rehearsal with small models on a CPU: the numbers mean nothing.**", ""]
    lines += ["| what | target | measured | |", "|---|---|---|---|"]
    for outcome in outcomes:
        for target in outcome.experiment.targets:
            value, verdict = measured(target, outcome)
            sign = "<=" if target.most else ">="
            shown = "" if value is None else f"{value:.4g}{target.unit}"
            lines.append(f"| {target.what} | {sign} {target.goal:g}{target.unit} | {shown} | {verdict} |")
    for outcome in (each for each in outcomes if each.command):
        lines += ["", f"### {outcome.experiment.name}", "", f"`{outcome.command}` ({outcome.seconds:.0f} s)", ""]
        kept = "not finished" if outcome.found else "not measured"
        lines += [f"{kept}: {outcome.reason}", ""] if outcome.reason else []
        lines += shown_of(outcome.found) if outcome.found else []
    return lines


def shown_of(found: dict[str, Any]) -> list[str]:
    """Return the results of an experiment as lines of Markdown."""
    if "arms" in found:
        return table(found)
    if "cases" in found:
        return outlook.table(found)
    if "failed" in found:
        return tests.table(found)
    return ["```", *found["printed"], "```"] if "printed" in found else [f"`{json.dumps(found)}`"]

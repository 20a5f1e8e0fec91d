"""What a GPU is asked first, in ten minutes: whole programs, as a CUDA graph and launched.

    make benchmark-gpu CALLS=day                 # DEVICE=cpu rehearses it on tests/stand_in_cuda.py, with a small model
    python -m tests.gpu_day --output OUT --check memory

Each check is a process of its own, so that none is lost with another. It prints a line for each promise: PASS or FAIL,
and the number. They are also in OUT/day/result.txt, and what the programs print is in OUT/day/CHECK.txt.
"""

import argparse
import gc
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.stand_in_cuda import stand_in_cuda
from volo import cli
from volo.record import profile
from volo.train import data, step_graph
from volo.train.precision import Precision
from volo.train.step_graph import StepGraph

SECONDS = 590  # of all checks on a GPU
SAME = (
    "--data-backend synthetic --token-label --token-label-data synthetic --model-dtype bfloat16 --channels-last "
    "--layer-decay 0.8 --drop-path-mode subset --warmup-epochs 1 --cooldown-epochs 0 --epochs 2"
)
ON_GPU = f"{SAME} --model volo_d1 --drop-path 0.1 -b 128 -j 8 --log-interval 10"
REHEARSED = f"{SAME} --model volo_test --drop-path 0.5 -b 4 -j 0 --log-interval 1 --img-size 32 --num-classes 4"
ONE_GRAPH, LAUNCHED = "a step is one CUDA graph", "steps are launched, no CUDA graph"
Line = tuple[str, bool, str]  # what is promised, whether it holds, and the number


class Ran(NamedTuple):
    """A run of `volo train` as it ended."""

    code: int
    log: str
    losses: list[float]
    norms: list[float]
    reserved: float  # GiB at most


def apart(values: list[float], others: list[float]) -> float:
    """The largest relative difference; infinite where there are not as many."""
    if not values or len(values) != len(others):
        return math.inf
    return max(abs(value / other - 1) for value, other in zip(values, others, strict=True))


class Day:
    """What the checks run with: on a GPU, or rehearsed."""

    def __init__(self, device: str, output: Path, check: str) -> None:
        self.rehearsed, self.output, self.check = device == "cpu", output, check
        if self.rehearsed:
            data.SYNTHETIC_UPDATES, data.SYNTHETIC_VALIDATION_BATCHES = 5, 1
            profile.WARM_UP, step_graph.WARM_UP = 2, 1

    def train(self, name: str, flags: str = "") -> Ran:
        """Train in this process, without pictures; return what came of it."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        words = f"{REHEARSED if self.rehearsed else ON_GPU} --device cuda --output {self.output} --experiment {name} "
        log = self.output / f"{self.check}.txt"
        before = log.stat().st_size if log.exists() else 0
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            code = cli.run("train", (words + flags).split())
        records = self.output / name / "metrics.jsonl"
        rows = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
        rows = [row for row in rows if row["event"] == "train"]
        numbers = [row["loss"] for row in rows], [row["grad_norm"] for row in rows]
        return Ran(code, log.read_text()[before:], *numbers, torch.cuda.max_memory_reserved() / 2**30)

    def pytest(self, *words: str) -> Line:
        """Run tests; the line that sums them up is the number."""
        several = [] if self.rehearsed or not importlib.util.find_spec("xdist") else ["--numprocesses", "6"]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", *several, *words]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (self.output / f"{self.check}.txt").write_text(ended.stdout)
        result = (ended.stdout.splitlines() or ["nothing"])[-1].strip("= ")
        return " ".join(words), ended.returncode == 0 and (self.rehearsed or "passed" in result), result


def tests(day: Day) -> Iterator[Line]:
    yield day.pytest("tests/train", *([] if day.rehearsed else ["tests/commands/test_gpu.py"]))


def launched(day: Day) -> Iterator[Line]:
    plain, graph = day.train("launched", "--no-cuda-graph"), day.train("graph")
    yield "D1's step becomes a graph", graph.code == 0 and ONE_GRAPH in graph.log, f"exit code {graph.code}"
    losses, norms = apart(graph.losses, plain.losses), apart(graph.norms, plain.norms)
    yield "losses as launched", losses < 0.01, f"{100 * losses:.3f} % apart at most in two epochs"
    yield "norms as launched", norms < 0.1, f"{100 * norms:.3f} % apart at most in two epochs"
    most = 1.25 * plain.reserved + 1
    yield "memory as launched", graph.reserved < most, f"{graph.reserved:.1f} GiB, launched {plain.reserved:.1f}"
    result = re.search(r"weights that change by (\S+) are (\S+) apart", graph.log)
    off, change = (float(result[2]), float(result[1])) if result else (float("nan"), 1.0)
    yield "the rehearsal has a margin", off < 0.01 * change, f"{off:.3g} off by {change:.3g}; the limit is 5 %"


def memory(day: Day) -> Iterator[Line]:
    """Where a launched run has enough memory, one whose capture fails goes on. Shares are those of 80 GiB."""
    data.SYNTHETIC_UPDATES, backward, lines, lost = min(12, data.SYNTHETIC_UPDATES), Precision.backward, [], 0

    def too_little(precision: Precision, loss: torch.Tensor, reduced: bool = False) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CUDA out of memory (rehearsed)")
        backward(precision, loss, reduced)

    for share in (0.30, 0.26, 0.24, 0.22):
        if not day.rehearsed:
            torch.cuda.set_per_process_memory_fraction(share * 80 * 2**30 / torch.cuda.mem_get_info()[1])
        elif share < 0.25:
            Precision.backward = too_little
        flags = "--epochs 1 --warmup-epochs 0" + ("" if day.rehearsed else " -b 256")
        plain = day.train(f"launched-{share}", f"{flags} --no-cuda-graph")
        graph = day.train(f"graph-{share}", flags)
        lost += plain.code == 0 and graph.code != 0
        how = "ends" if graph.code else "given up" if LAUNCHED in graph.log else "runs"
        lines.append(f"{share:.2f} launched {'ends' if plain.code else 'runs'}, graph {how}")
    held = not lost and any("given up" in line for line in lines)
    yield "with too little memory for a graph, a run goes on", held, "; ".join(lines)


def replays(day: Day) -> Iterator[Line]:
    """torch reports a wait in what is done for each replay as an error; how many others are not finished is counted."""
    send, repeat, ends, ahead = StepGraph.send, StepGraph._repeat, list[torch.cuda.Event](), list[int]()

    def strict(function: Callable[..., Any], *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def counted(step: StepGraph, last: bool) -> Any:
        ends[:] = [end for end in ends if not end.query()]
        ahead.append(len(ends))
        result = strict(repeat, step, last)
        ends.append(torch.cuda.current_stream().record_event())
        return result

    StepGraph.send = lambda *arguments: strict(send, *arguments)
    StepGraph._repeat = counted
    d5 = "" if day.rehearsed else "--model volo_d5 -b 32"
    ran = day.train("replays", f"{d5} --epochs 1 --warmup-epochs 0 --log-interval 100")
    held, code = ran.code == 0 and ONE_GRAPH in ran.log, f"{len(ahead)} replays, exit code {ran.code}"
    yield "send and replay of D5 wait for nothing", held and len(ahead) > 1, code
    yield "the host is at most two updates ahead", held and max(ahead) <= 2, f"at most {max(ahead, default=0)}"


def profiled(day: Day) -> Iterator[Line]:
    ran = day.train("profile", f"--profile {1 if day.rehearsed else 2} --epochs 1 --warmup-epochs 0 --log-interval 100")
    result = re.search(r"profile of .*: ([\d.]+) ms an update, cuda ([\d.]+) ms.*", ran.log)
    busy = float(result[2]) / float(result[1]) if result else 0.0
    held = ran.code == 0 and result is not None and (busy > 0.9 or day.rehearsed)
    yield "a graph leaves the GPU no pause", held, result[0] if result else f"no profile, exit code {ran.code}"


# Each check, and the seconds it may take on a GPU: the most important first. An H100 is expected to need half of them.
CHECKS: dict[Callable[[Day], Iterator[Line]], int] = {
    tests: 150, launched: 90, memory: 120, replays: 80, profiled: 50,
}  # fmt: skip


def check(day: Day, function: Callable[[Day], Iterator[Line]]) -> None:
    with stand_in_cuda() if day.rehearsed else nullcontext():
        for promise, holds, number in function(day):
            print(f"{'PASS' if holds else 'FAIL'} {day.check}: {promise}: {number}", flush=True)


def in_a_process(name: str, words: list[str], limit: float) -> list[str]:
    began = time.monotonic()
    command = ["timeout", "--signal=KILL", f"{limit:.0f}", sys.executable, "-m", "tests.gpu_day", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    seconds, error = time.monotonic() - began, (ended.stderr.strip().splitlines() or [""])[-1]
    if ended.returncode:
        lines.append(f"FAIL {name}: exit code {ended.returncode} after {seconds:.0f} s of {limit:.0f}: {error[:300]}")
    return [*lines, f"     {name}: {seconds:.0f} s"]


def main() -> int:
    names = {function.__name__: function for function in CHECKS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: on a stand-in")
    parser.add_argument("--output", type=Path, default=Path("output/benchmark-gpu"))
    parser.add_argument("--check", choices=names, help="do this one, in this process")
    args = parser.parse_args()
    output, began, failed = args.output / "day", time.monotonic(), False
    if args.check:
        output.mkdir(parents=True, exist_ok=True)
        check(Day(args.device, output, args.check), names[args.check])
        return 0
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for name, function in names.items():
        left = math.inf if args.device == "cpu" else SECONDS - (time.monotonic() - began)
        words = ["--device", args.device, "--output", str(args.output), "--check", name]
        lines = in_a_process(name, words, max(1, min(left, CHECKS[function] * (1 if left < math.inf else 10))))
        failed |= any(line.startswith("FAIL") for line in lines)
        print("\n".join(lines), flush=True)
        with (output / "result.txt").open("a") as file:
            file.write("\n".join([*lines, ""]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

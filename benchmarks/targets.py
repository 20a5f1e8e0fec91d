"""The experiments of `benchmark.py --all` on a CPU and on a GPU, and the targets of their numbers, as rows.

The experiments for a GPU are in parts (`--part`) of less than ten minutes each, the most important first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.flags_speed import PARTS
from benchmarks.speed.outlook import BOTH, TIMM, TIMM_COMPILED

Json = Mapping[str, Any]
_COMPILED = "--torchcompile"


@dataclass(frozen=True)
class Target:
    """A number to reach.

    Attributes:
        what: The quantity in words.
        goal: The smallest good value; with `most`, the largest.
        unit: Printed behind the number.
        read: Finds the number in the JSON that the subcommand printed.
        candidates: Names of the candidates that the number needs.
    """

    what: str
    goal: float
    unit: str
    read: Callable[[Json], float | None]
    candidates: tuple[str, ...] = ()
    most: bool = False

    def verdict(self, value: float) -> str:
        """Return "reached" or "missed"."""
        return "reached" if (value <= self.goal if self.most else value >= self.goal) else "missed"


@dataclass(frozen=True)
class Experiment:
    """A command that `--all` runs as a process of its own.

    Attributes:
        line: The command line of a subcommand, without `--json`, `--device` and the peers; or that of a script, where
            DIR stands for an empty folder.
        part: The `--part` that it belongs to.
        seconds: The time limit, so that time is left for the next experiments.
    """

    name: str
    line: str
    targets: tuple[Target, ...]
    peers: tuple[str, ...] = ()
    part: str = ""
    seconds: float = math.inf


def row_of(found: Json, name: str) -> Json:
    """Return the row of a candidate of `train` or `infer`, empty if there is none."""
    rows: list[Json] = found["arms"]
    return next((row for row in rows if row["arm"] == name), {})


def speed(name: str) -> Callable[[Json], float | None]:
    """Read images/s of a candidate."""
    return lambda found: row_of(found, name).get("images/s")


def faster(name: str, peer: str) -> Callable[[Json], float | None]:
    """Read images/s of the candidate `name` over those of `peer`."""

    def read(found: Json) -> float | None:
        one, other = (speed(each)(found) for each in (name, peer))
        return one / other if one and other else None

    return read


def memory(name: str) -> Callable[[Json], float | None]:
    """Read the peak MiB per image of a candidate's forward pass with the loss."""

    def read(found: Json) -> float | None:
        peak = row_of(found, name).get("peak_bytes_per_image", {}).get("forward")
        return None if peak is None else peak / 2**20

    return read


def printed(pattern: str) -> Callable[[Json], float | None]:
    """Read the last number that a script printed at the group of `pattern`."""

    def read(found: Json) -> float | None:
        numbers = re.findall(pattern, "\n".join(found["printed"]))
        return float(numbers[-1]) if numbers else None

    return read


def _failing(found: Json) -> float | None:
    """Read the number of failed tests; None if none was run."""
    return len(found["failed"]) if found["passed"] or found["failed"] else None


def _ratio(name: str, peer: str, goal: float, what: str) -> Target:
    return Target(what, goal, "x", faster(name, peer), (name, peer))


def _against_timm(name: str, eager: float, compiled: float, where: str) -> tuple[Target, ...]:
    return (
        _ratio(name, "timm", eager, f"{where}, against timm eager"),
        _ratio(name, "timm-compile", compiled, f"{where}, against timm compiled"),
    )


def _outlook(channels: int, peer: str) -> Callable[[Json], float | None]:
    """Read the time of timm's `peer` over that of our fastest kernel, forward and backward, at `channels` channels."""

    def read(found: Json) -> float | None:
        case = next((case for case in found["cases"] if case["shape"][-1] == channels), {"arms": ()})
        seconds = {
            row["arm"]: row["wall_seconds"][BOTH]["median"] for row in case["arms"] if row["not_measured"] is None
        }
        ours = [value for name, value in seconds.items() if name not in (TIMM, TIMM_COMPILED)]
        return seconds[peer] / min(ours) if ours and peer in seconds else None

    return read


def _cpu() -> tuple[Experiment, ...]:
    quick, timm = "--rounds 3 --warm-up 1", ("timm", "timm-compile")
    step = f"train --model volo_d1 -b 8 --drop-path 0.1 {quick} {_COMPILED}"
    narrow = f"{step} --model-dtype bfloat16"
    deep = f"train --model volo_d5 -b 8 --drop-path 0.75 --drop-path-mode subset {quick}"
    return (
        Experiment(
            "outlook",
            "outlook --dtypes float32 --rounds 7",
            (
                Target("CPU: outlook attention of D1, against timm eager", 2.5, "x", _outlook(192, TIMM)),
                Target("CPU: outlook attention of D5, against timm eager", 2.2, "x", _outlook(384, TIMM)),
            ),
        ),
        Experiment("d1-fp32", step, _against_timm("ours", 1.15, 1.03, "CPU: D1 step, float32"), timm),
        Experiment("d1-bf16", narrow, _against_timm("ours", 1.7, 1.4, "CPU: D1 step, bfloat16"), timm),
        Experiment("d5-subset", deep, (_ratio("ours", "mask", 1.4, "CPU: D5 step, subset against mask"),), ("mask",)),
        Experiment(
            "d1-infer",
            f"infer --model volo_d1 -b 8 {quick}",
            (_ratio("ours", "timm", 1, "CPU: D1 inference, float32, against timm eager"),),
            ("timm",),
        ),
        Experiment("loss", "loss --repeats 3", (Target("CPU: loss, sparse against dense", 1, "x", _loss),)),
    )


def _loss(found: Json) -> float | None:
    ratio: float = found["dense/sparse"]["time"]
    return ratio


_GPU_TIMM = ("timm", "timm-compile")
_SUBSET, _MASK = "--drop-path-mode subset", ("mask",)


def _gpu_step(model: str, side: int, batch: int, drop_path: float, more: str = "") -> str:
    line = f"train --model volo_{model} --img-size {side} -b {batch} --drop-path {drop_path} --model-dtype bfloat16"
    return f"{line} --channels-last {_COMPILED} --steps 5 --rounds 5 --warm-up 3 {more}".strip()


def _rate(where: str, goal: float, name: str = "ours") -> Target:
    return Target(f"GPU: {where}", goal, " images/s", speed(name), (name,))


def _activations(where: str, most: float) -> Target:
    return Target(f"GPU: {where}, activation memory an image", most, " MiB", memory("mask"), _MASK, most=True)


def _gpu_first() -> tuple[Experiment, ...]:
    """Return the first part: correctness, D5 with subset and its profile, D1, outlook attention."""
    op = tuple(
        Target(f"GPU: outlook attention of {model}, against {words}", goal, "x", _outlook(channels, peer))
        for model, channels in (("D1", 192), ("D5", 384))
        for words, peer, goal in (("timm eager", TIMM, 8.0), ("timm compiled", TIMM_COMPILED, 2.0))
    )
    tests = Target("GPU: tests that fail", 0, "", _failing, most=True)
    d5 = _gpu_step("d5", 224, 96, 0.75, f"{_SUBSET} --profile")
    return (
        Experiment("tests", "tests", (tests,), seconds=170),
        Experiment("d5-224", d5, (_rate("D5 step at 224, subset", 1150),), seconds=170),
        Experiment("d1-224", _gpu_step("d1", 224, 256, 0.1), (_rate("D1 step at 224", 5500),), ("amp",), seconds=90),
        # 256 images: 64 fit into the second cache, and the host takes longer to ask for them.
        Experiment("outlook", "outlook -b 256 --dtypes bfloat16 --calls 20", op, seconds=110),
    )


def _gpu_ways() -> tuple[Experiment, ...]:
    """Return the second part: D5 with other settings."""
    where, large = "D5 step at 224", "D5 step at 512"
    mask = (
        _rate(where, 800, "mask"),
        _ratio("ours", "mask", 1.4, f"GPU: {where}, subset against mask"),
        _activations(where, 190),
    )
    high = (_rate(large, 130, "mask"), _rate(f"{large}, subset", 190), _activations(large, 990))
    graphs = f"{_SUBSET} --torchcompile-mode reduce-overhead"
    cudnn = f"{_SUBSET} --cudnn-attention"
    return (
        Experiment(
            "d5-224-256",
            _gpu_step("d5", 224, 256, 0.75, _SUBSET),
            (_rate(f"{where}, subset, 256 images", 1150),),
            seconds=100,
        ),
        Experiment("d5-224-mask", _gpu_step("d5", 224, 96, 0.75, _SUBSET), mask, _MASK, seconds=110),
        Experiment("d5-512", _gpu_step("d5", 512, 16, 0.75, _SUBSET), high, _MASK, seconds=110),
        Experiment(
            "d5-224-cudnn",
            _gpu_step("d5", 224, 96, 0.75, cudnn),
            (_rate(f"{where}, subset, attention by cuDNN", 1150),),
            seconds=100,
        ),
        Experiment(
            "d5-224-graphs",
            _gpu_step("d5", 224, 96, 0.75, graphs),
            (_rate(f"{where}, subset, CUDA graphs", 1150),),
            seconds=120,
        ),
    )


def _gpu_against_timm(model: str, side: int, batch: int, drop_path: float, *more: Target, **rest: Any) -> Experiment:
    targets = (*more, *_against_timm("ours", 2, 1.3, f"GPU: {model.upper()} step at {side}"))
    line = _gpu_step(model, side, batch, drop_path)
    return Experiment(f"{model}-{side}-timm", line, targets, _GPU_TIMM, **rest)


def _gpu_others() -> tuple[Experiment, ...]:
    """Return the last part: the other models against timm, and whole programs."""
    run = (
        f"train.py --data-backend synthetic --token-label --token-label-data synthetic --model volo_d5 -b 96 {_SUBSET}"
    )
    run += " --drop-path 0.75 --model-dtype bfloat16 --channels-last --torchcompile --epochs 1 --cooldown-epochs 0"
    run += " --warmup-epochs 0 --log-interval 50 -j 12 --output DIR"
    return (
        _gpu_against_timm("d1", 224, 256, 0.1, seconds=150),
        _gpu_against_timm("d3", 224, 128, 0.5, _rate("D3 step at 224", 2400), seconds=90),
        _gpu_against_timm("d5", 512, 16, 0.75, seconds=90),
        Experiment(
            "train.py",
            run,
            (Target("GPU: train.py, D5 at 224, subset", 1090, " images/s", printed(r"\] loss .*\| (\d+) images/s")),),
            seconds=90,
        ),
        Experiment(
            "demo",
            "demo/digits.py --output DIR",
            (Target("GPU: demo, top-1 of VOLO-D0", 97, " %", printed(r"volo_d0 .* ([\d.]+) % of")),),
            seconds=120,
        ),
        Experiment("loss", "loss --repeats 3", (Target("GPU: loss, sparse against dense", 1, "x", _loss),)),
        Experiment(
            "d1-infer",
            "infer --model volo_d1 -b 256 --amp --amp-dtype bfloat16 --channels-last --steps 5",
            (_ratio("ours", "timm", 1, "GPU: D1 inference, bfloat16, against timm eager"),),
            ("timm",),
        ),
        Experiment("data", "data --backend dali-gpu torchvision --images 256 --workers 8", ()),
        _gpu_against_timm("d2", 224, 192, 0.2, _rate("D2 step at 224", 3300)),
        _gpu_against_timm("d4", 224, 128, 0.5, _rate("D4 step at 224", 1350)),
    )


def _gpu() -> tuple[Experiment, ...]:
    d5 = _gpu_against_timm("d5", 224, 96, 0.75)
    parts = (_gpu_first(), _gpu_ways(), (d5,), _gpu_others())
    return tuple(replace(each, part=part) for part, rows in zip(PARTS, parts, strict=True) for each in rows)


_SMALL_STEP = "--img-size 32 -b 2 --steps 1 --rounds 1 --warm-up 1"
# Flags added to a command line to rehearse it on a CPU: the last of two equal flags counts.
_SMALL = {
    "train": _SMALL_STEP,
    "infer": _SMALL_STEP,
    "outlook": "-b 2 --shapes 4x4x192x6 4x4x384x12 --calls 1 --rounds 1",
    "loss": "-b 4 --repeats 1",
    "data": "--images 16 --rounds 1 --workers 0",
    "train.py": "--model volo_test --img-size 64 -b 2",
}


def rehearsed(experiment: Experiment) -> Experiment:
    """Return the experiment with a small model (timm has no VOLO-D0) and few rounds; its numbers mean nothing."""
    word = experiment.line.split()[0]
    line = f"{experiment.line} {_SMALL.get(word, '')}".strip()
    if word in ("train", "infer"):
        line += " --model volo_d1" if {"timm", "timm-compile"} & set(experiment.peers) else " --model volo_d0"
    if "--torchcompile" in line and "--torchcompile-mode" not in line:
        line += " --torchcompile aot_eager"
    return replace(experiment, line=line, seconds=math.inf)


EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {"cpu": _cpu(), "cuda": _gpu()}

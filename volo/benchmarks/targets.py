"""What `benchmark.py --all` measures, on a CPU and on a GPU, and what the speeds are meant to be: rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from volo.benchmarks.outlook_arms import BOTH, TIMM, TIMM_COMPILED

Json = Mapping[str, Any]
_COMPILED = "--torchcompile"


@dataclass(frozen=True)
class Target:
    """A number to reach.

    Attributes:
        what: In words.
        goal: At least that much; at most where `most` says so.
        unit: Behind the number.
        read: Finds the number in what the subcommand printed as JSON.
        arms: Without which it can't be read.
    """

    what: str
    goal: float
    unit: str
    read: Callable[[Json], float | None]
    arms: tuple[str, ...] = ()
    most: bool = False

    def verdict(self, value: float) -> str:
        """Reached or missed."""
        return "reached" if (value <= self.goal if self.most else value >= self.goal) else "missed"


@dataclass(frozen=True)
class Experiment:
    """One subcommand in a process of its own: `line` is its command line, without `--json` and the peers."""

    name: str
    line: str
    targets: tuple[Target, ...]
    peers: tuple[str, ...] = ()


def arm(found: Json, name: str) -> Json:
    """An arm of `train` or `infer`."""
    rows: list[Json] = found["arms"]
    return next((row for row in rows if row["arm"] == name), {})


def speed(name: str) -> Callable[[Json], float | None]:
    """Images/s of an arm."""
    return lambda found: arm(found, name).get("images/s")


def faster(name: str, peer: str) -> Callable[[Json], float | None]:
    """How many times the images/s of `peer` the arm `name` has."""

    def read(found: Json) -> float | None:
        one, other = (speed(each)(found) for each in (name, peer))
        return one / other if one and other else None

    return read


def memory(name: str) -> Callable[[Json], float | None]:
    """MiB per image at the peak of an arm's forward pass with the loss."""

    def read(found: Json) -> float | None:
        peak = arm(found, name).get("peak_bytes_per_image", {}).get("forward")
        return None if peak is None else peak / 2**20

    return read


def _ratio(name: str, peer: str, goal: float, what: str) -> Target:
    return Target(what, goal, "x", faster(name, peer), (name, peer))


def _against_timm(name: str, eager: float, compiled: float, where: str) -> tuple[Target, ...]:
    return (
        _ratio(name, "timm", eager, f"{where}, against timm eager"),
        _ratio(name, "timm-compile", compiled, f"{where}, against timm compiled"),
    )


def _outlook(channels: int, peer: str) -> Callable[[Json], float | None]:
    """How many times as fast as an arm of timm the quickest of ours is, forward and backward, at so many channels."""

    def read(found: Json) -> float | None:
        case = next(case for case in found["cases"] if case["shape"][-1] == channels)
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


# Model, side, batch size, drop path, images/s to reach as published, and with subset.
_GPU_ROWS = (
    ("d1", 224, 256, 0.1, 5500, None),
    ("d2", 224, 192, 0.2, 3300, None),
    ("d3", 224, 128, 0.5, 2400, 2900),
    ("d4", 224, 128, 0.5, 1350, 1700),
    ("d5", 224, 96, 0.75, 800, 1150),
    ("d5", 512, 16, 0.75, 130, 190),
)
_GPU_MEMORY = {("d5", 224): 190, ("d5", 512): 990}  # MiB per image


def _gpu() -> tuple[Experiment, ...]:
    op = tuple(
        Target(f"GPU: outlook attention of {model}, against {words}", goal, "x", _outlook(channels, peer))
        for model, channels in (("D1", 192), ("D5", 384))
        for words, peer, goal in (("timm eager", TIMM, 8.0), ("timm compiled", TIMM_COMPILED, 2.0))
    )
    outlook = Experiment("outlook", "outlook -b 64 --dtypes bfloat16 --calls 20", op)
    return (outlook, *(_gpu_step(*row) for row in _GPU_ROWS))


def _gpu_step(model: str, side: int, batch: int, drop_path: float, goal: float, subset: float | None) -> Experiment:
    where, plain = f"GPU: {model.upper()} step at {side}", "ours" if subset is None else "mask"
    line = f"train --model volo_{model} --img-size {side} -b {batch} --drop-path {drop_path} --model-dtype bfloat16"
    line += f" --channels-last {_COMPILED} --steps 5 --rounds 5 --warm-up 3"
    targets = [Target(where, goal, " images/s", speed(plain), (plain,)), *_against_timm(plain, 2, 1.3, where)]
    if subset is not None:
        line += " --drop-path-mode subset"
        targets.insert(1, Target(f"{where}, subset", subset, " images/s", speed("ours"), ("ours",)))
    if (model, side) in _GPU_MEMORY:
        most = _GPU_MEMORY[model, side]
        targets.append(Target(f"{where}, activation memory an image", most, " MiB", memory(plain), (plain,), most=True))
    more = ("mask",) if subset is not None else ("amp",) if model == "d1" else ()
    peers = (*more, "timm", "timm-compile")
    return Experiment(f"{model}-{side}", line, tuple(targets), peers)


EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {"cpu": _cpu(), "cuda": _gpu()}

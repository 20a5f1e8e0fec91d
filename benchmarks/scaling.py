"""`benchmark.py scaling`: the step time of data-parallel training on many GPUs, predicted, beside published numbers.

    python benchmark.py scaling --published
    python benchmark.py scaling --model volo_d5 -b 44 --machine dgx-a100 --images-per-second 62.5

A message of S bytes over a link takes latency + S / bandwidth. DistributedDataParallel sums gradients bucket by bucket,
in the order in which they become ready, one bucket at a time, while the backward pass goes on. Times are in seconds,
sizes in bytes, bandwidths in bytes/s in one direction. Nothing is measured.
"""

from __future__ import annotations

import difflib
import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import timm
import torch

from benchmarks.machines import LINK_EFFICIENCY, MACHINES, PUBLISHED, PublishedRuns
from tlt.errors import UserError
from volo import models as models  # registers them with timm

MIB = 2**20
_GBITS = np.geomspace(0.1, 2000, 400)  # tried to explain a published number
_FIRST_BUCKET = MIB  # of DistributedDataParallel, so that the first all-reduce starts early
_BACKWARD = 2 / 3  # of the computing: two of three operations are the backward pass's


@dataclass(frozen=True)
class Link:
    """A connection between two devices or two nodes."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Nodes of `gpus` GPUs.

    Attributes:
        intra: From one GPU to the others of its node.
        inter: From one node to the others, over all its network cards together.
    """

    gpus: int
    intra: Link
    inter: Link


class Gradient(NamedTuple):
    """The gradient of a parameter, or a bucket of them. `ready` is a share of the backward pass."""

    size: float
    ready: float


@dataclass(frozen=True)
class Work:
    """One rank's share of a step. Gradients are in the order in which they become ready."""

    images: int
    forward: float
    backward: float
    gradients: tuple[Gradient, ...]

    @property
    def gradient_bytes(self) -> float:
        return sum(gradient.size for gradient in self.gradients)


@dataclass(frozen=True)
class Prediction:
    """A step on `gpus` GPUs. `exposed` is the time beyond one rank's computing.

    An efficiency of 1 means as many images/s per GPU as one GPU alone.
    """

    gpus: int
    step: float
    exposed: float
    images_per_second: float
    efficiency: float


def ring_seconds(size: float, ranks: int, link: Link) -> float:
    """Seconds of a ring all-reduce (reduce-scatter and all-gather): 2 (p - 1) messages of S / p bytes."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def all_reduce_seconds(size: float, gpus: int, machine: Machine) -> float:
    """Seconds of an all-reduce of `size` bytes over `gpus` GPUs; the last node counts as full.

    Each GPU reduces its part within its node and then with its peers of the other nodes, which share the cards.
    """
    nodes = math.ceil(gpus / machine.gpus)
    if nodes == 1:
        return ring_seconds(size, gpus, machine.intra)
    return ring_seconds(size, machine.gpus, machine.intra) + ring_seconds(size, nodes, machine.inter)


def in_buckets(gradients: Sequence[Gradient], bucket_mb: float) -> list[Gradient]:
    """Return the buckets that DistributedDataParallel makes: one is full when it has reached its size, and ready with
    its last gradient."""
    buckets, size, limit = [], 0.0, float(_FIRST_BUCKET)
    for position, gradient in enumerate(gradients):
        size += gradient.size
        if size >= limit or position == len(gradients) - 1:
            buckets.append(Gradient(size, gradient.ready))
            size, limit = 0.0, bucket_mb * MIB
    return buckets


def overlapped_seconds(backward: float, buckets: Sequence[Gradient], send: Callable[[float], float]) -> float:
    """Seconds from the start of the backward pass until it and the last all-reduce have ended; `send` gives the seconds
    of an all-reduce of a number of bytes."""
    free = 0.0  # when the link is free again
    for bucket in buckets:
        free = max(bucket.ready * backward, free) + send(bucket.size)
    return max(backward, free)


def step_seconds(work: Work, gpus: int, machine: Machine, bucket_mb: float = 25.0, compression: float = 1.0) -> float:
    """Seconds from one step to the next on `gpus` GPUs. `compression`: bytes sent per byte of gradient."""

    def send(size: float) -> float:
        return all_reduce_seconds(size * compression, gpus, machine)

    return work.forward + overlapped_seconds(work.backward, in_buckets(work.gradients, bucket_mb), send)


def predict(work: Work, gpus: int, machine: Machine, bucket_mb: float = 25.0, compression: float = 1.0) -> Prediction:
    """Predict the step on `gpus` GPUs and compare it with that of one GPU."""
    step, alone = (step_seconds(work, count, machine, bucket_mb, compression) for count in (gpus, 1))
    return Prediction(gpus, step, step - work.forward - work.backward, gpus * work.images / step, alone / step)


def check_model(name: str) -> None:
    """Raise UserError with the nearest names if timm does not know the model."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"--model {name}: no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))


def gradients_of(name: str) -> tuple[Gradient, ...]:
    """Return a model's gradients in float32, from its last parameter to its first; nothing is allocated."""
    check_model(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    return even_gradients([4.0 * parameter.numel() for parameter in reversed(list(model.parameters()))])


def even_gradients(sizes: Sequence[float]) -> tuple[Gradient, ...]:
    """Return gradients whose share of the backward pass is in proportion to their bytes.

    Args:
        sizes: Bytes, in the order in which they become ready.
    """
    total, done, gradients = sum(sizes), 0.0, []
    for size in sizes:
        done += size
        gradients.append(Gradient(size, done / total))
    return tuple(gradients)


def computing(seconds: float, images: int, gradients: Sequence[Gradient]) -> Work:
    """Return the work of a rank whose forward and backward pass take `seconds`, the backward pass twice as long."""
    return Work(images, seconds * (1 - _BACKWARD), seconds * _BACKWARD, tuple(gradients))


Report = tuple[dict[str, Any], list[str]]  # for --json, and lines for people


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    if args.images_per_second is None and not args.published:
        raise UserError("scaling: give --images-per-second, what one GPU alone does, or --published")
    found, lines = published() if args.published else predicted(args)
    print(json.dumps(found) if args.json else "\n".join(lines), flush=True)
    return 0


def predicted(args: Namespace) -> Report:
    """Predict the step on `--gpus`."""
    work = computing(args.batch_size / args.images_per_second, args.batch_size, gradients_of(args.model))
    conditions = {"bucket_mb": args.bucket_mb, "compression": 0.5 if args.grad_compression == "bf16" else 1.0}
    machine = machine_from(args)
    rows = [predict(work, gpus, machine, **conditions) for gpus in sorted(set(args.gpus))]
    found = {"machine": asdict(machine), "conditions": conditions, "predicted": [asdict(row) for row in rows]}
    lines = [
        f"predicted for {args.model}, {work.images} images per GPU, {work.gradient_bytes / 1e6:.1f} MB of gradients: "
        f"{args.bucket_mb:g} MiB buckets, {args.grad_compression} compression",
        f"{args.machine}: {machine.gpus} GPUs a node, {machine.intra.bandwidth / 1e9:.2f} GB/s and "
        f"{machine.intra.latency * 1e6:.1f} us in it, {machine.inter.bandwidth * 8 / 1e9:.1f} Gbit/s and "
        f"{machine.inter.latency * 1e6:.1f} us between nodes",
        f"{'GPUs':>6}{'step':>13}{'exposed':>13}{'images/s':>12}{'efficiency':>12}",
    ]
    for row in rows:
        times = f"{1000 * row.step:10.1f} ms{1000 * row.exposed:10.1f} ms"
        lines.append(f"{row.gpus:6}{times}{row.images_per_second:12.1f}{row.efficiency:11.1%}")
    return found, lines


def machine_from(args: Namespace) -> Machine:
    """Return the machine that the flags name."""
    machine, gbits, microseconds = machine_of(args.machine, args.link_efficiency), args.node_gbits, args.latency_us
    inter = Link(
        machine.inter.latency if microseconds is None else microseconds * 1e-6,
        machine.inter.bandwidth if gbits is None else gbits / 8 * 1e9,
    )
    return Machine(args.gpus_per_node or machine.gpus, machine.intra, inter)


def machine_of(name: str, efficiency: float = LINK_EFFICIENCY) -> Machine:
    """Return a row of `MACHINES`, its links at `efficiency` of their nominal bandwidth."""
    row = MACHINES[name]
    return Machine(
        row.gpus,
        Link(row.intra_us * 1e-6, row.gpu_gbytes * 1e9 * efficiency),
        Link(row.inter_us * 1e-6, row.cards * row.card_gbits / 8 * 1e9 * efficiency),
    )


def published() -> Report:
    """Compare published throughputs with the model: what it predicts with the machine's own links, and the bandwidth
    between nodes that alone would explain the published number."""
    found = [row for runs in PUBLISHED for row in compared(runs)]
    lines = [
        "published images/s, predicted ones with the machine's own links, and the Gbit/s out of a node that alone "
        "would explain the published number (images per GPU are assumed)",
        f"{'':28}{'per GPU':>8}{'GPUs':>6}{'published':>11}{'per GPU':>9}{'predicted':>11}{'Gbit/s':>9}",
    ]
    for row in found:
        gbits = "" if row["gbits"] is None else f"{row['gbits']:.2f}"
        lines.append(
            f"{row['name']:28}{row['batch_size']:8}{row['gpus']:6}{row['images_per_second']:11.0f}"
            f"{row['efficiency']:9.1%}{row['predicted']:11.0f}{gbits:>9}"
        )
    return {"published": found}, lines


def compared(runs: PublishedRuns) -> list[dict[str, Any]]:
    """Return a row per published throughput; `gbits` is None for `known`, and where no bandwidth explains it."""
    gradients, (gpus, rate) = gradients_of(runs.model), runs.known
    machine = replace(machine_of(runs.machine), gpus=runs.gpus_per_node)
    step = gpus * runs.batch_size / rate
    tried = [computing(share * step, runs.batch_size, gradients) for share in np.linspace(0.2, 1, 400)]
    steps = [step_seconds(work, gpus, machine) for work in tried]
    seconds = np.interp(step, steps, [work.forward + work.backward for work in tried])
    work = computing(float(seconds), runs.batch_size, gradients)

    def throughput(gpus: int, machine: Machine) -> float:
        return predict(work, gpus, machine).images_per_second

    rows = []
    for gpus, rate in runs.throughputs.items():
        slower = [replace(machine, inter=Link(machine.inter.latency, gbits / 8 * 1e9)) for gbits in _GBITS]
        rates = [throughput(gpus, each) for each in slower]
        explained = (gpus, rate) != runs.known and rates[0] <= rate <= rates[-1]
        rows.append(
            {
                "name": runs.name,
                "batch_size": runs.batch_size,
                "gpus": gpus,
                "images_per_second": rate,
                "efficiency": rate / gpus * runs.known[0] / runs.known[1],
                "predicted": throughput(gpus, machine),
                "gbits": float(np.interp(rate, rates, _GBITS)) if explained else None,
            }
        )
    return rows

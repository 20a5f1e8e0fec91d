"""Step time of data-parallel training on paper: alpha-beta links, and all-reduces in buckets under the backward pass.

A message of S bytes over a link takes latency + S / bandwidth (alpha and beta). Gradients are summed bucket by bucket,
in the order in which they become ready, one bucket at a time, while the backward pass goes on. Times are in seconds,
sizes in bytes, bandwidths in bytes/s in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

MIB = 2**20
_FIRST_BUCKET = MIB  # of DistributedDataParallel, so that the first all-reduce starts early


@dataclass(frozen=True)
class Link:
    """What joins two devices, or two nodes."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Nodes of `gpus` GPUs.

    Attributes:
        intra: Of one GPU to the others of its node.
        inter: Of a node to the others, all its cards together.
    """

    gpus: int
    intra: Link
    inter: Link


class Gradient(NamedTuple):
    """A parameter's gradient, or a bucket of them. `ready`: after which share of the backward pass."""

    size: float
    ready: float


@dataclass(frozen=True)
class Work:
    """One rank's share of a step. Gradients come in the order in which they become ready."""

    images: int
    forward: float
    backward: float
    gradients: tuple[Gradient, ...]

    @property
    def gradient_bytes(self) -> float:
        return sum(gradient.size for gradient in self.gradients)


@dataclass(frozen=True)
class Conditions:
    """How a step is done, and what gets in its way.

    Attributes:
        bucket_mb: MiB of a bucket, as DistributedDataParallel's `bucket_cap_mb`.
        compression: Bytes sent per byte of gradient: 0.5 for bfloat16.
        algorithm: `"hierarchical"` (within the nodes, then between them) or `"ring"` (of all GPUs).
        overlap: Off: nothing is sent before the backward pass has ended.
        contention: Share of a GPU's speed that a transfer under way costs it, in [0, 1).
        jitter: Standard deviation of a rank's compute time as a share of it; a step waits for the slowest rank.
        input_rate: Images/s that all ranks together can be fed with.
    """

    bucket_mb: float = 25.0
    compression: float = 1.0
    algorithm: str = "hierarchical"
    overlap: bool = True
    contention: float = 0.0
    jitter: float = 0.0
    input_rate: float = math.inf


@dataclass(frozen=True)
class Prediction:
    """A step on so many GPUs; `exposed` is what it takes longer than one rank's computing.

    An efficiency of 1 means as many images/s per GPU as one GPU alone.
    """

    gpus: int
    step: float
    exposed: float
    images_per_second: float
    efficiency: float


def ring_seconds(size: float, ranks: int, link: Link) -> float:
    """An all-reduce as reduce-scatter and all-gather around a ring: 2 (p - 1) messages of S / p bytes."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def all_reduce_seconds(size: float, gpus: int, machine: Machine, algorithm: str = "hierarchical") -> float:
    """An all-reduce of `size` bytes over `gpus` GPUs; the last node counts as full.

    Hierarchical: each GPU reduces its part within its node and then with its peers of the other nodes, which all share
    the nodes' cards. Ring: every step waits for the slowest link, and each card carries a ring of its own.
    """
    nodes = math.ceil(gpus / machine.gpus)
    if nodes == 1:
        return ring_seconds(size, gpus, machine.intra)
    if algorithm == "ring":
        latency = max(machine.intra.latency, machine.inter.latency)
        slowest = Link(latency, min(machine.intra.bandwidth, machine.inter.bandwidth))
        return ring_seconds(size, gpus, slowest)
    return ring_seconds(size, machine.gpus, machine.intra) + ring_seconds(size, nodes, machine.inter)


def in_buckets(gradients: Sequence[Gradient], bucket_mb: float) -> list[Gradient]:
    """Buckets as DistributedDataParallel fills them: one is full when it has reached its size, and ready with its last
    gradient."""
    buckets, size, limit = [], 0.0, float(_FIRST_BUCKET)
    for position, gradient in enumerate(gradients):
        size += gradient.size
        if size >= limit or position == len(gradients) - 1:
            buckets.append(Gradient(size, gradient.ready))
            size, limit = 0.0, bucket_mb * MIB
    return buckets


def overlapped_seconds(
    backward: float, buckets: Sequence[Gradient], send: Callable[[float], float], contention: float = 0.0
) -> float:
    """From the start of the backward pass until its end and that of the last all-reduce.

    Args:
        send: Seconds of an all-reduce of so many bytes.
    """
    now = done = free = 0.0  # the time, the work done by then, when the link is free again
    for bucket in buckets:
        now = _time_after(bucket.ready * backward - done, now, free, contention)
        done = bucket.ready * backward
        free = max(now, free) + send(bucket.size)
    return max(_time_after(backward - done, now, free, contention), free)


def _time_after(work: float, now: float, busy_until: float, contention: float) -> float:
    """When `work` is done that goes on at a speed of 1 - contention until `busy_until`, now or later, and at 1 then."""
    slowed = (busy_until - now) * (1 - contention)
    return now + work / (1 - contention) if work <= slowed else busy_until + work - slowed


def slowest_factor(ranks: int, jitter: float) -> float:
    """Expected time of the slowest of `ranks` over the mean, for normally distributed times (Blom's approximation)."""
    return 1 + jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def step_seconds(work: Work, gpus: int, machine: Machine, conditions: Conditions) -> float:
    """Seconds from one step to the next on `gpus` GPUs."""

    def send(size: float) -> float:
        return all_reduce_seconds(size * conditions.compression, gpus, machine, conditions.algorithm)

    slowest = slowest_factor(gpus, conditions.jitter)
    buckets = in_buckets(work.gradients, conditions.bucket_mb)
    if conditions.overlap:
        backward = overlapped_seconds(work.backward * slowest, buckets, send, conditions.contention)
    else:
        backward = work.backward * slowest + sum(send(bucket.size) for bucket in buckets)
    return max(work.forward * slowest + backward, gpus * work.images / conditions.input_rate)


def predict(work: Work, gpus: int, machine: Machine, conditions: Conditions) -> Prediction:
    """The step on `gpus` GPUs, held against one GPU alone."""
    step, alone = (step_seconds(work, count, machine, conditions) for count in (gpus, 1))
    return Prediction(gpus, step, step - work.forward - work.backward, gpus * work.images / step, alone / step)

"""Predict the step time of data-parallel training: computing, and all-reduces of buckets under the backward pass.

A message of S bytes over a link takes latency + S / bandwidth. DistributedDataParallel sums gradients bucket by bucket,
in the order in which they become ready, one bucket at a time, while the backward pass goes on. Times are in seconds,
sizes in bytes, bandwidths in bytes/s in one direction.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import timm
import torch

from tlt.errors import UserError
from volo import models as models  # registers them with timm

MIB = 2**20
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


class Transfer(NamedTuple):
    """A measured all-reduce."""

    size: float
    ranks: int
    seconds: float


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


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """Return the link whose ring all-reduces differ least from the measured ones (least squares of relative errors).

    A latency below 0 becomes 0. Needs small sizes, where latency counts, and large ones, where bandwidth does.
    """
    size, ranks, seconds = np.array(transfers, float).T
    messages = 2 * (ranks - 1)
    terms = np.stack([messages, messages / ranks * size], 1) / seconds[:, None]  # times (latency, 1 / bandwidth) is 1
    wanted = np.ones(len(transfers))
    latency, per_byte = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, np.linalg.lstsq(terms[:, 1:], wanted, rcond=None)[0][0]
    return Link(float(latency), float(1 / per_byte))


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

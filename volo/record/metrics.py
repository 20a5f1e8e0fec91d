"""Measurements of training and validation: sums that stay on the device until they are read, results, and the GPU's
utilisation."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt.data.augment.operations import precise_dtype
from volo.cluster.distributed import World, from_all, sum_over_ranks


class Sums:
    """Named sums, such as losses over images, in float64 if the device has it. `add` never waits for the device."""

    def __init__(self, names: tuple[str, ...], world: World) -> None:
        self.names = names
        self.world = world
        self._values = torch.zeros(len(names), dtype=precise_dtype(world.device), device=world.device)

    def add(self, *values: Tensor | float) -> None:
        """Add one value per name, in order."""
        for position, value in zip(range(len(self.names)), values, strict=True):
            self._values[position] += value.detach().to(self._values.dtype) if isinstance(value, Tensor) else value

    def totals(self) -> dict[str, float]:
        """Return the sums over all ranks' images. This synchronises; every rank must call it."""
        over_ranks = sum_over_ranks(self._values) / self.world.tensor_parallel  # ranks of a group count the same images
        return dict(zip(self.names, over_ranks.tolist(), strict=True))

    def by_rank(self) -> list[list[float]]:
        """Return the sums of each rank that sees different images, for `restore`. This synchronises all ranks."""
        return from_all(self._values.tolist())[:: self.world.tensor_parallel]

    def restore(self, by_rank: Sequence[Sequence[float]]) -> None:
        """Continue from the sums that `by_rank` returned. If the number of ranks has changed, rank 0 gets their total.
        Raises ValueError if a row does not have one number per name."""
        rows = torch.tensor(by_rank, dtype=torch.float64).reshape(-1, len(self.names))
        ranks = self.world.data_size
        if len(rows) != ranks:
            rows = torch.cat([rows.sum(0, keepdim=True), rows.new_zeros(ranks - 1, len(self.names))])
        self._values.copy_(rows[self.world.data_rank])

    def reset(self) -> None:
        """Start again from zero."""
        self._values.zero_()


def top_classes(logits: Tensor) -> Tensor:
    """Return the five classes with the largest logits (B, C), or all C, the largest first."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices


def correct_in_top(logits: Tensor, classes: Tensor) -> list[Tensor]:
    """Count the samples whose class has the largest logit, and those whose class is among the five largest.

    Args:
        logits: (B, C); with fewer than five classes, all of them are among the five largest.
        classes: (B,) int64; a class of -1 is never correct.
    """
    hits = top_classes(logits) == classes[:, None]  # (B, 5)
    return [hits[:, :1].any(dim=1).sum(), hits.any(dim=1).sum()]


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (0 to 1) of `count` images. Smaller differences may be chance."""
    z = 1.96
    middle = share + z * z / (2 * count)
    width = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    low, high = ((middle + sign * width) / (1 + z * z / count) for sign in (-1, 1))
    return low, high


def chance_interval(share: float, count: int, best_of: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of the share (0 to 1) of `count` images that guesses get right, each with a probability
    of `share`; with `best_of`, that of the best of so many series of guesses. It is the binomial distribution's."""
    if not 0 < share < 1:
        return share, share
    right = np.arange(count + 1)
    factorials = np.log(np.maximum(right, 1)).cumsum()  # their logarithms
    terms = factorials[-1] - factorials - factorials[::-1] + right * np.log(share) + right[::-1] * np.log1p(-share)
    at_most = np.exp(terms).cumsum() ** best_of
    low, high = np.searchsorted(at_most[:-1], (0.025, 0.975)) / count
    return float(low), float(high)


@dataclass(frozen=True)
class Interval:
    """Training since the last report. Losses and images are over all ranks, times are this rank's."""

    epoch: int
    update: int  # updates done in the whole run
    update_in_epoch: int
    updates_per_epoch: int
    updates: int  # updates in this interval
    images: int
    loss: float
    cls_loss: float
    dense_loss: float
    lr: float
    grad_norm: float
    seconds: float
    wait_seconds: float  # part of `seconds` spent waiting for data
    skipped_steps: int  # in the whole run
    teacher_losses: dict[str, float] = field(default_factory=dict)  # unweighted losses by teacher

    @property
    def images_per_second(self) -> float:
        """Throughput of all ranks together."""
        return self.images / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class EpochTotals:
    """Means over all images of an epoch, on all ranks."""

    images: int
    unreadable: int
    seconds: float
    loss: float
    cls_loss: float
    dense_loss: float
    lr: float
    teacher_losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent over a validation set, in which each image counts once."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: int
    seconds: float
    tokens: int = 0  # number of tokens whose label prefers a class
    dense_top1: float | None = None  # share of them whose prediction is the top class of their label
    annotator_top1: float | None = None  # share whose label's best class is the image's; None if classes differ
    answers: Any = field(default=None, repr=False)  # (2, N), of `volo.record.confusion.Answers`

    def __str__(self) -> str:
        dense = "" if self.dense_top1 is None else f", dense top-1 {self.dense_top1:.3f} % of {self.tokens} tokens"
        if self.annotator_top1 is not None:
            dense += f", {self.annotator_top1:.3f} % of whose labels name the image's class"
        of = f" of {self.images + self.unreadable}" if self.unreadable else ""
        broken = f", {self.unreadable} unreadable images left out" if self.unreadable else ""
        rate = self.images / max(self.seconds, 1e-9)
        return (
            f"top-1 {self.top1:.3f} %, top-5 {self.top5:.3f} %, loss {self.loss:.4f} "
            f"over {self.images}{of} images{broken}{dense} ({rate:.0f} images/s)"
        )


# Peak 10^12 FLOP/s of dense bfloat16 or float16 products, from NVIDIA's data sheets. The first matching name counts.
_PEAKS = {
    **{"GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989},
    **{"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148},
    **{"A100": 312, "A800": 312, "A30": 165, "A10G": 70, "A10": 125, "A40": 150},
    **{"L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65},
}


@dataclass(frozen=True)
class Arithmetic:
    """The number of operations of a training step, and the peak rate of the device."""

    flops_per_image: float  # of forward and backward pass, without recomputation
    peak: float | None  # peak FLOP/s of a device; None if unknown

    def use(self, images_per_second: float) -> dict[str, float]:
        """Return a device's `tflops_per_second` and `mfu` (share of the peak in [0, 1]) at this throughput."""
        rate = images_per_second * self.flops_per_image
        return {"tflops_per_second": rate / 1e12} | ({"mfu": rate / self.peak} if self.peak else {})


def peak_flops(device_name: str, dtype: torch.dtype | None) -> float | None:
    """Return a GPU's peak FLOP/s from its data sheet; None for other devices and for float32 (`dtype` None)."""
    if dtype is None:
        return None
    words = device_name.replace("-", " ").split()
    return next((1e12 * peak for name, peak in _PEAKS.items() if set(name.split()) <= set(words)), None)


def gpu_use(device: torch.device) -> dict[str, float]:
    """Return measurements of this rank's GPU; {} on other devices. `gpu_memory_bytes` is the most that tensors have
    occupied in the whole run, `gpu_share` the current utilisation in [0, 1] (needs nvidia-ml-py)."""
    if device.type != "cuda":
        return {}
    values = {"gpu_memory_bytes": float(torch.cuda.max_memory_allocated(device))}
    with suppress(Exception):  # the library is missing or older than the driver, which must not end a run
        values["gpu_share"] = torch.cuda.utilization(device) / 100
    return values

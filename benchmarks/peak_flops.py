"""The arithmetic that a device reaches on a large matrix product: what model FLOPs utilisation is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.phases import synchronize
from tlt.models.linear import linear

_SIDE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 6


@torch.no_grad()
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the quickest of a few products of square matrices, torch's own and those of the models' linear layers
    (which may be another library's)."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    layer = nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    ways: tuple[Callable[[], Tensor], ...] = (lambda: left @ right, lambda: linear(layer, left))
    return 2 * side**3 / min(_seconds(way, device) for way in ways for _ in range(_REPEATS))


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def shown_peak(peak: float, device: torch.device, dtype: torch.dtype) -> str:
    """The peak in words."""
    side, name = _SIDE[device.type], str(dtype).removeprefix("torch.")
    return f"{peak / 1e12:.2f} TFLOP/s, measured: product of two {side} x {side} matrices of {name}"

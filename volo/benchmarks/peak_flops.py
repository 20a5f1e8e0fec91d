"""The arithmetic that a device reaches on a large matrix product: what model FLOPs utilisation is measured against."""

from __future__ import annotations

import time

import torch

from volo.benchmarks.phases import synchronize

_SIDE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 5


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the quickest of a few products of square matrices, with the settings that the process has."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    quickest = float("inf")
    for _ in range(_REPEATS + 1):
        synchronize(device)
        began = time.perf_counter()
        left @ right
        synchronize(device)
        quickest = min(quickest, time.perf_counter() - began)
    return 2 * side**3 / quickest


def shown_peak(peak: float, device: torch.device, dtype: torch.dtype) -> str:
    """The peak in words."""
    side, name = _SIDE[device.type], str(dtype).removeprefix("torch.")
    return f"{peak / 1e12:.2f} TFLOP/s, measured: product of two {side} x {side} matrices of {name}"

"""How busy the GPU of rank 0 is, and what share of its arithmetic a run uses."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

# 10^12 FLOP/s of dense products of bfloat16 or float16, from NVIDIA's data sheets. The first name that fits counts.
_PEAKS = {
    **{"GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989},
    **{"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148},
    **{"A100": 312, "A800": 312, "A30": 165, "A10G": 70, "A10": 125, "A40": 150},
    **{"L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65},
}


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a training step."""

    flops_per_image: float  # forwards and backwards, without what is recomputed
    peak: float | None  # FLOP/s of a device; None where it isn't known

    def use(self, images_per_second: float) -> dict[str, float]:
        """Return `tflops_per_second`, and `mfu`, its share of the peak in [0, 1], of a device with so many images."""
        rate = images_per_second * self.flops_per_image
        return {"tflops_per_second": rate / 1e12} | ({"mfu": rate / self.peak} if self.peak else {})


def peak_flops(device_name: str, dtype: torch.dtype | None) -> float | None:
    """Return the FLOP/s of a GPU by its data sheet; None for other devices, and for float32 (`dtype` None)."""
    if dtype is None:
        return None
    words = device_name.replace("-", " ").split()
    return next((1e12 * peak for name, peak in _PEAKS.items() if set(name.split()) <= set(words)), None)


def gpu_use(device: torch.device) -> dict[str, float]:
    """Return what this rank's GPU tells: `gpu_memory_bytes`, the most that tensors have occupied in the whole run, and
    `gpu_share`, how busy it was in the last moment, in [0, 1] (needs nvidia-ml-py). Nothing on other devices."""
    if device.type != "cuda":
        return {}
    found = {"gpu_memory_bytes": float(torch.cuda.max_memory_allocated(device))}
    with suppress(Exception):  # the library is missing or older than the driver: no run may end because of it
        found["gpu_share"] = torch.cuda.utilization(device) / 100
    return found

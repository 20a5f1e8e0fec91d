"""How busy the machine of rank 0 is: its CPUs and its GPU, and what share of the GPU's arithmetic a run uses."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """The arithmetic of a training step.

    Attributes:
        flops_per_image: Floating-point operations of the model, forwards and backwards, without what is recomputed.
        peak: FLOP/s of a device; None where it isn't known.
    """

    flops_per_image: float
    peak: float | None

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


class MachineUse:
    """Measures from one look to the next.

    Args:
        stat: The file in which Linux counts the time of its CPUs.
    """

    def __init__(self, device: torch.device, stat: Path = Path("/proc/stat")) -> None:
        self._device, self._stat = device, stat
        self._before = self._cpu_ticks()

    def look(self) -> dict[str, float]:
        """Return what has been measured since the last look; what the system doesn't tell is left out.

        - `cpu_share`: of all CPUs of the machine, in [0, 1];
        - `gpu_memory_bytes`: the most that tensors have occupied on this rank's GPU in the whole run;
        - `gpu_share`: of the last moment's time in which this rank's GPU was busy, in [0, 1]; needs nvidia-ml-py.
        """
        (idle_before, all_before), self._before = self._before, self._cpu_ticks()
        idle, ticks = self._before
        found = {}
        if ticks > all_before:
            found["cpu_share"] = 1 - (idle - idle_before) / (ticks - all_before)
        if self._device.type == "cuda":
            found["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            with suppress(Exception):  # the library is missing or older than the driver: no run may end because of it
                found["gpu_share"] = torch.cuda.utilization(self._device) / 100
        return found

    def _cpu_ticks(self) -> tuple[int, int]:
        """Return the idle and all time of all CPUs since the system started, zeros where it doesn't tell."""
        with suppress(OSError, ValueError, IndexError):
            # user, nice, system, idle, waiting for a disk, interrupts (2), stolen; the rest is part of the first two
            fields = [int(n) for n in self._stat.read_text().splitlines()[0].split()[1:9]]
            return fields[3] + fields[4], sum(fields)
        return 0, 0

"""How busy the machine of rank 0 is: CPUs, network and GPU memory, from files of Linux alone."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch

_RDMA_WORD = 4  # bytes, in which InfiniBand counts


class MachineUse:
    """Measures from one look to the next.

    Args:
        root: Folder that holds `proc` and `sys`.
    """

    def __init__(self, device: torch.device, root: Path = Path("/")) -> None:
        self._device, self._root = device, root
        self._before = self._now()

    def look(self) -> dict[str, float]:
        """Return what has been measured since the last look; what the system doesn't tell is left out.

        - `cpu_share`: of all CPUs of the machine, in [0, 1];
        - `network_bytes_per_second`: sent and received by network cards, RDMA (InfiniBand, RoCE) included;
        - `gpu_memory_bytes`: the most that tensors have occupied on this rank's GPU in the whole run.
        """
        (idle_before, all_before, bytes_before, before), self._before = self._before, self._now()
        idle, ticks, sent, now = self._before
        found = {}
        if ticks > all_before:
            found["cpu_share"] = 1 - (idle - idle_before) / (ticks - all_before)
        if now > before and self._interfaces():
            found["network_bytes_per_second"] = max(0, sent - bytes_before) / (now - before)
        if self._device.type == "cuda":
            found["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return found

    def _now(self) -> tuple[int, int, int, float]:
        idle = ticks = 0
        with suppress(OSError, ValueError, IndexError):
            # user, nice, system, idle, waiting for a disk, interrupts (2), stolen; the rest is part of the first two
            fields = [int(n) for n in (self._root / "proc/stat").read_text().splitlines()[0].split()[1:9]]
            idle, ticks = fields[3] + fields[4], sum(fields)
        sent = sum(_count(c) for i in self._interfaces() for c in (i / "statistics").glob("[rt]x_bytes"))
        ports = (self._root / "sys/class/infiniband").glob("*/ports/*/counters")
        sent += sum(_RDMA_WORD * _count(c) for port in ports for c in port.glob("port_*_data"))
        return idle, ticks, sent, time.monotonic()

    def _interfaces(self) -> list[Path]:
        """Return the network cards; without any, as in a container, all interfaces but the machine's own."""
        found = [i for i in (self._root / "sys/class/net").glob("*") if i.name != "lo" and i.is_dir()]
        return [i for i in found if (i / "device").exists()] or found


def _count(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0

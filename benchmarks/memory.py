"""Memory: the peak of a function above the memory in use before it, and the memory that processes share."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from tlt.errors import UserError

Result = TypeVar("Result")
_STATUS, _RESET = (Path("/proc/self") / name for name in ("status", "clear_refs"))


def peak_of(work: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Do `work` and return its result and the largest increase of memory in bytes.

    CUDA: memory allocated by torch. CPU: resident memory of this process, so nothing else should run in it.

    Raises:
        UserError: The device is a CPU and /proc is missing.
    """
    _give_back()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if not _RESET.exists():
        raise UserError("peak memory on the CPU is read from /proc, which only Linux has: use --device cuda")
    _RESET.write_text("5")  # the high-water mark falls to what is resident now
    before = _resident("VmRSS")
    result = work()
    return result, max(0, _resident("VmHWM") - before)


def give_back_at_once() -> None:
    """Make glibc return freed memory to the system at once, so that resident memory is the memory of tensors.

    Without it blocks of up to 32 MiB come from a heap that has gaps; with it allocating takes several times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 16)
        mallopt(trim_threshold, 1 << 16)


def _give_back() -> None:
    """Return free memory to the system: garbage that is freed during the work, or free memory that it reuses, would
    hide a part of the peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise UserError(f"/proc/self/status has no {field}: peak memory on the CPU can't be read here")
    return int(found[1]) * 1024


@dataclass(frozen=True)
class Resident:
    """Bytes of a process in memory (smaps_rollup).

    Attributes:
        rss: All pages; a shared page counts fully in each process.
        pss: A page that n processes share counts 1/n.
        private: Pages of this process alone.
        anonymous: As `pss`, of memory that belongs to no file; only a process and its forks share that.
    """

    rss: int
    pss: int
    private: int
    anonymous: int

    def __sub__(self, before: Resident) -> Resident:
        return Resident(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


def resident(pid: int | None = None) -> Resident | None:
    """Return the memory of a process, by default this one; None if the system does not tell (Linux does)."""
    rollup = Path("/proc") / ("self" if pid is None else str(pid)) / "smaps_rollup"
    if not rollup.exists():
        return None
    fields = re.findall(r"^(\w+):\s+(\d+) kB$", rollup.read_text(), re.MULTILINE)
    sizes = {name: int(number) * 1024 for name, number in fields}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Resident(sizes["Rss"], sizes["Pss"], private, sizes.get("Pss_Anon", sizes["Pss"]))

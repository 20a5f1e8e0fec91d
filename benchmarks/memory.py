"""Memory: the peak of a piece of work above what was in use when it began, and what processes share."""

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
    """Do `work` and return its result and the bytes by which memory in use rose at its highest.

    CUDA: what torch's allocator had given out. CPU: resident memory of this process, so nothing else should run in it.

    Raises:
        UserError: A CPU measurement where /proc is missing.
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
    """From here on what is freed goes back to the system at once (glibc), so that resident memory is what tensors hold.

    Without it blocks of up to 32 MiB come from a heap that has gaps; with it allocating takes several times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 16)
        mallopt(trim_threshold, 1 << 16)


def _give_back() -> None:
    """What is garbage already must not be freed during the work, nor what is free already be used by it: either would
    hide as much of the peak."""
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
    """Bytes of a process in memory.

    Attributes:
        rss: All of them; pages that processes share count in each.
        pss: A page that n processes share counts 1/n.
        private: Pages that no other process has.
        anonymous: As `pss`, of memory that isn't a file's: only a process and those that it forked share that.
    """

    rss: int
    pss: int
    private: int
    anonymous: int

    def __sub__(self, before: Resident) -> Resident:
        return Resident(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


def resident(pid: int | None = None) -> Resident | None:
    """Memory of a process, of this one by default; None where the system doesn't tell (Linux does)."""
    rollup = Path("/proc") / ("self" if pid is None else str(pid)) / "smaps_rollup"
    if not rollup.exists():
        return None
    fields = re.findall(r"^(\w+):\s+(\d+) kB$", rollup.read_text(), re.MULTILINE)
    sizes = {name: int(number) * 1024 for name, number in fields}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Resident(sizes["Rss"], sizes["Pss"], private, sizes.get("Pss_Anon", sizes["Pss"]))

"""How long the parts of a step take, without holding the device up."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Protocol

import torch


class Phases:
    """Seconds between marks, by the name of what ended at each. On CUDA the marks are events in the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str | None, Any]] = []  # name, seconds or event

    def start(self) -> None:
        """Begin; what came before counts nowhere."""
        self._marks.append((None, self._now()))

    def mark(self, name: str) -> None:
        """What ran since the last mark was `name`."""
        self._marks.append((name, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, added up. Waits for the device."""
        synchronize(self.device)
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                seconds[name] += _between(before, after)
        self._marks.clear()
        return dict(seconds)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _between(before: Any, after: Any) -> float:
    seconds: float = before.elapsed_time(after) / 1e3 if isinstance(before, torch.cuda.Event) else after - before
    return seconds


class Runner(Protocol):
    """What is timed of an arm."""

    phases: Phases

    def run(self, steps: int) -> int:
        """Do so many batches; returns how many images they had. `phases` has their parts."""

    def memory(self) -> dict[str, float]:
        """Bytes per image at a peak, by what the peak is of."""

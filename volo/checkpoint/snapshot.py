"""A copy of a checkpoint in host memory, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Key = tuple[object, ...]


class HostSnapshot:
    """Host memory for one checkpoint, as large as the file; kept from save to save, for getting it takes the longest.

    CUDA tensors go to page-locked memory, in the order of the current stream: the host waits for nothing, and the next
    step changes no weight before it is copied. Call `wait` before reading.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no memory yet, so that `reserve` overwrites nothing."""
        return not self._kept

    def reserve(self, payload: dict[str, Any]) -> None:
        """Get the memory for such a payload, of which only the shapes are read; in any thread, before `take`."""
        assert self.empty
        self._fill(payload, lambda buffer, value: buffer.zero_())

    def take(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return `payload` with all its tensors copied, into the memory of the copy before. Shared ones stay shared."""
        on_gpu: list[Tensor] = []

        def copy(buffer: Tensor, value: Tensor) -> None:
            buffer.copy_(value.detach(), non_blocking=True)
            if value.is_cuda:
                on_gpu.append(value)

        copied = self._fill(payload, copy)
        self._copied = torch.cuda.current_stream(on_gpu[0].device).record_event() if on_gpu else None
        return copied

    def wait(self) -> None:
        """Return when the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _fill(self, payload: dict[str, Any], fill: Callable[[Tensor, Tensor], object]) -> dict[str, Any]:
        before, self._kept = self._kept, {}
        shared: dict[Key, Tensor] = {}

        def copy(value: Any, key: Key) -> Any:
            if isinstance(value, dict):
                return {name: copy(item, (*key, name)) for name, item in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(copy(item, (*key, number)) for number, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value
            identity = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
            if value.numel() and identity in shared:
                return shared[identity]
            buffer = before.get(key)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
            fill(buffer, value)
            shared[identity] = self._kept[key] = buffer
            return buffer

        copied: dict[str, Any] = copy(payload, ())
        return copied

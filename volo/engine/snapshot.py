"""A copy of a checkpoint in host memory, so that training can go on while it is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Key = tuple[object, ...]


class HostSnapshot:
    """Host memory for one checkpoint, as large as the file; kept from save to save, because getting it takes longest.

    CUDA tensors go to page-locked memory, in the order of the current stream: the host waits for nothing, and the next
    step changes no weight before it is copied. Call `wait` before reading.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return `payload` with all its tensors copied, into the memory of the copy before. Shared ones stay shared."""
        before, self._kept = self._kept, {}
        on_gpu: list[Tensor] = []
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
            shared[identity] = self._kept[key] = buffer.copy_(value.detach(), non_blocking=True)
            if value.is_cuda:
                on_gpu.append(value)
            return buffer

        copied: dict[str, Any] = copy(payload, ())
        self._copied = torch.cuda.current_stream(on_gpu[0].device).record_event() if on_gpu else None
        return copied

    def wait(self) -> None:
        """Return when the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

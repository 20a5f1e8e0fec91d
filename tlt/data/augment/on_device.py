"""What every part of the device stage asks about its device: how to send it arrays, how much to give it at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CACHED_PIXELS = 2**16  # that one thread of a CPU works on at once: what an operation holds then stays in its cache


def precise_dtype(device: torch.device) -> torch.dtype:
    """The floats that repeat PIL's doubles on this device; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it; doubles where it has them."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        tensor = tensor.to(precise_dtype(device))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def in_small_pieces(device: torch.device) -> bool:
    """Whether many small pieces of work are quicker than few large ones: on a CPU they stay in the cache."""
    return device.type == "cpu"


def portion(images: Tensor) -> int:
    """How many of the images (B, C, H, W) to work on at once. Nothing depends on it but the time it takes."""
    if not in_small_pieces(images.device):
        return max(1, len(images))
    return max(1, _CACHED_PIXELS * torch.get_num_threads() // (images.shape[2] * images.shape[3]))

"""Weights and images by the rule of the golden file: a function of the state-dict names, nothing to ship."""

import zlib

import numpy as np
import torch
from torch import Tensor, nn

import tlt  # noqa: F401  registers LV-ViT
import volo  # noqa: F401  registers VOLO


def filled_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    noise = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF).standard_normal(shape)
    if name.endswith("running_var"):
        noise = 1 + 0.1 * np.abs(noise)
    elif name.endswith("running_mean"):
        noise = 0.1 * noise
    elif name.endswith("bias"):
        noise = 0.02 * noise
    elif name in ("pos_embed", "cls_token"):
        noise = 0.2 * noise
    elif noise.ndim == 1:
        noise = 1 + 0.1 * noise
    else:
        noise = noise / np.sqrt(np.prod(shape[1:]))
    return noise.astype(np.float32)


def fill(model: nn.Module) -> nn.Module:
    state = {k: torch.from_numpy(filled_value(k, tuple(v.shape))) for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def make_images(count: int, height: int, width: int | None = None, channels: int = 3) -> Tensor:
    shape = (count, channels, height, width or height)
    return torch.from_numpy(np.random.RandomState(1234).standard_normal(shape).astype(np.float32))


def deviation(value: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """Return the largest difference, relative to the largest absolute value of what is expected."""
    value, expected = (torch.as_tensor(t).detach().double() for t in (value, expected))
    assert value.shape == expected.shape
    return ((value - expected).abs().max() / expected.abs().max()).item()

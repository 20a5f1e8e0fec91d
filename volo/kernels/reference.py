"""Outlook attention by unfold and fold, as it is written in the paper: any kernel size, stride and padding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

# Part of the error message of implementations without second derivatives.
SECOND_DERIVATIVES = (
    'model.set_outlook_kernel("reference") has them (on a CPU under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))'
)


def outlook_attention(
    v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, scale: float, dropout: float
) -> Tensor:
    """As `volo.kernels.outlook_attention`."""
    batch, height, width, channels = v.shape
    places = kernel_size * kernel_size
    num_heads = logits.shape[-1] // (places * places)
    windows = logits.shape[1] * logits.shape[2]
    weights = (logits * scale).reshape(batch, windows, num_heads, places, places).softmax(dim=-1)
    weights = F.dropout(weights, dropout).transpose(1, 2)  # (B, heads, windows, written, read)
    values = F.unfold(v.permute(0, 3, 1, 2), kernel_size, padding=padding, stride=stride)  # (B, C * places, windows)
    values = values.reshape(batch, num_heads, channels // num_heads, places, windows).permute(0, 1, 4, 3, 2)
    mixed = weights.to(values.dtype) @ values  # (B, heads, windows, places, D)
    mixed = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * places, windows)
    out = F.fold(mixed, (height, width), kernel_size, padding=padding, stride=stride)
    return out.permute(0, 2, 3, 1)


def why_unsupported(
    v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, dropout: float
) -> str | None:
    """Return None: it computes everything."""
    return None

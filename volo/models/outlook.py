"""Outlook attention (VOLO, section 3.1): every k x k window mixes its own pixels with weights read off its centre.

`outlook_attention` is the seam: modules call this one function, faster kernels take its place with its arguments.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def outlook_attention(
    v: Tensor,
    logits: Tensor,
    num_heads: int,
    kernel_size: int = 3,
    stride: int = 2,
    padding: int = 1,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """Mix the values of each window and add up what the windows give to each pixel; plain unfold and fold.

    Args:
        v: Values (B, H, W, C), C = heads * D.
        logits: (B, h, w, heads * k^4), one row of k^2 x k^2 per head and window: for each place that is written, one
            logit per place that is read; h = ceil(H / stride) and w likewise for k 3, stride 2, padding 1.
        num_heads: Heads.
        kernel_size: k, the side of a window.
        stride: Pixels from one window to the next.
        padding: Zero pixels around the map.
        scale: Multiplies the logits before their softmax.
        dropout: Rate of dropout on the weights; 0 outside training.

    Returns:
        (B, H, W, C)
    """
    batch, height, width, channels = v.shape
    places = kernel_size * kernel_size
    windows = logits.shape[1] * logits.shape[2]
    weights = (logits * scale).reshape(batch, windows, num_heads, places, places).softmax(dim=-1)
    weights = F.dropout(weights, dropout).transpose(1, 2)  # (B, heads, windows, written, read)
    values = F.unfold(v.permute(0, 3, 1, 2), kernel_size, padding=padding, stride=stride)  # (B, C * places, windows)
    values = values.reshape(batch, num_heads, channels // num_heads, places, windows).permute(0, 1, 4, 3, 2)
    mixed = weights.to(values.dtype) @ values  # (B, heads, windows, places, D)
    mixed = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * places, windows)
    out = F.fold(mixed, (height, width), kernel_size, padding=padding, stride=stride)
    return out.permute(0, 2, 3, 1)

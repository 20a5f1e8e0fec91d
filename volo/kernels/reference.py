"""Outlook attention by slices, products and sums of torch alone: on any device, with all derivatives.

Exports get it: other programs have these operations, but may lack unfold and fold (ONNX's Col2Im, which TensorRT
doesn't have).

In shapes: B images, H x W cells, h x w windows, D channels per head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def outlook_attention(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """As `volo.kernels.outlook_attention`; the softmax is computed in float32 at least."""
    height, width = v.shape[1:3]
    batch, rows, columns, heads = *logits.shape[:3], logits.shape[-1] // 81
    depth = v.shape[-1] // heads
    # An odd map has no pixel where its last windows end.
    padded = F.pad(v, (0, 0, 1, 2 * columns - width, 1, 2 * rows - height))
    pixels = [padded[:, y : y + 2 * rows - 1 : 2, x : x + 2 * columns - 1 : 2] for y in range(3) for x in range(3)]
    # Reshaped, not unflattened: torch 2.11 compiles no unflatten under torch.set_default_device.
    values = torch.stack(pixels, dim=3).reshape(batch, rows, columns, 9, heads, depth).transpose(3, 4)
    weights = (logits * scale).reshape(batch, rows, columns, heads, 9, 9)
    weights = weights.softmax(-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
    mixed = (F.dropout(weights, dropout) @ values).reshape(batch, rows, columns, heads, 3, 3, depth)
    out = _join(_join(mixed, 1, -3), 2, -2)  # (B, 2h, 2w, heads, D)
    return out[:, :height, :width].flatten(3)


def _join(windows: Tensor, axis: int, offsets: int) -> Tensor:
    """Add up, along one axis, what n windows write to 2n lines; the axis `offsets` holds their three lines.

    The middle one is on an even line; the last one, and the first one of the next window, are on the odd line after it.
    """
    first, even, odd = windows.unbind(offsets)
    following = F.pad(first, (0, 0) * (first.ndim - 1 - axis) + (-1, 1))  # of the next window, nothing after the last
    return torch.stack((even, odd + following), axis + 1).flatten(axis, axis + 1)


def why_unsupported(v: Tensor, logits: Tensor, dropout: float) -> str | None:
    """Return None: it computes everything."""
    return None

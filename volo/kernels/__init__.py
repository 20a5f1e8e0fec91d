"""Outlook attention (VOLO, section 3.1): every 3 x 3 window mixes its pixels with weights computed from its centre.

Windows are 2 pixels apart, and the map is padded by 1 pixel. Modules call `outlook_attention`, which chooses one of
three implementations of the same arithmetic:

    triton      three fused programs, on CUDA devices
    windows     strided views, matrix products, sums of slices; on any device, meant for CPUs
    reference   slices, products and sums of torch alone: for exports, dropout and all derivatives; on any device

In shapes: B images, H x W cells, h x w windows, D channels per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.errors import UserError
from tlt.models.fast_ops import own_operators_fit, transformed
from volo.kernels import triton_outlook, windows


class OutlookKernel(NamedTuple):
    """An implementation, with shapes as in `outlook_attention` below."""

    compute: Callable[[Tensor, Tensor, float, float], Tensor]  # of v, logits, scale, dropout
    why_unsupported: Callable[[Tensor, Tensor, float], str | None]  # of v, logits, dropout; None: it computes this


def reference(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """As `outlook_attention`; the softmax is computed in float32 at least.

    Other programs have these operations, but may lack unfold and fold (ONNX's Col2Im, which TensorRT doesn't have).
    """
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


# "auto" takes the first that fits. `volo.config.flags_train` has the names as choices of --outlook-kernel.
KERNELS = {
    "triton": OutlookKernel(triton_outlook.outlook_attention, triton_outlook.why_unsupported),
    "windows": OutlookKernel(windows.outlook_attention, windows.why_unsupported),
    "reference": OutlookKernel(reference, lambda v, logits, dropout: None),
}


def outlook_attention(
    v: Tensor, logits: Tensor, scale: float = 1.0, dropout: float = 0.0, kernel: str = "auto"
) -> Tensor:
    """Mix the values in each window, and add up the results of all windows at each pixel.

    Args:
        v: Values (B, H, W, C), C = heads * D.
        logits: (B, h, w, heads * 81), one row of 9 x 9 per head and window: for each pixel that is written, one logit
            per pixel that is read; h = ceil(H / 2), and w likewise.
        scale: Multiplies the logits before their softmax.
        dropout: Rate of dropout on the weights; 0 outside training.
        kernel: A name in `KERNELS`, or "auto": the fastest that fits.

    Returns:
        (B, H, W, C), in the type of `v`, or autocast's.

    Raises:
        UserError: `kernel` can't compute this.
    """
    return choose_kernel(kernel, v, logits, dropout).compute(_as_in_products(v), logits, scale, dropout)


def choose_kernel(kernel: str, v: Tensor, logits: Tensor, dropout: float) -> OutlookKernel:
    """Return the implementation of a name, or for "auto" the fastest that fits.

    Tensors without contents always get the reference, so that operations counted on them do not depend on the kernel.
    With "auto", `torch.export`, `torch.jit.trace` and `torch.func` get it, too, so that an exported program holds no
    operation of our own.

    Raises:
        UserError: The named implementation doesn't fit.
    """
    if v.is_meta or (kernel == "auto" and not own_operators_fit()):
        return KERNELS["reference"]
    if kernel == "auto":
        return next(row for row in KERNELS.values() if row.why_unsupported(v, logits, dropout) is None)
    chosen = KERNELS[kernel]
    reason = chosen.why_unsupported(v, logits, dropout)
    if kernel != "reference" and transformed():
        reason = "torch.func can't transform it"
    if reason is not None:
        raise UserError(f"--outlook-kernel {kernel}: {reason}; --outlook-kernel auto takes another")
    return chosen


def _as_in_products(v: Tensor) -> Tensor:
    """Convert to the type in which autocast computes matrix products."""
    device = v.device.type
    if v.is_meta or v.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return v
    return v.to(torch.get_autocast_dtype(device))

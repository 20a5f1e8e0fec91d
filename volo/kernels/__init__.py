"""Outlook attention (VOLO, section 3.1): every 3 x 3 window mixes its pixels with weights computed from its centre.

Windows are 2 pixels apart, and the map is padded by 1 pixel. Modules call `outlook_attention`, which chooses one of
three implementations of the same arithmetic:

    triton      three fused programs, for CUDA devices
    windows     strided views, matrix products, sums of slices; for any device, but fast on CPUs
    reference   torch's slices, products and sums; for any device, and for exports, dropout and all derivatives

In shapes: B images, H x W cells, h x w windows, D channels per head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.errors import UserError
from tlt.models.fast_ops import own_operators_fit, transformed
from volo.kernels import triton_outlook, windows


class OutlookKernel(NamedTuple):
    """An implementation of outlook attention; its tensors have the shapes of `outlook_attention` below."""

    compute: Callable[[Tensor, Tensor, float, float], Tensor]  # called with v, logits, scale, dropout
    why_unsupported: Callable[[Tensor, Tensor, float], str | None]  # called with v, logits, dropout; None if supported


def reference(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """Compute `outlook_attention`, with its softmax in float32 at least.

    Other runtimes have these operations. They may lack unfold and fold: TensorRT doesn't have ONNX's Col2Im.
    """
    height, width = v.shape[1:3]
    batch, rows, columns, heads = *logits.shape[:3], logits.shape[-1] // 81
    depth = v.shape[-1] // heads
    # If a side is odd, its last windows end beyond the map, so more padding is needed there.
    padded = F.pad(v, (0, 0, 1, 2 * columns - width, 1, 2 * rows - height))
    pixels = [padded[:, y : y + 2 * rows - 1 : 2, x : x + 2 * columns - 1 : 2] for y in range(3) for x in range(3)]
    # Use reshape: torch 2.11 can't compile unflatten under torch.set_default_device.
    values = torch.stack(pixels, dim=3).reshape(batch, rows, columns, 9, heads, depth).transpose(3, 4)
    weights = (logits * scale).reshape(batch, rows, columns, heads, 9, 9)
    weights = weights.softmax(-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
    mixed = (F.dropout(weights, dropout) @ values).reshape(batch, rows, columns, heads, 3, 3, depth)
    out = _join(_join(mixed, 1, -3), 2, -2)  # (B, 2h, 2w, heads, D)
    return out[:, :height, :width].flatten(3)


def _join(windows: Tensor, axis: int, offsets: int) -> Tensor:
    """Sum along one axis what n windows write to 2n lines; axis `offsets` holds the three lines of a window.

    The middle line is an even line of the map. A window's last line and the next one's first are the odd line after it.
    """
    first, even, odd = windows.unbind(offsets)
    following = F.pad(first, (0, 0) * (first.ndim - 1 - axis) + (-1, 1))  # first lines of the next windows, then 0
    return torch.stack((even, odd + following), axis + 1).flatten(axis, axis + 1)


# "auto" takes the first one that fits. `volo.config.settings_shared` lists the names as choices of --outlook-kernel.
KERNELS = {
    "triton": OutlookKernel(triton_outlook.outlook_attention, triton_outlook.why_unsupported),
    "windows": OutlookKernel(windows.outlook_attention, windows.why_unsupported),
    "reference": OutlookKernel(reference, lambda v, logits, dropout: None),
}


def outlook_attention(
    v: Tensor, logits: Tensor, scale: float = 1.0, dropout: float = 0.0, kernel: str = "auto"
) -> Tensor:
    """Mix the values in each window, and sum the results of all windows at each pixel. Return (B, H, W, C), in the
    dtype of `v` or of autocast. Raise UserError if `kernel` does not support this.

    Args:
        v: Values (B, H, W, C), C = heads * D.
        logits: (B, h, w, heads * 81), a 9 x 9 matrix per head and window: a row for each pixel that is written, with a
            logit for each pixel that is read. h = ceil(H / 2), w = ceil(W / 2).
        scale: Factor of the logits before their softmax.
        dropout: Dropout rate of the weights; 0 outside training.
        kernel: Name in `KERNELS`, or "auto" for the fastest that fits.
    """
    return choose_kernel(kernel, v, logits, dropout).compute(_as_in_products(v), logits, scale, dropout)


def choose_kernel(kernel: str, v: Tensor, logits: Tensor, dropout: float) -> OutlookKernel:
    """Return the implementation named `kernel`, or for "auto" the fastest that fits. Meta tensors always get the
    reference, so that counts of operations don't depend on the kernel. With "auto", `torch.export`, `torch.jit.trace`
    and `torch.func` get it as well, so that an exported program contains none of our own operators. Raise UserError if
    the named implementation doesn't support this."""
    if v.is_meta or (kernel == "auto" and not own_operators_fit()):
        return KERNELS["reference"]
    if kernel == "auto":
        return next(row for row in KERNELS.values() if row.why_unsupported(v, logits, dropout) is None)
    implementation = KERNELS[kernel]
    reason = implementation.why_unsupported(v, logits, dropout)
    if kernel != "reference" and transformed():
        reason = "torch.func can't transform it"
    if reason is not None:
        raise UserError(f"--outlook-kernel {kernel}: {reason}; --outlook-kernel auto takes another")
    return implementation


def _as_in_products(v: Tensor) -> Tensor:
    """Convert `v` to the dtype in which autocast computes matrix products."""
    device = v.device.type
    if v.is_meta or v.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return v
    return v.to(torch.get_autocast_dtype(device))

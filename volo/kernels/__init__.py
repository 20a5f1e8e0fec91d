"""Outlook attention (VOLO, section 3.1): every k x k window mixes its pixels with weights computed from its centre.

Modules call `outlook_attention`, which chooses one of several implementations of the same arithmetic:

    triton      three fused programs, for 3 x 3 windows that are 2 pixels apart, on CUDA devices
    windows     strided views, matrix products, sums of slices, for the same windows; on any device, meant for CPUs
    reference   unfold, matrix products, fold: any kernel size, stride and padding, any device
    slices      the arithmetic of windows with only slices, products and sums; for exported models

An implementation is a module with a function `outlook_attention` with the same arguments, and a function
`why_unsupported` that returns why it can't be used for given arguments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.models.operators import own_operators_fit, transformed
from volo.kernels import reference, slices, triton_outlook, windows


class OutlookKernel(Protocol):
    """An implementation, with shapes as in `outlook_attention` below."""

    def outlook_attention(
        self, v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, scale: float, dropout: float
    ) -> Tensor:
        """Compute outlook attention."""

    def why_unsupported(
        self, v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, dropout: float
    ) -> str | None:
        """Return why it can't compute this, or None."""


# "auto" takes the first that fits. `volo.config.flags_train` has the names as choices of --outlook-kernel.
KERNELS: dict[str, OutlookKernel] = {
    "triton": triton_outlook,
    "windows": windows,
    "reference": reference,
    "slices": slices,
}


def outlook_attention(
    v: Tensor,
    logits: Tensor,
    kernel_size: int = 3,
    stride: int = 2,
    padding: int = 1,
    scale: float = 1.0,
    dropout: float = 0.0,
    kernel: str = "auto",
) -> Tensor:
    """Mix the values in each window, and add up the results of all windows at each pixel.

    Args:
        v: Values (B, H, W, C), C = heads * D.
        logits: (B, h, w, heads * k^4), one row of k^2 x k^2 per head and window: for each place that is written, one
            logit per place that is read; h = (H + 2 padding - k) // stride + 1, and w likewise.
        kernel_size: k, the side of a window.
        stride: Pixels from one window to the next.
        padding: Zero pixels around the map.
        scale: Multiplies the logits before their softmax.
        dropout: Rate of dropout on the weights; 0 outside training.
        kernel: A name in `KERNELS`, or "auto": the fastest that fits.

    Returns:
        (B, H, W, C), in the type of `v`, or autocast's.

    Raises:
        UserError: `kernel` can't compute this.
    """
    chosen = choose_kernel(kernel, v, logits, kernel_size, stride, padding, dropout)
    return chosen.outlook_attention(_as_in_products(v), logits, kernel_size, stride, padding, scale, dropout)


def choose_kernel(
    kernel: str, v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, dropout: float
) -> OutlookKernel:
    """Return the implementation of a name, or for "auto" the fastest that fits.

    Tensors without contents always get the reference, so that operations counted on them do not depend on the kernel.
    With "auto", `torch.export`, `torch.jit.trace`, `torch.func` and forward-mode differentiation get `slices`, or the
    reference if that doesn't fit, so that an exported program holds no operation of our own.

    Raises:
        UserError: The named implementation doesn't fit.
    """
    if v.is_meta:
        return reference
    if kernel == "auto" and not own_operators_fit(v, logits):
        return slices if slices.why_unsupported(v, logits, kernel_size, stride, padding, dropout) is None else reference
    if kernel == "auto":
        return next(
            k for k in KERNELS.values() if k.why_unsupported(v, logits, kernel_size, stride, padding, dropout) is None
        )
    chosen = KERNELS[kernel]
    reason = chosen.why_unsupported(v, logits, kernel_size, stride, padding, dropout)
    if chosen in (triton_outlook, windows) and transformed(v, logits):
        reason = "it has no forward-mode derivatives, and torch.func can't transform it"
    if reason is not None:
        raise UserError(f"--outlook-kernel {kernel}: {reason}; --outlook-kernel auto takes another")
    return chosen


def _as_in_products(v: Tensor) -> Tensor:
    """Convert to the type in which autocast computes matrix products."""
    device = v.device.type
    if v.is_meta or v.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return v
    return v.to(torch.get_autocast_dtype(device))

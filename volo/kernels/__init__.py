"""Outlook attention (VOLO, section 3.1): every 3 x 3 window mixes its pixels with weights computed from its centre.

Windows are 2 pixels apart, and the map is padded by 1 pixel. Modules call `outlook_attention`, which chooses one of
three implementations of the same arithmetic:

    triton      three fused programs, on CUDA devices
    windows     strided views, matrix products, sums of slices; on any device, meant for CPUs
    reference   slices, products and sums of torch alone: for exports, dropout and all derivatives; on any device

An implementation is a module with a function `outlook_attention`, and a function `why_unsupported` that returns why it
can't be used for given arguments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tlt.errors import UserError
from tlt.models.attention import own_operators_fit, transformed
from volo.kernels import reference, triton_outlook, windows


class OutlookKernel(Protocol):
    """An implementation, with shapes as in `outlook_attention` below."""

    def outlook_attention(self, v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
        """Compute outlook attention."""

    def why_unsupported(self, v: Tensor, logits: Tensor, dropout: float) -> str | None:
        """Return why it can't compute this, or None."""


# "auto" takes the first that fits. `volo.config.flags_train` has the names as choices of --outlook-kernel.
KERNELS: dict[str, OutlookKernel] = {"triton": triton_outlook, "windows": windows, "reference": reference}


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
    return choose_kernel(kernel, v, logits, dropout).outlook_attention(_as_in_products(v), logits, scale, dropout)


def choose_kernel(kernel: str, v: Tensor, logits: Tensor, dropout: float) -> OutlookKernel:
    """Return the implementation of a name, or for "auto" the fastest that fits.

    Tensors without contents always get the reference, so that operations counted on them do not depend on the kernel.
    With "auto", `torch.export`, `torch.jit.trace` and `torch.func` get it, too, so that
    an exported program holds no operation of our own.

    Raises:
        UserError: The named implementation doesn't fit.
    """
    if v.is_meta or (kernel == "auto" and not own_operators_fit()):
        return reference
    if kernel == "auto":
        return next(each for each in KERNELS.values() if each.why_unsupported(v, logits, dropout) is None)
    chosen = KERNELS[kernel]
    reason = chosen.why_unsupported(v, logits, dropout)
    if chosen is not reference and transformed():
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

"""Outlook attention in three Triton programs (`volo.kernels.triton_programs`). The first call imports Triton."""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from tlt.errors import UserError
from volo.kernels.operators import define_operator

LOG2_E = math.log2(math.e)
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 300  # characters shown of Triton's message
PROGRAMS = ("outlook_forward", "outlook_backward_logits", "outlook_backward_values")


def why_unsupported(v: Tensor, logits: Tensor, dropout: float) -> str | None:
    """Return why the programs don't support this, or None. On a CPU only tests interpret them (TRITON_INTERPRET=1)."""
    head_dim = v.shape[-1] * 81 // logits.shape[-1]
    if dropout > 0:
        return "it has no dropout"
    if head_dim not in HEAD_DIMS:
        return f"it has heads of {', '.join(map(str, HEAD_DIMS))} channels, not {head_dim}"
    if v.dtype not in DTYPES or logits.dtype not in DTYPES:
        return f"it has float32, bfloat16 and float16, not {v.dtype} with {logits.dtype}"
    return _lack(v.device)


@torch.compiler.assume_constant_result
def _lack(device: torch.device) -> str | None:
    """Return what this machine lacks, or None."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"it needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Memory prediction (volo.memory.prediction) uses fake CUDA tensors, perhaps on a machine without a GPU.
    if not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


def outlook_attention(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """Compute `volo.kernels.outlook_attention` for a positive scale; softmax and sums are in float32 for any dtype."""
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    return _operator(v.contiguous(), logits.contiguous(), scale)


def _forward(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    """Map (B, H, W, C) and (B, h, w, heads * 81), both contiguous, to (B, H, W, C)."""
    out = torch.empty_like(v)
    _launch("outlook_forward", (v, logits, out), v, logits, (scale * LOG2_E,))
    return out


def _backward(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and the logits, given the gradient of the result."""
    grad = grad.contiguous()
    grad_v = torch.empty_like(v)
    grad_logits = torch.empty_like(logits)
    lse = v.new_empty(logits.shape[-1] // 9, logits.shape[:3].numel(), dtype=torch.float32)  # (heads * 9, windows)
    scales = (scale, scale * LOG2_E)
    of_logits = (grad, v, logits, grad_logits, lse)
    # Triton's interpreter would multiply the bits of bfloat16 instead of their values.
    _launch("outlook_backward_logits", of_logits, v, logits, scales, WIDEN=not v.is_cuda)
    _launch("outlook_backward_values", (grad, logits, lse, grad_v), v, logits, scales[1:])
    return grad_v, grad_logits


def block_of(program: str, dtype: torch.dtype, head_dim: int) -> tuple[int, int]:
    """Return the number of cells (or windows) per program and its number of warps, for values of this dtype.

    They are chosen so that registers don't spill: each thread holds 16 bytes of a pixel, or a program 8 windows of
    16 x 16 products.
    """
    row = head_dim * dtype.itemsize  # bytes
    if program == "outlook_backward_logits":
        return max(1, min(8, 512 // row)), 2
    return 2048 // row, 4


def _launch(
    program: str, tensors: tuple[Tensor, ...], v: Tensor, logits: Tensor, scales: tuple[float, ...], **options: bool
) -> None:
    """Launch a program for every head and block of cells. Raise UserError if Triton can't compile it for this GPU, or
    it needs more than the GPU has. No other implementation replaces it, because a run should not silently be many times
    slower than it could be."""
    _, height, width, channels = v.shape
    batch, rows, columns, outputs = logits.shape
    cells = batch * rows * columns
    heads = outputs // 81
    if cells == 0:
        return
    block, warps = block_of(program, v.dtype, channels // heads)
    grid = (heads * -(-cells // block),)
    sizes = (height, width, rows, columns, cells, heads)
    constants = {"D": channels // heads, "BLOCK": block, **options, "num_warps": warps, "enable_fp_fusion": True}
    try:
        from volo.kernels import triton_programs

        with torch.cuda.device_of(v):
            getattr(triton_programs, program)[grid](*tensors, *sizes, *scales, **constants)
    except Exception as error:  # Triton's errors share no base class; without a C compiler, subprocess raises its own
        if "Triton Error [CUDA]" in str(error):  # an error of the driver, which an earlier kernel may have caused
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
        raise UserError(
            f"Triton can't make the program {program} of outlook attention for this device ({message}): "
            "--outlook-kernel windows (or reference) does without Triton"
        ) from error


_operator = define_operator("outlook_attention", _forward, _backward)

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
_LONGEST = 300  # characters of Triton's message that are shown
PROGRAMS = ("outlook_forward", "outlook_backward_logits", "outlook_backward_values")


def why_unsupported(v: Tensor, logits: Tensor, dropout: float) -> str | None:
    """Return why the programs can't compute this; CPUs only interpret them, for tests (TRITON_INTERPRET=1)."""
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
    """Return what this machine lacks."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"it needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Memory is predicted with tensors on a GPU that need not be there (volo.memory.prediction).
    if not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


def outlook_attention(v: Tensor, logits: Tensor, scale: float, dropout: float) -> Tensor:
    """As `volo.kernels.outlook_attention`, with a positive scale; softmax and sums are float32 in any type."""
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    return _operator(v.contiguous(), logits.contiguous(), scale)


def _forward(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    """(B, H, W, C), (B, h, w, heads * 81) -> (B, H, W, C); both contiguous."""
    out = torch.empty_like(v)
    _launch("outlook_forward", (v, logits, out), v, logits, (scale * LOG2_E,))
    return out


def _backward(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and the logits from that of the result."""
    grad = grad.contiguous()
    grad_v, grad_logits = torch.empty_like(v), torch.empty_like(logits)
    lse = v.new_empty(logits.shape[-1] // 9, logits.shape[:3].numel(), dtype=torch.float32)  # (heads * 9, windows)
    scales = (scale, scale * LOG2_E)
    of_logits = (grad, v, logits, grad_logits, lse)
    # The interpreter multiplies the bits of bfloat16.
    _launch("outlook_backward_logits", of_logits, v, logits, scales, WIDEN=not v.is_cuda)
    _launch("outlook_backward_values", (grad, logits, lse, grad_v), v, logits, scales[1:])
    return grad_v, grad_logits


def block_of(program: str, dtype: torch.dtype, head_dim: int) -> tuple[int, int]:
    """Return the number of cells (or windows) of a program and its warps, for values of that type.

    Chosen so that registers don't spill (`volo.kernels.triton_offline`): 16 bytes of a pixel in a thread, or 8 windows
    of 16 x 16 products.
    """
    row = head_dim * dtype.itemsize  # bytes
    if program == "outlook_backward_logits":
        return max(1, min(8, 512 // row)), 2
    return 2048 // row, 4


def _launch(
    program: str, tensors: tuple[Tensor, ...], v: Tensor, logits: Tensor, scales: tuple[float, ...], **options: bool
) -> None:
    """Start one for every head and block of cells.

    Raises:
        UserError: It can't be compiled for this GPU, or needs more than the GPU has. No other implementation takes its
            place: a run that is many times slower than it might be had better not start.
    """
    _, height, width, channels = v.shape
    batch, rows, columns, outputs = logits.shape
    cells, heads = batch * rows * columns, outputs // 81
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
    except Exception as error:  # Triton's own derive from nothing narrower; without a C compiler subprocess raises
        if "Triton Error [CUDA]" in str(error):  # the driver's, also for what any program did before
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
        raise UserError(
            f"Triton can't make the program {program} of outlook attention for this device ({message}): "
            "--outlook-kernel windows (or reference) does without Triton"
        ) from error


_operator = define_operator("outlook_attention", _forward, _backward)

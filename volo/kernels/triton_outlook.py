"""Outlook attention in three Triton programs (`volo.kernels.triton_programs`), for 3 x 3 windows 2 pixels apart.

They are custom ops of torch, `volo::outlook_attention` and its backward op: compile and export see one node each with
known shapes, and the flop counter has a formula. Only v and the logits are kept for the backward pass. The first call
imports Triton.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tlt.errors import UserError
from tlt.models.operators import refuse_second_derivatives
from volo.kernels.reference import SECOND_DERIVATIVES

LOG2_E = math.log2(math.e)
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 300  # characters of Triton's message that are shown
PROGRAMS = ("outlook_forward", "outlook_backward_logits", "outlook_backward_values")


def why_unsupported(
    v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, dropout: float
) -> str | None:
    """Return why the programs can't compute this; CPUs only interpret them, for tests (TRITON_INTERPRET=1)."""
    head_dim = v.shape[-1] * 81 // logits.shape[-1]
    if (kernel_size, stride, padding) != (3, 2, 1):
        return f"it has windows of 3, stride 2, padding 1, not {kernel_size}, {stride}, {padding}"
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


def outlook_attention(
    v: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int, scale: float, dropout: float
) -> Tensor:
    """As `volo.kernels.outlook_attention`, with a positive scale; softmax and sums are float32 in any type."""
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    return torch.ops.volo.outlook_attention(v.contiguous(), logits.contiguous(), scale)


@torch.library.custom_op("volo::outlook_attention", mutates_args=())
def _forward(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    """(B, H, W, C), (B, h, w, heads * 81) -> (B, H, W, C); both contiguous."""
    out = torch.empty_like(v)
    _launch("outlook_forward", (v, logits, out), v, logits, (scale * LOG2_E,))
    return out


@torch.library.custom_op("volo::outlook_attention_backward", mutates_args=())
def _backward(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and the logits from that of the result."""
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
        found = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
        raise UserError(
            f"Triton can't make the program {program} of outlook attention for this device ({found}): "
            "--outlook-kernel windows (or reference) does without Triton"
        ) from error


@_forward.register_fake
def _(v: Tensor, logits: Tensor, scale: float) -> Tensor:
    return torch.empty_like(v)


@_backward.register_fake
def _(grad: Tensor, v: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    v, logits, ctx.scale = inputs
    ctx.save_for_backward(v, logits)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    v, logits = ctx.saved_tensors
    grad_v, grad_logits = torch.ops.volo.outlook_attention_backward(grad.contiguous(), v, logits, ctx.scale)
    return grad_v, grad_logits, None


_forward.register_autograd(_differentiate, setup_context=_keep)
refuse_second_derivatives(_backward, SECOND_DERIVATIVES)


@register_flop_formula(torch.ops.volo.outlook_attention)
def _flops(v: tuple[int, ...], logits: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Two for each of the 81 weights of a window and head and each channel, as the matrix products are counted."""
    return 2 * 81 * math.prod(logits[:3]) * v[-1]


@register_flop_formula(torch.ops.volo.outlook_attention_backward)
def _backward_flops(
    grad: tuple[int, ...], v: tuple[int, ...], logits: tuple[int, ...], *args: Any, **kwargs: Any
) -> int:
    return 2 * _flops(v, logits)

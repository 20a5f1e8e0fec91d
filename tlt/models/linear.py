"""Linear layers that use the CPU's widest instructions.

torch leaves float32 matrix products on x86 to MKL, which takes some processors for unknown ones and leaves out their
widest instructions. oneDNN, which torch uses for convolutions and in lower precisions, does not ask who made the
processor: where MKL does so, forward and backward take half the time. A measurement tells where.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from tlt.models.operators import own_operators_fit

CHOICE = "TLT_LINEAR"  # variable: "mkl" or "onednn" in place of the measurement
# Where MKL leaves out instructions, oneDNN was 1.6 to 3.8 times as fast, elsewhere 1.0 to 1.2 times, which an operator
# that torch.compile can't see into costs again. In between nothing was seen, so that noise decides nothing.
_WORTH_IT = 1.35
_ROUNDS = 6

# Whether this machine's processor can do more than MKL makes it do; None: not measured yet.
MKL_IS_SLOW: bool | None = None


def choose_library() -> None:
    """Measure once a process, in some 50 ms, which library multiplies float32 matrices; before any layer computes.

    By the CPU time of one thread, so that other processes on the machine do not decide.
    """
    global MKL_IS_SLOW
    if MKL_IS_SLOW is None and type(torch.empty(0)) is Tensor:  # no tensors that only pretend to compute
        asked = os.environ.get(CHOICE)
        MKL_IS_SLOW = asked == "onednn" if asked in ("mkl", "onednn") else _measure() > _WORTH_IT


def _measure() -> float:
    """Return how many times as fast as MKL oneDNN is; 0 where there is only one of them, or no clock to tell."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return 0.0
    threads = torch.get_num_threads()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            x, weight = (torch.zeros(rows, 384, dtype=torch.float32, device="cpu") for rows in (512, 768))
            for number in range(2 * _ROUNDS):
                began = time.thread_time()
                onednn_linear(x, weight, None) if number % 2 else torch.nn.functional.linear(x, weight)
                seconds[bool(number % 2)].append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    mkl, onednn = min(seconds[False]), min(seconds[True])
    return mkl / onednn if onednn else 0.0  # Windows counts in steps of 16 ms


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)`, by oneDNN where that is the faster library.

    The layers of a model stay plain `nn.Linear`, which other programs look for by their type: to count, quantize or
    replace them. A layer that has become another, or has hooks, is called.

    Args:
        x: (..., in_features).

    Returns:
        (..., out_features)
    """
    if MKL_IS_SLOW and type(layer) is nn.Linear and isinstance(x, Tensor) and _takes_onednn(x, layer):
        result: Tensor = onednn_linear(x, layer.weight, layer.bias)
        return result
    called: Tensor = layer(x)
    return called


def _takes_onednn(x: Tensor, layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        x.device.type == "cpu"
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and type(weight) is nn.Parameter  # a quantized weight is of another class
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not torch.is_autocast_enabled("cpu")
        and own_operators_fit(x, weight)
        and x.numel() > 0  # oneDNN refuses empty products
    )


# An operator of our own around Inductor's, which has no gradients and which Inductor takes with frozen weights alone.
@torch.library.custom_op(
    "tlt::onednn_linear",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K), weight (N, K) in any layout, bias (N) -> (..., N)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@onednn_linear.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = grad.flatten(0, -2)  # (M, N)
    return (
        onednn_linear(grad, weight.t(), None) if needs_x else None,
        onednn_linear(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


onednn_linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tlt.onednn_linear)
def _flops(x: torch.Size, weight: torch.Size, *others: Any, out_shape: Any = None, **more: Any) -> int:
    return 2 * weight[0] * torch.Size(x).numel()

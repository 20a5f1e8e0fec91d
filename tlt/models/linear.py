"""Linear layers that use the CPU's widest instructions.

torch leaves float32 matrix products on x86 to MKL, which takes AMD's processors for unknown ones and leaves out their
AVX-512. oneDNN, which torch uses for convolutions and in lower precisions, does not ask who made the processor. Where
AVX-512 has units of its whole width, forward and backward take half the time.

What is known of the processor decides, never a measurement: where other work disturbs one, a resumed run would end in
other bits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from tlt.models.attention import own_operators_fit

CHOICE = "TLT_LINEAR"  # variable: "mkl" or "onednn" whatever the processor
_PROCESSOR = Path("/proc/cpuinfo")
# The fifth Zen. The fourth's units have half the width: there oneDNN is 1.0 to 1.2 times as fast, which an operator
# that torch.compile can't see into costs again.
_FIRST_WITH_WHOLE_UNITS = 26


def mkl_is_slow() -> bool:
    """Return whether float32 matrix products are to be oneDNN's."""
    asked = os.environ.get(CHOICE)
    if asked in ("mkl", "onednn"):
        return asked == "onednn"
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _PROCESSOR.exists()):
        return False
    with _PROCESSOR.open(encoding="utf-8", errors="replace") as file:
        first = dict(re.findall(r"^(vendor_id|cpu family)\s*:\s*(\S+)$", file.read(2048), re.MULTILINE))
    amd, family = first.get("vendor_id") == "AuthenticAMD", int(first.get("cpu family", 0))
    return amd and family >= _FIRST_WITH_WHOLE_UNITS and torch.backends.cpu.get_cpu_capability() == "AVX512"


MKL_IS_SLOW = mkl_is_slow()


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
        and own_operators_fit()
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

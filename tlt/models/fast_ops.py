"""Linear layers and softmax attention, each by the library that is fastest on the device.

On x86, torch computes float32 matrix products with MKL, which does not recognise AMD processors and so does not use
their AVX-512. oneDNN, which torch uses for convolutions and lower precisions, does not depend on the vendor. On
processors with full-width AVX-512 units it halves the time of the forward and the backward pass.

Facts about the processor choose the library, never a measurement: other work could disturb a measurement, and a resumed
run would then compute other bits.

Shapes: B images, N queries, M keys, D channels of a head.
"""

import math
import os
import re
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.flop_counter import register_flop_formula

_FORWARD = nn.Linear.forward
_CALL = nn.Module.__call__
CHOICE = "TLT_LINEAR"  # environment variable: "mkl" or "onednn" on any processor
_PROCESSOR = Path("/proc/cpuinfo")
# Zen 5. The AVX-512 units of Zen 4 have half the width: there oneDNN is only 1.0 to 1.2 times as fast, which an
# operator that torch.compile can't see into loses again.
_FIRST_WITH_WHOLE_UNITS = 26


def mkl_is_slow() -> bool:
    """Return whether oneDNN should compute float32 matrix products."""
    choice = os.environ.get(CHOICE)
    if choice in ("mkl", "onednn"):
        return choice == "onednn"
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _PROCESSOR.exists()):
        return False
    with _PROCESSOR.open(encoding="utf-8", errors="replace") as file:
        first = dict(re.findall(r"^(vendor_id|cpu family)\s*:\s*(\S+)$", file.read(2048), re.MULTILINE))
    amd = first.get("vendor_id") == "AuthenticAMD"
    family = int(first.get("cpu family", 0))
    return amd and family >= _FIRST_WITH_WHOLE_UNITS and torch.backends.cpu.get_cpu_capability() == "AVX512"


MKL_IS_SLOW = mkl_is_slow()


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)` (..., out_features) of x (..., in_features), computed by oneDNN if that is the faster library.
    The layers of a model stay plain `nn.Linear`, because other programs look for this type to count, quantize or
    replace them. If another program changed a layer's class, weights, hooks or call, we call the layer itself."""
    if MKL_IS_SLOW and type(layer) is nn.Linear and isinstance(x, Tensor) and _takes_onednn(x, layer):
        return onednn_linear(x, layer.weight, layer.bias)
    return layer(x)


def _takes_onednn(x: Tensor, layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        x.device.type == "cpu"
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and type(weight) is nn.Parameter  # a quantized weight has another class
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not _has_any_global_hook()
        and _is_called_by_torch(layer)
        and not torch.is_autocast_enabled("cpu")
        and own_operators_fit()
        and x.numel() > 0  # oneDNN refuses empty products
    )


def _is_called_by_torch(layer: nn.Linear) -> bool:
    """Return whether `layer(x)` ends in torch's own `forward`; programs may replace it on an instance or a class."""
    forward = layer.forward  # written so that torch.compile recompiles if `forward` has been replaced since
    is_own = isinstance(forward, MethodType) and forward.__func__ is _FORWARD and forward.__self__ is layer
    return is_own and type(layer).__call__ is _CALL


# We wrap Inductor's operator in one of our own: it has no gradients, and Inductor takes it only with frozen weights.
@torch.library.custom_op(
    "tlt::onednn_linear",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., K) by weight (N, K) in any layout, add bias (N,) and return (..., N)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = grad.flatten(0, -2)  # (M, N)
    return (
        onednn_linear(grad, weight.t(), None) if needs_x else None,
        onednn_linear(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


onednn_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
onednn_linear.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
register_flop_formula(torch.ops.tlt.onednn_linear)(lambda x, weight, *_, **__: 2 * weight[0] * math.prod(x))


def transformed() -> bool:
    """Return whether a `torch.func` transform is active: under it custom operators fail or return zero derivatives."""
    return torch._C._are_functorch_transforms_active()


# Before 2.12, code that `torch.compile` traces sees `torch.compiler.is_exporting()` True, so we read its flag.
_TOLD_IN_TRACES = torch.__version__ >= "2.12"


def own_operators_fit() -> bool:
    """Return whether custom operators may be used: no export, trace or transform is active."""
    exporting = torch.compiler.is_exporting() if _TOLD_IN_TRACES else torch.compiler._is_exporting_flag
    return not (exporting or torch.jit.is_tracing() or transformed())


# Up to this many tokens, explicit products are faster than torch's fused attention on a CPU with AVX-512 in bfloat16:
# forward plus backward 1.2 to 3.2 times up to 576 tokens (heads of 32 to 64 channels), 0.8 to 1.2 times at 784. Fused
# attention is 2.4 to 2.9 times as fast with AVX2 only (oneDNN multiplies bfloat16 as float32), and wins in float32.
WRITTEN_OUT_TOKENS = 600
_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def check_heads(dim: int, num_heads: int) -> None:
    """Raise ValueError unless `dim` channels can be divided among `num_heads` heads."""
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"{dim} channels can't be divided among {num_heads} heads")


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Return `softmax(q k^T / sqrt(D)) v` (B, heads, N, D), with the softmax in float32, for q (B, heads, N, D), and k
    and v (B, heads, M, D). `dropout` is the rate of the weights; pass 0 outside training. The queries are scaled before
    the product with the keys, so that half precision overflows only if the scaled product does."""
    on_cpu = _AVX512 and k.device.type == "cpu"
    written_out = on_cpu and k.dtype is torch.bfloat16 and k.shape[-2] <= WRITTEN_OUT_TOKENS
    if not (written_out or transformed()):  # torch's fused attention on a CPU has no forward-mode derivatives
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = F.dropout(logits.softmax(dim=-1), dropout)  # computed in float32, stored in the dtype of the queries
    return weights @ v

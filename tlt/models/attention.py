"""Softmax attention by whichever of torch's ways is fastest on the device, and where custom operators would be wrong.

B samples, N queries, M keys, D channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to here products written out are faster than torch's fused attention on a CPU with AVX-512 in bfloat16: forward and
# backward 1.2 to 3.2 times up to 576 tokens (heads of 32 to 64 channels), 0.8 to 1.2 at 784. With AVX2 alone, where
# oneDNN multiplies bfloat16 as float32, the fused one is 2.4 to 2.9 times as fast; in float32 it wins everywhere.
WRITTEN_OUT_TOKENS = 600
_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def check_heads(dim: int, num_heads: int) -> None:
    """Raise ValueError unless `dim` channels can be divided among `num_heads` heads."""
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"{dim} channels can't be divided among {num_heads} heads")


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """`softmax(q k^T / sqrt(D)) v`, the softmax computed in float32.

    Queries are scaled before their product with the keys, so that half precision does not overflow where the scaled
    product is in range.

    Args:
        q: (B, heads, N, D).
        k, v: (B, heads, M, D).
        dropout: Rate of dropout on the weights; 0 outside training.

    Returns:
        (B, heads, N, D)
    """
    if not (_written_out(k) or transformed()):  # torch's fused attention on a CPU has no forward-mode derivatives
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = F.dropout(logits.softmax(dim=-1), dropout)  # in float32, but written in the queries' type
    return weights @ v


def _written_out(k: Tensor) -> bool:
    return _AVX512 and k.device.type == "cpu" and k.dtype is torch.bfloat16 and k.shape[-2] <= WRITTEN_OUT_TOKENS


def transformed() -> bool:
    """Whether a transformation of `torch.func` is active, which custom operators break or give zero for."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def own_operators_fit() -> bool:
    """Whether custom operators may be used: nothing exports, traces or transforms these operations."""
    return not (torch.compiler.is_exporting() or torch.jit.is_tracing() or transformed())

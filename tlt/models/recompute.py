"""Recomputes parts of a block in its backward pass to save memory: nothing, all but its matrix products, everything."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# From the most memory to the least.
NOTHING, POINTWISE, EVERYTHING = LEVELS = ("nothing", "pointwise", "everything")

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    (
        _aten.mm,
        _aten.addmm,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    )
)


def is_product(op: Any) -> bool:
    """Whether `POINTWISE` keeps the results of `op`: linear layers, fused attention and fused kernels not of torch.

    Batched products are none: they are attention written out, whose weights are the largest thing in a block.
    """
    return getattr(op, "overloadpacket", op) in _PRODUCTS or str(op).partition(".")[0] not in ("aten", "prim", "prims")


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(op) else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def run_block(block: nn.Module, level: str, *inputs: Tensor) -> Tensor:
    """Apply `block`; its backward pass recomputes what `level`, one of `LEVELS`, says."""
    if level == NOTHING or not torch.is_grad_enabled():
        result: Tensor = block(*inputs)
    elif level == POINTWISE:
        result = checkpoint(block, *inputs, use_reentrant=False, context_fn=_selective_contexts)
    else:
        result = checkpoint(block, *inputs, use_reentrant=False)
    return result

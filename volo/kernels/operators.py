"""Makes an implementation of outlook attention a torch operator: torch.compile and export see one node."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tlt.errors import UserError

Forward: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
Backward: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def define_operator(name: str, forward: Forward, backward: Backward) -> Forward:
    """Define the operators `volo::NAME` and `volo::NAME_backward`, and return the first one. `forward` gives a
    contiguous result of the shape of v, `backward` contiguous gradients of v and the logits. For the backward pass only
    v and the logits are stored. Both operators have formulas for torch's flop counter."""
    operator = torch.library.custom_op(f"volo::{name}", forward, mutates_args=())
    of_gradients = torch.library.custom_op(f"volo::{name}_backward", backward, mutates_args=())
    operator.register_fake(lambda v, logits, scale: v.new_empty(v.shape))
    of_gradients.register_fake(lambda grad, v, logits, scale: (v.new_empty(v.shape), logits.new_empty(logits.shape)))

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        v, logits, ctx.scale = inputs
        ctx.save_for_backward(v, logits)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *of_gradients(grad, *ctx.saved_tensors, ctx.scale), None

    def refuse(ctx: Any, *grads: Any) -> None:
        remedy = 'model.set_outlook_kernel("reference") has them (on a CPU under sdpa_kernel(SDPBackend.MATH))'
        raise UserError(f"volo::{name} has no second derivatives: {remedy}")

    operator.register_autograd(differentiate, setup_context=keep)
    of_gradients.register_autograd(refuse)
    register_flop_formula(getattr(torch.ops.volo, name))(_flops)
    backward_flops = register_flop_formula(getattr(torch.ops.volo, f"{name}_backward"))
    backward_flops(lambda grad, v, logits, scale, **_: 2 * _flops(v, logits, scale))
    return operator


def _flops(v: Sequence[int], logits: Sequence[int], scale: float, **_: Any) -> int:
    """Count two operations per channel for each of the 81 weights of a window, as in a matrix product."""
    return 2 * 81 * math.prod(logits[:3]) * v[-1]

"""When custom operators may replace torch's: they are faster, but exporters and transformations don't know them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from tlt.errors import UserError


def own_operators_fit(*tensors: Tensor) -> bool:
    """Whether custom operators may be used: nothing exports or traces these operations (`torch.export`,
    `torch.jit.trace` and tools built on them) or transforms them."""
    return not (torch.compiler.is_exporting() or torch.jit.is_tracing() or transformed(*tensors))


def transformed(*tensors: Tensor) -> bool:
    """Whether `torch.func` or forward-mode differentiation is active, which custom operators break or give zero for."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or have_tangents(*tensors)


def have_tangents(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a tangent of forward-mode differentiation (`torch.func.jvp`)."""
    return not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def refuse_second_derivatives(backward: Any, remedy: str) -> None:
    """Make the gradients of a custom operator's `backward` operator an error that says `remedy`."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise UserError(f"{backward._opoverload} has no derivatives, and second ones are asked for: {remedy}")

    backward.register_autograd(refuse)

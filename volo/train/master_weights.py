"""Training in bfloat16 with float32 master weights (`--model-dtype bfloat16`).

The float32 model stays what is optimized, averaged, validated and saved. A copy of it in bfloat16 computes: after a
backward pass its gradients go to the master weights, which add up those of micro-batches; after a step the weights come
back. Autocast casts weights in every forward pass and gradients in every backward pass, and adds the float32 position
embedding to the activations, which are float32 from there on; here all of that is bfloat16.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

# Their parameters and running statistics stay float32, and are the master's own.
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class WorkingCopy:
    """A bfloat16 copy of `master`. It runs under bfloat16 autocast, which computes norms and softmax in float32.

    Attributes:
        module: What computes; names as in `master`. Norms share parameters and buffers with it.
    """

    def __init__(self, master: nn.Module) -> None:
        norms = [module for module in master.modules() if isinstance(module, _NORMS)]
        shared = [tensor for norm in norms for tensor in (*norm.parameters(), *norm.buffers())]
        self.module = copy.deepcopy(master, {id(tensor): tensor for tensor in shared})
        kept = {id(tensor) for tensor in shared}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.bfloat16()
        pairs = zip(master.parameters(), self.module.parameters(), strict=True)
        self._pairs = [(own, cast) for own, cast in pairs if own is not cast]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Round the master's weights into the copy."""
        torch._foreach_copy_([cast for _, cast in self._pairs], [own for own, _ in self._pairs])

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Move the copy's gradients to the master's parameters, where they are added to what is there, in float32."""
        new, old = [], []
        for own, cast in self._pairs:
            if cast.grad is not None and own.grad is not None:
                old.append((own.grad, cast.grad))
            elif cast.grad is not None:
                own.grad = torch.empty_like(own)
                new.append((own.grad, cast.grad))
            cast.grad = None
        if new:
            torch._foreach_copy_([own for own, _ in new], [cast for _, cast in new])
        if old:
            torch._foreach_add_([own for own, _ in old], [cast for _, cast in old])

    def take_gradients_back(self) -> None:
        """Round what was given so far into the copy's gradients, to which the next backward pass adds its own.

        DistributedDataParallel knows the copy alone, and sends what its gradients are after that pass.
        """
        for own, cast in self._pairs:
            if own.grad is not None:
                cast.grad, own.grad = own.grad.to(cast.dtype), None

"""Counts a model's arithmetic with torch's counter on meta tensors, without computing or changing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def flops_per_image(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> float:
    """Return the floating-point operations per image, two per multiply-add, of matrix products and convolutions.

    Args:
        model: A model without wrappers; it is counted in its present mode.
        input_size: (channels, H, W).
        backward: Whether to add the backward pass of the trained parameters.
        images: Batch size, at least 2 for BatchNorm. `--drop-path-mode subset` makes the work per image depend on it.
        options: Other arguments of the model.
    """
    with FlopCounterMode(display=False) as counter:
        run_on_meta(model, input_size, backward, images, **options)
    return counter.get_total_flops() / images


def run_on_meta(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> None:
    """Run a forward and optionally a backward pass on meta tensors. The arguments are those of `flops_per_image`."""
    values = [*model.named_parameters(), *model.named_buffers()]
    state = {f"model.{name}": value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in values}
    batch = torch.empty(images, *input_size, device="meta")
    with torch.set_grad_enabled(backward):
        torch.func.functional_call(_Pass(model), state, (batch, options))


class _Pass(nn.Module):
    """Runs forward, and backward if gradients are on, in one module, because recomputed blocks need the same state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, options: dict[str, Any]) -> None:
        outputs = self.model(images, **options)
        if torch.is_grad_enabled():
            sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()

"""Counts a model's arithmetic with torch's counter on meta tensors: nothing is computed or changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def flops_per_image(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> float:
    """Floating-point operations of a forward pass, two per multiply-add, matrix products and convolutions alone.

    Args:
        model: Without wrappers; it is counted in its present mode.
        input_size: (channels, H, W).
        backward: Count the backward pass too, of the parameters that are trained.
        images: In the batch, at least 2 for BatchNorm; with `--drop-path-mode subset` the work of one depends on it.
        options: Further arguments of the model.
    """
    with FlopCounterMode(display=False) as counter:
        run_on_meta(model, input_size, backward, images, **options)
    return counter.get_total_flops() / images


def run_on_meta(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> None:
    """Run a forward pass, optionally a backward pass on meta tensors; arguments are those of `flops_per_image`."""
    values = [*model.named_parameters(), *model.named_buffers()]
    state = {f"model.{name}": value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in values}
    batch = torch.empty(images, *input_size, device="meta")
    with torch.set_grad_enabled(backward):
        torch.func.functional_call(_Pass(model), state, (batch, options))


class _Pass(nn.Module):
    """A forward pass, and a backward pass where gradients are on: blocks that are recomputed need the same state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, options: dict[str, Any]) -> None:
        outputs = self.model(images, **options)
        if torch.is_grad_enabled():
            sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()

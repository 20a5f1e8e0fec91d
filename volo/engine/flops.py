"""How much arithmetic a model takes, counted by torch on tensors without contents: nothing is computed or changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_IMAGES = 2  # BatchNorm wants more than one value per channel


def flops_per_image(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = _IMAGES, **options: Any
) -> float:
    """Floating-point operations of a forward pass, two per multiply-add, matrix products and convolutions alone.

    Args:
        model: Bare; counted in the mode that it is in.
        input_size: (channels, H, W).
        backward: Count the backward pass too, of the parameters that are trained.
        images: Of the batch: with `--drop-path-mode subset` the work of an image depends on it.
        options: More arguments of the model.
    """
    values = [*model.named_parameters(), *model.named_buffers()]
    state = {name: value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in values}
    batch = torch.empty(images, *input_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = torch.func.functional_call(model, state, (batch,), options)
        if backward:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(each.sum() for each in outputs).backward()
    return counter.get_total_flops() / images

"""Counts a model's arithmetic with torch's counter on meta tensors, without computing or changing anything."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def flops_per_image(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> float:
    """Return the floating-point operations per image, two per multiply-add, of matrix products and convolutions, for
    images of `input_size` (channels, H, W). The model has no wrappers; it is counted in its present mode, with
    `backward` also in the backward pass of the trained parameters.

    BatchNorm needs at least 2 `images`; `--drop-path-mode subset` makes the work per image depend on them. Raises what
    the model's layers raise on meta tensors, which may be of any type.
    """
    with FlopCounterMode(display=False) as counter:
        run_on_meta(model, input_size, backward, images, **options)
    return counter.get_total_flops() / images


def run_on_meta(
    model: nn.Module, input_size: tuple[int, int, int], backward: bool = False, images: int = 2, **options: Any
) -> None:
    """Run a forward and optionally a backward pass on meta tensors. Arguments and errors are `flops_per_image`'s."""
    model = on_meta(model)
    if not backward:
        model.requires_grad_(False)  # torch's counter fails on a weight that is the input of a layer
    with torch.set_grad_enabled(backward):
        outputs = model(torch.empty(images, *input_size, device="meta"), **options)
        if backward:
            sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()


def on_meta(model: nn.Module) -> Any:
    """Return a copy of a model whose weights and buffers are meta tensors. A copy, because `torch.func.functional_call`
    doesn't give a layer that a model has under two names its weights back."""
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for weight in model.parameters():
        copies[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    return copy.deepcopy(model, copies)

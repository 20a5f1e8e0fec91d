"""What `--dry-run` says about work and memory: operations, what a step holds, and the largest batches that fit."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import torch
from torch import nn

from tlt.errors import UserError
from tlt.models.flops import flops_per_image
from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING
from tlt.models.token_labeling import TokenLabelModel
from volo.memory.activation_memory import Activations, activations_of
from volo.memory.fake_step import StepShape
from volo.memory.memory_budget import GIB, MARGIN, FixedMemory, fixed_memory
from volo.train.loop import set_train_mode

# GiB that torch sees of a card that is sold as so many GB.
_CARDS = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}
_CONTEXT = 1.0  # GiB that CUDA takes for itself before the first tensor


def memory_report(
    args: Namespace, master: nn.Module, model: nn.Module, shape: StepShape, device: torch.device
) -> list[str]:
    """Lines for the log.

    Args:
        master: What is optimized.
        model: What computes, that or its copy in bfloat16; it is set to training.
    """
    set_train_mode(model, args.freeze_bn)
    fixed = fixed_memory(args, master, device)
    lines = [f"memory without activations: {fixed}"]
    try:
        gmacs = flops_per_image(master, shape.input_size) / 2e9
        found = activations_of(model, shape)
    except (NotImplementedError, RuntimeError, UserError) as error:  # what a model does that takes values
        reason = str(error).strip().split("\n")[0]
        return [*lines, f"operations and activations can't be told in advance: {reason}"]
    lines = [f"operations: {gmacs:.2f} GMACs an image in a forward pass", *lines]
    lines += _of_this_run(args, model, found, shape)
    try:
        on_gpu = found if shape.device_type == "cuda" else activations_of(model, replace(shape, device_type="cuda"))
    except RuntimeError as error:  # an older version of torch
        reason = str(error).strip().split("\n")[0]
        return [*lines, f"activations on a GPU: torch {torch.__version__} can't tell without one ({reason})"]
    if on_gpu is not found:
        lines.append(f"activations on a GPU: {_per_image(on_gpu)}")
    cards = {f"a card of {name} GB": (size - _CONTEXT) * GIB for name, size in _CARDS.items()}
    if device.type == "cuda":
        cards = {"this GPU": torch.cuda.get_device_properties(device).total_memory - _CONTEXT * GIB} | cards
    return lines + [f"largest batch on {name}: {_batches(on_gpu, size, fixed)}" for name, size in cards.items()]


def _of_this_run(args: Namespace, model: nn.Module, found: Activations, shape: StepShape) -> list[str]:
    dtype = str(shape.amp_dtype or torch.float32).removeprefix("torch.")
    where = {"cpu": "a CPU", "cuda": "a GPU"}[shape.device_type]
    levels = list(model.recompute.values()) if isinstance(model, TokenLabelModel) else []
    peak = found.peak(args.batch_size, levels) / GIB
    return [
        f"activations on {where} ({dtype}, eager): {_per_image(found)}",
        f"activations of this run's batches of {args.batch_size}: {peak:.2f} GiB",
    ]


def _per_image(found: Activations) -> str:
    if not found.blocks:
        return f"{found.per_image([]) / 2**20:.1f} MiB an image"
    kept, products, inputs = (f"{found.per_image(found.everywhere(level)) / 2**20:.1f}" for level in LEVELS)
    return (
        f"{kept} MiB an image; {products} with all but products recomputed, {inputs} with every block recomputed "
        "(--grad-checkpointing)"
    )


def _batches(found: Activations, size: float, fixed: FixedMemory) -> str:
    budget = size * (1 - MARGIN) - fixed.total
    most = found.largest_batch(budget, found.everywhere(NOTHING))
    if not found.blocks:
        return str(most)
    return f"{most}, with --grad-checkpointing {found.largest_batch(budget, found.everywhere(EVERYTHING))}"

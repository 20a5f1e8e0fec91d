"""Predicts the memory of a training run before it starts (`--dry-run`): what a rank keeps, and what fits which card.

A forward pass on tensors without contents shows what autograd keeps for the backward pass. Predictions are for eager
mode (torch.compile keeps less), and for the kernels of this machine: those of a GPU keep up to 12 % less or 9 % more.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from tlt.errors import UserError
from tlt.models.flops import flops_per_image
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.shard import units_of
from volo.cluster.tensor_parallel import divisible
from volo.train.loop import set_train_mode
from volo.train.optim import create_optimizer

GIB, MIB = 2.0**30, 2.0**20
_MARGIN = 0.05  # of a card, for workspaces of libraries, prefetched batches and gaps between allocations
_CONTEXT = GIB  # bytes that CUDA itself takes before the first tensor
_CARDS = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}  # GiB that torch reports for a card that is sold with so many GB
_SHARDS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class StepShape:
    """The properties of a step, besides model and batch, that determine its memory.

    Attributes:
        input_size: (channels, H, W).
        device_type: Where it runs: "cuda" or "cpu".
        amp_dtype: Type of autocast; None for float32.
        dense: Whether the step uses both heads, as with token labels.
    """

    input_size: tuple[int, int, int]
    device_type: str
    amp_dtype: torch.dtype | None = None
    dense: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes that a step keeps for its backward pass: a fixed part, and one that grows with the batch."""

    fixed: float
    per_image: float

    def at(self, batch: int) -> float:
        """Return the bytes for `batch` images."""
        return self.fixed + self.per_image * batch

    def largest_batch(self, size: float) -> int:
        """Return the number of images that fit into `size` bytes; 0 if none do."""
        return max(0, int((size - self.fixed) // self.per_image))


def activations_of(model: nn.Module, shape: StepShape) -> tuple[Activations, Activations]:
    """Predict what a step keeps without and with `--grad-checkpointing`; both are equal for models of timm.

    The model must be in the mode in which it is trained.

    Raises:
        NotImplementedError, RuntimeError: The model depends on values of tensors; VOLO and LV-ViT don't.
    """
    (few, fewer), (many, more) = (_peaks(model, shape, batch) for batch in (16, 32))
    # What does not grow with the batch is the weights in the type of autocast, which exist in both cases.
    fixed = 2 * few - many
    return Activations(fixed, (many - few) / 16), Activations(fixed, (more - fewer) / 16)


def _peaks(model: nn.Module, shape: StepShape, batch: int) -> tuple[int, int]:
    if not isinstance(model, TokenLabelModel):
        return (_saved(model, shape, batch)[0],) * 2
    was = model.grad_checkpointing
    try:
        model.set_grad_checkpointing(False)
        plain, within = _saved(model, shape, batch)
        model.set_grad_checkpointing(True)
        least, before = _saved(model, shape, batch)
    finally:
        model.set_grad_checkpointing(was)
    # A block is computed again after those behind it have been released.
    again = (held + size for (held, _), (_, size) in zip(before, within, strict=True))
    return plain, max(least, *again)


def _saved(model: nn.Module, shape: StepShape, batch: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that autograd keeps of a forward pass and its loss; for each block, before it and within it.

    The loss is that with the most memory: logits in float32, and gradients of their size.
    """
    saved: dict[int, int] = {}  # storage -> bytes; all are held by the graph until the end
    blocks: list[tuple[int, int]] = []
    with FakeTensorMode(), ExitStack() as stack:
        values = [*model.named_parameters(), *model.named_buffers()]
        state = {name: _without_contents(value, shape.device_type) for name, value in values}
        images = torch.empty(batch, *shape.input_size, device=shape.device_type)
        known = {tensor.untyped_storage()._cdata for tensor in (*state.values(), images)}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        def begin(*_: Any) -> None:
            blocks.append((sum(saved.values()), 0))

        def end(*_: Any) -> None:
            blocks[-1] = (blocks[-1][0], sum(saved.values()) - blocks[-1][0])

        for _, block in model.named_blocks() if isinstance(model, TokenLabelModel) else ():
            stack.callback(block.register_forward_pre_hook(begin).remove)
            stack.callback(block.register_forward_hook(end).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(saved_tensors_hooks(save, lambda tensor: tensor))
        with torch.autocast(shape.device_type, dtype=shape.amp_dtype, enabled=shape.amp_dtype is not None):
            options = {"dense": True} if shape.dense else {}
            outputs = torch.func.functional_call(model, state, (images,), options)
            logits = [each.float() for each in (outputs if isinstance(outputs, tuple) else (outputs,))]
            losses = [each.logsumexp(-1) for each in logits]
        gradients = sum(each.numel() * each.element_size() for each in logits)
        del losses
    return sum(saved.values()) + gradients, blocks


def _without_contents(value: Tensor, device_type: str) -> Tensor:
    empty = torch.empty(tuple(value.shape), dtype=value.dtype, device=device_type)
    return empty.requires_grad_(value.requires_grad)


def fixed_memory(args: Namespace, model: nn.Module, device: torch.device, shards: int) -> dict[str, int]:
    """Return the bytes that each rank keeps from step to step with `--shard SHARDS`, by what they are for."""
    whole, parts = _bytes(model.parameters()), args.tensor_parallel
    divided = _bytes(p for _, module in divisible(model) for p in module.parameters()) if parts > 1 else 0
    own = 1 - divided / max(1, whole) * (1 - 1 / parts)  # share of the weights that tensor parallelism leaves a rank
    trained = round(own * _bytes(p for p in model.parameters() if p.requires_grad))
    weights = round(own * _bytes([*model.parameters(), *model.buffers()]))
    optimizer = round(trained * _optimizer_share(args, device))
    ema = weights if args.model_ema and not args.model_ema_force_cpu else 0
    half = args.model_dtype == "bfloat16"
    copy, gathered, gradients = (weights + trained) // 2 if half else 0, 0, trained
    if shards > 1 or parts > 1:
        # Weights of two blocks, because the next one is gathered while one computes, and the gradients of one.
        units = [_bytes(unit.parameters()) for unit in units_of(model)]
        copy, gathered = 0, round(own * (3 * max(units, default=0) // (1 + half))) + 2 * (whole - sum(units))
        # Until the last of several micro-batches, every rank adds up its own gradients of all weights.
        gradients = trained if args.grad_accum_steps > 1 else trained // shards
    kept = {"weights": weights // shards, "gradients": gradients, "optimizer": optimizer // shards}
    return kept | {"EMA": ema // shards, "bfloat16 copy": copy, "gathered": gathered}


def _optimizer_share(args: Namespace, device: torch.device) -> float:
    """Return the bytes of optimizer state per byte of weights, measured on one small layer."""
    layer = nn.utils.skip_init(nn.Linear, 64, 64, bias=False, device=device)  # draws no random numbers
    nn.init.zeros_(layer.weight)
    optimizer = create_optimizer(Namespace(**{**vars(args), "layer_decay": None}), layer, device)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes(value for value in states if isinstance(value, Tensor) and value.ndim) / _bytes([layer.weight])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_report(
    args: Namespace, master: nn.Module, model: nn.Module, shape: StepShape, device: torch.device
) -> list[str]:
    """Return the lines of `--dry-run` about work and memory.

    Args:
        master: The model that is optimized.
        model: The module that computes: the model or its bfloat16 copy. It is put in training mode.
    """
    set_train_mode(model, args.freeze_bn or args.freeze)
    by_shards = {shards: fixed_memory(args, master, device, shards) for shards in sorted({*_SHARDS, args.shard})}
    totals = {shards: sum(kept.values()) for shards, kept in by_shards.items()}
    shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in by_shards[args.shard].items() if size)
    lines = [f"memory without activations: {shown} = {totals[args.shard] / GIB:.2f} GiB"]
    try:
        gmacs = flops_per_image(master, shape.input_size) / 2e9
        plain, checkpointed = activations_of(model, shape)
    except (NotImplementedError, RuntimeError, UserError) as error:  # the model depends on values of tensors
        reason = str(error).strip().split("\n")[0]
        return [*lines, f"operations and activations can't be predicted: {reason}"]
    of_run = (checkpointed if args.grad_checkpointing else plain).at(args.batch_size)
    dtype = str(shape.amp_dtype or torch.float32).removeprefix("torch.")
    lines = [
        f"operations: {gmacs:.2f} GMACs an image in a forward pass",
        *lines,
        f"activations ({dtype}, eager, kernels of {shape.device_type}): {plain.per_image / MIB:.1f} MiB an image, "
        f"{checkpointed.per_image / MIB:.1f} with --grad-checkpointing; {of_run / GIB:.2f} GiB for this run's batches "
        f"of {args.batch_size}",
    ]
    cards = {f"a card of {name} GB": gib * GIB for name, gib in _CARDS.items()}
    if device.type == "cuda":
        cards = {"this GPU": float(torch.cuda.get_device_properties(device).total_memory)} | cards
    for name, size in cards.items():
        usable = (size - _CONTEXT) * (1 - _MARGIN)
        batches = [each.largest_batch(usable - totals[args.shard]) for each in (plain, checkpointed)]
        least = next((shards for shards, total in totals.items() if total + of_run <= usable), "none")
        lines.append(
            f"largest batch on {name}: {batches[0]}, with --grad-checkpointing {batches[1]}; smallest --shard for "
            f"batches of {args.batch_size}: {least}"
        )
    shown = ", ".join(f"{shards}: {total / GIB:.2f}" for shards, total in totals.items())
    return [*lines, f"memory without activations, GiB a rank, by --shard: {shown}"]

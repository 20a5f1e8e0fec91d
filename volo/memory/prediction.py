"""Predicts the memory of a training run before it starts (`--dry-run`): what a rank keeps, and what fits which card.

A forward and a backward pass on tensors without contents show the most that a step holds. Predictions are for eager
mode (torch.compile keeps less), and for the kernels of this machine: those of a GPU keep somewhat less or more.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class StepShape(NamedTuple):
    """The properties of a step, besides model and batch, that determine its memory."""

    input_size: tuple[int, int, int]  # channels, H, W
    device_type: str  # where it runs: "cuda" or "cpu"
    amp_dtype: torch.dtype | None = None  # type of autocast; None for float32
    dense: bool = False  # whether it uses both heads, as with token labels


class Activations(NamedTuple):
    """The most bytes of a step beside weights and gradients: a fixed part, and one that grows with the batch."""

    fixed: float
    per_image: float

    def at(self, batch: int) -> float:
        """Return the bytes for `batch` images."""
        return self.fixed + self.per_image * batch

    def largest_batch(self, size: float) -> int:
        """Return the number of images that fit into `size` bytes; 0 if none do."""
        return max(0, int((size - self.fixed) // self.per_image))


def activations_of(model: nn.Module, shape: StepShape) -> tuple[Activations, Activations]:
    """Predict what a step holds without and with `--grad-checkpointing`; both are equal for models of timm.

    The model must be in the mode in which it is trained.

    Raises:
        NotImplementedError, RuntimeError: The model depends on values of tensors; VOLO and LV-ViT don't.
    """
    if not isinstance(model, TokenLabelModel):
        return (_activations(model, shape),) * 2
    was, found = model.grad_checkpointing, []
    try:
        for recompute in (False, True):
            model.set_grad_checkpointing(recompute)
            found.append(_activations(model, shape))
    finally:
        model.set_grad_checkpointing(was)
    return found[0], found[1]


def _activations(model: nn.Module, shape: StepShape) -> Activations:
    few, many = (step_peak(model, shape, batch) for batch in (16, 32))
    # What does not grow with the batch is the weights in the type of autocast.
    return Activations(2 * few - many, (many - few) / 16)


def step_peak(model: nn.Module, shape: StepShape, batch: int) -> int:
    """Return the most bytes that a step without contents holds at a time, beside weights, gradients and images."""
    kind = shape.device_type
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        values = [*model.named_parameters(), *model.named_buffers()]
        state = {f"model.{name}": torch.empty(value.shape, dtype=value.dtype, device=kind) for name, value in values}
        for name, value in values:
            own = state[f"model.{name}"].requires_grad_(value.requires_grad)
            if value.requires_grad:
                own.register_post_accumulate_grad_hook(_drop_gradient)  # `fixed_memory` counts the gradients
        images = torch.empty(batch, *shape.input_size, device=kind)
        with _PeakMemory(*state.values(), images) as memory:
            torch.func.functional_call(_Step(model, shape), state, (images,))
    return memory.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Step(nn.Module):
    """A step as one module, because the tensors of a functional call are in its model as long as it runs."""

    def __init__(self, model: nn.Module, shape: StepShape) -> None:
        super().__init__()
        self.model, self.shape = model, shape

    def forward(self, images: Tensor) -> None:
        """Run both passes, with the loss that takes the most memory: logits and their gradients in float32."""
        dtype, options = self.shape.amp_dtype, {"dense": True} if self.shape.dense else {}
        with torch.autocast(self.shape.device_type, dtype=dtype, enabled=dtype is not None):
            outputs = self.model(images, **options)
            losses = [each.float().logsumexp(-1).mean() for each in tree_leaves(outputs)]
        del outputs
        torch.stack(losses).sum().backward()


class _PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, from their making until nothing holds them any more.

    (torch.distributed._tools.MemTracker counts the same, but not with modules that recompute in the backward pass.)

    Args:
        known: Tensors that don't count.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._held:
                self._held.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, storage: int, size: int) -> None:
        self._held.discard(storage)
        self.now -= size


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

"""The memory that a run takes on a device: weights, gradients, optimizer, EMA, and activations beside them."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.flops import flops_per_image
from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING, POINTWISE
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import World, from_all
from volo.cluster.shard import units_of
from volo.cluster.tensor_parallel import divisible
from volo.memory.activation_memory import Activations, activations_of
from volo.memory.fake_step import StepShape
from volo.train.criterion import Criterion, TokenLabelCriterion
from volo.train.loop import set_train_mode
from volo.train.optim import create_optimizer

GIB = 2.0**30
# Share of a GPU's memory for workspaces of libraries, prefetched batches and gaps between allocations.
MARGIN = 0.05


@dataclass(frozen=True)
class FixedMemory:
    """Bytes on the device that don't depend on the batch."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    working_copy: int = 0  # of --model-dtype bfloat16, with its gradients
    gathered: int = 0  # of --shard: what is whole while it computes

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.working_copy + self.gathered

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "EMA", "bfloat16 copy", "gathered")
        sizes = (self.weights, self.gradients, self.optimizer, self.ema, self.working_copy, self.gathered)
        shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in zip(names, sizes, strict=True) if size)
        return f"{shown} = {self.total / GIB:.2f} GiB"


def fixed_memory(args: Namespace, model: nn.Module, device: torch.device) -> FixedMemory:
    """Return the memory that a run keeps from step to step on each rank, including the state of the optimizer."""
    optimizer_share = _optimizer_share(args, device)
    return _fixed_memory(args, model, optimizer_share, args.shard)


def _fixed_memory(args: Namespace, model: nn.Module, optimizer_share: float, shards: int) -> FixedMemory:
    own = _own_share(model, args.tensor_parallel)
    trained = round(own * _bytes(p for p in model.parameters() if p.requires_grad))
    weights = round(own * _bytes([*model.parameters(), *model.buffers()]))
    ema = weights if args.model_ema and not args.model_ema_force_cpu else 0
    optimizer = round(trained * optimizer_share)
    if shards == args.tensor_parallel == 1:
        copy = (weights + trained) // 2 if args.model_dtype == "bfloat16" else 0
        return FixedMemory(weights, trained, optimizer, ema, copy)
    # Weights of two blocks, because the next one is gathered while one computes, and the gradients of one.
    units = [_bytes(unit.parameters()) for unit in units_of(model)]
    largest = 3 * max(units, default=0) // (2 if args.model_dtype == "bfloat16" else 1)
    gathered = round(own * largest) + 2 * (_bytes(model.parameters()) - sum(units))
    # Until the last of several micro-batches, every rank adds up its own gradients of all weights.
    gradients = trained if args.grad_accum_steps > 1 else trained // shards
    return FixedMemory(weights // shards, gradients, optimizer // shards, ema // shards, gathered=gathered)


def _own_share(model: nn.Module, parts: int) -> float:
    """Return the share of the weights that a rank has which divides attentions and MLPs with others."""
    divided = _bytes(p for _, module in divisible(model) for p in module.parameters()) if parts > 1 else 0
    return 1 - divided / max(1, _bytes(model.parameters())) * (1 - 1 / parts)


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


def step_shape(
    criterion: Criterion, input_size: tuple[int, int, int], device: torch.device, amp_dtype: torch.dtype | None
) -> StepShape:
    """Return the shape of the run's steps; `input_size` is (channels, H, W)."""
    dense = isinstance(criterion, TokenLabelCriterion) and criterion.dense
    return StepShape(input_size, device.type, amp_dtype, dense)


def fit_activations(args: Namespace, model: nn.Module, shape: StepShape, world: World) -> str:
    """Let as few blocks as possible recompute their activations, so that `--activation-memory` is kept; return a line.

    Raises:
        UserError: The batch doesn't fit even with full recomputation, or the model can't recompute single blocks.
    """
    if not isinstance(model, TokenLabelModel):
        raise UserError(
            f"--activation-memory: {args.model} can't recompute single blocks, as VOLO and LV-ViT can; use "
            "--grad-checkpointing"
        )
    set_train_mode(model, args.freeze_bn)
    found = activations_of(model, shape)
    budget = _budget(args, model, world)
    # In a compiled block the compiler itself recomputes what is cheap.
    levels = found.fit(args.batch_size, budget, (NOTHING, EVERYTHING) if args.torchcompile else LEVELS)
    peak = found.peak(args.batch_size, levels)
    if peak > budget:
        raise UserError(
            f"-b {args.batch_size}: activations take {peak / GIB:.2f} GiB with every block computed anew, "
            f"--activation-memory {args.activation_memory} leaves {budget / GIB:.2f}: {_remedy(found, budget)}"
        )
    model.set_recompute({block.name: level for block, level in zip(found.blocks, levels, strict=True)})
    counts = Counter(levels)
    shown = ", ".join(f"{counts[level]} {_MEANING[level]}" for level in LEVELS if counts[level])
    return (
        f"activation memory: {peak / GIB:.2f} of {budget / GIB:.2f} GiB predicted for {args.batch_size} images; "
        f"blocks: {shown} ({found.repeated(levels):.1%} of their operations done twice)"
    )


_MEANING = {NOTHING: "keep everything", POINTWISE: "recompute all but products", EVERYTHING: "recompute everything"}


def _remedy(found: Activations, budget: float) -> str:
    fits = found.largest_batch(budget, found.everywhere(EVERYTHING))
    if not fits:
        return "not one image fits; use a smaller --img-size or --model"
    return f"at most -b {fits} fits (--grad-accum-steps keeps the global batch)"


def _budget(args: Namespace, model: nn.Module, world: World) -> float:
    """Return the bytes for activations, the same on each rank."""
    if args.activation_memory != "auto":
        return float(args.activation_memory) * GIB
    if world.device.type != "cuda":
        raise UserError("--activation-memory auto: only a GPU tells how much memory is free; give a number of GiB")
    free, total = torch.cuda.mem_get_info(world.device)
    unused = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    fixed = fixed_memory(args, model, world.device)
    allocated = _bytes([*model.parameters(), *model.buffers()])  # whole, also where ranks will divide them
    own = free + unused - (fixed.total - allocated) - MARGIN * total
    return min(from_all(own))


@contextmanager
def out_of_memory_explained(args: Namespace) -> Iterator[None]:
    """Turn an out-of-memory error in the block into one line with the remedy.

    Raises:
        UserError: Instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):  # in torch.OutOfMemoryError, and in errors of CUDA from Triton and others
            raise
        remedy = "--grad-checkpointing" if args.activation_memory is not None else "--activation-memory auto"
        remedy = "a smaller --img-size" if args.grad_checkpointing else remedy
        raise UserError(
            f"out of memory with -b {args.batch_size} ({str(error).splitlines()[0].split('. ')[0]}): use a smaller -b "
            f"(--grad-accum-steps keeps the global batch), or {remedy}"
        ) from error


# GiB that torch reports for a card that is sold with so many GB.
_CARDS = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}
_SHARDS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT = 1.0  # GiB that CUDA itself allocates before the first tensor


def memory_report(
    args: Namespace, master: nn.Module, model: nn.Module, shape: StepShape, device: torch.device
) -> list[str]:
    """Return the lines of `--dry-run` about work and memory.

    Args:
        master: The model that is optimized.
        model: The module that computes: the model or its bfloat16 copy. It is put in training mode.
    """
    set_train_mode(model, args.freeze_bn)
    fixed = fixed_memory(args, master, device)
    lines = [f"memory without activations: {fixed}"]
    try:
        gmacs = flops_per_image(master, shape.input_size) / 2e9
        found = activations_of(model, shape)
    except (NotImplementedError, RuntimeError, UserError) as error:  # the model depends on values of tensors
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
    lines += [f"largest batch on {name}: {_batches(on_gpu, size, fixed)}" for name, size in cards.items()]
    return lines + _by_shards(args, master, model, on_gpu, cards, _optimizer_share(args, device))


def _by_shards(
    args: Namespace, master: nn.Module, model: nn.Module, found: Activations, cards: dict[str, float], share: float
) -> list[str]:
    """Return the lines about `--shard`: the memory of a rank, and the smallest N that fits each card."""
    levels = list(model.recompute.values()) if isinstance(model, TokenLabelModel) else []
    peak = found.peak(args.batch_size, levels)
    fixed = {shards: _fixed_memory(args, master, share, shards).total for shards in _SHARDS}
    shown = ", ".join(f"{shards}: {fixed[shards] / GIB:.2f}" for shards in _SHARDS)
    needed = {
        name: next((n for n in _SHARDS if fixed[n] + peak <= size * (1 - MARGIN)), "none")
        for name, size in cards.items()
    }
    return [
        f"memory without activations, GiB a rank, by --shard: {shown}",
        f"smallest --shard for batches of {args.batch_size}: "
        + ", ".join(f"{n} on {card}" for card, n in needed.items()),
    ]


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

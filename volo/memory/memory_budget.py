"""What of a device a run takes: weights, gradients, optimizer, EMA, and activations that have to fit beside them."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tlt.errors import UserError
from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING, POINTWISE
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import World, from_all
from volo.memory.activation_memory import Activations, activations_of
from volo.memory.fake_step import StepShape
from volo.train.criterion import Criterion, TokenLabelCriterion
from volo.train.loop import set_train_mode
from volo.train.optim import create_optimizer

GIB = 2.0**30
# Of a GPU's memory, for the libraries' workspaces, batches on their way and gaps between allocations.
MARGIN = 0.05


@dataclass(frozen=True)
class FixedMemory:
    """Bytes on the device that don't depend on the batch."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    working_copy: int = 0  # of --model-dtype bfloat16, with its gradients

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.working_copy

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "EMA", "bfloat16 copy")
        sizes = (self.weights, self.gradients, self.optimizer, self.ema, self.working_copy)
        shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in zip(names, sizes, strict=True) if size)
        return f"{shown} = {self.total / GIB:.2f} GiB"


def fixed_memory(args: Namespace, model: nn.Module, device: torch.device) -> FixedMemory:
    """What the run keeps from step to step, once the optimizer has made its state."""
    trained = _bytes(p for p in model.parameters() if p.requires_grad)
    weights = _bytes([*model.parameters(), *model.buffers()])
    ema = weights if args.model_ema and not args.model_ema_force_cpu else 0
    copy = (weights + trained) // 2 if args.model_dtype == "bfloat16" else 0
    return FixedMemory(weights, trained, round(trained * _optimizer_share(args, device)), ema, copy)


def _optimizer_share(args: Namespace, device: torch.device) -> float:
    """Bytes of optimizer state to a byte of weights, as seen on one small layer."""
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
    """What the run's steps look like; `input_size` is (channels, H, W)."""
    dense = isinstance(criterion, TokenLabelCriterion) and criterion.dense
    return StepShape(input_size, device.type, amp_dtype, dense)


def fit_activations(args: Namespace, model: nn.Module, shape: StepShape, world: World) -> str:
    """Have as few blocks as possible compute anew what `--activation-memory` leaves no room for; say which.

    Raises:
        UserError: The batch doesn't fit however much is computed anew, or the model can't recompute single blocks.
    """
    if not isinstance(model, TokenLabelModel):
        raise UserError(
            f"--activation-memory: {args.model} can't recompute single blocks, as VOLO and LV-ViT can; use "
            "--grad-checkpointing"
        )
    set_train_mode(model, args.freeze_bn)
    found = activations_of(model, shape)
    budget = _budget(args, model, world)
    # Compilers leave out of a compiled block what is cheap to compute anew by themselves.
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
    """Bytes for activations, the same on each rank."""
    if args.activation_memory != "auto":
        return float(args.activation_memory) * GIB
    if world.device.type != "cuda":
        raise UserError("--activation-memory auto: only a GPU tells how much memory is free; give a number of GiB")
    free, total = torch.cuda.mem_get_info(world.device)
    unused = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    fixed = fixed_memory(args, model, world.device)
    own = free + unused - (fixed.total - fixed.weights) - MARGIN * total  # weights are there already
    return min(from_all(own))


@contextmanager
def out_of_memory_explained(args: Namespace) -> Iterator[None]:
    """Say what helps where a device has run out of memory.

    Raises:
        UserError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):  # torch.OutOfMemoryError says so, and what CUDA tells Triton and others
            raise
        remedy = "--grad-checkpointing" if args.activation_memory is not None else "--activation-memory auto"
        remedy = "a smaller --img-size" if args.grad_checkpointing else remedy
        raise UserError(
            f"out of memory with -b {args.batch_size} ({str(error).splitlines()[0].split('. ')[0]}): use a smaller -b "
            f"(--grad-accum-steps keeps the global batch), or {remedy}"
        ) from error

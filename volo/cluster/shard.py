"""Data parallelism: each rank has a whole model (DistributedDataParallel), or `--shard N` divides it among N ranks.

`--shard` divides weights, gradients, optimizer state and moving average (ZeRO stage 3) with torch's FSDP2. A rank
gathers the weights of one block while that block computes, and otherwise holds only its own part. N neighbouring ranks
hold one copy of the model. If there are more than N ranks, there are several copies, whose gradients are averaged
(hybrid sharding). This file decides, among other things, which modules are gathered as one unit.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tlt.errors import UserError
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import World


def distribute(
    model: nn.Module, device: torch.device, compression: str = "none", find_unused: bool = False
) -> DistributedDataParallel:
    """Return `model` wrapped in DistributedDataParallel, which averages its gradients over all ranks. With
    `compression` "bf16" it sends and sums them in bfloat16, half the bytes. `find_unused` allows parameters without a
    gradient.

    torch's defaults are kept unless another value is measurably better (docs/performance.md). `static_graph` is off:
    with gradient accumulation (`no_sync`) torch then fails in the first backward pass, or doesn't sum gradients.
    """
    # --dist-bn averages running statistics once per epoch instead of at every step. Newer torch renamed the argument.
    known = inspect.signature(DistributedDataParallel).parameters
    sync: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,  # avoids a copy of the gradients
        **sync,
    )
    if compression == "bf16":
        # DDP accepts the hook under its own name only with NCCL, but gloo can sum bfloat16 too.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    _fill_buckets(wrapped)
    return wrapped


def _fill_buckets(wrapped: DistributedDataParallel) -> None:
    """Run a backward pass that gives zero gradients, from the last parameter to the first.

    torch rebuilds its gradient buckets after the first backward pass. The place of a gradient in them decides in which
    order three or more ranks sum it. Without this pass, the first step after a resume would differ in its last bits.
    """
    module = wrapped.module
    trained = [p for p in module.parameters() if p.requires_grad]
    module.forward = lambda zero: sum(p.float().sum() for p in trained) * zero
    try:
        wrapped(torch.zeros((), device=trained[0].device)).backward()
    finally:
        del module.forward
    module.zero_grad(set_to_none=True)


class Meshes(NamedTuple):
    """The device meshes over which weights are divided."""

    data: DeviceMesh  # axis `shard`; if there are several copies of the model, axis `replicate` precedes it
    tensor: DeviceMesh | None  # neighbouring ranks of `--tensor-parallel`; None if it is 1


def shard_meshes(shards: int, world: World) -> Meshes:
    """Return the meshes of `--shard` and `--tensor-parallel`, in which neighbouring ranks hold the parts of one copy.
    Raises UserError if `shards` does not divide the number of ranks that see different images."""
    if world.data_size % shards:
        shared = f" / --tensor-parallel {world.tensor_parallel}" if world.tensor_parallel > 1 else ""
        raise UserError(f"--shard {shards} does not divide the number of processes, {world.size}{shared}")
    sizes = {"replicate": world.data_size // shards, "shard": shards, "tensor": world.tensor_parallel}
    axes = tuple(axis for axis in sizes if sizes[axis] > 1 or axis == "shard")
    mesh = init_device_mesh(world.device.type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    return Meshes(mesh[axes[:-1]], mesh["tensor"]) if "tensor" in axes else Meshes(mesh, None)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: the blocks of VOLO and LV-ViT.

    In other models these are the innermost modules that stand in a list with others of their class, as blocks do.
    """
    blocks = [block for m in model.modules() if isinstance(m, TokenLabelModel) for _, block in m.named_blocks()]
    if blocks:
        return blocks
    lists = [m for m in model.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
    units = []
    for members in lists:
        children = [child for child in members if any(child.children()) and next(child.parameters(), None) is not None]
        classes = [type(child) for child in children]
        units += [child for child in children if classes.count(type(child)) > 1]
    return [unit for unit in units if not any(inner in units for inner in unit.modules() if inner is not unit)]


def shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None = None, compression: str = "none") -> None:
    """Divide the weights of `model` in place. All ranks must have the same whole weights before. With bfloat16 as
    `compute`, the blocks' weights are gathered, and the blocks computed, in that type (`--model-dtype bfloat16`); the
    layers outside the blocks stay in float32, because the stem has BatchNorm. `compression` "bf16" sums gradients over
    the ranks in bfloat16."""
    reduced = torch.bfloat16 if compression == "bf16" else torch.float32
    for unit in units_of(model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, reduced))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False))


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's weights are divided among ranks."""
    return isinstance(model, FSDPModule)


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Return the context for a micro-batch. Only the `last` micro-batch averages the gradients over the ranks.

    The context does nothing for a model that neither DistributedDataParallel nor FSDP2 has wrapped.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)  # a method of DDP
    return nullcontext() if last else no_sync()


def forget_backward(model: nn.Module) -> None:
    """Drop the gradients of a model, and what DistributedDataParallel knows of a backward pass that has failed: it
    would raise in the next one."""
    model.zero_grad(set_to_none=True)
    if isinstance(model, DistributedDataParallel):
        model.reducer._reset_state()


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Give every rank the whole weights inside the block, so that ranks may call `model` at different times.

    Validation needs this, because ranks have different numbers of batches. It stores no gradients or activations.
    """
    if not is_sharded(model):
        yield
        return
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:  # a run that stops during validation saves afterwards
        for part in parts:
            part.set_reshard_after_forward(part is not parts[0], recurse=False)
            part.reshard()


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of the gradients over the parts of all ranks, a scalar; not finite if any value isn't."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


class ShardedEma(ModelEmaV3):
    """timm's moving average over this rank's parts; torch's foreach functions can't mix DTensors with plain tensors."""

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        states = self.module.state_dict(), model.state_dict()
        averages, new = (list(map(local, state.values())) for state in states)
        floating = [pair for pair in zip(averages, new, strict=True) if pair[0].is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floating], [b for _, b in floating], weight=1.0 - decay)
        for average, value in zip(averages, new, strict=True):
            if not average.is_floating_point():
                average.copy_(value)

"""`--tensor-parallel N` divides the heads of attention and the hidden channels of MLPs among N neighbouring ranks.

These ranks see the same images and draw the same random numbers. The first layers of each attention or MLP hold the
weight rows of this rank's heads or channels, and its last layer the matching columns; the ranks sum its products
(Megatron-LM, arXiv 1909.08053, section 3). All other weights are whole on every rank. Checkpoints hold whole tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import timm.layers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.io.weights import clean_names, clean_state_dict
from tlt.models.layers import Mlp, SelfAttention
from volo.cluster.distributed import World
from volo.cluster.shard import is_sharded, total_norm
from volo.models.volo import ClassAttention, OutlookAttention

# For each module type: the first layers, each with the number of tensors that it computes (q, k and v follow each
# other, and each is divided by heads), and the last layer.
_LAYERS: dict[type[nn.Module], tuple[dict[str, int], str]] = {
    SelfAttention: ({"qkv": 3}, "proj"),
    OutlookAttention: ({"v": 1, "attn": 1}, "proj"),
    ClassAttention: ({"kv": 2, "q": 1}, "proj"),
    Mlp: ({"fc1": 1}, "fc2"),
    Attention: ({"qkv": 3}, "proj"),
    timm.layers.Mlp: ({"fc1": 1}, "fc2"),
}
# timm's submodules that need all heads or all hidden channels at once, unless they are Identity.
_BETWEEN = ("q_norm", "k_norm", "norm", "gate")


def in_groups(world: World, parts: int) -> World:
    """Return `world` divided into groups of `parts` neighbouring ranks that see the same images. Raises UserError if
    `parts` does not divide the number of ranks."""
    if world.size % parts:
        raise UserError(f"--tensor-parallel {parts} does not divide the number of processes, {world.size}")
    return replace(world, tensor_parallel=parts)


@dataclass(frozen=True)
class ShardSpec:
    """How ranks divide a tensor: dimension `dim` holds `pieces` concatenated tensors, each divided into equal parts."""

    dim: int
    pieces: int
    mesh: DeviceMesh

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor. Counters and tensors that can't be divided equally stay whole."""
        if whole.ndim <= self.dim or whole.shape[self.dim] % (self.pieces * self.mesh.size()):
            return whole
        parts = whole.unflatten(self.dim, (self.pieces, self.mesh.size(), -1))
        return parts.select(self.dim + 1, self.mesh.get_local_rank()).flatten(self.dim, self.dim + 1)

    def whole(self, piece: Tensor) -> Tensor:
        """Return the whole tensor; every rank calls this with its part. Counters are already whole."""
        if piece.ndim <= self.dim:
            return piece
        parts = [torch.empty_like(piece) for _ in range(self.mesh.size())]
        dist.all_gather(parts, piece.contiguous(), group=self.mesh.get_group())
        pieces = [part.unflatten(self.dim, (self.pieces, -1)) for part in parts]
        return torch.stack(pieces, self.dim + 1).flatten(self.dim, self.dim + 2)


class DividedLinear(nn.Linear):
    """A linear layer of whose weights this rank holds a part."""

    def __init__(self, layer: nn.Linear, specs: dict[str, ShardSpec]) -> None:
        nn.Module.__init__(self)
        self.specs = specs  # how each parameter is divided; a parameter without an entry is whole
        for name in ("weight", "bias"):  # keep the order of nn.Linear, by which optimizers number parameters
            whole = getattr(layer, name)
            if whole is not None and name in specs:
                whole = nn.Parameter(specs[name].own(whole.detach()).clone(), whole.requires_grad)
            self.register_parameter(name, whole)
        self.out_features, self.in_features = self.weight.shape


class FirstLinear(DividedLinear):
    """Maps whole inputs (..., C) to this rank's part of the outputs. The ranks sum the gradients of the inputs."""

    def __init__(self, layer: nn.Linear, pieces: int, mesh: DeviceMesh) -> None:
        spec = ShardSpec(0, pieces, mesh)
        super().__init__(layer, {"weight": spec, "bias": spec})

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.specs["weight"].mesh
        shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return F.linear(shared.to_local(grad_placements=[Partial()]), self.weight, self.bias)


class LastLinear(DividedLinear):
    """Maps this rank's part of the inputs to whole outputs (..., C), which the ranks sum."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(layer, {"weight": ShardSpec(1, 1, mesh)})

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.specs["weight"].mesh
        product = DTensor.from_local(F.linear(x, self.weight), mesh, [Partial()], run_check=False).full_tensor()
        return product if self.bias is None else product + self.bias


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the attentions and MLPs of `model` among the ranks of `mesh` in place. All ranks have the same weights.
    Raise UserError if the model has no such module, or one that can't be divided."""
    modules: list[tuple[str, Any]] = divisible(model)
    if not modules:
        what = "attention or MLP of VOLO, LV-ViT or timm's ViT"
        raise UserError(f"--tensor-parallel {mesh.size()}: the model has no {what}; use --shard")
    for name, module in modules:
        if problem := _problem(module, mesh.size()):
            raise UserError(f"--tensor-parallel {mesh.size()} can't divide {name}: {problem}")
    for _, module in modules:
        first, last = _LAYERS[type(module)]
        for key, pieces in first.items():
            setattr(module, key, FirstLinear(getattr(module, key), pieces, mesh))
        setattr(module, last, LastLinear(getattr(module, last), mesh))
        if "fc1" not in first:
            module.num_heads //= mesh.size()
        if isinstance(module, Attention):
            module.attn_dim //= mesh.size()


def divisible(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that can be divided among ranks, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module) in _LAYERS]


def _problem(module: Any, parts: int) -> str:
    heads = getattr(module, "num_heads", None)
    if (heads or module.fc1.out_features) % parts:
        return f"it has {heads} heads" if heads else f"it has {module.fc1.out_features} hidden channels"
    for name in ("attn_drop", "drop1"):
        dropout = getattr(module, name, 0.0)
        if getattr(dropout, "p", dropout) > 0:
            return f"{name} drops values of all heads or channels at once; leave the dropout out"
    first, last = _LAYERS[type(module)]
    misfits = [name for name in (*first, last) if type(getattr(module, name)) is not nn.Linear]
    misfits += [name for name in _BETWEEN if not isinstance(getattr(module, name, None), nn.Identity | None)]
    return f"{misfits[0]} is no plain linear layer, or needs all heads or channels" if misfits else ""


class TensorParallelParams:
    """The parameters of a model that are divided among the ranks of a group, and how each is divided.

    Without `--tensor-parallel` there are none, and every method treats all tensors as whole.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, DividedLinear)]
        self.specs = {getattr(layer, name): spec for layer in layers for name, spec in layer.specs.items()}
        self._model = model

    def count(self) -> int:
        """Return the number of parameter values of the whole model."""
        return sum(p.numel() * (self.specs[p].mesh.size() if p in self.specs else 1) for p in self._model.parameters())

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm of the gradients over the parts of all ranks, like `volo.cluster.shard.total_norm`."""
        if not self.specs:
            return total_norm(parameters)
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in parameters:
            parts[parameter in self.specs].append(parameter)
        squared = total_norm(parts[True]) ** 2
        dist.all_reduce(squared, group=next(iter(self.specs.values())).mesh.get_group())
        return (total_norm(parts[False]) ** 2 + squared).sqrt()

    def by_name(self) -> dict[str, ShardSpec]:
        """Return how each divided parameter is divided, by its name in a checkpoint."""
        names = {name: self.specs[p] for name, p in self._model.named_parameters() if p in self.specs}
        return dict(zip(clean_names(list(names)), names.values(), strict=True))


# Checkpoints hold whole tensors. torch's `get_state_dict` would give them to rank 0 alone, and `--tensor-parallel`'s
# parts could no longer be joined. So this code gathers tensors one by one; a device holds only one whole at a time.


def whole_model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the unwrapped model, with whole tensors. Every rank calls this.

    If the model is not divided, the tensors are the model's own. If it is divided, rank 0 gets copies on the CPU, and
    the other ranks get None in place of each tensor.
    """
    state = clean_state_dict(model)
    if not is_sharded(model):
        return state
    specs = TensorParallelParams(model).by_name()
    return {name: _whole(value, specs.get(name)) for name, value in state.items()}


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer over the parameters of `model`, by the rules of `whole_model_state`."""
    saved = optimizer.state_dict()
    if is_sharded(model):
        specs = TensorParallelParams(model).specs
        saved["state"] = _each_tensor(optimizer, saved["state"], lambda value, p: _whole(value, specs.get(p)))
    return saved


def own_model_state(model: nn.Module, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of the whole tensors of a state dict, without communication."""
    if not is_sharded(model):
        return whole
    like = clean_state_dict(model)
    specs = TensorParallelParams(model).by_name()
    return {name: _own(value, like.get(name), specs.get(name)) for name, value in whole.items()}


def own_optimizer_state(model: nn.Module, optimizer: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of an optimizer's whole state dict, without communication."""
    if not is_sharded(model):
        return whole
    specs = TensorParallelParams(model).specs
    return {**whole, "state": _each_tensor(optimizer, whole["state"], lambda value, p: _own(value, p, specs.get(p)))}


def _each_tensor(
    optimizer: Optimizer, state: dict[int, dict[str, Any]], function: Callable[[Tensor, nn.Parameter], Any]
) -> dict[int, dict[str, Any]]:
    """Return the optimizer state with `function(tensor, its parameter)` in place of each tensor."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]  # torch numbers them in this order
    return {
        number: {key: function(v, parameters[number]) if isinstance(v, Tensor) else v for key, v in tensors.items()}
        for number, tensors in state.items()
    }


@torch.no_grad()
def _whole(value: Tensor, spec: ShardSpec | None) -> Tensor | None:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if spec is not None:
        whole = spec.whole(whole)
    return whole.to("cpu", copy=True) if dist.get_rank() == 0 else None


def _own(whole: Tensor, like: Tensor | None, spec: ShardSpec | None) -> Tensor:
    part = whole if spec is None else spec.own(whole)
    if not isinstance(like, DTensor) or part.shape != like.shape:
        return part
    return distribute_tensor(part.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

"""`--tensor-parallel N`: the heads of attention and the hidden channels of MLPs are divided among N neighbouring ranks.

These ranks see the same images and draw the same random numbers. Of each attention and MLP the first layers hold the
rows of this rank's heads or channels, and the last layer their columns, whose products the ranks add up (Megatron-LM,
arXiv 1909.08053, section 3). Everything else is whole on every rank. Checkpoints hold whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import timm.layers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.models.layers import Mlp, SelfAttention
from volo.cluster.distributed import World
from volo.models.blocks import ClassAttention, OutlookAttention

# The first layers of each module, with the number of tensors that one layer computes (q, k and v lie one after the
# other, and each is divided by heads), and the last layer.
_LAYERS: dict[type[nn.Module], tuple[dict[str, int], str]] = {
    SelfAttention: ({"qkv": 3}, "proj"),
    OutlookAttention: ({"v": 1, "attn": 1}, "proj"),
    ClassAttention: ({"kv": 2, "q": 1}, "proj"),
    Mlp: ({"fc1": 1}, "fc2"),
    Attention: ({"qkv": 3}, "proj"),
    timm.layers.Mlp: ({"fc1": 1}, "fc2"),
}
# Modules of timm's that compute with all heads or all hidden channels at once, where they are not Identity.
_BETWEEN = ("q_norm", "k_norm", "norm", "gate")


def in_groups(world: World, parts: int) -> World:
    """Return `world` with groups of `parts` neighbouring ranks that see the same images.

    Raises:
        UserError: The number of ranks is no multiple of it.
    """
    if world.size % parts:
        raise UserError(f"--tensor-parallel {parts} does not divide the number of processes, {world.size}")
    return replace(world, tensor_parallel=parts)


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided among ranks: `dim` holds `pieces` tensors one after the other, each in equal parts."""

    dim: int
    pieces: int
    mesh: DeviceMesh

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        parts = whole.unflatten(self.dim, (self.pieces, self.mesh.size(), -1))
        return parts.select(self.dim + 1, self.mesh.get_local_rank()).flatten(self.dim, self.dim + 1)

    def whole(self, own: Tensor) -> Tensor:
        """Return the whole tensor; every rank calls this with its part."""
        parts = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(parts, own.contiguous(), group=self.mesh.get_group())
        pieces = [part.unflatten(self.dim, (self.pieces, -1)) for part in parts]
        return torch.stack(pieces, self.dim + 1).flatten(self.dim, self.dim + 2)


class DividedLinear(nn.Linear):
    """A linear layer of which this rank holds a part of the weights.

    Attributes:
        cuts: How each parameter is divided; others are whole.
    """

    def __init__(self, layer: nn.Linear, cuts: dict[str, Cut]) -> None:
        nn.Module.__init__(self)
        self.cuts = cuts
        for name in ("weight", "bias"):  # in the order of every linear layer, by which optimizers number them
            whole = getattr(layer, name)
            if whole is not None and name in cuts:
                whole = nn.Parameter(cuts[name].own(whole.detach()).clone(), whole.requires_grad)
            self.register_parameter(name, whole)
        self.out_features, self.in_features = self.weight.shape


class FirstLinear(DividedLinear):
    """Whole inputs (..., C) -> this rank's part of the outputs. Ranks add up the gradients of the inputs."""

    def __init__(self, layer: nn.Linear, pieces: int, mesh: DeviceMesh) -> None:
        cut = Cut(0, pieces, mesh)
        super().__init__(layer, {"weight": cut, "bias": cut})

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.cuts["weight"].mesh
        shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return F.linear(shared.to_local(grad_placements=[Partial()]), self.weight, self.bias)


class LastLinear(DividedLinear):
    """This rank's part of the inputs -> whole outputs (..., C), which the ranks add up."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(layer, {"weight": Cut(1, 1, mesh)})

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.cuts["weight"].mesh
        product = DTensor.from_local(F.linear(x, self.weight), mesh, [Partial()], run_check=False).full_tensor()
        return product if self.bias is None else product + self.bias


class DividedDropout(nn.Dropout):
    """Dropout of this rank's part of the last axis: that part of the mask that one rank would draw for all of it."""

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__(p)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        parts = self.mesh.size()
        mask = F.dropout(x.new_ones(*x.shape[:-1], parts * x.shape[-1]), self.p)
        return x * mask.chunk(parts, -1)[self.mesh.get_local_rank()]


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the attentions and MLPs of `model` among the ranks of `mesh`, in place. All have the same whole weights.

    Raises:
        UserError: The model has none of these, or one that can't be divided.
    """
    modules = divisible(model)
    if not modules:
        what = "attention or MLP of VOLO, LV-ViT or timm's ViT"
        raise UserError(f"--tensor-parallel {mesh.size()}: the model has no {what}; use --shard")
    for name, module in modules:
        if problem := _problem(module, mesh.size()):
            raise UserError(f"--tensor-parallel {mesh.size()} can't divide {name}: {problem}")
        _divide(module, mesh)


def divisible(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that ranks divide, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module) in _LAYERS]


def _problem(module: Any, parts: int) -> str:
    heads = getattr(module, "num_heads", None)
    if (heads or module.fc1.out_features) % parts:
        return f"it has {heads} heads" if heads else f"it has {module.fc1.out_features} hidden channels"
    dropout = getattr(module, "attn_drop", 0.0)
    if getattr(dropout, "p", dropout) > 0:
        return "its kernel drops attention weights of all heads at once; leave attn_drop_rate out"
    first, last = _LAYERS[type(module)]
    others = [name for name in (*first, last) if type(getattr(module, name)) is not nn.Linear]
    others += [name for name in _BETWEEN if not isinstance(getattr(module, name, None), nn.Identity | None)]
    return f"{others[0]} is no plain linear layer, or needs all heads or channels" if others else ""


def _divide(module: Any, mesh: DeviceMesh) -> None:
    first, last = _LAYERS[type(module)]
    for name, pieces in first.items():
        setattr(module, name, FirstLinear(getattr(module, name), pieces, mesh))
    setattr(module, last, LastLinear(getattr(module, last), mesh))
    if "fc1" in first:
        module.drop1 = DividedDropout(module.drop1.p, mesh)
    else:
        module.num_heads //= mesh.size()
    if isinstance(module, Attention):
        module.attn_dim //= mesh.size()


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return how the divided parameters of a model are cut, by name."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DividedLinear)]
    return {f"{name}.{each}": layer.cuts[each] for name, layer in layers for each in layer.cuts}


def by_name_and_number(cuts: Mapping[str, Cut], model: nn.Module, optimizer: Optimizer) -> dict[Any, Cut]:
    """Return `cuts` also by the numbers under which the optimizer's state dict has the parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {**cuts, **{number: cuts[name] for number, name in enumerate(ordered) if name in cuts}}


def own_parts(value: Any, cuts: Mapping[Any, Cut], cut: Cut | None = None) -> Any:
    """Return nested dicts with this rank's part of every tensor below a key of `cuts`; the rest as it is.

    Args:
        cut: Of all tensors in `value`. Counters, and tensors that can't be cut so, stay whole.
    """
    if isinstance(value, dict):
        return {key: own_parts(item, cuts, cuts.get(key, cut)) for key, item in value.items()}
    if cut is None or not isinstance(value, Tensor) or value.ndim <= cut.dim:
        return value
    return cut.own(value) if value.shape[cut.dim] % (cut.pieces * cut.mesh.size()) == 0 else value


class Divided(NamedTuple):
    """The parameters of which each rank of a group holds a part."""

    parameters: frozenset[nn.Parameter]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module) -> Divided | None:
        """Return those of a model; None where all are whole."""
        cuts = cuts_of(model)
        if not cuts:
            return None
        mesh = next(iter(cuts.values())).mesh
        return cls(frozenset(p for name, p in model.named_parameters() if name in cuts), mesh.get_group())

"""Whole tensors for checkpoints of models that ranks may divide among them (`--shard`, `--tensor-parallel`).

torch's `get_state_dict` keeps whole tensors in the host memory of rank 0 alone, where the parts of `--tensor-parallel`
could not be put together any more. So they are gathered here, one after the other: a device never holds more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from tlt.io.weights import clean_names, clean_state_dict
from volo.cluster.shard import is_sharded
from volo.cluster.tensor_parallel import ShardSpec, TensorParallelParams


def whole_model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the unwrapped model. Every rank calls this.

    The tensors of a model that is not divided are shared with it. Of a divided one rank 0 has whole copies on the CPU,
    other ranks have None.
    """
    state = clean_state_dict(model)
    if not is_sharded(model):
        return state
    specs = _specs_by_name(model)
    return {name: _whole(value, specs.get(name)) for name, value in state.items()}


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer over the parameters of `model`; otherwise as `whole_model_state`."""
    saved = optimizer.state_dict()
    if is_sharded(model):
        specs = _specs_by_number(model, optimizer)
        saved["state"] = _each_tensor(saved["state"], lambda value, number: _whole(value, specs[number]))
    return saved


def own_model_state(model: nn.Module, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of the whole tensors of a state dict; nothing is sent."""
    if not is_sharded(model):
        return whole
    like, specs = clean_state_dict(model), _specs_by_name(model)
    return {name: _own(value, like.get(name), specs.get(name)) for name, value in whole.items()}


def own_optimizer_state(model: nn.Module, optimizer: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's parts in the state of as many parameters as the optimizer has; nothing is sent."""
    if not is_sharded(model):
        return whole
    specs, parameters = _specs_by_number(model, optimizer), _parameters(optimizer)
    numbers = {saved: number for number, saved in enumerate(i for g in whole["param_groups"] for i in g["params"])}

    def own(value: Tensor, saved: int) -> Tensor:
        return _own(value, parameters[numbers[saved]], specs[numbers[saved]])

    return {**whole, "state": _each_tensor(whole["state"], own)}


def _each_tensor(state: dict[int, dict[str, Any]], function: Callable[[Tensor, int], Any]) -> dict[int, dict[str, Any]]:
    """Return the state of all parameters, with the function of each tensor in it and of the parameter's number."""
    return {
        number: {key: function(value, number) if isinstance(value, Tensor) else value for key, value in each.items()}
        for number, each in state.items()
    }


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _specs_by_name(model: nn.Module) -> dict[str, ShardSpec]:
    specs = TensorParallelParams(model).specs
    return dict(zip(clean_names(list(specs)), specs.values(), strict=True))


def _specs_by_number(model: nn.Module, optimizer: Optimizer) -> list[ShardSpec | None]:
    divided = TensorParallelParams(model)
    return [divided.spec_of(parameter) for parameter in _parameters(optimizer)]


@torch.no_grad()
def _whole(value: Tensor, spec: ShardSpec | None) -> Tensor | None:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if spec is not None:
        whole = spec.whole(whole)
    return whole.to("cpu", copy=True) if dist.get_rank() == 0 else None


def _own(whole: Tensor, like: Tensor | None, spec: ShardSpec | None) -> Tensor:
    own = whole if spec is None else spec.own(whole)
    if not isinstance(like, DTensor) or own.shape != like.shape:
        return own
    return distribute_tensor(own.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

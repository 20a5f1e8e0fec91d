"""Checks and loads the optimizer state of a checkpoint, but not its settings.

The settings (weight decay, betas, ...) are those of the command that resumes; those of the file are only compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.io.weights import first_non_finite
from volo.cluster.whole_state import own_optimizer_state

# Keys that schedules and layer decay write into parameter groups.
_GROUP_SETTINGS = {"params", "param_names", "lr", "initial_lr", "lr_scale", "lr_min"}
# State of the shape of the parameter for any optimizer, or (NovoGrad) a single value.
_PER_VALUE = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
_COUNTER = "step"  # a counter in a parameter group is state, although Lookahead has it among the settings


def checked_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: Any, path: str | Path, saved_class: Any = None
) -> dict[str, Any]:
    """Return this rank's parts of the state of such an optimizer over the parameters of `model`.

    Args:
        saved: The entry `optimizer` of a file, which may hold anything.
        saved_class: The name of the optimizer's class, where the file records it.

    Raises:
        UserError: `saved` is no such state; the message has the remedy.
    """
    try:
        problem = _group_problem(optimizer, saved, saved_class)
        if not problem:
            own = own_optimizer_state(model, optimizer, saved)
            problem = _state_problem(optimizer, saved, own)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        problem = f"it is no optimizer state ({type(error).__name__}: {error})"
    if problem:
        raise UserError(
            f"{path}: its optimizer state does not fit, {problem}: "
            "use the optimizer of the checkpoint, or leave its state out with --no-resume-opt"
        )
    return own


def load_optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> list[str]:
    """Load what `checked_optimizer_state` returned; return a line for every setting that differs in the file.

    Tensors go to the devices of the parameters; `fused` and `foreach` keep the values of this optimizer.
    """
    settings = {name for name in optimizer.defaults if not name.endswith(_COUNTER)}
    keep, compared = _GROUP_SETTINGS | settings, sorted(_numeric(optimizer.defaults) & settings - {"lr"})
    groups, messages = [], []
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        merged = {k: v for k, v in theirs.items() if k not in keep}
        merged.update({k: v for k, v in own.items() if k in keep})
        groups.append({**merged, "params": theirs["params"]})
        changed = [k for k in compared if _differ(theirs.get(k), own[k])]
        messages += [f"optimizer {k}: {theirs.get(k)} in the checkpoint, {own[k]} now" for k in changed]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    _match_layout(optimizer)
    return list(dict.fromkeys(messages))


def _match_layout(optimizer: Optimizer) -> None:
    """Give moments the strides of their parameters. If they differ (`--channels-last` in only one of the runs), torch's
    fused step silently uses the wrong elements on a CPU."""
    for parameter, state in optimizer.state.items():
        for key in _PER_VALUE & state.keys():
            if state[key].shape == parameter.shape and state[key].stride() != parameter.stride():
                state[key] = torch.empty_like(parameter).copy_(state[key])


def _group_problem(optimizer: Optimizer, saved: Any, saved_class: Any) -> str | None:
    own_class = type(optimizer).__name__
    if isinstance(saved_class, str) and saved_class != own_class:
        return f"it is of {saved_class}, --opt gives {own_class}"
    groups, defaults = saved["param_groups"], _numeric(optimizer.defaults)
    theirs = set().union(*(_numeric(group) for group in groups)) - {"step"}
    if odd := sorted((theirs ^ defaults) - _GROUP_SETTINGS):
        return f"{own_class} and the file's optimizer do not share {', '.join(odd)}"
    sizes = [len(group["params"]) for group in groups]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    return f"its groups have {sizes} parameters, this model's {own_sizes}" if sizes != own_sizes else None


def _state_problem(optimizer: Optimizer, whole: dict[str, Any], own: dict[str, Any]) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, index in enumerate(index for group in whole["param_groups"] for index in group["params"]):
        tensors = {k: v for k, v in whole["state"].get(index, {}).items() if isinstance(v, Tensor)}
        for key in _PER_VALUE & tensors.keys():
            if tensors[key].numel() != 1 and own["state"][index][key].shape != parameters[number].shape:
                shapes = f"{tuple(tensors[key].shape)}, the parameter {tuple(parameters[number].shape)}"
                return f"{key} of parameter {number} is {shapes}"
        if broken := first_non_finite(tensors):
            return f"{broken} of parameter {number} holds NaN or infinite values"
    return None


def _numeric(settings: dict[str, Any]) -> set[str]:
    """Return the names of numeric settings, which tell optimizers apart; switches change with versions of torch."""
    return {k for k, v in settings.items() if isinstance(v, (int, float, tuple, Tensor)) and not isinstance(v, bool)}


def _differ(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return not torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    return (list(first) != list(second)) if isinstance(second, (tuple, list)) and first is not None else first != second

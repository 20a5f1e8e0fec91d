"""The optimizer: timm creates it, with the model's exclusions from weight decay, and layer decay."""

import importlib.util
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import Optimizer

from tlt.errors import UserError
from tlt.io.files import blamed_on
from volo.config.parser import nearest
from volo.config.rules import sharding_flag
from volo.config.settings_train import Distributed
from volo.config.settings_train import Optimizer as OptimizerSettings

# Optimizers whose fused steps can be skipped on the device (`volo.train.precision`). On a CPU torch's kernels assume
# that gradients and moments have the strides of their parameters. autograd ensures this for gradients, and
# `volo.checkpoint.state` for loaded moments.
_FUSED = ("adam", "adamw")
# Optimizers that take the same steps over weights divided among ranks (`--shard`) as over whole ones: they treat each
# value by itself, or use norms that distributed tensors sum over ranks. Others fail, differ or deadlock.
_SHARDED = {
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamc", "adamw", "adamwlegacy", "adan", "adanw"),
    *("adopt", "adoptc", "adoptw", "lamb", "lambc", "lambcd", "lambcw", "lambw", "laprop", "lapropc", "larc"),
    *("lars", "lion", "lionc", "madgrad", "madgradw", "momentum", "nadam", "nadamc", "nadamlegacy", "nadamw"),
    *("nesterov", "nesterovw", "nlarc", "nlars", "radabelief", "radam", "radamlegacy", "radamw", "rmsprop"),
    *("rmsproptf", "rmsproptfc", "rmsproptfw", "sgd", "sgdc", "sgdw"),
}
_BY_NORMS = ("lamb", "lar", "nlar")  # prefixes of optimizers whose step of a weight depends on the weight's norm


def create_optimizer(
    model: nn.Module,
    flags: OptimizerSettings,
    distributed: Distributed,
    lr: float = 1.0,
    device: torch.device | None = None,
) -> Optimizer:
    """Build the optimizer of `--opt` for the trainable parameters of the bare (unwrapped) model.

    One-dimensional parameters, biases and the names in `model.no_weight_decay()` get no weight decay. With layer decay,
    parameter groups contain `lr_scale`. `set_lr` sets the learning rates. The model is already on its `device`; None
    takes that of the first parameter. Raise UserError if the optimizer is unknown or not installed, or a flag has no
    effect on it.
    """
    device = device or next(model.parameters()).device
    name = _check_optimizer(flags, distributed, device)
    options: dict[str, Any] = {"opt": flags.opt, "lr": lr, "weight_decay": flags.weight_decay}
    betas = None if flags.opt_betas is None else tuple(flags.opt_betas)
    further = {"eps": flags.opt_eps, "betas": betas, "layer_decay": flags.layer_decay, "momentum": flags.momentum}
    options |= {name: value for name, value in further.items() if value is not None}
    if twice := {"eps", "betas"} & options.keys() & flags.opt_kwargs.keys():
        raise UserError(f"--opt-kwargs {min(twice)}=... contradicts --opt-{min(twice)}: keep one of them")
    if device.type in ("cuda", "cpu") and name in _FUSED:
        options["fused"] = True
    with blamed_on(f"--opt {flags.opt}", "can't be made", "see its settings (--opt-eps, --opt-betas, --opt-kwargs)"):
        return create_optimizer_v2(model, **options | flags.opt_kwargs)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to `lr`, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _check_optimizer(flags: OptimizerSettings, distributed: Distributed, device: torch.device) -> str:
    """Return timm's name of `--opt` without the prefix `lookahead_`. Raises UserError as `create_optimizer` does."""
    name = flags.opt.lower().removeprefix("lookahead_")
    if name not in list_optimizers():
        near = nearest(name, list_optimizers())
        raise UserError(f"--opt {flags.opt}: timm has no such optimizer" + (f", did you mean {near}?" if near else ""))
    info = get_optimizer_info(name)
    if info.second_order:
        raise UserError(f"--opt {flags.opt} needs second derivatives, which the training step does not compute")
    package = info.opt_class.partition(".")[0] if isinstance(info.opt_class, str) else ""
    if package and importlib.util.find_spec(package) is None:
        how = "NVIDIA's PyTorch container ships it" if package == "apex" else f"pip install {package}"
        raise UserError(f"--opt {flags.opt} needs {package}, which is not installed ({how}); --opt adamw needs nothing")
    if package and device.type != "cuda":
        raise UserError(f"--opt {flags.opt} runs on GPUs alone, this run is on the {device.type}: --opt adamw")
    if (flag := sharding_flag(distributed)) and name not in _SHARDED:
        raise UserError(f"{flag}: --opt {flags.opt} can't be divided among ranks, as adamw or sgd can")
    if distributed.tensor_parallel > 1 and name.startswith(_BY_NORMS):
        raise UserError(f"{flag}: --opt {flags.opt} needs the norm of each whole weight: --opt adamw, or --shard alone")
    if flags.momentum != 0.9 and not info.has_momentum:
        raise UserError(f"--momentum {flags.momentum:g} has no effect: --opt {flags.opt} has no momentum")
    if flags.opt_eps is not None and not info.has_eps:
        raise UserError(f"--opt-eps {flags.opt_eps:g} has no effect: --opt {flags.opt} has no epsilon")
    betas = info.num_betas if info.has_betas else 0
    if flags.opt_betas is not None and len(flags.opt_betas) != betas:
        raise UserError(f"--opt-betas: --opt {flags.opt} takes {betas} betas, {len(flags.opt_betas)} are given")
    return name

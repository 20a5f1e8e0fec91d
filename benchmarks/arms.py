"""The ways to do the same work that `benchmark.py train` and `infer` time: ours as the flags say, and its peers.

An arm is a set of train.py's flags; a model for it is built, prepared and compiled by the functions that train.py
calls. All arms get the weights of the first.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.flags_speed import SYNTHETIC
from benchmarks.scaling.prediction import check_model
from benchmarks.timm_volo import timm_name, timm_volo
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.config.args import train_parser
from volo.config.flag_rules import check_train
from volo.train.compilation import compile_model
from volo.train.model import TimmModel, build_model, prepare_model

OURS = "ours"
_SEED = 0
# A context, or a decorator, for comparisons: on a GPU convolutions round to TF32 otherwise.
exact_convolutions = partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=False)
_PLAIN: dict[str, Any] = {
    "torchcompile": None,
    "torchcompile_mode": None,
    "torchcompile_scope": None,
    "channels_last": False,
    "drop_path_mode": "mask",
}
# What a peer changes in the flags of ours.
CHANGES: dict[str, dict[str, Any]] = {
    "timm": _PLAIN,
    "timm-compile": _PLAIN | {"torchcompile": "inductor"},
    "reference": _PLAIN | {"outlook_kernel": "reference"},
    "eager": {"torchcompile": None, "torchcompile_mode": None, "torchcompile_scope": None},
    "mask": {"drop_path_mode": "mask"},
    "amp": {"model_dtype": "float32", "amp": True, "amp_dtype": "bfloat16"},
    "unfolded": {},
}


@dataclass(frozen=True)
class Arm:
    """One way: its name, and the flags of train.py that make it."""

    name: str
    flags: Namespace

    @property
    def is_timm(self) -> bool:
        return self.name.startswith("timm")


@dataclass(frozen=True)
class Built:
    """A model on its device: bare, and what is called."""

    bare: TimmModel
    called: Callable[..., Any]


def arms_of(args: Namespace) -> list[Arm]:
    """Ours first, then the peers that `--peer` names, each once.

    Raises:
        UserError: A contradiction among the flags, or a peer that would be the same as ours or isn't there.
    """
    check_model(args.model)
    ours = train_flags(args)
    arms = [Arm(OURS, ours)]
    for name in dict.fromkeys(args.peer):
        if name.startswith("timm"):
            timm_name(args.model)
        if name == "eager" and ours.torchcompile is None:
            raise UserError("--peer eager is ours without --torchcompile: add that flag, or leave the peer out")
        if name == "amp" and ours.model_dtype == "float32":
            raise UserError("--peer amp is ours without --model-dtype bfloat16: add that flag, or leave the peer out")
        if name == "mask" and ours.drop_path_mode == "mask":
            raise UserError("--peer mask is ours without --drop-path-mode subset: add that flag, or leave the peer out")
        arms.append(Arm(name, _changed(ours, name)))
    return arms


def train_flags(args: Namespace) -> Namespace:
    """The flags of a run of train.py with token labels that does the same step.

    Raises:
        UserError: A contradiction.
    """
    parser = train_parser()
    own = {dest: value for dest, value in vars(args).items() if dest in parser.flags}
    run = {"token_label": True, "data_backend": "synthetic", "token_label_data": "synthetic"}
    if getattr(args, "data", SYNTHETIC) != SYNTHETIC:
        run |= {"data_backend": "torchvision", "data_dir": args.data, "token_label_data": "", "token_label_size": 1}
    flags = Namespace(**(parser.defaults() | run | own))
    check_train(flags, parser.flags)
    return flags


def _changed(ours: Namespace, name: str) -> Namespace:
    changes = dict(CHANGES[name])
    if not ours.model.startswith("volo"):
        changes.pop("outlook_kernel", None)
    if name == "timm-compile" and ours.torchcompile is not None:
        changes |= {"torchcompile": ours.torchcompile, "torchcompile_mode": ours.torchcompile_mode}
    if ours.model_dtype == "bfloat16" and name in ("timm", "timm-compile", "reference"):
        changes |= CHANGES["amp"]
    return Namespace(**(vars(ours) | changes))


def build_first(arm: Arm) -> TimmModel:
    """The model whose weights all arms get, on the CPU."""
    torch.manual_seed(_SEED)
    return build_model(arm.flags)


def build_bare(arm: Arm, first: TimmModel) -> TimmModel:
    """The arm's model on the CPU, with the weights of `first`."""
    with torch.device("meta"):  # there is nothing to initialise
        model = timm_volo(first, arm.flags) if arm.is_timm else build_model(arm.flags)
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    (model.net if arm.is_timm else model).load_state_dict(weights, assign=True)
    return model


def place(arm: Arm, bare: TimmModel, device: torch.device) -> TimmModel:
    """The model on the device, prepared as the arm's flags say."""
    if arm.is_timm:
        if arm.flags.grad_checkpointing:
            bare.net.set_grad_checkpointing(True)
        return bare.to(device=device, memory_format=_format(arm))
    return prepare_model(bare, arm.flags, World(0, 0, 1, device))


def compiled(arm: Arm, model: TimmModel) -> Callable[..., Any]:
    """What is called: the model, compiled where the arm's flags say so."""
    return compile_model(model, arm.flags)


def _format(arm: Arm) -> torch.memory_format | None:
    return torch.channels_last if arm.flags.channels_last else None


@torch.no_grad()
def difference(ours: nn.Module, peer: nn.Module, images: torch.Tensor, box: torch.Tensor) -> float:
    """Largest difference of the logits of both heads, in evaluation, as a share of the largest logit."""
    found = []
    for model in (ours, peer):
        training = model.training
        found.append([x.double() for x in model.eval()(images, dense=True, mix_box=box)])
        model.train(training)
    pairs = list(zip(*found, strict=True))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)

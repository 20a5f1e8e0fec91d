"""The candidates that `benchmark.py train` and `infer` time: ours as the flags say, and its peers.

A candidate is a set of train.py's flags. Its model is built, prepared and compiled by the functions of train.py. All
candidates get the weights of the first.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.flags_speed import SYNTHETIC
from benchmarks.scaling import check_model
from benchmarks.timing import interleaved, synchronize
from tlt.errors import UserError
from tlt.mixtoken import Box, mix_tokens, unmix_tokens
from volo.cluster.distributed import World
from volo.config.args import train_parser
from volo.config.flag_rules import check_train
from volo.train.compilation import compile_model
from volo.train.model import TimmModel, build_model, prepare_model
from volo.train.precision import Precision

_ROUNDS = 3


class TimmVolo(nn.Module):
    """timm's VOLO with the interface of ours.

    The parts are timm's and run in the order of its `forward_train`, which draws its own box and leaves the class head
    out: the box is an argument here, as a tensor, so that the whole compiles to one graph, and the head is applied.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, dense: bool = False, mix_box: Box | None = None) -> Any:
        """Map images to (B, K), or with `dense` to (B, K) and (B, N, K)."""
        net = self.net
        if not dense:
            return net(x)
        x = net.patch_embed(x).permute(0, 2, 3, 1)
        grid = x.shape[1] // net.pooling_scale, x.shape[2] // net.pooling_scale
        if mix_box is not None:
            x = mix_tokens(x, mix_box, net.pooling_scale)
        x = net.norm(net.forward_cls(net.forward_tokens(x)))
        aux = net.aux_head(x[:, 1:])
        if mix_box is not None:
            aux = unmix_tokens(aux, mix_box, grid)
        return net.head(x[:, 0]), aux

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        """Return both heads."""
        return self.net.head, self.net.aux_head


def timm_name(name: str) -> str:
    """Return timm's name of one of our models at 224 px. Raises UserError if timm does not have it."""
    found = f"{name}_224"
    if not timm.is_model(found) or not name.startswith("volo"):
        raise UserError(
            f"--peer timm is timm's VOLO D1 to D5, of which {name} is none: its peers are reference and eager"
        )
    return found


def timm_volo(model: Any, flags: Namespace) -> TimmVolo:
    """Return timm's counterpart of `model`, one of our VOLOs."""
    rate = flags.drop_path or 0.0
    net = timm.create_model(
        timm_name(flags.model), img_size=model.img_size, num_classes=model.num_classes, drop_path_rate=rate
    )
    return TimmVolo(net)


def channels_last_is_faster(stem: nn.Module, images: Tensor, precision: Precision) -> bool:
    """Tell whether forward and backward pass of `stem` are faster with channels-last weights."""

    def candidate(memory_format: torch.memory_format) -> Any:
        module = copy.deepcopy(stem).to(memory_format=memory_format)

        def work(number: int) -> int:
            with precision.autocast():
                loss = module(images).float().mean()
            loss.backward()
            synchronize(precision.device)
            return 1

        return work

    found = interleaved({"": candidate(torch.contiguous_format), "last": candidate(torch.channels_last)}, _ROUNDS)
    return found["last"].median < found[""].median


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
# The flags in which a peer differs from ours.
CHANGES: dict[str, dict[str, Any]] = {
    "timm": _PLAIN,
    "timm-compile": _PLAIN | {"torchcompile": "inductor"},
    "reference": _PLAIN | {"outlook_kernel": "reference"},
    "eager": {"torchcompile": None, "torchcompile_mode": None, "torchcompile_scope": None},
    "mask": {"drop_path_mode": "mask"},
    "amp": {"model_dtype": "float32", "amp": True, "amp_dtype": "bfloat16"},
    "unfolded": {},
}
BFLOAT16 = "-bfloat16"  # ends the name of a peer with a bfloat16 copy, as ours has with --model-dtype bfloat16
_TIMM = ("timm", "timm-compile")
CHANGES |= {f"{name}{BFLOAT16}": CHANGES[name] for name in _TIMM}


@dataclass(frozen=True)
class Candidate:
    """A name and the flags of train.py."""

    name: str
    flags: Namespace

    @property
    def is_timm(self) -> bool:
        return self.name.startswith("timm")


def candidates_of(args: Namespace) -> list[Candidate]:
    """Return ours, then the peers that `--peer` names, each once. With `--model-dtype bfloat16` timm is two peers, one
    with autocast, as its own train.py has it, and one with a bfloat16 copy of its weights, as ours has.

    Raises:
        UserError: The flags contradict each other, or a peer is missing or would be the same as ours.
    """
    check_model(args.model)
    ours = train_flags(args)
    candidates = [Candidate(OURS, ours)]
    names = args.peer
    if ours.model_dtype == "bfloat16":
        names = [each for name in names for each in ((name, f"{name}{BFLOAT16}") if name in _TIMM else (name,))]
    for name in dict.fromkeys(names):
        if name.startswith("timm"):
            timm_name(args.model)
        if name.endswith(BFLOAT16) and ours.model_dtype != "bfloat16":
            raise UserError(f"--peer {name} needs --model-dtype bfloat16: add that flag, or leave the peer out")
        if name == "eager" and ours.torchcompile is None:
            raise UserError("--peer eager is ours without --torchcompile: add that flag, or leave the peer out")
        if name == "amp" and ours.model_dtype == "float32":
            raise UserError("--peer amp is ours without --model-dtype bfloat16: add that flag, or leave the peer out")
        if name == "mask" and ours.drop_path_mode == "mask":
            raise UserError("--peer mask is ours without --drop-path-mode subset: add that flag, or leave the peer out")
        candidates.append(Candidate(name, _changed(ours, name)))
    return candidates


def train_flags(args: Namespace) -> Namespace:
    """Return the flags of a run of train.py with token labels that does the same step.

    Raises:
        UserError: The flags contradict each other.
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
    if name.startswith("timm-compile") and ours.torchcompile is not None:
        changes |= {"torchcompile": ours.torchcompile, "torchcompile_mode": ours.torchcompile_mode}
    if ours.model_dtype == "bfloat16" and name in (*_TIMM, "reference"):
        changes |= CHANGES["amp"]
    return Namespace(**(vars(ours) | changes))


def build_first(candidate: Candidate) -> TimmModel:
    """Return the model whose weights all candidates get, on the CPU."""
    torch.manual_seed(_SEED)
    return build_model(candidate.flags)


def build_bare(candidate: Candidate, first: TimmModel) -> TimmModel:
    """Return the candidate's model on the CPU, with the weights of `first`."""
    with torch.device("meta"):  # there is nothing to initialise
        model = timm_volo(first, candidate.flags) if candidate.is_timm else build_model(candidate.flags)
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    (model.net if candidate.is_timm else model).load_state_dict(weights, assign=True)
    return model


def place(candidate: Candidate, bare: TimmModel, device: torch.device) -> TimmModel:
    """Return the model on the device, prepared as the candidate's flags say."""
    if candidate.is_timm:
        if candidate.flags.grad_checkpointing:
            bare.net.set_grad_checkpointing(True)
        return bare.to(device=device, memory_format=_format(candidate))
    return prepare_model(bare, candidate.flags, World(0, 0, 1, device))


def compiled(candidate: Candidate, model: TimmModel) -> Callable[..., Any]:
    """Return the model, compiled if the candidate's flags say so."""
    return compile_model(model, candidate.flags)


def _format(candidate: Candidate) -> torch.memory_format | None:
    return torch.channels_last if candidate.flags.channels_last else None


def exact(ours: Candidate) -> Candidate:
    """Return what all candidates are compared with: ours in float32, not compiled and without stochastic depth, its
    activations computed again to save memory."""
    plain = _PLAIN | {"model_dtype": "float32", "amp": False, "drop_path": 0.0, "grad_checkpointing": True}
    return Candidate("exact", Namespace(**(vars(ours.flags) | plain)))


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of tensors from those expected, as a share of the largest value of each."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

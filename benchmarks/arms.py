"""The arms that `benchmark.py step` and `infer` time: ours as the flags say, timm's VOLO, and ours with other flags.

An arm is a set of train.py's flags, and its model is built, placed and compiled by train.py's functions. All arms have
the weights of the first. To add one, add a line to ARMS: what its flags have instead of ours.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from benchmarks.rounds import DifferentResult, Range, Rows, Timing, in_turns, rounds_flag, speedup, synchronize
from tlt.errors import UserError
from tlt.mixtoken import Box, mix_tokens, unmix_tokens
from volo.cluster.distributed import World, choose_device
from volo.config.args import TRAIN
from volo.config.flag_rules import check_train
from volo.config.flag_table import Flag, flag, switch
from volo.config.flags_data import DEVICE
from volo.config.flags_train import TRAIN_GROUPS
from volo.config.value_types import NAME, POSITIVE
from volo.train.compilation import compile_errors_told
from volo.train.model import TimmModel, build_model, eval_settings, prepare_model
from volo.train.precision import check_convolutions, compute_dtype

_LAUNCHED: dict[str, Any] = {"no_cuda_graph": True}
_EAGER: dict[str, Any] = {"torchcompile": None, "torchcompile_mode": None, "torchcompile_scope": None}
_COMPILED: dict[str, Any] = {"torchcompile": "inductor", "torchcompile_scope": None}
_AUTOCAST: dict[str, Any] = {"model_dtype": "float32", "amp": True, "amp_dtype": "bfloat16"}
_MASK: dict[str, Any] = {"drop_path_mode": "mask"}
# In what the flags of an arm differ from ours. timm has the precision and the memory format of ours, but for "-amp":
# autocast is all that its own train.py offers, where ours may compute with a bfloat16 copy (--model-dtype).
ARMS: dict[str, dict[str, Any]] = {
    "timm": _EAGER | _MASK | _LAUNCHED,
    "timm-compile": _COMPILED | _MASK | _LAUNCHED,
    "timm-amp": _EAGER | _MASK | _LAUNCHED | _AUTOCAST,
    "timm-compile-amp": _COMPILED | _MASK | _LAUNCHED | _AUTOCAST,
    "graph": {"no_cuda_graph": False},
    "launched": _LAUNCHED,
    "eager": _EAGER,
    "reference": _EAGER | {"outlook_kernel": "reference", "fold": False},
    "mask": _MASK,
    "subset": {"drop_path_mode": "subset"},
    "amp": _AUTOCAST,
    "unfolded": {"fold": False},
}
OURS, SEED = "ours", 0
Work = Callable[[], object]  # a batch of an arm; the device may still be busy with it afterwards
COLUMNS = (
    *("model", "arm", "type", "rounds", "images/s", "ms a batch", "ours is, times", "CPU ms an image"),
    *("MiB an image", "start, s", "note"),
)
# Of logits, loss and norm of the gradient, relative to ours in float32 without anything that is fast.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
MEASURING = (
    DEVICE,
    rounds_flag(5),
    flag("--steps", POSITIVE, 1, "batches of an arm in each round"),
    flag("--warm-up", POSITIVE, 2, "batches of each arm before the first round"),
    switch("--profile", "after the rounds, where the time of ours goes (torch.profiler)"),
)
MODELS = flag("--model", NAME, ["volo_d1"], "VOLO or LV-ViT, one after the other", nargs="+")
PRECISION = (
    *("amp", "amp_dtype", "model_dtype", "channels_last", "outlook_kernel"),
    *("torchcompile", "torchcompile_scope", "torchcompile_mode"),
)


def train_rows(*names: str) -> tuple[Flag, ...]:
    """Return rows of train.py's flags; `flags_of` checks what they need."""
    rows = {row.dest: row for group in TRAIN_GROUPS for row in group.flags}
    return tuple(replace(rows[name], needs=(), excludes=()) for name in names)


def peers(*names: str) -> Flag:
    """Return the row of `--peer`."""
    return flag("--peer", names, ["timm"], f"what ours is compared with: {', '.join(names)}", nargs="*", metavar="ARM")


class Arm(NamedTuple):
    """A name and the flags of train.py, with `fold`: inference without BatchNorm."""

    name: str
    flags: Namespace

    @property
    def is_timm(self) -> bool:
        return self.name.startswith("timm")

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of its matrix products."""
        return compute_dtype(self.flags, device) or torch.float32


def arms_of(args: Namespace, model: str, **decided: Any) -> list[Arm]:
    """Return ours and its peers for one of `--model`; `decided` are flags that depend on the model. Raises UserError:
    flags contradict each other, or a peer is missing or the same as ours."""
    ours = flags_of(args, model, **decided)
    arms = [Arm(OURS, ours)]
    for name in dict.fromkeys(args.peer):
        changes = dict(ARMS[name])
        if name.startswith("timm") and not (model.startswith("volo") and timm.is_model(f"{model}_224")):
            raise UserError(f"--peer {name}: timm has VOLO D1 to D5, not {model}: its peers are reference and eager")
        if not model.startswith("volo"):
            changes.pop("outlook_kernel", None)
        if changes.get("torchcompile") and ours.torchcompile:
            changes |= {"torchcompile": ours.torchcompile}
        flags = Namespace(**(vars(ours) | changes))
        if flags == ours and not name.startswith("timm"):
            raise UserError(f"--peer {name} does the same as ours with these flags: leave it out")
        arms.append(Arm(name, flags))
    return arms


def flags_of(args: Namespace, model: str, **decided: Any) -> Namespace:
    """Return the flags of a run of train.py with token labels that does the same. Raises UserError: a contradiction."""
    parser = TRAIN.parser()
    own_flags = {dest: value for dest, value in vars(args).items() if dest in parser.flags}
    run = {"token_label": True, "data_backend": "synthetic", "token_label_data": "synthetic"}
    flags = Namespace(**(parser.defaults() | run | own_flags | decided | {"model": model}))
    check_train(flags, parser.flags)
    flags.fold = True
    return flags


def exact(ours: Arm) -> Arm:
    """Return what all arms are compared with: ours in float32, eager, without stochastic depth, with little memory."""
    plain = _EAGER | {"model_dtype": "float32", "amp": False, "drop_path": 0.0, "grad_checkpointing": True}
    plain |= _MASK | {"channels_last": False}
    return Arm("exact", Namespace(**(vars(ours.flags) | plain)))


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
        return net.head(x[:, 0]), aux if mix_box is None else unmix_tokens(aux, mix_box, grid)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As timm's models have it."""
        self.net.set_grad_checkpointing(enable)


def build_first(arm: Arm) -> TimmModel:
    """Return the model whose weights all arms get, on the CPU."""
    torch.manual_seed(SEED)
    return build_model(arm.flags)


@contextmanager
def exact_float32() -> Iterator[None]:
    """For comparisons: otherwise products and convolutions on a GPU round to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def build(arm: Arm, first: TimmModel, device: torch.device) -> TimmModel:
    """Return the arm's model with the weights of `first`, on the device, not compiled yet."""
    flags = arm.flags
    with torch.device("meta"):  # there is nothing to initialise
        if arm.is_timm:
            options = {"img_size": first.img_size, "num_classes": first.num_classes}
            rate = flags.drop_path or 0.0
            model: Any = TimmVolo(timm.create_model(f"{flags.model}_224", drop_path_rate=rate, **options))
        else:
            model = build_model(flags)
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    (model.net if arm.is_timm else model).load_state_dict(weights, assign=True)
    model = prepare_model(model, flags, World(0, 0, 1, device))
    for line in check_convolutions(model, eval_settings(flags, first)["input_size"], arm.dtype(device), device):
        print(line)
    return model


def check_same(name: str, results: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> float:
    """Return by what share of its norm the worst result of an arm is off. Raise DifferentResult if that is more than
    `tolerance`, or not a number."""
    exact = {what: value.double() for what, value in expected.items()}
    off = {what: float((results[what].double() - value).norm() / value.norm()) for what, value in exact.items()}
    if not all(share <= tolerance for share in off.values()):
        listed = ", ".join(f"{what} by {share:.1e}" for what, share in off.items())
        raise DifferentResult(f"arm {name} computes something else from the same numbers: off are {listed}")
    return max(off.values())


def time_arms(args: Namespace, rows: Rows, arms: Sequence[Arm], images: int, make: Callable[[Arm], Work]) -> None:
    """Build, check and warm up each arm and write its row as timed alone; then time all in turns and write their rows.

    Args:
        images: In a batch.
        make: Raises DifferentResult for an arm that computes something else, whose row then says so.

    Raises:
        UserError: Not one arm runs here, or an arm computes something else; after the others were measured.
    """
    gc.collect()  # what the model before has left
    device, works = choose_device(args.device, 0), dict[str, Callable[[], int]]()
    facts: dict[str, dict[str, Any]] = {}
    for arm in arms:
        flags, dtype = arm.flags, str(arm.dtype(device)).removeprefix("torch.")
        facts[arm.name] = {"model": flags.model, "arm": arm.name, "type": dtype, "images": images, "px": flags.img_size}
        with rows.measuring(facts[arm.name]):
            work = make(arm)
            gc.collect()  # what the check of this arm needed
            began = time.perf_counter()
            with compile_errors_told(arm.flags):
                _batches(work, args.warm_up + getattr(work, "launched_first", 0), images, device)
            facts[arm.name] |= {"start, s": time.perf_counter() - began, **_memory(work, images, device)}
            facts[arm.name] |= {"note": note} if (note := getattr(work, "note", "")) else {}
            works[arm.name] = partial(_batches, work, args.steps, images, device)
            alone = in_turns({arm.name: works[arm.name]}, 1)
            rows.write(facts[arm.name] | {"rounds": "1, alone"} | _speed(alone, arm.name, images))
        gc.collect()  # what an arm that failed has left
    timings = in_turns(works, args.rounds)
    for name in timings:
        rows.write(facts[name] | {"rounds": args.rounds} | _speed(timings, name, images))
    if args.profile and OURS in works:
        with torch.profiler.profile() as profiler:
            works[OURS]()
        print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=60))
    if not works:
        raise UserError(f"--model {arms[0].flags.model} can't be measured here: {rows.failure}")
    rows.refuse_different()


def _batches(work: Work, count: int, images: int, device: torch.device) -> int:
    for _ in range(count):
        work()
    synchronize(device)
    return count * images


def _speed(timings: Mapping[str, Timing], name: str, images: int) -> dict[str, Any]:
    wall, cpu = timings[name]
    return {
        "images/s": 1 / Range.of(wall).median,
        "ms a batch": Range.of(wall, 1e3 * images),
        "ours is, times": speedup(timings[OURS].wall, wall) if OURS in timings and name != OURS else None,
        "CPU ms an image": Range.of(cpu, 1e3),
    }


def _memory(work: Work, images: int, device: torch.device) -> dict[str, float]:
    if device.type != "cuda" or getattr(work, "launched_first", 0) > 0:  # a graph holds its memory between batches
        return {}
    torch.cuda.reset_peak_memory_stats(device)  # the peak above what is held between batches
    before = torch.cuda.memory_allocated(device)
    _batches(work, 1, images, device)
    return {"MiB an image": (torch.cuda.max_memory_allocated(device) - before) / images / 2**20}

"""The arms that `benchmark.py step` and `infer` time: ours as the flags say, timm's VOLO, and ours with other flags.

An arm is a run of train.py: its model is built, placed and compiled by train.py's functions. All arms have the weights
of the first. To add one, add a line to ARMS: what its settings have instead of ours.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from benchmarks import rounds as shared
from benchmarks.rounds import BenchmarkSettings, DifferentResult, Range, Rows, Timing, in_turns, speedup, synchronize
from tlt.errors import UserError
from tlt.mixtoken import Box, mix_tokens, unmix_tokens
from volo.cluster.distributed import World, choose_device
from volo.config import value_types as t
from volo.config.fields import flag, flags_of, group, switch, taken
from volo.config.rules import check_train
from volo.config.settings_shared import Pixels
from volo.config.settings_train import Precision, TrainSettings
from volo.train.architecture import requested_by
from volo.train.compilation import compile_errors_told
from volo.train.model import TimmModel, build_model, data_config_of, prepare_model
from volo.train.precision import check_convolutions, compute_dtype

_LAUNCHED: dict[str, Any] = {"no_cuda_graph": True}
_EAGER: dict[str, Any] = {"torchcompile": None, "torchcompile_mode": None, "torchcompile_scope": None}
_COMPILED: dict[str, Any] = {"torchcompile": "inductor", "torchcompile_scope": None}
_AUTOCAST: dict[str, Any] = {"model_dtype": "float32", "amp": True, "amp_dtype": "bfloat16"}
_MASK: dict[str, Any] = {"drop_path_mode": "mask"}
# In what the settings of an arm differ from ours. timm has the precision and the memory format of ours, but for "-amp":
# autocast is all that its own train.py offers, where ours may compute with a bfloat16 copy (--model-dtype).
ARMS: dict[str, dict[str, Any]] = {
    "timm": _EAGER | _MASK | _LAUNCHED,
    "timm-compile": _COMPILED | _MASK | _LAUNCHED,
    "timm-amp": _EAGER | _MASK | _LAUNCHED | _AUTOCAST,
    "timm-compile-amp": _COMPILED | _MASK | _LAUNCHED | _AUTOCAST,
    "graph": {"no_cuda_graph": False},
    "launched": _LAUNCHED,
    "eager": _EAGER,
    "reference": _EAGER | {"outlook_kernel": "reference"},
    "mask": _MASK,
    "subset": {"drop_path_mode": "subset"},
    "amp": _AUTOCAST,
    "unfolded": {},
}
_UNFOLDED = ("reference", "unfolded")
OURS = "ours"
SEED = 0
Work = Callable[[], object]  # a batch of an arm; the device may still be busy with it afterwards
COLUMNS = (
    *("model", "arm", "type", "rounds", "images/s", "ms a batch", "ours is, times", "CPU ms an image"),
    *("MiB an image", "start, s", "note"),
)
# Of logits, loss and norm of the gradient, relative to ours in float32 without anything that is fast.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
MODEL = partial(flag, ["volo_d1"], "VOLO or LV-ViT, one after the other")
IMG_SIZE = partial(taken, Pixels, "img_size")


def peers(*names: str) -> Any:
    """Return the field of `--peer`."""
    return flag(["timm"], f"what ours is compared with: {', '.join(names)}", names, nargs="*", metavar="ARM")


def speed(without: str = "") -> Any:
    """Return the group of train.py's flags about precision and speed."""
    return group(Precision, f"grad_checkpointing torchscript cuda_graph activation_memory_budget {without}")


class Measuring(shared.Measuring):
    """Measuring"""

    steps: t.Positive = flag(1, "batches of an arm in each round")
    warm_up: t.Positive = flag(2, "batches of each arm before the first round")
    profile: bool = switch("after the rounds, where the time of ours goes (torch.profiler)")


class Arm(NamedTuple):
    """A name, and the settings of a run of train.py; `fold`: inference is without BatchNorm."""

    name: str
    settings: TrainSettings
    fold: bool = True

    @property
    def is_timm(self) -> bool:
        return self.name.startswith("timm")

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of its matrix products."""
        return compute_dtype(self.settings.precision.mixed, device) or torch.float32


def train_settings(settings: BenchmarkSettings, model: str, **decided: Any) -> TrainSettings:
    """Return the settings of a run of train.py with token labels that does the same; `decided` depends on the model.
    Raises UserError: flags contradict each other, or one has no effect."""
    same = flags_of(type(settings)).keys() & flags_of(TrainSettings).keys() - flags_of(Measuring).keys()
    labels = {"token_label": True, "data_backend": "synthetic", "token_label_data": "synthetic"}
    values = {name: settings[name] for name in same} | labels | decided | {"model": model}
    return check_train(TrainSettings().decide("command line", **values))


def arms_of(ours: TrainSettings, peers: Sequence[str]) -> list[Arm]:
    """Return ours and its peers. Raises UserError: a peer is missing or the same as ours."""
    arms = [Arm(OURS, ours)]
    model = ours.network.model
    compiler = ours.precision.compilation.torchcompile
    for name in dict.fromkeys(peers):
        changes = dict(ARMS[name])
        if name.startswith("timm") and not (model.startswith("volo") and timm.is_model(f"{model}_224")):
            raise UserError(f"--peer {name}: timm has VOLO D1 to D5, not {model}: its peers are reference and eager")
        if not model.startswith("volo"):
            changes.pop("outlook_kernel", None)
        if changes.get("torchcompile") and compiler:
            changes |= {"torchcompile": compiler}
        arm = Arm(name, ours.decide("other flags", **changes), fold=name not in _UNFOLDED)
        if arm.fold and not arm.is_timm and arm.settings.values() == ours.values():
            raise UserError(f"--peer {name} does the same as ours with these flags: leave it out")
        arms.append(arm)
    return arms


def exact(ours: Arm) -> Arm:
    """Return what all arms are compared with: ours in float32, eager, without stochastic depth, with little memory."""
    plain = _EAGER | {"model_dtype": "float32", "amp": False, "drop_path": 0.0, "grad_checkpointing": True}
    plain |= _MASK | {"channels_last": False}
    return Arm("exact", ours.settings.decide("other flags", **plain))


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
    return build_model(requested_by(arm.settings))


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
    settings = arm.settings
    request = requested_by(arm.settings)
    with torch.device("meta"):  # there is nothing to initialise
        if arm.is_timm:
            options = {"img_size": first.img_size, "num_classes": first.num_classes}
            rate = settings.regular.drop_path or 0.0
            model: Any = TimmVolo(timm.create_model(f"{request.name}_224", drop_path_rate=rate, **options))
        else:
            model = build_model(request)
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    (model.net if arm.is_timm else model).load_state_dict(weights, assign=True)
    model = prepare_model(model, settings, World(0, 0, 1, device))
    for line in check_convolutions(model, data_config_of(request, first)["input_size"], arm.dtype(device), device):
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


def time_arms(measuring: Measuring, rows: Rows, arms: Sequence[Arm], images: int, make: Callable[[Arm], Work]) -> None:
    """Build, check and warm up each arm and write its row as timed alone; then time all in turns and write their rows.

    Args:
        images: In a batch.
        make: Raises DifferentResult for an arm that computes something else, whose row then says so.

    Raises:
        UserError: Not one arm runs here, or an arm computes something else; after the others were measured.
    """
    gc.collect()  # what the model before has left
    device = choose_device(measuring.device, 0)
    model, side = arms[0].settings.network.model, arms[0].settings.images.pixels.img_size
    works = dict[str, Callable[[], int]]()
    facts = dict[str, dict[str, Any]]()
    for arm in arms:
        dtype = str(arm.dtype(device)).removeprefix("torch.")
        facts[arm.name] = {"model": model, "arm": arm.name, "type": dtype, "images": images, "px": side}
        with rows.measuring(facts[arm.name]):
            work = make(arm)
            gc.collect()  # what the check of this arm needed
            began = time.perf_counter()
            with compile_errors_told(arm.settings.precision.compilation.torchcompile):
                _batches(work, measuring.warm_up + getattr(work, "launched_first", 0), images, device)
            facts[arm.name] |= {"start, s": time.perf_counter() - began, **_memory(work, images, device)}
            facts[arm.name] |= {"note": note} if (note := getattr(work, "note", "")) else {}
            works[arm.name] = partial(_batches, work, measuring.steps, images, device)
            alone = in_turns({arm.name: works[arm.name]}, 1)
            rows.write(facts[arm.name] | {"rounds": "1, alone"} | _speed(alone, arm.name, images))
        gc.collect()  # what an arm that failed has left
    timings = in_turns(works, measuring.rounds)
    for name in timings:
        rows.write(facts[name] | {"rounds": measuring.rounds} | _speed(timings, name, images))
    if measuring.profile and OURS in works:
        with torch.profiler.profile() as profiler:
            works[OURS]()
        print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=60))
    if not works:
        raise UserError(f"--model {model} can't be measured here: {rows.failure}")
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

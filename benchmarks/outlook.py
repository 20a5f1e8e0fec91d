"""Time of outlook attention: each kernel of ours, compiled too, against timm's unfold and fold.

    python benchmark.py outlook
    python benchmark.py outlook --device cuda -b 256 --dtypes bfloat16      # fewer fit into a GPU's cache

Timed are a forward and a backward pass of what lies between the projections, from values and logits to mixed values.
timm's arm is its own layer without the projections. Before the timing, output and gradients of every arm are compared
with those of the reference kernel in float64. bfloat16 and float16 are those of autocast.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timm.models.volo import OutlookAttention as TimmOutlookAttention
from torch import Tensor, nn

from benchmarks import rounds
from benchmarks.arms import check_same, exact_float32
from benchmarks.rounds import BenchmarkSettings, Range, Rows, in_turns, speedup, synchronize
from volo.cluster.distributed import choose_device
from volo.config import value_types as t
from volo.config.fields import Group, flag, group, switch
from volo.kernels import KERNELS, outlook_attention
from volo.models.volo import VARIANTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMM = "timm"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of norms
_COLUMNS = ("model", "type", "arm", "ms", "x timm", "off by", "note")
WIDTHS = {name: (row.dims[0], row.heads[0]) for name, row in VARIANTS.items()}


class Sizes(Group):
    """Sizes"""

    batch_size: t.Positive = flag(8, "images", also="-b")
    model: list[str] = flag(["volo_d1", "volo_d5"], ", ".join(WIDTHS), tuple(WIDTHS), metavar="NAME")
    cells: t.Positive = flag(28, "rows and columns; 28 at 224 px, 64 at 512")
    dtypes: list[str] = flag(["float32", "bfloat16"], "of values and logits", tuple(DTYPES))


class Measuring(rounds.Measuring):
    """Measuring"""

    no_compile: bool = switch("without the compiled arms")


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py outlook`."""

    sizes: Sizes = group(Sizes)
    measuring: Measuring = group(Measuring, rounds=15)


class Case(NamedTuple):
    """Images of `cells` x `cells`; autocast to `dtype` unless that is float32."""

    images: int
    cells: int
    channels: int
    heads: int
    dtype: torch.dtype
    device: torch.device

    def tensor(self, seed: int, cells: int, channels: int) -> Tensor:
        """Return the same random numbers for all arms, rounded to the type of the case."""
        size = self.images, cells, cells, channels
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.device, self.dtype)


class Logits(nn.Module):
    """Stands in for the projection to logits: they are a parameter."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.logits = nn.Parameter(case.tensor(1, (case.cells + 1) // 2, case.heads * 81))

    def forward(self, _: Tensor) -> Tensor:
        """Return the logits."""
        return self.logits


class Ours(nn.Module):
    """A kernel of ours with the interface of timm's layer."""

    def __init__(self, case: Case, kernel: str) -> None:
        super().__init__()
        self.attn = Logits(case)
        self.kernel = kernel
        self.scale = (case.channels // case.heads) ** -0.5

    def forward(self, v: Tensor) -> Tensor:
        """Mix the values."""
        return outlook_attention(v, self.attn(v), self.scale, kernel=self.kernel)


def timm_layer(case: Case) -> nn.Module:
    """Return timm's layer without its projections."""
    layer = TimmOutlookAttention(case.channels, case.heads, kernel_size=3, padding=1, stride=2)
    layer.v = layer.proj = layer.pool = nn.Identity()
    layer.attn = Logits(case)
    return layer


class Call:
    """Both passes of a module, with its input and the gradient of its output."""

    def __init__(self, case: Case, module: nn.Module, exact: bool = False) -> None:
        self.module = module.double() if exact else module
        inputs = [case.tensor(seed, case.cells, case.channels) for seed in (2, 3)]
        self.values, self.grad = (each.double() for each in inputs) if exact else inputs
        self.values.requires_grad_()
        low = case.dtype != torch.float32 and not exact
        self.autocast = partial(torch.autocast, case.device.type, case.dtype if low else None, enabled=low)

    def __call__(self) -> Tensor:
        self.values.grad = None
        self.module.zero_grad()
        with self.autocast():
            out: Tensor = self.module(self.values)
        out.backward(self.grad.to(out.dtype))
        return out.detach()

    def timed(self) -> int:
        """Do both passes and wait for the device; return the number of calls."""
        self()
        synchronize(self.values.device)
        return 1

    def results(self) -> dict[str, Tensor]:
        """Return the output and the gradients."""
        output = self()
        (logits,) = self.module.parameters()
        gradients = {"gradient of values": self.values.grad, "gradient of logits": logits.grad}
        return {"output": output} | {name: grad for name, grad in gradients.items() if grad is not None}


def run(settings: Flags) -> None:
    """Check the arms of each case, then time all in turns. Raises UserError: an arm computes something else; after all
    were measured."""
    sizes, measuring = settings.sizes, settings.measuring
    device = choose_device(measuring.device, 0)
    rows = Rows(settings, _COLUMNS)
    for model, dtype in itertools.product(sizes.model, sizes.dtypes):
        torch.compiler.reset()  # else the shapes of earlier cases count among the compilations that are allowed
        case = Case(sizes.batch_size, sizes.cells, *WIDTHS[model], DTYPES[dtype], device)
        facts = {"model": model, "type": dtype, "images": case.images, "cells": case.cells}
        arms: dict[str, Callable[[], nn.Module]] = {TIMM: partial(timm_layer, case)}
        arms |= {name: partial(Ours, case, name) for name in KERNELS}
        if not measuring.no_compile:
            arms |= {"timm, compiled": arms[TIMM], "ours, compiled": partial(Ours, case, "auto")}
        expected = Call(case, Ours(case, "reference"), exact=True).results()
        calls = {}
        off = {}
        for arm, build in arms.items():
            with rows.measuring(facts | {"arm": arm}):
                call = Call(case, build())
                if arm.endswith("compiled"):
                    call.module.compile(fullgraph=True, dynamic=False)
                with exact_float32():
                    off[arm] = check_same(arm, call.results(), expected, _TOLERANCE[case.dtype])
                calls[arm] = call.timed
        times = in_turns(calls, measuring.rounds)
        for arm, timing in times.items():
            ratio = speedup(timing.wall, times[TIMM].wall) if TIMM in times else None
            rows.write(facts | {"arm": arm, "ms": Range.of(timing.wall, 1e3), "x timm": ratio, "off by": off[arm]})
    rows.refuse_different()

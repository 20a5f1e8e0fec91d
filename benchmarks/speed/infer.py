"""`benchmark.py infer`: images/s of evaluation, ours with BatchNorm folded against timm's VOLO on the same weights.

The work is `model(images)` in evaluation: both heads, the published sum of theirs. Before anything is timed the logits
of all arms are compared.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arms import Arm, arms_of, build_bare, build_first, compiled, exact_convolutions, place
from benchmarks.comparison import Found, NoPeerError, hold
from benchmarks.memory import peak_of
from benchmarks.phases import Phases
from benchmarks.speed_report import show, tell
from tlt.models.flops import flops_per_image
from tlt.models.folding import fold_batchnorm
from volo.cluster.distributed import choose_device
from volo.train.compilation import begin_step
from volo.train.model import eval_settings
from volo.train.precision import Precision, compute_dtype

_LARGEST_DIFFERENCE = 1e-3  # of logits, relative, in float32
_UNFOLDED = ("unfolded", "reference")


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    print(show(args, measure(args, partial(tell, args))), flush=True)
    return 0


class Inference:
    """Batches through one model, the same images each time."""

    def __init__(self, called: Callable[..., Any], images: Tensor, precision: Precision) -> None:
        self.called, self.images, self.precision = called, images, precision
        self.phases = Phases(precision.device)

    @torch.inference_mode()
    def run(self, steps: int) -> int:
        """Do so many batches and return how many images they had."""
        for _ in range(steps):
            self.phases.start()
            begin_step()
            with self.precision.autocast():
                self.called(self.images)
            self.phases.mark("forward")
        return steps * len(self.images)

    def memory(self) -> dict[str, float]:
        """Bytes per image above the weights, at the peak."""
        peak = peak_of(lambda: self.run(1), self.precision.device)[1]
        self.phases.take()
        return {"forward": peak / len(self.images)}


def measure(args: Namespace, tell: Callable[[Found], None]) -> Found:
    """Build, compare, warm up and time all arms. Raises UserError: as `benchmarks.comparison.hold`."""
    device = choose_device(args.device, 0)
    arms = arms_of(args)
    first = build_first(arms[0]).eval()
    size = eval_settings(arms[0].flags, first)["input_size"]
    images = torch.randn(args.batch_size, *size, generator=torch.Generator().manual_seed(0)).to(device)
    flops = flops_per_image(first, size)
    with torch.inference_mode(), exact_convolutions():
        expected = first.to(device)(images[:2]).double()
    first.to("cpu")

    def make(arm: Arm) -> Inference:
        model = evaluated(arm, first, device)
        compare(arm, model, images[:2], expected)
        precision = Precision(device, compute_dtype(arm.flags, device))
        return Inference(compiled(arm, model), images, precision)

    return hold(args, f"inference at {size[1]} x {size[2]} px", arms, device, make, lambda arm: flops, tell)


def evaluated(arm: Arm, first: nn.Module, device: torch.device) -> nn.Module:
    """The arm's model on the device in evaluation, its stem folded unless the arm is to keep it."""
    model: nn.Module = place(arm, build_bare(arm, first), device).eval()
    if arm.name not in _UNFOLDED:
        fold_batchnorm(model)
    return model


@exact_convolutions()
@torch.inference_mode()
def compare(arm: Arm, model: nn.Module, images: Tensor, expected: Tensor) -> None:
    """Raises NoPeerError: The arm's logits are others."""
    off = float((model(images).double() - expected).abs().max() / expected.abs().max())
    if off > _LARGEST_DIFFERENCE:
        raise NoPeerError(f"--peer {arm.name} is no peer: from the same weights its logits are off by {off:.1e}")

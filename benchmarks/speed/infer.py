"""`benchmark.py infer`: images/s of evaluation, ours with BatchNorm folded against timm's VOLO on the same weights.

The work is `model(images)` in evaluation: the published sum of both heads. What is timed, compiled or in bfloat16, is
compared before: its logits, with those of our model in float32 without any of that.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.candidates import (
    Candidate,
    build_bare,
    build_first,
    candidates_of,
    compiled,
    difference,
    exact_convolutions,
    place,
)
from benchmarks.comparison import NoPeerError, Results, run_candidates, show, tell
from benchmarks.memory import peak_of
from benchmarks.timing import Phases
from tlt.models.flops import flops_per_image
from tlt.models.folding import fold_batchnorm
from volo.cluster.distributed import choose_device
from volo.train.compilation import begin_step, compile_errors_told
from volo.train.model import eval_settings
from volo.train.precision import Precision, compute_dtype

_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # of logits, relative
_UNFOLDED = ("unfolded", "reference")


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    print(show(args, measure(args, partial(tell, args))), flush=True)
    return 0


class Inference:
    """Inference of one candidate on the same batch each time."""

    def __init__(self, called: Callable[..., Any], images: Tensor, precision: Precision) -> None:
        self.called, self.images, self.precision = called, images, precision
        self.phases = Phases(precision.device)

    @torch.inference_mode()
    def run(self, steps: int) -> int:
        """Do `steps` batches and return their number of images."""
        for _ in range(steps):
            self.phases.start()
            begin_step()
            with self.precision.autocast():
                self.called(self.images)
            self.phases.mark("forward")
        return steps * len(self.images)

    def memory(self) -> dict[str, float]:
        """Return the peak bytes per image above the weights."""
        peak = peak_of(lambda: self.run(1), self.precision.device)[1]
        self.phases.take()
        return {"forward": peak / len(self.images)}


def measure(args: Namespace, tell: Callable[[Results], None]) -> Results:
    """Build, compare, warm up and time all candidates. Raises UserError if none can run here."""
    device = choose_device(args.device, 0)
    candidates = candidates_of(args)
    first = build_first(candidates[0]).eval()
    size = eval_settings(candidates[0].flags, first)["input_size"]
    images = torch.randn(args.batch_size, *size, generator=torch.Generator().manual_seed(0)).to(device)
    flops = flops_per_image(first, size)
    with torch.inference_mode(), exact_convolutions():
        expected = first.to(device)(images)
    first.to("cpu")

    def make(candidate: Candidate) -> Inference:
        model = evaluated(candidate, first, device)
        timed = Inference(compiled(candidate, model), images, Precision(device, compute_dtype(candidate.flags, device)))
        compare(candidate, timed, expected)
        return timed

    return run_candidates(
        args, f"inference at {size[1]} x {size[2]} px", candidates, device, make, lambda _: flops, tell
    )


def evaluated(candidate: Candidate, first: nn.Module, device: torch.device) -> nn.Module:
    """Return the candidate's model in evaluation on the device, its stem folded unless the candidate keeps it."""
    model: nn.Module = place(candidate, build_bare(candidate, first), device).eval()
    if candidate.name not in _UNFOLDED:
        fold_batchnorm(model)
    return model


@exact_convolutions()
@torch.inference_mode()
def compare(candidate: Candidate, timed: Inference, expected: Tensor) -> None:
    """Raise NoPeerError if the logits of what will be timed differ."""
    begin_step()
    with timed.precision.autocast(), compile_errors_told(candidate.flags):
        off = difference([timed.called(timed.images)], [expected])
    if not off <= _LARGEST_DIFFERENCE[timed.precision.amp_dtype or torch.float32]:  # also where it is not a number
        raise NoPeerError(f"arm {candidate.name} is not timed: from the same weights its logits are off by {off:.1e}")

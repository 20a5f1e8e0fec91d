"""`benchmark.py train`: images/s of a training step, ours against timm's VOLO and against ourselves, in one process.

A step is what train.py does between two batches: token-label targets, forward pass, loss, backward pass, guarded AdamW.
All arms start from the same weights and take turns; before anything is timed their logits and losses are compared.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.arms import (
    OURS,
    Arm,
    arms_of,
    build_bare,
    build_first,
    compiled,
    difference,
    exact_convolutions,
    place,
)
from benchmarks.comparison import Found, NoPeerError, hold
from benchmarks.speed.train_step import TrainStep, load_batches, losses_of
from benchmarks.speed_report import show, tell
from benchmarks.timm_volo import channels_last_is_faster
from tlt.data.loader import Batch
from tlt.models.flops import flops_per_image
from tlt.models.layers import SelfAttention
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import choose_device
from volo.train.criterion import make_criterion
from volo.train.model import TimmModel, eval_settings
from volo.train.precision import Precision, compute_dtype

_LARGEST_DIFFERENCE = 1e-3  # of logits and losses, relative, in float32
_PREPARED = 2  # batches, used in turns


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    print(show(args, measure(args, partial(tell, args))), flush=True)
    return 0


def measure(args: Namespace, tell: Callable[[Found], None]) -> Found:
    """Build, compare, warm up and time all arms. Raises UserError: as `benchmarks.comparison.hold`."""
    device = choose_device(args.device, 0)
    arms = arms_of(args)
    case = _Case(arms[0], device, args.cudnn_attention)
    height, width = case.settings["input_size"][1:]
    return hold(args, f"training step at {height} x {width} px", arms, device, case.step, case.flops, tell)


class _Case:
    """What all arms share: weights, batches, the criterion, and the work that an image takes."""

    def __init__(self, ours: Arm, device: torch.device, cudnn: bool = False) -> None:
        self.ours, self.device, self.cudnn = ours, device, cudnn
        self.first: TimmModel = build_first(ours)
        self.settings: dict[str, Any] = eval_settings(ours.flags, self.first)
        size = self.settings["input_size"][1:]
        if ours.flags.data_backend != "synthetic":
            ours.flags.token_label_size = self.first.token_grid(size)[0]  # without maps: its image's class for each
        self.criterion = make_criterion(ours.flags, self.first, size)
        self.prepared = list(islice(load_batches(ours.flags, self.settings, device), _PREPARED))
        self._flops: dict[str, float] = {}

    def step(self, arm: Arm) -> TrainStep:
        """The arm's step. Raises NoPeerError: it computes something else than ours."""
        if arm.is_timm:
            arm.flags.channels_last = self._timm_likes_channels_last(arm)
        model = place(arm, build_bare(arm, self.first), self.device)
        for module in model.modules() if self.cudnn else ():
            if isinstance(module, SelfAttention):
                module.cudnn = True
        if arm.name != OURS:
            self._compare(arm, model)
        batches = self._batches()
        return TrainStep(model, partial(compiled, arm), arm.flags, self.criterion, batches, self.device)

    def flops(self, arm: Arm) -> float:
        """Of the step of ours that does the same arithmetic, per image."""
        mode = arm.flags.drop_path_mode
        if mode not in self._flops:
            if isinstance(self.first, TokenLabelModel):
                self.first.set_drop_path_mode(mode)
            size, images = self.settings["input_size"], max(2, self.ours.flags.batch_size)
            self._flops[mode] = flops_per_image(self.first.train(), size, backward=True, images=images, dense=True)
        return self._flops[mode]

    def _timm_likes_channels_last(self, arm: Arm) -> bool:
        stem = build_bare(arm, self.first).net.patch_embed.to(self.device)
        precision = Precision(self.device, compute_dtype(arm.flags, self.device))
        return channels_last_is_faster(stem, self.prepared[0].images, precision)

    def _batches(self) -> Iterator[Batch]:
        if self.ours.flags.data_backend == "synthetic":
            return cycle(self.prepared)  # no data is loaded in the steps
        return load_batches(self.ours.flags, self.settings, self.device)

    @exact_convolutions()
    def _compare(self, arm: Arm, model: TimmModel) -> None:
        batch = self.prepared[0]
        ours = self.first.to(self.device)
        box = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=self.device)
        off = difference(ours, model, batch.images[:2], box)
        own, other = losses_of(self.criterion, [ours, model], batch)
        self.first.to("cpu")
        if max(off, abs(own - other) / abs(own)) > _LARGEST_DIFFERENCE:
            raise NoPeerError(
                f"--peer {arm.name} is no peer: from the same weights its logits are off by {off:.1e} and its loss is "
                f"{other:.6f} instead of {own:.6f}; it was not timed"
            )

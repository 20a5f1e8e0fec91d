"""Images/s of a training step: ours against timm's VOLO, and against ourselves with other settings.

    python benchmark.py step --model volo_d1 -b 8 --torchcompile --peer timm timm-compile eager
    python benchmark.py step --device cuda --model volo_d1 volo_d3 volo_d5 --peer timm timm-compile

A step is what train.py does between two batches, on two synthetic batches in turn: token-label targets, forward pass,
loss, backward pass, guarded AdamW. All arms start from the same weights. What is timed, compiled or in bfloat16, is
checked before: logits, loss and norm of the gradient of one update, without stochastic depth, which each arm draws in
its own way, against those of our model in float32 without any of that.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from itertools import count, cycle, islice
from typing import Any

import torch
from torch import Tensor

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rounds import OUTPUT, Rows
from tlt import Batch, StepKey
from volo.cluster.distributed import World, choose_device
from volo.config.flag_table import POSITIVE, Group, flag
from volo.train.compilation import begin_step, compile_errors_told, compile_model
from volo.train.criterion import Criterion, make_criterion
from volo.train.data import open_folders, open_labels, train_loader
from volo.train.model import TimmModel, eval_settings
from volo.train.optim import create_optimizer, set_lr
from volo.train.precision import Clipping, Precision, WorkingCopy, compute_dtype

DROP_PATH = {"volo_d1": 0.1, "volo_d2": 0.2, "volo_d3": 0.5, "volo_d4": 0.5, "volo_d5": 0.75}  # of the recipes

FLAGS = (
    Group(
        "Model",
        arms.MODELS,
        *arms.train_rows("img_size"),
        flag("-b --batch-size", POSITIVE, None, "images (8; on a GPU 96)"),
        *arms.train_rows("drop_path", "drop_path_mode", "grad_checkpointing", "clip_grad", "opt"),
        note="Without --drop-path stochastic depth is that of the model's recipe.",
    ),
    Group("Precision and speed", *arms.train_rows(*arms.PRECISION)),
    Group(
        "Peers",
        arms.peers(*(name for name in arms.ARMS if name != "unfolded")),
        note="timm: its VOLO with both heads, in eager mode and otherwise in our precision; -compile: compiled; -amp: "
        "with bfloat16 autocast. Ours: eager: not compiled; reference: that, without fused kernels; mask, "
        "subset: --drop-path-mode; amp: with bfloat16 autocast.",
    ),
    Group("Measuring", *arms.MEASURING, *OUTPUT),
)


def run(args: Namespace) -> None:
    """Measure one model after the other."""
    device = choose_device(args.device, 0)
    rows = Rows(args, arms.COLUMNS)
    for model in args.model:
        batch_size = args.batch_size or (96 if device.type == "cuda" else 8)
        drop_path = DROP_PATH.get(model) if args.drop_path is None else args.drop_path
        found = arms.arms_of(args, model, batch_size=batch_size, drop_path=drop_path)
        arms.time_arms(args, rows, found, batch_size, _Case(found[0], device).step)


class _Case:
    """What all arms of a model share: weights, batches, and the criterion."""

    def __init__(self, ours: Arm, device: torch.device) -> None:
        self.ours, self.device = ours, device
        self.first: TimmModel = arms.build_first(ours)
        self.settings = eval_settings(ours.flags, self.first)
        self.criterion = make_criterion(ours.flags, self.first, self.settings["input_size"][1:])
        folder = open_folders(ours.flags, 1).train
        labels, _ = open_labels(ours.flags, folder, self.first.num_classes)
        loader = train_loader(ours.flags, folder, labels, self.settings, World(0, 0, 1, device))
        self.batches: list[Batch] = list(islice(loader.epoch(0), 2))

    def step(self, arm: Arm) -> TrainStep:
        """Return the arm's step. Raises DifferentResult: it computes something else than ours in float32."""
        still = Arm(arm.name, Namespace(**(vars(arm.flags) | {"drop_path": 0.0})))
        with arms.exact_float32(), compile_errors_told(arm.flags):
            arms.check_same(arm, self.device, self._build(still)(), self._exact)
        return self._build(arm)

    def _build(self, arm: Arm) -> TrainStep:
        return TrainStep(arm, arms.build(arm, self.first, self.device), self.criterion, self.batches, self.device)

    @cached_property
    def _exact(self) -> dict[str, Tensor]:
        return self._build(arms.exact(self.ours))()


class TrainStep:
    """A training step of one arm, as `volo.train.loop` does it; `bare` has the parameters that are trained."""

    def __init__(
        self, arm: Arm, bare: TimmModel, criterion: Criterion, batches: list[Batch], device: torch.device
    ) -> None:
        self.batches, self.updates = cycle(batches), count()
        bare.train()
        copy = WorkingCopy(bare) if arm.flags.model_dtype == "bfloat16" else None
        dtype, clip = compute_dtype(arm.flags, device), arm.flags.clip_grad
        self.criterion = replace(criterion, amp_dtype=dtype)
        self.precision = Precision(device, dtype, clip and Clipping(clip), working_copy=copy)
        self.model = compile_model(bare if copy is None else copy.module, arm.flags)
        self.optimizer = create_optimizer(arm.flags, bare, device)
        set_lr(self.optimizer, 1e-5)
        self.parameters = [p for p in bare.parameters() if p.requires_grad]

    def __call__(self) -> dict[str, Tensor]:
        """Do one step; return both heads' logits, the loss, and the norm of the gradient before clipping."""
        batch, step = next(self.batches), StepKey(arms.SEED, next(self.updates))
        step.seed_torch()
        begin_step()
        outputs: tuple[Tensor, ...] = ()

        def model(*images: Tensor, **options: Any) -> tuple[Tensor, ...]:
            nonlocal outputs
            outputs = self.model(*images, **options)
            return outputs

        loss = self.criterion.loss(model, batch, step).total
        self.precision.backward(loss)
        norm = self.precision.step(self.optimizer, self.parameters)
        logits = {"class logits": outputs[0].detach(), "token logits": outputs[1].detach()}
        return logits | {"loss": loss.detach(), "gradient": norm}

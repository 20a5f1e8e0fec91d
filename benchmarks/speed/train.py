"""`benchmark.py train`: images/s of a training step, ours against timm's VOLO and against ourselves, in one process.

A step is what train.py does between two batches: token-label targets, forward pass, loss, backward pass, guarded AdamW.
All candidates start from the same weights and take turns. What is timed, compiled or in bfloat16, is compared before:
its logits, loss and gradient of one update, with those of our model in float32 without any of that.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import count, cycle, islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import (
    Candidate,
    build_bare,
    build_first,
    candidates_of,
    channels_last_is_faster,
    compiled,
    difference,
    exact,
    exact_convolutions,
    place,
)
from benchmarks.comparison import NoPeerError, Results, run_candidates, show, tell
from benchmarks.memory import peak_of
from benchmarks.timing import Phases
from tlt.data.batch import Batch
from tlt.data.loader import TrainLoader
from tlt.loss import LossTerms
from tlt.models.flops import flops_per_image
from tlt.models.layers import SelfAttention
from tlt.models.token_labeling import TokenLabelModel
from volo.cluster.distributed import World, choose_device
from volo.train.compilation import begin_step, compile_errors_told
from volo.train.criterion import Criterion, StepKey, make_criterion
from volo.train.data import open_folders, open_labels, train_loader
from volo.train.model import TimmModel, eval_settings, heads_of
from volo.train.optim import create_optimizer, set_lr
from volo.train.precision import Precision, WorkingCopy, compute_dtype

# Of logits, loss and the norm of the gradient, relative.
_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_PREPARED = 2  # batches, used in turns


def run(args: Namespace) -> int:
    """Entry point, after the arguments are parsed."""
    print(show(args, measure(args, partial(tell, args))), flush=True)
    return 0


def measure(args: Namespace, tell: Callable[[Results], None]) -> Results:
    """Build, compare, warm up and time all candidates. Raises UserError if none can run here."""
    device = choose_device(args.device, 0)
    candidates = candidates_of(args)
    case = _Case(candidates[0], device, args.cudnn_attention)
    height, width = case.settings["input_size"][1:]
    return run_candidates(
        args, f"training step at {height} x {width} px", candidates, device, case.step, case.flops, tell
    )


class _Case:
    """What all candidates share: weights, batches, the criterion, and the operations of an image."""

    def __init__(self, ours: Candidate, device: torch.device, cudnn: bool = False) -> None:
        self.ours, self.device, self.cudnn = ours, device, cudnn
        self.first: TimmModel = build_first(ours)
        self.settings: dict[str, Any] = eval_settings(ours.flags, self.first)
        size = self.settings["input_size"][1:]
        if ours.flags.data_backend != "synthetic":
            ours.flags.token_label_size = self.first.token_grid(size)[0]  # without maps: its image's class for each
        self.criterion = make_criterion(ours.flags, self.first, size)
        self.prepared = list(islice(load_batches(ours.flags, self.settings, device), _PREPARED))
        self._flops: dict[str, float] = {}

    def step(self, candidate: Candidate) -> TrainStep:
        """Return the candidate's step. Raises NoPeerError if it computes something else than ours."""
        if candidate.is_timm:
            candidate.flags.channels_last = self._timm_likes_channels_last(candidate)
        self._compare(candidate)
        return self._build(candidate)

    def _build(self, candidate: Candidate) -> TrainStep:
        model = place(candidate, build_bare(candidate, self.first), self.device)
        for module in model.modules() if self.cudnn else ():
            if isinstance(module, SelfAttention):
                module.cudnn = True
        batches = self._batches()
        return TrainStep(model, partial(compiled, candidate), candidate.flags, self.criterion, batches, self.device)

    def flops(self, candidate: Candidate) -> float:
        """Return the operations per image of our step with the same arithmetic."""
        mode = candidate.flags.drop_path_mode
        if mode not in self._flops:
            if isinstance(self.first, TokenLabelModel):
                self.first.set_drop_path_mode(mode)
            size, images = self.settings["input_size"], max(2, self.ours.flags.batch_size)
            self._flops[mode] = flops_per_image(self.first.train(), size, backward=True, images=images, dense=True)
        return self._flops[mode]

    def _timm_likes_channels_last(self, candidate: Candidate) -> bool:
        stem = build_bare(candidate, self.first).net.patch_embed.to(self.device)
        precision = Precision(self.device, compute_dtype(candidate.flags, self.device))
        return channels_last_is_faster(stem, self.prepared[0].images, precision)

    def _batches(self) -> Iterator[Batch]:
        if self.ours.flags.data_backend == "synthetic":
            return cycle(self.prepared)  # no data is loaded in the steps
        return load_batches(self.ours.flags, self.settings, self.device)

    def _compare(self, candidate: Candidate) -> None:
        """Compare the function that will be timed, but for its stochastic depth, which each draws in its own way."""
        still = Candidate(candidate.name, Namespace(**(vars(candidate.flags) | {"drop_path": 0.0})))
        with exact_convolutions(), compile_errors_told(candidate.flags):
            found = self._build(still).update(self.prepared[0])
        names = ("class logits", "token logits", "loss", "norm of the gradient")
        off = {name: difference([a], [b]) for name, a, b in zip(names, found, self._exact, strict=True)}
        dtype = compute_dtype(candidate.flags, self.device) or torch.float32
        if not max(off.values()) <= _LARGEST_DIFFERENCE[dtype]:  # also where a value is not a number
            told = ", ".join(f"{name} {share:.1e}" for name, share in off.items())
            raise NoPeerError(
                f"arm {candidate.name} is not timed: from the same weights its first update is off by {told} of the "
                "largest of each"
            )

    @cached_property
    def _exact(self) -> list[Tensor]:
        with exact_convolutions():
            return self._build(exact(self.ours)).update(self.prepared[0])


_SEED = 0
_LR = 1e-5


class TrainStep:
    """A training step of one candidate, as `volo.train.loop.train_epoch` does it, with marks between its parts.

    Args:
        bare: The model whose parameters are trained, on its device.
        compiled: Compiles a model.
        flags: Flags of train.py.
        batches: An endless iterator.
    """

    def __init__(
        self,
        bare: TimmModel,
        compiled: Callable[[TimmModel], Callable[..., Any]],
        flags: Namespace,
        criterion: Criterion,
        batches: Iterator[Batch],
        device: torch.device,
    ) -> None:
        self.criterion, self.batches, self.device = criterion, batches, device
        bare.train()
        working_copy = WorkingCopy(bare) if flags.model_dtype == "bfloat16" else None
        dtype = compute_dtype(flags, device)
        self.precision = Precision(
            device, dtype, flags.clip_grad, flags.clip_mode, working_copy=working_copy, heads=heads_of(bare)
        )
        self.called = compiled(bare if working_copy is None else working_copy.module)
        self.optimizer = create_optimizer(flags, bare, device)
        set_lr(self.optimizer, _LR)
        self.parameters = [p for p in bare.parameters() if p.requires_grad]
        self.phases = Phases(device)
        self.loss = torch.zeros(())
        self._updates = count()

    def run(self, steps: int) -> int:
        """Do `steps` steps and return their number of images; `phases` has the times of their parts."""
        images = 0
        for _ in range(steps):
            self.phases.start()
            batch = next(self.batches)
            self.phases.mark("data")
            self.update(batch)
            images += batch.size
        return images

    def update(self, batch: Batch) -> list[Tensor]:
        """Do one step; return both heads' logits, the loss, and the norm of the gradient before clipping."""
        outputs, terms = self.forward(batch)
        self.phases.mark("forward")
        self.precision.backward(terms.total)
        self.phases.mark("backward")
        norm = self.precision.step(self.optimizer, self.parameters)
        self.phases.mark("optimizer")
        self.loss = terms.total.detach()
        return [*(each.detach() for each in outputs), self.loss, norm]

    def forward(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], LossTerms]:
        """Make the targets, do the forward pass and compute the loss; return both heads' logits and the losses."""
        step = StepKey(_SEED, next(self._updates), 0, 0)
        step.seed_torch()
        begin_step()
        targets, mixed = self.criterion.targets(batch), self.criterion.draw(batch, step)
        with self.precision.autocast():
            outputs = self.called(mixed.images, **self.criterion.arguments(mixed))
            return outputs, self.criterion(outputs, targets, mixed)

    def memory(self) -> dict[str, float]:
        """Return peak bytes per image above what the model and its optimizer hold: of the forward pass with the loss,
        and of the whole step, which includes the gradients. Call it after a few steps."""
        batch = next(self.batches)
        forward = peak_of(lambda: self.forward(batch), self.device)[1]
        step = peak_of(lambda: self.update(batch), self.device)[1]
        self.phases.take()
        return {"forward": forward / batch.size, "step": step / batch.size}


def load_batches(flags: Namespace, settings: dict[str, Any], device: torch.device) -> Iterator[Batch]:
    """Yield batches of train.py's loader without end, augmented and on the device."""
    world = World(0, 0, 1, device)
    folder = open_folders(flags, 1).train
    labels, _ = open_labels(flags, folder, flags.num_classes or 1000)
    loader: TrainLoader = train_loader(flags, folder, labels, settings, world)
    for epoch in count():
        for _, _, batch in loader.epoch(epoch):
            yield batch

"""`--kd-model-name`: a frozen teacher whose logits or features the student learns (`tlt.distill`).

The teacher sees the batch; for another size (`--kd-size`) or the whole image (`--kd-view whole`) a second loader makes
what it sees: data are a function of (seed, epoch, index), so that its batches hold the same images.
"""

from __future__ import annotations

import hashlib
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

from tlt.api import Loader
from tlt.data.batch import Batch
from tlt.data.sources.source import ImageSource
from tlt.distill import DistillLoss, FeatureTeacher, with_projector
from tlt.errors import UserError
from tlt.loss import LossTerms
from tlt.mixtoken import mixed_share
from volo.cluster.distributed import World
from volo.config.checkpoint_files import ENDINGS
from volo.record.logger import Logger
from volo.train.compilation import feature_compiler
from volo.train.criterion import Drawn
from volo.train.data import train_loader
from volo.train.model import TimmModel, place_model
from volo.train.precision import autocast, check_convolutions, compute_dtype
from volo.train.trained_model import load_model


@dataclass
class Distillation:
    """What a teacher adds to the loss of a step.

    Attributes:
        checksum: Of its weights.
        views: Loads what it sees; None: that is what the student sees.
        only: There is no other loss.
    """

    checksum: str
    distance: DistillLoss
    weight: float
    views: Loader | None
    only: bool
    _seen: Batch | None = None  # by the teacher, of the present batch
    _laps: deque[tuple[Any, Any]] = field(default_factory=deque)  # of the teacher, that the device has not ended
    _seconds: float = 0.0  # of those before

    def paired(self, batches: Iterator[Batch], epoch: int, update: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from update `update` on, and load what the teacher sees of each."""
        if self.views is None:
            yield from batches
            return
        for batch, seen in zip(batches, self.views.epoch(epoch, update), strict=True):
            self._seen = seen
            yield batch

    def loss(self, criterion: Any, model: Callable[..., Any], batch: Batch, drawn: Drawn) -> LossTerms:
        """Return the losses of a step: those of `criterion`, and the teacher's in their total."""
        images, options, terms = (batch.images, {}, _no_losses) if self.only else criterion.prepare(batch, drawn)
        box = options.get("mix_box")
        mixed = 0.0 if box is None else mixed_share(box, criterion.grid)
        with autocast(images.device, criterion.amp_dtype):
            began = _now(images.device)
            targets = self.distance.lesson(batch, self._seen, images if self._seen is None else None)
            self._laps.append((began, _now(images.device)))
            self._add_up()
            if self.distance.kind == "logit":
                outputs = model(images, **options)
                features = outputs[0] if isinstance(outputs, tuple) else outputs
            else:
                outputs, features = model(images, taught=True, **options)
            distance, losses = self.distance(features, targets, mixed), terms(outputs)
        return losses._replace(total=losses.total + self.weight * distance)

    def summary_line(self, seconds: float) -> str:
        """Return a line about the teacher's part of the `seconds` since the last call. Waits for the device."""
        if self._laps:
            self._laps[-1][1].synchronize()
        self._add_up()
        own, self._seconds = self._seconds, 0.0
        return f"teacher: {own:.1f} s, {100 * own / max(seconds, 1e-9):.0f} % of the epoch's training"

    def _add_up(self) -> None:
        """Add up the laps that the device has ended, in their order. Waits for nothing."""
        while self._laps:
            began, ended = self._laps[0]
            if isinstance(ended, float):
                self._seconds += ended - began
            elif ended.query():
                self._seconds += began.elapsed_time(ended) / 1000
            else:
                return
            self._laps.popleft()


def _no_losses(outputs: Tensor | tuple[Tensor, ...]) -> LossTerms:
    return LossTerms(*torch.zeros(3, device=(outputs[0] if isinstance(outputs, tuple) else outputs).device))


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def load_distillation(
    args: Namespace, student: TimmModel, settings: dict[str, Any], images: ImageSource, world: World, logger: Logger
) -> Distillation:
    """Load the teacher that the flags name, tell of it, and give the student, on the CPU, a projector.

    Args:
        settings: input_size, mean and std of the student's images.
        images: Training images.

    Raises:
        UserError: The teacher does not exist, its weights can't be fetched, it doesn't take such images, or it or the
            student has no tokens, or other classes.
    """
    name, (channels, *size), kind = args.kd_model_name, settings["input_size"], args.kd_distill_type
    seen, how = (args.kd_size * 2)[:2] if args.kd_size else size, {"kind": kind, "dense_loss": args.kd_dense_loss}
    try:
        model = _load(name, tuple(seen), channels)
        digest, model = checksum(model), place_model(model, args, world)
        dtype = None if compute_dtype(args, world.device) is None else torch.bfloat16
        for line in check_convolutions(model, (channels, seen[0], seen[1]), dtype, world.device):
            logger.line(line)
        pixels = settings["mean"], settings["std"]
        teacher = FeatureTeacher(model, (seen[0], seen[1]), *pixels, dtype, feature_compiler(model, args))
        found = teacher(torch.zeros(2, channels, *seen, device=world.device), kind)
        if kind == "logit" and found.shape[1] != student.num_classes:
            raise UserError(f"it has {model.num_classes} classes, --model {args.model} has {student.num_classes}")
        if kind == "token":
            _ = teacher.tokens  # where it has none, that is its fault and not the student's
    except (UserError, AssertionError, RuntimeError, ValueError) as error:  # layers raise for a size
        raise UserError(f"--kd-model-name {name}: {str(error).splitlines()[0]}") from error
    try:
        distance = DistillLoss.of(student, (size[0], size[1]), teacher, temperature=args.kd_temperature, **how)
        if kind != "logit":
            with_projector(student, teacher, (size[0], size[1]), **how)
    except (UserError, AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f"--model {args.model} can't learn {kind}s: {str(error).splitlines()[0]}") from error
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    logger.line(f"teacher {name} ({digest[:12]}): {millions:.2f} M parameters, {seen[0]} x {seen[1]} px")
    views, whole = None, args.kd_view == "whole"
    if whole or seen != size:
        asked = Namespace(**{**vars(args), "no_aug": whole or args.no_aug, "compat": None})
        views = train_loader(asked, images, None, settings | {"input_size": (channels, *seen)}, world)
    return Distillation(digest, distance, args.kd_loss_weight, views, args.kd_only)


def _load(name: str, size: tuple[int, ...], channels: int) -> TimmModel:
    path = name if name.endswith(ENDINGS) and not timm.is_model(name) else None
    asked = Namespace(model=None if path else name, pretrained=not path, num_classes=None, gp=None, img_size=size)
    asked.use_ema, asked.no_use_ema, asked.input_size, asked.model_kwargs = False, False, None, {}
    trained = load_model(asked, path, dense=False)
    if trained.settings["input_size"][0] != channels:
        raise UserError(f"it takes images of {trained.settings['input_size'][0]} channels, the student of {channels}")
    trained.model.pretrained_cfg = trained.model.pretrained_cfg | {k: trained.settings[k] for k in ("mean", "std")}
    return trained.model


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights and their names."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()

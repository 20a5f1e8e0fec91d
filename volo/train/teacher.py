"""`--token-label-teacher`: an annotator network labels each training batch, so that no label files are needed.

The teacher sees the images that the student is trained on, after augmentation and before they are mixed. Its prediction
for a place is the label of that place, so that no geometry has to be undone. The teacher is not trained, averaged or
saved.
"""

from __future__ import annotations

import hashlib
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tlt.data.batch import Batch
from tlt.errors import UserError
from tlt.io.files import sha256_of
from tlt.io.weights import clean_state_dict
from tlt.label_map import FULL_AREA, Area, LabelBatch
from tlt.labels.annotate import Annotator, check_dense, labelled_area
from tlt.labels.records import relative_to_tail
from tlt.models.flops import flops_per_image
from volo.cluster.distributed import World
from volo.train.compilation import feature_compiler
from volo.train.model import TimmModel, place_model
from volo.train.precision import compute_dtype
from volo.train.trained_model import load_model


class Stopwatch:
    """Measures the time that a device spends in a block, without waiting for the device before `take`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Measure the block."""
        if not self.cuda:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._laps.append(events)

    def take(self) -> float:
        """Return the seconds measured since the last call. Waits for the device."""
        if self._laps:
            self._laps[-1][1].synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._laps) / 1000
        self._seconds, self._laps = 0.0, []
        return seconds


class Teacher:
    """Labels batches with an annotator network.

    Args:
        annotator: Is on the training device.
        student, own: (mean, deviation) with which the pixels of the batch are normalised, and of the annotator's input.
        num_classes: Number of classes of both student and annotator.
        area: The part of an image that the annotator labels (`tlt.labels.annotate.labelled_area`).
        device: The device of the batches.
        exact_tail: `--label-tail exact` (`tlt.labels.records`).
        record: What checkpoints record about the teacher.
        averaged: The annotator's weights are a moving average.
    """

    def __init__(
        self,
        annotator: Annotator,
        student: tuple[Sequence[float], Sequence[float]],
        own: tuple[Sequence[float], Sequence[float]],
        num_classes: int,
        area: Area,
        device: torch.device,
        exact_tail: bool = False,
        record: dict[str, Any] | None = None,
        averaged: bool = False,
    ) -> None:
        self.annotator, self.num_classes, self.exact_tail, self.record = (
            annotator,
            num_classes,
            exact_tail,
            record or {},
        )
        (mean, std), (own_mean, own_std) = (tuple(_colours(each, device) for each in pair) for pair in (student, own))
        self._scale, self._shift = std / own_std, (mean - own_mean) / own_std
        self.device, self.averaged = device, averaged
        self._affine = torch.eye(2, 3, device=device)
        self._area, self._visible = (torch.tensor(part, device=device) for part in (area, FULL_AREA))
        self._watch, self._images = Stopwatch(device), 0

    def label(self, batch: Batch) -> Batch:
        """Return the batch with labels at the places where the annotator saw them."""
        with self._watch.lap():
            found = self.annotator(torch.addcmul(self._shift, batch.images, self._scale))
            values = found.values
            if self.exact_tail:
                values = relative_to_tail(values, found.log_sum_exp, self.num_classes)
        self._images += batch.size
        labels = LabelBatch(values, found.ids, self._area.expand(batch.size, 4))
        affine, visible = self._affine.expand(batch.size, 2, 3), self._visible.expand(batch.size, 4)
        return replace(batch, labels=labels, affine=affine, visible=visible)

    def take_cost(self) -> tuple[float, int]:
        """Return the seconds and the images that this rank has labelled since the last call. Waits for the device."""
        cost, self._images = (self._watch.take(), self._images), 0
        return cost

    def describe(self, student: nn.Module, input_size: tuple[int, int, int], dense: bool) -> str:
        """Return a line with size and operations of the teacher, and the operations of a step of the student."""
        model = self.annotator.model
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        step = _gflops(student, input_size, backward=True, **({"dense": True} if dense else {}))
        name = f"{self.record.get('teacher')}{' (EMA)' if self.averaged else ''}"
        return (
            f"teacher {name}: {parameters:.2f} M parameters, {_gflops(model, input_size)} an "
            f"image; forward and backward pass of the student: {step} (a multiply-add is 2)"
        )


def load_teacher(
    args: Namespace, student: TimmModel, settings: dict[str, Any], class_names: list[str], world: World
) -> Teacher | None:
    """Load the teacher that the flags name; return None without one.

    Args:
        settings: input_size, mean and std of the student's training images.
        class_names: Names of the class folders.

    Raises:
        UserError: The model or file does not exist, or the teacher has no exact dense logits, has other classes than
            the student, or does not take images of this size.
    """
    if not args.token_label_teacher:
        return None
    name, path = args.token_label_teacher, args.token_label_teacher_checkpoint
    asked = Namespace(model=name, pretrained=not path, num_classes=None, gp=None)
    asked.use_ema, asked.no_use_ema = False, False
    asked.img_size, asked.input_size, asked.model_kwargs = tuple(settings["input_size"][1:]), None, {}
    try:
        trained = load_model(asked, path or None, num_classes=student.num_classes)
        model = place_model(trained.model.requires_grad_(False), args, world)
        _check(model, name, settings["input_size"], world.device)
    except UserError as error:
        raise UserError(_with_our_flags(str(error))) from error
    _compare_classes(args, model, student, trained.config.get("class_names"), class_names)
    dtype = compute_dtype(args, world.device)
    annotator = Annotator(model, args.token_label_teacher_top_k, dtype, feature_compiler(model, args))
    record = {"teacher": name, "sha256": sha256_of(path) if path else _weights_sha256(model)}
    pixels = (settings["mean"], settings["std"]), (trained.settings["mean"], trained.settings["std"])
    area = labelled_area(model, settings["input_size"][1:])
    exact_tail = args.label_tail == "exact"
    return Teacher(
        annotator, *pixels, student.num_classes, area, world.device, exact_tail, record, averaged=trained.args.use_ema
    )


def teacher_costs(teacher: Teacher | None, training_seconds: float, tell: Callable[[str], None]) -> dict[str, float]:
    """Print what the teacher cost in an epoch on this rank; return the columns for summary.csv."""
    if teacher is None:
        return {}
    seconds, images = teacher.take_cost()
    costs = {
        "teacher_ms_per_image": 1000 * seconds / max(images, 1),
        "teacher_share": seconds / max(training_seconds, 1e-9),
    }
    tell(
        f"teacher: {costs['teacher_ms_per_image']:.3g} ms an image on a {teacher.device.type} device, "
        f"{100 * costs['teacher_share']:.0f} % of the training time"
    )
    return costs


def _with_our_flags(text: str) -> str:
    """Replace the flags in a message about an annotator by those of train.py."""
    for flag, ours in (
        ("--initial-checkpoint (validate.py, generate_label.py: --checkpoint)", "--token-label-teacher-checkpoint"),
        ("--checkpoint", "--token-label-teacher-checkpoint"),
        ("--model", "--token-label-teacher"),
    ):
        text = text.replace(flag, ours)
    return text


def _compare_classes(
    args: Namespace, teacher: TimmModel, student: TimmModel, recorded: Sequence[str] | None, class_names: list[str]
) -> None:
    """Raise UserError if the teacher has other classes than the student, or its checkpoint has other class names."""
    shown = f"--token-label-teacher {args.token_label_teacher}"
    if teacher.num_classes != student.num_classes:
        raise UserError(
            f"{shown} has {teacher.num_classes} classes, --model {args.model} has {student.num_classes}: use an "
            "annotator for these classes, or --num-classes"
        )
    if recorded and list(recorded) != class_names:
        raise UserError(f"{shown} was trained on other class folders: use an annotator trained on these")


def _check(model: nn.Module, name: str, size: tuple[int, int, int], device: torch.device) -> None:
    try:
        check_dense(model, torch.randn(2, *size, device=device), f"--model {name}")
    except (AssertionError, RuntimeError, ValueError) as error:  # raised by layers for a wrong image size
        reason = str(error).split("\n")[0]
        raise UserError(
            f"--model {name} does not take images of {size[1]} x {size[2]} px ({reason}): use another annotator, or "
            "another --img-size"
        ) from error


def _colours(values: Sequence[float], device: torch.device) -> Tensor:
    """(3 or 1, 1, 1)."""
    return torch.tensor(tuple(values), dtype=torch.float32, device=device)[:, None, None]


def _gflops(model: nn.Module, input_size: tuple[int, int, int], **options: Any) -> str:
    try:
        return f"{flops_per_image(model, input_size, **options) / 1e9:.3g} GFLOPs"
    except (NotImplementedError, RuntimeError):  # an operation that needs a tensor's contents
        return "GFLOPs that torch can't count"


def _weights_sha256(model: nn.Module) -> str:
    """Return the hash of all weights, for published ones, which the user named no file of."""
    digest = hashlib.sha256()
    for name, value in sorted(clean_state_dict(model).items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

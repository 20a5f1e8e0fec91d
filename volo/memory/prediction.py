"""Predicts a training run before it starts (`--dry-run`): the memory that each rank needs, which batch fits, and from
one pass of this machine how long the run takes.

Forward and backward passes of 16 and of 32 images on fake tensors show the peak memory of a step; that of other batches
lies on the line through both. What is stored from step to step is counted, and the optimizer's state of one small layer
is measured. Predictions are for eager mode (a compiled step stores less) and for this machine's kernels; those of a GPU
may store somewhat more or less.
"""

import copy
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt.errors import UserError, reason_of
from tlt.models.flops import flops_per_image
from tlt.teacher import FeatureTeacher
from volo.cluster.distributed import primary_first
from volo.cluster.shard import units_of
from volo.cluster.tensor_parallel import divisible
from volo.config.rules import sharding_flag
from volo.config.settings_train import TrainSettings
from volo.record.records import duration
from volo.record.run_directory import check_writable
from volo.train.criterion import TokenLabelCriterion
from volo.train.loop import set_train_mode
from volo.train.meter import seconds_left
from volo.train.optimizer import create_optimizer
from volo.train.run import Run, Training
from volo.train.step_graph import why_launched

GIB = 2.0**30
MIB = 2.0**20
_MARGIN = 0.05  # share of a card left for workspaces of libraries, prefetched batches and gaps between allocations
_CONTEXT = GIB  # bytes that CUDA itself occupies before the first tensor
_OPERATIONS_OF_CPU = 1e11  # most operations of the forward pass that times a CPU
_CARDS = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}  # GB in a card's name: GiB that torch reports for it


def report_dry_run(run: Run, training: Training) -> None:
    """Print how many operations and how much memory the run needs, and which batch sizes would fit (`--dry-run`)."""
    reason = why_launched(run, training)
    for line in run.settings.told():
        run.logger.line(line)
    with primary_first():
        if run.world.is_primary:
            check_writable(run.directory, "--output")
    if run.world.is_primary:
        config, precision = training.state.metadata["model_config"], training.precision
        size = (config["in_chans"], *config["img_size"])
        dense = isinstance(training.criterion, TokenLabelCriterion) and training.criterion.dense
        device_type = "cuda" if run.world.device.type == "cuda" else "cpu"
        largest, settings = training.loader.index_stream.sizes, run.settings
        if largest is not None:
            batches = zip(largest.batch_sizes, largest.sizes, strict=True)
            _, side, batch = max((batch * math.prod(side), side, batch) for batch, side in batches)
            size = (size[0], *side)
            settings = settings.decide("data", batch_size=batch)
            run.logger.line(f"of the batches, those of {batch} images of {side[0]} px have the most pixels:")
        shape = StepShape(size, device_type, precision.amp_dtype, dense)
        model = training.state.model
        computing = model if precision.working_copy is None else precision.working_copy.module
        for line in memory_report(settings, model, computing, shape, run.world.device, graph=not reason):
            run.logger.line(line)
        if training.distillation is not None:
            parts = zip(training.distillation.names, training.distillation.losses.parts, strict=True)
            teachers = {name: part.teacher for name, part in parts if isinstance(part.teacher, FeatureTeacher)}
            # With several image sizes, all of a teacher's images are of its own size.
            most = run.settings.images.batch_size if largest is None else max(largest.batch_sizes)
            for line in teachers_report(teachers, model, shape, most):
                run.logger.line(line)
        run.logger.line(expected_time(run, training, computing, shape, settings.images.batch_size))
    run.logger.line("--dry-run: flags, data and model are fine; nothing was trained or written")


class StepShape(NamedTuple):
    """The properties of a step that determine its memory, besides model and batch size."""

    input_size: tuple[int, int, int]  # channels, H, W
    device_type: str  # "cuda" or "cpu"
    amp_dtype: torch.dtype | None = None  # type of autocast; None for float32
    dense: bool = False  # whether both heads are used, as with token labels


def activations_of(model: nn.Module, shape: StepShape) -> tuple[float, float]:
    """Predict the peak bytes of a step besides weights and gradients: a fixed part, and a part per image. The model
    must be in training mode. Layers that depend on values of tensors, unlike VOLO's and LV-ViT's, raise any error."""
    few, many = (step_peak(model, shape, batch) for batch in (16, 32))
    # The part that doesn't grow with the batch is the copy of the weights in autocast's dtype.
    return 2 * few - many, (many - few) / 16


def step_peak(model: nn.Module, shape: StepShape, batch: int, trained: bool = True) -> int:
    """Return the peak bytes of a step, besides weights, gradients and images. Logits and their gradients are float32,
    as in the loss that takes most memory. If the model is not `trained`, there is only a forward pass."""
    without_contents = FakeTensorMode()
    with FakeCopyMode(without_contents):
        model = copy.deepcopy(model)
    with without_contents:
        images = torch.empty(batch, *shape.input_size, device=shape.device_type)
        for weight in model.parameters():
            if weight.requires_grad:  # `fixed_memory` counts the gradients
                weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        with _PeakMemory(*model.parameters(), *model.buffers(), images) as memory, torch.set_grad_enabled(trained):
            loss = _forward(model, images, shape)
            if trained:
                loss.backward()
    return memory.peak


def _forward(model: nn.Module, images: Tensor, shape: StepShape) -> Any:
    """Return a loss that depends on all outputs."""
    with torch.autocast(shape.device_type, dtype=shape.amp_dtype, enabled=shape.amp_dtype is not None):
        outputs = model(images, dense=True) if shape.dense else model(images)
        return sum(output.float().logsumexp(-1).mean() for output in tree_leaves(outputs))


def seconds_of_images(model: nn.Module, shape: StepShape, device: torch.device, batch: int) -> tuple[int, float]:
    """Train on random images without changing the weights; return the number of images and the seconds that they took.
    A CPU gets fewer than `batch` if they need many operations. The first pass, which chooses kernels, does not count.
    Raises what the model raises, RuntimeError if memory is short, ValueError if it would take a CPU minutes."""
    if device.type == "cpu":
        flops = flops_per_image(model, shape.input_size)
        if 2 * flops > _OPERATIONS_OF_CPU:
            raise ValueError(f"{flops / 2e9:.0f} GMACs an image are many for a CPU")
        batch = min(batch, max(2, int(_OPERATIONS_OF_CPU / 4 / flops)))
    images = torch.rand(batch, *shape.input_size, device=device)
    for _ in range(2):
        began = time.perf_counter()
        _forward(model, images, shape).backward()
        float(next(p.grad for p in model.parameters() if p.grad is not None).sum())  # waits for the device
    return len(images), time.perf_counter() - began


def expected_time(run: Run, training: Training, model: nn.Module, shape: StepShape, batch: int) -> str:
    """Return a line about how long the run takes, judged by a pass of `model`, which is in training mode, on images of
    this `shape`, of which a micro-batch has `batch`."""
    settings = run.settings
    world = run.world
    stream = training.loader.index_stream
    if world.size > 1 and (sharding_flag(settings.distributed) or settings.norms.sync_bn):
        return "how long the run takes is not told: its ranks compute together"
    began = time.monotonic()
    try:
        next(training.loader.epoch(training.state.epoch), None)  # as each epoch does
        wait = time.monotonic() - began
        images, seconds = seconds_of_images(model, shape, world.device, batch)
    except Exception as error:  # of any layer, and short memory
        return f"how long the run takes can't be told: {reason_of(error)}"
    pixels = world.data_size * math.prod(shape.input_size[1:])
    per_unit = seconds / images * (batch * settings.optim.grad_accum_steps if stream.sizes is None else 1 / pixels)
    left = seconds_left(run, training, stream.work(training.schedule.last_epoch), per_unit, wait)
    return f"the run takes about {duration(left)} on this {world.device.type}: {images} images took {seconds:.2f} s"


class _PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors created inside the block, while they exist. Tensors in `known` don't count.
    torch's MemTracker counts the same, but takes five times as long."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._held:
                self._held.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return outputs

    def _free(self, storage: int, size: int) -> None:
        self._held.discard(storage)
        self.now -= size


def fixed_memory(settings: TrainSettings, model: nn.Module, device: torch.device) -> dict[str, int]:
    """Return the bytes that each rank stores from step to step, by purpose."""
    shards = settings.distributed.shard
    parts = settings.distributed.tensor_parallel
    half = settings.precision.mixed.model_dtype == "bfloat16"
    whole = _bytes(model.parameters())
    divided = _bytes(p for _, module in divisible(model) for p in module.parameters()) if parts > 1 else 0
    held = 1 - divided / max(1, whole) * (1 - 1 / parts)  # share of the weights that tensor parallelism leaves a rank
    trained = round(held * _bytes(p for p in model.parameters() if p.requires_grad))
    weights = round(held * _bytes([*model.parameters(), *model.buffers()]))
    # Bytes of optimizer state per byte of weights, measured on a small layer whose creation draws no random numbers.
    layer = nn.utils.skip_init(nn.Linear, 64, 64, bias=False, device=device)
    nn.init.zeros_(layer.weight)
    optimizer = create_optimizer(layer, replace(settings.optim, layer_decay=None), settings.distributed, device=device)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    share = _bytes(value for value in states if isinstance(value, Tensor) and value.ndim) / _bytes([layer.weight])
    memory = {"weights": weights // shards, "optimizer": round(trained * share) // shards}
    # With gradient accumulation, shards don't divide gradients: each rank sums all of them until the last micro-batch.
    memory["gradients"] = trained if settings.optim.grad_accum_steps > 1 else trained // shards
    if settings.ema.model_ema and not settings.ema.model_ema_force_cpu:
        memory["EMA"] = weights // shards
    if shards > 1 or parts > 1:
        # Weights of two blocks, because the next one is gathered while one computes, and the gradients of one.
        units = [_bytes(unit.parameters()) for unit in units_of(model)]
        memory["gathered"] = round(held * (3 * max(units, default=0) // (1 + half))) + 2 * (whole - sum(units))
    elif half:
        memory["bfloat16 copy"] = (weights + trained) // 2
    return memory


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_report(
    settings: TrainSettings,
    master: nn.Module,
    model: nn.Module,
    shape: StepShape,
    device: torch.device,
    graph: bool = False,
) -> list[str]:
    """Return the lines of `--dry-run` about operations and memory. `master` is optimized; `model`, itself or a bfloat16
    copy, computes, and is put into training mode. With a `graph`, a step is rehearsed before it is repeated as one."""
    set_train_mode(model, settings.norms.freeze_bn or settings.network.freeze)
    fixed_parts = fixed_memory(settings, master, device)
    total = sum(fixed_parts.values())
    terms = " + ".join(f"{name} {size / GIB:.2f}" for name, size in fixed_parts.items())
    lines = [f"memory without activations: {terms} = {total / GIB:.2f} GiB a rank"]
    if graph:  # the host holds the state before the update, and the weights that both ways lead to
        held = 2 * _bytes(master.parameters()) + sum(fixed_parts.get(n, 0) for n in ("weights", "optimizer", "EMA"))
        lines.append(f"memory of the host while the CUDA graph of a step is tried: {held / GIB:.2f} GiB a rank")
    try:
        gmacs = flops_per_image(master, shape.input_size) / 2e9
        fixed, per_image = activations_of(model, shape)
    except Exception as error:  # layers raise errors of any type without a tensor's contents
        return [*lines, f"operations and activations can't be predicted: {reason_of(error)}"]
    batch = settings.images.batch_size
    dtype = str(shape.amp_dtype or torch.float32).removeprefix("torch.")
    lines += [
        f"operations: {gmacs:.2f} GMACs an image in a forward pass",
        f"activations ({dtype}, eager, kernels of {shape.device_type}): {per_image / MIB:.1f} MiB an image, "
        f"{(fixed + per_image * batch) / GIB:.2f} GiB for this run's batches of {batch}",
    ]
    cards = {f"a card of {name} GB": gib * GIB for name, gib in _CARDS.items()}
    if device.type == "cuda":
        cards = {"this GPU": float(torch.cuda.get_device_properties(device).total_memory)}
    for name, size in cards.items():
        room = (size - _CONTEXT) * (1 - _MARGIN) - total
        lines.append(f"largest batch on {name}: {max(0, int((room - fixed) // per_image))}")
    return lines


def teachers_report(
    teachers: Mapping[str, FeatureTeacher], student: nn.Module, shape: StepShape, batch: int
) -> list[str]:
    """Return a line of `--dry-run` about each teacher that is computed, by its name; it is not trained. Its share is of
    the operations of a step: of all teachers, and of a forward and a backward pass of the student."""
    sizes = [(shape.input_size[0], *teacher.img_size) for teacher in teachers.values()]
    work = [flops_per_image(teacher.model, size) for teacher, size in zip(teachers.values(), sizes, strict=True)]
    of_student = 0.0
    lines = []
    with suppress(NotImplementedError, RuntimeError, UserError):  # the model depends on values of tensors
        of_student = 3 * flops_per_image(student, shape.input_size)
    for (name, teacher), size, flops in zip(teachers.items(), sizes, work, strict=True):
        model = teacher.model
        teacher_shape = StepShape(size, shape.device_type, teacher.amp_dtype)
        weights = _bytes([*model.parameters(), *model.buffers()]) / GIB
        passed = f"a forward pass of {batch} images {step_peak(model, teacher_shape, batch, False) / GIB:.2f} GiB"
        share = f", {100 * flops / (of_student + sum(work)):.0f} % of a step's operations" if of_student else ""
        label = f"teacher {name}" if len(teachers) > 1 else "teacher"
        lines.append(f"{label}: weights {weights:.2f} GiB, {passed}, {flops / 2e9:.2f} GMACs an image{share}")
    return lines

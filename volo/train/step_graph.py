"""A training step as one CUDA graph, which the GPU repeats without Python: Python would take longer to launch thousands
of kernels than they run. A graph repeats kernels with the addresses and numbers of its capture. Therefore

- images, labels, boxes, ratios, learning rates and a micro-batch's share are copied into tensors of the graph;
- the model's random numbers follow from the seed: captured kernels read seed and offset of torch's generator from the
  device, where each replay writes the generator's current values. After `torch.manual_seed` the offset is 0, and the
  kernels advance it as launched ones do. So both draw the same numbers, if nothing else draws in between;
- accumulation uses two graphs, and gradients stay at their addresses: one graph adds a micro-batch to them, the other
  adds the last one, changes the weights and zeroes the gradients;
- everything else that a step changes is changed in place: weights, moments, averages, running statistics.

Outside a capture, the optimizer's rates are numbers and it isn't capturable: checkpoints equal those without graphs.
"""

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tlt.api import StepKey
from tlt.data.batch import Batch
from tlt.errors import UserError
from tlt.mix import MixRatios
from tlt.models.spatial import Size
from tlt.models.wrap import MixPoint
from volo.cluster.distributed import max_over_ranks
from volo.cluster.shard import forget_backward
from volo.config.rules import sharding_flag
from volo.config.settings_shared import CUDA_GRAPH_MODES
from volo.train.criterion import Drawn
from volo.train.precision import skips_on_device
from volo.train.run import Run, Training
from volo.train.step import Step, StepResult

# Updates launched before the capture. The first one creates the optimizer's state, and libraries choose their kernels.
# DistributedDataParallel measures times in its first ten updates.
WARM_UP = 3
_WARM_UP_OF_RANKS = 11
# Relative tolerances of losses and norms, of the change of the weights, and of the weights.
_LOSS_TOLERANCE = 5e-3
_CHANGE_TOLERANCE = 0.05
_WEIGHT_TOLERANCE = 1e-7
# Share of the GPU's memory; if more is reserved, graphs are freed for validation and smaller batches.
_MUCH_RESERVED = 0.5
_AHEAD = 2  # replays that may be queued: the host is free meanwhile, and each holds a batch


def use_own_stream(device: torch.device) -> None:
    """Let this thread use a stream of its own. torch can't capture on the default stream, and gradients are accumulated
    on the stream on which DistributedDataParallel was made."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def step_of(run: Run, training: Training) -> Step:
    """Return the step of a run. If a GPU launches it, log why. Raises UserError as `why_launched`."""
    if not (reason := why_launched(run, training)):
        return StepGraph(run, training)
    if run.world.device.type == "cuda":
        run.logger.line(f"steps are launched, not repeated as a CUDA graph: {reason}")
    return Step(run, training)


def why_launched(run: Run, training: Training) -> str:
    """Return the reason why steps are not repeated as a graph; "" if they are. Raise UserError if they can't be,
    although `--cuda-graph` asks for it."""
    reason = _hindrance(run, training) if run.world.device.type == "cuda" else "this is no GPU"
    if reason and run.settings.precision.compilation.cuda_graph:
        raise UserError(f"--cuda-graph: steps can't be repeated as a CUDA graph ({reason}); leave it out")
    unseen = "nobody has seen a graph on several GPUs yet, --cuda-graph asks for it"
    return unseen if run.world.size > 1 and not (reason or run.settings.precision.compilation.cuda_graph) else reason


def _hindrance(run: Run, training: Training) -> str:
    """Return why the steps of a GPU can't be repeated as a graph: they involve the host, say; "" if they can."""
    settings = run.settings
    model = training.forward_model
    several = run.world.size > 1
    accumulates = settings.optim.grad_accum_steps > 1
    divided = sharding_flag(settings.distributed)
    mode = settings.precision.compilation.torchcompile_mode
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    plain = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters  # not compiled as a whole
    reasons = {
        "--no-cuda-graph": settings.precision.compilation.no_cuda_graph,
        divided: bool(divided),
        f"--torchcompile-mode {mode} makes graphs": mode in CUDA_GRAPH_MODES,
        "--token-label-teacher": bool(settings.labels.token_label_teacher),
        "--kd-model-name": training.distillation is not None and training.distillation.computes,
        "the loss scale of float16": training.precision.scaler is not None,
        f"--opt {settings.optim.opt} asks the host": not skips_on_device(training.state.optimizer),
        "--grad-checkpointing draws numbers again": settings.precision.grad_checkpointing
        and getattr(training.state.model, "blocks_draw", True),
        "the model has hooks": any(not isinstance(hook, MixPoint) for hook in hooks),
        "--grad-accum-steps on several GPUs": several and accumulates,
        "--grad-accum-steps with --train-img-sizes": accumulates and bool(settings.sizes.train_img_sizes),
        "--grad-compression": several and settings.distributed.grad_compression != "none",
        "several GPUs, and weights without a gradient or a model that is compiled as a whole": several and not plain,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Phase(Enum):
    """How the batches of an image size are trained on."""

    LAUNCH = "launched, for some updates more"
    CAPTURE = "launched; the next update of full batches begins with a capture"
    REPLAY = "repeated as graphs"
    NEVER = "launched, for there will be no graph"


@dataclass
class _SizeState:
    """The steps' state for one image size."""

    batch_size: int  # batches of another number of images are launched
    phase: Phase
    left: int  # updates to launch before the capture
    pause: int = 1  # updates to launch after a rehearsal that has shown nothing
    inputs: tuple[Batch, Drawn] | None = None  # tensors from which the graphs read a batch and its random numbers
    # Keys: whether the micro-batch is the last one of its update.
    graphs: dict[bool, tuple[torch.cuda.CUDAGraph, StepResult]] = field(default_factory=dict)

    def launch(self, updates: int) -> None:
        """Launch so many updates, and then capture."""
        self.phase = Phase.LAUNCH if updates else Phase.CAPTURE
        self.left = updates


class StepGraph(Step):
    """A step that is launched at first and later repeated as a graph, one per image size; batches of another shape are
    always launched. Graphs read from `numbers` a micro-batch's share of its update, then each group's learning rate."""

    def __init__(self, run: Run, training: Training) -> None:
        super().__init__(run, training)
        self._logger = run.logger
        self._watchdog = run.guard.watchdog
        self._groups = self.state.optimizer.param_groups
        # A graph for each kind of micro-batch, by whether it is the last one of its update.
        self._kinds = (False, True) if run.settings.optim.grad_accum_steps > 1 else (True,)
        self._warm_up = _WARM_UP_OF_RANKS if self.several_ranks else WARM_UP
        self._first_phase = Phase.LAUNCH  # of a new image size
        sizes = training.loader.index_stream.sizes if run.settings.sizes.train_img_sizes else None
        self._batch_sizes = {} if sizes is None else dict(zip(sizes.sizes, sizes.batch_sizes, strict=True))
        self._batch_size = run.settings.images.batch_size
        self._sizes: dict[Size, _SizeState] = {}
        self._now = _SizeState(0, Phase.LAUNCH, 0)  # state for the image size of the current batch
        self._pool: Any = None  # one memory pool for all sizes: results are copied before another graph begins
        self._replayed: deque[torch.cuda.Event] = deque()  # ends of the newest replays
        self.numbers = torch.zeros(1 + len(self._groups), device=run.world.device)
        if isinstance(self.forward_model, DistributedDataParallel):  # once in 100 steps it would wait for the GPU
            self.forward_model._set_ddp_runtime_logging_sample_rate(1 << 30)

    def __call__(self, batch: Batch, key: StepKey) -> StepResult:
        for group in self._groups:  # graphs have float32 rates, so launched steps (after a resume) must have them, too
            group["lr"] = float(np.float32(group["lr"]))
        size = batch.images.shape[-2], batch.images.shape[-1]
        new = _SizeState(self._batch_sizes.get(size, self._batch_size), self._first_phase, self._warm_up)
        now = self._now = self._sizes.setdefault(size, new)
        full = batch.size == now.batch_size
        if not full or now.inputs is None:  # work outside the graphs' pool
            self.release_memory()
        if self.watched:
            return super().__call__(batch, key)
        if now.phase is Phase.CAPTURE and full and key.micro_batch == 0:
            self._capture_or_give_up(batch, key)
        if now.phase is Phase.REPLAY and now.inputs is not None and _shapes(batch) == _shapes(now.inputs[0]):
            return self._replay(batch, key)
        if now.phase is Phase.LAUNCH and full and batch.key.last:
            now.launch(now.left - 1)
        return super().__call__(batch, key)

    def _replay(self, batch: Batch, key: StepKey) -> StepResult:
        self.send(batch, self.criterion.draw(batch, key))
        key.seed_torch()
        result = self.done(self._repeat(batch.key.last))
        self._wait_for_device()
        return result

    def _wait_for_device(self) -> None:
        """Wait until at most `_AHEAD` replays are left to do. This wait is deliberate: a launched step fills the queue
        of the GPU, but hundreds of replays fit in, and their batches would take all memory; and the host would wait in
        the loader while the GPU has work, which would count as a wait for data."""
        done = torch.cuda.Event(blocking=True)  # the processor is free for data workers
        done.record()
        self._replayed.append(done)
        if len(self._replayed) > _AHEAD:
            self._replayed.popleft().synchronize()

    def release_memory(self) -> None:
        """Free the graphs' memory until the next capture if a rank is short of memory. All ranks must call this."""
        short = torch.cuda.memory_reserved() > _MUCH_RESERVED * torch.cuda.mem_get_info()[1]
        if any(state.graphs for state in self._sizes.values()) and max_over_ranks(short):
            self._clear()

    def _clear(self) -> None:
        """Free all graphs at once: when one of them dies, torch frees the workspace that cuBLAS has for their stream,
        and the others would go on using it."""
        torch.cuda.synchronize()  # the last replay may still be running
        for state in self._sizes.values():
            state.graphs.clear()
            if state.phase in (Phase.CAPTURE, Phase.REPLAY):
                state.launch(1)  # what has to be compiled anew can't be within a capture
        self._pool = None

    @property
    def inputs(self) -> tuple[Batch, Drawn] | None:
        """The tensors from which the graphs of the current size read a batch and its random numbers."""
        return self._now.inputs

    def send(self, batch: Batch, drawn: Drawn) -> None:
        """Copy what changes from step to step into the graphs' tensors. This waits for nothing."""
        if self._now.inputs is None:
            mix = self.criterion.mix
            self._now.inputs = batch.clone(), _clone(drawn, batch if mix is not None and mix.cuts else None)
        targets, sources = ([*one.tensors(), *_tensors(draws)] for one, draws in (self._now.inputs, (batch, drawn)))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        numbers = torch.tensor([batch.size / batch.key.update_samples, *(group["lr"] for group in self._groups)])
        self.numbers.copy_(numbers.pin_memory(), non_blocking=True)

    def _repeat(self, last: bool) -> StepResult:
        graph, (terms, norm, broken) = self._now.graphs[last]
        graph.replay()
        terms = terms.map(Tensor.clone)  # the next replay overwrites the graph's tensors
        return StepResult(terms) if norm is None or broken is None else StepResult(terms, norm.clone(), broken.clone())

    def _capture_or_give_up(self, batch: Batch, key: StepKey) -> None:
        """Capture the graphs. If that fails, or they compute something else, launch all steps from now on."""
        self._watchdog.enter_phase("capture")
        failure = self._capture_and_compare(batch, key) if self.inputs is None else _agreed(self._capture())
        if not failure:
            return
        self._clear()
        self.precision.keeps_gradients = False
        self._first_phase = Phase.NEVER
        for state in self._sizes.values():
            state.phase = Phase.NEVER
            state.inputs = None
        for module in (self.forward_model, self.state.model):
            forget_backward(module)
        gc.collect()  # the loop has switched the collector off, and launched steps need the capture's memory
        self._logger.line(f"warning: steps are launched, no CUDA graph of them: {failure}")

    def _capture_and_compare(self, batch: Batch, key: StepKey) -> str:
        """Do one update with this batch twice from the same state, launched and as a graph, and then restore the state.
        Return how the results differ beyond rounding, or why there is no graph; "" if all is well, or if this update
        shows nothing: then a later one is tried. All ranks return alike. The host waits for this once per image size,
        and holds a copy of the weights and all other state."""
        drawn = self.criterion.draw(batch, key)
        share = batch.size / batch.key.update_samples
        self.precision.keeps_gradients = len(self._kinds) > 1
        failure = ""
        before = list[Tensor]()
        try:
            self.send(batch, drawn)
            before += [value.cpu() for value in self._changed()]
        except Exception as error:  # too little memory
            failure = _told(error)
        if failure := _agreed(failure):
            return failure
        launched, weights = self._outcome(lambda last: self.compute(batch, drawn, share, last), key)
        self._go_back(before)
        change, size = (_distance(weights, others) for others in (before, repeat(0.0)))
        rounding = _WEIGHT_TOLERANCE * size
        if max_over_ranks(not (launched.isfinite().all() and _CHANGE_TOLERANCE * change > rounding)):
            now = self._now
            now.inputs = None
            now.launch(now.pause)
            now.pause *= 2
            self._logger.line("no CUDA graph yet: this update is not finite, or changes too little to be compared")
            return ""
        if failure := _agreed(self._capture()):
            return failure
        repeated, weights_again = self._outcome(self._repeat, key)
        self._go_back(before)
        off = _distance(weights, weights_again)
        same = torch.isclose(repeated, launched, rtol=_LOSS_TOLERANCE, atol=0).all()
        distance = f"weights that change by {change:.3g} are {off:.3g} apart"
        if not (same and off <= _CHANGE_TOLERANCE * change + rounding):
            numbers = f"losses and norms {repeated.tolist()} for {launched.tolist()}"
            failure = f"it computes something else than the launched step: {numbers}, {distance}"
        if not (failure := _agreed(failure)):
            told = f"it computes what the launched step does ({distance})"
            self._logger.line(f"a step is one CUDA graph from here on: {told}")
        return failure

    def _capture(self) -> str:
        """Capture a graph for each kind of micro-batch. Return why that failed, or ""."""
        assert self.inputs is not None
        device = self.numbers.get_device()
        stream = torch.cuda.current_stream()
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.manual_seed(0)  # no step has this seed, so a graph that captured it as a constant would be noticed
        generator = torch.cuda.default_generators[device]
        draws = generator.clone_state()
        try:
            with self.rates_on_device():
                for last in self._kinds:
                    graph = torch.cuda.CUDAGraph()
                    # Other threads, such as NCCL's and the saver's, may continue meanwhile.
                    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                        result = self.compute(*self.inputs, self.numbers[0], last)
                    self._now.graphs[last] = graph, result
            self._now.phase = Phase.REPLAY
            return ""
        except Exception as error:  # errors of operations and libraries, or too little memory
            # torch leaves the generator and the allocator in the state of the failed capture, and keeps its memory.
            generator.graphsafe_set_state(draws)
            with suppress(RuntimeError):  # the capture has ended this already
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            return _told(error)

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Let the optimizer read its learning rates on the device, as a graph does."""
        before = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self.numbers[1:], strict=True):
            group.update(lr=rate, capturable=True)
        try:
            yield
        finally:
            for group, rate in zip(self._groups, before, strict=True):
                group.update(lr=rate, capturable=False)

    def _changed(self) -> list[Tensor]:
        """Return all tensors that an update changes, the weights first."""
        model, ema = self.state.model, self.state.ema
        moments = [value for state in self.state.optimizer.state.values() for value in state.values()]
        average = [] if ema is None or not self.averages else ema.module.state_dict().values()
        weights = [weight.detach() for weight in model.parameters()]
        values = (*weights, *model.buffers(), *average, *moments, self.replicas.log, self.replicas.noted)
        return [value for value in values if isinstance(value, Tensor)]

    def _go_back(self, before: list[Tensor]) -> None:
        with torch.no_grad():
            for value, old in zip(self._changed(), before, strict=True):
                value.copy_(old)
        self.precision.begin(self.forward_model)

    def _outcome(self, run: Callable[[bool], StepResult], key: StepKey) -> tuple[Tensor, list[Tensor]]:
        """Do an update with one micro-batch of each kind. Return its losses and norm, and the weights, on the CPU."""
        numbers = []
        for last in self._kinds:
            key.seed_torch()
            result = run(last)
            numbers += [result.terms.total] if result.norm is None else [result.terms.total, result.norm]
        return torch.stack(numbers).cpu(), [weight.detach().cpu() for weight in self.state.model.parameters()]


def _agreed(failure: str) -> str:
    """Return why this rank has failed, or that another one has; "" if none. All ranks must call this, so that none goes
    on to wait for one that has failed."""
    on_any = max_over_ranks(bool(failure))
    return failure or ("it failed on another rank" if on_any else "")


def _told(error: Exception) -> str:
    """Return an error as text. It is not kept: its traceback has the frames, and they the tensors, of what failed."""
    cause = error.__context__ or error  # the error that ends a failed capture says less
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _distance(tensors: Iterable[Tensor], others: Iterable[Any]) -> float:
    pairs = zip(tensors, others, strict=False)
    return math.sqrt(sum(float((one.double() - other).square().sum()) for one, other in pairs))


def _shapes(batch: Batch) -> list[Any]:
    return [(tensor.shape, tensor.dtype) for tensor in batch.tensors()]


def _tensors(drawn: Drawn) -> list[Tensor]:
    ratios = [] if drawn.ratios is None else [drawn.ratios.label, drawn.ratios.image]
    return ratios if drawn.box is None else [*ratios, drawn.box]


def _clone(drawn: Drawn, cut: Batch | None) -> Drawn:
    """Return memory for random numbers; if images of `cut` may be cut, for a share of each pixel."""
    ratios, box = drawn
    if ratios is not None:
        image = ratios.image if cut is None else ratios.image.expand(-1, -1, *cut.images.shape[2:])
        ratios = MixRatios(ratios.label.clone(), image.clone(memory_format=torch.contiguous_format))
    return Drawn(ratios, None if box is None else box.clone())

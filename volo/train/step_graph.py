"""A training step as one CUDA graph: the GPU repeats it without Python, which takes longer to start its thousands of
kernels than they take. What a graph repeats are kernels with the addresses and the numbers of its capture. So

- images, labels, boxes and ratios, the learning rates and a micro-batch's share are copied to tensors of the graph;
- what the model draws follows from the seed: a captured kernel reads seed and offset of torch's generator from the
  device, and each replay writes there what the generator has by then. After `torch.manual_seed` the offset is 0, and
  the kernels count on from it as launched ones do, so that they draw the same, as long as nothing draws in between;
- gradients of an update of several micro-batches stay where they are: of the two graphs of its steps, one adds a
  micro-batch to them, and one adds the last, changes the weights and zeroes them;
- everything else that a step changes, it changes in its place: weights, moments, averages, running statistics.

The optimizer keeps its rates as numbers and is capturable in a capture alone: checkpoints are those of launched steps.
All of it runs on one stream (`own_stream`), so that nothing has to wait for a replay, and gradients are accumulated on
the stream that is captured, which DistributedDataParallel decides when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tlt.api import StepKey
from tlt.data.batch import Batch
from tlt.loss import LossTerms
from tlt.mix import MixRatios, Mixup
from tlt.models.wrap import MixPoint
from volo.cluster.distributed import max_over_ranks
from volo.config.flag_rules import divides_weights
from volo.config.flags_train import CUDA_GRAPH_MODES
from volo.train.criterion import Drawn
from volo.train.optim import set_lr
from volo.train.precision import skips_on_device
from volo.train.run import Run, Training
from volo.train.step import Found, Step

# Updates that are launched before: the first makes the optimizer's state, and libraries choose their kernels.
# DistributedDataParallel looks at the times of its first ten.
WARM_UP, _WARM_UP_OF_RANKS = 3, 11
# Of what is compared: losses, norms, and what an update changes, each relative; and the rounding of weights.
_LOSS, _NORM, _CHANGE, _ROUNDING = 1e-3, 1e-2, 0.05, 1e-7
_MUCH = 0.5  # of the GPU's memory, from which on validation and smaller batches get that of the graphs


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a stream of its own: torch captures nothing on the default stream."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def step_of(run: Run, training: Training) -> Step:
    """Return the step of a run, and tell why it is not a graph where it could be one."""
    on_gpu = run.world.device.type == "cuda"
    reason = why_launched(run, training) if on_gpu else ""
    if reason:
        run.logger.line(f"steps are launched, not repeated as a CUDA graph: {reason}")
    return StepGraph(run, training) if on_gpu and not reason else Step(run, training)


def why_launched(run: Run, training: Training) -> str:
    """Return what in a run asks the host in the middle of a step, or can't be repeated; "" if nothing does."""
    args, model, several = run.args, training.model, run.world.size > 1
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    reasons = {
        "--no-cuda-graph": args.no_cuda_graph,
        divides_weights(args): bool(divides_weights(args)),
        f"--torchcompile-mode {args.torchcompile_mode} has graphs of its own": args.torchcompile_mode
        in CUDA_GRAPH_MODES,
        "the teacher": bool(args.token_label_teacher or args.kd_model_name),
        "the loss scale of float16": training.precision.scaler is not None,
        f"--opt {args.opt} asks the host": not skips_on_device(training.state.optimizer),
        "--grad-checkpointing draws numbers again": args.grad_checkpointing
        and getattr(training.state.model, "blocks_draw", True),
        "the model has hooks": any(not isinstance(hook, MixPoint) for hook in hooks),
        "--grad-accum-steps on several GPUs": several and args.grad_accum_steps > 1,
        "--grad-compression": several and args.grad_compression != "none",
        "weights without a gradient, or a model compiled as a whole, on several GPUs": several
        and (not isinstance(model, DistributedDataParallel) or model.find_unused_parameters),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class StepGraph(Step):
    """A step that is launched at first, then repeated; batches of another shape are launched."""

    def __init__(self, run: Run, training: Training) -> None:
        super().__init__(run, training)
        self._logger, self._watchdog = run.logger, run.guard.watchdog
        self._groups, self._size = self.state.optimizer.param_groups, run.args.batch_size
        self._kinds = (False, True) if run.args.grad_accum_steps > 1 else (True,)  # of micro-batches: last or not
        self._left = _WARM_UP_OF_RANKS if self.several_ranks else WARM_UP  # updates to launch; -1: all
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Found]] = {}
        self.inputs: tuple[Batch, Drawn] | None = None
        self.numbers = torch.zeros(1 + len(self._groups), device=run.world.device)  # share, rates

    def __call__(self, batch: Batch, key: StepKey) -> Found:
        if key.micro_batch == 0 and self._left == 0 and not self._graphs and batch.size == self._size:
            self._begin(batch, key)
        if batch.size != self._size:
            self.pause()
        if not self._graphs or not self._fits(batch):
            self._left -= int(self._left > 0 and batch.key.last)
            return super().__call__(batch, key)
        self.send(batch, self.criterion.draw(batch, key))
        key.seed_torch()
        return self.done(self._repeat(batch.key.last))

    def pause(self) -> None:
        """Give the memory of the graphs back where a rank may need it, until the next capture. All ranks call this."""
        short = torch.cuda.memory_reserved() > _MUCH * torch.cuda.mem_get_info()[1]
        if self._graphs and max_over_ranks(short):
            torch.cuda.synchronize()  # the last of them may still run
            self._graphs.clear()

    def _fits(self, batch: Batch) -> bool:
        assert self.inputs is not None
        shapes = ([(t.shape, t.dtype) for t in each.tensors()] for each in (batch, self.inputs[0]))
        return next(shapes) == next(shapes)

    def send(self, batch: Batch, drawn: Drawn) -> None:
        """Copy what changes from step to step to where the graphs read it. Waits for nothing."""
        if self.inputs is None:
            self.inputs = batch.clone(), _clone(drawn, batch, self.criterion.mix)
        own, new = ([*one.tensors(), *_tensors(other)] for one, other in (self.inputs, (batch, drawn)))
        for mine, given in zip(own, new, strict=True):
            mine.copy_(given)
        numbers = torch.tensor([batch.size / batch.key.update_samples, *(group["lr"] for group in self._groups)])
        self.numbers.copy_(numbers.pin_memory(), non_blocking=True)

    def _repeat(self, last: bool) -> Found:
        graph, (terms, norm, broken) = self._graphs[last]
        graph.replay()
        own = LossTerms(*(term.clone() for term in terms))  # the next replay overwrites them
        return Found(own) if norm is None or broken is None else Found(own, norm.clone(), broken.clone())

    def _begin(self, batch: Batch, key: StepKey) -> None:
        """Capture the graphs. What can't be captured, or computes something else, is launched from now on."""
        self._watchdog.at("capture")
        failure = self._captured() if self.inputs is not None else self._tried(batch, key)
        if not max_over_ranks(bool(failure)):
            return
        self._graphs.clear()
        self._left, self.precision.keeps_gradients = -1, False
        for module in (self.model, self.state.model):
            module.zero_grad(set_to_none=True)
        self._logger.line(f"warning: steps are launched, no CUDA graph of them: {failure or 'on another rank'}")

    def _tried(self, batch: Batch, key: StepKey) -> str:
        """Do an update of this batch launched and repeated, from the same weights and numbers; return what differs by
        more than rounding, or why there is no graph. Nothing else stays of it.

        The host waits, once a run, and holds a copy of the weights and of what belongs to them.
        """
        drawn, share = self.criterion.draw(batch, key), batch.size / batch.key.update_samples
        self.send(batch, drawn)
        self.precision.keeps_gradients = len(self._kinds) > 1
        before = {name: [value.cpu() for value in values] for name, values in self._values().items()}
        expected = self._outcome(lambda last: self.compute(batch, drawn, share, last), key)
        self._go_back(before)
        failure = self._captured()
        if max_over_ranks(bool(failure)):
            return failure or "on another rank"
        difference = _difference(before, expected, self._outcome(self._repeat, key))
        self._go_back(before)
        if not difference:
            self._logger.line("a step is one CUDA graph from here on: it computes what the launched step does")
        return difference

    def _captured(self) -> str:
        """Capture a micro-batch of each kind, with other numbers than any step has: a graph that keeps one differs.
        Return why that has failed, "" if it has not."""
        assert self.inputs is not None
        device, rates = self.numbers.get_device(), [group["lr"] for group in self._groups]
        generator, pool = torch.cuda.default_generators[device], torch.cuda.graph_pool_handle()
        draws, stream = generator.clone_state(), torch.cuda.current_stream()
        torch.manual_seed(0)
        set_lr(self.state.optimizer, 0.0)
        try:
            with self.rates_on_device():
                for last in self._kinds:
                    graph = torch.cuda.CUDAGraph()
                    # Other threads, those of NCCL and of savers, may go on.
                    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                        found = self.compute(*self.inputs, self.numbers[0], last)
                    self._graphs[last] = graph, found
            return ""
        except Exception as error:  # of operations, libraries, and the memory
            # torch leaves the generator, and its allocator, as in the capture that has failed.
            generator.graphsafe_set_state(draws)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device, pool)
            cause = error.__context__ or error  # what ends a failed capture says less
            return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        finally:
            for group, rate in zip(self._groups, rates, strict=True):
                group["lr"] = rate

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

    def _values(self) -> dict[str, list[Tensor]]:
        """Return all that an update changes, by what it is."""
        model, optimizer, ema = self.state.model, self.state.optimizer, self.state.ema
        moments = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        average = [] if ema is None or not self.averages else [*ema.module.state_dict().values()]
        weights, buffers = [p.detach() for p in model.parameters()], [*model.buffers()]
        statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        rest = [*moments, *(buffer for buffer in buffers if not buffer.is_floating_point())]
        return {"weights": weights, "running statistics": statistics, "average": average, "rest": rest}

    def _go_back(self, before: dict[str, list[Tensor]]) -> None:
        with torch.no_grad():
            for name, values in self._values().items():
                for value, old in zip(values, before[name], strict=True):
                    value.copy_(old)
        self.precision.begin(self.model)

    def _outcome(self, run: Callable[[bool], Found], key: StepKey) -> dict[str, list[Tensor]]:
        """Do an update, of a micro-batch of each kind, and return what came of it, on the CPU."""
        found = []
        for last in self._kinds:
            key.seed_torch()
            found.append(run(last))
        norms = [each.norm for each in found if each.norm is not None]
        told = {"loss": [each.terms.total for each in found], "norm": norms, **self._values()}
        del told["rest"]
        return {name: [value.cpu() for value in values] for name, values in told.items()}


def _difference(
    before: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], found: dict[str, list[Tensor]]
) -> str:
    """Return what of two updates differs by more than rounding, "" if nothing does."""
    for name, tolerance in (("loss", _LOSS), ("norm", _NORM)):
        for one, other in zip(expected.pop(name), found.pop(name), strict=True):
            if not torch.isclose(other, one, rtol=tolerance, atol=0, equal_nan=True):
                return f"its {name} is {float(other):.6g}, that of the same step launched {float(one):.6g}"
    for name, values in expected.items():
        change = off = size = 0.0
        for old, one, other in zip(before[name], values, found[name], strict=True):
            change += float((one.double() - old).square().sum())
            off += float((other.double() - one).square().sum())
            size += float(old.double().square().sum())
        if not off**0.5 <= _CHANGE * change**0.5 + _ROUNDING * size**0.5:
            return f"its {name} are others than those of the same step launched"
    return ""


def _tensors(drawn: Drawn) -> list[Tensor]:
    ratios = [] if drawn.ratios is None else [drawn.ratios.label, drawn.ratios.image]
    return ratios if drawn.box is None else [*ratios, drawn.box]


def _clone(drawn: Drawn, batch: Batch, mix: Mixup | None) -> Drawn:
    """Return memory for what is drawn; with CutMix, for a share of each pixel in every step."""
    ratios, box = drawn
    if ratios is not None:
        cuts = mix is not None and mix.cuts
        image = ratios.image.expand(-1, -1, *batch.images.shape[2:]) if cuts else ratios.image
        ratios = MixRatios(ratios.label.clone(), image.clone(memory_format=torch.contiguous_format))
    return Drawn(ratios, None if box is None else box.clone())

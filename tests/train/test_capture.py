"""When a step becomes a CUDA graph, what is left where it can't, and how far the host runs ahead."""

import gc
import os
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.stand_in.streams import Stream
from tests.train.small_step import LABELLED, small_run, train, weights
from tlt.errors import UserError
from volo.checkpoint import checkpoint
from volo.checkpoint.saver import SavePolicy, Saver
from volo.cluster.distributed import World
from volo.cluster.shard import distribute
from volo.memory import prediction
from volo.train import step_graph
from volo.train.loop import garbage_collected_by_the_loop
from volo.train.precision import Precision
from volo.train.step import Step
from volo.train.step_graph import StepGraph, step_of, why_launched

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
TRIED, BEGUN = "no CUDA graph yet", "a step is one CUDA graph from here on"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each micro-batch was trained on, after `WARM_UP` updates of 1: "launched" or "repeated"."""
    kinds, launch, repeat = list[str](), Step.__call__, StepGraph._repeat
    monkeypatch.setattr(step_graph, "WARM_UP", 1)
    monkeypatch.setattr(Step, "__call__", lambda *args: (launch(*args), kinds.append("launched"))[0])
    monkeypatch.setattr(StepGraph, "_repeat", lambda *args: (repeat(*args), kinds.append("repeated"))[0])
    return kinds


def rehearsals(step: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the launched or repeated micro-batches before which a rehearsal has begun."""
    begun, compare = list[int](), StepGraph._capture_and_compare
    counted = lambda self, *args: (begun.append(len(step)), compare(self, *args))[1]  # noqa: E731
    monkeypatch.setattr(StepGraph, "_capture_and_compare", counted)
    return begun


def too_little_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, weakref.ref[Any]]:
    """Plant an error in a capture or before it; what is referred to holds the memory of the attempt."""
    held, backward, graph, send = dict[str, Any](), Precision.backward, torch.cuda.CUDAGraph, StepGraph.send

    class Graph(graph):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            held["graph"] = weakref.ref(self)

    def failing_backward(precision: Precision, loss: Tensor, reduced: bool = False) -> None:
        if torch.cuda.is_current_stream_capturing():
            held["loss"] = weakref.ref(loss)
            error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            raise error  # and so in a cycle with this frame
        backward(precision, loss, reduced)

    def failing_send(step: StepGraph, *args: Any) -> None:
        send(step, *args)
        held["inputs"] = weakref.ref(step.inputs[0].images)  # type: ignore[index]
        raise MemoryError("can't allocate memory")

    if where == "capture":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(Precision, "backward", failing_backward)
    else:
        monkeypatch.setattr(StepGraph, "send", failing_send)
    return held


@pytest.mark.parametrize(("where", "told"), [("capture", "out of memory"), ("send", "MemoryError: can't allocate")])
def test_attempt_without_memory_leaves_none(where, told, done, monkeypatch):
    """The step that is launched instead needs all of it, while the garbage collector is off."""
    held, alive, launch = too_little_memory(where, monkeypatch), list[str](), Step.__call__

    def launched(*args: Any) -> Any:
        alive.extend(name for name, one in held.items() if one() is not None)
        return launch(*args)

    monkeypatch.setattr(Step, "__call__", launched)
    run, training = small_run(LABELLED, 12)
    step = step_of(run, training)
    with garbage_collected_by_the_loop():
        train(run, training, step)
    assert held and not alive and done == ["launched"] * 3
    assert "warning: steps are launched" in run.logger.lines[-1] and told in run.logger.lines[-1]


@pytest.mark.parametrize(("flags", "images"), [("", 28), ("--grad-accum-steps 2", 32)])
def test_host_is_two_replays_ahead_at_most(flags, images, done, stand_in, monkeypatch):
    repeat, ends, queued = StepGraph._repeat, list[int](), list[int]()

    def counted(step: StepGraph, last: bool) -> Any:
        queued.append(sum(end > Stream.finished.get(stand_in.main, 0) for end in ends))
        result = repeat(step, last)
        ends.append(stand_in.main.time)
        return result

    run, training = small_run(f"{LABELLED} {flags}", images)
    step = step_of(run, training)
    monkeypatch.setattr(StepGraph, "_repeat", counted)
    train(run, training, step)
    assert max(queued) == queued[-1] == 2 and done.count("repeated") >= 6
    # Waiting for an event that came after the replay is all that it takes.
    waits = {wait.stack[-1] for wait in stand_in.waits if "__call__" in str(wait) and "capture" not in str(wait)}
    assert waits == {"train/step_graph.py:_wait_for_device"}


def test_a_rehearsal_that_shows_nothing_is_repeated(done, monkeypatch):
    """At the update that is not finite the graph and the launched step do the same: nothing."""
    monkeypatch.setattr(step_graph, "WARM_UP", 3)
    run, training = small_run(LABELLED, 24)
    begun = rehearsals(done, monkeypatch)
    train(run, training, step_of(run, training))
    assert [line.partition(":")[0] for line in run.logger.lines[-2:]] == [TRIED, BEGUN]
    assert begun == [3, 4]


def test_without_a_learning_rate_nothing_is_shown(done, monkeypatch):
    """As in an epoch of warm-up from 0, through which the rehearsals become rare: a graph of another rate is not taken
    for right."""
    run, training = small_run(f"{LABELLED} --warmup-epochs 1 --warmup-lr 0 --no-sched-on-updates", 20)
    repeat, begun = StepGraph._repeat, rehearsals(done, monkeypatch)
    monkeypatch.setattr(StepGraph, "_repeat", lambda step, last: (step.numbers[1:].zero_(), repeat(step, last))[1])
    step = step_of(run, training)
    train(run, training, step)
    assert begun == [1, 2, 4] and done == ["launched"] * 5 and run.logger.lines[-1].startswith(TRIED)
    train(run, training, step)
    assert begun[3:] == [8] and "it computes something else" in run.logger.lines[-1]


def test_after_graphs_were_freed_one_update_is_launched(done, monkeypatch):
    """What is compiled anew after a validation must not be compiled within a capture."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: torch.cuda.mem_get_info()[1])
    run, training = small_run(LABELLED, 11)
    step = step_of(run, training)
    train(run, training, step)  # its last batch is a smaller one
    assert done == ["launched", "repeated", "repeated", "launched"]  # the first repeated one is of the rehearsal
    train(run, training, step)
    assert done[4:] == ["launched", "repeated", "launched"]


def _not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "WARM_UP", 3)


def _different(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = StepGraph._repeat
    monkeypatch.setattr(StepGraph, "_repeat", lambda step, last: (step.numbers[1:].fill_(0.1), repeat(step, last))[1])


@pytest.mark.parametrize(
    "plant", [*(partial(too_little_memory, where) for where in ("send", "capture")), _different, _not_finite]
)
def test_ranks_ask_equally_often(plant, done, monkeypatch):
    """Else one would wait for the others until a time limit ends the run."""
    asked: list[list[bool]] = []

    def largest(value: int) -> int:
        """What all ranks learn: that which fails is this one at first, and then another one."""
        asked[-1].append(bool(value))
        return value or (len(asked) == 2 and asked[0][len(asked[1]) - 1])

    monkeypatch.setattr(step_graph, "max_over_ranks", largest)
    endings = []
    for fails in (True, False):
        with monkeypatch.context() as patch:
            if fails or plant is _not_finite:
                plant(patch)
            asked.append([])
            run, training = small_run(LABELLED, 12 if plant is not _not_finite else 16)
            train(run, training, step_of(run, training))
            endings.append(run.logger.lines[-1])
    assert len(asked[0]) == len(asked[1]) and any(asked[0]) and (plant is _not_finite or not any(asked[1]))
    if plant is not _not_finite:
        assert "warning: steps are launched" in endings[0] and "on another rank" in endings[1]


def test_several_gpus_launch_their_steps_unless_asked(monkeypatch):
    answers = {}
    for flags in ("", "--cuda-graph", "--no-cuda-graph", "--opt lamb"):
        run, training = small_run(flags, 16)
        several = replace(run, world=World(0, 0, 2, CUDA))
        training.forward_model.find_unused_parameters = False
        with monkeypatch.context() as patch:
            patch.setattr(step_graph, "DistributedDataParallel", type(training.forward_model))
            answers[flags] = [why_launched(run, training), why_launched(several, training)]
    assert answers[""] == ["", "nobody has seen a graph on several GPUs yet, --cuda-graph asks for it"]
    assert answers["--cuda-graph"] == ["", ""] and answers["--no-cuda-graph"] == ["--no-cuda-graph"] * 2
    assert answers["--opt lamb"] == ["--opt lamb asks the host"] * 2  # what --cuda-graph would not change


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cuda-graph --opt lamb", "--cuda-graph: steps can't be repeated as a CUDA graph .--opt lamb asks the host"),
        ("--cuda-graph --no-cuda-graph", "--cuda-graph and --no-cuda-graph set the same"),
    ],
)
def test_a_graph_that_is_asked_for_and_can_not_be_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        step_of(*small_run(flags, 16))


def test_a_save_in_place_waits_for_the_gpu(tmp_path, stand_in, monkeypatch):
    """The thread that writes reads the weights on another stream than that of the last step."""
    monkeypatch.setattr(checkpoint, "first_non_finite", lambda weights: None)  # else this would wait
    run, training = small_run("", 8)
    saver = Saver(training.state, checkpoint.CheckpointDir(tmp_path), Mock(), SavePolicy())
    train(run, training, step_of(run, training))
    with torch.no_grad():
        for weight in training.state.model.parameters():
            weight.add_(1)
    saver.save_now("SIGTERM")
    assert (tmp_path / "last.pth.tar").is_file() and not stand_in.races


def test_the_memory_of_the_host_for_a_rehearsal_is_predicted(monkeypatch):
    run, training = small_run(f"{LABELLED} --model-ema", 8)
    step, model = step_of(run, training), training.state.model
    train(run, training, step)  # the optimizer has its state
    assert isinstance(step, StepGraph)
    held = sum(value.nbytes for value in (*step._changed(), *model.parameters(), *model.parameters()))
    monkeypatch.setattr(prediction, "GIB", 1.0)
    shape = prediction.StepShape((3, 64, 64), "cpu", dense=True)
    lines = prediction.memory_report(run.settings, model, model, shape, torch.device("cpu"), graph=True)
    assert float(lines[1].partition("tried: ")[2].split()[0]) == pytest.approx(held, rel=1e-3)


def _rank(rank: int, folder: str, fails: int) -> None:
    """Train as one of two ranks, on the same images; the backward pass of rank `fails` can't be captured."""
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0"}
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    run, training = small_run(f"{LABELLED} --cuda-graph", 64)
    step = StepGraph(run, replace(training, forward_model=distribute(training.forward_model, CUDA)))
    step.several_ranks, step._warm_up = True, 11
    if rank == fails:
        parameters = [*training.state.model.parameters()]
        parameters[len(parameters) // 2].register_hook(lambda grad: grad.cpu().to(grad))  # waits
    told = train(run, training, step)
    torch.save((told, weights(training.state.model), run.logger.lines), f"{folder}/{rank}")
    # A group can't be left while there are graphs with its exchanges (pytorch issue 115388).
    del step
    gc.collect()
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.gpu(stand_in=False)
@pytest.mark.parametrize("fails", [2, 1])
def test_two_ranks_of_nccl_repeat_their_exchange_of_gradients(tmp_path, fails):
    """On one GPU. Where the capture of one rank fails, both launch their steps."""
    if torch.cuda.nccl.version() < (2, 30):
        pytest.skip("this NCCL takes two ranks on one GPU for a mistake")
    run, training = small_run(f"{LABELLED} --no-cuda-graph", 64)
    expected = train(run, training, step_of(run, training)), weights(training.state.model)
    given = (str(tmp_path), fails)
    ranks = torch.multiprocessing.start_processes(_rank, given, nprocs=2, join=False, start_method="spawn")
    until = time.monotonic() + 240
    try:
        while not ranks.join(timeout=5):
            assert time.monotonic() < until, "a rank waits for the other"
    finally:
        for process in ranks.processes:
            process.kill()
    for rank in range(2):
        told, found, lines = torch.load(tmp_path / str(rank))
        assert ("steps are launched" if fails < 2 else BEGUN) in str(lines), lines
        torch.testing.assert_close((told, found), expected, rtol=1e-4, atol=1e-5, equal_nan=True)

"""A step that a CUDA graph repeats computes what the launched step does, from other numbers in every step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.labels.packed import make_shares
from tests.stand_in_cuda import StandIn
from tests.train.small_run import payload_of
from tests.train.small_step import LABELLED, small_run, train, weights
from tlt.api import StepKey
from tlt.data.backends.synthetic import synthetic_folder
from tlt.data.batch import Batch
from tlt.labels.features import FeatureInfo, FeatureWriter
from volo.checkpoint import replicas
from volo.checkpoint.replicas import Replicas
from volo.cluster.distributed import World
from volo.train import audit, step_graph
from volo.train.loop import set_train_mode
from volo.train.optimizer import set_lr
from volo.train.precision import Precision
from volo.train.step import Step
from volo.train.step_graph import StepGraph, step_of

pytestmark = pytest.mark.gpu
ON_A_GPU = torch.cuda.is_available()
CUDA = torch.device("cuda", 0)
EPOCHS, UPDATES = 2, 3  # the last of an epoch is a smaller batch
ACCUMULATING = f"{LABELLED} --model-ema --grad-accum-steps 2 --drop-path-mode subset --model-dtype bfloat16"
GPU_TOLERANCE = 0.02
SIZES = f"{LABELLED} --train-img-sizes 48 64 --train-batch-sizes 3 4"
Trained = tuple[list[float], list[Tensor], str]  # losses and norms, the weights in the end, and what was told


def trained(flags: str, epochs: int, images: int, resumed: bool = False) -> Trained:
    run, training = small_run(flags, images)
    told = train(run, training, step_of(run, training))
    lines = list(run.logger.lines)
    if "warning: steps are launched" in str(lines):
        assert all(parameter.grad is None for parameter in training.state.model.parameters())
    if resumed:
        saved = payload_of(training.state)
        for group in saved["optimizer"]["param_groups"]:
            assert not group["capturable"] and group["lr"] == float(np.float32(group["lr"]))
        run, training = small_run(flags, images, seen=len(told))
        training.state.load(saved, "a file")
    step = step_of(run, training)
    told += train(run, training, step, epochs - 1)
    return told, weights(training.state.model, training.state.ema), str(lines + run.logger.lines)


launched = cache(trained)


def check_same(found: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compare losses and norms, and the weights; those not on a GPU: it may add in another order now and then, and what
    that changes in a gradient that is almost 0 is as large in AdamW's update as any other."""
    if ON_A_GPU:
        found, expected, rtol, atol = found[0], expected[0], GPU_TOLERANCE, 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs begin with the second update of each size: in the first one libraries choose their kernels."""
    monkeypatch.setattr(step_graph, "WARM_UP", 1)
    launch, rehearse, sizes = Step.__call__, StepGraph._capture_and_compare, set[int]()

    def launch_noted(step: Step, batch: Batch, key: StepKey) -> Any:
        sizes.add(batch.images.shape[-1])
        return launch(step, batch, key)

    def rehearse_noted(step: StepGraph, batch: Batch, key: StepKey) -> str:
        assert batch.images.shape[-1] in sizes
        return rehearse(step, batch, key)

    monkeypatch.setattr(Step, "__call__", launch_noted)
    monkeypatch.setattr(StepGraph, "_capture_and_compare", rehearse_noted)


@pytest.mark.parametrize(
    ("flags", "resumed"),
    [(f"{LABELLED} --model-ema", False), (SIZES, False), pytest.param(ACCUMULATING, True, marks=pytest.mark.slow)],
)
def test_graphs_compute_what_launched_steps_do(flags, resumed, monkeypatch):
    """The last batch of an epoch is smaller, and launched; a step is not finite, and skipped; in between a run is
    resumed, or gives its memory back."""
    if not resumed and flags != SIZES:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: torch.cuda.mem_get_info()[1])
    images = (4 * UPDATES - 1) * (2 if resumed or flags == SIZES else 1)
    told, found, lines = trained(flags, EPOCHS, images)
    expected = trained(f"{flags} --no-cuda-graph", EPOCHS, images)
    if resumed:  # where steps are launched again that were repeated
        again = trained(flags, EPOCHS, images, resumed)
        check_same((told, found), again[:2], 0, 0)
    assert any(value != value for value in told)
    assert "a step is one CUDA graph" in lines and "steps are launched" in expected[2], lines
    check_same((told, found), expected[:2])


def test_stored_teachers_and_masks_are_part_of_the_graph(tmp_path):
    """Features are copied into the graph like labels, for two normalised teachers of which images leave one out; so are
    labels from masks."""
    images = 4 * UPDATES * 2
    folder = synthetic_folder(images, 4)
    writer = FeatureWriter(tmp_path / "f", FeatureInfo((3, 5), 6), folder.paths)
    for row in range(images):
        writer.write(row, torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(row)))
    writer.finish()
    masks = f"--token-label --token-label-data {make_shares(tmp_path / 'm', folder, 4)}"
    flags = f"{masks} --kd-model-name {tmp_path}/f {tmp_path}/f --kd-drop 0.3 --kd-dense-loss cosine smooth-l1"
    told, found, lines = trained(flags, EPOCHS, images)
    expected = trained(f"{flags} --no-cuda-graph", EPOCHS, images)
    assert "a step is one CUDA graph" in lines and "steps are launched" in expected[2], lines
    check_same((told, found), expected[:2])


def test_sizes_in_turns_keep_their_graphs_in_short_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: torch.cuda.mem_get_info()[1])
    capture, captures, replays = StepGraph._capture, count(), count()
    repeat = StepGraph._repeat
    monkeypatch.setattr(StepGraph, "_capture", lambda step: (next(captures), capture(step))[1])
    monkeypatch.setattr(StepGraph, "_repeat", lambda step, last: (next(replays), repeat(step, last))[1])
    run, training = small_run(SIZES, 80)
    step = step_of(run, training)
    for _ in range(2):
        train(run, training, step)
        assert isinstance(step, StepGraph) and not any(state.graphs for state in step._sizes.values())
    # Captured anew after the validation, which got the memory (4 otherwise), but not at each change of size.
    assert 4 < next(captures) < 10 and next(replays) > 30


def test_an_audited_run_trains_as_others_beside_its_graphs(monkeypatch):
    """Two ranks that compute the same: graphs note what each update begins with, and an audit, which gets the graphs'
    memory, changes nothing."""
    monkeypatch.setattr("volo.commands.train.Replicas", lambda *given: Replicas(*given[:2], replace(given[2], size=2)))
    monkeypatch.setattr(torch.distributed, "all_gather", lambda all, own: [value.copy_(own) for value in all])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: torch.cuda.mem_get_info()[1])
    for module in (replicas, audit):
        monkeypatch.setattr(module, "from_all", lambda value: [value] * 2)
    captured, capture = count(), StepGraph._capture
    monkeypatch.setattr(StepGraph, "_capture", lambda step: (next(captured), capture(step))[1])
    run, training = small_run(f"{LABELLED} --model-ema --audit 4", 4 * 7)
    expected = Replicas(training.state, Mock(shard=1, tensor_parallel=1, audit=9), World(0, 0, 2, CUDA))

    def seen(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if not batch.key.again:
                expected.note()
            yield batch

    run.guard.iterate_until_stopped = seen
    told = train(run, training, step_of(run, training))
    noted = training.replicas.log[: int(training.replicas.noted)]
    assert len(noted) == 2 * 3 and torch.equal(noted[::2].cpu(), expected.log[4:7].cpu())
    assert next(captured) == 2
    run, plain = small_run(f"{LABELLED} --model-ema --no-cuda-graph", 4 * 7)
    run.guard.iterate_until_stopped = iter
    assert len(told) == 2 * 7
    check_same((told, []), (train(run, plain, step_of(run, plain)), []))


@pytest.mark.gpu(stand_in=False)
def test_a_capture_that_fails_gives_its_memory_back(monkeypatch):
    _asks(monkeypatch)
    reserved = []
    for more in ("--no-cuda-graph", ""):  # activations of a gibibyte
        _, _, lines = trained(f"{LABELLED} --model volo_d1 --img-size 224 -b 16 {more}", 1, 48)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert "stream is capturing" in lines and reserved[1] <= reserved[0] + (128 << 20), reserved


@pytest.mark.gpu(stand_in=False)
def test_numbers_that_are_sent_to_a_busy_gpu_arrive():
    """The page-locked memory of one update's numbers is free before they are copied."""
    run, training = small_run(LABELLED, 16)
    step, arrived = step_of(run, training), []
    assert isinstance(step, StepGraph)
    batch, groups = next(training.loader.epoch(0)), training.state.optimizer.param_groups
    drawn = step.criterion.draw(batch, StepKey(0, 0))
    torch.cuda._sleep(2_000_000_000)  # cycles: a second
    for number in range(100):
        for group in groups:
            group["lr"] = float(number)
        step.send(batch, drawn)
        arrived.append(step.numbers[1].clone())
    assert torch.stack(arrived).tolist() == [*range(100)]


def _always(change: Callable[[StepGraph], Any]) -> Callable[[Any], None]:
    """Plant what is done before each replay."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        repeat = StepGraph._repeat

        def repeated(step: StepGraph, last: bool) -> Any:
            change(step)
            return repeat(step, last)

        monkeypatch.setattr(StepGraph, "_repeat", repeated)

    return plant


def _asks(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Precision.step
    monkeypatch.setattr(Precision, "step", lambda self, *args: (float((found := update(self, *args))[0]), found)[1])


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (lambda patch: patch.setattr(StepGraph, "rates_on_device", lambda step: nullcontext()), "capturable"),
        (_always(lambda step: step.numbers[1:].fill_(1e-2)), "something else"),
        (_always(lambda step: step.numbers[:1].fill_(0.5)), "something else"),
        (_always(lambda step: step.inputs[1].box.zero_()), "something else"),
        (_always(lambda step: step.inputs[0].images.zero_()), "something else"),
        (_always(lambda step: torch.manual_seed(0)), "something else"),
        (_asks, "stream is capturing"),
    ],
)
def test_graph_that_keeps_a_number_is_seen_before_it_trains(plant, told, monkeypatch, request):
    flags, images = (ACCUMULATING, 20) if plant is _asks else (LABELLED, 12)
    expected = launched(f"{flags} --no-cuda-graph", 1, images)
    plant(monkeypatch)
    found = trained(flags, 1, images)
    assert "warning: steps are launched" in found[2] and told in found[2], found[2]
    check_same(found[:2], expected[:2], 1e-5, 1e-7)
    if not ON_A_GPU:
        assert not request.getfixturevalue("stand_in").left_by_failures


# All that reaches a step; of several GPUs `why_launched` says that nobody has tried it.
REACH = (
    f"{LABELLED} --model-ema --ground-truth --uncovered uniform --drop 0.1 --outlooker-drop-path --opt adam",
    f"{LABELLED} --model-dtype bfloat16 --layer-decay 0.7 --clip-mode value --drop-path-mode subset",
    f"{LABELLED} --channels-last --mixup 0.8 --cutmix 1 --mixup-prob 0.7 --mixup-mode elem --compat target-sum",
    f"{LABELLED} --model test_vit --cls-weight 0 --amp --amp-dtype bfloat16 --drop-path 0",
    "--token-label --model lvvit_test --no-mix-token --freeze-bn --grad-checkpointing --clip-mode agc",
    "--model test_resnet --bce-loss --mixup 0.5 --mixup-mode pair --bn-tf --drop-path 0 --model-ema --model-ema-warmup",
)


def of_two_updates(flags: str, device: StandIn) -> list[list[str]]:
    """What the graphs of two updates keep that are captured at each, with its own numbers."""
    run, training = small_run(flags, 16)
    step, kept = step_of(run, training), []
    assert isinstance(step, StepGraph)
    set_train_mode(training.forward_model, run.settings.norms.freeze_bn)
    training.precision.begin(training.forward_model)
    for update, batch in enumerate(training.loader.epoch(0)):
        key = StepKey(0, update)
        set_lr(training.state.optimizer, training.schedule(update))
        if update == 0:  # makes the optimizer's state
            step(batch, key)
            continue
        device.launches.clear()
        step.send(batch, step.criterion.draw(batch, key))
        # Of 1,300: ten arrays of a batch and what is drawn, 16 more to make CutMix's shares of the pixels.
        assert update == 1 or device.launches.total() <= (27 if "--cutmix" in flags else 11)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with step.rates_on_device(), torch.cuda.graph(graph, stream=stream):
            found = step.compute(*step.inputs, step.numbers[0], True)
        device.launches.clear()
        graph.replay()
        step.done(found)
        assert device.launches.total() == 1 or run.settings.ema.model_ema_warmup
        kept.append([*map(str, graph.kept)])
    torch.cuda.synchronize()
    return kept[:2]


@pytest.mark.skipif(ON_A_GPU, reason="its graphs can't be read")
@pytest.mark.parametrize("flags", REACH)
def test_no_number_changes_from_update_to_update_in_a_graph(flags, stand_in):
    first, second = of_two_updates(flags, stand_in)
    assert len(first) > 100 and first == second


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--opt lamb", "--opt lamb asks the host"),
        ("--opt lookahead_adamw", "--opt lookahead_adamw asks the host"),
        ("--opt-kwargs fused=False", "--opt adamw asks the host"),
        ("--amp", "float16"),
        ("--grad-checkpointing --model-kwargs attn_drop_rate=0.1", "--grad-checkpointing"),
        ("--grad-checkpointing --model test_vit --drop-path 0", "--grad-checkpointing"),
        ("--no-cuda-graph", "--no-cuda-graph"),
        ("--train-img-sizes 48 64 --grad-accum-steps 2", "--grad-accum-steps with --train-img-sizes"),
        ("", "the model has hooks"),
    ],
)
def test_what_is_launched_is_told_with_the_reason(flags, reason):
    run, training = small_run(flags, 16)
    if "hooks" in reason:
        next(training.forward_model.children()).register_forward_hook(lambda *_: None)
    assert type(step_of(run, training)) is Step
    assert reason in run.logger.lines[-1]

"""benchmark.py step and infer: arms are peers, what computes something else is not timed, what fails is told."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from benchmarks import arms, infer, step
from benchmarks.arms import Arm, TimmVolo
from tests.benchmarks.conftest import benchmark
from volo.train import step_graph
from volo.train.compilation import Compiler
from volo.train.step_graph import StepGraph

CPU = torch.device("cpu")
QUICK = "--device cpu --rounds 2 --warm-up 1"
SMALL = f"--model volo_test --img-size 64 -b 2 {QUICK}"


def test_timms_peer_is_its_forward_train_with_the_class_head(monkeypatch):
    torch.manual_seed(0)
    net = timm.create_model("volo_test_224", img_size=64, num_classes=7).train()
    net.mix_token, net.beta = True, 1.0
    images, box = torch.randn(2, 3, 64, 64), (1, 0, 4, 2)
    monkeypatch.setattr("timm.models.volo.rand_bbox", lambda *size, scale=1: box)
    cls_token, tokens, _ = net.forward_train(images)
    logits, own = TimmVolo(net)(images, dense=True, mix_box=torch.tensor(box, dtype=torch.int32))
    torch.testing.assert_close(own, tokens)
    torch.testing.assert_close(logits, net.head(cls_token))
    with torch.no_grad():
        torch.testing.assert_close(TimmVolo(net.eval())(images), net(images))


def test_step_times_all_arms_from_one_start(measure):
    rows = measure(f"step {SMALL} --peer timm reference amp")
    alone, turns = rows[:4], rows[4:]
    assert [row["rounds"] for row in rows] == ["1, alone"] * 4 + [2] * 4  # written as soon as measured
    for result in (alone, turns):
        assert [row["arm"] for row in result] == ["ours", "timm", "reference", "amp"]
        assert [row["type"] for row in result] == ["float32"] * 3 + ["bfloat16"]
    median, low, high = turns[1]["ours is, times"]
    assert 0 < low <= median <= high and turns[0]["ours is, times"] is None
    assert all(row["images/s"] == pytest.approx(2e3 / row["ms a batch"][0]) for row in rows)


def test_step_in_bfloat16_compiled_and_with_subset(measure):
    flags = "--model-dtype bfloat16 --torchcompile eager --drop-path 0.5 --drop-path-mode subset"
    rows = measure(f"step {SMALL} {flags} --peer eager mask")
    assert [row["arm"] for row in rows[:3]] == ["ours", "eager", "mask"]
    assert {row["type"] for row in rows} == {"bfloat16"} and all(row["images/s"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True])
def test_ours_is_a_graph_or_the_row_says_why(measure, monkeypatch, fails):
    """When it is captured, nothing is left of the model before, and of what it was checked with."""
    made, alive, streams, repeated = list[Any](), list[int](), list[Any](), list[Any]()
    capture, replay = StepGraph._capture, torch.cuda.CUDAGraph.replay

    class Watched(step.TrainStep):
        def __init__(self, *args: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*args)

    def captured(graph: StepGraph) -> str:
        alive.append(sum(each() is not None for each in made))
        streams.append(torch.cuda.current_stream())
        return "OutOfMemoryError: 2 GiB" if fails else capture(graph)

    for module in (step, step_graph):
        monkeypatch.setattr(module, "WARM_UP", 1)
    monkeypatch.setattr(step, "TrainStep", Watched)
    monkeypatch.setattr(StepGraph, "_capture", captured)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: repeated.append(replay(graph)))
    rows = measure("step --device cuda --model volo_test volo_test --img-size 32 -b 1 --rounds 1 --warm-up 1 --peer")
    note = "warning: steps are launched, no CUDA graph of them: OutOfMemoryError: 2 GiB" if fails else None
    assert [(row["arm"], row.get("note")) for row in rows] == 4 * [("ours", note)]
    assert alive == [1, 1] and len({*streams}) == 2
    assert fails or len(repeated) > 8  # beside the launched step, and in each turn


def test_infer_folds_ours_and_no_other_arm(measure, monkeypatch):
    folded = []
    monkeypatch.setattr(infer, "fold_batchnorm", lambda model: folded.append(type(model).__name__))
    rows = measure(f"infer {SMALL} --peer timm unfolded --amp")
    assert [row["arm"] for row in rows[3:]] == ["ours", "timm", "unfolded"]
    assert folded == ["VOLO"]


@pytest.mark.parametrize(
    ("command", "wrong", "factors"), [("step", "ours", (1, float("nan"))), ("infer", "reference", (1.2,))]
)
def test_what_is_timed_is_what_is_checked(command, wrong, factors, monkeypatch, measure, capsys):
    """An arm that computes something else once it is compiled is not timed; the others are."""
    compiled, built = Compiler.model, arms.build

    def build(arm: Arm, *rest: Any) -> nn.Module:
        model = built(arm, *rest)
        model.arm = arm.name
        return model

    def damaged(compiler: Compiler, model: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = compiled(compiler, model)

        def changed(*args: Any, **options: Any) -> Any:
            outputs = function(*args, **options)
            if isinstance(outputs, torch.Tensor):
                return factors[0] * outputs
            return tuple(factor * logits for factor, logits in zip(factors, outputs, strict=True))

        return changed if model.arm == wrong else function

    monkeypatch.setattr(arms, "build", build)
    monkeypatch.setattr(Compiler, "model", damaged)
    rows = measure(f"{command} {SMALL} --peer reference", code=2)
    assert f"error: arm {wrong} computes something else from the same numbers" in capsys.readouterr().err
    timed = {row["arm"] for row in rows if "images/s" in row}
    assert timed == {"ours", "reference"} - {wrong}


def test_an_arm_that_fails_is_told_and_the_others_are_timed(monkeypatch, measure):
    built = arms.build

    def build(arm: Arm, *rest: Any) -> nn.Module:
        if arm.name in broken:
            raise RuntimeError("no kernel for this\nand much more")
        return built(arm, *rest)

    monkeypatch.setattr(arms, "build", build)
    broken = ["reference"]
    rows = measure(f"infer {SMALL} --peer reference")
    assert [row.get("note") for row in rows] == [None, "not measured: RuntimeError: no kernel for this", None]
    broken = ["ours", "reference"]
    measure(f"infer {SMALL} --peer reference", code=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepp", "invalid choice: 'stepp'"),
        ("step --drop-pth 0.1", "unknown flag --drop-pth, did you mean --drop-path?"),
        ("step --peer eager", "--peer eager does the same as ours with these flags: leave it out"),
        ("step --amp --model-dtype bfloat16", "--amp and --model-dtype bfloat16 both set the precision"),
        ("step --device cpu --peer launched", "--peer graph and --peer launched differ on a GPU alone"),
        ("step --model lvvit_t", "--peer timm: timm has VOLO D1 to D5, not lvvit_t"),
        ("infer --model volo_d --peer", "--model volo_d: timm knows no such model; did you mean"),
        ("infer --output nowhere/rows", "--output nowhere/rows: No such file or directory"),
        ("ablation --images 19", "--images: 19 is out of range: at least 50"),
        ("ablation --arms masks", "--arms with --scenes digits masks: choose from true, "),
        ("ablation --single 100", "--single has no effect without --scenes products"),
        ("ablation --scenes products --products no", "no has no train-images-idx3-ubyte.gz: apt-get install dataset-f"),
    ],
)
def test_mistakes_are_told_in_one_line(line, message, capsys):
    assert benchmark(line) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error

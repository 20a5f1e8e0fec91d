"""Convolutions that the CPU computes wrong in bfloat16 are found, told and computed right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.commands.conftest import QUICK
from volo import cli
from volo.train.convolutions import check_convolutions, compute_in_float32
from volo.train.precision import WorkingCopy

CPU = torch.device("cpu")
SIZE = (3, 64, 64)
MODELS = {"volo_test": {"img_size": 64}, "lvvit_test": {"img_size": 64}, "test_resnet": {}, "test_efficientnet": {}}


def build(name: str, training: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **MODELS[name]).train(training)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, *SIZE, generator=torch.Generator().manual_seed(1))


def share(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().float() - expected.detach()).abs().max() / expected.detach().abs().max())


class Wrong(TorchDispatchMode):
    """Below autograd and autocast, where libraries are called: bfloat16 convolutions return another sign."""

    def __init__(self, output: bool = True, gradients: bool = True) -> None:
        super().__init__()
        aten = torch.ops.aten
        self.garbled = [aten.convolution.default] * output + [aten.convolution_backward.default] * gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in self.garbled:
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        garbled = tuple(o if o is None or o.dtype is not torch.bfloat16 else -o for o in outputs)
        return garbled if isinstance(found, tuple) else garbled[0]


@contextmanager
def bfloat16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def check(model: nn.Module) -> list[str]:
    return check_convolutions(model, SIZE, torch.bfloat16, CPU)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_wrong_is_told_and_computed_right(name: str) -> None:
    model, weights = build(name), build(name).state_dict()
    with torch.no_grad(), Wrong():
        expected = model(images())
        with bfloat16():
            assert share(model(images()), expected) > 0.1
        lines = check(model)
        with bfloat16():
            assert share(model(images()), expected) < 0.04
        pure = copy.deepcopy(model).bfloat16()
        assert share(pure(images().bfloat16()), expected) < 0.06
    assert {parameter.dtype for parameter in pure.parameters()} == {torch.bfloat16}
    assert lines and all("wrong in bfloat16" in line and torch.__version__ in line for line in lines)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_layer_in_float32_is_part_of_one_compiled_graph() -> None:
    layer = nn.Conv2d(3, 4, 3)
    compute_in_float32(layer)
    with torch.no_grad(), bfloat16():
        expected = layer(images())
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(images())
    assert expected.dtype is torch.bfloat16 and torch.equal(compiled, expected)


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}


def test_wrong_gradients_count_in_training_alone() -> None:
    with Wrong(output=False):
        assert not check(build("volo_test"))
        model = build("volo_test", training=True)
        reference = copy.deepcopy(model)
        assert check(model)
        trained = WorkingCopy(model)
        with bfloat16():
            loss = trained.module.eval()(images()).float().logsumexp(-1).sum()
        loss.backward()
        trained.give_gradients()
    reference.eval()(images()).logsumexp(-1).sum().backward()
    for name, layer in convolutions(reference).items():
        found, expected = model.get_submodule(name)._parameters["weight"].grad, layer.weight.grad
        assert F.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.9


def test_an_output_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.Conv2d._conv_forward

    def broken(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = right(self, x, weight, bias)
        return out * math.nan if out.dtype is torch.bfloat16 else out

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", broken)
    model = build("lvvit_test")
    assert len(check(model)) == 3
    with torch.no_grad(), bfloat16():
        assert model(images()).isfinite().all()


# Where oneDNN 3.13.3 is wrong with AMX: channels in, window = stride. Elsewhere nothing has to be mended.
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a processor with AMX")
@pytest.mark.parametrize(
    ("channels", "window"),
    [(8, 8), (12, 8), (16, 4), (16, 8), (20, 8), (24, 4), (24, 8), (24, 16), (28, 8), (28, 16), (32, 8), (3, 16)],
)
@pytest.mark.parametrize("training", [False, True])
def test_this_processor_is_right_after_the_check(channels: int, window: int, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, 32, window, stride=window)
    model, x = nn.Sequential(layer).train(training), torch.randn(4, channels, 64, 64, requires_grad=True)
    check_convolutions(model, (channels, 64, 64), torch.bfloat16, CPU)
    parameters = [x, *model.parameters()]
    found = []
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = model(x)
        gradients = torch.autograd.grad(out.float().square().sum(), parameters) if training else ()
        found.append([out, *gradients])
    assert out.dtype is torch.float32 and found[0][0].dtype is torch.bfloat16
    assert all(share(low, right) < 0.05 for low, right in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("dtype", "device"), [(None, "cpu"), (torch.float16, "cpu"), (torch.bfloat16, "cuda"), (torch.float32, "cpu")]
)
def test_other_runs_try_nothing(dtype: torch.dtype | None, device: str) -> None:
    model = build("test_resnet")
    with Wrong():
        assert check_convolutions(model, SIZE, dtype, torch.device(device)) == []
    assert {type(layer) for layer in convolutions(model).values()} == {nn.Conv2d}


def test_a_right_model_stays_as_it_is() -> None:
    model = build("volo_test", training=True)
    # Whatever this processor does: both ways are float32.
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert not any(layer._forward_pre_hooks for layer in convolutions(model).values())


@pytest.mark.parametrize("program", ["train", "validate", "label", "export"])
def test_programs_tell_and_are_right(
    program: str, make_dataset: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, weights = make_dataset(train=8), tmp_path / "weights.pth"
    torch.manual_seed(0)
    torch.save(timm.create_model("lvvit_test", img_size=32, num_classes=4).state_dict(), weights)
    model = f"--model lvvit_test --num-classes 4 --img-size 32 --checkpoint {weights}"
    line = {
        "train": f"{data} {QUICK} --model-dtype bfloat16 --epochs 1 --output {tmp_path}/train",
        "validate": f"{data} -b 4 -j 0 --amp {model}",
        "label": f"{data} {tmp_path}/labels -j 0 --amp {model}",
        "export": f"-o {tmp_path}/model.pt2 --model-dtype bfloat16 {model}",
    }[program]
    with Wrong():
        code = cli.run(program, line.split())
    ended = capsys.readouterr()
    assert code == 0, ended.err
    assert "warning: patch_embed." in ended.out + ended.err and "wrong in bfloat16" in ended.out + ended.err

"""Convolutions that the CPU computes wrong in bfloat16 are found and told, and nothing is changed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import volo  # noqa: F401  (registers the models)
from tests.commands.conftest import QUICK, Make
from volo import cli
from volo.train.precision import check_convolutions

CPU = torch.device("cpu")
SIZE = (3, 64, 64)


class Wrong(TorchDispatchMode):
    """Below autocast, where libraries are called: bfloat16 convolutions of this window are multiplied by `factor`."""

    def __init__(self, window: int, factor: float = -1.0) -> None:
        super().__init__()
        self.window, self.factor = window, factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.convolution.default or found.dtype is not torch.bfloat16:
            return found
        return found * self.factor if args[1].shape[-1] == self.window else found


@pytest.mark.parametrize("factor", [-1.0, math.nan])
def test_a_wrong_convolution_is_named_with_the_remedy(factor: float) -> None:
    torch.manual_seed(0)
    model = timm.create_model("volo_test", num_classes=5, img_size=64)
    with Wrong(window=7, factor=factor):
        (line,) = check_convolutions(model, SIZE, torch.bfloat16, CPU)
    assert f"torch {torch.__version__} computes patch_embed.conv.0 and convolutions like it wrong in bfloat16" in line
    assert "use float32 (without --amp and --model-dtype)" in line


def test_model_and_random_numbers_stay_as_they_are() -> None:
    model = timm.create_model("volo_test", num_classes=5, img_size=64).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_convolutions(model, SIZE, torch.bfloat16, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_a_run_tells_of_it(make_dataset: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(train=8)
    with Wrong(window=7):
        code = cli.run("train", f"{data} {QUICK} --model-dtype bfloat16 --epochs 1 --output {tmp_path}".split())
    ended = capfd.readouterr()
    assert code == 0, ended.err
    assert "warning: torch" in ended.out and "wrong in bfloat16" in ended.out

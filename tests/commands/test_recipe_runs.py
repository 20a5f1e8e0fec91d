"""The recipes of other systems run: 20 updates each, with a small model on a few images."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import ROOT, Ended, metrics

SMALL = (
    "--model test_vit --img-size 32 --batch-size 4 --grad-accum-steps 1 --epochs 5 --warmup-epochs 1 "
    "--no-warmup-prefix --cooldown-epochs 0 --log-interval 1 --device cpu -j 0"
)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("vit_b16_224_adafactor", {"exp_avg", "exp_avg_sq_r", "exp_avg_sq_c"}),
        ("vit_b32_224_lamb", {"exp_avg", "exp_avg_sq"}),
        ("vit_b16_cifar10", {"momentum_buffer"}),
    ],
)
def test_twenty_updates(
    name: str, state: set[str], call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data = make_dataset(train=16)
    recipe = f"-c {ROOT}/configs/{name}.yaml --output {tmp_path} --experiment run"
    ended = call("train", f"{data} {recipe} {SMALL}", "--dataset", "")
    assert ended.code == 0, ended.err
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert len(losses) == 20 and all(map(math.isfinite, losses))
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)["optimizer"]["state"]
    assert state <= set().union(*saved.values())

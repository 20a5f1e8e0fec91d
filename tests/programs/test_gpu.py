"""Whole training runs on a GPU: mixed precision, the fused optimizer, prefetching, exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from tests.programs.conftest import QUICK, Ended, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("amp", ["", "--amp --amp-dtype bfloat16", "--apex-amp"])
def test_losses_are_those_of_the_cpu(
    call: Callable[..., Ended],
    make_dataset: Callable[..., Path],
    make_labels: Callable[..., Path],
    tmp_path: Path,
    amp: str,
) -> None:
    data = make_dataset()
    labels = make_labels(data)
    # Dropout and stochastic depth draw other numbers on a GPU.
    flags = f"{data} {QUICK} --epochs 2 --lr 1e-4 --drop-path 0 --token-label --token-label-data {labels}"
    flags += f" --output {tmp_path}"
    assert call("train", f"{flags} --experiment cpu --device cpu").code == 0
    ended = call("train", f"{flags} --experiment gpu --device cuda --pin-mem --channels-last {amp}")
    assert ended.code == 0, ended.err
    cpu, gpu = (metrics(tmp_path / name) for name in ("cpu", "gpu"))
    tolerance = 2e-2 if amp else 1e-3
    assert [r["loss"] for r in gpu] == pytest.approx([r["loss"] for r in cpu], rel=tolerance)


def test_fault_53_a_broken_step_changes_nothing_on_the_gpu() -> None:
    from volo.engine.precision import Precision

    device = torch.device("cuda")
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    precision = Precision(device)
    for scale in (1.0, float("nan")):
        before = model.weight.detach().clone()
        precision.backward(model(torch.ones(1, 3, device=device)).sum() * scale)
        precision.step(optimizer, list(model.parameters()))
    assert precision.counts()[0] and torch.equal(before, model.weight)


@pytest.mark.parametrize("amp", ["", "--amp"])
def test_a_teacher_on_the_gpu_says_what_it_says_on_the_cpu(
    call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path, amp: str
) -> None:
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "teacher.pth")
    flags = f"{make_dataset()} {QUICK} --epochs 1 --lr 1e-4 --drop-path 0 --token-label --output {tmp_path}"
    flags += f" --token-label-teacher resnet10t --token-label-teacher-checkpoint {tmp_path / 'teacher.pth'}"
    assert call("train", f"{flags} --experiment cpu --device cpu").code == 0
    ended = call("train", f"{flags} --experiment gpu --device cuda --channels-last {amp}")
    assert ended.code == 0 and "ms an image on a cuda device" in ended.out, ended.err
    cpu, gpu = (metrics(tmp_path / name) for name in ("cpu", "gpu"))
    assert [r["loss"] for r in gpu] == pytest.approx([r["loss"] for r in cpu], rel=2e-2 if amp else 1e-3)
    assert metrics(tmp_path / "gpu", "epoch")[0]["teacher_ms_per_image"] > 0

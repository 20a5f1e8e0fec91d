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


@pytest.mark.parametrize("more", ["", "--torchcompile-mode reduce-overhead", "--torchcompile-scope model"])
@pytest.mark.parametrize("model", ["volo_test", "lvvit_test"])
def test_compiled_losses_are_those_without_and_cuda_graphs_leave_nothing_out(
    call: Callable[..., Ended],
    make_dataset: Callable[..., Path],
    make_labels: Callable[..., Path],
    tmp_path: Path,
    model: str,
    more: str,
) -> None:
    """Two micro-batches an update: gradients lie where the graphs put them while the second one runs."""
    from torch._dynamo.utils import counters

    data = make_dataset()
    flags = f"{data} {QUICK} --model {model} -b 4 --grad-accum-steps 2 --epochs 2 --lr 1e-3 --drop-path 0 --model-ema"
    flags += f" --token-label --token-label-data {make_labels(data)} --device cuda --output {tmp_path}"
    assert call("train", f"{flags} --experiment plain").code == 0
    torch.compiler.reset()
    counters.clear()
    ended = call("train", f"{flags} --experiment compiled --torchcompile {more}")
    assert ended.code == 0, ended.err
    plain, compiled = (metrics(tmp_path / name) for name in ("plain", "compiled"))
    assert [r["loss"] for r in compiled] == pytest.approx([r["loss"] for r in plain], rel=1e-3)
    plain, compiled = (metrics(tmp_path / name, "epoch") for name in ("plain", "compiled"))
    for name in ("eval_loss", "eval_loss_ema"):
        assert [r[name] for r in compiled] == pytest.approx([r[name] for r in plain], rel=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_stochastic_depth_on_the_gpu_is_a_function_of_the_seed(
    call: Callable[..., Ended], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    flags = f"{make_dataset()} {QUICK} --epochs 1 --lr 1e-4 --drop-path 0.5 --token-label --device cuda --torchcompile"
    runs = {}
    for name, more in {"blocks": "", "graphs": "--torchcompile-mode reduce-overhead"}.items():
        for again in ("", "-again"):
            assert call("train", f"{flags} {more} --output {tmp_path} --experiment {name}{again}").code == 0
            runs[name + again] = [r["loss"] for r in metrics(tmp_path / (name + again))]
        assert runs[name] == pytest.approx(runs[f"{name}-again"], rel=1e-5)
    assert call("train", f"{flags} --seed 7 --output {tmp_path} --experiment other").code == 0
    assert [r["loss"] for r in metrics(tmp_path / "other")] != pytest.approx(runs["blocks"], rel=1e-3)

"""Whole runs on a GPU against a CPU's: mixed precision, optimizers, prefetching, resume, no wait for the device."""

import os
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch

import volo
from tests.commands.conftest import QUICK, metrics
from tests.stand_in.streams import ACTIVE
from tlt.api import StepKey
from volo.checkpoint.saver import host_copy
from volo.cluster.topology import read_machine, visible_gpus
from volo.train import step_graph
from volo.train.precision import SkippedSteps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("amp", "more"),
    [
        ("", "--token-label --token-label-data {labels} --opt lamb --grad-checkpointing"),
        (
            "--amp --amp-dtype bfloat16",
            "--token-label --token-label-teacher resnet10t --token-label-teacher-checkpoint {w}",
        ),
        ("--model-dtype bfloat16", "--token-label --token-label-data {labels} --grad-accum-steps 2 -b 4 --model-ema"),
        pytest.param(
            "",
            "--model test_resnet --opt momentum --clip-grad 1 --mixup 0.2 --cutmix 1 --kd-model-name {run} {run} "
            "--kd-distill-type logit feature",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_are_the_cpus(call, data, labels, tmp_path, trained_run, amp, more):
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "teacher.pth")
    more = more.format(labels=labels, w=tmp_path / "teacher.pth", run=trained_run.run)
    # Dropout and stochastic depth draw other numbers on a GPU.
    flags = f"{data} {QUICK} --epochs 1 --lr 1e-4 --drop-path 0 --output {tmp_path} {more}"
    assert call("train", f"{flags} --experiment cpu --device cpu").code == 0
    call("train", f"{flags} --experiment gpu --device cuda --pin-mem --channels-last {amp}").ok()
    cpu, gpu = (metrics(tmp_path / name) for name in ("cpu", "gpu"))
    tolerance = 2e-2 if amp else 1e-3
    assert len(gpu) == 2 and [r["loss"] for r in gpu] == pytest.approx([r["loss"] for r in cpu], rel=tolerance)
    saved = torch.load(tmp_path / "gpu" / "last.pth.tar", map_location="cpu")
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "--model-dtype bfloat16 --drop-path-mode subset --model-ema --layer-decay 0.7 --warmup-epochs 1",
            "a step is one CUDA graph",
        ),
        ("--amp --kd-model-name {run} {run} --kd-distill-type token feature --kd-drop 0.5", "steps are launched"),
    ],
)
def test_the_host_never_waits_between_two_reports(call, data, labels, tmp_path, trained_run, monkeypatch, more, says):
    seed, pop, checked = StepKey.seed_torch, SkippedSteps.pop, []
    seen = ACTIVE.device.waits if ACTIVE.device else []  # the stand-in sees waits for events, too

    def begin_step(step: StepKey) -> None:  # of the second epoch on: in the first one libraries start up
        seed(step)
        if step.update == 4:
            seen.clear()
        if step.update >= 4:
            torch.cuda.set_sync_debug_mode("error")

    def report(skipped: SkippedSteps) -> dict[int, bool]:
        checked.append(torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("default")
        # Those of the saver's thread, and for the replay of two updates ago, are deliberate.
        others = [wait for wait in seen if wait.stack[-1].split(":")[1] not in ("_write", "_wait_for_device")]
        assert not checked[-1] or not others, others
        return pop(skipped)

    monkeypatch.setattr(step_graph, "WARM_UP", 1)
    monkeypatch.setattr(StepKey, "seed_torch", begin_step)
    monkeypatch.setattr(SkippedSteps, "pop", report)
    flags = f"{data} {QUICK} -b 4 --epochs 2 --log-interval 4 --lr 1e-4 --drop-path 0.5 --device cuda "
    flags += more.format(run=trained_run.run)
    try:
        ended = call("train", f"{flags} --token-label --token-label-data {labels} --output {tmp_path}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ended.ok() and checked == [0, 2] and says in ended.out


@pytest.mark.gpu(stand_in=False)  # on a CPU `tests/commands/test_exact_resume.py` shows it
def test_resumed_run_goes_on_as_before(call, data, tmp_path, stop_at):
    flags = f"{data} {QUICK} -b 4 --epochs 2 --lr 1e-3 --drop-path 0.5 --drop-path-mode subset --amp"
    flags += f" --token-label --model-ema --device cuda --output {tmp_path} --resume auto --experiment"
    assert call("train", flags, "whole").code == 0
    stop_at({3})
    assert [call("train", flags, "cut").code for _ in range(2)] == [130, 0]
    whole, cut = (metrics(tmp_path / name) for name in ("whole", "cut"))
    assert len(cut) == 8 and [r["loss"] for r in cut] == pytest.approx([r["loss"] for r in whole], rel=1e-3)


def test_python_run_restores_stream_and_random_state(data, tmp_path, monkeypatch):
    before = torch.cuda.current_stream()
    put_back = Mock()
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back)
    small: dict[str, Any] = {"model": "volo_test", "img_size": 32, "batch_size": 8, "workers": 0, "warmup_epochs": 0}
    volo.train(data, **small, epochs=1, lr=1e-3, device="cuda", output=tmp_path)
    assert torch.cuda.current_stream() == before
    (state, device), _ = put_back.call_args
    assert device == 0 and torch.equal(state, torch.cuda.get_rng_state())


def test_accuracy_and_labels_are_those_of_the_cpu(call, data, tmp_path):
    weights = tmp_path / "weights.pth"
    torch.manual_seed(0)
    torch.save(timm.create_model("volo_test", img_size=32, num_classes=4).state_dict(), weights)
    model = f"--model volo_test --checkpoint {weights} --num-classes 4 --img-size 32 -b 5 -j 0"
    losses, labels, pages = [], [], []
    for device in ("cpu", "cuda"):
        losses.append(call("validate", f"{data} {model} --device {device}").ok().row["loss"])
        assert call("label", f"{data} {tmp_path / device} {model} --device {device}").code == 0
        table = tmp_path / f"{device}.csv"
        flags = f"--model volo_test --checkpoint {weights} --num-classes 4 --img-size 32 --device {device}"
        assert call("predict", f"{flags} -j 0 -b 3 -o {table}", data / "validation").code == 0
        pages.append(table.read_text())
        image = next((data / "validation").rglob("*.jpg"))
        assert call("attention", f"{image} {flags} -o {tmp_path}/{device}.png").code == 0
        labels.append(torch.from_numpy(np.load(tmp_path / device / "values.npy")).float())  # the largest first
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and labels[0].shape[:2] == (16, 4)
    assert [row.split(",")[:2] for row in pages[1].split()] == [row.split(",")[:2] for row in pages[0].split()]
    torch.testing.assert_close(labels[1], labels[0], rtol=2e-3, atol=2e-3)  # in half precision


def test_checkpoint_copy_is_of_its_moment_and_waits_for_nothing():
    weight = torch.zeros(2**24, device="cuda")
    payload = {"weight": weight, "more": [torch.ones(3)]}
    for value in range(2):
        torch.cuda.set_sync_debug_mode("error")
        try:
            copied, complete = host_copy(payload)
            weight.add_(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        complete.synchronize()
        assert copied["weight"].eq(value).all() and copied["weight"].is_pinned()


@pytest.mark.gpu(stand_in=False)
def test_the_gpu_that_a_rank_is_bound_to_is_torchs():
    gpus = read_machine().gpus
    if not gpus:
        pytest.skip("this machine's /sys shows no GPU")
    shown, why = visible_gpus(gpus, os.environ)
    torchs = torch.cuda.get_device_properties(0)
    address = f"{torchs.pci_domain_id:04x}:{torchs.pci_bus_id:02x}:{torchs.pci_device_id:02x}.0"
    assert why or shown[0].name == address


@pytest.mark.gpu(stand_in=False)
@pytest.mark.parametrize(
    ("model", "more"),  # half a minute each
    [("volo_test", ""), ("lvvit_test", "--torchcompile-mode reduce-overhead")],
)
def test_compiled_losses_equal_eager_ones_with_graphs_too(call, data, labels, tmp_path, model, more):
    """Two micro-batches an update: gradients lie where the graphs put them while the second one runs."""
    from torch._dynamo.utils import counters

    flags = f"{data} {QUICK} --model {model} -b 4 --grad-accum-steps 2 --epochs 2 --lr 1e-3 --drop-path 0 --model-ema"
    flags += f" --token-label --token-label-data {labels} --device cuda --output {tmp_path}"
    assert call("train", f"{flags} --experiment plain").code == 0
    torch.compiler.reset()
    counters.clear()
    call("train", f"{flags} --experiment compiled --torchcompile {more}").ok()
    plain, compiled = (metrics(tmp_path / name) for name in ("plain", "compiled"))
    assert [r["loss"] for r in compiled] == pytest.approx([r["loss"] for r in plain], rel=1e-3)
    plain, compiled = (metrics(tmp_path / name, "epoch") for name in ("plain", "compiled"))
    assert [r["eval_loss_ema"] for r in compiled] == pytest.approx([r["eval_loss_ema"] for r in plain], rel=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0

"""What `--dry-run` says about memory, as a user sees them."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import Linear

from tests.commands.conftest import QUICK
from tlt.models.flops import flops_per_image
from volo.memory import prediction
from volo.train import loop

ON_A_GPU = torch.cuda.is_available()


@pytest.fixture
def flags(data: Path, tmp_path: Path) -> str:
    return f"{data} {QUICK} --epochs 1 --token-label --output {tmp_path}"


@pytest.mark.parametrize("more", ["--model volo_d0 --img-size 64 --amp", "--model resnet10t --no-token-label"])
def test_a_dry_run_says_what_fits(call, flags, more):
    ended = call("train", f"{flags} --model-ema {more} --dry-run").ok()
    if "volo" in more:
        model = timm.create_model("volo_d0", img_size=64, num_classes=4)
        assert f"operations: {flops_per_image(model, (3, 64, 64)) / 2e9:.2f} GMACs an image" in ended.out
    sizes = [tuple(map(int, row)) for row in re.findall(r"largest batch on a card of (\d+) GB: (\d+)", ended.out)]
    assert [row[0] for row in sizes] == [24, 40, 80, 141]
    kept = float(re.search(r"= ([\d.]+) GiB a rank", ended.out)[1])
    image, batch = map(float, re.search(r"kernels of cpu\): ([\d.]+) MiB an image, ([\d.]+) GiB", ended.out).groups())
    for (_, most), card in zip(sizes, (23.6, 39.4, 79.2, 139.8), strict=True):  # GiB; 1 is CUDA's, 5 % a margin
        room = 1024 * (0.95 * (card - 1) - kept - batch) + 8 * image
        assert most == pytest.approx(room / image, rel=0.005 + 0.05 / image)  # which is printed with one digit


@pytest.mark.parametrize(
    ("more", "updates", "images"), [("", 4, 8), ("--grad-accum-steps 2 -b 4", 4, 8), ("--val-interval 2 -b 3", 12, 3)]
)
def test_a_dry_run_says_how_long_the_run_takes(call, flags, monkeypatch, more, updates, images):
    seconds, took = prediction.seconds_of_images, list[tuple[int, float]]()
    monkeypatch.setattr(prediction, "seconds_of_images", lambda *args: (took.append(seconds(*args)), (4, 40.0))[1])
    ended = call("train", f"{flags.replace('--epochs 1', '--epochs 2')} {more} --dry-run").ok()
    passes = 1 if "interval" in more else 2  # of 8 images each, at a third of the 10 s of an image
    expected = 10 * updates * images + passes * 8 * 10 / 3
    actual = re.search(r"the run takes about (\d+):(\d+) on this cpu: 4 images took 40.00 s", ended.out)
    assert 60 * int(actual[1]) + int(actual[2]) == pytest.approx(expected, rel=0.1)
    ((count, spent),) = took
    assert "set by data: " in ended.out and " --epochs 2 " in re.search("set by command line: .*", ended.out)[0]
    assert 2 <= count <= 8 and 0 < spent < 60 and ended.out.splitlines()[-1].startswith("--dry-run: flags")
    monkeypatch.undo()
    monkeypatch.setattr(prediction, "_OPERATIONS_OF_CPU", 1)
    ended = call("train", f"{flags} --dry-run").ok()
    assert "how long the run takes can't be told: 0 GMACs an image are many for a CPU" in ended.out


@pytest.mark.parametrize("error", [AssertionError("Expected gradient\nfunction"), KeyError("x"), TypeError()])
def test_layers_failing_on_meta_tensors(call, flags, monkeypatch, error):
    forward, reason = Linear.forward, " ".join(str(error).split()) or "TypeError"

    def without_meta(layer: Linear, x: Tensor) -> Tensor:
        if type(x) is Tensor and x.is_meta:
            raise error
        return forward(layer, x)

    monkeypatch.setattr(Linear, "forward", without_meta)
    flags = f"{flags} --amp --model test_vit"
    assert f"operations of a step: unknown ({reason})" in call("train", f"{flags} --experiment run").ok().out
    assert f"operations and activations can't be predicted: {reason}" in call("train", f"{flags} --dry-run").ok().out


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_one_line(call, flags, monkeypatch, error):
    monkeypatch.setattr(loop, "train_epoch", Mock(side_effect=error))
    ended = call("train", f"{flags} --experiment full")
    assert ended.code == 2 and len(ended.err.strip().splitlines()) == 1
    assert "-b 8" in ended.err and "out of memory)" in ended.err and "--grad-checkpointing" in ended.err


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_on_a_gpu(call, flags, graph):
    ended = call("train", f"{flags} --dry-run --device cuda {'' if graph else '--no-cuda-graph'}").ok()
    assert "largest batch on this GPU" in ended.out or not ON_A_GPU  # what the stand-in can't predict
    assert ("memory of the host while the CUDA graph of a step is tried: 0.00 GiB a rank" in ended.out) == graph


def test_a_teacher_is_told_for_the_largest_of_the_batches(call, data, described):
    flags = f"{data} {QUICK} --img-size 64 --train-img-sizes 32 64 --train-batch-sizes 16 6 --dry-run"
    _, teacher = described("test_vit", img_size=[64, 64])
    ended = call("train", f"{flags} --kd-model-name {teacher} --kd-distill-type token").ok()
    assert "those of 6 images of 64 px have the most" in ended.out and "a forward pass of 16 images" in ended.out

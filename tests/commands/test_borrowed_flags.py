"""Flags with timm's names mean what they mean in timm."""

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.commands.conftest import QUICK, metrics
from tests.train.small_run import arguments
from tlt.api import StepKey
from tlt.data.augment.device_stage import EvalStage
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.commands.validate import validate
from volo.config.settings_evaluate import VALIDATE
from volo.train.criterion import make_criterion, step_loss
from volo.train.loop import best_so_far


@pytest.mark.parametrize(
    "flags", ["--bce-loss", "--bce-loss --bce-sum --bce-target-thresh 0.05", "--bce-loss --bce-pos-weight 3 --mixup 1"]
)
def test_binary_cross_entropy_is_timms(flags):
    criterion = make_criterion(arguments(flags), timm.create_model("test_vit", num_classes=5), (160, 160))
    logits, classes = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    images = torch.randn(4, 3, 8, 8)
    seen: list[torch.Tensor] = []

    def model(mixed: torch.Tensor) -> torch.Tensor:
        seen.append(mixed)
        return logits

    batch: Any = Namespace(images=images, classes=classes)
    loss = step_loss(criterion, None, model, batch, criterion.draw(batch, StepKey(1, 0, 0, 0))).total
    targets = torch.full((4, 5), 0.1 / 5).scatter_(1, classes[:, None], 0.9 + 0.1 / 5)
    if "--mixup" in flags:
        share = float(((seen[0] - images.flip(0)) / (images - images.flip(0))).median())  # as the images show it
        assert 0.01 < share < 0.99
        targets = share * targets + (1 - share) * targets.flip(0)
    if "thresh" in flags:
        targets = (targets > 0.05).float()
    weight = 3.0 if "weight" in flags else 1.0
    each = -(weight * targets * torch.log(torch.sigmoid(logits)) + (1 - targets) * torch.log(torch.sigmoid(-logits)))
    expected = each.sum(1).mean() if "sum" in flags else each.mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_one_mean_makes_pillows_grey():
    levels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 40, 50), np.uint8))
    actual = EvalStage((0.25,), (0.5,))(levels)
    pillows = [np.asarray(Image.fromarray(each.permute(1, 2, 0).numpy()).convert("L")) for each in levels]
    expected = (torch.from_numpy(np.stack(pillows))[:, None] / 255 - 0.25) / 0.5
    assert actual.shape == (2, 1, 40, 50) and torch.allclose(actual, expected, atol=1e-6)


@pytest.mark.usefixtures("pictures")
def test_every_program_shows_a_grey_model_grey_images(call, make_dataset, tmp_path):
    run, data = tmp_path / "run", make_dataset(train=8)
    picture, flags = next((data / "train").rglob("*.jpg")), f"{data} {QUICK} --epochs 1 --output {tmp_path}"
    for program, line in (
        ("train", f"{flags} --in-chans 1 --token-label --experiment run"),
        ("validate", f"{data} --img-size 64 --knn {data}/train --checkpoint {run} -j 0"),
        ("validate", f"{data} --input-size 1 32 48 --checkpoint {run} -j 0"),
        ("predict", f"{picture} --embeddings {tmp_path}/it.npz --token-maps {tmp_path}/maps --checkpoint {run} -j 0"),
        ("attention", f"{picture} -o {tmp_path}/it.png --checkpoint {run}"),
        ("label", f"{data} {tmp_path}/made --top-k 2 --checkpoint {run}/last.pth.tar -j 0 -b 8"),
        ("train", f"{flags} --model-kwargs in_chans=1 --experiment taught --kd-model-name {run}"),
    ):
        ended = call(program, line)
        assert ended.code == 0, (program, ended.err)
    saved = torch.load(run / "last.pth.tar", weights_only=True)
    first = next(weight for name, weight in saved["state_dict"].items() if "conv" in name)
    assert first.shape[1] == 1 == saved["model_config"]["in_chans"] and len(saved["model_config"]["mean"]) == 1
    assert (run / "first_batch.png").exists()


@pytest.mark.parametrize("more", ["--model-dtype bfloat16", "--model test_resnet"])
def test_a_linear_probe_trains_the_heads_alone(call, data, tmp_path, more):
    call("train", f"{data} {QUICK} --freeze --epochs 2 --lr 0.1 --output {tmp_path} --experiment run {more}").ok()
    first, last = (
        torch.load(tmp_path / "run" / f"{name}.pth.tar", weights_only=True)["state_dict"]
        for name in ("checkpoint-0", "last")
    )
    changed = {name.rpartition(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert changed == ({"fc"} if "resnet" in more else {"head", "aux_head"})


def test_a_run_without_gain_ends_early_and_stays_ended(call, data, tmp_path):
    # Without a learning rate no epoch is better than the first.
    flags = f"{data} {QUICK} --lr 0 --min-lr 0 --epochs 9 --patience 2 --output {tmp_path} --experiment run"
    flags = flags.replace("--log-interval 1", "")
    ended = call("train", f"{flags} --bn-momentum 0").ok()
    assert "--patience 2" in ended.out and "done: 6 updates" in ended.out
    again = call("train", f"{flags} --bn-momentum 0 --resume auto")
    assert again.code == 0 and "done: 6 updates" in again.out and len(metrics(tmp_path / "run")) == 3


def test_the_best_epoch_is_the_first_with_the_best_score():
    state = Namespace(epoch=5, scores={0: {"top1": 1.0}, 1: {"top1": 3.0}, 3: {"top1": 3.0}, 4: {}, 7: {"top1": 9.0}})
    assert best_so_far(state, "top1") == (3.0, 2) and best_so_far(Namespace(epoch=0, scores={}), "top1") == (None, 0)
    state = Namespace(epoch=3, scores={0: {"loss": float("nan")}, 1: {"loss": 2.0}, 2: {"loss": 1.0}})
    assert best_so_far(state, "loss") == (1.0, 0)


def test_validate_takes_a_part_and_a_crop(call, trained_run, monkeypatch):
    line = f"{trained_run.data} --checkpoint {trained_run.run / 'last.pth.tar'} -j 0"
    assert "over 3 images" in call("validate", f"{line} --num-samples 3").out
    assert call("validate", f"{line} --test-pool").refused("--test-pool")
    with pytest.raises(UserError, match="--test-pool"):
        call("validate", f"{line} --test-pool --debug")
    rows = [call("validate", f"{line} --crop-mode {mode}").out.splitlines()[-1] for mode in ("center", "squash")]
    assert rows[0] != rows[1]

    # Memory for two images at a time.
    forward = torch.nn.Module.__call__

    def small(module: torch.nn.Module, *args: torch.Tensor, **named: object) -> object:
        if args and torch.is_tensor(args[0]) and len(args[0]) > 2:
            raise torch.OutOfMemoryError("no room")
        return forward(module, *args, **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", small)
    ended = call("validate", f"{line} -b 8 --retry")
    assert ended.code == 0 and "--batch-size 2 (--retry)" in ended.out and "over 8 images" in ended.out
    with pytest.raises(torch.OutOfMemoryError):
        call("validate", f"{line} -b 8 --debug")
    with pytest.raises(UserError, match="--retry works with one process, there are 2"):
        validate(VALIDATE.parse([*line.split(), "-b", "8", "--retry"]), World(0, 0, 2, torch.device("cpu")))

"""What a checkpoint holds, and whether it fits: what comes back is what was."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import load_checkpoint, resume_checkpoint
from timm.utils import CheckpointSaver
from torch import Tensor

from tests.train.small_run import arguments, build, optimizer_of, payload_of, resumed, same, save, tensors, train
from tlt.errors import UserError
from volo.checkpoint.checkpoint import CheckpointDir
from volo.checkpoint.state import TrainState
from volo.record.run_directory import changed_settings


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lookahead_lamb"])
def test_fault_10_interrupted_run_equals_uninterrupted(tmp_path, opt):
    straight, first = build(optimizer=opt), build(optimizer=opt)
    train(straight, 3)
    train(first, 2)
    save(CheckpointDir(tmp_path, keep=2), first, 50.0)
    second, _, messages = resumed(tmp_path, optimizer=opt)
    assert same(first, second) and messages == []
    train(second, 1)
    second.scores = {}
    assert same(straight, second)


def test_fault_61_payload_is_plain_data(tmp_path):
    save(CheckpointDir(tmp_path), build(epoch=1, update=4), 1.0)
    checkpoint = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    assert checkpoint["args"] == {"lr": 0.1, "data": "/data", "scale": [0.08, 1.0]}
    assert checkpoint["model_config"] == {"img_size": [64, 48], "crop_pct": 0.96}
    assert checkpoint["arch"] == "tiny"
    assert changed_settings(checkpoint["args"], {"lr": 0.2, "data": Path("/data"), "new": 1, "scale": (0.08, 1.0)}) == [
        "lr: 0.1 before, 0.2 now"
    ]
    assert changed_settings({"kd_view": "crop"}, {"kd_view": ["crop"]}) == []  # a flag that takes a list now
    endless: list[object] = []
    for _ in range(60):  # written out, 2^60 entries
        endless = [endless, endless]
    (line,) = changed_settings({"scale": endless}, {"scale": (0.08, 1.0)})
    assert line.endswith("before, (0.08, 1.0) now") and len(line) < 1000


def test_timm_reads_ours(tmp_path):
    state = build()
    train(state, 3)
    save(CheckpointDir(tmp_path), state, 1.0)
    path = str(tmp_path / "last.pth.tar")
    other = build(seed=7)
    assert resume_checkpoint(other.model, path, other.optimizer) == 3
    expected = state.state_dict()
    assert all(torch.equal(v, expected["state_dict"][k]) for k, v in other.model.state_dict().items())
    assert all(map(torch.equal, tensors(expected["optimizer"]), tensors(other.optimizer.state_dict())))
    load_checkpoint(other.model, path, use_ema=True)
    assert all(torch.equal(v, expected["state_dict_ema"][k]) for k, v in other.model.state_dict().items())
    assert not torch.equal(expected["state_dict"]["0.weight"], expected["state_dict_ema"]["0.weight"])


def test_we_resume_timms(tmp_path):
    theirs = build(scaler=False)
    train(theirs, 2)
    args = argparse.Namespace(model="tiny", lr=5.0)
    saver = CheckpointSaver(theirs.model, theirs.optimizer, args, theirs.ema, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(1, 33.0)
    ours, _, messages = resumed(tmp_path)
    assert (ours.epoch, ours.update) == (2, 8)
    assert all(map(torch.equal, tensors(theirs.state_dict()), tensors(ours.state_dict())))
    assert len(messages) == 2 and "loss scale" in messages[0]
    assert messages[1] == "set aside as superseded-*, not on the way to last.pth.tar: model_best.pth.tar"
    assert ours.optimizer.param_groups[0]["lr"] == 0.01  # arguments in a file are never applied


@pytest.mark.parametrize(("saved", "now"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_fault_15_another_optimizer_suggests_no_resume_opt(saved, now):
    first, second = build(optimizer=saved), build(seed=1, optimizer=now)
    train(first)
    payload = first.state_dict()
    before = tensors(second.state_dict())
    with pytest.raises(UserError, match=r"file.pth: its optimizer state does not fit.*--no-resume-opt"):
        second.load(payload, "file.pth")
    assert all(map(torch.equal, before, tensors(second.state_dict()))) and second.epoch == 0
    second.load(payload, "file.pth", load_optimizer=False)
    assert second.epoch == 1 and not second.optimizer.state


GROUPS = ["--weight-decay 0.05", "--weight-decay 0", "--layer-decay 0.5", "--layer-decay 0.5 --weight-decay 0"]


def grouped(flags: str, optimizer: str, frozen: bool = False, seed: int = 0) -> TrainState:
    """A state whose optimizer has the groups of train.py's flags."""
    torch.manual_seed(seed)
    model = timm.create_model("lvvit_test", num_classes=3)
    model.blocks.requires_grad_(not frozen)
    made = optimizer_of(arguments(f"--opt {optimizer} --lr 0.01 {flags}"), model)
    return TrainState(model, made, metadata={"arch": "lvvit_test"}, updates_per_epoch=2)


def stepped(state: TrainState) -> TrainState:
    for number, parameter in enumerate(state.model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number)) if parameter.requires_grad else None
    state.optimizer.step()
    return state


def states_of(state: TrainState) -> list[list[Tensor]]:
    """The optimizer's tensors for each parameter of the model, in the model's order."""
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    saved = dict(zip(parameters, state.optimizer.state_dict()["state"].values(), strict=True))
    return [tensors(saved[parameter]) for parameter in state.model.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw", "lookahead_adamw", "momentum"])
def test_optimizer_state_follows_parameters_across_groups(optimizer):
    runs = {flags: stepped(grouped(flags, optimizer)) for flags in GROUPS}
    for before, now in itertools.pairwise([*GROUPS, GROUPS[1], GROUPS[0], GROUPS[2]]):
        first, second, payload = runs[before], grouped(now, optimizer, seed=1), payload_of(runs[before])
        for group in second.optimizer.param_groups:
            group |= {"foreach": True, "lr": 0.02}
        progress = {"params": 0, "lookahead_step": 0}  # is no setting
        settings = [group | progress for group in second.optimizer.param_groups]
        assert second.load(payload, "file.pth") == []
        assert [group | progress for group in second.optimizer.param_groups] == settings
        for saved, loaded in zip(states_of(first), states_of(second), strict=True):
            assert saved and all(map(torch.equal, saved, loaded))
        stepped(second)
    with pytest.raises(UserError, match=r"state does not fit .*of other parameters.*blocks\.0\..*--no-resume-opt"):
        grouped(now, optimizer, frozen=True).load(payload, "file.pth")


def test_optimizer_state_of_other_parameters():
    state = build()
    train(state)
    for spoil, reason in (
        (lambda o: o["state"][0].update(exp_avg=torch.zeros(2, 2)), r"exp_avg of parameter 0 is \(2, 2\)"),
        (lambda o: o["state"][1]["exp_avg_sq"].fill_(float("nan")), "exp_avg_sq of parameter 1 holds NaN"),
        (lambda o: o["param_groups"].pop(), "does not fit"),
        (lambda o: o.pop("state"), "does not fit .KeyError"),
        (lambda o: o.update(param_groups=3), "does not fit .TypeError"),
    ):
        payload = payload_of(state)
        spoil(payload["optimizer"])
        with pytest.raises(UserError, match=reason):
            build(seed=1).load(payload, "file.pth")
    payload = payload_of(state)
    del payload["optimizer"]
    with pytest.raises(UserError, match="no optimizer state: .*--no-resume-opt"):
        build(seed=1).load(payload, "file.pth")


def test_ema_and_loss_scale_that_only_one_side_has():
    train(full := build())
    messages = build(seed=1, ema=False, scaler=False).load(payload_of(full), "file.pth")
    assert len(messages) == 2 and "--model-ema is off" in messages[0] and "scales no loss" in messages[1]
    train(bare := build(ema=False, scaler=False))
    state = build(seed=1)
    messages = state.load(payload_of(bare), "file.pth")
    assert len(messages) == 2 and "starts from its plain weights" in messages[0] and "loss scale" in messages[1]
    assert all(map(torch.equal, tensors(bare.model.state_dict()), tensors(state.ema.module.state_dict())))  # type: ignore[union-attr]


def of_model(name: str, **kwargs: Any) -> TrainState:
    model = timm.create_model(name, num_classes=kwargs.pop("num_classes", 10), **kwargs)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), metadata={"arch": name}, updates_per_epoch=2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: of_model("lvvit_test"), r"^checkpoint is volo_test, --model is lvvit_test: file.pth$"),
        (lambda: of_model("volo_test", num_classes=7), "10 classes, the model has 7.*--num-classes.*--finetune"),
        (lambda: of_model("volo_test", img_size=96), "pos_embed.*--img-size.*--finetune"),
    ],
)
def test_fault_15_resume_into_another_model(other, message):
    payload = payload_of(of_model("volo_test"))
    state = other()
    before = tensors(state.model.state_dict())
    with pytest.raises(UserError, match=message):
        state.load(payload, "file.pth")
    assert all(map(torch.equal, before, tensors(state.model.state_dict())))


def test_timms_first_format_counts_from_the_next_epoch():
    payload = payload_of(build(epoch=3, update=12))
    for changes, epoch in (({}, 3), ({"version": 1}, 2)):
        (state := build()).load(payload | changes | {"updates_per_epoch": 5}, "file.pth")  # of other lengths
        assert (state.epoch, state.update) == (epoch, 4 * epoch)


@pytest.mark.parametrize("wrong", [{"epoch": "x"}, {"epoch": -7}, {"update": None}, {"scores": {1: "x"}}])
def test_position_that_is_none(wrong):
    with pytest.raises(UserError, match="file.pth does not tell where its run stopped"):
        build().load(payload_of(build(epoch=1, update=4)) | wrong, "file.pth")

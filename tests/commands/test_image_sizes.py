"""Runs whose images have several sizes, and other ones in validation."""

import csv
import re
from unittest.mock import Mock

import pytest
import timm
import torch
from timm.data import resolve_data_config

from tests.commands.conftest import QUICK, metrics
from tests.commands.test_exact_resume import assert_same
from tests.labels.brute_force import brute_force
from tlt.api import StepKey
from tlt.data.backends.synthetic import SyntheticLabels, synthetic_folder
from tlt.distill import DistillLoss
from tlt.errors import UserError
from tlt.io.weights import peek_checkpoint
from volo.cluster.distributed import World
from volo.commands.hub import write_folder
from volo.config.train import TRAIN
from volo.train.architecture import requested_by
from volo.train.criterion import TokenLabelCriterion, make_criterion, step_loss
from volo.train.data import train_loader
from volo.train.distillation import load_distillation
from volo.train.model import add_dense_head, build_model, data_config_of, model_config
from volo.train.trained_model import load_frozen

SIZES = "--img-size 96 --train-img-sizes 64 80 96"


@pytest.mark.slow
def test_kill_around_a_change_of_size_keeps_the_bits(call, make_dataset, make_labels, tmp_path, stop_at):
    data = make_dataset(train=16, validation=4)
    flags = f"{QUICK} {SIZES} --train-batch-sizes 6 4 2 --train-size-schedule progressive --lr 1e-3 -b 2 --model-ema"
    flags += (
        " --variable-batch-loss-scale sqrt --val-img-size 80 --epochs 2 --token-label --drop-path 0.2 --resume auto"
    )
    flags += f" --token-label-data {make_labels(data)} {data} --output {tmp_path} --experiment"
    assert call("train", f"{flags} whole").code == 0
    log = (tmp_path / "whole" / "log.txt").read_text()
    first, last = re.findall(r"updates on images (.*)", log)
    assert "of 64 px" in first and re.fullmatch(r"4 of 96 px", last)
    stop_at({1, 3})
    assert [call("train", f"{flags} cut").code for _ in range(3)] == [130, 130, 0]
    assert_same(tmp_path / "whole", tmp_path / "cut")
    # It is evaluated at its own size, as in training.
    out = tmp_path / "validated.csv"
    flags = f"{data} --checkpoint {tmp_path}/whole/last.pth.tar -j 0 --no-use-ema --results-file {out}"
    assert call("validate", flags).code == 0
    (row,) = csv.DictReader(out.open())
    *_, summary = csv.DictReader((tmp_path / "whole" / "summary.csv").open())
    assert row["img_size"] == "80x80" and float(row["loss"]) == pytest.approx(float(summary["eval_loss"]), abs=1e-4)
    assert peek_checkpoint(tmp_path / "whole" / "last.pth.tar")["model_config"]["img_size"] == [96, 96]


def test_epoch_of_other_batches_starts_anew(call, make_dataset, tmp_path, stop_at):
    flags = f"{make_dataset(train=16, validation=4)} {QUICK} --train-img-sizes 16 32 --epochs 1 --output {tmp_path}"
    flags += " --experiment run --resume auto --train-batch-sizes"
    stop_at({2})
    assert call("train", f"{flags} 6 2").code == 130
    anew = "the updates of an epoch had other images than now: epoch 1 starts anew"
    again = call("train", f"{flags} 6 2 --dry-run").ok(), call("train", f"{flags} 2 6").ok()
    assert [anew in ended.out for ended in again] == [False, True] and "0 updates done" in again[1].out
    assert [record["update"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("model", ["volo_test", "lvvit_test", "test_vit --drop-path 0", "test_resnet --no-mix-token"])
def test_tokens_get_labels_of_what_they_show_at_every_size(model):
    flags = f"--model {model} {SIZES} --train-batch-sizes 2 2 1 --train-size-schedule progressive --epochs 4 -j 0 -b 1"
    flags += " --data-backend synthetic --token-label --token-label-data synthetic --num-classes 5 --ratio 0.4 2.5"
    args = TRAIN.parse(flags.split())
    images = synthetic_folder(9, 5)
    trained = build_model(requested_by(args))
    settings = data_config_of(requested_by(args), trained)
    trained = add_dense_head(trained, args.labels, settings["input_size"][1:])
    names = list(trained.state_dict())
    criterion = make_criterion(args, trained, settings["input_size"][1:])
    labels, world = SyntheticLabels(images, (3, 6, 7)), World(0, 0, 1, torch.device("cpu"))
    loader, seen = train_loader(args, images, labels, settings, world), set()
    for epoch in range(4):
        batches = list(loader.epoch(epoch))
        for number, batch in enumerate(batches):
            size = (batch.images.shape[2], batch.images.shape[3])
            if 0 < number < len(batches) - 1 and size in seen:
                continue
            seen.add(size)
            grid = trained.token_grid(size)
            assert isinstance(criterion, TokenLabelCriterion) and len(batch.images) == batch.key.update_samples
            window, shown = trained.token_positions(size).window(grid, size), (batch.affine, batch.visible)
            expected = brute_force(batch.labels, *shown, batch.classes, grid, 5, window=window)
            actual, counted = criterion.targets(batch), expected.weight > 0
            assert torch.allclose(actual.cls.double(), expected.cls, atol=1e-4)
            assert torch.allclose(actual.tokens.weight.double(), expected.weight, atol=1e-5)
            assert torch.allclose(actual.tokens.dense(5).double()[counted], expected.tokens[counted], atol=1e-4)
            drawn = criterion.draw(batch, StepKey(0, epoch))
            assert torch.isfinite(step_loss(criterion, None, trained, batch, drawn).total)
    assert seen == {(64, 64), (80, 80), (96, 96)} and list(trained.state_dict()) == names


def test_teacher_has_its_own_size_and_speaks_of_every_token(described):
    _, path = described("test_vit", img_size=[160, 160])
    flags = f"--model volo_test {SIZES} --train-batch-sizes auto -j 0 -b 2 --data-backend synthetic --num-classes 6"
    args = TRAIN.parse(f"{flags} --kd-model-name {path} --kd-distill-type token --kd-size 160".split())
    images, student = synthetic_folder(21, 6), build_model(requested_by(args))
    world = World(0, 0, 1, torch.device("cpu"))
    settings = data_config_of(requested_by(args), student)
    taught = load_distillation(args, student, settings, images, world, Mock())
    (part,) = taught.losses.parts
    batches, sizes = train_loader(args, images, None, settings, world).epoch(1), set()
    for batch in taught.paired(batches, 1, 0):
        view, size = taught._seen[taught.views[0]], (batch.images.shape[2], batch.images.shape[3])
        assert view.images.shape[2:] == (160, 160) and torch.equal(view.indices, batch.indices)
        alone = DistillLoss.of(student, size, part.teacher)
        for actual, expected in zip(*(each.place_shares(batch, view) for each in (part, alone)), strict=True):
            assert torch.equal(actual, expected)
        sizes.add(size)
    assert len(sizes) == 3


SWIN = "embed_dim=16 depths=[1,2] num_heads=[1,1]"
FAMILIES = {  # the smallest of each: image sizes of training and validation, constructor arguments
    "swin_tiny_patch4_window7_224": (32, 64, f"{SWIN} window_size=4"),
    "swinv2_tiny_window8_256": (32, 64, f"{SWIN} window_size=4"),
    "swinv2_cr_tiny_224": (64, 96, SWIN),
    "maxvit_pico_rw_256": (64, 128, "embed_dim=[32,32,32,32] depths=[1,1,1,1]"),
    "samvit_base_patch16_224": (64, 96, "embed_dim=32 depth=3 num_heads=2"),
    "efficientvit_m0": (96, 160, ""),
    "crossvit_9_240": (240, 288, "embed_dim=[16,16] num_heads=[1,1]"),
    "vit_tiny_patch16_224": (64, 96, "embed_dim=32 depth=1 num_heads=2"),
    "coatnet_pico_rw_224": (224, 256, None),  # None: training refuses the second size
}
SLOW = {"efficientvit_m0", "crossvit_9_240"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FAMILIES])
def test_a_run_is_measured_as_the_network_that_it_validated(name, tmp_path):
    trained, other, settings = FAMILIES[name]
    flags = f"data --model {name} --img-size {trained} --val-img-size {other} --num-classes 6"
    args = TRAIN.parse((flags + (f" --model-kwargs {settings}" if settings else "")).split())
    if settings is None:
        with pytest.raises(UserError, match=f"--model {name} does not run on images of 3 x {other} x {other}"):
            build_model(requested_by(args))
        return
    torch.manual_seed(0)
    model = build_model(requested_by(args)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # tables of positions are 0 at first
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = model_config(model, args, data_config_of(requested_by(args), model), list("abcdef"))
    torch.save({"state_dict": model.state_dict(), "model_config": config, "arch": name}, tmp_path / "run.pth.tar")
    actual = load_frozen(None, str(tmp_path / "run.pth.tar"), (3, other, other))
    images = torch.randn(2, 3, other, other)
    with torch.no_grad():
        assert torch.equal(actual.model(images), model(images)) and actual.data_config["input_size"] == (
            3,
            other,
            other,
        )
    write_folder(actual, "", tmp_path / "hub", "", "")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(theirs(images), model(images))
    assert resolve_data_config({}, model=theirs)["input_size"] == (3, other, other)

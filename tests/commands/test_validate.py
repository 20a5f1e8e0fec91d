"""validate.py on checkpoints of every kind."""

import csv
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands.conftest import QUICK, Call
from tlt.io.weights import read_checkpoint
from volo.cluster.distributed import World
from volo.commands import inference
from volo.commands.validate import RealLabels
from volo.config.settings_evaluate import VALIDATE
from volo.record.metrics import Sums
from volo.train.trained_model import choose_weights


def _row(call: Call, data: Path, checkpoint: Path, flags: str = "") -> dict[str, Any]:
    return call("validate", f"{data} -b 4 -j 0 --checkpoint {checkpoint} {flags}").ok().row


def test_all_checkpoints_of_a_folder(call, trained_run, tmp_path):
    data, run = trained_run
    table = tmp_path / "results.csv"
    ended = call("validate", f"{data} -b 4 -j 0 --checkpoint {run} --all --results-file {table}").ok()
    rows = list(csv.DictReader(table.open()))
    assert [Path(row["checkpoint"]).name for row in rows] == [
        "checkpoint-0.pth.tar", "checkpoint-1.pth.tar", "last.pth.tar", "model_best.pth.tar",
    ]  # fmt: skip
    assert rows[1]["top1"] == rows[2]["top1"] and all(row["images"] == "8" for row in rows)
    # Two epochs, two different files: each was evaluated once.
    assert ended.out.count("over 8 images") == 2
    flags = f"{data} -b 4 -j 0 --checkpoint {tmp_path / 'run'} --all --results-file"
    (shutil.copytree(run, tmp_path / "run") / "checkpoint-1.pth.tar").write_bytes(b"")  # the others are measured
    assert call("validate", f"{flags} {table}").refused(f"--results-file {table} exists already")
    assert call("validate", f"{flags} {tmp_path}/x.csv").refused(f"(--all): {tmp_path}/run/checkpoint-1.pth")
    measured = [*csv.DictReader((tmp_path / "x.csv").open())]
    assert [row["top1"] for row in measured] == [rows[number]["top1"] for number in (0, 2, 3)]


def test_the_weights_by_which_training_selected_are_the_default(tmp_path, monkeypatch):
    """Files of timm have a Namespace `args`; its train.py ranks by the average unless that is kept on the CPU."""
    entries = {"state_dict": {"a": torch.zeros(1)}, "state_dict_ema": {"a": torch.ones(1)}}
    cases = {
        "ours": ({"args": {"model_ema": True}}, True, "weights: EMA (training selected by it)"),
        "timm": ({"args": Namespace(model_ema=True, model_ema_force_cpu=False)}, True, "weights: EMA"),
        "on the CPU": (
            {"args": {"model_ema": True, "model_ema_force_cpu": True}}, False, "weights: plain (training selected by"
        ),
        "unknown": ({}, False, "weights: plain (the file does not say by which training selected); --use-ema takes"),
        "foreign": ({"args": {"lr": 1.0}}, False, "weights: plain (the file does not say"),
    }  # fmt: skip
    for name, (more, ema, said) in cases.items():
        torch.save(entries | more, tmp_path / name)
        checkpoint = read_checkpoint(tmp_path / name)
        taken, (line,) = choose_weights(checkpoint)
        assert (taken, line[: len(said)]) == (ema, said), name
        assert choose_weights({**checkpoint, "state_dict_ema": None}) == (None, [])
    monkeypatch.setattr(inference, "load_model", lambda *given, use_ema: Mock(ema=use_ema, notes=[]))
    for flags, use_ema in (("--use-ema", True), ("--no-use-ema", False), ("", None)):
        asked = VALIDATE.parse(["/data", "--checkpoint", str(tmp_path / "ours"), *flags.split()])
        assert inference.load(asked.network, asked.images.pixels).ema is use_ema


def test_real_labels_and_valid_labels(call, trained_run, tmp_path):
    data, run = trained_run
    folder = tmp_path / "imagenet" / "validation" / "green"
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        Image.new("RGB", (40, 40), (50, 180, 60)).save(folder / f"ILSVRC2012_val_{number:08d}.JPEG")
    labels, chosen = tmp_path / "real.json", tmp_path / "classes.txt"
    labels.write_text(json.dumps([[0, 1, 2, 3], [], [1]]))
    row = _row(call, tmp_path / "imagenet", run / "last.pth.tar", f"--real-labels {labels}")
    assert row["real_images"] == 2  # the second has no label and doesn't count
    assert row["real_top1"] in (50.0, 100.0) and row["real_top5"] == 100.0
    # Folder 0 is class 1 of the model: with that as the only choice everything is right.
    (tmp_path / "names.txt").write_text("green\n")
    flags = f"--valid-labels {chosen} --class-map {tmp_path / 'names.txt'}"
    for number in ("1\n", "0\n"):
        chosen.write_text(number)
        row = _row(call, tmp_path / "imagenet", run / "last.pth.tar", flags)
        assert (row["top1"], row["images"]) == (100.0, 3)


def test_real_labels_count_any_of_the_first_five():
    class Images:
        def path(self, index: int) -> str:
            return f"ILSVRC2012_val_{index + 1:08d}.JPEG"

    real = RealLabels.__new__(RealLabels)
    real.labels = {f"ILSVRC2012_val_{i + 1:08d}": {i} for i in range(7)}
    real.dataset, real.sums = Images(), Sums(("images", "top1", "top5"), World(0, 0, 1, torch.device("cpu")))
    real.add(torch.arange(7.0, 0.0, -1.0).expand(7, 7), torch.arange(7))  # class 0 first, then 1, 2, ...
    assert real.accuracy() == {"real_top1": round(100 / 7, 4), "real_top5": round(500 / 7, 4), "real_images": 7}


@pytest.mark.parametrize(
    "config",
    [{"kwargs": {"num_heads": 0}}, {"kwargs": {"act_layer": "foo"}}, {"interpolation": "foo"}, {"mean": [0.5, 0.5]}],
)
def test_wrong_model_config_names_the_file(call, described, data, config):
    small = {"embed_dim": 8, "depth": 1, "num_heads": 1}
    _, path = described("vit_tiny_patch16_224", small, img_size=(32, 32))
    saved = torch.load(path, weights_only=True)
    saved["model_config"] |= {**config, "kwargs": small | config.get("kwargs", {})}
    torch.save(saved, path)
    assert (ended := call("validate", f"{data} -j 0 --checkpoint {path}")).refused(str(path)), ended


def test_unreadable_voters_are_named(call, trained_run, tmp_path):
    shutil.copytree(trained_run.data / "train", tmp_path / "train")
    line = f"{trained_run.data} -j 0 --checkpoint {trained_run.run}/last.pth.tar --knn {tmp_path}"
    images = sorted((tmp_path / "train").rglob("*.jpg"))
    for number, image in enumerate(images):
        image.write_bytes(b"nothing")
        if number == 0:
            ended = call("validate", line)
            assert f"warning: left out {image}: " in ended.out and ended.row["train_images"] == 15
    assert call("validate", f"{line} --max-bad-images 99").refused(f"--knn: not one of 16 images in {tmp_path}/train")


def test_a_dense_head_that_was_not_trained_takes_no_part(call, data, tmp_path):
    flags = f"{data} {QUICK} --epochs 1 --token-label --dense-weight 0 --output {tmp_path} --experiment run"
    assert call("train", flags).code == 0
    path = tmp_path / "run" / "last.pth.tar"
    before = _row(call, data, path)["loss"]
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["aux_head.bias"] += 100.0 * torch.arange(4)
    torch.save(checkpoint, tmp_path / "run" / "changed.pth.tar")
    assert _row(call, data, tmp_path / "run" / "changed.pth.tar")["loss"] == before


def test_spoiled_network_is_seen_in_classes_and_tables(call, trained_run, tmp_path):
    checkpoint = torch.load(trained_run.run / "last.pth.tar", weights_only=True)
    heads = [f"{head}.{name}" for head in ("head", "aux_head") for name in ("weight", "bias")]
    weights = [checkpoint["state_dict_ema"][name] for name in heads]
    names = ["blue", "green", "grey", "red"]

    def judged(name: str) -> list[list[str]]:
        torch.save(checkpoint, tmp_path / f"{name}.pth")
        flags = f"{trained_run.data} -b 3 -j 0 --checkpoint {tmp_path}/{name}.pth --confusion {tmp_path}/{name}"
        ended = call("validate", flags).ok()
        heading, *rows = csv.reader((tmp_path / name / "confusion.csv").open())
        assert heading[1:] == [row[0] for row in rows] == names
        table = np.array([row[1:] for row in rows], int)
        assert table.sum(axis=1).tolist() == [2] * 4 and ended.row["top1"] == 100 * table.trace() / 8
        return [line.split() for line in ended.out.splitlines()]

    judged("trained")
    flags = f"{trained_run.data} --checkpoint {tmp_path}/trained.pth --confusion {tmp_path}/trained"
    assert call("validate", flags).refused(f"--confusion {tmp_path}/trained/classes.csv exists already")
    for weight in weights:
        weight.zero_()[1] += 9 * (weight.ndim == 1)
    words = judged("green")  # whatever it sees
    at = words.index(["the", "worst", "of", "4", "classes:"])
    assert words[at + 2 : at + 5] == [[name, "2", "0.00", "green", "2"] for name in ("blue", "grey", "red")]

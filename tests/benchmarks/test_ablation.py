"""The ablation: scenes whose labels are known, arms that differ in the labels' windows alone, runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.evidence import ablation, scenes
from volo import cli

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scenes")
    scenes.write_scenes(root, 20, 20)
    return root


@pytest.mark.parametrize("center", [False, True])
def test_a_cell_has_the_class_of_the_digit_that_lies_there(center: bool) -> None:
    digits = [scenes.Digit(7, 40, 20, 40), scenes.Digit(2, 4, 60, 24)]
    label_map = scenes.truth(digits, (128, 96), center)
    left, width = (16, 96) if center else (0, 128)
    expected = np.full((scenes.MAP, scenes.MAP), -1)
    for row in range(scenes.MAP):
        for column in range(scenes.MAP):
            x, y = left + (column + 0.5) * width / scenes.MAP, (row + 0.5) * 96 / scenes.MAP
            for digit in digits:
                if 0 <= x - digit.x < digit.side and 0 <= y - digit.y < digit.side:
                    expected[row, column] = digit.number
    for digit in digits:
        inside = expected == digit.number
        assert inside.any() and (label_map.ids[0][inside] == digit.number).all()
        share = 1 + scenes._FLOOR  # of the digit that covers a cell, beside the floor of each class
        assert np.allclose(label_map.values[0][inside].astype(float), np.log(share / scenes._FLOOR), atol=0.01)
    assert (label_map.values[:, -1, -1] < 0.1).all(), "the ground is no class's"


def test_scenes_are_as_told(data: Path) -> None:
    held_out = ablation.read_validation(data)
    assert held_out.images.shape == (20, 3, 64, 64) and held_out.tokens.shape == (20, 64)
    assert held_out.classes.bincount().tolist() == [2] * 10
    # The digit that names the class lies in the central square, and is no more than a part of it.
    share = (held_out.tokens == held_out.classes[:, None]).float().mean(1)
    assert (share > 0.1).all() and 0.1 < (held_out.tokens < 0).float().mean() < 0.7
    ground, digit = held_out.images.mean((1, 2, 3)), held_out.images.amax((1, 2, 3))
    assert (digit - ground > 0.5).all()


def test_arms_differ_in_their_labels_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Recorded(ablation.TrainLoader):
        def epoch(self, epoch: int, first: int = 0):  # type: ignore[no-untyped-def]
            for last, size, batch in super().epoch(epoch, first):
                seen[arm] = batch
                yield last, size, batch

    monkeypatch.setattr(ablation, "TrainLoader", Recorded)
    monkeypatch.setattr(ablation, "BATCH", 20)
    arms = [arm for arm, how in ablation.ARMS.items() if how.labels != "annotator"]
    found = {}
    for arm in arms:
        found[arm] = ablation.train(data, arm, 3, 1)
    same = seen["true"]
    assert all(torch.equal(seen[arm].images, same.images) for arm in arms)
    assert torch.equal(seen["other"].affine, same.affine.roll(1, 0))
    assert not torch.allclose(seen["published"].affine, same.affine)
    assert (seen["center"].labels.area[:, 2:] < 1).any(1).all() and (
        seen["center-stretched"].labels.area[:, 2:] == 1
    ).all()
    assert seen["class"].labels is None and not found["class"]["tokens"]
    assert len({found[arm]["loss"][0] for arm in arms}) == len(arms)
    again = ablation.train(data, arm := "true", 3, 1)
    assert all(again[name] == found["true"][name] for name in ("top1", "loss", "tokens"))


def test_runs_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "VALIDATION", 20)
    monkeypatch.setattr(ablation, "prepare", lambda *_: None)
    arms, top1 = ["true", "published", "other"], {"true": 50.0, "published": 40.0, "other": 30.0}
    trained: list[tuple[str, int]] = []

    def train(data: Path, arm: str, seed: int, epochs: int) -> dict[str, list[float]]:
        if len(trained) == 4:
            raise KeyboardInterrupt
        trained.append((arm, seed))
        return {"top1": [0.0, top1[arm] + 10 * seed + (arm == "other") * seed], "loss": [1.0], "tokens": []}

    monkeypatch.setattr(ablation, "train", train)
    line = ["ablation", "--output", str(tmp_path), "--seeds", "2", "--epochs", "2", "--jobs", "1", "--arms", *arms]
    assert cli.run("benchmark", line) == 130
    assert trained == [(arm, seed) for arm in arms[:2] for seed in range(2)]
    trained[:] = [("", 0)]
    capsys.readouterr()
    assert cli.run("benchmark", [*line, "--json", "--plot", str(tmp_path / "curves.png")]) == 0
    assert trained[1:] == [("other", 0), ("other", 1)]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    effects = {each["arm"]: each for each in found["effects"]}
    assert len(found["runs"]) == 6 and effects["published"]["difference"] == -10 and effects["published"]["p"] is None
    # Differences -20 and -19: t = -39, one degree of freedom.
    assert effects["other"]["p"] == pytest.approx(2 * np.arctan(1 / 39) / np.pi)
    assert effects["other"]["interval"] == pytest.approx([-19.5 - 12.7062 * 0.5, -19.5 + 12.7062 * 0.5], abs=1e-3)
    assert (tmp_path / "curves.png").stat().st_size > 5000
    assert cli.run("benchmark", [*line[:-3], "published-window"]) == 2
    assert "--arms published-window" in capsys.readouterr().err

"""The ablation: scenes whose labels are known, arms that differ in the labels alone, runs that go on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import ablation
from benchmarks.ablation import ARMS, FLOOR, MAP, Digit
from tests.benchmarks.conftest import benchmark


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scenes")
    ablation.write_scenes(root, 20, 20)
    return root


def test_a_cell_has_the_class_of_the_digit_that_lies_there():
    digits = [Digit(7, 40, 20, 40), Digit(2, 4, 60, 24)]
    values, ids = ablation.truth(digits, (128, 96))
    expected = np.full((MAP, MAP), -1)
    for row, column in np.ndindex(MAP, MAP):
        x, y = (column + 0.5) * 128 / MAP, (row + 0.5) * 96 / MAP
        for digit in digits:
            if 0 <= x - digit.x < digit.side and 0 <= y - digit.y < digit.side:
                expected[row, column] = digit.number
    for digit in digits:
        inside = expected == digit.number
        assert inside.any() and (ids[0][inside] == digit.number).all()
        assert np.allclose(values[0][inside].astype(float), np.log((1 + FLOOR) / FLOOR), atol=0.01)
    assert (values[:, -1, -1] < 0.1).all(), "the ground is no class's"


def test_scenes_are_as_described(data):
    images, classes, tokens = torch.load(data / "validation.pt")
    assert images.shape == (20, 3, 64, 64) and tokens.shape == (20, 64)
    assert classes.bincount().tolist() == [2] * 10
    # The digit that names the class lies in the central square, and is no more than a part of it.
    share = (tokens == classes[:, None]).float().mean(1)
    assert (share > 0.1).all() and 0.1 < (tokens < 0).float().mean() < 0.7
    assert len(list((data / "train").rglob("*.png"))) == len(list((data / "train-truth").rglob("*.pt"))) == 20


def test_arms_differ_in_their_labels_alone(data, monkeypatch):
    seen: dict[str, Any] = {}
    targets = ablation.tlt.TokenLabelLoss.targets

    def recorded(self: Any, batch: Any) -> Any:
        seen[arm] = batch
        return targets(self, batch)

    monkeypatch.setattr(ablation.tlt.TokenLabelLoss, "targets", recorded)
    monkeypatch.setattr(ablation, "BATCH", 20)
    result = {}
    for arm in (each for each, how in ARMS.items() if how.labels != "annotator"):
        result[arm] = ablation.train(data, arm, 3, 1)
    same = seen["true"]
    assert all(torch.equal(batch.images, same.images) for batch in seen.values())
    assert torch.equal(seen["other"].affine, same.affine.roll(1, 0))
    assert not torch.allclose(seen["published"].affine, same.affine)
    assert seen["class"].labels is None and not result["class"]["tokens"]
    assert result["true"] == ablation.train(data, arm := "true", 3, 1)


def test_runs_go_on_where_they_stopped_and_are_compared_by_seed(tmp_path, monkeypatch, measure, capsys):
    top1 = {"true": 50.0, "published": 40.0, "other": 30.0}
    trained: list[tuple[str, int]] = []

    def train(data: Path, arm: str, seed: int, epochs: int) -> dict[str, list[float]]:
        trained.append((arm, seed))
        return {"top1": [0.0, top1[arm] + 10 * seed + (arm == "other") * seed], "tokens": []}

    monkeypatch.setattr(ablation, "train", train)
    monkeypatch.setattr(ablation, "prepare", lambda *_: None)
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    line = f"ablation --directory {tmp_path} --seeds 2 --epochs 2 --jobs 1 --arms"
    assert benchmark(f"{line} true published") == 0
    assert trained == [(arm, seed) for arm in ("true", "published") for seed in range(2)]
    rows = {row["arm"]: row for row in measure(f"{line} true published other")}
    assert trained[4:] == [("other", 0), ("other", 1)] and len((tmp_path / "runs.jsonl").read_text().splitlines()) == 6
    assert rows["true"]["%"] == [55, 50, 60] and "p" not in rows["published"]  # all differences are -10
    # Differences -20 and -19: t = -39, one degree of freedom.
    assert rows["other"]["p"] == pytest.approx(2 * np.arctan(1 / 39) / np.pi)
    interval = [-19.5, -19.5 - 12.7062 * 0.5, -19.5 + 12.7062 * 0.5]
    assert rows["other"]["points (95 % interval)"] == pytest.approx(interval, abs=1e-3)

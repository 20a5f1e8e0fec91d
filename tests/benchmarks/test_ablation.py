"""The ablation: scenes whose labels are known, arms that differ in what is learned alone, runs that go on."""

import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tlt
from benchmarks import ablation
from benchmarks.ablation import ARMS, SMALL
from benchmarks.scenes import FLOOR, GROUND, MAP, Digits, Products, Scenes, Thing, truth
from tests.benchmarks.conftest import benchmark
from tlt.labels.features import FeatureInfo, FeatureWriter
from tlt.tools.cli import main as tlt_command


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenes]:
    """Scenes of digits, and of products that fill their pictures."""
    folder = tmp_path_factory.mktemp("products")
    for kind in ("train", "t10k"):
        classes = np.arange(20, dtype=np.uint8) % 10
        pictures = np.full((20, 28, 28), 255, np.uint8)
        for name, start, values in (("images-idx3", 16, pictures), ("labels-idx1", 8, classes)):
            with gzip.open(folder / f"{kind}-{name}-ubyte.gz", "wb") as file:
                file.write(bytes(start) + values.tobytes())
    return {"digits": Digits(masks=False), "products": Products(folder=str(folder))}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, Scenes]) -> dict[str, Path]:
    """Scenes with labels and features, as far as no annotator makes them."""
    roots = {name: tmp_path_factory.mktemp(name) for name in kinds}
    for name, scenes in kinds.items():
        scenes.write(roots[name], 20, 20, 64, 8)
    root = roots["products"]
    names = tlt.open_images(str(root), "train").paths
    writer = FeatureWriter(root / "features", FeatureInfo((2, 2), 4), names)
    for row in range(len(names)):
        writer.write(row, torch.ones(2, 2, 4))
    writer.finish()
    with pytest.MonkeyPatch.context() as patch:
        in_this_process = lambda words: SimpleNamespace(returncode=tlt_command(words[3:]))  # noqa: E731
        patch.setattr(ablation.subprocess, "run", in_this_process)
        ablation.prepare(kinds["products"], SMALL, root, (20, 20, 50), {"masks"}, "cpu")
    return roots


def test_a_cell_has_the_class_of_the_digit_that_lies_there():
    digits = [Thing(7, 40, 20, 40), Thing(2, 4, 60, 24)]
    values, ids = truth(digits, (128, 96))
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


@pytest.mark.parametrize(("name", "beside"), [("digits", "truth"), ("products", "drawn")])
def test_scenes_are_as_described(data, name, beside):
    images, classes, tokens = torch.load(data[name] / "validation.pt")
    assert images.shape == (20, 3, 64, 64) and tokens.shape == (20, 64)
    assert classes.bincount().tolist() == [2] * 10
    # The thing that names the class lies in the central square, and is no more than a part of it.
    share = (tokens == classes[:, None]).float().mean(1)
    assert (share > 0.1).all() and 0.1 < (tokens < 0).float().mean() < 0.7
    files = [sorted((data[name] / folder).rglob("*.p*")) for folder in ("train", f"train-{beside}")]
    assert len(files[0]) == 20 and [file.stem for file in files[0]] == [file.stem for file in files[1]]


def test_a_mask_has_the_class_that_is_drawn_in_each_pixel(kinds):
    products = kinds["products"]
    pictures, classes = products.pictures(False)
    for number in range(20):
        scale = 3 if number == 0 else 1
        scenes = replace(products, scale=scale)
        drawn, again = (scenes.draw(np.random.default_rng(number), pictures, classes, number, False) for _ in range(2))
        height, width = drawn.mask.shape
        assert drawn.pixels.shape == (height, width, 3) and (drawn.pixels == again.pixels).all()
        assert {96 * scale <= side <= 160 * scale and side % 16 == 0 for side in (width, height)} == {True}
        expected = np.full((height, width), GROUND)
        for thing in drawn.things:  # whose pictures are full
            expected[thing.y : thing.y + thing.side, thing.x : thing.x + thing.side] = thing.number
        assert (drawn.mask == expected).all()
        large, *others = drawn.things
        assert large.number == number // 2 % 10 and len({thing.number for thing in drawn.things}) == len(others) + 1
        short = min(width, height)
        for start, length in ((large.x, width), (large.y, height)):
            assert (length - short) // 2 <= start and start + large.side <= (length - short) // 2 + short
        assert 0.49 * short < large.side < 0.66 * short and all(thing.side < 0.31 * short for thing in others)
        # Beside the mask nothing but ground is drawn.
        generator = np.random.default_rng(number)
        ground = scenes.ground(generator, scenes.size(generator, number)).clip(0, 255).astype(np.uint8)
        assert (drawn.pixels[expected == GROUND] == ground[expected == GROUND]).all()


def test_arms_differ_in_what_is_learned_alone(data, monkeypatch):
    seen: dict[tuple[str, str], Any] = {}
    targets = ablation.tlt.TokenLabelLoss.targets

    def recorded(self: Any, batch: Any) -> Any:
        seen[scenes, arm] = batch
        return targets(self, batch)

    monkeypatch.setattr(ablation.tlt.TokenLabelLoss, "targets", recorded)
    result = {}
    for scenes, arm in ((scenes, arm) for scenes, arms in ARMS.items() for arm in arms):
        if ARMS[scenes][arm].labels != "annotator":
            train = partial(ablation.train, data[scenes], ARMS[scenes][arm], 3, 1, SMALL, "cpu")
            result[scenes, arm] = train()
    for (kind, _), batch in seen.items():
        assert torch.equal(batch.images, seen[kind, "class"].images)
    same = seen["digits", "true"]
    assert torch.equal(seen["digits", "other"].affine, same.affine.roll(1, 0))
    assert not torch.allclose(seen["digits", "published"].affine, same.affine)
    assert seen["digits", "class"].labels is None and not result["digits", "class"]["tokens"]
    assert seen["products", "features"].labels is None and seen["products", "features"].features
    assert seen["products", "masks"].labels.void is not None and len(result["products", "masks"]["tokens"]) == 1
    assert train()["top1"] == result[scenes, arm]["top1"]


def test_runs_go_on_where_they_stopped_and_are_compared_by_seed(tmp_path, monkeypatch, measure, capsys):
    top1 = {"true": 50.0, "published": 40.0, "other": 30.0}
    trained: list[tuple[str, int]] = []

    def train(data: Path, how: Any, seed: int, *_: Any) -> dict[str, Any]:
        (arm,) = (arm for arm in top1 if ARMS["digits"][arm] == how)
        trained.append((arm, seed))
        return {"top1": [0.0, top1[arm] + 10 * seed + (arm == "other") * seed], "tokens": [], "cpu_s": 7.0}

    monkeypatch.setattr(ablation, "train", train)
    monkeypatch.setattr(ablation, "prepare", lambda *_: None)
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    line = f"ablation --directory {tmp_path} --seeds 2 --epochs 2 --jobs 1 --arms"
    assert benchmark(f"{line} true published") == 0
    assert trained == [(arm, seed) for seed in range(2) for arm in ("true", "published")]
    rows = {row["arm"]: row for row in measure(f"{line} true published other")}
    assert trained[4:] == [("other", 0), ("other", 1)] and len((tmp_path / "runs.jsonl").read_text().splitlines()) == 6
    assert rows["true"]["%"] == [55, 50, 60] and "p" not in rows["published"]  # all differences are -10
    assert rows["true"]["CPU s"] == [7, 7, 7]
    # Differences -20 and -19: t = -39, one degree of freedom.
    assert rows["other"]["p"] == pytest.approx(2 * np.arctan(1 / 39) / np.pi)
    interval = [-19.5, -19.5 - 12.7062 * 0.5, -19.5 + 12.7062 * 0.5]
    assert rows["other"]["points (95 % interval)"] == pytest.approx(interval, abs=1e-3)

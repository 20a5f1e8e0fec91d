"""Validation sees every image once, with timm's pixels, for any backend, ranks, workers and batch size; or says so."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

from tests.data.conftest import encoded, write
from tests.data.exactness.conftest import BROKEN, IMAGES, SETTINGS, WAYS, Way, check_levels, parsed
from tlt.data.loader import EvalLoader
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.record.metrics import Evaluation
from volo.train import data as train_data
from volo.train.data import validation_loader
from volo.train.loop import evaluate
from volo.train.precision import Precision

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs

CPU = torch.device("cpu")
READABLE = IMAGES - len(BROKEN)
# Batches of one image and of more than a rank has; ranks that have not equally many; ratios that cut and that pad.
CASES = [
    ("torchvision", Way(), 64, 0.96),
    ("torchvision", Way(ranks=4, kind="shards"), 5, 1.15),
    ("pil", Way(workers=1), 1, 1.15),
    ("pil", Way(ranks=3, workers=2), 5, 0.96),
    ("dali-cpu", Way(ranks=4, workers=4), 3, 1.15),
    ("dali-cpu", Way(workers=3, kind="shards"), 3, 0.96),
]


def settings(crop_pct: float) -> dict[str, Any]:
    return {**SETTINGS, "crop_pct": crop_pct, "crop_mode": "center", "interpolation": "bicubic"}


def loaders(
    root: Path, backend: str, way: Way, batch_size: int, crop_pct: float
) -> Iterator[tuple[EvalLoader, ImageSource]]:
    """The loader of each rank, with the images."""
    args = parsed(root, backend, way)
    images = train_data.open_images(args.data_dir, "train", args.dataset)
    for rank in range(way.ranks):
        world = World(rank, rank, way.ranks, CPU)
        yield validation_loader(args, images, batch_size, settings(crop_pct), world), images


@functools.cache
def expected(root: Path, crop_pct: float) -> dict[str, np.ndarray]:
    """Name -> float32 pixels, of timm's transform."""
    transform = create_transform(
        SETTINGS["input_size"], interpolation="bicubic", crop_pct=crop_pct, mean=SETTINGS["mean"], std=SETTINGS["std"]
    )
    names = {str(path.relative_to(root / "train")) for path in (root / "train").glob("*/*")} - {*BROKEN}
    return {name: transform(Image.open(root / "train" / name).convert("RGB")).numpy() for name in names}


@pytest.mark.parametrize(("backend", "way", "batch_size", "crop_pct"), CASES, **WAYS)
def test_images_are_seen_once(backend: str, way: Way, batch_size: int, crop_pct: float, data: Path, root: Path) -> None:
    seen, off, left_out = list[str](), list[np.ndarray](), 0
    for loader, images in loaders(root, backend, way, batch_size, crop_pct):
        before = len(off)
        for batch in loader:
            names = [images.paths[index] for index in batch.indices.tolist()]
            seen += names
            assert [f"c{number}" for number in batch.classes.tolist()] == [name.partition("/")[0] for name in names]
            theirs = np.stack([expected(data, crop_pct)[name] for name in names])
            off.append(abs(batch.images.numpy() - theirs) * np.float32(SETTINGS["std"])[:, None, None] * 255)
        left_out += loader.left_out
        assert len(off) - before == len(loader) or batch_size == 1  # whose unreadable images make no batch
    assert sorted(seen) == sorted(expected(data, crop_pct)) and left_out == len(BROKEN)
    check_levels(np.concatenate(off), backend)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 4))


def evaluated(loader: EvalLoader) -> Evaluation:
    return evaluate(classifier(), loader, Precision(CPU, None), World(0, 0, 1, CPU))


def test_accuracy_is_over_every_readable_image(data: Path) -> None:
    (loader, _), *_ = loaders(data, "pil", Way(), 3, 0.96)
    evaluation = evaluated(loader)
    with torch.inference_mode():
        images = expected(data, 0.96)
        logits = classifier().eval()(torch.from_numpy(np.stack([*images.values()])))
    classes = torch.tensor([int(name[1]) for name in images])
    assert (evaluation.images, evaluation.unreadable) == (READABLE, len(BROKEN))
    assert evaluation.top1 == pytest.approx(100 * float((logits.argmax(1) == classes).float().mean()))
    assert evaluation.loss == pytest.approx(float(nn.functional.cross_entropy(logits, classes)), abs=2e-4)
    assert "over 26 of 28 images, 2 unreadable images left out" in str(evaluation)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Eight images, of which the second and the sixth can't be read."""
    images = {number: encoded(Image.new("RGB", (40, 40), (number, 0, 0))) for number in range(8)} | {1: b"", 5: b""}
    return write(tmp_path / "few", {f"train/c0/{number}.jpg": image for number, image in images.items()})


def test_image_read_at_the_second_try_counts(few: Path) -> None:
    """As when storage fails for a moment: no epoch counts more images than there are."""
    loader, _ = next(loaders(few, "pil", Way(), 3, 1.0))
    first = evaluated(loader)
    Image.new("RGB", (40, 40)).save(few / "train" / "c0" / "1.jpg")
    second = evaluated(loader)
    assert [(each.images, each.unreadable) for each in (first, second)] == [(6, 2), (7, 1)]


def test_rank_without_readable_images_leaves_others_theirs(few: Path) -> None:
    seen = [[batch.size for batch in loader] for loader, _ in loaders(few, "pil", Way(ranks=4), 2, 1.0)]
    assert seen == [[2], [], [2], [2]]


def test_a_pass_that_ends_early_gives_no_accuracy(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, _ = next(loaders(few, "pil", Way(), 3, 1.0))
    batches = list(loader._workers.run(loader._keys()))[:-1]
    monkeypatch.setattr(loader._workers, "run", lambda keys: iter(batches))
    with pytest.raises(UserError, match="validation saw 6 images of 8"):
        evaluated(loader)

"""Which image stands where in global batch k, with which crop, operations and label, whatever made the batch: backends,
ranks, workers, folder and shards, an epoch from its middle, in pairs, through the programs' own flags. The reference
knows no loader; pixels are also compared bit for bit with those of one rank without workers. And validation sees every
image once, with timm's pixels, or says so."""

import functools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

from tests.data.conftest import encoded, write
from tlt.data.augment.plan import Plan, make_plan
from tlt.data.batch import Batch, IndexStream
from tlt.data.dataset import LabelReader, TrainDataset
from tlt.data.loader import EvalLoader
from tlt.data.sources.source import ImageSource
from tlt.errors import UserError
from tlt.tools import cli as tlt_cli
from volo.cluster.distributed import World
from volo.config.settings_train import TrainSettings
from volo.config.train import TRAIN
from volo.record.metrics import Evaluation
from volo.train import data as train_data
from volo.train.loop import evaluate
from volo.train.precision import Precision

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs

IMAGES, GLOBAL_BATCH, SEED = 28, 8, 11  # the last global batch of an epoch holds four images
SETTINGS = {"input_size": (3, 32, 32), "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
BROKEN = ("c1/05.jpg", "c2/10.jpg")  # one is cut in its middle, one is empty


class Way(NamedTuple):
    """How batches are made."""

    ranks: int = 1
    workers: int = 0
    kind: str = "folder"
    start: int = 0  # update of the epoch
    micro_batches: int = 1  # of a rank in an update


def check_levels(off: np.ndarray, backend: str) -> None:
    """How far grey levels may be from Pillow's: both round between the two axes."""
    share, largest = (0.0, 0) if backend == "pil" else (1e-3, 5)
    assert (off > 1.01).mean() <= share and off.max() <= largest + 0.01


@pytest.fixture
def root(request: pytest.FixtureRequest, data: Path, backend: str, way: Way) -> Path:
    """The data set that a way reads, by a backend whose package is there."""
    if backend == "dali-cpu":
        pytest.importorskip("nvidia.dali")
    return data if way.kind == "folder" else request.getfixturevalue("shards")


WAYS = {"ids": lambda part: "-".join(map(str, part)) if isinstance(part, Way) else str(part)}


def parsed(data: Path, backend: str, way: Way) -> TrainSettings:
    """The settings of train.py for a way to the batches."""
    flags = f"--model volo_test --num-classes 4 --seed {SEED} --token-label --data-backend {backend} -j {way.workers}"
    flags += f" -b {GLOBAL_BATCH // (way.ranks * way.micro_batches)} --grad-accum-steps {way.micro_batches}"
    labels = data / "labels" if way.kind == "folder" else data
    return TRAIN.parse([str(data), *flags.split(), "--token-label-data", str(labels)])


def opened(args: TrainSettings) -> tuple[ImageSource, LabelReader | None]:
    """Training images and their labels."""
    images = train_data.open_images(args.images.data_dir, "train", args.images.dataset)
    return images, train_data.open_labels(args.labels.token_label_data, args.labels.maps, images, 4)[0]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train/` with four classes of images in several modes, two of them broken, and `labels/` with their maps."""
    root = tmp_path_factory.mktemp("exact")
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        name = f"c{number % 4}/{number:02d}"
        for folder in ("train", "labels"):
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
        width, height = (int(side) for side in rng.integers(36, 120, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((width, height), 3)
        suffix, mode, options = ENCODINGS[number % len(ENCODINGS)]
        coarse.convert(mode).save(root / "train" / f"{name}{suffix}", **options)
        entry = np.stack([rng.normal(5, 2, (3, 6, 6)), rng.permuted(np.indices((4, 6, 6))[0], axis=0)[:3]])
        torch.save(torch.from_numpy(entry).half(), root / "labels" / f"{name}.pt")
    whole = (root / "train" / BROKEN[0]).read_bytes()
    (root / "train" / BROKEN[0]).write_bytes(whole[: len(whole) // 2])
    (root / "train" / BROKEN[1]).write_bytes(b"")
    return root


ENCODINGS: list[tuple[str, str, dict[str, object]]] = [  # suffix, mode, options
    (".jpg", "RGB", {"quality": 90}),
    (".jpg", "RGB", {"quality": 95, "subsampling": 0}),
    (".jpg", "RGB", {"quality": 90, "subsampling": 1, "progressive": True}),
    (".jpg", "L", {}),
    (".png", "RGBA", {}),
    (".jpg", "RGB", {"quality": 80}),
    (".webp", "RGB", {"quality": 90}),
]


@pytest.fixture(scope="session")
def shards(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images and labels as shards."""
    packed = tmp_path_factory.mktemp("packed")
    flags = ["--split", "train", "--labels", str(data / "labels"), "--workers", "1"]
    assert tlt_cli.main(["pack-images", str(data), str(packed), *flags]) == 0
    return packed


CPU = torch.device("cpu")
EPOCH = 3
Rows = dict[str, np.ndarray]  # name -> (n, ...), a row for each image of a global batch, or of several

CASES = [
    ("torchvision", Way(workers=1)),
    ("torchvision", Way(ranks=4, workers=4, start=1)),
    ("torchvision", Way(ranks=2, workers=3, kind="shards")),
    ("pil", Way(workers=3, start=2)),
    ("pil", Way(ranks=2, workers=2, micro_batches=2)),
    ("pil", Way(ranks=4, kind="shards", start=2)),
    ("dali-cpu", Way(ranks=4, workers=2)),
    ("dali-cpu", Way(kind="shards")),
]


@functools.cache
def expected(data: Path) -> Rows:
    """What the epoch is, found without a loader: all that doesn't depend on the backend, and Pillow's pixels."""
    args = parsed(data, "pil", Way())
    images, config = opened(args)[0], train_data.augment_config(args.augment, SETTINGS)
    dataset, indices = TrainDataset(images, config, SEED), list[int]()
    for updates in IndexStream(IMAGES, GLOBAL_BATCH, SEED).epoch(EPOCH):
        for first in updates[0].tolist():  # others are in the broken ones' places
            candidates = [first, *(dataset.replacement(EPOCH, first, attempt) for attempt in range(9))]
            indices.append(next(index for index in candidates if images.paths[index] not in BROKEN))
    names = [images.paths[index] for index in indices]
    pictures = [Image.open(data / "train" / name).convert("RGB") for name in names]
    plan = make_plan(config, SEED, EPOCH, indices, *np.array([picture.size for picture in pictures]).T)
    values, ids = zip(*(torch.load((data / "labels" / name).with_suffix(".pt")) for name in names), strict=True)
    resized = [
        np.asarray(picture.crop((x, y, x + w, y + h)).resize((32, 32), kind))
        for picture, (x, y, w, h), kind in zip(pictures, plan.crop.tolist(), plan.interpolation.tolist(), strict=True)
    ]
    return _plan_rows(plan) | {
        "index": np.array(indices),
        "class": np.array([int(name[1]) for name in names]),
        "values": np.stack([np.asarray(each, np.float32) for each in values]),
        "ids": np.stack([np.asarray(each, np.int64) for each in ids]),
        "area": np.tile(np.float32([0, 0, 1, 1]), (len(names), 1)),
        "affine": plan.normalised_affine().astype(np.float32),
        "visible": plan.visible().astype(np.float32),
        "pixels": np.stack(resized).transpose(0, 3, 1, 2),
    }


def _plan_rows(plan: Plan) -> Rows:
    return {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name != "size"}


def updates_of_rank(args: TrainSettings, way: Way, rank: int) -> list[Rows]:
    """What a rank trains on in each update of the epoch."""
    images, labels = opened(args)
    loader = train_data.train_loader(args, images, labels, SETTINGS, World(rank, rank, way.ranks, CPU))
    loader.device_stage = lambda images, plan: images  # uint8, as the backend hands them over
    updates, parts = [], []
    for batch in loader.epoch(EPOCH, way.start):
        parts.append(_rows(batch))
        if batch.key.last:
            updates.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
            assert len(updates[-1]["index"]) == batch.key.update_samples
            parts = []
    assert not parts
    return updates


def _rows(batch: Batch) -> Rows:
    assert batch.labels is not None and batch.plan is not None
    tensors = {"index": batch.indices, "class": batch.classes, "affine": batch.affine, "visible": batch.visible}
    tensors |= {"values": batch.labels.values, "ids": batch.labels.ids, "area": batch.labels.area}
    tensors |= {"pixels": batch.images}
    return _plan_rows(batch.plan) | {name: tensor.numpy() for name, tensor in tensors.items()}


def epoch_of(data: Path, backend: str, way: Way) -> Rows:
    """The epoch from update `way.start` on: global batch after global batch, put together from its ranks."""
    args = parsed(data, backend, way)
    ranks = [updates_of_rank(args, way, rank) for rank in range(way.ranks)]
    batches = [_interleaved(update) for update in zip(*ranks, strict=True)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _interleaved(ranks: tuple[Rows, ...]) -> Rows:
    """One global batch, of which every rank has as many images: rank r every world-th from r on."""
    assert len({len(rows["index"]) for rows in ranks}) == 1
    return {name: np.stack([rows[name] for rows in ranks], axis=1).reshape(-1, *ranks[0][name].shape[1:])
            for name in ranks[0]}  # fmt: skip


@functools.cache
def alone(data: Path, backend: str) -> Rows:
    """The epoch as one rank without workers makes it."""
    return epoch_of(data, backend, Way())


@pytest.mark.parametrize(("backend", "way"), CASES, **WAYS)
def test_global_batches_are_the_same(backend, way, data, root):
    epoch, truth = epoch_of(root, backend, way), expected(data)
    images = IMAGES - way.start * GLOBAL_BATCH
    assert epoch.keys() == truth.keys() and len(epoch["index"]) == images
    for name in epoch.keys() - {"pixels"}:
        assert np.array_equal(epoch[name], truth[name][-images:]), name
    by_itself = alone(data, "torchvision" if backend == "dali-cpu" else backend)["pixels"]  # bit for bit
    assert np.array_equal(epoch["pixels"], by_itself[-images:])
    check_levels(abs(epoch["pixels"].astype(int) - truth["pixels"][-images:]), backend)


READABLE = IMAGES - len(BROKEN)
# Batches of one image and of more than a rank has; ranks that have not equally many; ratios that cut and that pad.
EVAL_CASES = [
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
    images = train_data.open_images(args.images.data_dir, "train", args.images.dataset)
    for rank in range(way.ranks):
        world = World(rank, rank, way.ranks, CPU)
        yield train_data.validation_loader(args.images.loading, images, batch_size, settings(crop_pct), world), images


@functools.cache
def eval_pixels(root: Path, crop_pct: float) -> dict[str, np.ndarray]:
    """Name -> float32 pixels, of timm's transform."""
    transform = create_transform(
        SETTINGS["input_size"], interpolation="bicubic", crop_pct=crop_pct, mean=SETTINGS["mean"], std=SETTINGS["std"]
    )
    names = {str(path.relative_to(root / "train")) for path in (root / "train").glob("*/*")} - {*BROKEN}
    return {name: transform(Image.open(root / "train" / name).convert("RGB")).numpy() for name in names}


@pytest.mark.parametrize(("backend", "way", "batch_size", "crop_pct"), EVAL_CASES, **WAYS)
def test_images_are_seen_once(backend, way, batch_size, crop_pct, data, root):
    seen, off, left_out = list[str](), list[np.ndarray](), 0
    for loader, images in loaders(root, backend, way, batch_size, crop_pct):
        before = len(off)
        for batch in loader:
            names = [images.paths[index] for index in batch.indices.tolist()]
            seen += names
            assert [f"c{number}" for number in batch.classes.tolist()] == [name.partition("/")[0] for name in names]
            theirs = np.stack([eval_pixels(data, crop_pct)[name] for name in names])
            off.append(abs(batch.images.numpy() - theirs) * np.float32(SETTINGS["std"])[:, None, None] * 255)
        left_out += loader.left_out
        assert len(off) - before == len(loader) or batch_size == 1  # whose unreadable images make no batch
    assert sorted(seen) == sorted(eval_pixels(data, crop_pct)) and left_out == len(BROKEN)
    check_levels(np.concatenate(off), backend)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 4))


def evaluated(loader: EvalLoader) -> Evaluation:
    return evaluate(classifier(), loader, Precision(CPU, None), World(0, 0, 1, CPU))


def test_accuracy_is_over_every_readable_image(data):
    (loader, _), *_ = loaders(data, "pil", Way(), 3, 0.96)
    evaluation = evaluated(loader)
    with torch.inference_mode():
        images = eval_pixels(data, 0.96)
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


def test_image_read_at_the_second_try_counts(few):
    """As when storage fails for a moment: no epoch counts more images than there are."""
    loader, _ = next(loaders(few, "pil", Way(), 3, 1.0))
    first = evaluated(loader)
    Image.new("RGB", (40, 40)).save(few / "train" / "c0" / "1.jpg")
    second = evaluated(loader)
    assert [(each.images, each.unreadable) for each in (first, second)] == [(6, 2), (7, 1)]


def test_rank_without_readable_images_leaves_others_theirs(few):
    seen = [[batch.size for batch in loader] for loader, _ in loaders(few, "pil", Way(ranks=4), 2, 1.0)]
    assert seen == [[2], [], [2], [2]]


def test_a_pass_that_ends_early_gives_no_accuracy(few, monkeypatch):
    loader, _ = next(loaders(few, "pil", Way(), 3, 1.0))
    batches = list(loader._workers.run(loader._keys()))[:-1]
    monkeypatch.setattr(loader._workers, "run", lambda keys: iter(batches))
    with pytest.raises(UserError, match="validation saw 6 images of 8"):
        evaluated(loader)

"""A data set with everything in it, opened through the programs' own flags."""

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tlt.data.dataset import LabelReader
from tlt.data.sources.source import ImageSource
from tlt.tools import cli as tlt_cli
from volo.config.args import TRAIN
from volo.train import data as train_data

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


def parsed(data: Path, backend: str, way: Way) -> Namespace:
    """The arguments of train.py for a way to the batches."""
    flags = f"--model volo_test --num-classes 4 --seed {SEED} --token-label --data-backend {backend} -j {way.workers}"
    flags += f" -b {GLOBAL_BATCH // (way.ranks * way.micro_batches)} --grad-accum-steps {way.micro_batches}"
    labels = data / "labels" if way.kind == "folder" else data
    return TRAIN.parse([str(data), *flags.split(), "--token-label-data", str(labels)])


def opened(args: Namespace) -> tuple[ImageSource, LabelReader | None]:
    """Training images and their labels."""
    images = train_data.open_images(args.data_dir, "train", args.dataset)
    return images, train_data.open_labels(args, images, 4)[0]


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

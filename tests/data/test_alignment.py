"""A token's label is the label of what the token shows.

Images whose colours encode position and label maps whose class encodes position go, as files, through the training
loader and the target maker. What a token shows is read off its pixels, what it is said to show off its label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tlt import geometry
from tlt.data.dataset import TrainDataset
from tlt.data.device_stage import DeviceStage
from tlt.data.folder import ImageFolder, scan_folder
from tlt.data.index_stream import IndexStream
from tlt.data.loader import Batch, TrainLoader
from tlt.data.plan import AugmentConfig
from tlt.data.rand_augment import RandAugmentPolicy
from tlt.label_map import LabelMap
from tlt.store import PublishedTree, write_map
from tlt.targets import make_targets

CELLS = 18  # label maps of 18 x 18
GRID = (14, 14)
PATCH = 8  # pixels per token
PIXELS = (GRID[0] * PATCH, GRID[1] * PATCH)
LOGIT = 8.0
SIZES = [(500, 375), (375, 500), (420, 420)]  # width, height
IMAGES = 6
LIMIT = 0.01  # of the side; a label cell is 0.056

Change = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class GeometryOnly(AugmentConfig):
    """Augmentation with chosen geometric operations, always applied, and nothing that changes colours."""

    operations: tuple[str, ...] = ()
    layers: int = 1

    @property
    def policy(self) -> RandAugmentPolicy | None:
        if not self.operations:
            return None
        return RandAugmentPolicy(self.operations, None, self.layers, 9.0, 0.5, 10.0, probability=1.0)


ALL = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
CASES: dict[str, dict[str, Any]] = {
    "crop": {"hflip": 0.0},
    "flip": {"hflip": 1.0},
    "vflip": {"hflip": 0.0, "vflip": 1.0},
    **{name: {"hflip": 0.0, "operations": (name,)} for name in ALL},
    "TranslateX": {"hflip": 0.0, "operations": ("TranslateX",)},
    "TranslateY": {"hflip": 0.0, "operations": ("TranslateY",)},
    "everything": {"hflip": 0.5, "vflip": 0.3, "operations": ALL, "layers": 3},
    "no_aug": {"no_aug": True},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageFolder, Path]:
    """Image and label files: red says how far right, green how far down, blue is 255; the class counts the cells."""
    root = tmp_path_factory.mktemp("alignment")
    ids = np.arange(CELLS**2, dtype=np.int32).reshape(1, CELLS, CELLS)
    label_map = LabelMap(np.full(ids.shape, LOGIT, np.float16), ids)
    for number, (width, height) in enumerate(SIZES):
        across, down = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
        pixels = np.full((height, width, 3), 255, np.uint8)
        pixels[..., 0] = np.rint(255 * across)
        pixels[..., 1] = np.rint(255 * down)[:, None]
        for folder in ("train", "labels"):
            (root / folder / f"c{number}").mkdir(parents=True)
        for i in range(IMAGES):
            Image.fromarray(pixels).save(root / "train" / f"c{number}" / f"{i}.png", compress_level=1)
            write_map(root / "labels" / f"c{number}" / f"{i}.pt", label_map, CELLS**2)
    return scan_folder(root / "train"), root / "labels"


def one_batch(
    data: tuple[ImageFolder, Path], config: AugmentConfig, workers: int = 0, compat: Sequence[str] = ()
) -> Batch:
    folder, label_root = data
    labels = PublishedTree(label_root, folder.paths, num_classes=CELLS**2)
    stage = DeviceStage(config, mean=(0, 0, 0), std=(1, 1, 1))
    stream = IndexStream(len(folder), len(folder), seed=3)
    dataset = TrainDataset(folder, config, 3, labels, compat=compat)
    training = TrainLoader(dataset, stream, stage, workers=workers)
    ((_, _, batch),) = training.epoch(1)
    return batch


def shown(batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, N, 2) x, y that the pixels of each token show, as shares of the source, and (B, N) share that isn't fill."""
    rows, cols = GRID
    patches = batch.images.unflatten(2, (rows, PATCH)).unflatten(4, (cols, PATCH)).mean((3, 5))  # (B, 3, rows, cols)
    patches = patches.flatten(2).transpose(1, 2)
    fill = 104 / 255  # blue of the mean colour
    return patches[..., :2], (patches[..., 2] - fill) / (1 - fill)


def labelled(batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, N, 2) x, y that the target of each token names, and (B, N) coverage."""
    targets = make_targets(batch.labels, batch.affine, batch.visible, batch.classes, GRID, CELLS**2, smoothing=0.0)
    assert targets.tokens is not None and targets.weight is not None
    logits = targets.tokens.double().log()
    logits = logits - logits.amin(-1, keepdim=True)  # classes that a token doesn't see have logit 0
    weights = logits / logits.sum(-1, keepdim=True).clamp(min=1e-9)
    centres = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    return weights @ torch.stack([x.flatten(), y.flatten()], -1), targets.weight


def mean_distance(batch: Batch) -> dict[tuple[int, int], float]:
    """Mean distance between shown and labelled place, for each image size, over the tokens without any fill."""
    pixels, image_share = shown(batch)
    places, coverage = labelled(batch)
    whole = (image_share > 0.99) & (coverage == 1)
    distance = (pixels - places).norm(dim=-1)
    result = {}
    for number, size in enumerate(SIZES):
        chosen = whole & (batch.classes == number)[:, None]
        assert chosen.float().mean() * len(SIZES) > 0.3
        result[size] = float(distance[chosen].mean())
    return result


@pytest.mark.parametrize("order", ["timm", "published"])
@pytest.mark.parametrize("case", CASES)
def test_labels_lie_where_the_tokens_look(data: tuple[ImageFolder, Path], case: str, order: str) -> None:
    config = GeometryOnly(PIXELS, color_jitter=None, auto_augment=None, reprob=0, aug_order=order, **CASES[case])
    batch = one_batch(data, config)
    for size, distance in mean_distance(batch).items():
        assert distance < LIMIT, (size, distance)
    coverage = labelled(batch)[1]
    assert (shown(batch)[1] - coverage).abs().mean() < 0.02
    assert (coverage < 1).any() == (case in ALL or case in ("TranslateX", "TranslateY", "everything"))


def test_worker_processes_give_the_same_geometry(data: tuple[ImageFolder, Path]) -> None:
    config = GeometryOnly(PIXELS, auto_augment=None, color_jitter=None, reprob=0, operations=ALL, layers=2)
    here, there = one_batch(data, config), one_batch(data, config, workers=1)
    assert all(torch.equal(a, b) for a, b in zip(here.tensors(), there.tensors(), strict=True))


def transposed_crop(batch: Batch) -> Tensor:
    """The published code's mistake: the window (y, x, h, w) taken for (x, y, w, h)."""
    y0, x0, y1, x1 = batch.visible.double().T.numpy()
    return torch.from_numpy(geometry.crop(x0, y0, x1 - x0, y1 - y0, 1, 1)).float()


def forgotten_flip(batch: Batch) -> Tensor:
    mirror = geometry.hflip(np.ones(batch.size), 1)
    return torch.from_numpy(geometry.compose(mirror, batch.affine.double().numpy())).float()


def wrong_rotation(batch: Batch) -> Tensor:
    """The rotation undone twice: its sign turned around, about the middle of the crop."""
    x0, y0, x1, y1 = batch.visible.double().T.numpy()
    plain = geometry.crop(x0, y0, x1 - x0, y1 - y0, 1, 1)
    turned = geometry.compose(batch.affine.double().numpy(), geometry.invert(plain))
    return torch.from_numpy(geometry.compose(geometry.invert(turned), plain)).float()


@pytest.mark.parametrize(
    ("case", "mistake", "least"),
    [("crop", transposed_crop, 0.08), ("flip", forgotten_flip, 0.15), ("Rotate", wrong_rotation, 0.08)],
)
def test_mistakes_are_seen(data: tuple[ImageFolder, Path], case: str, mistake: Change, least: float) -> None:
    """What the test above measures is large when the label follows another geometry than the image."""
    config = GeometryOnly(PIXELS, auto_augment=None, color_jitter=None, reprob=0, **CASES[case])
    batch = one_batch(data, config)
    mistaken = replace(batch, affine=mistake(batch), visible=torch.tensor([[-9.0, -9.0, 9.0, 9.0]] * batch.size))
    right, wrong = mean_distance(batch), mean_distance(mistaken)
    for size in SIZES:
        assert right[size] < LIMIT and wrong[size] > least, (size, right[size], wrong[size])


def test_compat_makes_the_published_mistakes_and_no_others(data: tuple[ImageFolder, Path]) -> None:
    """In the labels: pixels stay the same."""
    crop = GeometryOnly(PIXELS, auto_augment=None, color_jitter=None, reprob=0, hflip=0.0)
    right, wrong = one_batch(data, crop), one_batch(data, crop, compat=("label-crop",))
    assert torch.equal(right.images, wrong.images)
    torch.testing.assert_close(wrong.affine, transposed_crop(right))
    assert min(mean_distance(wrong).values()) > 0.08

    moved = GeometryOnly(
        PIXELS, auto_augment=None, color_jitter=None, reprob=0, aug_order="published", operations=("Rotate",)
    )
    right, cells = one_batch(data, moved), one_batch(data, moved, compat=("label-affine",))
    assert torch.equal(right.images, cells.images) and (cells.affine[:, 0, 1] == 0).all()
    assert right.labels is not None and cells.labels is not None
    assert not torch.equal(right.labels.ids, cells.labels.ids)
    best, moved_cells = mean_distance(right), mean_distance(cells)
    # Half a cell off where images are square, more where they are not.
    assert all(best[size] < LIMIT < moved_cells[size] < 0.1 for size in SIZES)
    assert moved_cells[(420, 420)] < min(moved_cells[(500, 375)], moved_cells[(375, 500)])

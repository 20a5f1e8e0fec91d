"""Files of position-coded images and label maps, and batches of them through the training pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from tests.data.alignment.position_code import Size, ramp_image
from tlt.data.augment.device_stage import DeviceStage
from tlt.data.augment.index_stream import IndexStream
from tlt.data.augment.plan import AugmentConfig
from tlt.data.augment.rand_augment import RandAugmentPolicy
from tlt.data.backends.decode import Backend
from tlt.data.batch import Batch
from tlt.data.dataset import TrainDataset
from tlt.data.loader import TrainLoader
from tlt.data.sources.folder import ImageFolder, scan_folder
from tlt.label_map import LabelMap
from tlt.labels.store import LabelStore
from tlt.labels.tree import write_map

SHOTS = 8
SEED = 3
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


@dataclass(frozen=True)
class GeometryOnly(AugmentConfig):
    """Augmentation with the given geometric operations, always applied, and unchanged colours; the fill is magenta."""

    hflip: float = 0.0
    color_jitter: float | tuple[float, ...] | None = None
    auto_augment: str | None = None
    reprob: float = 0.0
    mean: tuple[float, ...] = (1.0, 0.0, 1.0)
    operations: tuple[str, ...] = ()
    layers: int = 1
    magnitude: float = 9.0
    magnitude_std: float = 0.5

    @property
    def policy(self) -> RandAugmentPolicy | None:
        if not self.operations or self.no_aug:
            return None
        bound = max(10.0, 2 * self.magnitude)  # a level cut at the bound repeats, and equal shears cancel
        return RandAugmentPolicy(
            self.operations, None, self.layers, self.magnitude, self.magnitude_std, bound, probability=1.0
        )


def write_images(root: Path, sizes: Sequence[Size], count: int, shots: int = SHOTS) -> list[ImageFolder]:
    """Write `count` images of each (width, height), a class per size, in a folder per shot."""
    for shot in range(shots):
        for number, (width, height) in enumerate(sizes):
            folder = root / str(shot) / f"{number}_{width}x{height}"
            folder.mkdir(parents=True)
            Image.fromarray(ramp_image(width, height, shot)).save(folder / "0.bmp")
            for i in range(1, count):
                (folder / f"{i}.bmp").hardlink_to(folder / "0.bmp")
    return [scan_folder(root / str(shot)) for shot in range(shots)]


def write_maps(root: Path, names: Sequence[str], label_map: LabelMap, num_classes: int) -> None:
    """Write the same label file for every image, as a published tree."""
    first = root / "map.pt"
    root.mkdir()
    write_map(first, label_map, num_classes)
    for name in names:
        target = (root / name).with_suffix(".pt")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(first)
    first.unlink()


def load_batch(
    shots: Sequence[ImageFolder],
    labels: LabelStore,
    config: AugmentConfig,
    workers: int = 0,
    backend: Backend | None = None,
    device: str = "cpu",
) -> tuple[Tensor, Batch]:
    """Return the images (S, B, 3, H, W) of all shots, grey levels in [0, 1], and the batch of the first shot."""
    batches = []
    for folder in shots:
        stage = DeviceStage(config, mean=(0, 0, 0), std=(1, 1, 1)).to(device)
        stream = IndexStream(len(folder), len(folder), seed=SEED)
        dataset = TrainDataset(folder, config, SEED, labels, backend)
        loader = TrainLoader(dataset, stream, stage, device=device, workers=workers)
        ((_, _, batch),) = loader.epoch(1)
        batches.append(batch)
    return torch.stack([batch.images for batch in batches]), batches[0]

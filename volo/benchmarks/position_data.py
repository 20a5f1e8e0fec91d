"""Files of position-coded images and label maps, and batches of them through the training pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tlt.data.dataset import TrainDataset
from tlt.data.decode import Backend
from tlt.data.device_stage import DeviceStage
from tlt.data.folder import ImageFolder, scan_folder
from tlt.data.index_stream import IndexStream
from tlt.data.loader import Batch, TrainLoader
from tlt.data.plan import AugmentConfig
from tlt.data.rand_augment import RandAugmentPolicy
from tlt.label_store import LabelStore
from tlt.store import write_map
from volo.benchmarks.position_code import Size, position_classes, position_map, ramp_image

GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "TranslateX", "TranslateY")


@dataclass(frozen=True)
class GeometryOnly(AugmentConfig):
    """Augmentation with chosen geometric operations, always applied, and nothing that changes colours; fills black."""

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
        bound = max(10.0, self.magnitude)
        return RandAugmentPolicy(
            self.operations, None, self.layers, self.magnitude, self.magnitude_std, bound, probability=1.0
        )


def write_images(root: Path, sizes: Sequence[Size], count: int) -> ImageFolder:
    """`count` images of each (width, height), a class per size."""
    for number, (width, height) in enumerate(sizes):
        folder = root / f"{number}_{width}x{height}"
        folder.mkdir(parents=True)
        image = Image.fromarray(ramp_image(width, height))
        for i in range(count):
            image.save(folder / f"{i}.png", compress_level=1)
    return scan_folder(root)


def write_maps(root: Path, folder: ImageFolder, cells: Size) -> None:
    """A label file of `cells` = (rows, columns) for every image, as a published tree."""
    label_map = position_map(*cells)
    for path in folder.paths:
        target = (root / path).with_suffix(".pt")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_map(target, label_map, position_classes(*cells))


def load_batch(
    folder: ImageFolder,
    labels: LabelStore,
    config: AugmentConfig,
    seed: int = 3,
    workers: int = 0,
    backend: Backend | None = None,
) -> Batch:
    """All images of a folder as one augmented batch, in the folder's order or not; grey levels as shares of 255."""
    stage = DeviceStage(config, mean=(0, 0, 0), std=(1, 1, 1))
    stream = IndexStream(len(folder), len(folder), seed=seed)
    loader = TrainLoader(TrainDataset(folder, config, seed, labels, backend), stream, stage, workers=workers)
    ((_, _, batch),) = loader.epoch(1)
    return batch

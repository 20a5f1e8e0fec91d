"""Data sets that torchvision reads into memory (`--dataset torch/NAME`), as images of the formats PPM and PGM.

torchvision itself reads and checks the files: the pickles of CIFAR are loaded only when their md5 is the published
one. Nothing is downloaded. The pixels lie in the memory of the main process, which forked workers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torchvision import datasets

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.source import ImageSource, numbered_names, renumber
from tlt.errors import UserError
from tlt.io.text import printable

_CLASSES = {
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "mnist": datasets.MNIST,
    "kmnist": datasets.KMNIST,
    "fashion_mnist": datasets.FashionMNIST,
}
_TEST_SPLITS = (*VALIDATION_SPLITS, "test")


@dataclass(frozen=True)
class ArrayImages(ImageSource):
    """Images that are pixels in memory.

    Attributes:
        pixels: (N, H, W, 3) or, gray, (N, H, W) uint8.
    """

    pixels: np.ndarray = field(kw_only=True)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        kind = b"P6" if self.pixels.ndim == 4 else b"P5"
        header = b"%s\n%d %d\n255\n" % (kind, self.pixels.shape[2], self.pixels.shape[1])
        return bytearray(header + self.pixels[index].tobytes())


def open_torch_dataset(name: str, data: str, split: str, class_names: Sequence[str] | None = None) -> ArrayImages:
    """A data set in torchvision's layout.

    Args:
        name: One of `tlt.data.sources.dataset_kinds.TORCH_NAMES`.
        data: Folder that holds it, torchvision's `root`.
        split: A name of the training split, of the validation split, or "test", which is the same.

    Raises:
        UserError: It is not there, damaged, or has no such split.
    """
    shown = f"--dataset torch/{name} in {printable(data)}"
    if split not in (*TRAIN_SPLITS, *_TEST_SPLITS):
        raise UserError(f"{shown}: no split {printable(split)!r}; it has train and validation")
    reader = _CLASSES[name]
    try:
        dataset = reader(data, train=split in TRAIN_SPLITS)
    except RuntimeError as error:
        raise UserError(f"{shown}: {_where(reader)} is missing or damaged: {_remedy(reader)}") from error
    own = list(dataset.classes)
    classes, names = renumber(np.asarray(dataset.targets), own, class_names, shown)
    pixels = np.asarray(dataset.data)
    paths = numbered_names((own[number] for number in np.asarray(dataset.targets)), ".ppm")
    return ArrayImages(data, paths, classes, names, own, pixels=pixels)


def _where(reader: type) -> str:
    return getattr(reader, "base_folder", f"{reader.__name__}/raw")


def _remedy(reader: type) -> str:
    url = getattr(reader, "url", None)
    return f"unpack {url} there" if url else f"put the four files of {reader.__name__} there, packed or not"

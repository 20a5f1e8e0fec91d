"""CIFAR-10 and CIFAR-100 in torchvision's layout (`--dataset torch/NAME`), as images of the format PPM.

torchvision itself reads and checks the files: the pickles are loaded only when their md5 is the published one. Nothing
is downloaded. The pixels lie in the memory of the main process, which forked workers share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torchvision import datasets

from tlt.data.sources.folder import TRAIN_SPLITS, VALIDATION_SPLITS
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.source import ImageSource, numbered_names
from tlt.errors import UserError
from tlt.io.text import printable


@dataclass
class ArrayImages(ImageSource):
    """Images that are pixels in memory, (N, H, W, 3) uint8."""

    pixels: np.ndarray = field(kw_only=True)

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        height, width = self.pixels.shape[1:3]
        return bytearray(b"P6\n%d %d\n255\n" % (width, height) + self.pixels[index].tobytes())


def open_torch_dataset(name: str, data: str, split: str, _found: object) -> ArrayImages:
    """A data set in torchvision's layout.

    Args:
        name: One of `tlt.data.sources.dataset_kinds.TORCH_NAMES`.
        data: Folder that holds it, torchvision's `root`.
        split: A name of the training split, of the validation split, or "test", which is the same.

    Raises:
        UserError: It is not there, damaged, or has no such split.
    """
    shown = f"--dataset torch/{name} in {printable(data)}"
    if split not in (*TRAIN_SPLITS, *VALIDATION_SPLITS, "test"):
        raise UserError(f"{shown}: no split {printable(split)!r}; it has train and validation")
    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        dataset = reader(data, train=split in TRAIN_SPLITS)
    except RuntimeError as error:
        raise UserError(f"{shown}: {reader.base_folder} is missing or damaged: unpack {reader.url} there") from error
    own, classes = list(dataset.classes), np.asarray(dataset.targets, np.int64)
    paths = numbered_names((own[number] for number in classes), ".ppm")
    return ArrayImages(data, paths, classes, own, own, pixels=np.asarray(dataset.data))

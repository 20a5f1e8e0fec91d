"""Makes images and label maps without a disk, for benchmarks and tests (`--data-backend synthetic`).

The colours of an image encode positions: red grows from 0 to 255 from left to right, green from top to bottom, and blue
depends on class and index. All of this is a function of the path, so that the real loader can be used.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

from tlt.data.backends.decode import Backend, Crop, Encoded, Size
from tlt.data.sources.image_file import DEFAULT_MAX_PIXELS
from tlt.data.sources.source import SYNTHETIC, ImageSource
from tlt.io.names import Names
from tlt.label_map import FULL_AREA, LabelMap


class SyntheticImages(ImageSource):
    """Images that have a path but no bytes."""

    def read(self, index: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
        return bytearray()


def synthetic_folder(length: int, num_classes: int) -> SyntheticImages:
    """Return `length` images with cycling classes, in the form of `scan_folder`."""
    classes = np.arange(length, dtype=np.int64) % num_classes
    names = [f"class_{number:05d}" for number in range(num_classes)]
    paths = [f"{names[number]}/{index:08d}" for index, number in enumerate(classes)]
    return SyntheticImages(SYNTHETIC, Names(paths), classes, names, names)


class SyntheticBackend(Backend):
    """Computes images of one size instead of decoding files. `size` is that of the images, (height, width)."""

    def __init__(self, size: Size = (375, 500)) -> None:
        super().__init__()
        self.height, self.width = size

    def open(self, path: str, data: bytearray | None = None) -> Encoded:
        return Encoded(path, bytearray(), self.width, self.height)

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        """Compute the crop. The image is linear, so every interpolation gives the colour at a pixel's centre."""
        x, y, width, height = crop or (0, 0, self.width, self.height)
        image = torch.empty(3, *size, dtype=torch.uint8)
        image[0] = _ramp(x, width, size[1], self.width)
        image[1] = _ramp(y, height, size[0], self.height)[:, None]
        image[2] = (zlib.crc32(encoded.path.rsplit("/", 1)[0].encode()) + zlib.crc32(encoded.path.encode()) % 16) % 256
        return image


class SyntheticLabels:
    """Makes label maps for `synthetic_folder`: each cell lists the image's class first, then classes that depend on the
    cell. `shape` is (k, h, w); k is limited to the number of classes."""

    def __init__(self, folder: ImageSource, shape: tuple[int, int, int] = (5, 18, 18)) -> None:
        self.classes = folder.classes
        self.num_classes = len(folder.class_names)
        self.shape = (min(shape[0], self.num_classes), shape[1], shape[2])
        k, h, w = self.shape
        logits = np.linspace(8.0, 4.0, k, dtype=np.float16)
        self._values = np.broadcast_to(logits[:, None, None], self.shape)
        self._cells = np.arange(h * w).reshape(h, w) % max(1, self.num_classes - k + 1)

    def read(self, index: int, width: int | None = None, height: int | None = None) -> LabelMap:
        first = int(self.classes[index])
        ranks = np.arange(1, self.shape[0])[:, None, None]
        ids = np.empty(self.shape, np.int32)
        ids[0] = first
        ids[1:] = (first + self._cells + ranks) % self.num_classes  # the k classes of a cell all differ
        return LabelMap(self._values.copy(), ids, FULL_AREA)

    def take_faults(self) -> list[tuple[str, str]]:
        return []


def _ramp(start: int, extent: int, pixels: int, full: int) -> Tensor:
    """Return (pixels,) uint8: 255 * coordinate / side of the image, at the pixel centres of a resized window."""
    centres = start + (torch.arange(pixels) + 0.5) * (extent / pixels)
    return (centres * (255 / full) + 0.5).to(torch.uint8)

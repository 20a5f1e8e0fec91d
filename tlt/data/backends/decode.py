"""Decodes, crops and resizes images to uint8, with antialiasing, ignoring the EXIF orientation.

Backends do only this; the device stage flips, warps and changes colours. `torchvision` decodes JPEG with simplejpeg and
resizes with torch (in about half the time); `pil` does both with Pillow, as timm does. They differ by at most one grey
level, except for about 1 in 10,000 bicubic values, where an overshoot is clipped between the two axes.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tlt.data.sources.image_file import (
    DEFAULT_MAX_PIXELS,
    JPEG_MAGIC,
    BadImage,
    as_rgb,
    check_pixel_limit,
    image_formats,
    pillow_errors,
    read_file,
    read_size,
    simplejpeg,
)

_CMYK = ("CMYK", "YCCK")  # simplejpeg converts these to RGB with errors of one grey level
DCT_SCALING_PIXELS = 8_000_000  # smaller JPEGs take as long to decode and resize scaled as whole

RESIZE_FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
_PIL_FILTERS = {name: Image.Resampling[name.upper()] for name in RESIZE_FILTERS}
TORCH_FILTERS = ("bilinear", "bicubic")

Crop = tuple[int, int, int, int]  # x, y, width, height in image pixels
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Encoded:
    """An encoded image with the size that its header states. `data` is empty for computed images."""

    path: str
    data: bytearray
    width: int
    height: int


@dataclass(frozen=True)
class Request:
    """Describes one output image: resize `crop` (None: the whole image) to `size` (h, w), then show the part from row
    `top` and column `left` on. Beyond the resized image the output has the fill colour."""

    encoded: Encoded
    crop: Crop | None
    size: Size
    interpolation: str
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class Decoded:
    """A batch of images (B, 3, H, W), uint8, in the order of the requests. `bad` has the error of each row that could
    not be decoded; such rows have arbitrary contents."""

    images: Tensor
    bad: dict[int, BadImage]


class Backend:
    """Decodes, crops and resizes images, without randomness. `decode` handles one image, `decode_batch`, which loaders
    call, a batch. Backends without threads of their own run in worker processes and can be pickled."""

    has_threads = False  # whether it decodes in threads of its own, which other processes can't share

    def __init__(self, max_pixels: int = DEFAULT_MAX_PIXELS) -> None:
        self.max_pixels = max_pixels

    def open(self, path: str, data: bytearray | None = None) -> Encoded:
        """Return an encoded image and its header's size. `path` names it in messages, and is read if `data` is None.
        Raise BadImage if the image can't be read, or is larger than `max_pixels`."""
        data = read_file(path, self.max_pixels) if data is None else data
        return Encoded(path, data, *read_size(data, self.max_pixels))

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        """Return the crop (None: the whole image) resized to `size`, (3, h, w) uint8. Raise BadImage if that fails."""
        raise NotImplementedError

    def decode_batch(self, requests: Sequence[Request], size: Size, fill: Sequence[int] = (0, 0, 0)) -> Decoded:
        """Decode all requests into outputs of one `size`."""
        images = torch.empty(len(requests), 3, *size, dtype=torch.uint8)
        bad = {}
        for row, request in enumerate(requests):
            try:
                # An image of 1 x 20000 pixels becomes too large when it is resized to a width of 224.
                check_pixel_limit(request.size[1], request.size[0], self.max_pixels)
                pixels = self.decode(request.encoded, request.crop, request.size, request.interpolation)
                images[row] = cut(pixels, request.top, request.left, size, fill)
            except BadImage as error:
                bad[row] = BadImage(str(error))  # the caught one holds its frames, and so the memory of this batch
        return Decoded(images, bad)


class PilBackend(Backend):
    """Decodes, crops and resizes with Pillow, as timm does."""

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        image = _cropped(self._rgb(encoded), crop)
        return _to_tensor(image.resize((size[1], size[0]), _PIL_FILTERS[interpolation]))

    def _rgb(self, encoded: Encoded) -> Image.Image:
        with pillow_errors(self.max_pixels), Image.open(io.BytesIO(encoded.data), formats=image_formats()) as image:
            check_pixel_limit(image.width, image.height, self.max_pixels)
            return _same_size(as_rgb(_same_size(image, encoded)), encoded)


class TorchvisionBackend(PilBackend):
    """Decodes JPEG with simplejpeg, resizes by torch (bilinear or bicubic), and does the rest like PilBackend. Its
    pixels equal those of torchvision, whose own decoders will be removed.

    With `dct_scaling`, JPEGs of more than `DCT_SCALING_PIXELS` are decoded at 1/2, 1/4 or 1/8, as long as the crop
    keeps twice the output's size. It takes half the time at 4000 x 3000. Grey levels change by 1 on average, about half
    of the difference between bilinear and bicubic.
    """

    def __init__(self, max_pixels: int = DEFAULT_MAX_PIXELS, dct_scaling: bool = False) -> None:
        super().__init__(max_pixels)
        self.dct_scaling = dct_scaling

    def decode(self, encoded: Encoded, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
        check_pixel_limit(encoded.width, encoded.height, self.max_pixels)  # decoders below check the header's size
        if interpolation not in TORCH_FILTERS:
            return super().decode(encoded, crop, size, interpolation)
        if (divisor := self.divisor(Request(encoded, crop, size, interpolation))) > 1:
            with pillow_errors(self.max_pixels):
                return _to_tensor(_scaled_jpeg(encoded, divisor, crop, size, interpolation))
        if (pixels := _decode_jpeg(encoded)) is not None:
            return resized_crop(pixels, crop, size, interpolation)
        image = _cropped(self._rgb(encoded), crop)  # crop before the copy into a tensor
        return resized_crop(_to_tensor(image), None, size, interpolation)

    def divisor(self, request: Request) -> int:
        """Return the divisor of the image's sides in decoding: 8, 4, 2, or 1 for full size."""
        encoded = request.encoded
        size = request.size
        scales = self.dct_scaling and encoded.data[:3] == JPEG_MAGIC and request.interpolation in TORCH_FILTERS
        if not scales or encoded.width * encoded.height <= DCT_SCALING_PIXELS:
            return 1
        width, height = (encoded.width, encoded.height) if request.crop is None else request.crop[2:]
        return next((n for n in (8, 4, 2) if width >= 2 * n * size[1] and height >= 2 * n * size[0]), 1)


def cut(pixels: Tensor, top: int, left: int, size: Size, fill: Sequence[int] = (0, 0, 0)) -> Tensor:
    """Return the part (3, *size) of pixels (3, h, w) uint8 from row `top` and column `left` on. Beyond the pixels it
    has the colour `fill` (red, green, blue)."""
    bottom, right = top + size[0], left + size[1]
    if top >= 0 and left >= 0 and bottom <= pixels.shape[1] and right <= pixels.shape[2]:
        return pixels[:, top:bottom, left:right]
    canvas = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, *size)
    pixels = pixels[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    canvas[:, max(-top, 0) :, max(-left, 0) :][:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return canvas


def resized_crop(pixels: Tensor, crop: Crop | None, size: Size, interpolation: str) -> Tensor:
    """Crop (None: keep all) and resize with antialiasing by one of `TORCH_FILTERS`, to within one grey level of Pillow
    (see the module's docstring): (3, H, W) uint8 -> (3, *size) uint8."""
    if crop is not None:
        x, y, width, height = crop
        pixels = pixels[:, y : y + height, x : x + width]
    if pixels.shape[1:] == size:
        return pixels
    return F.interpolate(pixels[None], size=size, mode=interpolation, align_corners=False, antialias=True)[0]


def _cropped(image: Image.Image, crop: Crop | None) -> Image.Image:
    if crop is None:
        return image
    x, y, width, height = crop
    return image.crop((x, y, x + width, y + height))


def _scaled_jpeg(encoded: Encoded, divisor: int, crop: Crop | None, size: Size, interpolation: str) -> Image.Image:
    """Decode at 1/divisor and resize exactly the crop's window, whose edges may be fractions of pixels."""
    x, y, width, height = crop or (0, 0, encoded.width, encoded.height)
    left, top, right, bottom = (edge / divisor for edge in (x, y, x + width, y + height))
    # Cut first, so that pixels outside the crop take no part in filtering, as in resizing a crop of the whole image.
    whole = math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)
    with Image.open(io.BytesIO(encoded.data), formats=("JPEG",)) as image:
        _same_size(image, encoded).draft(None, (encoded.width // divisor, encoded.height // divisor))
        cropped = image.crop(whole).convert("RGB")
    box = left - whole[0], top - whole[1], right - whole[0], bottom - whole[1]
    return cropped.resize((size[1], size[0]), _PIL_FILTERS[interpolation], box)


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _decode_jpeg(encoded: Encoded) -> Tensor | None:
    """Return the pixels of a JPEG without libjpeg warnings; None for all others, which Pillow decodes or refuses."""
    if simplejpeg is None or encoded.data[:3] != JPEG_MAGIC:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded.data)
        if colours in _CMYK or (width, height) != (encoded.width, encoded.height):
            return None
        return torch.from_numpy(simplejpeg.decode_jpeg(encoded.data)).permute(2, 0, 1)
    except ValueError:
        return None


def _same_size(image: Image.Image, encoded: Encoded) -> Image.Image:
    if image.size != (encoded.width, encoded.height):
        raise BadImage("decoded size differs from the header's")
    return image

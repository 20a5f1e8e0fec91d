"""Images of any size made smaller, or cut into tiles, in little memory: 8-bit JPEG that any backend reads fast.

libvips streams JPEG, PNG and TIFF from top to bottom, JPEG scaled by its decoder, so that memory grows with an image's
width and not with its area. Colours are those of Pillow's `convert("RGB")`, as everywhere: alpha is dropped,
EXIF orientation and colour profiles are ignored. Images that libvips would decode differently are decoded by Pillow as
a whole, if that fits into the memory that is allowed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from PIL import Image, JpegImagePlugin

from tlt.data.sources.image_file import (
    UNLIMITED,
    BadImage,
    as_rgb,
    check_length,
    image_formats,
    of_file,
    open_regular,
    pillow_errors,
)
from tlt.errors import require

if TYPE_CHECKING:
    import pyvips

DEFAULT_QUALITY = 90
DEFAULT_MEMORY = 2 * 10**9
MAX_JPEG_SIDE = 65_500  # libjpeg's

# What libvips decodes to the values that Pillow has (16 bits a channel: their upper 8, as in Pillow).
_STREAMED_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
_STREAMED_TIFF = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "group3", "group4", "tiff_ccitt", "jpeg")
_PLAIN_TIFF = {274: 1, 284: 1}  # orientation and planes: Pillow turns what is to be turned
_EXTRA_SAMPLES, _PREMULTIPLIED = 338, 1
_PHOTOMETRIC, _YCBCR = 262, 6  # libvips shows its values as if they were RGB, but for JPEG's
_STRIP_ROWS, _TILE_ROWS = 278, 323

_ROWS_AT_ONCE = 32
_PILLOW_BYTES = 16  # a pixel, at most: as decoded, as RGB, as an array, and the decoder's own

Data: TypeAlias = "bytes | bytearray | str | os.PathLike[str]"


def shrink(data: Data, max_side: int, quality: int = DEFAULT_QUALITY, memory: int = DEFAULT_MEMORY) -> bytes:
    """An image whose longer side is `max_side` at most.

    A label map stays valid for it: maps cover shares of an image.

    Args:
        data: The encoded image, or its path; a file is streamed, not read into memory.
        max_side: Pixels. An image that is no larger is returned as it is, byte for byte, and not decoded.
        quality: Of the JPEG, 1 to 100; below 90 its colours have half the resolution.
        memory: Bytes that decoding may take where it can't be streamed.

    Raises:
        BadImage: It can't be read, or only with more memory.
        UserError: pyvips is not installed.
    """
    with Picture(data, memory) as picture:
        size = fitted_size(*picture.size, max_side)
        return picture.encoded() if size == picture.size else picture.resized(size, quality)


def fitted_size(width: int, height: int, max_side: int) -> tuple[int, int]:
    """Width and height with the longer side `max_side` at most, the shorter one in proportion, at least 1."""
    longer = max(width, height, max_side)
    return max(1, round(width * max_side / longer)), max(1, round(height * max_side / longer))


def tile_starts(length: int, side: int, overlap: int = 0) -> list[int]:
    """Where the tiles of one axis begin. All are `side` long: the last one ends with the image, and overlaps more."""
    return [0] if length <= side else [*range(0, length - side, side - overlap), length - side]


@dataclass(frozen=True)
class ImageHeader:
    """An image's header, and what it costs to decode the image.

    Attributes:
        kind: For messages.
        mode: Pillow's.
        loader: The part of libvips that streams it; "": Pillow decodes it, as a whole.
        memory: Bytes that are held at once beyond a few rows.
    """

    width: int
    height: int
    kind: str
    mode: str
    loader: str
    memory: int


class Picture:
    """An encoded image, opened: its header is read, its pixels are not yet.

    Args:
        data, memory: As of `shrink`.

    Raises:
        BadImage: It can't be read.
    """

    def __init__(self, data: Data, memory: int = DEFAULT_MEMORY) -> None:
        self._memory = memory
        self._path = "" if isinstance(data, (bytes, bytearray)) else os.fspath(data)
        self._file: BinaryIO = (
            io.BytesIO(data) if isinstance(data, (bytes, bytearray)) else of_file(data, lambda: open_regular(data))
        )
        try:
            check_length(self._file.seek(0, os.SEEK_END), UNLIMITED)
            self.header = of_file(self._path, lambda: _read_header(self._file))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Picture:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as stored."""
        return self.header.width, self.header.height

    def encoded(self) -> bytes:
        """The encoded bytes. Raises BadImage if they can't be read."""

        def read() -> bytes:
            self._file.seek(0)
            return self._file.read()

        return of_file(self._path, read)

    def resized(self, size: tuple[int, int], quality: int = DEFAULT_QUALITY) -> bytes:
        """A JPEG of this width and height, neither larger than the image's.

        Photographs are within 3 grey levels of Pillow's LANCZOS with `reducing_gap=2`. The decoder of a JPEG scales it
        to no less than twice the size first, as Pillow's `draft` does, which may shift it by an eighth of a pixel.
        """
        ratio = min(self.size[0] // size[0], self.size[1] // size[1]) if self.header.loader == "jpeg" else 1
        factor = max(n for n in (1, 2, 4, 8) if n == 1 or 2 * n <= ratio)
        with _libvips_errors():
            image = self._pixels(factor)
            if factor > 1:  # libvips leaves out what is no whole pixel; it matches the images' centres
                image = image.embed(0, 0, *(round(side / factor) for side in self.size), extend="copy")
            across, down = (factor * small / large for small, large in zip(size, self.size, strict=True))
            return _jpeg(image.resize(across, vscale=down, kernel="lanczos3"), quality)

    def tiles(self, side: int, overlap: int = 0, quality: int = DEFAULT_QUALITY) -> Iterator[tuple[int, int, bytes]]:
        """Its tiles as (y, x, JPEG), from the top; y and x are those of the tile's upper left pixel.

        Each is `side` pixels high and wide, or as the image where that is smaller. A row of tiles is held in memory.
        """
        width, height = self.header.width, min(side, self.header.height)
        self._refuse_above(self.header.memory + 6 * width * height, f"a row of tiles, {width} x {height} pixels,")
        with _libvips_errors():
            image = self._pixels()
            region = _libvips().Region.new(image)
            rows, top = np.empty((height, width, image.bands), np.uint8), 0
            for y in tile_starts(self.header.height, side, overlap):
                seen = height - (y - top) if y else 0  # these rows the tiles above have shown: they can be had once
                rows = np.concatenate([rows[height - seen :], np.empty_like(rows[seen:])])
                _fetch(region, y + seen, rows[seen:])
                top = y
                for x in tile_starts(width, side, overlap):
                    yield y, x, _jpeg(_libvips().Image.new_from_array(rows[:, x : x + side]), quality)

    def _pixels(self, factor: int = 1) -> pyvips.Image:
        """8 bits, grey or RGB, to be read from top to bottom; a JPEG scaled by 1 / `factor`."""
        if self.header.mode in ("I", "F"):
            raise BadImage(f"{self.header.kind}: nobody knows which of its values is white; make it 8 or 16 bits first")
        self._refuse_above(self.header.memory, self.header.kind)
        if not self.header.loader:
            return self._by_pillow()
        options: dict[str, Any] = {"access": "sequential", "fail_on": "error"}
        if factor > 1:
            options["shrink"] = factor
        if self.header.loader == "tiff":
            options["unlimited"] = True  # strips above 50 MB too: `memory` is the limit
        load = getattr(_libvips().Image, f"{self.header.loader}load_source")
        return _as_rgb(load(self._source(), **options))

    def _source(self) -> pyvips.Source:
        if isinstance(self._file, io.BytesIO):
            return _libvips().Source.new_from_memory(self._file.getvalue())
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        return _libvips().Source.new_from_descriptor(self._file.fileno())

    def _by_pillow(self) -> pyvips.Image:
        self._file.seek(0)
        with pillow_errors(UNLIMITED), Image.open(self._file, formats=image_formats()) as image:
            pixels = np.asarray(as_rgb(image))
        return _libvips().Image.new_from_array(pixels)

    def _refuse_above(self, needed: int, what: str) -> None:
        if needed > self._memory:
            raise BadImage(
                f"{what} can't be streamed and takes up to {needed / 1e9:.1f} GB: allow that (--memory), or convert it"
            )


def _read_header(file: BinaryIO) -> ImageHeader:
    file.seek(0)
    with pillow_errors(UNLIMITED), Image.open(file, formats=image_formats()) as image:
        loader, held = _loader(image)
        width, height = image.size
        kind = f"{image.format} of {width} x {height} pixels ({image.mode})"
        return ImageHeader(width, height, kind, image.mode, loader, int(held * width * height))


def _loader(image: Image.Image) -> tuple[str, float]:
    """Which loader of libvips shows what Pillow shows (""; none), and the bytes a pixel that decoding holds."""
    info, tags = image.info, getattr(image, "tag_v2", {})
    if image.mode not in _STREAMED_MODES:
        return "", _PILLOW_BYTES
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        return "jpeg", 2 * _samples(image) if "progressive" in info else 0  # 16-bit coefficients
    if image.format == "PNG":
        return "png", 8 if info.get("interlace") else 0
    odd = _PREMULTIPLIED in tags.get(_EXTRA_SAMPLES, ())
    odd |= tags.get(_PHOTOMETRIC) == _YCBCR and info.get("compression") != "jpeg"
    plain = all(tags.get(tag, value) == value for tag, value in _PLAIN_TIFF.items()) and not odd
    if image.format == "TIFF" and plain and info.get("compression") in _STREAMED_TIFF:
        rows = tags.get(_TILE_ROWS) or tags.get(_STRIP_ROWS, image.height)  # which are decoded at once
        packed = info["compression"] != "raw"
        return "tiff", 2 * len(image.getbands()) * min(rows / image.height, 1) if packed else 0
    return "", _PILLOW_BYTES


def _samples(image: JpegImagePlugin.JpegImageFile) -> float:
    """Samples a pixel, of all components."""
    factors = [(horizontal, vertical) for _, horizontal, vertical, _ in image.layer]
    highest = max(h for h, _ in factors) * max(v for _, v in factors)
    return sum(h * v for h, v in factors) / highest


def _as_rgb(image: pyvips.Image) -> pyvips.Image:
    """What Pillow's `convert("RGB")` makes of it, 8 bits; gray stays one channel."""
    if image.format == "ushort":
        image = (image >> 8).cast("uchar")
    if image.interpretation == "cmyk":
        light = 255 - image[3]
        return (light - (image.extract_band(0, n=3) * light / 255).rint()).cast("uchar").copy(interpretation="srgb")
    return image.extract_band(0, n=1 if image.bands < 3 else 3)


def _fetch(region: pyvips.Region, y: int, rows: np.ndarray) -> None:
    """Fill `rows` (h, W, C) with those of the image from `y` on, a few at a time: they are copied on the way."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        data = region.fetch(0, y + start, part.shape[1], len(part))
        part[...] = np.frombuffer(data, np.uint8).reshape(part.shape)


def _jpeg(image: pyvips.Image, quality: int) -> bytes:
    return bytes(image.jpegsave_buffer(Q=quality, optimize_coding=True, keep="none"))


def _libvips() -> ModuleType:
    # One thread an image: images are what is done in parallel. Read by libvips when it is loaded.
    os.environ.setdefault("VIPS_CONCURRENCY", "1")
    return require("pyvips", "huge")


@contextmanager
def _libvips_errors() -> Iterator[None]:
    try:
        yield
    except _libvips().Error as error:
        # The text begins with what libvips was doing, and may hold warnings; why it failed comes last.
        raise BadImage(str(error).strip().split("\n")[-1].strip()) from error

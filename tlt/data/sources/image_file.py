"""Image files: which formats there are, the bytes and the size in the header, and what damaged ones raise.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np
from PIL import Image

from tlt.data.sources.jpeg import plain_size
from tlt.io.files import READ_FLAGS, is_machine_fault, with_retries

DEFAULT_MAX_PIXELS = 50_000_000

# More than an image of `max_pixels` takes: four channels of 16 bits are 8 bytes a pixel.
_BYTES_PER_PIXEL = 16
_BYTES_BESIDE = 2**24  # colour profiles, previews and the like

# Registered by Pillow, but stubs without a decoder, or run a program (EPS), or hold an image of another format, which
# Pillow decodes whatever size their own header states.
_NO_DECODER = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"} | {"BLP", "ICNS", "ICO", "IPTC"}

Result = TypeVar("Result")


class BadImage(Exception):
    """An image that can't be read or decoded. The text is the reason, without the path."""


@functools.cache
def image_formats() -> tuple[str, ...]:
    """Pillow's formats that can be decoded without running a program, the common ones first."""
    Image.init()
    common = ("JPEG", "PNG")
    return common + tuple(sorted(set(Image.OPEN) - set(common) - _NO_DECODER))


@functools.cache
def image_extensions() -> frozenset[str]:
    """Lower-case file suffixes of `image_formats`."""
    formats = {*image_formats(), "MPO"}
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A regular file, opened for reading. Raises OSError; BadImage: the file is of another kind, such as a pipe, which
    is not waited for."""
    # O_NONBLOCK: opening a pipe without a writer would wait for ever.
    descriptor = os.open(path, READ_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadImage("not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def of_file(path: str | os.PathLike[str], read: Callable[[], Result]) -> Result:
    """What `read` makes of an image's file. Raises MachineFault; BadImage: it is not there or not readable."""
    try:
        return with_retries(read, os.fspath(path))
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from error


def read_file(path: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
    """All bytes of a regular file.

    Raises:
        BadImage: Not there, not readable, empty, no regular file, or larger than an image of `max_pixels`. A pipe is
            refused and not waited for.
        MachineFault: It can't be read for another reason, several times in a row.
    """

    def read() -> bytearray:
        with open_regular(path) as file:
            data = bytearray(check_length(os.fstat(file.fileno()).st_size, max_pixels))
            done = file.readinto(data)
        if done < len(data):
            raise BadImage(f"file ends after {done} of {len(data)} bytes")
        return data

    return of_file(path, read)


def most_bytes(max_pixels: int = DEFAULT_MAX_PIXELS) -> int:
    """More bytes than an encoded image of `max_pixels` has."""
    return _BYTES_PER_PIXEL * max_pixels + _BYTES_BESIDE


def check_length(length: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> int:
    """The bytes of an encoded image themselves, which are asked for before they are read: a file may say that it has
    any number. Raises BadImage: there are none, or more than an image of `max_pixels` can have."""
    if not length:
        raise BadImage("empty file")
    if length > most_bytes(max_pixels):
        raise BadImage(f"{length} bytes are more than an image of --max-pixels {max_pixels} takes")
    return length


def read_file_size(path: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
    """Width and height of the image in a file, of which no more is read than its header. Raises as `read_file` and
    `read_size` do."""

    def read() -> tuple[int, int]:
        with open_regular(path) as file:
            check_length(os.fstat(file.fileno()).st_size, max_pixels)
            return _header_size(file, max_pixels)

    return of_file(path, read)


def read_size(data: bytes | bytearray, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
    """Width and height from the header, without decoding.

    Raises:
        BadImage: No known format, pixels without a range, or more than `max_pixels` of them (a small file can hold a
            huge image).
    """
    plain = plain_size(data)
    return _header_size(io.BytesIO(data), max_pixels) if plain is None else check_pixel_limit(*plain, max_pixels)


def as_rgb(image: Image.Image) -> Image.Image:
    """`image.convert("RGB")`, no copy where it is RGB; of 16 bits of gray, which that would clip at 255, the upper 8.

    Raises:
        BadImage: Its pixels are floating-point numbers or 32 bits wide: nobody knows which of them is white.
    """
    _check_range(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_range(image: Image.Image) -> None:
    # Pillow shows a PNG of 16 bits as 32 in some versions.
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        kind = "floating-point numbers" if image.mode == "F" else "32 bits wide"
        raise BadImage(f"its pixels are {kind}: nobody knows which of them is white; convert it to 8 or 16 bits")


def _header_size(file: io.BufferedReader | io.BytesIO, max_pixels: int) -> tuple[int, int]:
    with pillow_errors(max_pixels), Image.open(file, formats=image_formats()) as image:
        _check_range(image)
        width, height = image.size
    return check_pixel_limit(width, height, max_pixels)


def check_pixel_limit(width: int, height: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
    """The size itself. Raises BadImage: it is larger than `max_pixels`, or 0."""
    if width * height > max_pixels:
        raise BadImage(
            f"{width} x {height} pixels are more than --max-pixels {max_pixels} "
            "(make it smaller: tlt pack-images --max-side)"
        )
    if not width * height:
        raise BadImage(f"{width} x {height} pixels")
    return width, height


@contextmanager
def pillow_errors(max_pixels: int) -> Iterator[None]:
    """Run Pillow with room for our pixel limit and turn whatever a damaged file makes it raise into BadImage. What the
    machine fails at (`is_machine_fault`) is raised as it is."""
    try:
        with _PROCESS.settings(max_pixels):
            yield
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("no image format that Pillow can decode") from error
    except Image.DecompressionBombError as error:
        # Pillow speaks of twice the limit, from where on it refuses by itself.
        size = first_line(error).partition(" exceeds ")[0]
        raise BadImage(
            f"more than --max-pixels {max_pixels} pixels (make it smaller: tlt pack-images --max-side): {size}"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and is_machine_fault(error):
            raise
        # Pillow's decoders raise anything from OSError to struct.error, TypeError and zlib.error on damaged data.
        raise BadImage(f"{first_line(error) or type(error).__name__}") from error


class _Process:
    """Pillow's pixel limit and the filters of warnings belong to the process: of all threads that decode, the first one
    in changes them, and the last one out sets them back. Other code may run meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ExitStack()

    @contextmanager
    def settings(self, max_pixels: int | None) -> Iterator[None]:
        """No warnings of Pillow, and room for `max_pixels` (None: no limit); `check_pixel_limit` applies lower ones."""
        with self._lock:
            if not self._inside:
                self._before.enter_context(warnings.catch_warnings())
                self._before.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1
            limit = Image.MAX_IMAGE_PIXELS
            Image.MAX_IMAGE_PIXELS = None if limit is None or max_pixels is None else max(limit, max_pixels)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._before.close()


_PROCESS = _Process()


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

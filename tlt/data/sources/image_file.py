"""Reads image files: the supported formats, the bytes, the size in the header, and the errors of damaged files.

This module does not need torch.
"""

import functools
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image, PngImagePlugin

try:
    import simplejpeg
except ImportError:  # it may have no wheel for a new Python; Pillow decodes to the same pixels
    simplejpeg = None

from tlt.io.files import is_machine_fault, read_into, regular_only, with_retries

# Pillow warns about odd metadata, which we don't use, and about sizes, which --max-pixels limits.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Valid files may have more text, or a larger colour profile, than the megabyte that Pillow allows.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY

DEFAULT_MAX_PIXELS = 50_000_000
JPEG_MAGIC = b"\xff\xd8\xff"

# An upper bound for an image of `max_pixels`: four channels of 16 bits are 8 bytes per pixel.
_BYTES_PER_PIXEL = 16
_BYTES_BESIDE = 2**24  # room for colour profiles, previews and the like

# Formats that Pillow registers, but that have no decoder, run a program (EPS), or contain an image of another format,
# which Pillow decodes without regard to the size in the outer header.
_NO_DECODER = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"} | {"BLP", "ICNS", "ICO", "IPTC"}


class BadImage(Exception):
    """An image that can't be read or decoded. The text is the reason, without the path."""


@functools.cache
def image_formats() -> tuple[str, ...]:
    """Return Pillow's formats that can be decoded without running a program, the common ones first."""
    Image.init()
    common = ("JPEG", "PNG")
    return common + tuple(sorted(set(Image.OPEN) - set(common) - _NO_DECODER))


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the lower-case file suffixes of `image_formats`."""
    formats = {*image_formats(), "MPO"}
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


def read_file(path: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> bytearray:
    """Return all bytes of a regular file. Raise BadImage if the file is missing, unreadable, empty, not regular (a pipe
    is refused at once), or larger than an image of `max_pixels`, and MachineFault if reading failed several times in a
    row because of the machine."""

    def read() -> bytearray:
        with open(path, "rb", buffering=0, opener=regular_only) as file:
            data = bytearray(check_length(os.fstat(file.fileno()).st_size, max_pixels))
            if (done := read_into(data, file.fileno(), 0)) < len(data):
                raise BadImage(f"file ends after {done} of {len(data)} bytes")
            return data

    try:
        return with_retries(read, path)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from error


def most_bytes(max_pixels: int = DEFAULT_MAX_PIXELS) -> int:
    """Return an upper bound of the bytes of an encoded image of `max_pixels`."""
    return _BYTES_PER_PIXEL * max_pixels + _BYTES_BESIDE


def check_length(length: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> int:
    """Return the length of an encoded image, checked before memory is allocated, because a file may claim any length.
    Raise BadImage if it is 0, or more than an image of `max_pixels` can have."""
    if not length:
        raise BadImage("empty file")
    if length > most_bytes(max_pixels):
        raise BadImage(f"{length} bytes are more than an image of --max-pixels {max_pixels} takes")
    return length


def read_size(data: bytes | bytearray, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
    """Read width and height from the header, without decoding. Raise BadImage if the format is unknown, its pixels have
    no known range, or there are more than `max_pixels` (a small file can hold a huge image)."""
    if simplejpeg is not None and data[:3] == JPEG_MAGIC:
        with suppress(ValueError):  # Pillow then gives the reason
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            return check_pixel_limit(width, height, max_pixels)
    with pillow_errors(max_pixels), Image.open(io.BytesIO(data), formats=image_formats()) as image:
        _check_range(image)
        return check_pixel_limit(image.width, image.height, max_pixels)


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB, without a copy if it is RGB. Of 16-bit grey keep the upper 8 bits; Pillow would clip at 255.
    Raise BadImage if its pixels are floats, 32 bits wide or from FITS, so that the value of white is unknown."""
    _check_range(image)
    if image.mode.startswith("I"):
        tags = getattr(image, "tag_v2", {})  # TIFF's tags say how many bits a value has, and whether 0 is white
        levels = np.asarray(image).astype(np.int64) >> tags.get(258, (16,))[0] - 8
        image = Image.fromarray((255 - levels if tags and not tags.get(262) else levels).astype(np.uint8))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_range(image: Image.Image) -> None:
    # Pillow opens a 16-bit PGM, and in some versions PNG, as 32 bits. It ignores the zero and scale of FITS.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")) or image.format == "FITS":
        kind = {"F": "floating-point numbers", "I": "32 bits wide"}.get(image.mode, "of FITS, on a scale of its own")
        raise BadImage(f"its pixels are {kind}: nobody knows which of them is white; convert it to 8 or 16 bits")


def check_pixel_limit(width: int, height: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[int, int]:
    """Return the size. Raise BadImage if it has more than `max_pixels` pixels, or none."""
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
    """Turn every error that Pillow raises for a damaged file into BadImage, except faults of the machine
    (`is_machine_fault`). Also raise Pillow's own pixel limit to `max_pixels` permanently, if it is lower."""
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("no image format that Pillow can decode") from error
    except Image.DecompressionBombError as error:
        # Pillow raises this only beyond twice the limit, and its message states the double.
        size = _first_line(error).partition(" exceeds ")[0]
        raise BadImage(
            f"more than --max-pixels {max_pixels} pixels (make it smaller: tlt pack-images --max-side): {size}"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and is_machine_fault(error):
            raise
        # Pillow's decoders raise anything from OSError to struct.error, TypeError and zlib.error on damaged data.
        raise BadImage(f"{_first_line(error) or type(error).__name__}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

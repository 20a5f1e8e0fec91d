"""Pictures as files hold them, and what a refusal is."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tlt.errors import UserError


@contextmanager
def refuses(reason: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """What is done within ends with one line that matches."""
    with pytest.raises(kind, match=reason) as caught:
        yield
    assert "\n" not in str(caught.value)


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Write files, with the folders that their names say."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def flip(path: Path, at: int) -> None:
    """Flip a bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def picture(width: int = 96, height: int = 72) -> Image.Image:
    """Smooth shapes with noise: every frequency is there."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8)).resize((width, height), 3)
    noisy = np.asarray(coarse) + rng.normal(0, 15, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The file of an image."""
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def jpeg(mark: int) -> bytes:
    """A picture of its own size for each mark."""
    return encoded(Image.fromarray(np.random.default_rng(mark).integers(0, 256, (20, 30 + mark, 3), np.uint8)))


def without(data: bytes, marker: int) -> bytes:
    """A JPEG without a segment."""
    start = data.index(bytes([0xFF, marker]))
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


JPEG, CMYK = encoded(picture(), quality=90), encoded(picture().convert("CMYK"))
SOUND_JPEGS = {
    **{f"subsampling {kind}": encoded(picture(), subsampling=kind, quality=93) for kind in range(3)},
    "progressive": encoded(picture(), progressive=True),
    "restarts": encoded(picture(), restart_marker_blocks=2),
    "RGB": encoded(picture(), keep_rgb=True, subsampling=0),
    "L": encoded(picture().convert("L")),
    "turned": encoded(picture(), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
}
JPEGS = {  # all of 96 x 72 pixels, as Pillow and so all others show them
    **SOUND_JPEGS,
    "CMYK": CMYK,
    "CMYK without Adobe": without(CMYK, 0xEE),
    "trailing": JPEG + bytes(9),
    "damaged": JPEG[:1500] + b"\xff\xd3" + JPEG[1502:],  # a marker out of place: libjpeg warns and goes on
    "damaged scan": JPEG[:2500] + b"\x12\x34\x56\x78" + JPEG[2504:],
    "ends early": JPEG[: len(JPEG) // 2] + b"\xff\xd9",
}

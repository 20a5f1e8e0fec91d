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

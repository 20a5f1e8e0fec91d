"""`--max-pixels`: no image takes more memory than that, whatever a header or a file's length says."""

import os
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import encoded
from tlt.data.backends import create_backend
from tlt.data.backends.decode import Backend, Encoded, Request
from tlt.data.batch import Batch, BatchKey
from tlt.data.dataset import EvalDataset
from tlt.data.sources import open_images
from tlt.data.sources.image_file import BadImage, read_size
from tlt.errors import UserError

MOST_PIXELS = 1_000_000
SPARSE = 850_000_000  # bytes, more than an image of 50,000,000 pixels takes
GPU = pytest.param("dali-gpu", marks=pytest.mark.gpu(stand_in=False))


@pytest.fixture(params=["torchvision", "pil", "dali-cpu", GPU])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="the extra dali")
    return create_backend(request.param, MOST_PIXELS, device="cuda" if request.param == "dali-gpu" else "cpu")


def red(kind: str, side: int, **options: object) -> bytearray:
    return bytearray(encoded(Image.new("RGB", (side, side), "red"), kind, **options))


LARGE: dict[str, dict[str, object]] = {"JPEG": {"progressive": True}, "PNG": {}, "TIFF": {"compression": "tiff_lzw"}}


def refused(backend: Backend, image: Encoded) -> str:
    """Why it can't be decoded."""
    (error,) = backend.decode_batch([Request(image, None, (8, 8), "bilinear")], (8, 8)).bad.values()
    return str(error)


@pytest.mark.parametrize("kind", LARGE)
def test_the_header_of_what_is_decoded_decides(backend, kind):
    large, small = (red(kind, side, **LARGE[kind]) for side in (2000, 90))
    for stated in ((100, 100), (2000, 2000)):
        assert "2000 x 2000 pixels are more than --max-pixels 1000000" in refused(backend, Encoded("x", large, *stated))
    assert "differs from the header's" in refused(backend, Encoded("x", small, 100, 100))
    decoded = backend.decode_batch([Request(Encoded("x", small, 90, 90), None, (8, 8), "bilinear")], (8, 8))
    assert not decoded.bad and decoded.images[0, 0].min() > 200


def test_what_holds_an_image_of_another_format_is_not_opened():
    """An icon that says that it is of 16 x 16 pixels."""
    data = red("PNG", 2000)
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(data), 22) + data
    with pytest.raises(BadImage, match="no image format"):
        read_size(icon, MOST_PIXELS)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Python's own memory, in which the bytes of files are."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000


def sparse(path: Path, size: int = SPARSE, head: bytes | bytearray = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head)
    os.truncate(path, size)
    return path


@pytest.mark.usefixtures("little_memory")
def test_a_vast_file_is_not_read(backend, tmp_path):
    sparse(tmp_path / "train" / "c" / "0.jpg")
    sparse(tmp_path / "train" / "c" / "1.jpg", head=red("JPEG", 50))
    sparse(tmp_path / "train" / "c" / "2.webp", 100_000_000, head=red("WEBP", 50))
    (tmp_path / "train" / "c" / "3.jpg").write_bytes(red("JPEG", 50))
    images = open_images(str(tmp_path), "train")
    batch = EvalDataset(images, (16, 16), backend=backend)[BatchKey(0, (0, 1, 2, 3))]
    assert isinstance(batch, Batch) and batch.indices.tolist() == [3]
    for skipped, size in zip(batch.skipped, (SPARSE, SPARSE, 100_000_000), strict=True):
        assert skipped.reason == f"{size} bytes are more than an image of --max-pixels 1000000 takes"


@pytest.mark.usefixtures("little_memory")
def test_a_vast_member_of_a_shard_is_not_read(tmp_path):
    """Neither for the table, but in parts, nor for training."""
    folder = tmp_path / "train"
    folder.mkdir()
    (tmp_path / "cls").write_text("0")
    with tarfile.open(folder / "0.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "cls", "a.cls")
        (tmp_path / "a.jpg").write_bytes(red("JPEG", 50))
        tar.add(tmp_path / "a.jpg", "a.jpg")
        tar.add(tmp_path / "cls", "b.cls")
        head = tarfile.TarInfo("b.jpg")
        head.size = SPARSE
        tar.fileobj.write(head.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]
        end = tar.fileobj.tell() + SPARSE  # type: ignore[union-attr]
    os.truncate(folder / "0.tar", end // 512 * 512 + 2048)
    images = open_images(str(tmp_path), "train")
    assert read_size(images.read(0)) == (50, 50)
    with pytest.raises(BadImage, match=f"{SPARSE} bytes are more than an image of --max-pixels 50000000 takes"):
        images.read(1)


@pytest.mark.usefixtures("little_memory")
def test_a_vast_record_is_not_read(tmp_path):
    crc32c = pytest.importorskip("google_crc32c").value
    length = SPARSE.to_bytes(8, "little")
    masked = ((crc32c(length) >> 15 | crc32c(length) << 17) + 0xA282EAD8) & 0xFFFFFFFF
    sparse(tmp_path / "train" / "0.tfrecord", SPARSE + 16, length + masked.to_bytes(4, "little"))
    with pytest.raises(UserError, match=f"0.tfrecord: the record at byte 0 has {SPARSE} bytes, more than an image"):
        open_images(str(tmp_path), "train", "tfrecord")


def test_no_honest_image_is_refused(tmp_path):
    """The largest that their formats make of so many pixels, and small ones with much beside."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 4), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.bmp")
    Image.fromarray(noise).save(tmp_path / "b.tiff")
    Image.fromarray(noise[..., :3]).save(tmp_path / "c.jpg", quality=100, subsampling=0, icc_profile=bytes(10_000_000))
    Image.fromarray(noise).save(tmp_path / "d.png", compress_level=0)
    text = "P3 300 300 65535 " + "65535 " * (3 * 300 * 300)
    (tmp_path / "e.ppm").write_text(text)
    for path in sorted(tmp_path.iterdir()):
        opened = create_backend("torchvision", max_pixels=300 * 300).open(str(path))
        assert (opened.width, opened.height) == (300, 300)

"""The markers of a JPEG against what Pillow reads, and what must not pass as whole."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.backends.test_decode import picture
from tlt.data.sources.image_file import image_formats
from tlt.data.sources.jpeg import BASELINE, PROGRESSIVE, Frame, plain_size, whole_frame


def saved(mode: str = "RGB", size: tuple[int, int] = (96, 72), **options: object) -> bytes:
    buffer = io.BytesIO()
    picture(*size).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(96, 72), (1, 1), (3, 700)])
def test_frame_is_what_pillow_reads(mode: str, size: tuple[int, int]) -> None:
    for options in (
        {},
        {"progressive": True},
        {"restart_marker_blocks": 1},
        {"exif": bytes(60000), "comment": "x" * 999},
    ):
        data = saved(mode, size, **options)
        with Image.open(io.BytesIO(data)) as image:
            process = PROGRESSIVE if "progressive" in options else BASELINE
            expected = Frame(process, 8, image.height, image.width, image.layers)  # type: ignore[attr-defined]
        assert whole_frame(data) == expected == whole_frame(bytearray(data)) == whole_frame(data + b"more")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_a_part_is_not_whole(options: dict[str, object]) -> None:
    data = saved(**options)
    assert not any(whole_frame(data[:length]) for length in range(len(data)))


def test_a_progressive_file_without_its_last_scans_is_not_whole() -> None:
    """Its markers are sound; libjpeg makes up what is missing, from version 2.1 on of more neighbours."""
    data = saved(progressive=True)
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    assert len(scans) > 5 and not any(whole_frame(data[:at] + b"\xff\xd9") for at in scans)


def test_fill_before_a_marker_is_none_of_it() -> None:
    data = saved()
    table = data.index(b"\xff\xdb")
    filled = data[:table] + b"\xff\xff" + data[table:-2] + b"\xff" + data[-2:]
    Image.open(io.BytesIO(filled)).load()
    assert whole_frame(filled) == whole_frame(data)


@pytest.mark.parametrize("marker", [0xC3, 0xC9, 0xCC, 0xDC, 0xD8, 0x01, 0x4A])
def test_markers_that_are_for_others(marker: int) -> None:
    """Lossless and arithmetic coding, a height told late, a second start, none of the standard's."""
    data = saved()
    scan = data.index(b"\xff\xda")
    assert whole_frame(data[:scan] + bytes((0xFF, marker, 0, 2)) + data[scan:]) is None
    middle = (scan + len(data)) // 2
    assert whole_frame(data[:middle] + bytes((0xFF, marker)) + data[middle:]) is None


def test_other_files_are_none() -> None:
    assert not any(whole_frame(data) for data in (b"", b"\xff", b"\xff\xd8", b"\x89PNG\r\n\x1a\n" * 9, bytes(99)))


def opened_by_pillow(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data), formats=image_formats()) as image:
        assert image.format == "JPEG"
        return image.size


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"subsampling": 2}])
def test_the_size_of_plain_files_is_pillows(mode: str, options: dict[str, object]) -> None:
    for size in ((96, 72), (1, 1), (3, 700), (300, 2)):
        data = saved(mode, size, **options)
        assert plain_size(data) == plain_size(bytearray(data)) == size == opened_by_pillow(data)


def test_what_is_not_plain_is_left_to_pillow() -> None:
    plain = saved()
    others = [saved("CMYK"), saved(exif=bytes(100)), saved(comment="x"), b"", b"\xff\xd8\xff", plain[1:], plain[:200]]
    assert plain_size(plain) and not any(map(plain_size, others))


def test_pillow_opens_whatever_passes_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # an image's size is for --max-pixels to judge
    generator = np.random.default_rng(0)
    files = [saved(), saved("L"), saved(progressive=True), saved(restart_marker_blocks=1)]
    passed = 0
    for _ in range(6000):
        data = bytearray(files[generator.integers(len(files))])
        header = data.index(b"\xff\xda") + 8
        for _ in range(generator.integers(1, 4)):
            place = generator.integers(header)
            match generator.integers(4):
                case 0:
                    data[place] = generator.integers(256)
                case 1:
                    data[place] ^= 1 << generator.integers(8)
                case 2:
                    del data[place : place + generator.integers(1, 20)]
                case _:
                    data[place:place] = generator.bytes(generator.integers(1, 4))
        if (size := plain_size(data)) is not None:
            passed += 1
            assert size == opened_by_pillow(bytes(data))
    assert passed > 1000

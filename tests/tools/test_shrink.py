"""Shrinking and tiling against Pillow: colours of every kind of image, sizes, and what is refused."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from tlt.data.sources.image_file import BadImage
from tlt.errors import UserError
from tlt.tools.shrink import Picture, fitted_size, shrink, tile_starts

pyvips = pytest.importorskip("pyvips")
LANCZOS = Image.Resampling.LANCZOS


def picture(width: int = 320, height: int = 240, noise: float = 4) -> Image.Image:
    """Smooth shapes with some noise."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).resize((width, height), 3)
    return Image.fromarray(
        (np.asarray(coarse) + rng.normal(0, noise, (height, width, 3))).clip(0, 255).astype(np.uint8)
    )


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def difference(ours: bytes, theirs: Image.Image) -> np.ndarray:
    image = rgb(ours)
    assert image.size == theirs.size
    return abs(np.asarray(image).astype(int) - np.asarray(theirs).astype(int))


def by_pillow(data: bytes, size: tuple[int, int]) -> Image.Image:
    return rgb(data).resize(size, LANCZOS, reducing_gap=2.0)


def with_alpha() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.random.default_rng(1).integers(0, 256, (240, 320), dtype=np.uint8)))
    return image


def sixteen_bits(kind: str) -> bytes:
    pixels = np.asarray(picture()).astype(np.uint16) * 256 + np.random.default_rng(2).integers(0, 256, (240, 320, 3))
    image = pyvips.Image.new_from_array(pixels.astype(np.uint16), interpretation="rgb16")
    return bytes(image.pngsave_buffer() if kind == "PNG" else image.tiffsave_buffer())


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6
    return exif


def premultiplied() -> bytes:
    image = pyvips.Image.new_from_array(np.asarray(with_alpha()), interpretation="srgb")
    return bytes(image.tiffsave_buffer(premultiply=True))


def cmyk_without_adobe() -> bytes:
    """CMYK that does not say that it is inverted, as Adobe's; to Pillow it is."""
    data = encoded(picture().convert("CMYK"), "JPEG", quality=95)
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


IMAGES = {
    "png": lambda: encoded(picture(), "PNG"),
    "png gray": lambda: encoded(picture().convert("L"), "PNG"),
    "png black and white": lambda: encoded(picture().convert("1"), "PNG"),
    "png palette": lambda: encoded(picture().quantize(64), "PNG", transparency=3),
    "png 4 bits": lambda: encoded(picture().quantize(16), "PNG", bits=4),
    "png transparent colour": lambda: encoded(picture(), "PNG", transparency=(1, 2, 3)),
    "png gray alpha": lambda: encoded(with_alpha().convert("LA"), "PNG"),
    "png alpha": lambda: encoded(with_alpha(), "PNG"),
    "png 16 bits": lambda: sixteen_bits("PNG"),
    "png interlaced": lambda: bytes(pyvips.Image.new_from_array(np.asarray(picture())).pngsave_buffer(interlace=True)),
    "tiff": lambda: encoded(picture(), "TIFF", compression="tiff_lzw"),
    "tiff of one strip": lambda: encoded(picture(), "TIFF", compression="tiff_lzw", tiffinfo={278: 240}),
    "tiff jpeg": lambda: encoded(picture(), "TIFF", compression="jpeg", quality=95),
    "tiff tiled": lambda: bytes(pyvips.Image.new_from_array(np.asarray(picture())).tiffsave_buffer(tile=True)),
    "tiff white is 0": lambda: bytes(
        pyvips.Image.new_from_array(np.asarray(picture().convert("L"))).tiffsave_buffer(miniswhite=True)
    ),
    "tiff cmyk": lambda: encoded(picture().convert("CMYK"), "TIFF"),
    "tiff alpha": lambda: encoded(with_alpha(), "TIFF"),
    "tiff premultiplied": premultiplied,
    "tiff turned": lambda: encoded(picture(), "TIFF", tiffinfo={274: 6}),
    "tiff ycbcr": lambda: encoded(picture().convert("YCbCr"), "TIFF", compression="tiff_lzw"),
    "tiff 16 bits": lambda: sixteen_bits("TIFF"),
    "webp": lambda: encoded(picture(), "WEBP", quality=90),
    "bmp": lambda: encoded(picture(), "BMP"),
    "gif": lambda: encoded(picture(), "GIF", save_all=True, append_images=[picture().transpose(1)]),
}
if int(PIL.__version__.partition(".")[0]) >= 13:  # older ones can't read what they have written
    IMAGES["tiff ycbcr raw"] = lambda: encoded(picture().convert("YCbCr"), "TIFF")
# A JPEG is scaled by the decoder only where it is more than four times as large: not here.
IMAGES |= {
    "jpeg": lambda: encoded(picture(), "JPEG", quality=95),
    "jpeg gray": lambda: encoded(picture().convert("L"), "JPEG", quality=95),
    "jpeg cmyk": lambda: encoded(picture().convert("CMYK"), "JPEG", quality=95),
    "jpeg cmyk not of adobe": cmyk_without_adobe,
    "jpeg progressive": lambda: encoded(picture(), "JPEG", quality=95, progressive=True),
    "jpeg turned": lambda: encoded(picture(), "JPEG", quality=95, exif=turned()),
}


@pytest.mark.parametrize("name", IMAGES)
def test_shrunk_images_look_as_pillow_would_make_them(name: str) -> None:
    data = IMAGES[name]()
    off = difference(shrink(data, 110, quality=100), by_pillow(data, fitted_size(*rgb(data).size, 110)))
    # 3 levels are the filter's, the rest is the encoder's; next to black, white overshoots more.
    assert off.max() <= (6 if name != "png black and white" else 15) and off.mean() < 1


@pytest.mark.parametrize("name", IMAGES)
def test_tiles_show_the_pixels_of_their_place(name: str) -> None:
    data = IMAGES[name]()
    whole = rgb(data)
    with Picture(data) as opened:
        tiles = list(opened.tiles(100, 10, quality=100))
    assert [(y, x) for y, x, _ in tiles] == [
        (y, x) for y in tile_starts(whole.height, 100, 10) for x in tile_starts(whole.width, 100, 10)
    ]
    for y, x, tile in tiles:
        expected = rgb(encoded(whole.crop((x, y, x + 100, y + 100)), "JPEG", quality=100, subsampling=0))
        assert difference(tile, expected).max() <= 2


@pytest.mark.parametrize("size", [(1600, 1200), (1601, 1207), (1609, 1201)])
@pytest.mark.parametrize("side", [790, 300, 150, 90])
def test_jpeg_scaled_by_its_decoder_shows_what_it_did(size: tuple[int, int], side: int) -> None:
    """By 1, 2, 4 and 8, the noise tells: it would be twice as far off if the image were shifted by half a pixel."""
    data = encoded(picture(*size, noise=20), "JPEG", quality=95)
    off = difference(shrink(data, side, quality=100), by_pillow(data, fitted_size(*size, side)))
    assert off.mean() < (0.9 if size == (1600, 1200) else 1.2)


@pytest.mark.parametrize(
    "size, side, expected",
    [((30000, 20000), 3000, (3000, 2000)), ((20000, 1), 2048, (2048, 1)), ((1, 20000), 2048, (1, 2048))]
    + [((10, 7), 10, (10, 7)), ((10, 7), 11, (10, 7)), ((1001, 333), 500, (500, 166))],
)
def test_fitted_size(size: tuple[int, int], side: int, expected: tuple[int, int]) -> None:
    assert fitted_size(*size, side) == expected
    thumbnail = Image.new("1", size)
    thumbnail.thumbnail((side, side))
    assert all(abs(a - b) <= 1 for a, b in zip(thumbnail.size, expected, strict=True))


def test_small_images_are_left_alone() -> None:
    for name in ("jpeg", "png 16 bits", "webp"):
        data = IMAGES[name]()
        assert shrink(data, 320) == data


@pytest.mark.parametrize("size", [(20000, 1), (1, 20000), (1, 1), (5000, 3)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_thin_images(size: tuple[int, int], kind: str) -> None:
    data = encoded(picture(*size), kind)
    assert rgb(shrink(data, 256)).size == fitted_size(*size, 256)
    with Picture(data) as opened:
        tiles = list(opened.tiles(4096))
    assert sum(np.prod(rgb(tile).size) for _, _, tile in tiles) >= size[0] * size[1]


def test_files_are_read_whatever_they_are_called(tmp_path: Path) -> None:
    data = IMAGES["png"]()
    for name in ("ein Bär[1].png", "a.b.jpg", os.fsdecode(b"\xff\xfe.tiff"), "-o[n=2].gif"):
        (tmp_path / name).write_bytes(data)
        assert shrink(tmp_path / name, 100) == shrink(data, 100)


@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "png", "tiff", "tiff jpeg", "webp", "bmp"])
def test_truncated_images_are_refused(name: str) -> None:
    data = IMAGES[name]()
    for length in (0, 10, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(OSError):
            rgb(data[:length])  # as by Pillow
        with pytest.raises(BadImage) as caught:
            shrink(data[:length], 100)
        assert str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(BadImage), Picture(data[:length]) as opened:
            list(opened.tiles(100))


def test_other_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path, reason in ((tmp_path / "pipe.jpg", "not a regular file"), (tmp_path / "none.jpg", "No such file")):
        with pytest.raises(BadImage, match=reason):
            shrink(path, 100)


@pytest.mark.parametrize("kind", ["TIFF", "PNG"])
def test_of_16_bits_of_gray_the_upper_8_are_shown(kind: str) -> None:
    """Pillow cuts such values off at 255: they become white."""
    pixels = np.asarray(picture().convert("L"))
    wide = Image.fromarray(pixels.astype(np.uint16) * 256 + 200)
    made, expected = (np.asarray(rgb(shrink(encoded(image, kind), 100))) for image in (wide, Image.fromarray(pixels)))
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_gray_without_a_white_is_refused(mode: str) -> None:
    with pytest.raises(BadImage, match="make it 8 or 16 bits"):
        shrink(encoded(picture().convert(mode), "TIFF"), 100)


def test_what_can_not_be_streamed_needs_memory() -> None:
    for name in ("jpeg progressive", "png interlaced", "webp", "tiff turned", "tiff of one strip"):
        data = IMAGES[name]()
        with pytest.raises(BadImage, match="320|240.*--memory"):
            shrink(data, 100, memory=100_000)
        shrink(data, 100, memory=2_000_000)
    for name in ("jpeg", "png", "tiff tiled"):
        shrink(IMAGES[name](), 100, memory=320 * 128 * 6)  # the tiles of a row are decoded together
        with pytest.raises(BadImage, match="row of tiles"), Picture(IMAGES[name](), memory=100_000) as opened:
            list(opened.tiles(100))


def test_quality_is_the_encoder_s() -> None:
    small, large = (shrink(IMAGES["png"](), 200, quality=quality) for quality in (60, 95))
    assert len(small) < len(large) / 2
    with Image.open(io.BytesIO(large)) as image:
        assert image.format == "JPEG" and not image.getexif() and "icc_profile" not in image.info


def test_missing_pyvips_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyvips", None)
    with pytest.raises(UserError, match=r"volo-tlt\[huge\]"):
        shrink(IMAGES["png"](), 100)

"""Decoding against Pillow: at most one grey level apart, and damaged files named as such by both backends. Where JPEGs
are decoded at 1/2, 1/4 or 1/8, the same window and nearly the same grey levels."""

import gc
import importlib.util
import io
import itertools
import os
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.conftest import JPEG, JPEGS, encoded, picture, refuses, write
from tlt.data.backends import create_backend, decode
from tlt.data.backends.decode import RESIZE_FILTERS, Crop, Encoded, PilBackend, Request, Size, TorchvisionBackend
from tlt.data.batch import SkipCounter
from tlt.data.sources.image_file import BadImage, image_extensions, read_size
from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.config.train import TRAIN
from volo.train.data import open_folders, train_loader, validation_loader

BACKENDS = ["torchvision", "pil"]
CROPS = [(0, 0, 96, 72), (30, 20, 50, 41), (5, 3, 7, 60), (40, 30, 1, 1), (0, 0, 96, 1)]


def saved(image: Image.Image, path: Path, **options: Any) -> str:
    image.save(path, **options)
    return str(path)


@pytest.mark.parametrize("filter_name", RESIZE_FILTERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_crop_and_resize_within_a_grey_level_of_pillow(name, filter_name):
    backend, data = create_backend(name), bytearray(encoded(picture(), quality=90))
    image, off = Image.open(io.BytesIO(data)), list[np.ndarray]()
    for (x, y, w, h), size in itertools.product(CROPS, ((32, 32), (50, 41), (17, 90))):
        ours = backend.decode(Encoded("x", data, 96, 72), (x, y, w, h), size, filter_name)
        assert ours.dtype == torch.uint8 and ours.shape == (3, *size)
        theirs = image.crop((x, y, x + w, y + h)).resize(size[::-1], Image.Resampling[filter_name.upper()])
        off.append(abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)).ravel())
    # Both round and clip between the two axes, and Pillow 13 picks the order of the axes by cost.
    together = np.concatenate(off)
    assert together.max() <= (0 if name == "pil" else 5 if filter_name == "bicubic" else 1)
    assert (together > 1).mean() < 1e-3


@pytest.mark.parametrize("without", [False, True], ids=["", "without simplejpeg"])
@pytest.mark.parametrize("kind", JPEGS)
def test_every_pixel_of_a_jpeg_is_pillows(kind, without, monkeypatch):
    if without:
        monkeypatch.setattr(decode, "simplejpeg", None)
    ours = TorchvisionBackend().decode(Encoded("x", bytearray(JPEGS[kind]), 96, 72), None, (72, 96), "bilinear")
    with Image.open(io.BytesIO(JPEGS[kind])) as image:
        assert np.array_equal(ours.permute(1, 2, 0), image.convert("RGB"))


PNG_TEXTS = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}
LEVELS = np.array([0, 51, 102, 153, 204, 255])  # which any number of bits holds exactly


def pgm(most: int) -> bytes:
    return b"P5\n6 1\n%d\n" % most + (LEVELS * most // 255).astype(">u2").tobytes()


def tiff(bits: int, white_is_zero: bool) -> bytes:
    """Gray of one strip, without compression."""
    values = (255 - LEVELS if white_is_zero else LEVELS) * (2**bits - 1) // 255
    packed = int("".join(f"{value:0{bits}b}" for value in values), 2).to_bytes(6 * bits // 8, "big")
    pixels = values.astype("<u2").tobytes() if bits == 16 else packed
    tags = {256: 6, 257: 1, 258: bits, 259: 1, 262: 1 - white_is_zero, 273: 122, 277: 1, 278: 1, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels


def png(kind: bytes, begins: bytes, length: int) -> bytes:
    """Gray, with a compressed chunk."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 6, 1, 8, 0, 0, 0, 0))
    more = chunk(kind, begins + zlib.compress(bytes(length), 1))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + LEVELS.astype(np.uint8).tobytes()))
    return b"\x89PNG\r\n\x1a\n" + head + more + pixels + chunk(b"IEND", b"")


GRAY = {
    **{f"PGM to {most}": pgm(most) for most in (1020, 4080, 16320, 65535)},
    **{f"TIFF of {how}": tiff(*how) for how in ((8, True), (12, False), (16, False), (16, True))},
    "PNG of 16 bits": encoded(Image.fromarray((LEVELS * 257).astype(np.uint16)[None]), "PNG"),
    **{f"PNG with {kind!r}": png(kind, begins, 3 * 2**20) for kind, begins in PNG_TEXTS.items()},
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", GRAY)
def test_gray_levels_are_those_of_the_file(kind, name):
    backend = create_backend(name)
    levels = backend.decode(backend.open("x", bytearray(GRAY[kind])), None, (1, 6), "bilinear")
    assert levels[0, 0].tolist() == LEVELS.tolist() and (levels == levels[:1]).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_values_of_fits_are_not_taken_for_gray(bits):
    cards = {"SIMPLE": "T", "BITPIX": bits, "NAXIS": 2, "NAXIS1": 6, "NAXIS2": 1, "BZERO": 2 ** (bits - 1)}
    head = "".join(f"{name:<8}= {value:>20}".ljust(80) for name, value in cards.items()) + "END"
    with refuses("its pixels are of FITS, on a scale of its own: nobody knows which of them is white", BadImage):
        TorchvisionBackend().open("x", bytearray(head.ljust(2880).encode() + bytes(2880)))


@pytest.mark.parametrize("name", BACKENDS)
def test_fault_24_truncated_jpeg_is_bad_wherever_it_is_cut(tmp_path, name):
    data = encoded(picture(), quality=90)
    cuts = [*range(1, len(data), len(data) // 25), len(data) - 3]
    backend = create_backend(name)
    for cut in cuts:
        path = tmp_path / "cut.jpg"
        path.write_bytes(data[:cut])
        with pytest.raises(BadImage) as caught:
            backend.decode(backend.open(str(path)), None, (16, 16), "bilinear")
        assert "\n" not in str(caught.value) and "0x" not in str(caught.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_bad_image_does_not_keep_the_memory_of_its_batch(name):
    """While the training loop has the garbage collector switched off."""
    backend, data = create_backend(name), encoded(picture(), quality=90)
    requests = [Request(Encoded("a", part, 96, 72), None, (16, 16), "bilinear") for part in (data, data[:300])]
    gc.disable()
    try:
        decoded = backend.decode_batch(requests, (16, 16))
        assert [*decoded.bad] == [1] and str(decoded.bad[1])
        images = weakref.ref(decoded.images)
        del decoded
        assert images() is None
    finally:
        gc.enable()


def test_fault_40_pixel_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    # Pillow alone: an error, a warning, nothing.
    sizes = {15000: 225_000_000, 12000: 144_000_000, 8000: 64_000_000}
    for side, pixels in sizes.items():
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 89478485)  # Pillow's own, which a higher limit of ours raises
        path = saved(Image.new("1", (side, side)), tmp_path / "bomb.png")
        assert os.path.getsize(path) < 40_000
        for name in BACKENDS:
            with pytest.raises(BadImage, match="--max-pixels 50000000.*tlt pack-images --max-side") as caught:
                create_backend(name).open(path)
            assert "100000000" not in str(caught.value)  # twice the limit, which Pillow speaks of
            assert create_backend(name, max_pixels=pixels).open(path).width == side
        monkeypatch.undo()


def test_postscript_is_never_run_and_unknown_backends_are_named():
    with pytest.raises(BadImage, match="no image format"):
        read_size(encoded(picture(), "EPS"))
    with pytest.raises(UserError, match="--data-backend dali: there are torchvision, pil, "):
        create_backend("dali")
    assert ".eps" not in image_extensions() and {".jpg", ".webp", ".png", ".mpo", ".tif"} <= image_extensions()


SCALING = TorchvisionBackend(dct_scaling=True)
SCALED: list[tuple[Crop | None, Size, int]] = [  # crop, output, divisor
    (None, (50, 80), 4),
    ((21, 13, 599, 401), (50, 74), 4),
    ((21, 13, 599, 401), (100, 100), 2),
    ((7, 1, 633, 426), (26, 39), 8),
    ((339, 226, 301, 201), (50, 75), 2),
]


@pytest.fixture(autouse=True)
def small_images_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DCT_SCALING_PIXELS", 0)


def photograph(mode: str = "RGB") -> Image.Image:
    package = importlib.util.find_spec("sklearn")  # importing it takes a second
    assert package is not None and package.origin is not None
    return Image.open(Path(package.origin).parent / "datasets" / "images" / "china.jpg").convert(mode)  # 640 x 427


def pixels(backend: PilBackend, path: str, crop: Crop | None, size: Size, interpolation: str) -> np.ndarray:
    """Rows, columns, channels."""
    return backend.decode(backend.open(path), crop, size, interpolation).permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize(
    ("mode", "subsampling", "interpolation"),
    [("RGB", 0, "bilinear"), ("RGB", 2, "bicubic"), ("L", 0, "bicubic"), ("CMYK", 0, "bilinear")],
)
def test_grey_levels_are_close_to_pillows(tmp_path, mode, subsampling, interpolation):
    path = saved(photograph(mode), tmp_path / "x.jpg", quality=90, subsampling=subsampling)
    for crop, size, divisor in SCALED:
        assert SCALING.divisor(Request(SCALING.open(path), crop, size, interpolation)) == divisor
        how = path, crop, size, interpolation
        difference = abs(pixels(SCALING, *how) - pixels(PilBackend(), *how))
        assert difference.any(), "it was not scaled"
        assert difference.mean() < 1.1 and np.percentile(difference, 99.9) <= 10 and difference.max() <= 16


def test_windows_are_exact_to_a_tenth_of_a_pixel(tmp_path):
    y, x = np.mgrid[:480, :641]
    waves = [128 + 100 * np.sin(2 * np.pi * at / 80) for at in (x, y, x + y)]
    image = Image.fromarray(np.stack(waves, axis=2).astype(np.uint8))
    path = saved(image, tmp_path / "x.jpg", quality=90, subsampling=0)
    for start, size in itertools.product((0, 1, 2, 3, 5, 7), ((29, 39), (30, 41), (58, 78))):
        crop = (start, start + 1, 640 - 2 * start, 470 - 2 * start)
        exact = pixels(PilBackend(), path, crop, size, "bilinear")
        difference = pixels(SCALING, path, crop, size, "bilinear") - exact
        for channel, axis in ((0, 1), (1, 0)):
            slope = np.gradient(exact[..., channel].astype(float), axis=axis)  # grey levels per pixel of the output
            shift = (difference[..., channel] * slope).sum() / (slope**2).sum()
            assert abs(shift) * crop[2 + (axis == 0)] / size[axis] < 0.1, "pixels of the file"


def test_twice_the_output_is_left_and_small_images_stay_whole(monkeypatch):
    def divisor(size: Size, crop: Crop | None, side: int) -> int:
        image = Encoded("x", bytearray(decode.JPEG_MAGIC), *size)
        return SCALING.divisor(Request(image, crop, (side, side), "bilinear"))

    expected = {(None, 224): 4, (None, 187): 8, (None, 188): 4, ((0, 0, 4000, 895), 224): 1, ((9, 9, 896, 896), 224): 2}
    assert {key: divisor((4000, 3000), *key) for key in expected} == expected
    monkeypatch.undo()
    sizes = {(4000, 2000): 1, (4001, 2000): 4}
    assert {size: divisor(size, None, 224) for size in sizes} == sizes


def test_dali_scales_as_torchvision_does(tmp_path):
    pytest.importorskip("nvidia.dali")
    path = saved(photograph(), tmp_path / "x.jpg", quality=90)
    for scaling in (True, False):
        backends = [create_backend(name, dct_scaling=scaling) for name in ("torchvision", "dali-cpu")]
        for crop, size, _ in SCALED:
            request = Request(SCALING.open(path), crop, size, "bicubic")
            one, other = (backend.decode_batch([request], size).images for backend in backends)
            assert torch.equal(one, other)


@pytest.mark.parametrize("flag", ["", "--full-decode"])
def test_training_alone_scales_unless_full_decode(tmp_path, flag):
    write(tmp_path, {f"{split}/c/{number}.jpg": JPEG for split in ("train", "val") for number in range(4)})
    args = TRAIN.parse(f"{tmp_path} --model volo_test --img-size 32 -b 4 -j 0 --aa none --num-classes 1 {flag}".split())
    settings = {"input_size": (3, 32, 32), "mean": [0, 0, 0], "std": [1, 1, 1], "interpolation": "bicubic"}
    settings |= {"crop_pct": 1.0, "crop_mode": "center"}
    folders, world = open_folders(args, 1), World(0, 0, 1, torch.device("cpu"))
    training = train_loader(args, folders.train, None, settings, world).dataset.backend
    skips = SkipCounter(4)
    loading = args.images.loading
    validation = validation_loader(loading, folders.validation, 4, settings, world, skips=skips).dataset.backend
    assert isinstance(training, TorchvisionBackend) and isinstance(validation, TorchvisionBackend)
    assert (training.dct_scaling, validation.dct_scaling) == (not flag, False)

"""Labels from masks and tables: shares against counted pixels and pycocotools, kills, and mistakes in one line."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.labels.packed import same_files
from tlt.data.sources import open_images
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.store import open_labels
from tlt.tools.cli import main
from tlt.tools.masks import count_cells, read_numbers

RNG = np.random.default_rng(0)


def counted(classes: np.ndarray, grid: tuple[int, int], number: int) -> np.ndarray:
    """(h, w) float64: the area of each cell that a class has, pixel by pixel, as a share of the cell."""
    area = np.zeros(grid)
    (height, width), (h, w) = classes.shape, grid
    for y, x in np.argwhere(classes == number):
        for r, c in np.ndindex(h, w):
            tall = min((r + 1) * height / h, y + 1) - max(r * height / h, y)
            wide = min((c + 1) * width / w, x + 1) - max(c * width / w, x)
            area[r, c] += max(tall, 0) * max(wide, 0)
    return area * h * w / (height * width)


@pytest.mark.parametrize(
    ("size", "grid", "k", "classes"),
    [((13, 17), (3, 5), 4, 6), ((5, 4), (9, 7), 3, 4), ((12, 8), (3, 4), 5, 2), ((1, 1), (2, 2), 2, 3)],
)
def test_cells_are_counted_pixels(size, grid, k, classes):
    mask = RNG.integers(-1, classes, size)
    mask[: size[0] // 3] = -1  # a border that is void
    values, ids, void = count_cells(mask, grid, k)
    assert (values.dtype, ids.dtype, void.dtype) == (np.float32, np.int32, np.float32)
    shares = np.stack([counted(mask, grid, number) for number in range(classes)])
    np.testing.assert_allclose(void, counted(mask, grid, -1), atol=1e-6)
    shares /= np.where(np.isclose(shares.sum(0), 0), 1, shares.sum(0))
    padded = np.concatenate([np.sort(shares, 0)[::-1], np.zeros((k, *grid))])[:k]
    np.testing.assert_allclose(values, padded, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(shares, ids, 0)[values > 0], values[values > 0], atol=1e-6)
    assert not ids[values == 0].any() and (void[~values.any(0)] == 1).all()


def grey_png(numbers: np.ndarray, bits: int) -> bytes:
    """A grey PNG of 1, 2, 4, 8 or 16 bits, written here."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = numbers.shape
    bit = (numbers[..., None] >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(bit.reshape(height, -1).astype(bool), axis=1)
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    data = zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_numbers_of_any_png_are_read(tmp_path, bits):
    numbers = RNG.integers(0, 2**bits, (7, 9))
    (tmp_path / "m.png").write_bytes(grey_png(numbers, bits))
    np.testing.assert_array_equal(read_numbers(str(tmp_path / "m.png")), numbers)
    if bits <= 8:  # as a palette, with a number that is transparent
        image = Image.fromarray(numbers.astype(np.uint8), "P")
        image.putpalette(RNG.integers(0, 256, 768).astype(np.uint8).tobytes())
        image.save(tmp_path / "p.png", bits=bits, transparency=0)
        np.testing.assert_array_equal(read_numbers(str(tmp_path / "p.png")), numbers)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Images of two classes of their own sizes, and masks in a tree of the same paths."""
    masks = {}
    for number in range(6):
        name = f"{'ab'[number % 2]}/{number}.v1"
        masks[name] = RNG.integers(0, 2, (20 + number, 33)).astype(np.uint8)
        masks[name][:, :9] = 255
        save(tmp_path / "data" / "train" / f"{name}.jpg", np.zeros((20 + number, 33, 3), np.uint8))
        save(tmp_path / "masks" / "train" / f"{name}.png", masks[name])
    return tmp_path / "data", tmp_path / "masks", masks


def pack(masks: Any, out: Path, data: Path, *flags: str) -> int:
    return main(
        [
            "pack-masks",
            *map(str, masks if isinstance(masks, list) else [masks]),
            str(out),
            "--images",
            str(data),
            *flags,
        ]
    )


def check_shares(out: Path, names: list[str], masks: dict[str, np.ndarray], k: int) -> None:
    """Every stored map is what `count_cells` finds in the mask."""
    store = open_labels(out, names)
    for row, name in enumerate(names):
        values, ids, void = count_cells(masks[name], store.info.grid, k)
        label_map = store.reader.read(row)
        for one, other in ((label_map.values, values), (label_map.ids, ids), (label_map.void, void)):
            np.testing.assert_array_equal(one, other)


def test_class_folders_number_the_masks(folders, tmp_path, capsys):
    data, masks, arrays = folders
    assert pack(masks, tmp_path / "out", data) == 0
    assert "6 masks packed" in (said := capsys.readouterr().out) and "% of 6 images" in said
    names = list(open_images(data, "train").paths)
    expected = {f"{name}.jpg": np.where(mask == 255, -1, mask.astype(int)) for name, mask in arrays.items()}
    check_shares(tmp_path / "out", names, expected, 2)
    store = open_labels(tmp_path / "out", names, class_names=["a", "b"], num_classes=2)
    assert store.info.grid == (2, 3) and store.info.shares and not store.warnings
    assert main(["check", str(data), str(tmp_path / "out")]) == 0
    assert main(["unpack", str(tmp_path / "out"), str(tmp_path / "tree")]) == 2
    assert "holds shares of classes, a tree of label files only logits" in capsys.readouterr().err


def test_a_killed_command_goes_on(folders, tmp_path, capsys, monkeypatch):
    data, masks, _ = folders
    assert pack(masks, tmp_path / "whole", data, "--workers", "2") == 0
    write = ArchiveWriter.write

    def until_third(self, row, label_map):
        if row == 2:
            raise KeyboardInterrupt
        write(self, row, label_map)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveWriter, "write", until_third)
        assert pack(masks, tmp_path / "out", data) == 130
    monkeypatch.setattr(
        ArchiveWriter, "pending", lambda self, of=ArchiveWriter.pending: told.append(of(self)) or told[-1]
    )
    told: list[list[int]] = []
    assert pack(masks, tmp_path / "out", data, "--grid", "2", "2") == 2
    assert "was made with grid [2, 3], this command says [2, 2]" in capsys.readouterr().err
    assert pack(masks, tmp_path / "out", data) == 0
    assert told == [[2, 3, 4, 5]] and same_files(tmp_path / "whole", tmp_path / "out")
    assert pack(masks, tmp_path / "out", data) == 2
    assert "is a complete label archive" in capsys.readouterr().err
    assert pack(masks, tmp_path / "out", data, "--overwrite", "--ignore", "255", "1") == 0

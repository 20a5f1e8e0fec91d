"""Labels from masks and tables: shares against counted pixels and pycocotools, kills, and mistakes in one line."""

import json
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pycocotools.mask as coco_mask
import pytest
from PIL import Image

from tests.labels.packed import same_files
from tlt.data.sources import open_images
from tlt.errors import UserError
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.store import open_labels
from tlt.tools import show
from tlt.tools.cli import main
from tlt.tools.coco import counts_in
from tlt.tools.masks import count_cells, read_numbers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in pycocotools
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


def drawn(height: int, width: int, objects: list[tuple[Any, int, int]]) -> np.ndarray:
    """The class of each pixel by pycocotools: crowds below all others, larger objects below smaller ones."""
    pixels = np.full((height, width), -1)
    masks = []
    for segmentation, class_id, crowd in objects:
        packed = isinstance(segmentation, dict) and isinstance(segmentation["counts"], str)
        rle = segmentation if packed else coco_mask.frPyObjects(segmentation, height, width)
        masks.append((coco_mask.decode(coco_mask.merge(rle) if isinstance(rle, list) else rle), class_id, crowd))
    for mask, class_id, _ in sorted(masks, key=lambda each: (-each[2], -int(each[0].sum()))):
        pixels[mask > 0] = class_id
    return pixels


SEGMENTATIONS = {
    "polygons": lambda: [RNG.uniform(0, 29, 10).tolist(), RNG.uniform(0, 29, 6).tolist()],
    "compressed": lambda: {"size": [30, 40], "counts": coco_mask.encode(blob())["counts"].decode()},
    "uncompressed": lambda: {"size": [30, 40], "counts": uncompressed(blob())},
}


def blob() -> np.ndarray:
    return np.asfortranarray(np.kron(RNG.integers(0, 2, (6, 8)), np.ones((5, 5))).astype(np.uint8))


def uncompressed(mask: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(mask.ravel("F"), prepend=0, append=2))
    return np.diff(edges, prepend=0).tolist()


def test_runs_are_those_of_pycocotools():
    for density in np.linspace(0, 1, 40):
        mask = (RNG.random((RNG.integers(1, 90), RNG.integers(1, 90))) < density).astype(np.uint8)
        counts = counts_in(coco_mask.encode(np.asfortranarray(mask))["counts"])
        np.testing.assert_array_equal(np.repeat(np.arange(len(counts)) % 2, counts), mask.ravel("F"))


def write_coco(file: Path, images: list[dict], annotations: list[dict], names: dict[int, str]) -> Path:
    categories = [{"id": number, "name": name} for number, name in names.items()]
    # The order of COCO's own files is another one.
    file.write_text(json.dumps({"annotations": annotations, "images": images, "categories": categories}))
    return file


def coco_image(data: Path, name: str, number: Any) -> dict:
    save(data / name, np.zeros((30, 40, 3), np.uint8))
    return {"id": number, "file_name": os.path.basename(name), "height": 30, "width": 40}


def test_flat_images_of_coco_get_classes_and_shares(tmp_path, capsys):
    """Two files with the same numbers for their images; numbers of categories that are not in the order of names."""
    names, numbered = {7: "tree, oak", 300: "car", 255: "sky", 9: "unused"}, ["car", "sky", "tree, oak", "unused"]
    pixels, files = {}, []
    for split in ("train2017", "val2017"):
        images, annotations = [], []
        for number in range(3):
            objects = [(make(), [7, 300, 255][i], int(i == 1)) for i, make in enumerate(SEGMENTATIONS.values())]
            objects = objects if number else []  # an image of which nothing is known
            path = f"{split}/{split}-{number}.jpg"
            images.append(coco_image(tmp_path / "data", path, number))
            for segmentation, category, crowd in objects:
                annotation = {"image_id": number, "category_id": category, "iscrowd": crowd, "id": len(annotations)}
                annotations.append({**annotation, "segmentation": segmentation})
            annotations.append({"image_id": number, "category_id": 7, "bbox": [0, 0, 5, 5]})  # without a mask
            pixels[path] = drawn(30, 40, [(seg, numbered.index(names[c]), crowd) for seg, c, crowd in objects])
        files.append(write_coco(tmp_path / f"{split}.json", images, annotations, names))
    save(tmp_path / "data" / "train2017" / "more.png", np.zeros((8, 8, 3), np.uint8))
    assert pack(files, tmp_path / "out", tmp_path / "data", "--grid", "3", "4", "-k", "3") == 0
    said = capsys.readouterr().out
    assert "1 of 7 images have no mask, such as train2017/more.png" in said and "2 masks are void alone" in said
    check_shares(tmp_path / "out", sorted(pixels), pixels, 3)
    table = f"csv/{tmp_path / 'out' / 'classes.csv'}"
    train, val = (open_images(tmp_path / "data", split, table) for split in ("train", "validation"))
    assert train.class_names == val.class_names == numbered and "--dataset csv/" in said
    for images in (train, val):
        store = open_labels(tmp_path / "out", images.paths, num_classes=4, class_names=images.class_names)
        assert len(images) == 2 and not store.reader.missing
        for row, path in enumerate(images.paths):
            known = pixels[path][pixels[path] >= 0]
            assert images.classes[row] == np.bincount(known).argmax()


def test_flat_png_masks_are_merged_and_found_by_ending(tmp_path, capsys, monkeypatch):
    data, masks = tmp_path / "data", tmp_path / "data" / "masks"  # which are no images
    (tmp_path / "classes.tsv").write_text(
        "Idx\tRatio\tName\n8\t0.1\tother\n1\t0.2\troad\n2\t0.3\tcar\n3\t0.1\tbus\n400\t0\tbin\n255\t0\tno\n"
    )
    (tmp_path / "map.json").write_text('{"3": "vehicle", "2": "vehicle", "7": 1, "8": 255}')
    arrays = {}
    for number in range(3):
        numbers = RNG.choice([255, 1, 2, 3, 7, 8, 400], (16, 24)).astype(np.uint16)
        save(data / "city" / f"{number}_rgb.jpg", np.zeros((16, 24, 3), np.uint8))
        save(masks / "city" / f"{number}_ids.png", numbers)
        save(masks / "city" / f"{number}_color.png", np.zeros((16, 24, 3), np.uint8))
        # In natural order: bin, road, vehicle.
        named = np.select([numbers == 400, np.isin(numbers, (1, 7)), np.isin(numbers, (2, 3))], [0, 1, 2], -1)
        arrays[f"city/{number}_rgb.jpg"] = named
    flags = f"--classes {tmp_path}/classes.tsv --map {tmp_path}/map.json --suffix _rgb _ids --grid 1 1"
    assert pack(masks, tmp_path / "out", data, *flags.split()) == 0
    assert capsys.readouterr().out.count("warning: number 255 (class no) counts as void: give --ignore without") == 1
    check_shares(tmp_path / "out", sorted(arrays), arrays, 3)
    assert open_labels(tmp_path / "out", sorted(arrays)).info.class_names == ["bin", "road", "vehicle"]
    page = f"-o {tmp_path}/page.png --masks {masks} --dataset csv/{tmp_path}/out/classes.csv --size 32 32"
    pages: list[Any] = []
    monkeypatch.setattr(show, "save_figure", lambda page, path: pages.append(page))
    assert main(["show", str(data), str(tmp_path / "out"), *page.split()]) == 0
    alpha: dict[str, list[np.ndarray]] = {"mask": [], "label": []}
    for axes in pages[0].axes:
        if axes.get_gid() in alpha:
            (cells,) = [artist for artist in axes.get_images() if artist.get_label() == "cells"]
            alpha[axes.get_gid()].append(np.asarray(cells.get_array())[..., 3])
    masks_of = [arrays[name] for name in sorted(arrays)]
    np.testing.assert_allclose(alpha["mask"], [0.6 * (mask >= 0) for mask in masks_of])
    shares = [[[np.bincount(mask[mask >= 0]).max() / mask.size]] for mask in masks_of]  # of the cell that is not void
    np.testing.assert_allclose(alpha["label"], np.multiply(0.6, shares), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("size", "", "4.v1.png has 33 x 24 pixels, but its image a/4.v1.jpg 33 x 20: is it the mask of this image"),
        ("number", "", "0.v1.png has number 2 at x 3, y 1, which is none of the 2 classes: give --ignore 2 if"),
        ("rgb", "", "0.v1.png holds colours (RGB), not class numbers; write it as a palette"),
        ("broken", "", "0.v1.png can't be used: "),
        ("", "--suffix _a _b", "holds no PNG files of this --suffix"),
        ("rename", "", "no image in DATA/train has a mask in MASKS: images are named a/0.v1.jpg, a/2.v1.jpg, masks"),
        ("twice", "", "a/0.v1.PNG and a/0.v1.png both fit image a/0.v1.jpg: keep one of them"),
        ("", "--classes no.csv", "no.csv is no table of numbers and names (FileNotFoundError"),
        ("", "--classes DATA/twice.csv", "(ValueError: a number twice or negative, or no name): write lines such as"),
        ("", "--map DATA/map.csv", "--map: number 0 becomes 5, which is none of the 2 classes"),
        ("", "--dataset torch/cifar10", "--dataset torch/cifar10 in DATA"),
        ("", "--images DATA/train/a", "if folders are not the classes, give --classes FILE (number, name)"),
        ("", "--ignore -1", "--ignore: '-1' is not a whole number"),
    ],
)  # fmt: skip
def test_bad_masks_are_one_line(folders, tmp_path, capsys, change, flags, message):
    data, masks, arrays = folders
    first = masks / "train" / "a" / "0.v1.png"
    (data / "twice.csv").write_text("1,cat\n1,dog\n")
    (data / "map.csv").write_text("0,5\n")
    if change == "size":
        save(data / "train" / "a" / "4.v1.jpg", np.zeros((20, 33, 3), np.uint8))
    elif change == "number":
        arrays["a/0.v1"][:] = 255
        arrays["a/0.v1"][1, 3] = 2
        save(first, arrays["a/0.v1"])
    elif change == "rgb":
        image = Image.fromarray(arrays["a/0.v1"], "P")
        image.putpalette(bytes(range(256)) * 3)
        image.convert("RGB").save(first)
    elif change == "broken":
        first.write_bytes(first.read_bytes()[:50])
    elif change == "rename":
        for path in masks.rglob("*.png"):
            path.rename(path.with_name(f"{path.stem}_mask.png"))
    elif change == "twice":
        save(first.with_suffix(".PNG"), arrays["a/0.v1"])
    assert pack(masks, tmp_path / "out", data, *flags.replace("DATA", str(data)).split()) == 2
    err = capsys.readouterr().err
    assert message.replace("DATA", str(data)).replace("MASKS", str(masks)) in err and err.count("\n") == 1


def test_missing_and_extra_masks_are_counted(folders, tmp_path, capsys):
    data, masks, arrays = folders
    for name in ("a/0.v1", "b/3.v1"):
        (masks / "train" / f"{name}.png").rename(masks / "train" / f"{name[:2]}old.png")
    assert pack(masks, tmp_path / "out", data) == 0
    said = capsys.readouterr().out
    assert "2 of 6 images have no mask, such as a/0.v1.jpg: give volo train --bad-label skip" in said
    assert "2 masks belong to no image, such as a/old.png" in said and "4 masks packed" in said
    with pytest.raises(UserError, match="2 of 6 images have no label"):
        open_labels(tmp_path / "out", open_images(data, "train").paths)


SQUARE = [[0, 0, 0, 9, 9, 9, 9, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segmentation": [[0, 0, 50.5, 9, 9, 9]]}, "its polygon reaches x 50.5, y 9, outside of its image of 40 x 30"),
        ({"segmentation": [[0, 0, 5, -7, 9, 9]]}, "its polygon reaches x 5, y -7, outside of"),
        ({"segmentation": [[0, 0, 5]]}, "has no mask (ValueError: "),
        ({"segmentation": {"size": [30, 41], "counts": [1230]}}, "its RLE is of [30, 41] pixels, its image of [30, 4"),
        ({"segmentation": {"size": [30, 40], "counts": [3, 40]}}, "its runs do not sum to 30 x 40"),
        ({"segmentation": {"size": [30, 40], "counts": "34"}}, "its runs do not sum to 30 x 40"),
        ({"segmentation": []}, "has no annotation with a mask of these images"),
        ({"category_id": 8}, "annotation 5 of FILE: its category 8 is none of the classes: give --ignore 8"),
        ({"image_id": 8}, "annotation 5 of FILE is of image 8, which the file does not list"),
        ({"height": 31}, "mask of a.jpg in a.json has 40 x 31 pixels, but its image a.jpg 40 x 30"),
        ("", "FILE is no JSON of COCO (IncompleteJSONError: "),
        ("[]", "FILE is no JSON of COCO (no categories): it needs images, annotations"),
        ("cut", "FILE is no JSON of COCO (IncompleteJSONError: "),
    ],
)  # fmt: skip
def test_bad_annotations_are_one_line(tmp_path, capsys, change, message):
    image = coco_image(tmp_path / "data", "a.jpg", 3)
    annotation = {"id": 5, "image_id": 3, "category_id": 1, "iscrowd": 0, "segmentation": SQUARE}
    changes = change if isinstance(change, dict) else {}
    image = {name: changes.get(name, value) for name, value in image.items()}
    file = write_coco(tmp_path / "a.json", [image], [annotation | changes], {1: "cat"})
    if isinstance(change, str):
        file.write_text(file.read_text()[:-50] if change == "cut" else change)
    assert pack(file, tmp_path / "out", tmp_path / "data") == 2
    err = capsys.readouterr().err
    assert message.replace("FILE", str(file)) in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["ijson", "pycocotools.mask"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, capsys, monkeypatch, package):
    image = coco_image(tmp_path / "data", "a.jpg", 3)
    annotation = {"id": 5, "image_id": 3, "category_id": 1, "segmentation": SQUARE}
    file = write_coco(tmp_path / "a.json", [image], [annotation], {1: "cat"})
    monkeypatch.setitem(sys.modules, package, None)
    assert pack(file, tmp_path / "out", tmp_path / "data") == 2
    err = capsys.readouterr().err
    assert f"{package} is not installed" in err and "[masks]" in err and err.count("\n") == 1


ROWS = [("a/0.v1.JPEG", 0, "1,0", "0.25,1.0"), ("b/1.v1.JPEG", 1, "1", "0.5"), ("b/9.JPEG", 1, "1", "1.0")]
ROWS += [("a/2.v1.JPEG", 0, "", "")]  # nothing is known


@pytest.mark.parametrize("kind", ["tsv", "headed.tsv", "parquet"])
def test_tables_have_one_cell_an_image(folders, tmp_path, capsys, kind):
    table = tmp_path / f"t.{kind}"
    if kind == "parquet":
        lists = [
            [[float(n) for n in cell.split(",") if n] for _, _, *cells in ROWS for cell in cells[i : i + 1]]
            for i in (0, 1)
        ]
        names, numbers = zip(*((name, number) for name, number, *_ in ROWS), strict=True)
        columns = {"file": names, "class": numbers, "ids": [[int(n) for n in ids] for ids in lists[0]], "p": lists[1]}
        pyarrow.parquet.write_table(pyarrow.table(columns), table)
    else:
        head = "filename\tgt_index\tidx_list\tprob_list\n" * ("headed" in kind)
        table.write_text(head + "".join("\t".join(map(str, row)) + "\n" for row in ROWS))
    assert main(["pack-table", str(table), str(tmp_path / "out"), "--images", str(folders[0])]) == 0
    said = capsys.readouterr().out
    assert "3 of 6 images have no row" in said and "1 rows belong to no image, such as b/9.JPEG" in said
    store = open_labels(tmp_path / "out", open_images(folders[0], "train").paths, bad_label="skip")
    maps = [store.reader.read(row) for row in (0, 3, 1)]
    np.testing.assert_allclose([each.values.ravel() for each in maps], [[0.8, 0.2], [0.5, 0], [0, 0]])
    assert [each.ids.ravel().tolist() for each in maps] == [[0, 1], [1, 0], [0, 0]]
    assert [each.void.item() for each in maps] == [0, 0, 1] and store.shape == (2, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/0.v1.JPEG\t0\t1,0\t0.5\n", "t.tsv: row 1: not one probability in 0..1 for each class id"),
        ("a/0.v1.JPEG\t0\t1\t1.5\n", "t.tsv: row 1: not one probability in 0..1 for each class id"),
        ("a/0.v1.JPEG\t0\t2\t0.5\n", "class id 2 is not in 0..1"),
        ("a/0.v1.JPEG,0\n", "t.tsv is no table of images, classes, ids and probabilities (ValueError"),
        ("", "t.tsv is no table of images, classes, ids and probabilities ("),
        ("x.jpg\t0\t1\t0.5\n", "is in TABLE, such as x.jpg"),
    ],
)
def test_bad_tables_are_one_line(folders, tmp_path, capsys, text, message):
    (table := tmp_path / "t.tsv").write_text(text)
    assert main(["pack-table", str(table), str(tmp_path / "out"), "--images", str(folders[0])]) == 2
    err = capsys.readouterr().err
    assert message.replace("TABLE", str(table)) in err and err.count("\n") == 1

"""Images with awkward names, and label maps for them."""

import filecmp
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tlt.data.sources.source import ImageSource
from tlt.label_map import LabelMap
from tlt.labels.archive_writer import ArchiveWriter
from tlt.labels.label_info import LabelInfo
from tlt.labels.tree import label_names, write_map

SHAPE = (2, 3, 4)
# natural order, dots, a percent sign, one stem twice, not ASCII, not even UTF-8, nested, a dotted class
NAMES = ["a.1/10.JPEG", "a.1/9.jpg", "b/1%2E.v2.png", "b/1.v2.png", "b/x.jpg", "b/x.png", "c/deep/ü.webp"]
NAMES += ["c/deep/\udcff.jpg", "c/deep/" + "long " * 30 + ".jpg"]


def save_image(path: Path, mark: int, side: int = 24) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(mark).integers(0, 256, (side, side + mark, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def label_map(mark: int) -> LabelMap:
    generator = np.random.default_rng(mark)
    return LabelMap(generator.normal(size=SHAPE).astype(np.float16), generator.integers(0, 5, SHAPE, np.int32))


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file()) for root in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, False) for name in names[0])


def write_images(root: Path) -> Path:
    """A data set: training images NAMES and an empty class, validation images of all classes but that."""
    for mark, name in enumerate(NAMES):
        save_image(root / "train" / name, mark)
    (root / "train" / "empty").mkdir()
    for number, name in enumerate(("a.1", "b", "deep")):
        save_image(root / "val" / name / "v.png", number)
    return root


def make_tree(root: Path, images: ImageSource, info: LabelInfo | None = None) -> Path:
    for row, name in enumerate(label_names(images.paths)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_map(root / name, label_map(row), 5)
    if info is not None:
        info.write(root / "labels.json")
    return root


def share_map(mark: int) -> LabelMap:
    """Shares whose cells list less than all, one of void alone, and a class that takes no part."""
    generator = np.random.default_rng(mark)
    values = generator.dirichlet(np.ones(SHAPE[0] + 1), SHAPE[1:]).transpose(2, 0, 1)[: SHAPE[0]].astype(np.float32)
    void = generator.random(SHAPE[1:]).astype(np.float32)
    void[0, 0] = 1
    values[:, 0, 0] = values[1, 1, 1] = 0
    return LabelMap(values, label_map(mark).ids, void=void)


def make_shares(root: Path, images: ImageSource, classes: int = 5) -> Path:
    writer = ArchiveWriter(root, LabelInfo(SHAPE[0], SHAPE[1:], classes, shares=True), images.paths)
    for row in range(len(images)):
        writer.write(row, replace(share_map(row), ids=share_map(row).ids % classes))
    writer.finish()
    return root


def make_archive(root: Path, images: ImageSource, area: str = "full") -> Path:
    info = LabelInfo(SHAPE[0], SHAPE[1:], 5, area, {"model": "x"}, log_sum_exp=True)
    writer = ArchiveWriter(root, info, images.paths)
    for row in range(len(images)):
        sums = np.log(np.exp(label_map(row).values.astype(np.float32)).sum(0) + 0.5 + row)
        writer.write(row, replace(label_map(row), log_sum_exp=sums))
    writer.finish()
    return root

"""`--dataset csv/FILE`: what a table may say, and one line for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.data.conftest import refuses
from tlt.data.sources.open_images import open_images


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three images in DATA, and one beside it."""
    for name in ("data/a.png", "data/b.png", "data/deep/c.png", "d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path / "data"


def opened(data: Path, text: str, split: str = "train") -> list[tuple[str, str]]:
    """Path and class of the images of a table."""
    (data / "table.csv").write_text(text)
    images = open_images(str(data), split, "csv/table.csv")
    return [(path, images.class_names[number]) for path, number in zip(images.paths, images.classes, strict=True)]


def test_paths_are_taken_in_their_usual_form_and_rows_by_their_split(data: Path) -> None:
    text = "path,class\n./a.png,x\ndeep/../b.png,y\ndeep//c.png,x\n"
    assert opened(data, text) == [("a.png", "x"), ("b.png", "y"), ("deep/c.png", "x")]
    text = "path,split,class\na.png,train,x\nb.png,val,y\n"
    assert opened(data, text) == [("a.png", "x")] and opened(data, text, "validation") == [("b.png", "y")]


ROW = "a row needs a path and a class, and a field for each column"


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("path,class\na.png,x\n../d.png,x\n", r"line 3: \.\./d.png is not below DATA: paths count from there"),
        ("path,class\ndeep/../../d.png,x\n", "line 2: .* is not below DATA"),
        ("path,class,split\na.png,x,train\nb.png,x\n", f"line 3: {ROW}"),
        ("path,class\na.png,x\n,x\n", f"line 3: {ROW}"),
        ("path,class\na.png,x, large\n", 'line 2: .*and no more; write "a, b"'),
        ("image,label\na.png,x\n", "is no table, with commas, of columns 'path' and 'class'"),
        ("path,class\n./a.png,x\na.png,x\n", "names an image more than once"),
        ("path,class\ngone.png,x\n", r"names 1 images that are not there \(gone.png\)"),
        ("path,class,split\na.png,x,test\n", r"no row whose column 'split' says train: it has test \(--split\)"),
    ],
)
def test_what_a_table_may_not_say_is_one_line(data: Path, text: str, reported: str) -> None:
    with refuses(rf"table\.csv.* ?{reported}"):
        opened(data, text)

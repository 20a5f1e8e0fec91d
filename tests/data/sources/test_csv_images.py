"""`--dataset csv/FILE`: what a table may say, and one line for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tlt.data.sources.open_images import open_images
from tlt.errors import UserError
from tlt.tools.cli import main


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


def test_paths_are_taken_in_their_usual_form(data: Path) -> None:
    text = "path,class\n./a.png,x\ndeep/../b.png,y\ndeep//c.png,x\n"
    assert opened(data, text) == [("a.png", "x"), ("b.png", "y"), ("deep/c.png", "x")]
    with pytest.raises(UserError, match="names an image more than once"):
        opened(data, "path,class\n./a.png,x\na.png,x\n")


@pytest.mark.parametrize("path", ["{}/d.png", "{}/data/a.png", "../d.png", "deep/../../d.png", "../data/a.png", ".."])
def test_paths_that_lead_out_of_the_data_set_are_refused(data: Path, path: str) -> None:
    path = path.format(data.parent)
    with pytest.raises(UserError, match=r"table\.csv, line 3: .* is not below DATA: paths are relative"):
        opened(data, f"path,class\na.png,x\n{path},x\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("path,class,split\na.png,x,train\nb.png,x\n", "line 3: a row needs a path and a class, and a field for each"),
        ("path,class,split\nb.png,x\na.png,x,train\n", "line 2: a row needs a path and a class, and a field for each"),
        ("path,split,class\na.png,train,x\n\nb.png,val\n", "line 4: a row needs a path and a class"),
        ("class,path\nx,a.png\nx\n", "line 3: a row needs a path and a class"),
        ("path,class\na.png,x\n,x\n", "line 3: a row needs a path and a class"),
        ("path,class\na.png,x, large\n", 'line 2: a row has more fields than there are columns; write "a, b"'),
        ("image,label\na.png,x\n", "is no table, with commas, of columns 'path' and 'class'"),
        ("", "is no table"),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_of_other_fields_are_one_line(data: Path, text: str, told: str, split: str) -> None:
    with pytest.raises(UserError, match=rf"table\.csv.* ?{told}"):
        opened(data, text, split)


@pytest.mark.parametrize("path", ["../d.png", "{}/d.png"])
def test_nothing_is_packed_of_a_table_that_leads_out(
    data: Path, tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "table.csv").write_text(f"path,class\na.png,x\n{path.format(tmp_path)},x\n")
    command = ["pack-images", str(data), str(tmp_path / "out"), "--dataset", "csv/table.csv", "--workers", "1"]
    assert main(command) == 2
    assert "is not below DATA" in capsys.readouterr().err and not (tmp_path / "out").exists()

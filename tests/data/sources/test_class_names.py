"""Which class of an imposed list a class is: by its name, whatever that looks like."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import jpeg, refuses
from tests.data.sources.test_shards import tar
from tlt.data.sources import open_images
from tlt.tools.pack_images import pack_images

TORCHVISION = sorted(map(str, range(12)))  # 0, 1, 10, 11, 2, ...


@pytest.mark.parametrize("kind", ["folders", "csv", "shards", "packed"])
@pytest.mark.parametrize(
    ("own", "imposed", "by"),
    [
        (range(12), TORCHVISION, "name"),
        (range(3), ["2", "0", "1"], "name"),
        (range(2), ["2", "1", "0"], "name"),  # some of the list, as a validation set without images of a class
        (range(3), ["cat", "0", "2", "1"], "name"),
        ([0, 2, 5], ["5", "2", "1", "0"], "name"),
        (range(3), ["cat", "dog", "owl", "ox"], "number"),
        (range(3), ["0", "1", "3"], "nothing"),
        (range(3), ["1", "2", "3"], "nothing"),
        (range(3), ["cat", "dog"], "nothing"),
        ([1, 2], ["cat", "dog", "owl"], "nothing"),  # are they counted from 1?
        ([0, 2], ["cat", "dog", "owl"], "nothing"),
    ],
)
def test_names_that_look_like_numbers_are_names_where_the_list_has_them(
    tmp_path: Path, kind: str, own: Any, imposed: list[str], by: str
) -> None:
    names, split = [*map(str, own)], tmp_path / "train"
    files = {f"{name}/x{name}.jpg": jpeg(number) for number, name in enumerate(names)}
    if kind == "shards":  # which others made
        gap = by != "number"  # without images of the class between the first and the second
        numbers = {name: number + (number > 0) * gap for number, name in enumerate(names)}
        tar(split / "0.tar", files | {f"{name}/x{name}.cls": str(numbers[name]).encode() for name in names})
    else:
        for path, data in files.items():
            (split / path).parent.mkdir(parents=True)
            (split / path).write_bytes(data)
    with (tmp_path / "table.csv").open("w", newline="") as table:
        rows = [["path", "class"], *([f"train/{path}", path.split("/")[0]] for path in files)]
        csv.writer(table).writerows(rows)
    if kind == "packed":
        pack_images(str(tmp_path), str(tmp_path / "out"))
    data, dataset = str(tmp_path / "out" if kind == "packed" else tmp_path), "csv/table.csv" * (kind == "csv")
    assert (open_images(data, "train", dataset).class_names == names) or kind == "shards"
    if by == "nothing":
        with refuses("classes that are not in the class list of the training set or class map"):
            open_images(data, "train", dataset, imposed)
        return
    images = open_images(data, "train", dataset, imposed)
    given = {path.split("/")[-2]: imposed[row] for path, row in zip(images.paths, images.classes, strict=True)}
    assert given == {name: name if by == "name" else imposed[int(name)] for name in names}
    assert {*images.folder_names} == {*given.values()} and images.class_names == imposed

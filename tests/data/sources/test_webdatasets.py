"""`--dataset wds/NAME`: shards that timm's `_info.json` or a pattern names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import jpeg, refuses
from tests.data.sources.test_dataset_kinds import pixels
from tlt.data.sources.open_images import open_images
from tlt.data.sources.webdatasets import expand_braces

wds = pytest.importorskip("webdataset")
SPLITS = {"train": [0, 1], "validation": [2], "alternative": [0, 1]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three shards, the last one for validation; `cls` and `json` disagree."""
    for shard in range(3):
        with wds.TarWriter(str(tmp_path / f"set-{shard:02d}.tar")) as writer:
            for mark in range(shard * 4, shard * 4 + 4):
                writer.write({"__key__": f"k{mark}", "jpg": jpeg(mark), "cls": mark % 3, "json": {"label_12k": mark}})
    splits = {name: split(name, shards) for name, shards in SPLITS.items()}
    splits["alternative"]["alt_label"] = "label_12k"
    (tmp_path / "_info.json").write_text(json.dumps({"name": "set", "splits": splits}))
    return tmp_path


def split(name: str, shards: list[int]) -> dict[str, object]:
    files, lengths = [f"set-{shard:02d}.tar" for shard in shards], [4] * len(shards)
    return {"name": name, "filenames": files, "shard_lengths": lengths, "num_samples": sum(lengths)}


@pytest.mark.parametrize("name", ["train", "validation", "alternative", "set-{00..01}.tar|8", "set-0{0,2}.tar|8"])
def test_images_and_classes_are_timms(name: str, data: Path) -> None:
    create_reader = pytest.importorskip("timm.data.readers.reader_factory").create_reader
    theirs = [(np.array(image), number) for image, number in create_reader("wds/set", str(data), name)]
    ours = open_images(str(data), name, "wds/set")
    assert len(ours) == len(theirs) == (4 if name == "validation" else 8)
    for index in range(len(ours)):
        (number,) = (number for image, number in theirs if np.array_equal(image, pixels(ours, index)))
        assert ours.classes[index] == number


@pytest.mark.parametrize("pattern", ["a-{000..011}.tar", "{b,c}-{8..11}.tar", "x.tar", "{00..02}/{9..9}.tar"])
def test_patterns_are_webdatasets(pattern: str) -> None:
    assert expand_braces(pattern) == wds.shardlists.expand_urls(pattern)


def edit(data: Path, **changes: object) -> None:
    info = json.loads((data / "_info.json").read_text())
    info["splits"]["train"] |= changes
    (data / "_info.json").write_text(json.dumps(info))


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no such split": ("test", lambda _: None, "has no split test; it has train, validation, alternative"),
    "no list": ("train", lambda d: (d / "_info.json").unlink(), "no _info.json or info.json in .*give a pattern"),
    "not a list": ("train", lambda d: (d / "_info.json").write_text("[]"), "lists no shards as timm does"),
    "no names": ("train", lambda d: edit(d, filenames=[]), "0 of 0 shards are missing"),
    "a command": ("train", lambda d: edit(d, filenames=["pipe:cat x.tar"]), "pipe:cat x.tar: tar files below"),
    "a path outside": ("train", lambda d: edit(d, filenames=["../../x.tar"]), "tar files below"),
    "missing shard": ("train", lambda d: (d / "set-01.tar").unlink(), "1 of 2 shards are missing: .*set-01.tar"),
    "pattern without files": ("no-{0..3}.tar", lambda _: None, "4 of 4 shards are missing"),
    "pattern downwards": ("set-{3..1}.tar", lambda _: None, "give patterns like"),
    "pattern of too many": ("{0..99999}{0..99999}.tar", lambda _: None, "a million"),
    "no braces' content": ("set-{1}.tar", lambda _: None, "give patterns like"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_list_is_one_line(case: str, data: Path) -> None:
    name, damage, text = BAD[case]
    damage(data)
    with refuses(text):
        open_images(str(data), name, "wds/x")

"""Label maps beside images: missing, unusable or damaged ones, and labels of something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.labels.packed import SHAPE, label_map, make_tree, write_images
from tlt.data.sources.folder import scan_folder
from tlt.errors import UserError
from tlt.labels.shards import ShardReader
from tlt.labels.store import open_labels
from tlt.labels.tree import label_names
from tlt.tools.check import check
from tlt.tools.cli import main
from tlt.tools.pack_images import pack_images


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data")


def test_images_without_label(data: Path, tmp_path: Path) -> None:
    folder = scan_folder(data / "train")
    root = make_tree(tmp_path / "labels", folder)
    (root / label_names(folder.paths)[2]).unlink()
    pack_images(str(data), str(tmp_path / "out"), labels=str(root))
    with pytest.raises(UserError, match=r"1 of 9 images have no label .* first is b/1%2E.v2.png"):
        open_labels(tmp_path / "out", folder.paths)
    store = open_labels(tmp_path / "out", folder.paths, bad_label="skip")
    assert store.reader.missing == {2} and store.read(2).area == (0, 0, 0, 0)
    # in another order, and of some of the images
    some = open_labels(tmp_path / "out", [folder.paths[row] for row in (5, 0)])
    np.testing.assert_array_equal(some.read(0).ids, label_map(5).ids)
    np.testing.assert_array_equal(some.read(1).ids, label_map(0).ids)
    pack_images(str(data), str(tmp_path / "without"))
    with pytest.raises(UserError, match="shards without labels: pack them with `tlt pack-images --labels"):
        open_labels(tmp_path / "without", folder.paths)


def test_a_label_that_cannot_be_trained_on_stops_the_packing(data: Path, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "labels", folder := scan_folder(data / "train"))
    path = root / label_names(folder.paths)[3]
    for content, message in (
        (torch.full((2, *SHAPE), torch.nan), "1.v2.pt"),
        (torch.zeros(2, 2, 5, 4), "the others' is"),
    ):
        torch.save(content.half(), path)
        with pytest.raises(UserError, match=message):
            pack_images(str(data), str(tmp_path / "out"), labels=str(root), overwrite=True)


def test_a_flipped_bit_in_a_label_is_noticed(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = scan_folder(data / "train")
    pack_images(str(data), str(tmp_path / "out"), labels=str(make_tree(tmp_path / "labels", folder)))
    store = open_labels(tmp_path / "out", folder.paths)
    assert isinstance(store.reader, ShardReader) and check(str(tmp_path / "out"), str(tmp_path / "out"))[0]
    path = tmp_path / "out" / "train" / "00000.tar"
    content = bytearray(path.read_bytes())
    content[int(store.reader.table.rows["offset"][4]) + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="label of b/x.jpg in .*crc32 is wrong"):
        open_labels(tmp_path / "out", folder.paths).read(4)
    assert main(["check", str(tmp_path / "out"), str(tmp_path / "out")]) == 2
    assert f"files with a wrong checksum: 1\n  {path}" in capsys.readouterr().out

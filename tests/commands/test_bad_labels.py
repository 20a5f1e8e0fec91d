"""Token labels that are damaged, foreign or gone, as a user meets them: one line, exit code 2, nothing written lost.

Other files cover in full a label that is missing in a tree (`test_train.py`), every way to damage an archive
(`tests/labels/test_archive.py`) or a label file, and whose label it is (`tests/labels/test_store.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, Ended
from tlt.tools.cli import main as tlt_command

Call = Callable[..., Ended]
Train = Callable[..., Ended]


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    return make_dataset()


@pytest.fixture
def tree(data: Path, make_labels: Callable[..., Path]) -> Path:
    return make_labels(data)


@pytest.fixture
def archive(data: Path, tree: Path, tmp_path: Path) -> Path:
    assert tlt_command(["pack", str(tree), str(tmp_path / "labels.tlt"), "--images", str(data)]) == 0
    return tmp_path / "labels.tlt"


@pytest.fixture
def train(call: Call, tmp_path: Path) -> Train:
    """Return `train(data, labels, flags, run="run")`: a run of one epoch in `tmp_path/run`."""

    def train(data: Path, labels: Path, flags: str = "", run: str = "run") -> Ended:
        line = f"{QUICK} --epochs 1 --token-label --output {tmp_path} --experiment {run} {flags}"
        return call("train", line, data, "--token-label-data", labels)

    return train


def refused(ended: Ended, text: str) -> None:
    """The program ended with one line that holds `text`, before the first step."""
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert ended.err.startswith("error: ") and text in ended.err
    assert "epoch 1 [" not in ended.out


def change(label: Path, place: tuple[int, ...], value: float) -> None:
    entry = torch.load(label, weights_only=True).clone()
    entry[place] = value
    torch.save(entry, label)


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "archive"])
def test_fault_47_ids_out_of_range_for_num_classes(
    train: Train, data: Path, tree: Path, tmp_path: Path, packed: bool
) -> None:
    # A tree's labels are only read as they are needed, but for the first one; an archive knows its largest id.
    change(tree / "red" / "red15.pt" if packed else tree / "blue" / "blue0.pt", (1, 2, 3, 3), 7)
    labels = tmp_path / "ids.tlt" if packed else tree
    if packed:
        assert tlt_command(["pack", str(tree), str(labels)]) == 0
    ended = train(data, labels)
    refused(ended, "0..3 (--num-classes 4)")
    assert ("class ids up to 7" if packed else "blue0.pt: class id 7") in ended.err


def test_fault_48_nan_in_values(train: Train, data: Path, tree: Path, tmp_path: Path) -> None:
    change(tree / "red" / "red15.pt", (0, 0, 5, 5), float("nan"))
    ended = train(data, tree, "-j 2")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "red15.pt: a label value is NaN or infinite" in ended.err
    assert tlt_command(["pack", str(tree), str(tmp_path / "nan.tlt")]) == 2
    assert not json.loads((tmp_path / "nan.tlt" / "meta.json").read_text())["complete"]
    assert train(data, tree, "-j 2 --bad-label skip").code == 0


def test_a_run_says_how_often_the_labels_name_the_class(train: Train, data: Path, tree: Path) -> None:
    said = "the token labels name the class of {} % of 16 sampled images"
    ended = train(data, tree, "--dry-run")
    assert said.format("100.0") in ended.out and "warning: the token" not in ended.out
    for label in tree.glob("*/*.pt"):
        entry = torch.load(label, weights_only=True)
        entry[1] = (entry[1] + 1) % 4
        torch.save(entry, label)
    assert f"warning: {said.format('0.0')}" in train(data, tree, "--dry-run").out


def test_images_without_labels(train: Train, data: Path, archive: Path, tmp_path: Path) -> None:
    shutil.copy(data / "train" / "red" / "red3.jpg", data / "train" / "red" / "new.jpg")
    ended = train(data, archive)
    refused(ended, "1 of 17 images have no label in")
    assert "red/new.jpg" in ended.err and "--bad-label skip" in ended.err
    for policy in ("skip", "uniform"):
        ended = train(data, archive, f"--bad-label {policy}", run=policy)
        assert (
            ended.code == 0
            and f"first is red/new.jpg (looked for label of red/new.jpg in {archive}); --bad-label {policy}"
            in ended.out
        )
    for image in list(data.glob("train/*/*.jpg")):  # another data set
        image.rename(image.with_name(f"other-{image.name}"))
    refused(train(data, archive, "--bad-label skip"), "17 of 17 images have no label in")

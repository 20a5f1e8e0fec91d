"""Programs on a data set with an index (`tlt index`): what can't be read is known before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, Ended
from tlt.tools import cli

Call = Callable[..., Ended]


@pytest.fixture
def data(make_dataset: Callable[..., Path]) -> Path:
    """An indexed data set with an empty file in both splits and a cut one in training."""
    data = make_dataset()
    (data / "train" / "red" / "red3.jpg").write_bytes(b"")
    (data / "validation" / "red" / "red3.jpg").write_bytes(b"")
    cut = data / "train" / "blue" / "blue0.jpg"
    cut.write_bytes(cut.read_bytes()[:-300])
    assert cli.main(["index", str(data), "--decode", "-j", "1"]) == 0
    return data


def test_unreadable_images_are_told_before_training_and_counted_in_validation(
    call: Call, data: Path, tmp_path: Path
) -> None:
    ended = call("train", f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run")
    assert ended.code == 0, ended.err
    before, _, after = ended.out.partition("epoch 1 [")
    for name in ("train/blue/blue0.jpg", "train/red/red3.jpg", "validation/red/red3.jpg"):
        assert f"left out {data / name}: " in before and name not in after
    assert "over 7 of 8 images, 1 unreadable images left out" in after

    checkpoint = f"--checkpoint {tmp_path / 'run' / 'last.pth.tar'}"
    ended = call("validate", f"{data} -b 4 -j 0 {checkpoint}")
    assert ended.code == 0, ended.err
    assert ended.out.count("red3.jpg: empty file") == 1
    assert "over 7 of 8 images, 1 unreadable images left out" in ended.out
    ended = call("validate", f"{data} -b 4 -j 0 {checkpoint} --max-bad-images 0")
    assert ended.code == 2 and "1 of 8 images can't be read, more than --max-bad-images 0" in ended.err


def test_more_than_allowed_stop_a_run_before_it_starts(call: Call, data: Path, tmp_path: Path) -> None:
    ended = call("train", f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run --max-bad-images 1")
    assert ended.code == 2 and "2 of 16 images can't be read" in ended.err and "[1/" not in ended.out
    assert not (tmp_path / "run").exists()

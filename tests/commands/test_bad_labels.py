"""Token labels that are damaged, foreign or gone, as a user meets them: one line, exit code 2, nothing written lost.

Other files cover in full every way to damage an archive (`tests/labels/test_archive.py`) or a label file, and whose
label it is (`tests/labels/test_store.py`).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import QUICK, Call, Ended
from tlt.tools.cli import main as tlt_command

Train = Callable[..., Ended]


@pytest.fixture
def train(call: Call, tmp_path: Path) -> Train:
    """Return `train(data, labels, flags, run="run")`: a run of one epoch in `tmp_path/run`."""

    def train(data: Path, labels: Path, flags: str = "", run: str = "run") -> Ended:
        line = f"{QUICK} --epochs 1 --token-label --output {tmp_path} --experiment {run} {flags}"
        return call("train", line, data, "--token-label-data", labels)

    return train


def change(label: Path, place: tuple[int, ...], value: float) -> None:
    entry = torch.load(label, weights_only=True).clone()
    entry[place] = value
    torch.save(entry, label)


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "archive"])
def test_fault_47_ids_beyond_num_classes(train: Train, data: Path, labels: Path, tmp_path: Path, packed: bool) -> None:
    # A tree's labels are only read as they are needed, but for the first one; an archive knows its largest id.
    change(labels / "red" / "red15.pt" if packed else labels / "blue" / "blue0.pt", (1, 2, 3, 3), 7)
    given = tmp_path / "ids.tlt" if packed else labels
    if packed:
        assert tlt_command(["pack", str(labels), str(given)]) == 0
    ended = train(data, given)
    assert ended.refused("0..3 (--num-classes 4)") and "epoch 1 [" not in ended.out
    assert ("class ids up to 7" if packed else "blue0.pt: class id 7") in ended.err


def test_a_run_says_how_often_the_labels_name_the_class(train: Train, data: Path, labels: Path) -> None:
    for label in labels.glob("*/*.pt"):
        entry = torch.load(label, weights_only=True)
        entry[1] = (entry[1] + 1) % 4
        torch.save(entry, label)
    assert "warning: the token labels name the class of 0.0 % of 16 sampled images" in train(data, labels).out

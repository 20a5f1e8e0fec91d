"""The picture of the first batch: in every run directory, and never the end of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.commands.conftest import QUICK, Call
from tlt.tools import drawing
from tlt.tools.drawing import Example, draw_page
from volo.train import batch_watch

pytestmark = pytest.mark.usefixtures("pictures")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[Example]]:
    """The examples of every page that is drawn."""
    pages: list[list[Example]] = []

    def draw(examples: list[Example], *rest: str) -> object:
        pages.append(examples)
        return draw_page(examples, *rest)

    monkeypatch.setattr(drawing, "draw_page", draw)
    return pages


@pytest.mark.parametrize(
    ("flags", "count"),  # two batches in the first update
    [
        ("-b 4 --grad-accum-steps 2 DATA", 3),
        ("-b 2 --data-backend synthetic --token-label --token-label-data LABELS", 2),
    ],
)
def test_every_kind_of_run_has_one(
    flags: str,
    count: int,
    call: Call,
    data: Path,
    labels: Path,
    tmp_path: Path,
    drawn: list[list[Example]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_watch, "_IMAGES", 3)
    monkeypatch.setattr("volo.train.data.SYNTHETIC_UPDATES", 2)
    flags = f"{QUICK} {flags.replace('DATA', str(data)).replace('LABELS', str(labels))} --epochs 1 --reprob 0"
    ended = call("train", f"{flags} --output {tmp_path} --experiment run")
    assert ended.code == 0 and "drew first_batch.png" in ended.out, ended.err
    (examples,) = drawn  # of the first batch alone
    assert [example.augmented.shape for example in examples] == [(32, 32, 3)] * count
    plain = [example.label is None and example.tokens is None for example in examples]
    assert plain == ["--token-label" not in flags] * count
    with Image.open(tmp_path / "run" / "first_batch.png") as page:
        page.verify()


def test_without_matplotlib_one_line_says_what_is_missing(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = batch_watch.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = call("train", f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run")
    assert ended.code == 0, ended.err
    assert ended.out.count("volo-tlt[plot]") == 1
    assert "neither learning curves nor the first batch will be drawn" in ended.out
    assert not list((tmp_path / "run").glob("*.png"))

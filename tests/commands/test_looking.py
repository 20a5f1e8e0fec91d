"""What a user sees of a run: the bar on a terminal, the lines of a log, curves, and one page of it all."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tqdm.std

from tests.commands.conftest import QUICK, Ended
from tests.conftest import LIMIT
from volo.record import logger as logger_module
from volo.record.run_directory import RunDirectory

Call = Callable[..., Ended]


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_one_page_holds_the_whole_run(call: Call, make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    flags = f"{make_dataset()} {QUICK} --epochs 2 --output {tmp_path} --experiment a<b>&c"
    ended = call("train", flags)
    assert ended.code == 0, ended.err
    assert "dense" not in ended.out and "(class" not in ended.out
    again = call("train", f"{flags} --resume auto")
    assert again.code == 0 and "this run was finished before: all of its 2 epochs are done" in again.out
    run = tmp_path / "a<b>&c"
    ended = call("report", "--html", run)
    assert ended.code == 0, ended.err
    page = Page(run / "report.html")
    assert next(iter(page.text.split("\n"))).startswith("a<b>&c") and "model: volo_test" in page.text
    assert "4 updates reported, 2 epochs finished" in page.text and '"torch":' in page.text
    pictures = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 2 and all(each.startswith("data:image/png;base64,iVBOR") for each in pictures)
    assert not any(name in attributes for _, attributes in page.tags for name in ("href", "onclick"))

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to open the page in")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
    shown = subprocess.run(
        [*command, "--dump-dom", (run / "report.html").as_uri()], capture_output=True, text=True, timeout=LIMIT
    )
    assert shown.returncode == 0 and "2 epochs finished" in shown.stdout, shown.stderr


def test_a_terminal_of_80_columns_shows_a_bar_and_the_log_the_lines(
    call: Call, make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda fp: (80, 24))
    monkeypatch.setattr(logger_module, "duration", lambda seconds: "112:01:04")
    data = make_dataset()
    ended = call("train", f"{data} {QUICK} --epochs 2 --token-label --output {tmp_path} --experiment run")
    assert ended.code == 0
    bars = [bar for bar in terminal.getvalue().replace("\n", "\r").split("\r") if "images/s" in bar]
    assert bars and all(len(bar) <= 80 for bar in bars)
    assert any("epoch 2/2" in bar and "loss" in bar and "ETA 112:01:04" in bar for bar in bars)
    assert "epoch 1 [1/2]" not in ended.out and "epoch 1 [1/2] loss" in (tmp_path / "run" / "log.txt").read_text()


def test_curves_count_epochs_from_one_and_leave_out_what_is_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, list[Any]] = {}
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, label="", **more: drawn.update({label: [list(x), list(y)]}) or []
    )
    directory = RunDirectory(tmp_path)
    for epoch, loss in enumerate((2.0, 1.5, 1.0)):
        losses = {"train_loss": loss, "train_cls_loss": loss, "train_dense_loss": 0.0, "eval_loss": 3 * loss}
        directory.summary({"epoch": epoch, **losses, "eval_top1": 40.0 + epoch, "eval_top5": 100.0})
    directory.draw_curve()
    assert drawn == {
        "train loss": [[1, 2, 3], [2.0, 1.5, 1.0]],
        "eval loss": [[1, 2, 3], [6.0, 4.5, 3.0]],
        "eval top1": [[1, 2, 3], [40.0, 41.0, 42.0]],
    }

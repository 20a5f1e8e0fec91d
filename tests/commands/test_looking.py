"""What a user sees of a run: the bar on a terminal, the lines of a log, pictures, and one page of it all."""

import html
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tqdm.std
from PIL import Image

from tests.commands.conftest import QUICK, Call
from tests.tools.test_show import linear
from tlt.tools import drawing
from tlt.tools.drawing import Example, draw_page
from volo.record import logger as logger_module
from volo.train import meter


@pytest.mark.usefixtures("pictures")
def test_one_page_holds_the_whole_run(call: Call, data: Path, tmp_path: Path) -> None:
    flags = f"{data} {QUICK} --epochs 2 --output {tmp_path} --experiment a<b>&c"
    ended = call("train", flags).ok()
    assert "dense" not in ended.out and "(class" not in ended.out
    verdict = ended.out.splitlines()[-1]
    assert "is no better than naming the largest class, 25.0 %" in verdict  # as after 4 updates it cannot be
    again = call("train", f"{flags} --resume auto")
    assert again.code == 0 and "this run was finished before: all of its 2 epochs are done" in again.out
    run = tmp_path / "a<b>&c"
    ended = call("report", "--html", run).ok()
    page = (run / "report.html").read_text()
    assert (
        ended.out.startswith(f"verdict  {verdict}\ntop-1 ")
        and f"<dl><dt>verdict</dt><dd>{html.escape(verdict)}" in page
    )
    assert "a<b>" not in page and "a&lt;b&gt;&amp;c" in page and "model: volo_test" in page
    assert "4 updates reported, 2 epochs finished" in page and '"torch":' in html.unescape(page)
    assert page.count("<img") == page.count('src="data:image/png;base64,iVBOR') == page.count("src=") == 4
    assert "href=" not in page and "onclick=" not in page
    # What matters comes first; all settings and versions are folded.
    settings, pictures = "Settings other than the defaults", ('alt="Loss and accuracy"', 'alt="What is taken for what"')
    order = ["<dt>top-1</dt><dd>best ", *pictures, settings, "<details>", "model: volo_"]
    assert sorted(order, key=page.index) == order
    changed = page[page.index(settings) : page.index("</pre>", page.index(settings))]
    assert "--img-size 32\n" in changed and "--smoothing" not in changed
    assert 'name="viewport"' in page
    schemes = re.findall(r"--ink:(#\w+);--faint:(#\w+);--paper:(#\w+);--box:(#\w+)", page)
    assert len(schemes) == 2 and "prefers-color-scheme:dark" in page
    for ink, faint, paper, box in schemes:  # as WCAG asks for text
        assert min(contrast(ink, paper), contrast(ink, box), contrast(faint, paper)) > 4.5


def contrast(one: str, other: str) -> float:
    """Of two colours by WCAG, from 1 to 21."""
    light, dark = sorted((np.dot(linear(colour), (0.2126, 0.7152, 0.0722)) for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_narrow_terminal_shows_a_bar_and_the_log_lines(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda fp: (80, 24))
    for module in (logger_module, meter):
        monkeypatch.setattr(module, "duration", lambda seconds: "112:01:04")
    ended = call("train", f"{data} {QUICK} --epochs 2 --token-label --output {tmp_path} --experiment run")
    assert ended.code == 0
    bars = [bar for bar in terminal.getvalue().replace("\n", "\r").split("\r") if "images/s" in bar]
    assert bars and all(len(bar) <= 80 for bar in bars)
    assert any("epoch 2/2" in bar and "loss" in bar and "ETA 112:01:04" in bar for bar in bars)
    log = (tmp_path / "run" / "log.txt").read_text()
    # A line an epoch stays where its bar has gone; the log has the intervals as well.
    lines = [line for line in ended.out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2 and lines[0].startswith("epoch 1/2: loss ") and lines[0].endswith(", best")
    assert all(len(line) <= 79 and re.search(r"validation \d+\.\d+\), top-1 \d+\.\d\d %", line) for line in lines)
    assert all(log.count(f" epoch {n} [{k}/2] loss") == 1 for n in (1, 2) for k in (1, 2)) and "per device)" not in log
    assert log.count(" validation: top-1 ") == 2 and all(f" {line}\n" in log for line in lines)
    # The last line of the start tells how long it takes.
    assert ended.out.splitlines()[ended.out.splitlines().index(lines[0]) - 1].startswith(
        "the run takes about 112:01:04: 1 of"
    )
    # With no interval within an epoch, the bar tells what the last one was.
    terminal.truncate(0)
    ended = call("train", f"{data} {QUICK} --log-interval 50 --epochs 2 --output {tmp_path} --experiment few")
    assert ended.code == 0
    bars = terminal.getvalue().replace("\n", "\r").split("\r")
    assert any("epoch 2/2" in bar and "0/2, loss" in bar and "images/s" in bar for bar in bars)


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("flags", "count"),  # two batches in the first update
    [
        ("-b 4 --grad-accum-steps 2 DATA", 3),
        ("-b 2 --data-backend synthetic --token-label --token-label-data LABELS", 2),
    ],
)
def test_every_kind_of_run_has_one(
    flags: str, count: int, call: Call, data: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[list[Example]]()
    monkeypatch.setattr(drawing, "draw_page", lambda page, *rest: drawn.append(page) or draw_page(page, *rest))
    monkeypatch.setattr(meter, "_IMAGES", 3)
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


@pytest.mark.usefixtures("pictures")
def test_missing_matplotlib_is_one_line(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = meter.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = call("train", f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run").ok()
    assert ended.out.count("pip install '.[plot]'") == 1
    assert "no pictures will be drawn (curves, first batch, confusion): " in ended.out
    assert not list((tmp_path / "run").glob("*.png"))

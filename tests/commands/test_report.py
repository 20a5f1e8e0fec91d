"""What a user sees of a run: the bar on a terminal, the lines of a log, pictures, one page of it all; and the report of
what was done to a run, computed here by hand from records written by hand."""

import html
import io
import json
import os
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm.std
from PIL import Image

from tests.commands.conftest import QUICK
from tests.tools.test_show import linear
from tlt.tools import drawing
from tlt.tools.drawing import Example, draw_page
from volo import cli
from volo.record import logger as logger_module
from volo.train import meter


@pytest.mark.usefixtures("pictures")
def test_one_page_holds_the_whole_run(call, data, tmp_path):
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
    (bar,) = re.findall(r"\nTime\n([#dvs+.]{79})\n#  training ", ended.out)
    shares = re.findall(r'<i class="p\d" style="flex:([\d.]+)" title=', page)
    assert {*bar} >= {*"#dvs"} and sum(map(float, shares)) == pytest.approx(100, abs=0.01)
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


def test_narrow_terminal_shows_a_bar_and_the_log_lines(call, data, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda fp: (80, 24))
    for module in (logger_module, meter):
        monkeypatch.setattr(module, "duration", lambda seconds: "112:01:04")
    ended = call("train", f"{data} {QUICK} --epochs 2 --token-label --output {tmp_path} --experiment run").ok()
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
    ended = call("train", f"{data} {QUICK} --log-interval 50 --epochs 2 --output {tmp_path} --experiment few").ok()
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
def test_every_kind_of_run_has_one(flags, count, call, data, labels, tmp_path, monkeypatch):
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
def test_missing_matplotlib_is_one_line(call, data, tmp_path, monkeypatch):
    result = meter.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else result(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = call("train", f"{data} {QUICK} --epochs 1 --output {tmp_path} --experiment run").ok()
    assert ended.out.count("pip install '.[plot]'") == 1
    assert "no pictures will be drawn (curves, first batch, confusion): " in ended.out
    assert not list((tmp_path / "run").glob("*.png"))


DAY = 24 * 3600.0
BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def _at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def _event(seconds: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": _at(seconds), "kind": kind, "rank": 0, "node": "n1", "pid": 7, **fields}


def _report(at: float, update: int, **fields: Any) -> dict[str, Any]:
    """A report of 10 updates of 8 images that took 20 s, 5 of them waiting."""
    known = {"event": "train", "epoch": 0, "update": update, "updates": 10, "images": 80, "loss": 1.0 / update}
    times = {"seconds": 20.0, "wait_seconds": 5.0, "images_per_second": 4.0, "time": _at(at)}
    return known | times | fields


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed at 100 s with 30 updates done, resumed a day and 60 s later on another node from update 20, finished."""
    run = tmp_path / "run"
    run.mkdir()
    events = [
        _event(0, "start", world_size=2),
        _event(80, "checkpoint", update=20),
        _event(81, "skipped-image", path="a.jpg", reason="empty file", update=20),
        _event(81, "skipped-image", path="b.jpg", reason="no image", rank=1, pid=8, update=20),
        _event(81, "bad-label", path="c.pt", reason="truncated", update=20),
        _event(DAY + 160, "start", world_size=1, node="n2", pid=9),
        _event(DAY + 161, "resume", update=20, path="last.pth.tar", skipped=["x is damaged"], node="n2", pid=9),
        _event(DAY + 180, "start", node="n3"),  # a second job that was kept out changes nothing
        _event(DAY + 181, "end", node="n3", exit_code=2, reason="locked"),
        _event(DAY + 225, "end", update=40, exit_code=0, reason="done", node="n2", pid=9),
    ]
    _write(run / "events.jsonl", events)
    _write(run / "metrics.jsonl", [_report(*r) for r in ((50, 10), (70, 20), (DAY + 190, 30), (DAY + 220, 40))])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "epoch", "epoch": 0, "eval_top1": 50.0, "time": _at(DAY + 222)}) + "\n")
    return run


def test_the_printed_report(run, capsys):
    whole = {"epoch": 0, "update": 40, "state_dict": {"w": torch.ones(300)}}
    torch.save(whole, run / "last.pth.tar")
    os.link(run / "last.pth.tar", run / "checkpoint-0.pth.tar")
    content = bytearray((run / "last.pth.tar").read_bytes())
    content[content.index(torch.ones(3).numpy().tobytes())] ^= 1
    (run / "model_best.pth.tar").write_bytes(content)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "en\n\xff\xfe\n[1]\n' + b"[" * 100_000 + b"\n")
    assert cli.run("report", [str(run)]) == 0
    out = capsys.readouterr().out
    for expected in (
        "40 updates reported, 1 epochs finished, loss 0.0250",
        "4 damaged lines of events.jsonl are left out",
        "n1 2 0 -> 20 01:21 not recorded, last event 2026-01-02 03:05:26",
        "n2 1 20 -> 40 01:05 0: done",
        "n3 ? 0 -> 0 00:01 2: locked",
        "training 01:20 for 40 updates, 4.0 images/s",
        "waiting for data 00:20 (25 %)",
        "from the first start to the last record 1d 00:03:45",
        "the same file as checkpoint-0.pth.tar",
        "BAD: is damaged: record",
        "1 x damaged checkpoint skipped 2 x skipped-image",
        "a.jpg: empty file",
        "c.pt: truncated",
    ):
        assert expected in " ".join(out.split()), expected
    assert [line.split()[1:3] for line in out.splitlines() if line.endswith("  verified")] == [["1", "40"]]
    assert cli.run("report", [str(run), "--quick"]) == 0
    assert "not verified" in capsys.readouterr().out


def test_the_head_tells_the_result_and_how_it_was_made(run, capsys):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = ((30.0, 41.0), (62.5, 50.0), (62.5, 49.5), (None, None))  # an epoch without a finite score is neither
    epochs = [{"event": "epoch", "epoch": n, "eval_top1": a, "eval_images": 8} for n, (a, _) in enumerate(scores)]
    command = ["/somewhere/train.py", "my data", "--epochs", "4"]
    _write(run / "events.jsonl", [_event(0, "start", command=command), _event(60, "end")])
    log = ["2026-01-02 03:04:05 model m: 1.50 M parameters", "2026-01-02 03:04:06 data: 16 training images"]
    (run / "log.txt").write_text("\n".join(log))
    for more, best in (({}, "best 62.50 % (epoch 2), last 62.50 % (epoch 3), 8"), ({"eval_top1_ema": 1}, "")):
        if more:
            epochs = [epoch | {"eval_top1_ema": ema} for epoch, (_, ema) in zip(epochs, scores, strict=True)]
            best = "best 50.00 % (epoch 2), last 49.50 % (epoch 3) of the averaged weights, 8"
        _write(run / "metrics.jsonl", records[:-1] + epochs)
        assert cli.run("report", [str(run), "--html"]) == 0
        out, page = capsys.readouterr().out, (run / "report.html").read_text()
        for term, text in {
            "top-1": f"{best} validation images", "model": "m: 1.50 M parameters", "data": "16 training images",
            "time": "from the first start to the last record", "command": "python train.py 'my data' --epochs 4",
        }.items():  # fmt: skip
            assert f"{term:<9}{text}" in out and f"<dt>{term}</dt><dd>{html.escape(text)}" in page


def test_a_folder_that_is_no_run_is_refused_in_a_line(tmp_path, capsys):
    assert cli.run("report", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no run directory")


def test_worst_classes_are_listed_and_others_linked(run, capsys):
    rows = [f'"a<b>, {number}",40,{number}.00,c,7' for number in range(25)]
    (run / "classes.csv").write_text("\n".join(["class,images,top-1 (%),mostly taken for,times", *rows]))
    assert cli.run("report", [str(run), "--html"]) == 0
    out, page = capsys.readouterr().out, (run / "report.html").read_text()
    assert (
        "a<b>, 19  40      19.00      c                 7\nand 5 more, in classes.csv" in out and "a<b>, 20" not in out
    )
    assert "a&lt;b&gt;, 19" in page and 'and 5 more, in <a href="classes.csv">' in page

"""The report tells what was done to a run: computed here by hand from records written by hand."""

import html
import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from volo import cli

DAY = 24 * 3600.0
BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
Capture = pytest.CaptureFixture[str]


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


def test_the_printed_report(run: Path, capsys: Capture) -> None:
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


def test_the_head_tells_the_result_and_how_it_was_made(run: Path, capsys: Capture) -> None:
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


def test_a_folder_that_is_no_run_is_refused_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    assert cli.run("report", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no run directory")


def test_worst_classes_are_listed_and_others_linked(run: Path, capsys: Capture) -> None:
    rows = [f'"a<b>, {number}",40,{number}.00,c,7' for number in range(25)]
    (run / "classes.csv").write_text("\n".join(["class,images,top-1 (%),mostly taken for,times", *rows]))
    assert cli.run("report", [str(run), "--html"]) == 0
    out, page = capsys.readouterr().out, (run / "report.html").read_text()
    assert (
        "a<b>, 19  40      19.00      c                 7\nand 5 more, in classes.csv" in out and "a<b>, 20" not in out
    )
    assert "a&lt;b&gt;, 19" in page and 'and 5 more, in <a href="classes.csv">' in page

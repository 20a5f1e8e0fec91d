"""What a run says about itself: whole lines of strict JSON, whatever happens to it, and one warning of slow data."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tests.record.tracked import report
from tlt.data.batch import Skipped
from tlt.errors import NonFiniteError
from volo.cluster.distributed import World
from volo.config.train import TRAIN
from volo.record import records
from volo.record.history import EVENTS, read_json_lines
from volo.record.logger import Logger
from volo.record.metrics import EpochTotals, Evaluation
from volo.record.records import LineFile, RunRecords, strict_json


def _logger(rank: int = 0) -> Logger:
    return Logger(World(rank, rank, 2, torch.device("cpu")))


def test_events_of_all_ranks_come_before_and_after_the_directory(tmp_path):
    (tmp_path / EVENTS).write_text('{"kind": "start", "rank": 0}\n{"kind": "chec')  # torn by a power cut
    for logger in (_logger(0), _logger(1)):
        logger.event("start", lr=float("nan"))
        logger.open_events(tmp_path)
        logger.set_position(3, 70)
        logger.skipped("skipped-image", [Skipped("a\nb.jpg", "empty file")])
    (_, *events), damaged = read_json_lines(tmp_path / EVENTS)
    assert damaged == 1
    assert [(e["rank"], e["kind"]) for e in events] == [(r, k) for r in (0, 1) for k in ("start", "skipped-image")]
    assert events[0]["lr"] is None and "update" not in events[0]
    assert {"epoch": 3, "update": 70, "path": "a\\nb.jpg", "reason": "empty file"}.items() <= events[1].items()
    assert events[0]["pid"] == os.getpid() and events[0]["time"].endswith("+00:00")


def test_the_curve_shows_an_epoch_at_its_number(tmp_path, monkeypatch):
    drawn = list[Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    run = RunRecords(tmp_path / ("ru$n$" + 50 * "W"))
    args = TRAIN.parse(["/data", "--token-label", "--token-label-data", "l"])
    run.record_start(args, 1, "cpu")
    for epoch in range(3):
        row = dict.fromkeys(("train_loss", "train_cls_loss"), 3.0 - epoch)  # as without a dense loss
        row |= {"eval_loss": None if epoch == 1 else 5.0, "eval_top1": epoch, "eval_top5": 9}
        run.epoch({"epoch": epoch, **row})
    run.draw_curve()
    figure, losses = drawn[0], drawn[0].axes[0]
    figure.draw_without_rendering()
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert legends == [["validation loss", "training loss"], ["top-5", "top-1"]]  # in the order of the lines' ends
    title = figure._suptitle.get_window_extent()
    assert title.x0 > 0 and title.x1 < figure.bbox.x1 and figure.get_suptitle().startswith("ru$n$")
    assert losses.get_ylabel() == "loss = class + 0.5 dense"
    assert all(float(tick).is_integer() for axes in figure.axes for tick in axes.xaxis.get_major_locator()())
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in losses.lines]
    assert all(one != other for one, other in zip(*looks, strict=True))
    for flags, told in (("--cls-weight 0 --dense-weight 1", "loss = dense"), ("--token-label-size 1", "loss")):
        run.record_start(TRAIN.parse(["/data", "--token-label", "--token-label-data", "l", *flags.split()]), 1, "cpu")
        assert run._loss_text() == told
    lines = {line.get_label(): np.stack(line.get_data(), 1).tolist() for axes in drawn[0].axes for line in axes.lines}
    assert lines.pop("top-1") == [[1, 0], [2, 1], [3, 2]] and lines.pop("top-5")
    assert lines == {"training loss": [[1, 3], [2, 2], [3, 1]], "validation loss": [[1, 5], [3, 5]]}


def test_of_short_epochs_some_curves_are_drawn_and_the_last(tmp_path, monkeypatch):
    clock, drawn, logger = 0.0, list[float](), _logger()
    monkeypatch.setattr("volo.record.logger.time.monotonic", lambda: clock)

    def draw(self: RunRecords) -> None:
        nonlocal clock
        drawn.append(clock)
        clock += 2

    monkeypatch.setattr(RunRecords, "draw_curve", draw)
    logger.records = RunRecords(tmp_path)
    for epoch in range(100):
        clock += 1
        logger.curve(last=epoch == 99)
    assert drawn == [1, 3 + 60, 104]  # a thirtieth of the time, and the last
    clock += 1000  # an epoch of many minutes
    logger.curve()
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (None, 0, "done"),
        (NonFiniteError("broken"), 3, "broken"),
        (KeyboardInterrupt(), 130, "interrupted from the keyboard"),
        (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError: by"),
    ],
)
def test_the_end_of_a_run_is_noted(error, code, why, tmp_path):
    logger = _logger()
    logger.open_events(tmp_path)
    try:
        with logger.end_noted():
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    (event,), _ = read_json_lines(tmp_path / EVENTS)
    assert (event["kind"], event["exit_code"], event["reason"]) == ("end", code, why)


def test_writers_do_not_tear_each_others_lines(tmp_path):
    def write(writer: int) -> None:  # as a process does, which opens the file for itself
        lines = LineFile(tmp_path / EVENTS)
        for count in range(200):
            lines.append(strict_json({"writer": writer, "count": count, "text": "x" * 3000}))

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(write, range(3)))
    records, damaged = read_json_lines(tmp_path / EVENTS)
    assert damaged == 0
    for writer in range(3):
        assert [r["count"] for r in records if r["writer"] == writer] == list(range(200))


def test_lines_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    lines, room, os_write = LineFile(tmp_path / "x"), [2], os.write
    lines.append("one")

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, room[0] = data[: room[0]], max(0, room[0] - len(data))
        return os_write(descriptor, part)

    monkeypatch.setattr(records.os, "write", write)
    lines.append("two")
    lines.append("three")
    monkeypatch.undo()
    lines.append("four")
    assert (tmp_path / "x").read_text().splitlines() == ["one", "tw", "two", "three", "four"]


def test_log_begins_with_lines_from_before_its_directory(tmp_path):
    for rank in (0, 1):
        logger = _logger(rank)
        logger.line("learning rate 0.1")
        if rank == 0:
            logger.open(RunRecords(tmp_path), range(11))
        logger.line("epoch 1")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["learning rate 0.1", "epoch 1"]


def test_slow_data_is_reported_once_a_run_with_advice(tmp_path, capsys):
    logger = _logger()
    logger.open_events(tmp_path)
    logger.open(RunRecords(tmp_path), (0, 1, 2, 3, 5, 9, 13, 17, 21, 25, 29))
    advised = []
    # Of 100 s each: 25 s in all, which may be workers that begin; 17.5 % of the time; more.
    for waited in (25.0, 10.0, 60.0, 60.0):
        logger.interval(report(4, seconds=100.0, wait_seconds=waited))  # the first of the second epoch
        printed = capsys.readouterr().out
        advised.append("--workers" in printed)
        assert "| ETA 20:00" in printed  # six updates are left, of twice the work each
    assert advised == [False, False, True, False]
    (event,), _ = read_json_lines(tmp_path / EVENTS)
    assert event["kind"] == "data-wait" and event["share"] == 0.317


def totals(loss: float) -> EpochTotals:
    return EpochTotals(24, 0, 6.0, loss, 1.0, 0.5, 0.1)


def evaluation(top1: float, loss: float) -> Evaluation:
    return Evaluation(top1, 99.0, loss, 8, 0, 1.0, dense_top1=50.0, tokens=9)


@pytest.mark.parametrize(
    ("epochs", "loss", "scores", "since", "line"),
    [
        (300, 2.3026, {"model": (12.5, 2.25)}, 0, "loss 2.303 (validation 2.25), top-1 12.50 %, best"),
        (300, 2.3026, {"model": (12.5, 2.25)}, 1, "loss 2.303 (validation 2.25), top-1 12.50 %"),
        (9, 0.1, {"model": (0, 1), "ema": (1, 2)}, 0, "loss 0.1 (validation 1), top-1 0.00 %, EMA 1.00 %, best"),
        (9, float("nan"), {}, 0, "loss nan"),
        (9999, 2.3026, {"model": (100, 1.5), "ema": (100, 1)}, 0, "loss 2.303 (validation 1.5), top-1 100.00 %, best"),
        (9999, -1e-9, {"model": (1, -1e30)}, 0, "loss -1e-09 (validation -1e+30), top-1 1.00 %, best"),
    ],
)
def test_epoch_line_has_79_columns_and_marks_the_best(
    epochs, loss, scores, since, line, tmp_path,
    capsys,
):  # fmt: skip
    logger = Logger(World(0, 0, 1, torch.device("cpu")))
    logger.open(RunRecords(tmp_path), (0, 1))
    logger.start_epoch(epochs - 1, epochs, 8)
    logger.epoch(epochs - 1, totals(loss), {n: evaluation(*s) for n, s in scores.items()}, 1.0, since)
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed == f"epoch {epochs}/{epochs}: {line}" and len(printed) <= 79


def test_terminal_wraps_words(tmp_path, monkeypatch, capsys):
    logger = Logger(World(0, 0, 1, torch.device("cpu")))
    logger.open(RunRecords(tmp_path), (0, 1))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = f"warning: {'/a-long-name' * 9}: --warmup-epochs, --token-label-data and others; {'word-' * 5} " * 3
    logger.line(text)
    logger.detail("only for the log")
    printed = capsys.readouterr().out
    assert printed.split() == text.split() and "only for" not in printed
    assert all(len(line) <= 79 or len(line.split()) == 1 for line in printed.splitlines())
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in log] == [text, "only for the log"]

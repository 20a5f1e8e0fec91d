"""What a run says about itself is whole lines of strict JSON, whatever happens to it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from tlt.data.batch import Skipped
from tlt.errors import NonFiniteError
from volo.cluster.distributed import World
from volo.record import json_lines
from volo.record.events import FILE
from volo.record.json_lines import LineFile, read_json_lines, strict_json
from volo.record.logger import Logger


def _logger(rank: int = 0) -> Logger:
    return Logger(World(rank, rank, 2, torch.device("cpu")))


def _strict(line: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_events_of_all_ranks_from_before_and_after_the_directory_is_known(tmp_path: Path) -> None:
    loggers = [_logger(0), _logger(1)]
    for logger in loggers:
        logger.event("start", lr=float("nan"))
        logger.open_events(tmp_path)
        logger.at(3, 70)
        logger.skipped("skipped-image", [Skipped("a\nb.jpg", "empty file")])
    events, damaged = read_json_lines(tmp_path / FILE)
    assert damaged == 0
    assert [(e["rank"], e["kind"]) for e in events] == [(r, k) for r in (0, 1) for k in ("start", "skipped-image")]
    assert events[0]["lr"] is None and "update" not in events[0]
    assert {"epoch": 3, "update": 70, "path": "a\\nb.jpg", "reason": "empty file"}.items() <= events[1].items()
    assert events[0]["pid"] == os.getpid() and events[0]["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (None, 0, "done"),
        (NonFiniteError("broken"), 3, "broken"),
        (KeyboardInterrupt(), 130, "interrupted from the keyboard"),
        (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError: by"),
    ],
)
def test_the_end_of_a_run_is_noted(error: BaseException | None, code: int, why: str, tmp_path: Path) -> None:
    logger = _logger()
    logger.open_events(tmp_path)
    try:
        with logger.end_noted():
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    (event,), _ = read_json_lines(tmp_path / FILE)
    assert (event["kind"], event["exit_code"], event["reason"]) == ("end", code, why)


def _write_many(file: Path, number: int) -> None:
    lines = LineFile(file)
    for count in range(200):
        lines.append(strict_json({"process": number, "count": count, "text": "x" * 3000}))


def test_processes_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(tmp_path / FILE, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    records, damaged = read_json_lines(tmp_path / FILE)
    assert damaged == 0
    for number in range(3):
        assert [r["count"] for r in records if r["process"] == number] == list(range(200))


def test_a_line_torn_by_a_power_cut_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text('{"kind": "start"}\n{"kind": "chec')
    log = _logger()
    log.open_events(tmp_path)
    log.event("end")
    log.event("start")
    records, damaged = read_json_lines(file)
    assert [r["kind"] for r in records] == ["start", "end", "start"] and damaged == 1


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "x")
    lines.append("one")
    room = [2]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, room[0] = data[: room[0]], max(0, room[0] - len(data))
        return os_write(descriptor, part)

    os_write = os.write
    monkeypatch.setattr(json_lines.os, "write", write)
    lines.append("two")
    lines.append("three")
    assert lines.error is not None and lines.error.errno == errno.ENOSPC
    monkeypatch.undo()
    lines.append("four")
    assert lines.error is None
    assert (tmp_path / "x").read_text().splitlines() == ["one", "tw", "two", "three", "four"]

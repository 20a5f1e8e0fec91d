"""Where a run writes, that nothing saved is overwritten, and that one job writes there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import yaml

from tests.commands.conftest import ROOT
from tests.conftest import python_path
from tlt.errors import UserError
from volo.config.settings_train import TrainSettings
from volo.record import records, run_directory
from volo.record.history import read_json_lines
from volo.record.records import RunRecords
from volo.record.run_directory import RunLock, new_directory, newest_alike


def test_a_new_directory_overwrites_no_other(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--output {tmp_path}/file/.*: cannot create the run directory"):
        new_directory(tmp_path / "file", "-volo_d1-224", make=True)
    made = new_directory(tmp_path, "-volo_d1-224", make=True)
    assert made.is_dir() and made.name.endswith("-volo_d1-224")


def test_the_newest_run_of_the_same_experiment(tmp_path):
    for name, recorded in (
        ("20260101-volo_d1", {"lr": 0.1, "seed": 1, "workers": 4, "output": "elsewhere", "data_dir": "/node7/scratch"}),
        ("20260102-volo_d1", {"lr": 0.1, "seed": 2}),
        ("20260103-volo_d1", {"lr": 0.2, "seed": 1}),
        ("20260104-volo_d2", {"lr": 0.1, "seed": 1}),
    ):
        (tmp_path / f"{name}-224").mkdir()
        (tmp_path / f"{name}-224" / "args.yaml").write_text(yaml.safe_dump(recorded))
    reported: list[str] = []
    newest = newest_alike(tmp_path, "-volo_d1-224", {"lr": 0.1, "seed": 1}, (), reported.append)
    assert newest == tmp_path / "20260101-volo_d1-224"
    assert reported == [
        f"--resume auto leaves {tmp_path}/20260103-volo_d1-224 alone, another experiment (lr: 0.2 before, 0.1 now): "
        "--experiment 20260103-volo_d1-224 would go on with it"
    ]
    assert newest_alike(tmp_path, "-volo_d1-224", {"lr": 0.1, "seed": 3}, (), reported.append) is None
    assert "lr: 0.2 before, 0.1 now; seed: 1 before, 3 now" in reported[1]


def test_the_newest_run_began_last_wherever_that_was(tmp_path):
    for name, time in (
        ("20261025-120000", "2026-10-25T12:00:00+05:30"),
        ("20261025-023000", "2026-10-25T02:30:00+02:00"),  # an hour that comes twice
        ("20261025-021500", "2026-10-25T02:15:00+01:00"),
        ("20261025-021500-2", "2026-10-25T02:15:00+01:00"),
        ("20261025-021500-10", "2026-10-25T02:15:00+01:00"),
        ("20261024-235959", "2026-10-25T09:59:59+10:00"),
        ("20261024-180000", "2026-10-24T18:00:00-08:00"),
        ("20261024-120000", None),
        ("20261023-120000", "yesterday"),
    ):
        (run := tmp_path / f"{name}-volo_d1-224").mkdir()
        (run / "args.yaml").write_text("lr: 0.1\n")
        if time:
            (run / "run.json").write_text(json.dumps([{"time": time}, {"time": "2027-01-01T00:00:00+00:00"}]))
    chosen = []
    while newest := newest_alike(tmp_path, "-volo_d1-224", {"lr": 0.1}, (), print):
        chosen.append(newest.name.removesuffix("-volo_d1-224"))
        shutil.rmtree(newest)
    assert chosen == [
        *("20261025-120000", "20261024-180000", "20261025-021500-10", "20261025-021500-2", "20261025-021500"),
        *("20261025-023000", "20261024-235959", "20261024-120000", "20261023-120000"),
    ]


def test_runs_that_start_in_the_same_second_keep_apart(tmp_path, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(run_directory, "datetime", Clock)
    root, start = tmp_path / "not there", "20260102-030405"
    assert new_directory(root, "-volo_d1-224", make=False) == root / f"{start}-volo_d1-224" and not root.exists()
    with ThreadPoolExecutor(8) as jobs:
        chosen = list(jobs.map(lambda _: new_directory(root, "-volo_d1-224", make=True), range(8)))
    names = [f"{start}-volo_d1-224", *(f"{start}-{number}-volo_d1-224" for number in range(2, 9))]
    assert sorted(path.name for path in chosen) == sorted(names) == sorted(path.name for path in root.iterdir())


def test_fault_12_records_of_repeated_steps_are_removed(tmp_path):
    directory, metrics, summary = RunRecords(tmp_path), tmp_path / "metrics.jsonl", tmp_path / "summary.csv"
    for epoch in range(2):
        for update in (2, 4):
            directory.metrics({"event": "train", "epoch": epoch, "update": 4 * epoch + update})
        directory.epoch({"epoch": epoch, "train_loss": 1.0 / 3})
    before = metrics.read_bytes(), summary.read_bytes()
    assert directory.rewind(2, 8) == 0 and before == (metrics.read_bytes(), summary.read_bytes())
    with metrics.open("a") as file:
        file.write('{"event": "train", "epo')  # torn by a kill
    assert directory.rewind(1, 6) == 3
    kept, damaged = read_json_lines(metrics)
    assert [(r["event"], r["epoch"], r.get("update")) for r in kept] == [
        ("train", 0, 2), ("train", 0, 4), ("epoch", 0, None), ("train", 1, 6),
    ]  # fmt: skip
    assert damaged == 0 and before[0].startswith(metrics.read_bytes())
    assert summary.read_text() == "epoch,train_loss\n1,0.3333333333333333\n"
    assert directory.rewind(0, 0) == 4 and metrics.read_bytes() == b""


def test_a_full_disk_and_damaged_records_stop_nothing(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("[{")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "epoch", "epoch": 0}\n\x00\x00\xff,2\n')
    directory = RunRecords(tmp_path)
    directory.record_start(TrainSettings().decide("command line", scale=[0.1, 1.0]), 2, "cpu")
    directory.record_start(TrainSettings(), 1, "cpu")
    assert yaml.safe_load((tmp_path / "args.yaml").read_text())["model"] == "volo_d1"
    assert [start["world_size"] for start in json.loads((tmp_path / "run.json").read_text())] == [2, 1]
    directory.rewind(1, 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_whole", full)
        directory.epoch({"epoch": 1, "train_loss": 0.5})
    directory.epoch({"epoch": 2, "train_loss": 0.25})
    assert (tmp_path / "summary.csv").read_text().splitlines() == ["epoch,train_loss", "1,", "2,0.5", "3,0.25"]


HOLD = """
__file__ = "volo"  # a program, which imports no more than it needs
import os, sys, time
from pathlib import Path
from volo.record.run_directory import RunLock
for _ in range(2):
    with RunLock(print) as lock:
        lock.acquire(Path(sys.argv[1]))
        if os.fork() == 0:  # as a data worker, which may outlive its parent
            time.sleep(1)
            os._exit(0)
        print("held", flush=True)
        sys.stdin.readline()
    print("released", flush=True)
    sys.stdin.readline()
"""


def is_free(directory: Path) -> bool:
    try:
        with RunLock(print) as lock:
            lock.acquire(directory)
            lock.acquire(directory)  # once more changes nothing
    except UserError:
        return False
    return True


def test_fault_19_second_job_waits_for_the_first(tmp_path, monkeypatch):
    command, environment = [sys.executable, "-c", HOLD, str(tmp_path)], {**os.environ, "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1, env=environment) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with monkeypatch.context() as patch:
            patch.setattr(run_directory, "_WAIT", 0.1)
            with pytest.raises(UserError, match="is in use by another job: end that job first, or name another --exp"):
                RunLock(print).acquire(tmp_path)
            (tmp_path / "run.json").write_text(json.dumps([{"pid": 12, "host": "node7", "time": "today"}]))
            with pytest.raises(UserError, match="is in use by process 12 on node7 .since today.: end"):
                RunLock(print).acquire(tmp_path)
        holder.stdin.write("\n")
        assert holder.stdout.readline() == "released\n"
        assert is_free(tmp_path)
        holder.stdin.write("\n")
        assert holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()
        assert is_free(tmp_path)


def test_fault_62_removed_directory_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_WAIT", 0.1)
    (directory := tmp_path / "run").mkdir()
    warnings: list[str] = []
    with RunLock(warnings.append) as lock, RunLock(print) as other:
        lock.acquire(directory)
        shutil.rmtree(directory)
        lock.check()
        lock.check()
        assert not is_free(directory)
        assert warnings == [f"warning: {directory} was removed while this run goes on: made anew, without what it held"]
        shutil.rmtree(directory)
        directory.mkdir()
        other.acquire(directory)
        with pytest.raises(UserError, match="in use by another job"):
            lock.check()
    assert is_free(directory)

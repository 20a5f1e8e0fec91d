"""Where a run writes, that nothing saved is overwritten, and that one job writes there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import yaml

from tests.commands.conftest import ROOT
from tests.conftest import python_path
from tlt.errors import UserError
from volo.config.args import TRAIN, FrozenArgs, TrainArgs
from volo.record import records, run_directory
from volo.record.records import RunRecords, read_json_lines
from volo.record.run_directory import RunLock, choose_directory

SIZE = (224, 224)


def _args(root: Path, **changes: object) -> Namespace:
    return Namespace(
        **{"output": str(root), "experiment": "", "resume": "", "branch": "", "model": "volo_d1", "lr": 0.1, **changes}
    )


def test_a_run_gets_its_own_directory_and_overwrites_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--output {tmp_path}/file/.*: cannot create the run directory"):
        choose_directory(_args(tmp_path / "file"), SIZE)
    assert choose_directory(_args(tmp_path), SIZE)[0].name.endswith("-volo_d1-224")
    assert choose_directory(_args(tmp_path, experiment="mine"), SIZE)[0] == tmp_path / "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "last.pth.tar").touch()
    with pytest.raises(UserError, match="--resume auto"):
        choose_directory(_args(tmp_path, experiment="mine"), SIZE)
    assert choose_directory(_args(tmp_path, experiment="mine", resume="auto"), SIZE)[0] == tmp_path / "mine"


def test_resume_auto_without_a_name_goes_on_with_the_same_experiment_alone(tmp_path: Path) -> None:
    for name, recorded in (
        ("20260101-volo_d1", {"lr": 0.1, "seed": 1, "workers": 4, "output": "elsewhere", "data_dir": "/node7/scratch"}),
        ("20260102-volo_d1", {"lr": 0.1, "seed": 2}),
        ("20260103-volo_d1", {"lr": 0.2, "seed": 1}),
        ("20260104-volo_d2", {"lr": 0.1, "seed": 1}),
    ):
        (tmp_path / f"{name}-224").mkdir()
        (tmp_path / f"{name}-224" / "args.yaml").write_text(yaml.safe_dump(recorded))
    reported: list[str] = []
    asked = {"resume": "auto", "workers": 8, "data_dir": "/data", "grad_accum_steps": 2}
    assert choose_directory(_args(tmp_path, seed=1, **asked), SIZE, reported.append)[0].name == "20260101-volo_d1-224"
    assert reported == [
        f"--resume auto leaves {tmp_path}/20260103-volo_d1-224 alone, another experiment (lr: 0.2 before, 0.1 now): "
        "--experiment 20260103-volo_d1-224 would go on with it"
    ]
    new, _ = choose_directory(_args(tmp_path, seed=3, **asked), SIZE, reported.append)
    assert not any(new.iterdir()) and "lr: 0.2 before, 0.1 now; seed: 1 before, 3 now" in reported[1]


LABELS = "--token-label --token-label-data l"


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("", "", True),
        ("-b 8 --lr 0.1", "-b 8 --lr 0.1", True),
        ("", "-b 8 --warmup-epochs 8 --num-classes 2", True),  # as it was fitted
        ("", "-b 4", False),
        ("-b 8", "", False),  # another command, which may come to another batch
        ("--cooldown-epochs 0", "--cooldown-epochs 1", False),
        ("--epochs 300", "", True),
        ("", "--epochs 40", False),
        ("--train-img-sizes 16 32", "--train-img-sizes 24 32", False),
        ("", "--kd-model-name hf-hub:somebody/model", False),
        ("--branch trunk/milestone-8.pth.tar", "--branch trunk/milestone-16.pth.tar", False),
        (f"{LABELS} --val-label-data v", f"{LABELS} --val-label-data moved --val-img-size 64", True),
    ],
)
def test_resume_auto_compares_what_was_asked_for_and_not_what_the_data_decided(
    tmp_path: Path, before: str, now: str, same: bool
) -> None:
    def asked(flags: str) -> TrainArgs:
        line = f"/data --model resnet10t --img-size 32 --output {tmp_path} --resume auto {flags}"
        return TRAIN.parse(line.split())

    begun, run = asked(before), tmp_path / "20260101-000000-resnet10t-32"
    decided = {"batch_size": 8, "num_classes": 2, "lr_base_scale": "sqrt", "warmup_epochs": 8, "cooldown_epochs": 0}
    fitted = {name: value for name, value in decided.items() if name in begun.defaulted}
    RunRecords(run).record_start(FrozenArgs(begun, **fitted, grad_accum_steps=4), 2, "cpu")
    reported: list[str] = []
    assert (choose_directory(asked(now), (32, 32), reported.append)[0] == run) == same == (not reported)


def test_the_newest_run_is_the_one_that_began_last_wherever_that_was(tmp_path: Path) -> None:
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
    for _ in range(9):
        chosen.append(choose_directory(_args(tmp_path, resume="auto"), SIZE)[0].name.removesuffix("-volo_d1-224"))
        shutil.rmtree(tmp_path / f"{chosen[-1]}-volo_d1-224")
    assert chosen == [
        *("20261025-120000", "20261024-180000", "20261025-021500-10", "20261025-021500-2", "20261025-021500"),
        *("20261025-023000", "20261024-235959", "20261024-120000", "20261023-120000"),
    ]


def test_resume_of_a_file_goes_on_in_its_directory_unless_another_is_named(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (one / "args.yaml").touch()
    file = str(one / "last.pth.tar")
    for changes in ({}, {"experiment": "one"}):
        assert choose_directory(_args(tmp_path, resume=file, **changes), SIZE)[0] == one
    assert choose_directory(_args(tmp_path, resume=file, experiment="two"), SIZE)[0] == tmp_path / "two"
    assert choose_directory(_args(tmp_path / "elsewhere", resume=file), SIZE)[0].parent == tmp_path / "elsewhere"


def test_runs_that_start_in_the_same_second_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(run_directory, "datetime", Clock)
    root, start = tmp_path / "not there", "20260102-030405"
    choose_directory(_args(root), SIZE, make=False)  # --dry-run
    with ThreadPoolExecutor(8) as jobs:
        chosen = list(jobs.map(lambda _: choose_directory(_args(root), SIZE)[0], range(8)))
    names = [f"{start}-volo_d1-224", *(f"{start}-{number}-volo_d1-224" for number in range(2, 9))]
    assert sorted(path.name for path in chosen) == sorted(names) == sorted(path.name for path in root.iterdir())


def test_fault_12_records_of_what_a_resumed_run_does_again_are_removed(tmp_path: Path) -> None:
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


def test_a_full_disk_and_damaged_records_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("[{")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "epoch", "epoch": 0}\n\x00\x00\xff,2\n')
    directory = RunRecords(tmp_path)
    directory.record_start(_args(tmp_path, scale=(0.1, 1.0)), 2, "cpu")
    directory.record_start(_args(tmp_path), 1, "cpu")
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
    with RunLock(Path(sys.argv[1]), print) as lock:
        lock.acquire()
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
        with RunLock(directory, print) as lock:
            lock.acquire()
            lock.acquire()  # once more changes nothing
    except UserError:
        return False
    return True


def test_fault_19_a_second_job_is_kept_out_until_the_first_ends_or_is_killed_though_its_data_worker_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, environment = [sys.executable, "-c", HOLD, str(tmp_path)], {**os.environ, "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1, env=environment) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with monkeypatch.context() as patch:
            patch.setattr(run_directory, "_WAIT", 0.1)
            with pytest.raises(UserError, match="is in use by another job: end that job first, or name another --exp"):
                RunLock(tmp_path, print).acquire()
            (tmp_path / "run.json").write_text(json.dumps([{"pid": 12, "host": "node7", "time": "today"}]))
            with pytest.raises(UserError, match="is in use by process 12 on node7 .since today.: end"):
                RunLock(tmp_path, print).acquire()
        holder.stdin.write("\n")
        assert holder.stdout.readline() == "released\n"
        assert is_free(tmp_path)
        holder.stdin.write("\n")
        assert holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()
        assert is_free(tmp_path)


def test_fault_62_a_directory_that_was_removed_is_made_anew_and_held_unless_it_has_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_WAIT", 0.1)
    (directory := tmp_path / "run").mkdir()
    warnings: list[str] = []
    with RunLock(directory, warnings.append) as lock, RunLock(directory, print) as other:
        lock.acquire()
        shutil.rmtree(directory)
        lock.check()
        lock.check()
        assert not is_free(directory)
        assert warnings == [f"warning: {directory} was removed while this run goes on: made anew, without what it held"]
        shutil.rmtree(directory)
        directory.mkdir()
        other.acquire()
        with pytest.raises(UserError, match="in use by another job"):
            lock.check()
    assert is_free(directory)

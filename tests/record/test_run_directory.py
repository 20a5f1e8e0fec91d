"""Where a run writes, and that nothing saved is overwritten."""

from __future__ import annotations

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch
import yaml

from tlt.errors import UserError
from volo.cluster.distributed import World
from volo.record import run_directory
from volo.record.json_lines import read_json_lines
from volo.record.logger import Logger
from volo.record.run_directory import RunDirectory, choose_directory, read_summary


def _args(root: Path, **changes: object) -> Namespace:
    return Namespace(**{"output": str(root), "experiment": "", "resume": "", "model": "volo_d1", "lr": 0.1, **changes})


def test_a_run_gets_its_own_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--output {tmp_path}/file/.*: cannot create the run directory"):
        choose_directory(_args(tmp_path / "file"), (224, 224))
    assert choose_directory(_args(tmp_path), (224, 224)).name.endswith("-volo_d1-224")
    assert choose_directory(_args(tmp_path, experiment="mine"), (224, 224)) == tmp_path / "mine"


def test_another_runs_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "last.pth.tar").touch()
    with pytest.raises(UserError, match="--resume auto"):
        choose_directory(_args(tmp_path, experiment="mine"), (224, 224))
    assert choose_directory(_args(tmp_path, experiment="mine", resume="auto"), (224, 224)) == tmp_path / "mine"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x"])
def test_an_experiment_stays_where_runs_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"--experiment {name} leads out of {tmp_path}: "):
        choose_directory(_args(tmp_path, experiment=name), (224, 224))


def test_resume_goes_on_in_the_directory_of_the_run(tmp_path: Path) -> None:
    for name in ("20260101-000000-volo_d1-224", "20260102-000000-volo_d1-224", "20260103-000000-volo_d2-224"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.yaml").touch()
    auto = choose_directory(_args(tmp_path, resume="auto"), (224, 224))
    assert auto.name == "20260102-000000-volo_d1-224"
    named = tmp_path / "20260101-000000-volo_d1-224" / "last.pth.tar"
    assert choose_directory(_args(tmp_path, resume=str(named)), (224, 224)) == named.parent


def test_resume_auto_without_a_name_goes_on_with_the_same_experiment_alone(tmp_path: Path) -> None:
    for name, recorded in (
        ("20260101", {"lr": 0.1, "seed": 1, "workers": 4, "output": "elsewhere", "data_dir": "/node7/scratch"}),
        ("20260102", {"lr": 0.1, "seed": 2}),
        ("20260103", {"lr": 0.2, "seed": 1}),
    ):
        (tmp_path / f"{name}-volo_d1-224").mkdir()
        (tmp_path / f"{name}-volo_d1-224" / "args.yaml").write_text(yaml.safe_dump(recorded))
    told: list[str] = []
    asked = {"resume": "auto", "workers": 8, "data_dir": "/data", "grad_accum_steps": 2}
    assert choose_directory(_args(tmp_path, seed=1, **asked), (224, 224), told.append).name == "20260101-volo_d1-224"
    assert told == [
        f"--resume auto leaves {tmp_path}/20260103-volo_d1-224 alone, another experiment (lr: 0.2 before, 0.1 now): "
        "--experiment 20260103-volo_d1-224 would go on with it"
    ]
    new = choose_directory(_args(tmp_path, seed=3, **asked), (224, 224), told.append)
    assert not any(new.iterdir()) and "lr: 0.2 before, 0.1 now; seed: 1 before, 3 now" in told[1]


def test_resume_of_a_file_starts_another_run_where_one_is_named(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "args.yaml").touch()
    file = str(one / "last.pth.tar")
    for changes in ({}, {"experiment": "one"}):
        assert choose_directory(_args(tmp_path, resume=file, **changes), (224, 224)) == one
    assert choose_directory(_args(tmp_path, resume=file, experiment="two"), (224, 224)) == tmp_path / "two"
    assert choose_directory(_args(tmp_path / "elsewhere", resume=file), (224, 224)).parent == tmp_path / "elsewhere"


def test_runs_that_start_in_the_same_second_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(run_directory, "datetime", Clock)
    root, start = tmp_path / "not there", "20260102-030405"
    choose_directory(_args(root), (224, 224), make=False)  # --dry-run
    with ThreadPoolExecutor(8) as jobs:
        chosen = list(jobs.map(lambda _: choose_directory(_args(root), (224, 224)), range(8)))
    names = [f"{start}-volo_d1-224", *(f"{start}-{number}-volo_d1-224" for number in range(2, 9))]
    assert sorted(path.name for path in chosen) == sorted(names) == sorted(path.name for path in root.iterdir())


def test_the_log_begins_with_what_was_said_before_there_was_a_directory(tmp_path: Path) -> None:
    for rank in (0, 1):
        logger = Logger(World(rank, rank, 2, torch.device("cpu")))
        logger.line("learning rate 0.1")
        if rank == 0:
            logger.open(RunDirectory(tmp_path), 10)
        logger.line("epoch 1")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["learning rate 0.1", "epoch 1"]


def test_records(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.record_start(_args(tmp_path, scale=(0.1, 1.0)), 2, "cpu")
    directory.record_start(_args(tmp_path), 1, "cpu")
    assert yaml.safe_load((directory.path / "args.yaml").read_text())["model"] == "volo_d1"
    assert [start["world_size"] for start in json.loads((directory.path / "run.json").read_text())] == [2, 1]


def test_fault_12_records_of_what_a_resumed_run_does_again_are_set_aside(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for epoch in range(2):
        for update in (2, 4):
            directory.metrics({"event": "train", "epoch": epoch, "update": 4 * epoch + update})
        directory.epoch({"epoch": epoch, "train_loss": 1.0 / 3})
    before = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "summary.csv").read_bytes()
    assert directory.rewind(2, 8) == 0
    assert before == ((tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "summary.csv").read_bytes())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "epo')  # torn by a kill
    assert directory.rewind(1, 7) == 3
    kept, damaged = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(r["event"], r["epoch"], r.get("update")) for r in kept] == [
        ("train", 0, 2), ("train", 0, 4), ("epoch", 0, None), ("train", 1, 6),
    ]  # fmt: skip
    assert damaged == 0 and before[0].startswith((tmp_path / "metrics.jsonl").read_bytes())
    assert [row["epoch"] for row in read_summary(tmp_path / "summary.csv")] == ["0"]
    again, torn = read_json_lines(tmp_path / "superseded-metrics.jsonl")
    assert ([r["event"] for r in again], torn) == (["train", "epoch"], 1)
    assert directory.rewind(0, 0) == 4 and (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_full_disk_keeps_rows_for_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.epoch({"epoch": 0, "train_loss": 1.0})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "_write", full)
    directory.epoch({"epoch": 1, "train_loss": 0.5})
    monkeypatch.undo()
    directory.epoch({"epoch": 2, "train_loss": 0.25})
    assert [row["epoch"] for row in read_summary(tmp_path / "summary.csv")] == ["0", "1", "2"]


def test_damaged_records_do_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[{")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "epoch", "epoch": 0}\n\x00\x00\xff,2\n')
    directory = RunDirectory(tmp_path)
    directory.record_start(_args(tmp_path), 1, "cpu")
    directory.rewind(1, 4)
    directory.epoch({"epoch": 1, "train_loss": 0.5})
    assert [row["epoch"] for row in read_summary(tmp_path / "summary.csv")] == ["0", "1"]
    assert len(json.loads((tmp_path / "run.json").read_text())) == 1


def test_the_learning_curve_is_a_picture(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the curve needs matplotlib (extra: plot)")
    directory = RunDirectory(tmp_path)
    for epoch in range(3):
        directory.epoch({"epoch": epoch, "train_loss": 2.0 - epoch, "eval_top1": 30.0 * epoch})
    backend = matplotlib.get_backend()
    matplotlib.use("svg")  # as a notebook's own, which is left to it
    file = directory.draw_curve()
    found = matplotlib.get_backend()
    matplotlib.use(backend)
    assert file.read_bytes()[:4] == b"\x89PNG" and found == "svg"

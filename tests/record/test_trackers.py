"""Experiment trackers: each library's own files hold a run once, however often it was interrupted, and no library's
failure is the run's."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import QUICK, ROOT, Call, call, data, metrics  # noqa: F401
from tests.conftest import LIMIT, python_path, wait_until
from tests.record.tracked import READERS, end, open_run, train
from volo.record import trackers

EVERY_UPDATE = [(update, 10.0 * update) for update in range(1, 7)]


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_continues_its_curve(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    run, mine = tmp_path / "run", {"project": "mine", "tags": ("a", "b")}
    first = open_run(run, 0, name, **mine)  # type: ignore[arg-type]
    train(first, range(1, 6))
    end(first, 85)
    again = open_run(run, 2, name, **mine)  # type: ignore[arg-type]  # of a checkpoint in the first epoch
    train(again, range(3, 7))
    end(again)
    tracked = READERS[name](run)
    assert tracked.curves["train/loss"] == EVERY_UPDATE
    assert tracked.curves["epoch/eval_top1"] == [(3, 50.0), (6, 51.0)]
    assert [value for _, value in tracked.curves["train/epoch"]] == pytest.approx([u / 3 for u, _ in EVERY_UPDATE])
    assert {value for _, value in tracked.curves["train/data_wait_share"]} == {0.25}
    assert not {key for key in tracked.curves if "grad_norm" in key}  # it was not finite
    assert str(tracked.settings["lr"]) == "0.25" and tracked.settings["experiment"] == ""


# In place of W&B: it writes down what it is asked for. What it does first is the test's.
_FAKE = """
import json, os, time
def note(**call):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")
class Run:
    def define_metric(self, *args, **named): pass
    def log(self, row):
        {log}
        note(log=row)
    def finish(self, exit_code):
        note(finish=exit_code)
def init(**asked):
    {init}
    note(init=asked)
    return Run()
"""


class Fake:
    """A module named wandb in a folder that processes import from."""

    def __init__(self, folder: Path) -> None:
        self.file, self._calls = folder / "wandb.py", folder / "calls"
        self.does()

    def does(self, log: str = "pass", init: str = "pass") -> None:
        self.file.write_text(_FAKE.format(calls=str(self._calls), log=log, init=init))

    def calls(self, kind: str) -> list[Any]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [found[kind] for found in map(json.loads, lines) if kind in found]

    def curve(self, key: str = "train/loss") -> list[tuple[int, float]]:
        return [(row["update"], row[key]) for row in self.calls("log") if key in row]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    (folder := tmp_path / "packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", python_path(folder, ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a file that is changed within a second is read again
    monkeypatch.syspath_prepend(folder)
    return Fake(folder)


def test_records_are_what_is_sent(fake, call, data, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    flags = f"{data} {QUICK} --log-wandb --wandb-project mine --wandb-tags a b --output {tmp_path}"
    assert call("train", f"{flags} --experiment run --epochs 1").code == 0
    ended = call("train", f"{flags} --experiment run --epochs 2 --resume auto")
    assert ended.code == 0 and "warning: --log" not in ended.out
    records = metrics(run)
    assert len(records) == 4
    for key in ("loss", "cls_loss", "lr", "grad_norm", "images_per_second", "seconds"):
        assert fake.curve(f"train/{key}") == [(record["update"], record[key]) for record in records], key
    assert [top1 for _, top1 in fake.curve("epoch/eval_top1")] == [r["eval_top1"] for r in metrics(run, "epoch")]
    one, two = fake.calls("init")
    assert one["id"] == two["id"] and one["name"] == "run" and one["project"] == "mine" and one["tags"] == ["a", "b"]
    assert one["config"]["epochs"] == 1 and two["config"]["epochs"] == 2
    assert fake.calls("finish") == [0, 0]


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ({"init": "raise OSError('no\\nnetwork')"}, "off: OSError: no network ("),
        ({"log": "raise RuntimeError('quota')"}, "off: RuntimeError: quota ("),
        ({"log": "os._exit(7)"}, "off: it ended with 7 ("),
    ],
)
def test_failing_tracker_warns_once_and_catches_up(does, reason, fake, tmp_path, capsys):
    fake.does(**does)
    logger = open_run(tmp_path / "run", 0, "wandb")
    train(logger, range(1, 2))
    wait_until(lambda: train(logger, range(2, 3)) or "warning" in (tmp_path / "run" / "log.txt").read_text())
    train(logger, range(3, 5))
    end(logger)
    out = capsys.readouterr().out
    assert out.count("warning") == 1 and f"warning: --log-wandb is {reason}" in out
    assert fake.curve() == []
    fake.does()
    logger = open_run(tmp_path / "run", 4, "wandb")
    train(logger, range(5, 7))
    end(logger)
    assert fake.curve() == EVERY_UPDATE and "warning" not in capsys.readouterr().out


def test_finished_run_waits_for_a_tracker_within_limits(fake, tmp_path, monkeypatch, capsys):
    fake.does(init="time.sleep(10000)")
    monkeypatch.setattr(trackers, "WAIT_S", 0.1)
    quick = tmp_path / "quick.py"
    quick.write_text(Path(trackers.__file__).read_text().replace("\nCALL_S = 120 ", "\nCALL_S = 1 "))
    monkeypatch.setattr(trackers, "__file__", str(quick))
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # which a process inherits
    logger = open_run(tmp_path / "run", 0, "wandb")
    train(logger, range(1, 7))
    end(logger)
    assert "warning: --log-wandb is still sending; it goes on without this run" in capsys.readouterr().out
    assert logger.trackers._running["wandb"].wait(LIMIT) == -signal.SIGALRM


def test_signals_spare_the_tracker_which_sends_a_killed_run(fake, tmp_path):
    fake.does(log="time.sleep(0.1)")
    program = """
__file__ = "volo"  # a program, which imports no more than it needs
import os, signal, sys, time
from pathlib import Path
from tests.record.tracked import open_run, train
run = Path(sys.argv[1])
logger = open_run(run, 0, "wandb")
train(logger, range(1, 7))
if os.fork() == 0:  # a data worker, which has the pipe to the tracker, too, and outlives the run
    os.setsid()
    until = time.monotonic() + 60
    while time.monotonic() < until and not (run / "over").exists():
        time.sleep(0.1)
    os._exit(0)
input()
os.kill(logger.trackers._running["wandb"].pid, signal.SIGTERM)
os.kill(0, signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: fake.calls("init"))
    run.communicate(b"\n")
    assert run.returncode == -signal.SIGKILL
    wait_until(lambda: fake.calls("finish"))
    (tmp_path / "run" / "over").touch()
    assert fake.curve() == EVERY_UPDATE and fake.calls("finish") == [1]

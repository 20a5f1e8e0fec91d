"""Run the programs in this process, as a user would start them."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import timm
import torch
from torch import nn

from tests.commands import interrupted_train
from tests.config.test_remedies import foreign_flags
from tests.conftest import LIMIT, python_path, wait_until, write_dataset
from tests.train.small_run import tensors
from tlt.io.weights import read_checkpoint
from volo import cli
from volo.checkpoint.saver import Saver
from volo.record.goodput import Account, account_of
from volo.record.history import read_records
from volo.train import loop

# What was imported stays frozen (tests/conftest.py): each of hundreds of runs would look through a million objects.
loop.gc = Mock(wraps=gc, freeze=Mock(), unfreeze=Mock())
ROOT = Path(__file__).resolve().parents[2]
UPDATES = 5  # of an epoch, where a test says so
# Small and quick; every other default is the published one.
QUICK = (
    "--model volo_test --img-size 32 --num-classes 4 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --log-interval 1"
)


@pytest.fixture
def pictures() -> None:
    """A test that has this gets the pictures of its runs, with one image of the first batch; others get none."""


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing that no test looks at: it takes a second in every run, here and in the processes of a test."""
    from volo.record import confusion
    from volo.record.logger import Logger
    from volo.train import meter

    monkeypatch.setattr(meter, "_IMAGES", 1)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(meter, "_draw", lambda *_: None)
        monkeypatch.setattr(Logger, "curve", lambda *_, **__: None)
        monkeypatch.setattr(confusion, "_PICTURES", {})
        monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).with_name("no_pictures")))


class TrainedRun(NamedTuple):
    """A run of two epochs with a moving average, whose directory no test changes."""

    data: Path
    run: Path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """What validate, predict, report, export and attention are shown."""
    root = tmp_path_factory.mktemp("trained")
    data = write_dataset(root / "data")
    flags = f"{data} {QUICK} --epochs 2 --lr 2e-3 --model-ema --output {root} --experiment run"
    assert cli.run("train", flags.split()) == 0
    return TrainedRun(data, root / "run")


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def ok(self) -> Ended:
        """Itself, where its exit code is 0."""
        assert self.code == 0, self.err
        return self

    @property
    def row(self) -> dict[str, Any]:
        """The JSON object in the last line that it printed."""
        return json.loads(self.out.splitlines()[-1])

    def refused(self, text: str) -> bool:
        """Whether it ended with exit code 2 and one line that holds `text`."""
        return self.code == 2 and self.err.count("\n") == 1 and self.err.startswith("error: ") and text in self.err


Call = Callable[..., Ended]
Make = Callable[..., Path]
Described = Callable[..., tuple[nn.Module, Path]]


@pytest.fixture
def data(make_dataset: Make) -> Path:
    """The data set of 16 and 8 images in four classes."""
    return make_dataset()


@pytest.fixture
def labels(data: Path, make_labels: Make) -> Path:
    return make_labels(data)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return `call(program, "flags", *more)`: exit code and output of `volo PROGRAM`."""

    def call(program: str, flags: str, *more: str | Path) -> Ended:
        capsys.readouterr()
        try:
            code = cli.run(program, [*flags.split(), *map(str, more)])
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else 1
        ended = Ended(code, *capsys.readouterr())
        assert code != 2 or not foreign_flags({program}, ended.err), ended.err
        return ended

    return call


@pytest.fixture
def described(tmp_path: Path) -> Described:
    """Return `described(name, kwargs, **config)`: a model for the classes a to f and its checkpoint, which says so.

    Its BatchNorm statistics are its own; the moving average is another model's.
    """

    def save(name: str, kwargs: dict[str, Any] | None = None, **config: Any) -> tuple[nn.Module, Path]:
        torch.manual_seed(0)
        size = {"img_size": config["img_size"]} if "img_size" in config else {}
        models = [timm.create_model(name, num_classes=6, **size, **(kwargs or {})) for _ in range(2)]
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        config |= {"name": name, "kwargs": kwargs or {}, "num_classes": 6, "class_names": list("abcdef")}
        entries = {"state_dict": models[0].state_dict(), "state_dict_ema": models[1].state_dict()}
        torch.save(entries | {"model_config": config}, tmp_path / f"{name}.pth")
        return models[0].eval(), tmp_path / f"{name}.pth"

    return save


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Return `stop_at(updates)`: runs of this test end after each of these updates, saved, as after Ctrl-C."""
    for owner, name in ((Saver, "__enter__"), (Saver, "after_update"), (loop, "validate_epoch")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and restored after the test
    return interrupted_train.stop_at


@pytest.fixture
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published weights are random ones, but those of resnet14t, which can't be fetched, and cs3darknet_s, which has
    none."""
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained and name == "resnet14t":
            raise OSError("no network")
        return create(name, pretrained=pretrained and name == "cs3darknet_s", **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)


def same_weights(*files: Path) -> dict[str, Any]:
    """Check that two checkpoints hold the same weights, bit for bit, and return the first."""
    one, two = (torch.load(file, weights_only=False) for file in files)
    entries = [entry for entry in one if entry.startswith(("state_dict", "dense_head"))]
    assert entries and {*entries} == {entry for entry in two if entry.startswith(("state_dict", "dense_head"))}
    for entry in entries:
        assert one[entry].keys() == two[entry].keys()
        assert all(torch.equal(value, two[entry][name]) for name, value in one[entry].items()), entry
    return one


def spent_in(run: Path) -> Account:
    """Return where a run's time went, which is all of it by the clock: from its first process to its last event."""
    records = read_records(run)
    account, events = account_of(records), [event for event in records.events if event["rank"] == 0]
    first, last = (datetime.fromisoformat(event["time"]) for event in (events[0], events[-1]))
    wall = (last - first).total_seconds() + sum(events[0]["spent"].values())
    assert account.total == pytest.approx(wall, rel=0.01, abs=0.3), account
    return account


def launch(processes: int, flags: str, *more: str | Path, code: int = 0) -> str:
    command = [str(ROOT / "distributed_train.sh"), str(processes), *map(str, more), *flags.split()]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert ended.returncode == code, ended.stdout
    return ended.stdout


# In front of the folder no_pictures, whose module this one hides.
_STORAGE = """
import itertools, os, sys, time
sys.modules["matplotlib"] = None
opens, number, first = os.open, itertools.count(), os.environ.get("LAUNCH_RESTARTS", "0") == "0"
first &= "SLURM_RESTART_COUNT" not in os.environ
def opening(path, *more, **named):
    {}
    return opens(path, *more, **named)
os.open = opening
"""


def storage(folder: Path, does: str) -> dict[str, str]:
    """The environment of Python processes that do this line whenever they open the file at `path`."""
    (folder / "sitecustomize.py").write_text(_STORAGE.format(does))
    return {"PYTHONPATH": python_path(folder, ROOT)}


def held(folder: Path, at: int, where: str = "/train/") -> dict[str, str]:
    """The environment of a run that can't be over before something happens to it.

    The image of this number (from 0; each process counts its own) is not read before the process ends, but for a start
    after a restart.
    """
    hangs = f"while first and {where!r} in str(path) and next(number) >= {at}: time.sleep(0.05)"
    return storage(folder, hangs)


class Running:
    """A program in a process of its own, which `nothing_left_running` ends with the test."""

    begun: list[Running] = []

    def __init__(self, command: list[str], **env: str) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._read = 0  # characters, by read_until
        # Nothing is printed late: what was seen has happened.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **env}
        output = {"stdout": self._printed, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **output)
        self.begun.append(self)

    @property
    def output(self) -> str:
        """All that it has printed."""
        descriptor = self._printed.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def read_until(self, text: str) -> None:
        """Return when a line with `text` has come, below the one that was waited for before."""

        def line_end() -> int:
            ended, output = self.process.poll() is not None, self.output
            at = output.find(text, self._read)
            assert at >= 0 or not ended, f"{text!r} never came:\n{output}"
            return output.find("\n", at) + 1 if at >= 0 else 0

        self._read = wait_until(line_end, lambda: f"{text!r} in\n{self.output}")

    def end(self, *signals: int) -> int:
        """Send the signals and return the exit code when it has ended."""
        for number in signals:
            self.process.send_signal(number)
        wait_until(lambda: self.process.poll() is not None, lambda: f"the end of\n{self.output}{self._signals()}")
        return self.process.returncode

    def _signals(self) -> str:
        """Which signals it blocks, ignores and catches (Linux)."""
        return "".join(re.findall("Sig.*\n", Path(f"/proc/{self.process.pid}/status").read_text()))

    def ranks(self) -> dict[int, int]:
        """Process of each rank, by rank, of a distributed_train.sh."""
        return {int(environment(pid)["RANK"]): pid for pid in children(self.process.pid) if "RANK" in environment(pid)}


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """However a test ends, what it has started is gone after it."""
    yield
    while Running.begun:
        process = Running.begun.pop().process
        if process.poll() is None:
            for pid in [*children(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, and that have not ended (Linux)."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                result.append(int(stat.parent.name))
    return result


def ended(pid: int) -> bool:
    """Whether a process has ended, also where nobody has asked for its exit code (Linux)."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def start(flags: str, *more: str | Path, processes: int = 1, **env: str) -> Running:
    """Start train.py, by distributed_train.sh where there are several processes."""
    program = [sys.executable, str(ROOT / "train.py")]
    if processes > 1:
        program = [str(ROOT / "distributed_train.sh"), str(processes)]
    return Running([*program, *map(str, more), *flags.split()], **env)


def digest(run: Path) -> str:
    """SHA-256 of weights, moving average and optimizer in a run's newest checkpoint."""
    checkpoint = read_checkpoint(run / "last.pth.tar")
    values = tensors([checkpoint.get(entry) for entry in ("state_dict", "state_dict_ema", "optimizer")])
    assert len(values) > 40
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def metrics(run: Path, event: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]

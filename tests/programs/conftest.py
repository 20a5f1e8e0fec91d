"""Run the programs in this process, as a user would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from volo import cli

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 5  # of an epoch, where a test says so
# Small and quick; every other default is the published one.
QUICK = (
    "--model volo_test --img-size 32 --num-classes 4 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --log-interval 1"
)


@pytest.fixture(autouse=True)
def small_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One image in the picture of the first batch: eight take half a second in every run."""
    from volo.engine import first_batch

    monkeypatch.setattr(first_batch, "_IMAGES", 1)


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Return `call(program, "flags", *more)`: exit code and output of train, validate or generate_label."""

    def call(program: str, flags: str, *more: str | Path) -> Ended:
        capsys.readouterr()
        try:
            code = getattr(cli, program)([*flags.split(), *map(str, more)])
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else 1
        return Ended(code, *capsys.readouterr())

    return call


def launch(processes: int, flags: str, *more: str | Path, code: int = 0) -> str:
    """Run `distributed_train.sh` and return its output."""
    command = [str(ROOT / "distributed_train.sh"), str(processes), *map(str, more), *flags.split()]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert ended.returncode == code, ended.stdout
    return ended.stdout


class Running:
    """A program in a process of its own, whose output is read while it runs."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.output = ""
        # Nothing is printed late: what was seen has happened.
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def read_until(self, text: str) -> None:
        """Return when a line with `text` has come."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def end(self, *signals: int) -> int:
        """Send the signals and return the exit code when it has ended."""
        for number in signals:
            self.process.send_signal(number)
        self.output += self.process.communicate(timeout=120)[0]
        return self.process.returncode

    def ranks(self) -> dict[int, int]:
        """Process of each rank, by rank, of a distributed_train.sh."""
        return {int(environment(pid)["RANK"]): pid for pid in children(self.process.pid) if "RANK" in environment(pid)}


def children(pid: int) -> list[int]:
    """The processes that `pid` has started (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment of a process (Linux)."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def start(flags: str, *more: str | Path, processes: int = 1, **env: str) -> Running:
    """Start train.py, by distributed_train.sh where there are several processes."""
    program = [sys.executable, str(ROOT / "train.py")]
    if processes > 1:
        program = [str(ROOT / "distributed_train.sh"), str(processes)]
    return Running([*program, *map(str, more), *flags.split()], **env)


def metrics(run: Path, event: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]

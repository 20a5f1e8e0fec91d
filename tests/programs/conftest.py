"""Run the programs in this process, as a user would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from volo import cli

ROOT = Path(__file__).resolve().parents[2]
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


def metrics(run: Path, event: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]

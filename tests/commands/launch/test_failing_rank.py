"""One rank of several fails, or is told to stop, wherever the others are: all end, and the exit code says why."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, UPDATES, Running
from tests.commands.launch import failing_rank
from tlt.errors import UserError
from volo import cli
from volo.commands.launch import first_failure

CASES = [
    ("exception", 1, 1, "RuntimeError: somebody's own code"),
    ("weights", 0, 3, "[rank 0] error: NaN that this rank alone sees"),
    ("nan", 1, 3, "] error: the gradients of 3 steps in a row"),  # by either rank
    ("data", 1, 2, "[rank 1] error: the storage is gone"),
    ("data at the end", 1, 2, "[rank 1] error: the storage is gone"),
    ("signal in the last update", 0, 85, "[rank 1] stopped because another rank had to"),
    ("signal in the last update", 1, 85, "[rank 0] stopped because another rank had to"),
]


@pytest.mark.parametrize(("fault", "rank", "code", "told"), CASES, ids=[f"{case[0]}, rank {case[1]}" for case in CASES])
def test_fault_53_all_ranks_end_and_the_code_is_that_of_the_one_that_failed(
    make_dataset: Callable[..., Path], tmp_path: Path, fault: str, rank: int, code: int, told: str
) -> None:
    data = make_dataset(train=8 * UPDATES, validation=8)
    flags = f"{QUICK} -b 4 --epochs 9 --lr 1e-3 --skip-nonfinite 2 --output {tmp_path} --experiment run"
    launcher = [sys.executable, str(ROOT / "volo/commands/launch.py"), "--standalone", "--nproc-per-node", "2"]
    driver = [str(Path(failing_rank.__file__)), fault, str(rank), str(data)]
    run = Running([*launcher, *driver, *flags.split(), "--dist-timeout", "20"], PYTHONPATH=str(ROOT))
    assert run.end() == code, run.output
    assert run.output.count(told) == 1
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)
    stopped_at = UPDATES + 2 if fault == "data" else 2 * UPDATES
    # Where all have stopped together the last update is saved, else what there was.
    assert saved["update"] == (stopped_at if code in (2, 85) else UPDATES)
    assert "hung" not in run.output


def test_a_rank_that_is_ended_while_it_tells_its_mistake_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mistake(UserError):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            return "no such model"

    def refuse(argv: object) -> NoReturn:
        raise Mistake

    monkeypatch.setattr("volo.config.args.parse_train", refuse)
    assert (cli.run("train", []), capsys.readouterr().err) == (2, "error: no such model\n")


@pytest.mark.parametrize(("codes", "expected"), [((5, 3, 5), 3), ((5, -9), 5), ((-9, 5), 137)])
def test_a_rank_that_knows_why_gives_the_code(codes: tuple[int, ...], expected: int) -> None:
    assert first_failure(codes) == expected

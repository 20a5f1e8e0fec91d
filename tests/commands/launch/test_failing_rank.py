"""One rank of several fails, or is told to stop, wherever the others are: all end, and the exit code says why."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.commands.conftest import QUICK, ROOT, UPDATES, Make, Running
from tests.commands.launch import failing_rank
from tlt.errors import UserError
from volo.cluster import distributed
from volo.commands.console import run_program

CASES = [
    ("nan", 3, "] error: the gradients of 3 steps in a row"),  # by either rank
    ("data at the end", 2, "[rank 1] error: the storage is gone"),
]


def run_with(fault: str, make_dataset: Make, tmp_path: Path) -> Running:
    """Two ranks, after their ends; the second one meets the fault in the second epoch."""
    data = make_dataset(train=8 * UPDATES, validation=8)
    flags = f"{QUICK} -b 4 --epochs 9 --lr 1e-3 --skip-nonfinite 2 --output {tmp_path} --experiment run"
    launcher = [sys.executable, str(ROOT / "volo/commands/launch.py"), "2"]
    driver = [str(Path(failing_rank.__file__)), fault, "1", str(data)]
    run = Running(
        [*launcher, *driver, *flags.split(), "--dist-timeout", "3" if fault == "hang" else "60"], PYTHONPATH=str(ROOT)
    )
    run.end()
    return run


@pytest.mark.parametrize(("fault", "code", "told"), CASES)
def test_fault_53_all_ranks_end_and_the_code_is_that_of_the_one_that_failed(
    make_dataset: Make, tmp_path: Path, fault: str, code: int, told: str
) -> None:
    run = run_with(fault, make_dataset, tmp_path)
    assert run.end() == code, run.output
    assert run.output.count(told) == 1
    saved = torch.load(tmp_path / "run" / "last.pth.tar", weights_only=True)
    # Where all have stopped together the last update is saved, else what there was.
    assert saved["update"] == (2 * UPDATES if code == 2 else UPDATES)
    assert "hung" not in run.output


def test_fault_21_where_a_rank_hangs_all_print_their_stacks_and_end(make_dataset: Make, tmp_path: Path) -> None:
    run = run_with("hang", make_dataset, tmp_path)
    assert run.end() == 5, run.output
    for rank in (0, 1):
        assert f"[rank {rank}] hung: no progress for " in run.output
    assert "in <lambda>" in run.output and run.output.count("in train_epoch") >= 2  # the stacks
    assert '"kind": "fault"' in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("end", "code"), [(RuntimeError("a defect"), 1), (UserError("a mistake"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_rank_whose_process_group_stands_ends_before_threads_of_torch_abort_it(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int
) -> None:
    """Python ends with exit code 134 where a thread of gloo frees a tensor meanwhile."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(distributed, "in_own_group", lambda: True)
    monkeypatch.setitem(sys.modules, "ends", Mock(run=Mock(side_effect=end)))
    assert run_program(lambda argv: Namespace(), "ends", []) == code and left == [code]

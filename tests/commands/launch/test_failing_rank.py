"""One rank of several fails, or is told to stop, wherever the others are: all end, and the exit code says why."""

import sys
from pathlib import Path

import pytest

from tests.commands.conftest import QUICK, ROOT, UPDATES, Make, Running, start, storage
from tests.conftest import python_path
from tlt.io.weights import read_checkpoint

# train.py, in which rank 1 meets a fault in the second update of the second epoch.
DRIVER = """
import os, sys, time
from volo import cli
from volo.train.meter import Meter
faults = {"nan": lambda batch: batch.images.fill_(float("nan")), "hang": lambda batch: time.sleep(9999)}
fault, updates, *flags = sys.argv[1:]
look_at = Meter.look_at
def look(meter, batch):
    look_at(meter, batch)
    faults[fault](batch) if meter.state.update > int(updates) else None
if os.environ["RANK"] == "1":
    Meter.look_at = look
sys.exit(cli.run("train", flags))
"""


def run_with(fault: str, make_dataset: Make, tmp_path: Path, more: str) -> Running:
    """Two ranks, after their ends."""
    (tmp_path / "driver.py").write_text(DRIVER)
    launcher = [sys.executable, str(ROOT / "volo/commands/launch.py"), "2", str(tmp_path / "driver.py")]
    data = make_dataset(train=8 * UPDATES, validation=8)
    flags = f"{QUICK} -b 4 --epochs 9 --lr 1e-3 {more} --output {tmp_path} --experiment run"
    run = Running([*launcher, fault, str(UPDATES), str(data), *flags.split()], PYTHONPATH=python_path(ROOT))
    run.end()
    return run


@pytest.mark.slow
def test_fault_53_all_ranks_end_with_the_failed_rank_code(make_dataset: Make, tmp_path: Path) -> None:
    run = run_with("nan", make_dataset, tmp_path, "--skip-nonfinite 2")
    assert run.end() == 3, run.output
    assert run.output.count("] error: the gradients of 3 steps in a row") == 1 and "hung" not in run.output
    assert read_checkpoint(tmp_path / "run/last.pth.tar")["update"] == UPDATES  # what there was


def test_fault_23_storage_fault_of_one_rank_stops_all(make_dataset: Make, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    here = f"os.environ.get('RANK') == '1' and '/train/' in str(path) and os.path.exists({str(lost)!r})"
    fails = f"if {here}: raise OSError(116, os.strerror(116))"
    data, flags = make_dataset(train=40, validation=8), f"{QUICK} -j 1 -b 4 --epochs 9999 --lr 1e-3"
    run = start(f"{flags} --output {tmp_path} --experiment run", data, processes=2, **storage(tmp_path, fails))
    run.read_until("epoch 1 [5/5]")
    lost.touch()
    assert run.end() == 5, run.output
    assert run.output.count(".jpg can't be read: Stale file handle, 4 times in a row; its storage") == 1
    assert not any(word in run.output for word in ("Traceback", "left out", "hung"))
    assert read_checkpoint(tmp_path / "run/last.pth.tar")["update"] >= 5


def test_fault_21_hang_of_one_rank_prints_all_stacks_and_ends(make_dataset: Make, tmp_path: Path) -> None:
    run = run_with("hang", make_dataset, tmp_path, "--dist-timeout 3")
    assert run.end() == 5, run.output
    for rank in (0, 1):
        assert f"[rank {rank}] hung: no progress for " in run.output
    assert "in <lambda>" in run.output and run.output.count("in train_epoch") >= 2  # the stacks
    assert '"kind": "fault"' in (tmp_path / "run" / "events.jsonl").read_text()

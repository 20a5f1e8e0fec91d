"""Faults of whole runs, on real scans of digits: each ends in the bits of a run that was spared, or in one line. And
docs/reliability.md tells every fault that is tested, and no other."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import copyfile, which
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.commands.conftest import ROOT, digest, metrics, spent_in
from tests.commands.conftest import call as call  # a fixture
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
from tests.conftest import LIMIT, module_of
from tlt.io.weights import read_checkpoint
from volo.train.precision import Precision


@pytest.fixture(scope="session")
def all_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as the demo writes them."""
    demo = module_of(ROOT / "demo" / "digits.py")
    demo.ROOT = tmp_path_factory.mktemp("demo")
    demo.write_digits(demo.ROOT / "digits")
    return demo.ROOT / "digits"


@pytest.fixture
def digits(all_digits: Path, tmp_path: Path) -> Path:
    """Four scans of each digit to train on, two to validate on."""
    for split, count in (("train", 4), ("validation", 2)):
        for folder in sorted((all_digits / split).iterdir()):
            (tmp_path / "data" / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:count]:
                copyfile(file, tmp_path / "data" / split / folder.name / file.name)
    return tmp_path / "data"


# All that could be lost: BatchNorm, MixToken, stochastic depth, RandAugment, accumulation, the average, the schedule.
CHAIN_FLAGS = (
    "--model volo_test --img-size 32 --num-classes 10 -b 2 --warmup-epochs 1 --cooldown-epochs 0 --log-interval 1 "
    "--epochs 3 --lr 1e-3 --drop-path 0.2 --model-ema --recovery-interval 2 --checkpoint-hist 2 --token-label"
)
DIVIDED = "--dist-bn reduce --shard 2"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Load processors, memory and disk by another program's processes. Skips the test where stress-ng is missing."""
    if which("stress-ng") is None:
        pytest.skip("stress-ng is not installed: apt-get install stress-ng")
    load = ["--cpu", "0", "--vm", "2", "--vm-bytes", "256M", "--hdd", "1", "--hdd-bytes", "64M"]
    with TemporaryDirectory() as folder, subprocess.Popen(["stress-ng", *load, "--temp-path", folder]) as stress:
        time.sleep(1)
        assert stress.poll() is None, "stress-ng did not start"
        yield
        stress.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
@pytest.mark.parametrize(
    ("ranks", "kills", "more", "busy"),
    [
        pytest.param(1, 4, "--grad-accum-steps 2", False, id="1 rank"),
        pytest.param(1, 140, "--grad-accum-steps 2", False, id="1 rank, many", marks=pytest.mark.slow),
        pytest.param(2, 80, "--dist-bn reduce", False, id="2 ranks, many", marks=pytest.mark.slow),
        pytest.param(2, 20, DIVIDED, False, id="2 ranks that divide the weights", marks=pytest.mark.slow),
        pytest.param(2, 10, "--dist-bn reduce", True, id="2 ranks, busy machine", marks=pytest.mark.slow),
    ],
)
def test_fault_01_killed_runs_end_in_the_bits_of_a_whole_one(digits, make_labels, tmp_path, ranks, kills, more, busy):
    """FAULT_SEED chooses other instants."""
    seed = os.environ.get("FAULT_SEED", "0")
    flags = [*f"{CHAIN_FLAGS} {more}".split(), "--token-label-data", str(make_labels(digits, classes=10))]
    where = ["--out", str(tmp_path / "runs"), "--ranks", str(ranks), "--kills", str(kills), "--seed", seed]
    command = [sys.executable, "-m", "tests.faults.kill_chain", *where, "--", str(digits), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with busy_machine() if busy else nullcontext():
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=12 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    lost = record["lost"]
    print(f"{record}; updates lost: mean {sum(lost) / len(lost):.1f}, most {max(lost)}")
    assert record["kills"] == len(lost) >= kills and 2 * record["inside_a_write"] >= kills


FLAGS = (
    "--model volo_test --img-size 32 --num-classes 10 -b 8 -j 0 --warmup-epochs 0 --cooldown-epochs 0 --lr 1e-3 "
    "--log-interval 1 --drop-path 0.2 --model-ema"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")


@pytest.mark.parametrize(("failing", "code", "update"), [pytest.param(1, 85, 7, marks=pytest.mark.slow), (99, 4, 5)])
def test_fault_08_14_full_disk_at_slurms_warning(call, digits, tmp_path, monkeypatch, failing, code, update):
    """It is full for the first attempt to save the seventh update, or for all; the epoch before is saved."""
    marker, done, full = tmp_path / "marker", itertools.count(1), itertools.count(1)
    monkeypatch.setenv("REQUEUE_MARKER", str(marker))
    monkeypatch.setattr("volo.checkpoint.saver._FINAL_RETRIES", (0.0, 0.0))
    update_weights, replace = Precision.step, os.replace

    def warned(*given: Any) -> Any:
        if next(done) == 7:
            signal.raise_signal(signal.SIGUSR1)
            monkeypatch.setattr(os, "replace", no_space)
        return update_weights(*given)

    def no_space(old: Path, new: Path) -> None:
        if Path(new).name == "last.pth.tar" and next(full) <= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    monkeypatch.setattr(Precision, "step", warned)
    ended = call("train", f"{FLAGS} --epochs 9 --output {tmp_path} --experiment run", digits)
    assert ended.code == code and "training goes on" not in ended.out, ended.out + ended.err
    saved = {"reason": "stopped by SIGUSR1", "update": update, "checkpoint": str(tmp_path / "run" / "last.pth.tar")}
    assert json.loads(marker.read_text()) == saved
    assert read_checkpoint(tmp_path / "run" / "last.pth.tar")["update"] == update
    assert spent_in(tmp_path / "run").parts["saving"] > 0


@linux
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fault_22_worker_is_killed_within_a_step(call, digits, tmp_path, monkeypatch, micro_batches):
    """The step is completed. Where its next micro-batch never comes, the newest checkpoint counts."""
    size = f"-b {8 // micro_batches} --grad-accum-steps {micro_batches}"
    flags = f"{FLAGS} {size} --epochs 2 --recovery-interval 2 -j 1 --loader-timeout 0 --output {tmp_path} --experiment"
    assert call("train", f"{flags} whole", digits).code == 0
    backward, calls = Precision.backward, itertools.count(1)

    def kill_then_go_on(precision: Precision, *args: Any, **named: Any) -> None:
        if next(calls) == 4 * micro_batches - (micro_batches - 1):  # the first pass of the fourth update
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()
        backward(precision, *args, **named)

    monkeypatch.setattr(Precision, "backward", kill_then_go_on)
    killed = call("train", f"{flags} run", digits)
    assert (killed.code, killed.err.count("\n")) == (5, 1) and "killed by SIGKILL" in killed.err, killed.err
    monkeypatch.undo()
    update = read_checkpoint(tmp_path / "run" / "last.pth.tar")["update"]
    assert update == (4 if micro_batches == 1 else 2)
    assert call("train", f"{flags} run --resume auto", digits).code == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
    spent = spent_in(tmp_path / "run")
    assert spent.restarts == 1 and (spent.parts["done twice"] > 0) == (micro_batches == 2)


def test_fault_52_last_update_of_one(call, digits, make_labels, tmp_path):
    labels = make_labels(digits, classes=10)
    flags = f"{FLAGS} -b 13 --epochs 1 --token-label --output {tmp_path} --experiment run --token-label-data"
    call("train", f"{flags} {labels}", digits).ok()
    records = metrics(tmp_path / "run")
    assert [record["images"] for record in records] == [13, 13, 13, 1]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_faults_of_the_table_have_tests_and_tests_rows():
    table = (ROOT / "docs" / "reliability.md").read_text().partition("## The table")[2]
    documented = [int(number) for row in re.findall(r"^\| (\d[\d, ]*) \|", table, re.M) for number in row.split(", ")]
    tested = {
        int(number)
        for file in (ROOT / "tests").rglob("test_*.py")
        for numbers in re.findall(r"^def test_fault((?:_\d\d)+)_", file.read_text(), re.M)
        for number in numbers.strip("_").split("_")
    }
    assert sorted(documented) == list(range(1, 66)) == sorted(tested)


def test_the_tests_that_the_threat_table_names_are_there():
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?/?)`|`(test_\w+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    for path, beside in named:
        assert (ROOT / path).exists() if path else [*ROOT.glob(f"tests/*/{beside}")], (path, beside)

"""Fault 1: `kill -9` to the real train.py, on digits, hundreds of times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import pytest

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT

# All that could be lost: BatchNorm, MixToken, stochastic depth, RandAugment, accumulation, the average, the schedule.
FLAGS = (
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
def test_fault_01_killed_runs_end_in_the_bits_of_a_whole_one(
    digits: Path, make_labels: Callable[..., Path], tmp_path: Path, ranks: int, kills: int, more: str, busy: bool
) -> None:
    """FAULT_SEED chooses other instants."""
    seed = os.environ.get("FAULT_SEED", "0")
    flags = [*f"{FLAGS} {more}".split(), "--token-label-data", str(make_labels(digits, classes=10))]
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

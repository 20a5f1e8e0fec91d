"""One job per run directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt.errors import UserError
from volo.record.run_directory import RunLock

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import os, sys, time
from pathlib import Path
from volo.record.run_directory import RunLock
with RunLock(Path(sys.argv[1]), print) as lock:
    lock.acquire()
    if os.fork() == 0:  # as a data worker, which may outlive its parent
        time.sleep(1)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `tmp_path` until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()


def is_free(directory: Path) -> bool:
    try:
        with RunLock(directory, print) as lock:
            lock.acquire()
            lock.acquire()  # once more changes nothing
    except UserError:
        return False
    return True


def test_fault_19_a_second_job_is_kept_out_until_the_first_gives_the_lock_back(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError, match="is in use by another job: end that job first, or name another --experiment"):
        RunLock(tmp_path, print).acquire()
    start = {"pid": 12, "host": "node7", "time": "today"}
    (tmp_path / "run.json").write_text(json.dumps([start]))
    with pytest.raises(UserError, match="is in use by process 12 on node7 .since today.: end"):
        RunLock(tmp_path, print).acquire()
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert is_free(tmp_path)


def test_fault_19_a_killed_job_leaves_no_lock_though_its_data_worker_lives(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_free(tmp_path)


def test_fault_62_a_directory_that_was_removed_is_made_anew_and_held(tmp_path: Path) -> None:
    directory, warnings = tmp_path / "run", list[str]()
    directory.mkdir()
    with RunLock(directory, warnings.append) as lock:
        lock.acquire()
        shutil.rmtree(directory)
        lock.check()
        lock.check()
        assert not is_free(directory)
        assert warnings == [f"warning: {directory} was removed while this run goes on: made anew, without what it held"]
    assert is_free(directory)


def test_fault_62_a_directory_that_was_removed_may_have_another_owner(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with RunLock(directory, print) as lock, RunLock(directory, print) as other:
        lock.acquire()
        shutil.rmtree(directory)
        directory.mkdir()
        other.acquire()
        with pytest.raises(UserError, match="in use by another job"):
            lock.check()

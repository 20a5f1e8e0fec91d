"""One job per run directory. Holders are processes of their own: a kernel's lock does not keep its own process out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tlt.errors import UserError
from volo.record import run_lock
from volo.record.run_lock import FILE, RunLock

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import os, sys, time
from pathlib import Path
from volo.record.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), print, heartbeat=0.05)
lock.acquire()
if os.fork() == 0:  # as a data worker, which may outlive its parent for seconds
    time.sleep(5)
    os._exit(0)
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `tmp_path` until it reads a line."""
    environment = {**os.environ, "SLURM_JOB_ID": "4711", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()


def take(directory: Path, **kwargs: Any) -> list[str]:
    """Take the lock and give it back; return what was told."""
    told: list[str] = []
    with RunLock(directory, told.append, **{"heartbeat": 0.02, "stale": 0.3} | kwargs) as lock:
        lock.acquire()
        lock.acquire()  # once more changes nothing
    return told


def no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_fault_19_the_second_job_is_told_who_holds_the_directory_until_it_is_free(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"in use by process {holder.pid} on .*, Slurm job 4711 .since .*--experiment"
    with pytest.raises(UserError, match=told):
        take(tmp_path)
    with monkeypatch.context() as patch:
        no_kernel_locks(patch)
        with pytest.raises(UserError, match=told):
            take(tmp_path)
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert take(tmp_path) == [] and (tmp_path / FILE).read_bytes() == b""


@pytest.mark.parametrize("kernel_locks", [True, False])
def test_fault_19_the_lock_of_a_killed_job_is_broken_at_once_though_its_data_worker_lives(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, kernel_locks: bool
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    if not kernel_locks:
        no_kernel_locks(monkeypatch)
    (told,) = take(tmp_path, stale=3600)
    assert told.startswith(f"broke the lock that a dead job left: process {holder.pid} on ")


def leave_lock_of_elsewhere(directory: Path, **fields: Any) -> dict[str, Any]:
    left = {"host": "node7", "pid": 12, "boot": "elsewhere", "token": "t", "beat": 5, **fields}
    (directory / FILE).write_text(json.dumps(left))
    return left


def test_a_job_on_another_machine_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave_lock_of_elsewhere(tmp_path)
    watching, broke = take(tmp_path)
    assert "watching for 0.3 s whether process 12 on node7" in watching and "process 12 on node7" in broke

    beats = iter(range(6, 999))
    leave_lock_of_elsewhere(tmp_path)
    monkeypatch.setattr(run_lock, "_read", lambda file: left | {"beat": next(beats)})
    with pytest.raises(UserError, match="in use by process 12 on node7"):
        take(tmp_path, stale=3600)


def test_a_job_that_slept_too_long_notices_that_it_was_taken_over(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, print, heartbeat=0.01)
    lock.acquire()
    lock.check()
    other = leave_lock_of_elsewhere(tmp_path, host="node8")
    lock._thread.join()
    with pytest.raises(UserError, match="process 12 on node8 .* has taken"):
        lock.check()
    lock.release()
    assert json.loads((tmp_path / FILE).read_text()) == other


@pytest.mark.parametrize("files_only", [True, False])  # a file server keeps the directory of an open file
def test_fault_62_a_directory_that_was_removed_is_made_anew_and_held(tmp_path: Path, files_only: bool) -> None:
    directory, told = tmp_path / "run", list[str]()
    directory.mkdir()
    with RunLock(directory, told.append, heartbeat=0.01) as lock:
        lock.acquire()
        (directory / FILE).unlink()
        if not files_only:
            directory.rmdir()
        lock.check()
        lock.check()
        held = json.loads((directory / FILE).read_text())
        assert held["pid"] == os.getpid()
        assert told == [f"warning: {directory} was removed while this run goes on: made anew, without what it held"]
        wait_until(lambda: json.loads((directory / FILE).read_text())["beat"] > held["beat"] + 1)
    assert (directory / FILE).read_bytes() == b""


def test_fault_62_a_directory_that_was_removed_may_have_another_owner(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with RunLock(directory, print, stale=0.1) as lock:
        lock.acquire()
        (directory / FILE).unlink()
        other = leave_lock_of_elsewhere(directory)
        with pytest.raises(UserError, match="in use by process 12 on node7"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_lock, "_read", lambda file: other | {"beat": time.monotonic()})
            lock.check()


def test_where_nothing_can_be_made_the_save_tells_it(tmp_path: Path) -> None:
    directory = tmp_path / "gone" / "run"
    directory.mkdir(parents=True)
    with RunLock(directory, print) as lock:
        lock.acquire()
        shutil.rmtree(tmp_path / "gone")
        lock.check()
    assert not directory.exists()


@pytest.mark.parametrize("content", ["{", "[]", "x" * 5000, "\0" * 10])
def test_a_damaged_lock_is_watched_or_free(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    told = take(tmp_path)
    assert len(told) == (0 if "\0" in content else 2)


def test_the_heartbeat_moves(tmp_path: Path) -> None:
    with RunLock(tmp_path, print, heartbeat=0.01) as lock:
        lock.acquire()
        while json.loads((tmp_path / FILE).read_text())["beat"] < 3:
            pass

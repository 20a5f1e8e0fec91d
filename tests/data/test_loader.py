"""Loaders: the same batches for any number of workers, each image once, and faults reported in one line."""

import errno
import gc
import multiprocessing
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import LIMIT, wait_until
from tlt.api import Loader
from tlt.data import loader as loading
from tlt.data.augment.plan import AugmentConfig
from tlt.data.backends.decode import Encoded
from tlt.data.backends.synthetic import SyntheticBackend, SyntheticLabels, synthetic_folder
from tlt.data.batch import Batch, IndexStream, SkipCounter, Skipped
from tlt.errors import UserError, WorkerDied
from tlt.io import jobs

SYNTHETIC = synthetic_folder(26, 4)


def loader(workers: int = 0, backend: SyntheticBackend | None = None, **options: Any) -> Loader:
    labels = SyntheticLabels(SYNTHETIC, (3, 4, 4))
    options = {"micro_batches": 2, "workers": workers, "backend": backend or SyntheticBackend((40, 50)), **options}
    return Loader(SYNTHETIC, labels, AugmentConfig((16, 16)), 4, 5, **options)


def refusal(batches: Iterable[object]) -> str:
    """The message of the UserError that ends the batches. Worker processes in what pytest.raises keeps, a cycle, would
    take 5 s each to end."""
    try:
        for _ in batches:
            pass
    except UserError as error:
        return str(error)
    return "nothing was refused"


def same(first: Iterable[Batch], second: Iterable[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    tensors = [pair for one, other in pairs for pair in zip(one.tensors(), other.tensors(), strict=True)]
    return bool(pairs) and all(one.key == other.key for one, other in pairs) and all(torch.equal(*t) for t in tensors)


class Threaded(SyntheticBackend):
    """A backend that can't be shared with other processes, as DALI's."""

    has_threads = True

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


KINDS: dict[str, dict[str, Any]] = {
    "new workers": {},
    "kept workers": {"persistent_workers": True},
    "one thread": {"backend": Threaded((40, 50))},
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs
@pytest.mark.parametrize(("kind", "workers"), [("new workers", 1), ("kept workers", 3), ("one thread", 2)])
def test_workers_change_nothing(kind, workers):
    stream = IndexStream(len(SYNTHETIC), 8, seed=5, micro_batches=2)
    alone, several = loader(), loader(workers, **KINDS[kind])
    states = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    for epoch, start in ((0, 0), (1, 2), (2, 0)):
        keys = [batch.key for batch in alone.epoch(epoch, start)]
        updates = stream.epoch(epoch, start)
        expected = [(tuple(cut.tolist()), cut is up[-1], sum(map(len, up))) for up in updates for cut in up]
        assert [(key.indices, key.last, key.update_samples) for key in keys] == expected
        assert same(alone.epoch(epoch, start), several.epoch(epoch, start))
    # No global generator moved.
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state(legacy=False)) == states[1] and random.getstate() == states[2]


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_left_early_leaves_no_worker(kind):
    before = set(multiprocessing.active_children())
    training = loader(2, **KINDS[kind])
    for number, _ in enumerate(training.epoch(0)):
        if number == 2:
            break
    assert same(training.epoch(1), loader().epoch(1))
    del training
    assert set(multiprocessing.active_children()) <= before


def test_skip_limit_and_lines():
    assert [SkipCounter(n).allowed for n in (5, 20_000, 1_281_167)] == [10, 20, 100]
    assert SkipCounter(5, limit=0).allowed == 0
    counter = SkipCounter(1000)
    counter.record([Skipped("a\n", "empty file"), Skipped("a\n", "empty file")])
    assert counter.take_lines() == ["left out a\\n: empty file"] and counter.take_lines() == []
    counter.record([Skipped("a\n", "empty file")])
    assert counter.take_lines() == [] and len(counter.reasons) == 1


class Hostile(SyntheticBackend):
    """Hangs, kills its process or fails, at one image."""

    def __init__(self, fault: str, has_threads: bool = False) -> None:
        super().__init__((40, 50))
        self.fault, self.has_threads = fault, has_threads

    def open(self, path: str, data: bytearray | None = None) -> Encoded:
        if path.endswith("00000013"):
            if self.fault == "hang":
                time.sleep(2 * LIMIT)
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "memory":
                raise MemoryError
            if self.fault == "shared memory":
                raise RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)")
            raise UserError("label 13.pt is damaged: make it again")
        return super().open(path, data)


@pytest.mark.parametrize(("fault", "kept"), [("die", 0), ("die", 1), ("memory", 0), ("shared memory", 0)])
def test_fault_22_dead_worker_costs_no_timeout(fault, kept):
    reported = refusal(loader(2, Hostile(fault), timeout=LIMIT, persistent_workers=kept).epoch(0))
    why = "a data worker was killed by SIGKILL: .*memory;" if fault == "die" else ".*no memory left .*:"
    assert re.fullmatch(f"{why} lower --workers.*", reported), reported
    assert WorkerDied.exit_code == 5  # which MAX_RESTARTS starts again


def test_fault_22_worker_that_never_begins_is_exit_code_5(monkeypatch):
    """As one does whose fork waits for a lock of a thread that stayed behind."""
    real = loading._begin_worker
    monkeypatch.setattr(loading, "_begin_worker", lambda number: time.sleep(2 * LIMIT) if number else real(number))
    with pytest.raises(WorkerDied, match=r"^no batch after 2 s \(--loader-timeout\), though no file is being read: .*"):
        list(loader(2, timeout=2).epoch(0))


def test_worker_takes_no_lock_that_a_kill_leaves_held(monkeypatch):
    """torch's main process would wait for it for ever."""
    monkeypatch.setattr(multiprocessing.synchronize.Event, "is_set", lambda _: os.getpid() == owner or os._exit(3))
    owner = os.getpid()
    assert len(list(loader(1).epoch(0))) == 7


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread that has ended."""
    results = list[Any]()
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(LIMIT)
    time.sleep(0.2)  # what ends with that thread has ended
    return results.pop()


def test_processes_live_longer_than_the_thread_that_began_them():
    kept = loader(1, persistent_workers=True)
    assert in_a_thread(lambda: same(kept.epoch(0), loader().epoch(0)))
    assert same(kept.epoch(1), loader().epoch(1))
    workers = {*multiprocessing.active_children()}
    pairs = zip(loader().epoch(2), old := kept.epoch(2), strict=False)  # which asks `old` for no end
    assert all(torch.equal(one.images, other.images) for one, other in pairs)
    batches = [next(new := kept.epoch(3))]
    assert next(old, None) is None and same([*batches, *new], loader().epoch(3))
    assert {*multiprocessing.active_children()} == workers != set()
    batches, expected = loader(2).epoch(2), loader().epoch(2)
    assert in_a_thread(lambda: same([next(batches)], [next(expected)])) and same(batches, expected)
    numbers = jobs.in_processes(slowly, None, range(5), 2, "counting")
    assert [in_a_thread(lambda: next(numbers)), *numbers] == [0, 1, 2, 3, 4]


def slowly(job: None, number: int) -> int:
    time.sleep(0.2)
    return number


def test_tmpdir_too_long_for_sockets_is_refused_first(tmp_path, monkeypatch):
    """Python 3.14 may take another folder."""
    (long := tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    assert refusal(loader(1, timeout=5).epoch(0)).startswith(("data workers can't hand over", "nothing was refused"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("state", ["hangs", "has not begun"])
def test_no_worker_outlives_a_killed_main_process(state, monkeypatch):
    reads, writes = os.pipe()

    def begin() -> None:
        if state == "hangs":
            jobs.begin_process()
        os.write(writes, f"{os.getpid():8d}".encode())
        time.sleep(0 if state == "hangs" else LIMIT)

    monkeypatch.setattr(loading, "begin_process", begin)
    if not (main := os.fork()):
        try:
            list(loader(2, Hostile("hang")).epoch(0))
        finally:
            os._exit(1)
    os.close(writes)
    workers = list[int]()
    for _ in range(2):
        assert select.select([reads], [], [], LIMIT)[0]
        workers.append(int(os.read(reads, 8)))
    time.sleep(0.3 if state == "hangs" else 0)
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    wait_until(lambda: not any(map(alive, workers)))


def test_shared_memory_is_for_workers_alone(monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    expected = [*loader().epoch(0)]
    monkeypatch.setattr(torch.Tensor, "share_memory_", lambda tensor: refused())
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refused)
    assert same(loader().epoch(0), expected) and list(jobs.in_processes(slowly, None, range(2), 1, "")) == [0, 1]
    assert refusal(loader(1).epoch(0)).startswith("data workers can't be started, or do not answer ([Errno 30] Read-")
    with pytest.raises(UserError, match=r"reading: no processes \(Read-only .*\): make room in /dev/shm"):
        list(jobs.in_processes(slowly, None, range(2), 2, "reading"))


def alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


class Left:
    """Something in a cycle, which tells where it is collected."""

    def __init__(self, file: Path) -> None:
        self.itself, self.file, self.owner = self, file, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            self.file.touch()


def collect(*_: object) -> None:
    """What the interpreter does, anywhere."""
    if gc.isenabled():
        gc.collect()


class Collecting(SyntheticBackend):
    def open(self, path: str, data: bytearray | None = None) -> Encoded:
        assert gc.isenabled()
        gc.collect()
        return super().open(path, data)


def test_process_collects_no_garbage_of_its_parent(tmp_path, monkeypatch):
    begin = jobs._begin
    monkeypatch.setattr(torch, "set_num_threads", collect)  # with which a worker of torch begins
    monkeypatch.setattr(jobs, "_begin", lambda *start: collect() or begin(*start))
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # not in this process
    try:
        Left(tmp_path / "collected")
        list(loader(1, Collecting((40, 50))).epoch(0))
        list(jobs.in_processes(collect, None, range(2), 2, ""))
    finally:
        gc.set_threshold(*thresholds)
    assert not (tmp_path / "collected").exists()


HANGS = """
import os, sys
from tests.data.test_loader import loader, refusal, Hostile
from tlt.data import loader as loading
loading._JOIN_S = 0.5
for has_threads in (False, True):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    print(refusal(loader(2, Hostile("hang", has_threads), timeout=2.0).epoch(0)))
    batches = loader(2, Hostile("hang", has_threads)).epoch(0)
    next(batches)
    sys.exit(print("one"))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_fault_23_hung_storage_names_the_file_and_ends():
    """One whose backend has threads, too."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LIMIT)
    line = r"no batch after 2 s \(--loader-timeout\): reading .*/00000013 has taken \d+ s; .*\none\n"
    assert (done.returncode, done.stderr) == (0, "") and re.fullmatch(line * 2, done.stdout), done.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_come_up_where_the_batch_is_waited_for(workers):
    assert refusal(loader(workers, Hostile("report")).epoch(0)) == "label 13.pt is damaged: make it again"
    for backend in (None, Threaded()):
        training = loader(workers, backend)
        training.dataset.load = lambda key: 1 / 0  # type: ignore[method-assign,assignment]
        with pytest.raises(ZeroDivisionError):
            list(training.epoch(0))


def test_fault_58_no_workers_takes_every_option():
    assert len(list(loader(0, persistent_workers=True, pin_memory=True, prefetch=True, timeout=5.0).epoch(0))) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["new workers", "one thread"])
def test_prefetching_on_cuda_neither_changes_waits_nor_leaks(kind):
    plain = loader(2, device="cuda", prefetch=False, **KINDS[kind])
    ahead = loader(2, device="cuda", prefetch=True, pin_memory=True, **KINDS[kind])
    assert same(plain.epoch(0), ahead.epoch(0))
    for ours, host in zip(ahead.epoch(1), loader().epoch(1), strict=True):
        assert ours.images.is_cuda and (ours.images.cpu() - host.images).abs().float().quantile(0.99) < 0.1
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(ahead.epoch(1))) == 7 and torch.cuda.memory_reserved() == reserved
    finally:
        torch.cuda.set_sync_debug_mode("default")

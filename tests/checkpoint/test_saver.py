"""Saving while training goes on, and what becomes of a save that fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import volo.checkpoint.checkpoint as checkpoint_module
import volo.checkpoint.saver as module
from tests.train.small_run import build, names, payload_of, resumed, same, tensors, train
from tlt.io.weights import read_checkpoint
from volo.checkpoint.checkpoint import CheckpointDir, RankedCheckpoint
from volo.checkpoint.checkpoint_file import NotWrittenError, save_checkpoint
from volo.checkpoint.saver import SavePolicy, Saver, host_copy
from volo.checkpoint.state import TrainState


class Told:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def event(self, kind: Any, **fields: Any) -> None:
        self.events.append((kind, fields))

    def sync(self) -> None:
        pass

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class Clock:
    """What the saver has in place of the module `time`."""

    now = 0.0
    sleep = staticmethod(lambda _: None)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "time", clock := Clock())
    return clock


class Disk:
    """Stands between the saver and the file system: full, read-only or slow, as a test wishes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.open = threading.Event()
        self.open.set()
        self.writes = 0
        monkeypatch.setattr(checkpoint_module, "save_checkpoint", self._save)
        monkeypatch.setattr(os, "fsync", self._fsync)
        self._real_fsync = os.fsync

    def _save(self, path: Path, payload: dict[str, Any]) -> None:
        self.writes += 1
        assert self.open.wait(60)
        save_checkpoint(path, payload)

    def _fsync(self, descriptor: int) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def saver_of(state: TrainState, directory: Path, **policy: Any) -> tuple[Saver, Told]:
    told = Told()
    return Saver(state, CheckpointDir(directory, keep=2), told, SavePolicy(**policy)), told


def after_epoch(saver: Saver, top1: float) -> RankedCheckpoint | None:
    saver.state.scores[saver.state.epoch - 1] = {"top1": top1}
    return saver.after_epoch()


def ended(saver: Saver) -> None:
    """Let the write that is under way end, and let the training loop notice."""
    assert saver._thread is not None
    saver._thread.join(60)
    saver._poll()


@pytest.mark.parametrize("synchronous", [False, True])
def test_training_goes_on_and_the_file_holds_what_was(tmp_path: Path, disk: Disk, synchronous: bool) -> None:
    state = build()
    train(state)
    saver, told = saver_of(state, tmp_path, synchronous=synchronous)
    if not synchronous:
        disk.open.clear()
    after_epoch(saver, 50.0)
    assert ("last.pth.tar" in names(tmp_path)) == synchronous
    expected = payload_of(state)
    train(state)
    disk.open.set()
    saver.finish()
    written = read_checkpoint(tmp_path / "last.pth.tar")
    assert all(map(torch.equal, tensors(expected), tensors(written))) and written["update"] == 4
    assert not torch.equal(written["state_dict"]["0.weight"], state.model.state_dict()["0.weight"])
    assert told.kinds == ["checkpoint"] and told.events[0][1]["update"] == 4


def test_the_copy_keeps_strides_and_types() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    copied, _ = host_copy({"a": weight, "b": {"c": weight}, "betas": (0.9, 0.999), "empty": torch.zeros(0)})
    kept = weight.clone()
    weight.add_(1)
    assert torch.equal(copied["a"], kept) and torch.equal(copied["b"]["c"], kept) and copied["betas"] == (0.9, 0.999)
    assert copied["a"].stride() == weight.stride() and copied["empty"].shape == (0,)


def test_intervals_by_updates_and_minutes_and_a_save_that_is_still_under_way(
    tmp_path: Path, disk: Disk, clock: Clock
) -> None:
    state = build(updates_per_epoch=100)
    saver, told = saver_of(state, tmp_path, every_updates=3, every_minutes=2.0, check_interval=2)
    saved = []
    for update in range(1, 9):
        state.update, clock.now = update, {4: 119.0, 5: 190.0}.get(update, clock.now)
        before = disk.writes
        saver.after_update()
        if disk.writes > before or saver._thread is not None:
            saved.append(update)
            ended(saver)
        clock.now += update in (5, 7)
    # 3 and 6 by count; the clock is looked at after even updates, and runs from the save before.
    assert saved == [3, 6] and told.kinds == ["checkpoint"] * 2
    clock.now += 120
    saver.after_update()
    ended(saver)
    assert told.events[-1][1]["reason"] == "--checkpoint-minutes"

    disk.open.clear()
    state.update = 9
    saver.after_update()
    state.update = 12
    saver.after_update()
    assert told.kinds[-1] == "checkpoint-skipped" and "update 12 is not saved" in told.lines[-1]
    disk.open.set()
    saver.save_now("SIGTERM")  # waits for that of update 9
    assert read_checkpoint(tmp_path / "last.pth.tar")["update"] == 12
    saver.save_now("again")
    assert [fields["update"] for kind, fields in told.events if kind == "checkpoint"] == [3, 6, 8, 9, 12]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("synchronous", [False, True])
def test_fault_14_a_failed_save_is_told_borne_and_tried_again(
    tmp_path: Path, disk: Disk, clock: Clock, code: int, synchronous: bool
) -> None:
    state = build()
    saver, told = saver_of(state, tmp_path, synchronous=synchronous)
    train(state)
    after_epoch(saver, 50.0)
    saver.finish()
    before, kept = names(tmp_path), (tmp_path / "last.pth.tar").read_bytes()

    disk.error = code
    train(state)
    after_epoch(saver, 60.0)
    if not synchronous:
        ended(saver)
    assert f"cannot write {tmp_path}/last.pth.tar: {os.strerror(code)}; it needs 0.0 MiB, " in told.lines[-1]
    assert "are free" in told.lines[-1] and "\n" not in told.lines[-1] and told.kinds[-1] == "checkpoint-failed"
    assert names(tmp_path) == before and (tmp_path / "last.pth.tar").read_bytes() == kept
    saver.after_update()
    assert disk.writes == 2  # not yet
    clock.now += 30
    saver.after_update()
    ended(saver)
    clock.now += 59
    saver.after_update()
    assert disk.writes == 3  # the second pause is longer

    disk.error = None
    expected = payload_of(state)
    train(state)
    clock.now += 1
    saver.after_update()
    ended(saver)
    assert told.kinds[-1] == "checkpoint" and told.events[-1][1]["attempts"] == 3
    written = read_checkpoint(tmp_path / "last.pth.tar")
    assert all(map(torch.equal, tensors(expected), tensors(written)))
    assert read_checkpoint(tmp_path / "model_best.pth.tar")["epoch"] == 1


def test_fault_14_a_save_that_failed_gives_way_to_the_next_and_is_not_ranked(tmp_path: Path, disk: Disk) -> None:
    state = build()
    saver, told = saver_of(state, tmp_path)
    for metric, error in ((50.0, None), (99.0, errno.ENOSPC), (60.0, None)):
        train(state)
        disk.error = error
        after_epoch(saver, metric)
        ended(saver)
    assert {n for n in names(tmp_path) if "-" in n} == {"checkpoint-0.pth.tar", "checkpoint-2.pth.tar"}
    assert "epoch 2 could not be saved and is not among the kept checkpoints" in told.lines[-1]
    again, _, messages = resumed(tmp_path)
    assert same(again, state) and messages == []


def test_fault_14_too_many_failed_saves_end_the_run_with_exit_code_4(tmp_path: Path, disk: Disk) -> None:
    state = build()
    saver, _ = saver_of(state, tmp_path, max_failed=2)
    disk.error = errno.ENOSPC
    for _ in range(2):
        train(state)
        after_epoch(saver, 1.0)
        ended(saver)
    train(state)
    after_epoch(saver, 1.0)
    with pytest.raises(
        NotWrittenError, match="3 saves in a row have failed .--max-failed-saves.*No space left"
    ) as told:
        ended(saver)
    assert told.value.exit_code == 4


def test_fault_14_the_last_save_is_tried_again_and_then_fails_the_run(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = build()
    saver, told = saver_of(state, tmp_path)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        disk.error = None if seconds == 5.0 else errno.EIO

    monkeypatch.setattr(module.time, "sleep", sleep)
    disk.error = errno.EIO
    train(state)
    with saver:
        after_epoch(saver, 1.0)
    assert slept == [1.0, 5.0] and told.kinds[-1] == "checkpoint"
    monkeypatch.setattr(module.time, "sleep", slept.append)
    disk.error = errno.EIO
    train(state)
    with pytest.raises(NotWrittenError, match="Input/output error"), saver:
        after_epoch(saver, 1.0)
    assert slept[2:] == [1.0, 5.0, 30.0]
    with pytest.raises(NotWrittenError):
        saver.save_now("SIGTERM")


def test_other_ranks_only_take_part(tmp_path: Path) -> None:
    state, told, collected = build(), Told(), list[int]()
    state.sums = lambda: {"calls": collected.append(1)}  # type: ignore[func-returns-value]
    saver = Saver(state, None, told, SavePolicy(every_updates=1))
    state.update = 1
    with saver:
        saver.after_update()
        saver.save_now("SIGTERM")
        assert after_epoch(saver, 1.0) is None
    assert len(collected) == 3 and told.events == [] and not list(tmp_path.iterdir())


def test_what_rank_0_has_on_disk_is_not_saved_again_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal right after an epoch: rank 0 saves nothing more, and others that began to would wait for it for ever."""
    state, asked = build(), list[bool]()
    state.sums = lambda: pytest.fail("rank 0 takes no part")
    monkeypatch.setattr(module, "from_primary", lambda own: bool(asked.append(own)))  # type: ignore[func-returns-value]
    Saver(state, None, Told(), SavePolicy()).save_now("SIGTERM")
    assert asked == [True]

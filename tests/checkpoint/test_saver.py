"""Saving while training goes on, and what becomes of a save that fails."""

import errno
import gc
import os
import threading
import weakref
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import volo.checkpoint.checkpoint as checkpoint_module
import volo.checkpoint.saver as module
from tests.train.small_run import build, names, payload_of, resumed, same, tensors, train
from tlt.io.weights import read_checkpoint
from volo.checkpoint.checkpoint import CheckpointDir, NotWrittenError, RankedCheckpoint, save_checkpoint
from volo.checkpoint.saver import SavePolicy, Saver, host_copy
from volo.checkpoint.state import TrainState


class RememberingLogger:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.line, self.sync = self.lines.append, lambda: None

    def event(self, kind: Any, **fields: Any) -> None:
        self.events.append((kind, fields))


class World:
    """The clock that the saver looks at, and the disk that it writes to: full, broken or slow, as a test wishes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 0.0, list[float]()
        self.error: int | None = None
        self.open = threading.Event()
        self.open.set()
        self.writes = 0
        monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(checkpoint_module, "save_checkpoint", self._save)
        monkeypatch.setattr(os, "fsync", self._fsync)
        self.sleep = self.slept.append

    def monotonic(self) -> float:
        return self.now

    def _save(self, path: Path, payload: dict[str, Any]) -> None:
        self.writes += 1
        assert self.open.wait(60)
        save_checkpoint(path, payload)

    def _fsync(self, descriptor: int) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def saver_of(state: TrainState, directory: Path, **policy: Any) -> tuple[Saver, RememberingLogger]:
    logger = RememberingLogger()
    return Saver(state, CheckpointDir(directory, keep=2), logger, SavePolicy(**policy)), logger  # type: ignore[arg-type]


def an_epoch(saver: Saver, top1: float) -> RankedCheckpoint | None:
    train(saver.state)
    saver.state.scores[saver.state.epoch - 1] = {"top1": top1}
    return saver.after_epoch()


def ended(saver: Saver) -> None:
    """Let the write that is under way end, and let the training loop notice."""
    wait([saver._writing], 60)
    saver._look_at_pending()


@pytest.mark.parametrize("synchronous", [False, True])
def test_training_goes_on_and_the_file_holds_what_was(tmp_path, world, synchronous):
    state = build()
    saver, logger = saver_of(state, tmp_path, synchronous=synchronous)
    if not synchronous:
        world.open.clear()
    assert an_epoch(saver, 50.0) == (50.0, 0, "checkpoint-0.pth.tar")
    assert ("last.pth.tar" in names(tmp_path)) == synchronous
    expected = payload_of(state)
    train(state)
    world.open.set()
    saver.finish()
    written = read_checkpoint(tmp_path / "last.pth.tar")
    assert all(map(torch.equal, tensors(expected), tensors(written))) and written["update"] == 4
    assert not torch.equal(written["state_dict"]["0.weight"], state.model.state_dict()["0.weight"])
    assert [(kind, fields["update"]) for kind, fields in logger.events] == [("checkpoint", 4)]


def test_the_copy_keeps_strides_and_types():
    weight = torch.arange(6.0).view(2, 3).t()
    copied, _ = host_copy({"a": weight, "b": {"c": weight}, "betas": (0.9, 0.999), "empty": torch.zeros(0)})
    kept = weight.clone()
    weight.add_(1)
    assert torch.equal(copied["a"], kept) and torch.equal(copied["b"]["c"], kept) and copied["betas"] == (0.9, 0.999)
    assert copied["a"].stride() == weight.stride() and copied["empty"].shape == (0,)


def test_writing_waits_for_the_whole_copy(tmp_path, world, monkeypatch):
    writes_before = list[int]()
    complete = SimpleNamespace(synchronize=lambda: writes_before.append(world.writes))
    monkeypatch.setattr(module, "host_copy", lambda payload: (payload, complete))
    saver, _ = saver_of(build(), tmp_path)
    for epoch in range(2):
        an_epoch(saver, 1.0)
        ended(saver)
        assert writes_before[epoch:] == [epoch]


def test_intervals_count_updates_minutes_and_unfinished_saves(tmp_path, world):
    state = build(updates_per_epoch=100)
    saver, logger = saver_of(state, tmp_path, every_updates=3, every_minutes=2.0, check_interval=2)
    for update, now in ((1, 0), (3, 0), (4, 119), (5, 190), (6, 190), (7, 308), (8, 309), (10, 311)):
        state.update, world.now = update, now
        saver.after_update()
        if saver._writing is not None:
            ended(saver)
    # 3 and 6 by count; the clock is looked at after even updates, and runs from the save before.
    saved = [(fields["update"], fields["reason"]) for _, fields in logger.events]
    assert saved == [(3, "--recovery-interval"), (6, "--recovery-interval"), (10, "--checkpoint-minutes")]

    world.open.clear()
    for state.update in (12, 15):
        saver.after_update()
    assert logger.events[-1][0] == "checkpoint-skipped" and "update 15 is not saved" in logger.lines[-1]
    world.open.set()
    saver.save_now("SIGTERM")  # waits for that of update 12
    assert read_checkpoint(tmp_path / "last.pth.tar")["update"] == 15
    saver.save_now("again")
    assert [fields["update"] for kind, fields in logger.events if kind == "checkpoint"] == [3, 6, 10, 12, 15]


@pytest.mark.parametrize(("code", "synchronous"), [(errno.ENOSPC, False), (errno.ESTALE, True)])
def test_fault_14_failed_save_is_tried_again(tmp_path, world, code, synchronous):
    state = build()
    saver, logger = saver_of(state, tmp_path, synchronous=synchronous)
    an_epoch(saver, 50.0)
    saver.finish()
    before, kept = names(tmp_path), (tmp_path / "last.pth.tar").read_bytes()
    world.error = code
    an_epoch(saver, 60.0)
    expected = payload_of(state)
    if not synchronous:
        ended(saver)
    assert f"cannot write {tmp_path}/last.pth.tar: {os.strerror(code)}; it needs 0.0 MiB, " in logger.lines[-1]
    assert logger.events[-1][0] == "checkpoint-failed"
    assert names(tmp_path) == before and (tmp_path / "last.pth.tar").read_bytes() == kept
    train(state)
    for seconds, writes in ((0, 2), (30, 3), (59, 3), (1, 4)):  # the second pause is longer
        world.now += seconds
        world.error = code if writes < 4 else None
        saver.after_update()
        if saver._writing is not None:
            ended(saver)
        assert world.writes == writes
    assert logger.events[-1][0] == "checkpoint" and logger.events[-1][1]["attempts"] == 3
    assert all(map(torch.equal, tensors(expected), tensors(read_checkpoint(tmp_path / "last.pth.tar"))))
    assert read_checkpoint(tmp_path / "model_best.pth.tar")["epoch"] == 1


def test_fault_14_failed_save_gives_way_and_is_not_ranked(tmp_path, world):
    state = build()
    saver, logger = saver_of(state, tmp_path)
    for metric, world.error in ((50.0, None), (99.0, errno.ENOSPC), (60.0, None)):
        an_epoch(saver, metric)
        ended(saver)
    assert {n for n in names(tmp_path) if "-" in n} == {"checkpoint-0.pth.tar", "checkpoint-2.pth.tar"}
    assert "epoch 2 could not be saved and is not among the kept checkpoints" in logger.lines[-1]
    again, _, messages = resumed(tmp_path)
    assert same(again, state) and messages == []


def test_failed_save_leaves_no_copy_of_weights(tmp_path, world):
    """The loop has switched the garbage collector off, and a copy is as large as the model."""
    saver, _ = saver_of(build(), tmp_path)
    gc.disable()
    try:
        world.error = errno.ENOSPC
        an_epoch(saver, 1.0)
        ended(saver)
        copy, world.error = weakref.ref(saver._pending.payload["state_dict"]["0.weight"]), None
        an_epoch(saver, 2.0)
        ended(saver)
        assert saver._pending is None and copy() is None
    finally:
        gc.enable()


def test_fault_14_too_many_failed_saves_are_exit_code_4(tmp_path, world):
    saver, _ = saver_of(build(), tmp_path, max_failed=2)
    for world.error in (errno.ENOSPC, None, errno.ENOSPC, errno.ENOSPC):  # those before one that went well don't count
        an_epoch(saver, 1.0)
        ended(saver)
    an_epoch(saver, 1.0)
    with pytest.raises(NotWrittenError, match="3 saves in a row have failed .--max-failed-saves.*No space") as caught:
        ended(saver)
    assert caught.value.exit_code == 4


def test_fault_14_last_save_is_retried_then_fails_the_run(tmp_path, world):
    saver, logger = saver_of(build(), tmp_path)

    def sleep(seconds: float) -> None:
        world.slept.append(seconds)
        world.error = None if len(world.slept) == 2 else errno.EIO

    world.sleep, world.error = sleep, errno.EIO
    with saver:
        an_epoch(saver, 1.0)
    assert world.slept == [1.0, 5.0] and logger.events[-1][0] == "checkpoint"
    world.error = errno.EIO
    with pytest.raises(NotWrittenError, match="Input/output error"), saver:
        an_epoch(saver, 1.0)
    assert world.slept[2:] == [1.0, 5.0, 30.0]


@pytest.mark.parametrize("most", [0, 10])
def test_fault_14_save_of_a_signal_is_retried_as_long(tmp_path, world, most):
    saver, logger = saver_of(build(), tmp_path, max_failed=most)
    assert an_epoch(saver, 1.0) is not None
    train(saver.state)
    world.error, world.sleep = errno.ENOSPC, lambda seconds: setattr(world, "error", None)
    saver.save_now("SIGTERM")
    assert read_checkpoint(tmp_path / "last.pth.tar")["update"] == 8 == saver.saved_at[1]
    assert "the next attempt is in 1 s" in logger.lines[-2] and "training" not in logger.lines[-2]
    train(saver.state)
    world.error, world.sleep = errno.ENOSPC, world.slept.append
    with pytest.raises(NotWrittenError, match="No space"):
        saver.save_now("SIGTERM")
    assert world.slept == [1.0, 5.0, 30.0] and saver.saved_at[1] == 8


def test_other_ranks_take_part_unless_it_is_on_disk(monkeypatch):
    """A signal right after an epoch: rank 0 saves nothing more, and others that began to would wait for it for ever."""
    state, logger, collected = build(), RememberingLogger(), list[int]()
    state.current_progress = lambda: {"calls": collected.append(1)}  # type: ignore[func-returns-value]
    policy, longer = SavePolicy(every_updates=4), list[int]()
    saver = Saver(state, None, logger, policy, on_save=lambda: longer.append(1))  # type: ignore[arg-type]
    with saver:
        assert an_epoch(saver, 1.0) is None
        saver.after_update()
        saver.save_now("SIGTERM")
        assert len(collected) == 3 and logger.events == []
        monkeypatch.setattr(module, "from_primary", lambda own: False)
        saver.save_now("SIGTERM")
    assert len(collected) == 3 and len(longer) == 4  # a hang is looked for later while a save lasts

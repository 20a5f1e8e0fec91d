"""The checkpoints of a run: which are kept, which is the best; what a kill leaves."""

import errno
import os
import random
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.utils import CheckpointSaver

from tests.train.small_run import build, epoch_of, names, resumed, same, save, train
from tlt.errors import NonFiniteError
from tlt.io import files as io_files
from volo.checkpoint.checkpoint import CheckpointDir, NotWrittenError, save_checkpoint
from volo.checkpoint.resume import newest_checkpoint
from volo.checkpoint.state import TrainState


def test_top_k_is_timms(tmp_path):
    """Against timm's saver, random metrics with ties, epochs without a metric, both directions."""
    for trial in range(6):
        generator, decreasing = random.Random(trial), trial % 2 == 0
        ours, theirs = tmp_path / f"ours{trial}", tmp_path / f"timm{trial}"
        theirs.mkdir()
        state = build(ema=False, scaler=False)
        saver = CheckpointSaver(
            state.model, state.optimizer, checkpoint_dir=str(theirs), max_history=3, decreasing=decreasing
        )
        files = CheckpointDir(ours, keep=3, ranked_by="loss" if decreasing else "top1")
        for epoch in range(9):
            metric = None if generator.random() < 0.2 else float(generator.randrange(5))
            state.epoch = epoch + 1
            best = save(files, state, metric)
            assert saver.save_checkpoint(epoch, metric) == ((best.metric, best.epoch) if best else (None, None))
            assert names(ours) == names(theirs)
        if best:
            assert epoch_of(ours / "model_best.pth.tar") == epoch_of(theirs / "model_best.pth.tar") == best.epoch


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_fault_12_nan_is_never_best_not_even_after_resume(tmp_path, bad):
    state, files = build(), CheckpointDir(tmp_path, keep=2)
    train(state)
    assert save(files, state, bad) is None
    assert "model_best.pth.tar" not in names(tmp_path)
    train(state)
    assert save(files, state, 25.0) == (25.0, 1, "checkpoint-1.pth.tar")
    again, files, _ = resumed(tmp_path)
    train(again)
    assert save(files, again, bad) == (25.0, 1, "checkpoint-1.pth.tar")
    train(again)
    assert save(files, again, 20.0) == (25.0, 1, "checkpoint-1.pth.tar")
    assert epoch_of(tmp_path / "model_best.pth.tar") == 1
    assert names(tmp_path) == {"last.pth.tar", "model_best.pth.tar", "checkpoint-1.pth.tar", "checkpoint-3.pth.tar"}


def test_weights_with_nan_are_not_saved(tmp_path):
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    save(files, state, 1.0)
    kept = (tmp_path / "last.pth.tar").read_bytes()
    train(state)
    state.model[3].weight.data[0, 0] = float("inf")  # type: ignore[index, union-attr]
    with pytest.raises(NonFiniteError, match="3.weight holds NaN or infinite values: not saved") as caught:
        save(files, state, 2.0)
    assert caught.value.exit_code == 3
    assert (tmp_path / "last.pth.tar").read_bytes() == kept


def test_names_of_an_epoch_share_a_file_that_later_saves_spare(tmp_path):
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    save(files, state, 1.0)
    last = tmp_path / "last.pth.tar"
    assert last.stat().st_nlink == 3
    train(state)
    save(files, state, 0.5)
    assert last.samefile(tmp_path / "checkpoint-1.pth.tar") and last.stat().st_nlink == 2
    assert (tmp_path / "model_best.pth.tar").samefile(tmp_path / "checkpoint-0.pth.tar")
    state.update += 2
    save(files, state, ranked=False)
    assert last.stat().st_nlink == 1 and epoch_of(tmp_path / "checkpoint-1.pth.tar") == 1
    again, _, _ = resumed(tmp_path)
    assert (again.epoch, again.update, again.scores) == (2, 10, state.scores)


def test_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    state, files = build(), CheckpointDir(tmp_path, keep=1)
    for metric in (1.0, 3.0, 2.0):
        train(state)
        save(files, state, metric)
    assert names(tmp_path) == {"last.pth.tar", "model_best.pth.tar", "checkpoint-1.pth.tar"}
    assert [epoch_of(tmp_path / n) for n in sorted(names(tmp_path))] == [1, 2, 1]


class Killed(BaseException):
    pass


def spied(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """Record every call that changes a directory or syncs; die just before number `stop_at`, leaving all as it is."""
    events: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if stop_at is not None and len(events) >= stop_at:
                raise Killed
            target = args[0]
            if isinstance(target, int):
                target = os.readlink(f"/proc/self/fd/{target}")
            events.append(f"{name} {Path(target).name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("fsync", "replace", "link"):
        wrap(os, name)
    wrap(Path, "unlink")
    return events


def test_fault_02_order_of_syncs_and_renames(tmp_path, monkeypatch):
    events = spied(monkeypatch)
    save_checkpoint(tmp_path / "last.pth.tar", {"x": 1})
    staged = f".staged-{os.getpid()}-last.pth.tar"
    expected = [f"fsync {staged}", f"replace {staged}", f"fsync {tmp_path.name}"]
    assert [e for e in events if not e.startswith("unlink")] == expected


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_unsyncable_folder(number, tmp_path, monkeypatch, capfd):
    """Shared folders of virtual machines and mounts by CIFS and sshfs refuse it. A disk's error is a failure."""
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(io_files, "_told_unsynced", False)
    for name in ("last.pth.tar", "checkpoint-0.pth.tar"):
        with pytest.raises(NotWrittenError) if number == errno.EIO else nullcontext():
            save_checkpoint(tmp_path / name, {"x": 1})
    assert torch.load(tmp_path / "last.pth.tar", weights_only=True)["x"] == 1
    told = capfd.readouterr().err
    assert told.count("can't sync folders") == (number != errno.EIO) and told.count("\n") <= 1


def two_epochs_of_three(directory: Path) -> tuple[TrainState, CheckpointDir]:
    state, files = build(), CheckpointDir(directory, keep=2)
    for metric in (1.0, 2.0):
        train(state)
        save(files, state, metric)
    train(state)
    return state, files


def test_fault_01_killed_before_any_step_of_a_save(tmp_path, monkeypatch):
    straight, files = two_epochs_of_three(tmp_path / "straight")
    save(files, straight, 3.0)
    finished, at = False, 0
    while not finished:
        directory = tmp_path / str(at)
        state, files = two_epochs_of_three(directory)
        with monkeypatch.context() as patch:
            events = spied(patch, stop_at=at)
            try:
                save(files, state, 3.0)
                finished = True  # no step was left to die at
            except Killed:
                pass
        assert "last.pth.tar" in names(directory)
        again, files, messages = resumed(directory)
        assert again.epoch in (2, 3) and messages == []
        if again.epoch == 2:
            train(again)
            save(files, again, 3.0)
        assert names(directory) == names(tmp_path / "straight"), f"killed before step {at} of {events}"
        assert epoch_of(directory / "model_best.pth.tar") == epoch_of(directory / "last.pth.tar") == 2
        assert same(again, straight)
        at += 1
    assert at > 8


def test_fault_01_leftovers_are_never_read_and_removed_at_start(tmp_path):
    state = build(epoch=1, update=4)
    save(CheckpointDir(tmp_path), state, 1.0)
    for name in (".staged-1-last.pth.tar", "tmp.pth.tar", "recovery-9-9.pth.tar", "superseded-checkpoint-9.pth.tar"):
        save_checkpoint(tmp_path / name, state.state_dict() | {"epoch": 9, "update": 99})
    found = newest_checkpoint(tmp_path)
    assert found.path == tmp_path / "last.pth.tar" and found.skipped == []
    CheckpointDir(tmp_path)
    assert ".staged-1-last.pth.tar" not in names(tmp_path)

"""Saving killed at any instant, and on a full disk: nothing is lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.train.small_run import build, epoch_of, names, resumed, same, save, train
from tlt.errors import UserError
from volo.checkpoint.checkpoint import CheckpointDir, save_checkpoint
from volo.checkpoint.resume import find_resume
from volo.checkpoint.state import TrainState


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


def test_fault_02_order_of_syncs_and_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = spied(monkeypatch)
    save_checkpoint(tmp_path / "last.pth.tar", {"x": 1})
    staged = f".staged-{os.getpid()}-last.pth.tar"
    expected = [f"fsync {staged}", f"replace {staged}", f"fsync {tmp_path.name}"]
    assert [e for e in events if not e.startswith("unlink")] == expected


def two_epochs_of_three(directory: Path) -> tuple[TrainState, CheckpointDir]:
    state, files = build(), CheckpointDir(directory, keep=2)
    for metric in (1.0, 2.0):
        train(state)
        save(files, state, metric)
    train(state)
    return state, files


def test_fault_01_killed_before_any_step_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_fault_01_leftovers_are_never_read_and_removed_at_start(tmp_path: Path) -> None:
    state = build(epoch=1, update=4)
    save(CheckpointDir(tmp_path), state, 1.0)
    for name in (".staged-1-last.pth.tar", "tmp.pth.tar", "recovery-9-9.pth.tar", "superseded-checkpoint-9.pth.tar"):
        save_checkpoint(tmp_path / name, state.state_dict() | {"epoch": 9, "update": 99})
    found = find_resume("auto", tmp_path)
    assert found.path == tmp_path / "last.pth.tar" and found.messages == []
    CheckpointDir(tmp_path)
    assert ".staged-1-last.pth.tar" not in names(tmp_path)


def test_fault_14_full_disk(tmp_path: Path) -> None:
    """The system's limit on file sizes gives a real error in the middle of a write."""
    state, files = build(), CheckpointDir(tmp_path)
    train(state)
    save(files, state, 1.0)
    before, kept = names(tmp_path), (tmp_path / "last.pth.tar").read_bytes()
    train(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*last.pth.tar: File too large; it needs 0.0 MiB") as caught:
            save(files, state, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == before and (tmp_path / "last.pth.tar").read_bytes() == kept
    save(files, state, 2.0)  # the next attempt works
    assert names(tmp_path) == before | {"checkpoint-1.pth.tar"}

"""The checkpoints of a run: which are kept, which is the best."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import timm
from packaging.version import Version
from timm.utils import CheckpointSaver

from tests.train.small_run import build, epoch_of, names, resumed, save, train
from tlt.errors import NonFiniteError, UserError
from volo.checkpoint.checkpoint import CheckpointDir


def test_top_k_is_timms(tmp_path: Path) -> None:
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
            without_score = generator.random() < 0.2 and Version(timm.__version__) >= Version("1.0.31")
            metric = None if without_score else float(generator.randrange(5))
            state.epoch = epoch + 1
            best = save(files, state, metric)
            assert saver.save_checkpoint(epoch, metric) == ((best.metric, best.epoch) if best else (None, None))
            assert names(ours) == names(theirs)
        if best:
            assert epoch_of(ours / "model_best.pth.tar") == epoch_of(theirs / "model_best.pth.tar") == best.epoch


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_fault_12_nan_is_never_best_not_even_after_resume(tmp_path: Path, bad: float | None) -> None:
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


def test_weights_with_nan_are_not_saved(tmp_path: Path) -> None:
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


def test_names_of_one_epoch_share_a_file_and_saves_within_one_leave_the_others_alone(tmp_path: Path) -> None:
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


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    state, files = build(), CheckpointDir(tmp_path, keep=1)
    for metric in (1.0, 3.0, 2.0):
        train(state)
        save(files, state, metric)
    assert names(tmp_path) == {"last.pth.tar", "model_best.pth.tar", "checkpoint-1.pth.tar"}
    assert [epoch_of(tmp_path / n) for n in sorted(names(tmp_path))] == [1, 2, 1]


def test_keep_below_one() -> None:
    with pytest.raises(UserError, match="--checkpoint-hist 0"):
        CheckpointDir(Path("x"), keep=0)

"""Which checkpoint a run goes on from."""

import hashlib
import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.small_run import build, epoch_of, names, resumed, save, separate, three_epochs, train
from tlt.data.sources.folder import ImageFolder
from tlt.errors import UserError
from tlt.io.names import Names
from tlt.io.weights import peek_checkpoint
from volo.checkpoint.checkpoint import CheckpointDir, save_checkpoint
from volo.checkpoint.resume import DATA_KEY, check_same_data, fingerprint, newest_checkpoint, verified


def test_fault_03_the_newest_by_number_or_none(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        assert newest_checkpoint(directory) == (None, {}, [])
    for epoch in (9, 10, 2):  # neither order of names nor of times is that of epochs
        state = build(epoch=epoch, update=4 * epoch)
        save_checkpoint(tmp_path / f"checkpoint-{epoch - 1}.pth.tar", state.state_dict())
    assert newest_checkpoint(tmp_path).path == tmp_path / "checkpoint-9.pth.tar"


def flip(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        record = archive.read(next(r for r in archive.infolist() if r.filename.endswith("data/2")))
    at = content.index(record)
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def with_nan(content: bytes) -> bytes:
    payload, file = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
    payload["state_dict"]["0.weight"][0, 0] = float("nan")
    torch.save(payload, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: c[: len(c) // 2], "truncated"),
        (flip, "does not match its checksum"),
        (with_nan, "0.weight holds 1 NaN"),
    ],
)
def test_fault_04_05_06_auto_skips_damaged_files_and_says_so(tmp_path, damage, reason):
    three_epochs(tmp_path)
    for name in ("last.pth.tar", "checkpoint-2.pth.tar"):
        separate(tmp_path / name, damage((tmp_path / name).read_bytes()))
    state, files, messages = resumed(tmp_path)
    assert state.epoch == 2
    for name in ("last.pth.tar", "checkpoint-2.pth.tar"):
        assert any(m.startswith(f"skipped: {tmp_path / name}") and reason in m for m in messages)
    assert names(tmp_path) >= {"superseded-last.pth.tar", "superseded-checkpoint-2.pth.tar", "checkpoint-1.pth.tar"}
    train(state)
    save(files, state, 2.0)
    assert newest_checkpoint(tmp_path).path == tmp_path / "last.pth.tar"


def test_fault_04_16_explicit_path_has_to_be_good(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        verified(tmp_path / "x.pth.tar")
    three_epochs(tmp_path)
    path = tmp_path / "last.pth.tar"
    separate(path, flip(path.read_bytes()))
    with pytest.raises(UserError, match="checksum"):
        verified(path)


def test_going_back_to_an_older_epoch(tmp_path):
    three_epochs(tmp_path)
    state, files, messages = resumed(tmp_path, tmp_path / "checkpoint-0.pth.tar")
    assert state.epoch == 1 and "checkpoint-1.pth.tar" not in names(tmp_path)
    assert "checkpoint-1.pth.tar, checkpoint-2.pth.tar, last.pth.tar" in messages[0]
    assert epoch_of(tmp_path / "superseded-last.pth.tar") == 2
    # Killed now, the run goes on from what was chosen.
    assert peek_checkpoint(newest_checkpoint(tmp_path).path)["epoch"] == 0  # type: ignore[arg-type]
    assert epoch_of(tmp_path / "model_best.pth.tar") == 0
    train(state)
    assert save(files, state, 0.5) == (1.0, 0, "checkpoint-0.pth.tar")
    assert newest_checkpoint(tmp_path).path == tmp_path / "last.pth.tar"


FOUND = [{"top1": 90.0, "loss": 0.2, "top1_ema": 10.0}, {"top1": 70.0, "loss": 0.1, "top1_ema": 30.0}]


@pytest.mark.parametrize(("before", "after", "best"), [
    ("loss", "top1", 0), ("top1", "loss", 1), ("top1", "top1_ema", 1), ("top1", "top5", None),
])  # fmt: skip
def test_fault_12_other_ranking_compares_alike(tmp_path, before, after, best):
    state, files = build(), CheckpointDir(tmp_path, ranked_by=before)
    for scores in FOUND:
        train(state)
        state.scores[state.epoch - 1] = scores
        save(files, state)
    again, resume = build(seed=1), newest_checkpoint(tmp_path)
    again.load(resume.checkpoint, resume.path)  # type: ignore[arg-type]
    files = CheckpointDir(tmp_path, ranked_by=after)
    files.restore(again, resume.path)  # type: ignore[arg-type]
    if best is not None:
        assert epoch_of(tmp_path / "model_best.pth.tar") == best
    train(again)
    bad = 1000.0 if after == "loss" else 0.5
    first = save(files, again, bad)
    assert (first.metric, first.epoch) == ((bad, 2) if best is None else (FOUND[best][after], best))
    assert epoch_of(tmp_path / "model_best.pth.tar") == first.epoch


def test_resuming_into_another_directory(tmp_path):
    three_epochs(tmp_path / "old")
    before = names(tmp_path / "old")
    state = build()
    trunk = tmp_path / "old" / "last.pth.tar"
    state.load(verified(trunk), trunk)
    files = CheckpointDir(tmp_path / "new")
    train(state)
    save(files, state, 1.5)
    assert names(tmp_path / "new") == {"last.pth.tar", "model_best.pth.tar", "checkpoint-3.pth.tar"}
    assert names(tmp_path / "old") == before


def folder(paths: list[str], classes: list[int], names: list[str]) -> ImageFolder:
    return ImageFolder("/data/train", paths, np.array(classes), names)


def test_a_fingerprint_is_the_sha256_of_a_line_for_each_image():
    paths, classes = ["a/1.jpg", "b/1.jpg", "a/\udcff.jpg", "a/2.jpg", "b/2.jpg"], [0, 11, 0, 0, 11]
    lines = b"a\0b" + b"".join(b"\n%s\0%d" % pair for pair in zip(map(os.fsencode, paths), classes, strict=True))
    for listed in (paths, Names(paths)):
        images = ImageFolder("/data", listed, np.array(classes), ["a", "b"])
        assert fingerprint(images, None)["images"] == hashlib.sha256(lines).hexdigest()


def test_other_data_are_refused_unless_they_are_allowed():
    images = folder(["a/1.jpg", "b/1.jpg", "b/\udcff.jpg"], [0, 1, 1], ["a", "b"])
    mine = fingerprint(images, None)
    saved = {DATA_KEY: mine}
    assert check_same_data(saved, fingerprint(replace(images, root="/elsewhere"), None), "x", False) == []
    assert check_same_data({}, mine, "x", False) == []
    for other in (
        folder(["a/1.jpg", "b/1.jpg"], [0, 1], ["a", "b"]),
        folder(["a/1.jpg", "b/2.jpg", "b/\udcff.jpg"], [0, 1, 1], ["a", "b"]),
        folder(images.paths, [0, 0, 1], ["a", "b"]),
        folder(images.paths, [0, 1, 1], ["a", "c"]),
    ):
        now = fingerprint(other, None)
        with pytest.raises(UserError, match="the training images .* are not those that x was .*--allow-changed-data"):
            check_same_data(saved, now, "x", False)
        assert "warning: the training images" in check_same_data(saved, now, "x", True)[0]
    now = mine | {"labels": "other"}
    with pytest.raises(UserError, match="^the token labels are not those"):
        check_same_data(saved, now, Path("x"), False)
